"""What a person sees while a run goes on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.run.events import Notice, RunFinished, RunStarted, StepDone


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def started(total: int = 100) -> RunStarted:
    """Return a run's first event."""
    return RunStarted(run_dir=Path("runs/demo"), num_parameters=83_904, first_step=0, total_steps=total)


def step(number: int, total: int = 100, **metrics: Any) -> StepDone:
    """Return a step with a reward that rises."""
    values = {"task_reward": number / total, "clip_fraction": 0.02, "ess": 0.97, "tokens_per_s": 21_000.0}
    return StepDone(step=number, total_steps=total, metrics=values | {"staleness": 0.5, "kl_k1": None} | metrics)


def view(*, live: bool, columns: int = 200) -> tuple[RunView, io.StringIO, Clock]:
    """Return a view on a text stream with a clock of its own."""
    out, clock = io.StringIO(), Clock()
    return RunView(out, live=live, clock=clock, columns=lambda: columns), out, clock


def test_plain_lines_every_ten_steps():
    """Fast steps print the first line, then one in ten, then the last; no escape sequences."""
    show, out, _ = view(live=False)
    show(started(35))
    for number in range(1, 36):
        show(step(number, 35))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("runs/demo: 83,904 parameters, 35 steps at most")
    assert [line.split("/")[0].split()[-1] for line in lines[1:]] == ["1", "11", "21", "31", "35"]
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_plain_lines_every_second():
    """Slow steps print a line each."""
    show, out, clock = view(live=False)
    for number in range(1, 5):
        clock.now += 1.5
        show(step(number))
    assert len(out.getvalue().splitlines()) == 4


def test_line_holds_the_metrics():
    """Reward, clip fraction, ESS, speed, age and the time left are on the line; what is null is not."""
    show, out, clock = view(live=False)
    show(started())
    clock.now = 2.0
    show(step(1, loss=3.0))
    line = out.getvalue().splitlines()[-1]
    assert line == "step   1/100  reward 0.01  clip 0.020  ess 0.97  21,000 tok/s  age 0.5  eta 3:18"


def test_null_keeps_the_last_value():
    """A step without a new rollout shows the reward of the one before."""
    show, out, clock = view(live=False)
    show(step(1))
    clock.now = 5.0
    show(step(2, task_reward=None, tokens_per_s=None))
    assert "reward 0.01" in out.getvalue().splitlines()[-1]
    assert "21,000 tok/s" in out.getvalue().splitlines()[-1]


def test_live_line_is_drawn_in_place():
    """In a terminal the line starts over, has a curve, fits the width, and is gone at the end."""
    show, out, clock = view(live=True, columns=60)
    show(started())
    for number in range(1, 51):
        clock.now += 0.5
        show(step(number))
    drawn = out.getvalue().split("\r")[-1].removesuffix("\x1b[K")
    assert drawn.startswith("step  50/100  reward 0.50 ")
    assert len(drawn) < 60
    assert drawn.endswith("eta 0:25")
    assert out.getvalue().count("\n") == 1
    show(finished())
    assert out.getvalue().endswith("\r\x1b[K")


def test_live_line_is_not_drawn_too_often():
    """A thousand steps in a second are some frames, not a thousand."""
    show, out, clock = view(live=True)
    for number in range(1, 1001):
        clock.now += 0.001
        show(step(number, 1000))
    assert out.getvalue().count("\r") < 20


def test_notices():
    """Warnings stand on lines of their own; of many alike three are shown, with where the rest is."""
    show, out, _ = view(live=True)
    show(step(1))
    for number in range(10):
        show(Notice(message=f"rollout {number}: 1 of 8 reward calls failed", level="warning"))
    show(Notice(message="saved step 10"))
    show(Notice(message="saved step 20"))
    text = out.getvalue()
    assert text.count("warning: rollout") == 3
    assert "warning: rollout 2: 1 of 8 reward calls failed (more like this go to log.txt only)\n" in text
    assert text.count("note: saved step") == 1


def test_notice_cannot_command_the_terminal():
    """An error text from user code is spelled out."""
    show, out, _ = view(live=False)
    show(Notice(message="bad \x1b[2J", level="warning"))
    assert "\x1b" not in out.getvalue()


def test_a_broken_stream_never_stops_the_run():
    """A closed pipe makes the view silent."""

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    show = RunView(Broken(), live=False)
    show(started())
    show(step(1))
    show(finished())


def test_ascii_terminal():
    """Where the stream is not UTF-8 the curve is ASCII."""
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    show = RunView(out, live=True, columns=lambda: 100)
    show(step(1))
    out.flush()
    assert b"reward 0.01 _" in raw.getvalue()


def finished() -> RunFinished:
    """Return a run's last event."""
    return RunFinished(
        run_dir=Path("runs/demo"),
        reason="target",
        steps=180,
        seconds=21.4,
        first_reward=0.1,
        last_reward=0.98,
        num_trajectories=23_040,
    )
