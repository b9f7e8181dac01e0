"""The alarms of a run, as data: each has a name, a severity, a window and a start."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rlhf_pipeline.errors import PipelineError, count, typed
from rlhf_pipeline.report.formatting import duration
from rlhf_pipeline.run.completeness import came_to_nothing, missing_parts
from rlhf_pipeline.run.disk import DiskSpace
from rlhf_pipeline.run.folder import RunFolder

SILENT_S: Final = 30.0
"""A live process renews its heartbeat every two seconds; a process that has not done so for this long is frozen."""
_STILL_S: Final = 300.0
"""A run that takes no step for this long has stalled, unless its steps are long."""
_STILL: Final = 10
"""Its steps are long if the time is less than this many times the longest of its newest steps."""
_FIRST_S: Final = 3600.0
"""The maximum duration of the first step."""
_IDLE_STEPS: Final = 20
"""The number of steps over which trajectories without a gradient are counted; over fewer, no group may have spread."""
_IDLE: Final = 0.9
"""The minimum share of trajectories without a gradient in these steps that raises an alarm."""
_NEAR_BEST: Final = 0.05
"""The maximum distance of a reward from its best, as a share of its range, at which the task is considered solved."""

Severity = Literal["page", "note"]
"""`page`: a person must act, and `status --check` fails. `note`: may need attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One thing that looks wrong.

    >>> Alarm(name="silent", severity="page", text="learner has not reported for 40 s", window_s=30.0, since=5.0).name
    'silent'
    """

    name: str
    """Identifies the kind of alarm, for example `silent`."""
    severity: Severity
    text: str
    """A sentence with the figures, and the next command if there is one."""
    process: str | None = None
    """The process concerned, or None if the alarm concerns the run."""
    window_s: float | None = None
    """The window in seconds over which it was judged; None if it depends only on the current state."""
    window_steps: int | None = None
    """The window in steps over which it was judged."""
    since: float | None = None
    """The time at which its cause began, in seconds since 1970; None if unknown."""


def run_alarms(state: dict[str, Any], rows: Sequence[dict[str, Any]], run: RunFolder, now: float) -> Iterator[Alarm]:
    """Yield the alarms of a run.

    Args:
        state: what `status` returns, without its alarms.
        rows: the newest rows of the metrics, oldest first.
        run: the run folder.
        now: seconds since 1970.
    """
    is_running = state["state"] == "running"
    incomplete = None if is_running else _missing_parts(run, state["seen"])  # a running one writes them right now
    if incomplete is not None:
        yield incomplete
    if state["state"] == "stopped":
        yield _stopped(state, run, is_complete=incomplete is None)
    for process in state["processes"]:
        yield from process_alarms(process, now, is_running=is_running)
    if is_running:
        yield from _stalled(state, rows, run, now)
    failed = [row for row in rows if row.get("num_failed")]
    if failed:
        num = count(sum(row["num_failed"] for row in failed), "trajectory")
        text = f"{num} failed in the newest {count(len(rows), 'step')}. Causes: rlhf-pipeline view {typed(run.address)}"
        since = failed[0].get("time")
        yield Alarm(name="failed_trajectories", severity="note", text=text, window_steps=len(rows), since=since)
    if is_running:
        yield from _learning_nothing(rows, run)
    if isinstance(run.address, Path):
        space = DiskSpace(free=shutil.disk_usage(run.address).free, used=state["bytes"], allowed=state["bytes_allowed"])
        text = space.warning(state["bytes_per_hour"])
        if text is not None:
            severity: Severity = "page" if space.is_urgent(state["bytes_per_hour"]) else "note"
            yield Alarm(name="disk", severity=severity, text=text)


def process_alarms(process: dict[str, Any], now: float, *, is_running: bool) -> Iterator[Alarm]:
    """Yield the alarms of a process; a process that has exited raises one only while the run continues.

    Args:
        process: its last report, and `alive` and `seen`.
        now: seconds since 1970.
        is_running: whether any process of the run is alive.
    """
    name, last_state, last_report = process["name"], str(process.get("state")), process["seen"]
    silent = now - (last_report or now)
    if not process["alive"]:
        if is_running and last_state != "ended":
            text = f"{name} is not running (its last state: {last_state})"
            yield Alarm(name="gone", severity="page", process=name, text=text, since=last_report)
    elif silent > SILENT_S:
        text = f"{name} has not reported for {silent:.0f} s (its last state: {last_state})"
        yield Alarm(name="silent", severity="page", process=name, text=text, window_s=SILENT_S, since=last_report)
    elif last_state.startswith("failed"):
        since = process.get("since") or last_report
        yield Alarm(name="failed", severity="page", process=name, text=f"{name} {last_state}", since=since)


def _missing_parts(run: RunFolder, since: float | None) -> Alarm | None:
    """Return the alarm of a run that is at rest and incomplete, or None."""
    try:
        for read_before in (run.ledger, run.metrics):
            read_before.refresh()
        problems = [] if came_to_nothing(run) else list(missing_parts(run))
    except (PipelineError, OSError) as error:
        problems = [str(error)]
    if not problems:
        return None
    text = f"the run is incomplete: {'; '.join(problems)}. Check it: rlhf-pipeline verify {typed(run.address)}"
    return Alarm(name="missing_parts", severity="page", text=text, since=since)


def _stopped(state: dict[str, Any], run: RunFolder, *, is_complete: bool) -> Alarm:
    after = f"after step {state['step']}" if state["step"] else "before its first step"
    of = f" of {state['of']}" if state["step"] and state["of"] else ""
    text = f"no process is running; the run stopped {after}{of}"
    if is_complete:
        text += f". To continue: rlhf-pipeline run --resume --out {typed(run.address)}"
    return Alarm(name="stopped", severity="page", text=text, since=state["seen"])


def _stalled(state: dict[str, Any], rows: Sequence[dict[str, Any]], run: RunFolder, now: float) -> Iterator[Alarm]:
    """Yield why a run that is alive takes no steps."""
    alive = {process["name"]: process for process in state["processes"] if process["alive"]}
    learner = alive.get("learner")
    if learner is not None and str(learner.get("state")).startswith("waiting"):
        feeding = [name for name, process in alive.items() if name.startswith("collector") or "rollouts" in process]
        since = learner.get("since")
        waited = now - (since or now)
        if not feeding and waited > SILENT_S:
            command = f"rlhf-pipeline collect --run {typed(run.address)}"
            text = f"the learner has waited for {waited:.0f} s, but no collector is alive. To start one: {command}"
            yield Alarm(name="no_collector", severity="page", text=text, window_s=SILENT_S, since=since)
            return
    times = [row["time"] for row in rows if row.get("time")]
    longest = max((after - before for before, after in itertools.pairwise(times)), default=0.0)
    began = max([state["since"] or 0.0, *times[-1:]])
    allowed = max(_STILL_S, _STILL * longest) if times else _FIRST_S
    if began and now - began > allowed:
        usual = f"; the longest of the newest {len(times)} took {duration(longest)}" if longest else ""
        text = f"no step for {duration(now - began)}{usual}"
        yield Alarm(name="no_step", severity="page", text=text, window_s=allowed, since=began)


def _learning_nothing(rows: Sequence[dict[str, Any]], run: RunFolder) -> Iterator[Alarm]:
    """Yield an alarm if a window of steps has next to no gradients, and not because its task is solved."""
    window = [row for row in rows if row.get("num_trajectories") and row.get("num_taught") is not None][-_IDLE_STEPS:]
    used, taught = (sum(row[name] for row in window) for name in ("num_trajectories", "num_taught"))
    if len(window) < _IDLE_STEPS or taught > (1 - _IDLE) * used or _is_solved(window, run):
        return
    text = (
        f"{1 - taught / used:.0%} of the trajectories in the newest {len(window)} steps have no gradient, so the "
        "policy learns almost nothing"
    )
    since = window[0].get("time")
    yield Alarm(name="no_gradient", severity="note", text=text, window_steps=len(window), since=since)


def _is_solved(window: Sequence[dict[str, Any]], run: RunFolder) -> bool:
    """Return whether the rewards of some steps are the target, or the best that the run has had, and not its worst."""
    rewards = [row["task_reward"] for row in window if row.get("task_reward") is not None]
    if not rewards:
        return False
    mean, target = sum(rewards) / len(rewards), run.config.pipeline.get("learn", {}).get("stop_at_reward")
    if target is not None and mean >= target:
        return True
    past = [
        row["task_reward"]
        for row in run.rows(run.metrics_file).spread(_LOOKED_AT)
        if row.get("task_reward") is not None
    ]
    best, worst = max(past + rewards), min(past + rewards)
    return mean >= best - _NEAR_BEST * (best - worst) and (best > worst or best > 0)


_LOOKED_AT: Final = 200
"""The number of steps, spread over the run, from whose rewards the best is estimated."""
