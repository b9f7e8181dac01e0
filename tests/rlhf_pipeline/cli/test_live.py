"""What a terminal shows of a run while it lives."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlhf_pipeline.cli.live import Screen, braille, frame
from rlhf_pipeline.report.query import View
from rlhf_pipeline.run.processes.heartbeat import process_lock
from rlhf_pipeline.run.rows import StepRows

from ..report.conftest import write_run
from .test_tail_command import ENV

FRAMES = Path(__file__).parent / "frames"
NOW = 1_700_000_000.0
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])(?:;\d+)*m")


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[Path]:
    """A run of four processes, one of which says nothing any more and one is gone; it has figures that never move."""
    run = make(tmp_path)
    with ExitStack() as stack:
        for name in ("learner-0", "collector-0", "collector-1"):
            stack.enter_context(process_lock(run / "processes", name))
        yield run


def make(tmp_path: Path) -> Path:
    """Write the run."""
    run = write_run(tmp_path / "demo", failed=2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("metrics.jsonl",):
        (run / name).unlink(missing_ok=True)
    for line in lines:
        StepRows(run / "metrics.jsonl").append({**line, "time": NOW - 300 + 10 * line["step"]})
    (run / "processes").mkdir()
    said: dict[str, dict[str, Any]] = {
        "learner-0": {"state": "steps", "step": 12, "time": NOW - 2},
        "collector-0": {"state": "samples", "rollouts": 6, "time": NOW - 1},
        "collector-1": {"state": "samples", "rollouts": 3, "time": NOW - 900},
        "collector-2": {"state": "samples", "rollouts": 2, "time": NOW - 9},
    }
    for name, record in said.items():
        (run / "processes" / f"{name}.json").write_text(json.dumps(record))
    return run


def drawn(run: Path, width: int, height: int, **options: Any) -> str:
    """Return a frame as text."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, highlight=False, **options)
    view = View(run)
    for part in frame(view, width, height, NOW):
        console.print(part)
    view.close()
    return out.getvalue()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_frames(live_run: Path, width: int, height: int):
    """Curve, figures, processes and groups fit the terminal, and are the recorded ones, line by line."""
    text = "\n".join(line.rstrip() for line in drawn(live_run, width, height).splitlines()) + "\n"
    assert text == (FRAMES / f"{width}x{height}.txt").read_text(encoding="utf-8")
    assert len(text.splitlines()) < height
    assert max(map(len, text.splitlines())) <= width


def test_colours_are_left_out_where_they_are_not_wanted(live_run: Path):
    """With NO_COLOR the frame has the same text and no colour, elsewhere a silent process is red."""
    terminal: dict[str, Any] = {"force_terminal": True, "color_system": "standard"}
    bright = drawn(live_run, 80, 24, **terminal)
    assert "\x1b[31m" in bright
    assert "\x1b[1;31m" in bright
    plain = drawn(live_run, 80, 24, **terminal, no_color=True)
    assert not COLOUR.search(plain)
    without_bar = [re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()[2:] for text in (plain, bright)]
    assert without_bar[0] == without_bar[1]


def test_a_run_without_anything_is_drawn(live_run: Path):
    """A run that has just begun has a frame, too, and one that cannot be read keeps the last frame."""
    (live_run / "store").rename(live_run / "gone")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        (live_run / name).unlink(missing_ok=True)
    assert drawn(live_run, 80, 24).splitlines()[0].split() == ["demo", "step", "0/300", "reward", "-", "0", "stored"]


def test_stored_text_cannot_command_the_terminal(live_run: Path):
    """Escapes and rich's own markup in names and texts are shown as text."""
    (live_run / "processes" / "evil.json").write_text(json.dumps({"state": "\x1b[2J[red]x", "time": NOW}))
    text = drawn(live_run, 120, 40)
    assert "\x1b[2J" not in text
    assert "[red]x" in text


def test_lines_are_above_the_frame(live_run: Path):
    """What is said while a frame is drawn comes before it, and the last frame stays."""
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    screen = Screen(live_run, out, clock=lambda: NOW, console=console)
    screen.draw()
    screen.echo("warning: [bold]one")
    screen.close()
    text = out.getvalue()
    assert text.rindex("members' rewards") > text.index("warning: [bold]one") > text.index("members' rewards")


def test_curves_of_dots():
    """Two values a character: the lowest dot is the least value, steps are joined, what is flat lies in the middle."""
    assert braille([0.0, 1.0], 1, 1, 0.0, 1.0) == ["⡸"]
    assert braille([0.0] * 4, 2, 1, 0.0, 1.0) == ["⣀⣀"]
    assert braille([5.0], 1, 2, 5.0, 5.0) == ["⣀", "⠀"]
    assert braille([0.0, 1.0], 1, 2, 0.0, 1.0)[1] == "⡸"


def in_terminal(run: Path, *, until: str, **env: str) -> str:
    """Return what `tail -f` writes to a terminal of 80 x 24 until a text appears."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    names = {name: value for name, value in ENV.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    command = [sys.executable, "-m", "rlhf_pipeline.cli", "tail", "-f", str(run)]
    with subprocess.Popen(
        command,
        stdout=other,
        stdin=other,
        stderr=other,
        env={**names, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **env},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        os.close(other)
        text, deadline = b"", time.monotonic() + 30
        while until.encode() not in text and time.monotonic() < deadline:
            text += os.read(main, 65536)
        process.send_signal(signal.SIGINT)
        process.wait(20)
    os.close(main)
    return text.decode()


def test_tail_draws_in_a_terminal_only(live_run: Path):
    """A terminal gets the frame, one without colours where NO_COLOR is set; a dumb one gets one line per step."""
    bright = in_terminal(live_run, until="best completion")
    assert "step 12/300" in bright
    assert COLOUR.search(bright)
    assert not COLOUR.search(in_terminal(live_run, until="best completion", NO_COLOR="1"))
    lines = in_terminal(live_run, until="step 12:", TERM="dumb").splitlines()
    assert [line.split(":")[0] for line in lines] == [f"step {step}" for step in range(3, 13)]
