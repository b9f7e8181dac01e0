"""The live display of a run in a terminal: curve, figures, processes and newest groups, drawn in place.

Only this module imports rich, and only where there is a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, TextIO

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlhf_pipeline.errors import PipelineError, plain
from rlhf_pipeline.report.alarms import SILENT_S
from rlhf_pipeline.report.formatting import duration, number, one_line
from rlhf_pipeline.report.query import Answer, View
from rlhf_pipeline.run.address import Address
from trajectory_store import StoreError

SMALL: Final = {
    "entropy": "entropy",
    "kl_k1": "kl to ref",
    "clip_fraction": "clipped",
    "grad_norm": "grad norm",
    "ess": "ess",
    "tokens_per_s": "tokens/s",
}
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
_LEVELS = "▁▂▃▄▅▆▇█"
_MARKS = 16
_POINTS = 400


class Screen:
    """The frame of a run, drawn in place; messages are printed above it, and the last frame stays."""

    def __init__(
        self, path: Address, out: TextIO, *, clock: Callable[[], float] = time.time, console: Console | None = None
    ) -> None:
        self._view = View(path)
        self._clock = clock
        console = console or Console(file=out, highlight=False)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def draw(self) -> None:
        """Draw the current state of the run; if the run cannot be read, keep the frame, as a later call may succeed."""
        console = self._live.console
        with suppress(PipelineError, StoreError):
            parts = list(frame(self._view, console.width, console.height, self._clock()))
            self._live.update(Group(*parts), refresh=True)

    def echo(self, text: str) -> None:
        """Print a line above the frame."""
        self._live.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Leave the frame unchanged, with the cursor below it."""
        self._live.stop()
        self._view.close()


def frame(view: View, width: int, height: int, now: float) -> Iterator[RenderableType]:
    """Yield a frame of a run that fits a terminal."""
    about, curves = view.about(), view.metrics(points=_POINTS)
    step, of = about["step"] or 0, about["of"] or 0
    yield _head(about, curves, step, of)
    bar = Table.grid(expand=True)
    bar.add_row(ProgressBar(max(of, 1), min(step, max(of, 1)), width=width))
    yield bar
    tall = 4 if height < 30 else 10
    yield from _reward(curves["values"].get("task_reward", ()), width, tall)
    columns = 3 if width >= 140 else 2
    yield _figures(curves["values"], width, columns)
    left = height - 3 - tall - len(SMALL) // columns
    processes = about["processes"][: max(left // 3, 2)]
    if processes:
        yield _processes(processes, now)
        left -= len(processes) + 1
    if about["stored"] and left > 1:
        yield _groups(view.groups(newest=left - 1), width)


def braille(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[str]:
    """Return a curve as lines of braille, 2 x 4 dots a character, each value joined to the next.

    >>> braille([0.0, 1.0], 2, 1, 0.0, 1.0)
    ['⡠⠊']
    """
    spread = np.interp(np.linspace(0, len(values) - 1, width * 2), np.arange(len(values)), values)
    share = (spread - low) / (high - low) if high > low else np.full(len(spread), 0.5)
    at = np.clip(share * (height * 4 - 1), 0, height * 4 - 1).round().astype(int).tolist()
    cells = [[0x2800] * width for _ in range(height)]
    for x, y in enumerate(at):
        before = at[max(x - 1, 0)]
        rising = range(before + 1, y + 1) if before < y else range(y, before) if before > y else (y,)
        for dot in rising:
            cells[height - 1 - dot // 4][x // 2] |= _DOTS[x % 2][dot % 4]
    return ["".join(map(chr, line)) for line in cells]


def _head(about: Answer, curves: Answer, step: int, of: int) -> RenderableType:
    left = f"  step {step:,}/{of:,}  " if of else f"  step {step:,}  "
    rest = f"{about['stored']:,} stored" + (f", {about['failed']:,} failed" if about["failed"] else "")
    steps, times = curves["step"][-_POINTS // 4 :], curves["time"][-_POINTS // 4 :]
    if of and step >= of:
        rest += "  done"
    elif len(steps) > 1 and None not in (times[0], times[-1]) and of:
        rest += f"  eta {duration((times[-1] - times[0]) / (steps[-1] - steps[0]) * (of - step))}"
    head = Table.grid(expand=True)
    head.add_column(no_wrap=True, overflow="ellipsis")
    head.add_column(justify="right", no_wrap=True)
    reward = f"reward {number(about['reward_last'])}"
    head.add_row(Text.assemble((plain(about["name"]), "bold"), left, (reward, "bold green")), Text(rest, "dim"))
    return head


def _reward(values: Sequence[float | None], width: int, tall: int) -> Iterator[RenderableType]:
    finite_values = [reward for reward in values if reward is not None]
    low, high = min(finite_values, default=0.0), max(finite_values, default=1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    lines = braille(finite_values, width - 8, tall, low, high) if finite_values else [""] * tall
    for at, line in enumerate(lines):
        label = number(high) if at == 0 else number(low) if at == tall - 1 else ""
        yield Text.assemble((f"{label:>7} ", "dim"), (line, "green"), no_wrap=True)


def _figures(values: Answer, width: int, columns: int) -> RenderableType:
    grid, room, cells = Table.grid(expand=True, padding=(0, 1)), width // columns - 23, []
    for _ in range(columns):
        grid.add_column(ratio=1, no_wrap=True)
    for key, name in SMALL.items():
        finite_values = [figure for figure in values.get(key, ()) if figure is not None]
        flat = len(set(finite_values)) < 2
        curve = (
            ("constant" if finite_values else "")
            if flat
            else braille(finite_values, room, 1, min(finite_values), max(finite_values))[0]
        )
        last = number(finite_values[-1]) if finite_values else "-"
        cells.append(
            Text.assemble((f"{name:<10} ", "dim"), (f"{curve:<{room}}", "dim" if flat else "cyan"), f" {last:>8}")
        )
    for first in range(0, len(cells), columns):
        grid.add_row(*cells[first : first + columns])
    return grid


def _processes(processes: Sequence[Answer], now: float) -> RenderableType:
    table = _table(("process", "left"), ("state", "left"), ("at", "left"), ("seen", "right"))
    for process in processes:
        age = max(now - (process["seen"] or now), 0.0)
        gone = not process["alive"] and process.get("state") != "ended"
        late = gone or (age > SILENT_S and process["alive"])
        step, rollouts = process.get("step"), process.get("rollouts", "-")
        at = f"step {step:,}" if step is not None else f"{rollouts} rollouts"
        state_text = f"gone, was: {process.get('state')}" if gone else str(process.get("state", "-"))
        state = Text(plain(state_text), "bold red" if late else "green")
        table.add_row(plain(process["name"]), state, at, Text(f"{duration(age)} ago", "red" if late else "dim"))
    return table


def _groups(groups: Sequence[Answer], width: int) -> RenderableType:
    table = _table(("group", "right"), ("members' rewards", "left"), ("mean", "right"), ("best completion", "left"))
    table.columns[-1].ratio = 1
    for group in groups:
        best = group["best"]
        text = f"{one_line(best['prompt'], 24)} -> {one_line(best['completion'], max(width - 60, 12))}"
        table.add_row(str(group["group"]), _marks(group), number(group["reward_mean"]), Text(text, overflow="ellipsis"))
    return table


def _marks(group: Answer) -> Text:
    """Return one mark per member: its reward between the group's lowest and highest, `x` for a failed one."""
    rewards = [reward for reward in group["rewards"] if reward is not None]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    marks = Text()
    for reward in group["rewards"][:_MARKS]:
        if reward is None:
            marks.append("x", "red")
        elif high > low:
            above = reward > group["reward_mean"]
            marks.append(_LEVELS[int(7 * (reward - low) / (high - low))], "green" if above else "yellow")
        else:
            marks.append("·", "dim")
    return marks


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(expand=True, box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    return table
