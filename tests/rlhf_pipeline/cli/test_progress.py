"""What a person sees while a run goes on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.run.events import Notice, RunFinished, RunStarted, StepDone

from ..report.conftest import write_run


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


def view() -> tuple[RunView, io.StringIO, Clock]:
    """Return a view on a text stream with a clock of its own."""
    out, clock = io.StringIO(), Clock()
    return RunView(out, live=False, clock=clock), out, clock


def test_plain_lines_every_ten_steps():
    """Fast steps print the first line, then one in ten, then the last; no escape sequences."""
    show, out, _ = view()
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
    show, out, clock = view()
    for number in range(1, 5):
        clock.now += 1.5
        show(step(number))
    assert len(out.getvalue().splitlines()) == 4


def test_line_holds_the_metrics():
    """Reward, clip fraction, ESS, speed, age and the time left are on the line; what is null is not."""
    show, out, clock = view()
    show(started())
    clock.now = 2.0
    show(step(1, loss=3.0))
    line = out.getvalue().splitlines()[-1]
    assert line == "step   1/100  reward 0.01  clip 0.020  ess 0.97  21,000 tok/s  age 0.5  eta 3:18"


def test_null_keeps_the_last_value():
    """A step without a new rollout shows the reward of the one before."""
    show, out, clock = view()
    show(step(1))
    clock.now = 5.0
    show(step(2, task_reward=None, tokens_per_s=None))
    assert "reward 0.01" in out.getvalue().splitlines()[-1]
    assert "21,000 tok/s" in out.getvalue().splitlines()[-1]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_frame_is_drawn_in_place(tmp_path: Path):
    """In a terminal the run itself is drawn, at most once a second, below what is said; the last frame stays."""
    run, out, clock = write_run(tmp_path / "demo"), Terminal(), Clock()
    show = RunView(out, live=True, clock=clock)
    show(RunStarted(run_dir=run, num_parameters=1, first_step=0, total_steps=300))
    for number in range(1, 101):
        clock.now += 0.03
        show(step(number, 300))
    assert 3 <= out.getvalue().count("best completion") <= 4
    show(Notice(message="a notice", level="warning"))
    show(finished())
    show.echo("the end")
    text = out.getvalue()
    assert "step 12/300" in text
    assert text.index("warning: a notice") < text.rindex("best completion") < text.index("the end")


def test_a_run_at_a_url_has_lines():
    """Frames read the run again and again, which costs requests."""
    out = Terminal()
    show = RunView(out, live=True, clock=Clock())
    show(RunStarted(run_dir="s3://bucket/run", num_parameters=1, first_step=0, total_steps=10))
    show(step(1, 10))
    assert out.getvalue().splitlines()[-1].startswith("step  1/10  reward 0.10")


def test_notices():
    """Warnings stand on lines of their own; of many alike three are shown, with where the rest is."""
    show, out, _ = view()
    show(step(1))
    for number in range(10):
        show(Notice(message=f"rollout {number}: 1 of 8 trajectories failed", level="warning"))
    show(Notice(message="saved step 10"))
    show(Notice(message="saved step 20"))
    text = out.getvalue()
    assert text.count("warning: rollout") == 3
    assert (
        "warning: rollout 2: 1 of 8 trajectories failed (further notices of this kind are only written to log.txt)\n"
        in text
    )
    assert text.count("note: saved step") == 1


def test_notice_cannot_command_the_terminal():
    """An error text from user code is spelled out."""
    show, out, _ = view()
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
