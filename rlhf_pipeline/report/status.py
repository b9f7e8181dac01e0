"""What a run does now: what runs, what it waits for, what it takes on disk, and what looks wrong."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rlhf_pipeline.errors import typed
from rlhf_pipeline.report.formatting import count, duration
from rlhf_pipeline.report.query import Answer, View
from rlhf_pipeline.run.disk import Room, run_usage
from rlhf_pipeline.run.folder import RunFolder

SILENT_S: Final = 30.0
"""A live process renews its heartbeat every two seconds; one that has not for this long is frozen."""
_STILL_S: Final = 300.0
"""A run that takes no step for this long stands still, unless its steps are long."""
_STILL: Final = 10
"""... that is, if the time is less than this many times the longest of its newest steps."""
_FIRST_S: Final = 3600.0
"""How long the first step may take."""
_YOUNG_S: Final = 60.0
"""Steps of a shorter time say nothing about an hour."""
_ROWS = 100
_HOUR_S = 3600.0
_IDLE = 0.9
"""The share of a step's trajectories without a gradient from which on that is an alarm."""


def status(view: View, now: float) -> Answer:
    """Return what a run does, JSON-ready.

    Args:
        view: a run, no store alone.
        now: seconds since 1970.

    Returns:
        `state` (`running`, `ended`, `stopped`), `since` and `seen` in seconds since 1970, `processes`, `waits_for`,
        `graders` (see `View.graders`),
        `bytes`, `bytes_per_hour` (None without steps of a minute, and of a run that does not run), `bytes_allowed` (the
        budget, or None), and `alarms`, each a sentence; besides the figures of `View.about`.
    """
    run = view.run
    assert run is not None
    about, rows = view.about(), list(view.metrics_rows()[-_ROWS:])
    begun = run.in_use_since()
    at_work = [one for one in about["processes"] if one["alive"]]
    done = (about["step"] or 0) >= (about["of"] or 1) or _ended(about["processes"]) or _reached(run, rows)
    state = "running" if begun is not None or at_work else "ended" if done else "stopped"
    starts = [one["started"] for one in at_work if one.get("started")] + ([begun] if begun else [])
    seen = [one["seen"] for one in about["processes"] if one["seen"]] + [about["updated"] or 0.0]
    usage = run_usage(run.address)
    found = {
        **about,
        "state": state,
        "since": min(starts, default=None) if state == "running" else max(seen) or None,
        "seen": max(seen) or None,
        "waits_for": [f"{one['name']}: {one['state']}" for one in at_work if str(one.get("state")).startswith("wait")],
        "graders": view.graders(),
        "bytes": usage.total,
        "bytes_per_hour": _growth(rows, usage.growing, about["stored"]) if state == "running" else None,
        "bytes_allowed": run.config.pipeline.get("buffer", {}).get("max_bytes"),
    }
    return {**found, "alarms": list(_alarms(found, rows, run, now))}


def _ended(processes: list[Answer]) -> bool:
    return bool(processes) and all(one.get("state") == "ended" for one in processes)


def _reached(run: RunFolder, rows: list[Answer]) -> bool:
    """Return whether the newest rollouts have the reward at which the run stops."""
    learn = run.config.pipeline.get("learn", {})
    rewards = [row["task_reward"] for row in rows if row.get("task_reward") is not None][-learn.get("stop_window", 1) :]
    target = learn.get("stop_at_reward")
    return target is not None and bool(rewards) and sum(rewards) / len(rewards) >= target


def _growth(rows: list[Answer], growing: int, stored: int) -> float | None:
    """Return bytes per hour: what a trajectory takes, times how many the newest steps added."""
    known = [(row["time"], row["watermark"]) for row in rows if row.get("time") and row.get("watermark") is not None]
    if len(known) < 2 or known[-1][0] - known[0][0] < _YOUNG_S or not stored:
        return None
    (first, before), (last, after) = known[0], known[-1]
    return growing / stored * (after - before) / (last - first) * _HOUR_S


def _alarms(found: Answer, rows: list[Answer], run: RunFolder, now: float) -> Iterator[str]:
    if found["state"] == "stopped":
        after = f"after step {found['step']}" if found["step"] else "before its first step"
        of = f" of {found['of']}" if found["step"] and found["of"] else ""
        yield f"nothing runs, and it stopped {after}{of}. Go on: rlhf-pipeline run --resume --out {typed(run.address)}"
    for one in found["processes"]:
        yield from _of_process(one, now, runs=found["state"] == "running")
    if found["state"] == "running":
        yield from _standing_still(found, rows, run, now)
    failed = sum(row.get("num_failed") or 0 for row in rows)
    if failed:
        of = f"of the newest {count(len(rows), 'step')}"
        yield f"{count(failed, 'trajectory')} {of} failed; why: rlhf-pipeline view {typed(run.address)}"
    newest = {name: value for row in rows for name, value in row.items() if value is not None}
    taught, taken = newest.get("num_taught"), newest.get("num_trajectories")
    if found["state"] == "running" and taken and taught is not None and taught <= (1 - _IDLE) * taken:
        yield f"{1 - taught / taken:.0%} of the newest step's trajectories have no gradient, so they teach nothing"
    if rows and rows[-1].get("grad_norm") is None and newest.get("grad_norm") is not None:
        yield f"step {rows[-1]['step']} has no finite gradient"
    if isinstance(run.address, Path):
        free, allowed = shutil.disk_usage(run.address).free, found["bytes_allowed"]
        room = Room(free=free, used=found["bytes"], allowed=allowed)
        yield from filter(None, [room.warning(found["bytes_per_hour"])])


def process_alarms(found: Answer, name: str, now: float) -> list[str]:
    """Return what is wrong with one process of a run, for a probe beside it.

    Args:
        found: what `status` returned.
        name: of the process.
        now: seconds since 1970.
    """
    of_it = [one for one in found["processes"] if one["name"] == name]
    if not of_it:
        return [f"{name} has said nothing yet"]
    return list(_of_process(of_it[0], now, runs=True))


def _of_process(one: Answer, now: float, *, runs: bool) -> Iterator[str]:
    """Yield what is wrong with a process; one that has left is wrong only while the run goes on."""
    name, silent = one["name"], now - (one["seen"] or now)
    if not one["alive"]:
        if runs and one.get("state") != "ended":
            yield f"{name} is not running (it was: {one.get('state')})"
    elif silent > SILENT_S:
        yield f"{name} has said nothing for {silent:.0f} s (it was: {one.get('state')})"
    elif str(one.get("state")).startswith("failed"):
        yield f"{name} {one['state']}"


def _standing_still(found: Answer, rows: list[Answer], run: RunFolder, now: float) -> Iterator[str]:
    """Yield why a run that is alive takes no steps."""
    alive = {one["name"]: one for one in found["processes"] if one["alive"]}
    learner = alive.get("learner")
    if learner is not None and str(learner.get("state")).startswith("waiting"):
        fed_by = [one for name, one in alive.items() if name.startswith("collector") or "rollouts" in one]
        waited = now - (learner.get("since") or now)
        if not fed_by and waited > SILENT_S:
            command = f"rlhf-pipeline collect --run {typed(run.address)}"
            yield f"the learner waits for {waited:.0f} s, and no collector is alive. Start one: {command}"
            return
    times = [row["time"] for row in rows if row.get("time")]
    longest = max((after - before for before, after in itertools.pairwise(times)), default=0.0)
    began = max([found["since"] or 0.0, *times[-1:]])
    allowed = max(_STILL_S, _STILL * longest) if times else _FIRST_S
    if began and now - began > allowed:
        usual = f"; one of the newest {len(times)} took {duration(longest)} at most" if longest else ""
        yield f"no step for {duration(now - began)}{usual}"
