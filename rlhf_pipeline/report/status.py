"""What a run does now: what runs, what it waits for, what it takes on disk, and what looks wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rlhf_pipeline.errors import typed
from rlhf_pipeline.report.formatting import count, number
from rlhf_pipeline.report.query import Answer, View
from rlhf_pipeline.report.stored import disk_usage
from rlhf_pipeline.run.folder import RunFolder

SILENT_S: Final = 60.0
"""A live process renews its heartbeat every few seconds; one that has not for this long hangs, or its machine does."""
_ROWS = 100
_HOUR_S = 3600.0
_LEAST_FREE = 1e9
_IDLE = 0.9
"""The share of a step's trajectories without a gradient from which on that is an alarm."""


def status(view: View, now: float) -> Answer:
    """Return what a run does, JSON-ready.

    Args:
        view: a run, no store alone.
        now: seconds since 1970.

    Returns:
        `state` (`running`, `ended`, `stopped`), `since` and `seen` in seconds since 1970, `processes`, `waits_for`,
        `bytes`, `bytes_per_hour` (None without two steps), and `alarms`, each a sentence; besides the figures of
        `View.about`.
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
    size = disk_usage(run.address)
    found = {
        **about,
        "state": state,
        "since": min(starts, default=None) if state == "running" else max(seen) or None,
        "seen": max(seen) or None,
        "waits_for": [f"{one['name']}: {one['state']}" for one in at_work if str(one.get("state")).startswith("wait")],
        "bytes": size,
        "bytes_per_hour": _growth(rows, size, about["stored"]),
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


def _growth(rows: list[Answer], size: int, stored: int) -> float | None:
    """Return bytes per hour: what a trajectory takes, times how many the newest steps added."""
    known = [(row["time"], row["watermark"]) for row in rows if row.get("time") and row.get("watermark") is not None]
    if len(known) < 2 or known[-1][0] <= known[0][0] or not stored:
        return None
    (first, before), (last, after) = known[0], known[-1]
    return size / stored * (after - before) / (last - first) * _HOUR_S


def _alarms(found: Answer, rows: list[Answer], run: RunFolder, now: float) -> Iterator[str]:
    if found["state"] == "stopped":
        after = f"after step {found['step']}" if found["step"] else "before its first step"
        of = f" of {found['of']}" if found["step"] and found["of"] else ""
        yield f"nothing runs, and it stopped {after}{of}. Go on: rlhf-pipeline run --resume --out {typed(run.address)}"
    for one in found["processes"]:
        if found["state"] == "running" and not one["alive"] and one.get("state") != "ended":
            yield f"{one['name']} is not running (it was: {one.get('state')})"
        elif one["alive"] and now - (one["seen"] or now) > SILENT_S:
            yield f"{one['name']} has said nothing for {now - one['seen']:.0f} s (it was: {one.get('state')})"
        elif one["alive"] and str(one.get("state")).startswith("failed"):
            yield f"{one['name']} {one['state']}"
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
        free = shutil.disk_usage(run.address).free
        hours = free / found["bytes_per_hour"] if found["bytes_per_hour"] else float("inf")
        if free < _LEAST_FREE or (found["state"] == "running" and hours < 24):
            yield f"{free / 1e9:.1f} GB are free" + (f", at this rate for {number(hours, 1)} h" if hours < 1e6 else "")
