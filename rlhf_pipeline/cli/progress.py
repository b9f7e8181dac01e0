"""Progress of a run: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from typing import TextIO

from rlhf_pipeline.cli.output import pasted
from rlhf_pipeline.errors import plain
from rlhf_pipeline.report.sparkline import sparkline
from rlhf_pipeline.report.words import count, duration, evaluation_words, number
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.events import EvaluationDone, Event, Notice, RolloutDone, RunFinished, RunStarted, StepDone

_NOTICES_OF_A_KIND = 3
_STEPS_BETWEEN_LINES = 10
_SECONDS_BETWEEN_LINES = 1.0
_FRAMES_PER_SECOND = 12


class RunView:
    """Writes a run's events to a text stream; pass it as `on_event`.

    In a terminal one line is redrawn in place. Elsewhere a line is printed for the first step, then every second
    or every ten steps. A stream that breaks (a closed pipe, a lost terminal) never stops the run.

    Args:
        out: the stream to write to.
        live: draw one line in place; False prints lines.
        clock: returns seconds; for tests.
        columns: returns the terminal's width; for tests.
        log_name: the file in the run folder that receives every notice.
    """

    def __init__(
        self,
        out: TextIO,
        *,
        live: bool,
        clock: Callable[[], float] = time.monotonic,
        columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
        log_name: str = filenames.LOG,
    ) -> None:
        self._out = out
        self._live = live
        self._clock = clock
        self._columns = columns
        self._log_name = log_name
        self._ascii = "utf" not in (getattr(out, "encoding", None) or "").lower()
        self._latest: dict[str, float | int] = {}
        self._rewards: list[float] = []
        self._seen: Counter[str] = Counter()
        self._drawn = False
        self._broken = False
        self._line_at = -1e9
        self._line_step = -1
        self._step_at: float | None = None
        self._step_seconds: float | None = None

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case RunStarted():
                self._started(event)
            case StepDone():
                self._step(event)
            case EvaluationDone():
                self._evaluated(event)
            case RolloutDone():
                self._rollout(event)
            case Notice():
                self._notice(event)
            case RunFinished():
                self._erase()

    def say(self, text: str) -> None:
        """Print a line; the live line is redrawn below it."""
        self._erase()
        self._write(f"{plain(pasted(text))}\n")

    def close(self) -> None:
        """Erase the live line, so that the next output starts on a fresh line."""
        self._erase()

    def _started(self, event: RunStarted) -> None:
        self._step_at = self._clock()
        where = f"{count(event.num_parameters, 'parameter')}, {count(event.total_steps, 'step')} at most"
        again = f", going on after step {event.first_step}" if event.first_step else ""
        self.say(f"{event.run_dir}: {where}{again}. Ctrl-C stops after a step and saves.")

    def _step(self, event: StepDone) -> None:
        now = self._clock()
        if self._step_at is not None:
            took = now - self._step_at
            self._step_seconds = took if self._step_seconds is None else 0.9 * self._step_seconds + 0.1 * took
        self._step_at = now
        self._latest.update({name: value for name, value in event.metrics.items() if value is not None})
        reward = event.metrics.get("task_reward")
        if reward is not None:
            self._rewards.append(reward)
        last = event.step == event.total_steps
        if self._live:
            if last or now - self._line_at >= 1 / _FRAMES_PER_SECOND:
                self._line_at = now
                self._draw(self._fit(self._fields(event, graph=True), self._columns() - 1))
        elif (
            last
            or self._line_step < 0
            or now - self._line_at >= _SECONDS_BETWEEN_LINES
            or event.step - self._line_step >= _STEPS_BETWEEN_LINES
        ):
            self._line_at, self._line_step = now, event.step
            self._write("  ".join(self._fields(event, graph=False)) + "\n")

    def _evaluated(self, event: EvaluationDone) -> None:
        """Print the figures of an evaluation."""
        best = "  best so far" if event.best else ""
        self.say(f"evaluation of step {event.step}: {evaluation_words(event.figures)}{best}")

    def _rollout(self, event: RolloutDone) -> None:
        """Print a collector's stored rollout, at most one line a second."""
        if (now := self._clock()) - self._line_at < _SECONDS_BETWEEN_LINES:
            return
        self._line_at = now
        self.say(
            f"{event.collector}: rollout {event.rollout}  weights of step {event.policy_version}  "
            f"reward {number(event.task_reward)}  {count(event.num_trajectories, 'trajectory')} "
            f"in {duration(event.seconds)}"
        )

    def _notice(self, event: Notice) -> None:
        """Print a notice; notices that differ only in numbers are printed a few times, progress always."""
        if event.level == "progress":
            self.say(event.message)
            return
        kind = re.sub(r"\d+", "#", event.message)[:60]
        self._seen[kind] += 1
        allowed = _NOTICES_OF_A_KIND if event.level == "warning" else 1
        if self._seen[kind] > allowed:
            return
        is_last = event.level == "warning" and self._seen[kind] == allowed
        more = f" (more like this go to {self._log_name} only)" if is_last else ""
        self.say(f"{'warning' if event.level == 'warning' else 'note'}: {event.message}{more}")

    def _fields(self, event: StepDone, *, graph: bool) -> list[str]:
        """Return the parts of the line, the ones to keep longest first."""
        width = len(str(event.total_steps))
        fields = [f"step {event.step:>{width}}/{event.total_steps}"]
        if self._rewards:
            curve = f" {sparkline(self._rewards, width=16, ascii_only=self._ascii)}" if graph else ""
            fields.append(f"reward {number(self._rewards[-1])}{curve}")
        kl = "kl_k1" if "kl_k1" in self._latest else "kl_approx"  # to the reference, otherwise to the behaviour policy
        shown = (
            (kl, "kl {:.3f}" if kl == "kl_k1" else "kl_approx {:.3f}"),
            ("clip_fraction", "clip {:.3f}"),
            ("ess", "ess {:.2f}"),
            ("tokens_per_s", "{:,.0f} tok/s"),
            ("staleness", "age {:.1f}"),
        )
        values = [form.format(self._latest[name]) for name, form in shown if name in self._latest]
        fields += [text.replace("-0.000", "0.000") for text in values]
        if self._step_seconds is not None and event.step < event.total_steps:
            fields.append(f"eta {_clock_time(self._step_seconds * (event.total_steps - event.step))}")
        return fields

    @staticmethod
    def _fit(fields: list[str], columns: int) -> str:
        """Join as many fields as fit on the line; the ETA, which is last, is kept longest."""
        while len(fields) > 3 and len("  ".join(fields)) > columns:
            del fields[-2]
        return "  ".join(fields)[: max(columns, 0)]

    def _draw(self, line: str) -> None:
        self._write(f"\r{line}\x1b[K")
        self._drawn = True

    def _erase(self) -> None:
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _write(self, text: str) -> None:
        if self._broken:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            self._broken = True  # the terminal or the pipe is gone; the run continues


def _clock_time(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
