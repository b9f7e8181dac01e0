"""Numbers and model output as text that is safe and short enough for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rlhf_pipeline.errors import count, plain


def one_line(text: str, width: int) -> str:
    r"""Return `text` on one line of at most `width` characters, omitting the middle if it is too long.

    >>> one_line("a\nb", 10)
    'a\\nb'
    >>> one_line("abcdefghij", 7)
    'ab...ij'
    """
    line = plain(text).replace("\n", "\\n")
    if len(line) <= width:
        return line
    head = max((width - 3 + 1) // 2, 0)
    tail = max(width - 3 - head, 0)
    return f"{line[:head]}...{line[len(line) - tail :]}"


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """Yield rows of a table with its columns aligned, the first `left` and the last to the left.

    >>> list(aligned([("run", "step"), ("a", "12")]))
    ['run  step', 'a    12']
    """
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = [
            text.ljust(width) if at < left else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join([*cells[:-1], row[-1]])


def duration(seconds: float) -> str:
    """Return a time span as text.

    >>> duration(3.21), duration(21.4), duration(75), duration(7300)
    ('3.2 s', '21 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def number(value: float | None, digits: int = 2) -> str:
    """Return a metric's value in short form: a dash for None, `k` for thousands, powers of ten if small or large.

    >>> number(None), number(0.98), number(0.00012), number(21450.0), number(3.0), number(-2e9)
    ('-', '0.98', '1.2e-04', '21.4k', '3.00', '-2.0e+09')
    """
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1e8:
        return f"{value:.1e}"
    if size >= 10_000:
        return f"{value / 1000:.1f}k"
    if size >= 100:
        return f"{value:.0f}"
    if size and size < 0.5 * 10**-digits:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def evaluation_words(figures: Mapping[str, float | int | None]) -> str:
    """Return the figures of an evaluation on one line.

    >>> evaluation_words({"evaluation/reward": 0.5, "evaluation/reward/acc": 1.0, "evaluation/completion_length": 9.0})
    'reward 0.50  acc 1.00  length 9.00'
    """
    by_name = {name.removeprefix("evaluation/"): figure for name, figure in figures.items()}
    low, high = by_name.get("reward_low"), by_name.get("reward_high")
    interval = f" ({number(low)} to {number(high)})" if low is not None and high is not None else ""
    passes = [f"{name} {number(rate)}" for name, rate in by_name.items() if name.startswith("pass@")]
    failed = [f"{count(int(by_name['failed'] or 0), 'completion')} without a reward"] if by_name.get("failed") else []
    named_rewards = [f"{name[7:]} {number(reward)}" for name, reward in by_name.items() if name.startswith("reward/")]
    parts = [f"reward {number(by_name['reward'])}{interval}", *passes, *named_rewards]
    parts.append(f"length {number(by_name['completion_length'])}")
    return "  ".join([*parts, *failed])
