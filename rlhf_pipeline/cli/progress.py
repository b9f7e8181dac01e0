"""Progress of a run: a frame drawn in place in a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rlhf_pipeline.cli.output import pasted
from rlhf_pipeline.errors import count, plain
from rlhf_pipeline.report.formatting import duration, evaluation_words, number
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.events import EvaluationDone, Event, Notice, RolloutDone, RunFinished, RunStarted, StepDone

_NOTICES_OF_A_KIND = 3
_STEPS_BETWEEN_LINES = 10
_SECONDS_BETWEEN_LINES = 1.0

if TYPE_CHECKING:
    from rlhf_pipeline.cli.live import Screen


class RunView:
    """Writes a run's events to a text stream; pass it as `on_event`.

    In a terminal a frame of the run is redrawn in place. Elsewhere, and for a run at a URL, a line is printed for the
    first step, then every second or every ten steps. A stream that breaks (a closed pipe, a lost terminal) never stops
    the run.
    """

    def __init__(
        self,
        out: TextIO,
        *,
        live: bool,
        clock: Callable[[], float] = time.monotonic,
        log_name: str = filenames.LOG,
    ) -> None:
        self._out = out
        self._live = live
        self._clock = clock
        self._log_name = log_name
        self._latest: dict[str, float | int] = {}
        self._notice_counts: Counter[str] = Counter()
        self._screen: Screen | None = None
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
                self._draw()
                self.close()

    def echo(self, text: str) -> None:
        """Print a line; a frame is redrawn below it."""
        screen, line = self._screen, plain(pasted(text))
        self._try(lambda: self._out.write(f"{line}\n") if screen is None else screen.echo(line))

    def close(self) -> None:
        """End the frame, which stays on the screen; the next message is printed below it."""
        if self._screen is not None:
            screen, self._screen = self._screen, None
            self._try(screen.close)

    def _started(self, event: RunStarted) -> None:
        self._step_at = self._clock()
        where = f"{count(event.num_parameters, 'parameter')}, {count(event.total_steps, 'step')} at most"
        again = f", continuing after step {event.first_step}" if event.first_step else ""
        self.echo(f"{event.run_dir}: {where}{again}. Ctrl-C finishes the step, saves and stops.")
        if self._live and self._screen is None and isinstance(event.run_dir, Path):
            from rlhf_pipeline.cli.live import Screen

            self._screen = Screen(event.run_dir, self._out)

    def _step(self, event: StepDone) -> None:
        now = self._clock()
        if self._step_at is not None:
            took = now - self._step_at
            self._step_seconds = took if self._step_seconds is None else 0.9 * self._step_seconds + 0.1 * took
        self._step_at = now
        self._latest.update({name: figure for name, figure in event.metrics.items() if figure is not None})
        if self._screen is not None:
            if now - self._line_at >= _SECONDS_BETWEEN_LINES:
                self._line_at = now
                self._draw()
        elif (
            event.step == event.total_steps
            or self._line_step < 0
            or now - self._line_at >= _SECONDS_BETWEEN_LINES
            or event.step - self._line_step >= _STEPS_BETWEEN_LINES
        ):
            self._line_at, self._line_step = now, event.step
            self.echo("  ".join(self._fields(event)))

    def _evaluated(self, event: EvaluationDone) -> None:
        """Print the figures of an evaluation."""
        best = "  best so far" if event.best else ""
        name = f", {event.name}" if event.name else ""
        self.echo(f"evaluation of step {event.step}{name}: {evaluation_words(event.figures)}{best}")

    def _rollout(self, event: RolloutDone) -> None:
        """Print a collector's stored rollout, at most one line a second."""
        now = self._clock()
        if now - self._line_at < _SECONDS_BETWEEN_LINES:
            return
        self._line_at = now
        if self._screen is not None:
            self._draw()
            return
        self.echo(
            f"{event.collector}: rollout {event.rollout}  weights of step {event.policy_version}  "
            f"reward {number(event.task_reward)}  {count(event.num_trajectories, 'trajectory')} "
            f"in {duration(event.seconds)}"
        )

    def _notice(self, event: Notice) -> None:
        """Print a notice; notices that differ only in numbers are printed a few times, progress always."""
        if event.level == "progress":
            self.echo(event.message)
            return
        kind = re.sub(r"\d+", "#", event.message)[:60]
        self._notice_counts[kind] += 1
        allowed = _NOTICES_OF_A_KIND if event.level == "warning" else 1
        if self._notice_counts[kind] > allowed:
            return
        is_last = event.level == "warning" and self._notice_counts[kind] == allowed
        more = f" (further notices of this kind are only written to {self._log_name})" if is_last else ""
        self.echo(f"{'warning' if event.level == 'warning' else 'note'}: {event.message}{more}")

    def _fields(self, event: StepDone) -> list[str]:
        """Return the parts of the line."""
        width = len(str(event.total_steps))
        fields = [f"step {event.step:>{width}}/{event.total_steps}"]
        if "task_reward" in self._latest:
            fields.append(f"reward {number(self._latest['task_reward'])}")
        kl = "kl_k1" if "kl_k1" in self._latest else "kl_approx"  # to the reference, otherwise to the behaviour policy
        formats = (
            (kl, "kl {:.3f}" if kl == "kl_k1" else "kl_approx {:.3f}"),
            ("clip_fraction", "clip {:.3f}"),
            ("ess", "ess {:.2f}"),
            ("tokens_per_s", "{:,.0f} tok/s"),
            ("staleness", "age {:.1f}"),
        )
        values = [form.format(self._latest[name]) for name, form in formats if name in self._latest]
        fields += [text.replace("-0.000", "0.000") for text in values]
        if self._step_seconds is not None and event.step < event.total_steps:
            fields.append(f"eta {_clock_time(self._step_seconds * (event.total_steps - event.step))}")
        return fields

    def _draw(self) -> None:
        if self._screen is not None:
            self._try(self._screen.draw)

    def _try(self, write: Callable[[], object]) -> None:
        """Write; where the terminal or the pipe is gone, the run continues."""
        if self._broken:
            return
        try:
            write()
            self._out.flush()
        except (OSError, ValueError):
            self._broken = True


def _clock_time(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
