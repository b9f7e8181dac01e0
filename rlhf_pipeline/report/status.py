"""The current state of a run: its processes, what they wait for, its disk usage, and its alarms."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from rlhf_pipeline.report.alarms import Alarm, process_alarms, run_alarms
from rlhf_pipeline.report.query import Answer, View
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.disk import run_usage
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.heartbeat import read_report
from rlhf_pipeline.run.remote.copies import copies_of

_YOUNG_S: Final = 60.0
"""Steps that cover less time are not used to predict an hour."""
_ROWS = 100
_HOUR_S = 3600.0


def status(view: View, now: float) -> Answer:
    """Return the state of a run, ready for JSON.

    Args:
        view: a run, no store alone.
        now: seconds since 1970.

    Returns:
        `state` (`running`, `ended`, `stopped`), `since` and `seen` in seconds since 1970, `processes`, `waits_for`,
        `graders` (see `View.graders`),
        `bytes`, `bytes_per_hour` (None without steps of a minute, and of a run that does not run), `bytes_allowed` (the
        budget, or None), and `alarms`, each the fields of an `Alarm`; besides the figures of `View.about`.
    """
    run = view.run
    assert run is not None
    about, rows = view.about(), list(view.metrics_rows()[-_ROWS:])
    begun = run.in_use_since()
    at_work = [process for process in about["processes"] if process["alive"]]
    done = (about["step"] or 0) >= (about["of"] or 1) or _ended(about["processes"]) or _reached(run, rows)
    state = "running" if begun is not None or at_work else "ended" if done else "stopped"
    starts = [process["started"] for process in at_work if process.get("started")] + ([begun] if begun else [])
    report_times = [process["seen"] for process in about["processes"] if process["seen"]] + [about["updated"] or 0.0]
    usage = run_usage(run.address)
    answer = {
        **about,
        "state": state,
        "since": min(starts, default=None) if state == "running" else max(report_times) or None,
        "seen": max(report_times) or None,
        "waits_for": [
            f"{process['name']}: {process['state']}"
            for process in at_work
            if str(process.get("state")).startswith("wait")
        ],
        "graders": view.graders(),
        "bytes": usage.total,
        "bytes_per_hour": _growth(rows, usage.growing, about["stored"]) if state == "running" else None,
        "bytes_allowed": run.config.pipeline.get("buffer", {}).get("max_bytes"),
    }
    return {**answer, "alarms": [dataclasses.asdict(alarm) for alarm in run_alarms(answer, rows, run, now)]}


def alarms_of_process(state: Answer, name: str, now: float) -> list[Answer]:
    """Return the alarms of one process of a run.

    Args:
        state: what `status` returned.
        name: of the process.
        now: seconds since 1970.
    """
    reports = [process for process in state["processes"] if process["name"] == name]
    return _alarms(name, reports[0] if reports else None, now)


def local_alarms(run: Address, name: str, now: float) -> list[Answer]:
    """Return whether a process on this machine is gone or frozen, by its heartbeat alone and without any request.

    A run at a URL need not be reachable. What the process reports of its work, such as rewards that all fail, is no
    reason to restart it.

    Args:
        run: the folder or URL of the run.
        name: of the process.
        now: seconds since 1970.
    """
    folders = [run] if isinstance(run, Path) else copies_of(run)
    reports = [report for folder in folders if (report := read_report(folder / filenames.PROCESSES, name))]
    alarms = _alarms(name, max(reports, key=lambda report: report["alive"], default=None), now)
    return [alarm for alarm in alarms if alarm["name"] != "failed"]


def _alarms(name: str, report: Answer | None, now: float) -> list[Answer]:
    if report is None:
        text = f"{name} has not reported yet"
        return [dataclasses.asdict(Alarm(name="not_started", severity="page", process=name, text=text))]
    return [dataclasses.asdict(alarm) for alarm in process_alarms(report, now, is_running=True)]


def _ended(processes: list[Answer]) -> bool:
    return bool(processes) and all(process.get("state") == "ended" for process in processes)


def _reached(run: RunFolder, rows: list[Answer]) -> bool:
    """Return whether the newest rollouts have the reward at which the run stops."""
    learn = run.config.pipeline.get("learn", {})
    rewards = [row["task_reward"] for row in rows if row.get("task_reward") is not None][-learn.get("stop_window", 1) :]
    target = learn.get("stop_at_reward")
    return target is not None and bool(rewards) and sum(rewards) / len(rewards) >= target


def _growth(rows: list[Answer], growing: int, stored: int) -> float | None:
    """Return bytes per hour: what a trajectory takes, times how many the newest steps added."""
    points = [(row["time"], row["watermark"]) for row in rows if row.get("time") and row.get("watermark") is not None]
    if len(points) < 2 or points[-1][0] - points[0][0] < _YOUNG_S or not stored:
        return None
    (first, before), (last, after) = points[0], points[-1]
    return growing / stored * (after - before) / (last - first) * _HOUR_S
