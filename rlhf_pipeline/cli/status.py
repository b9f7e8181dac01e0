"""`rlhf-pipeline status`: what a run does now."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from typing import Any

from rlhf_pipeline.cli.output import echo, echo_json
from rlhf_pipeline.cli.parser import add_json
from rlhf_pipeline.errors import DefinitionError

HELP = "report the state of a run: its processes, what they are waiting for, disk usage and alarms"
DETAILS = """\
examples:
  rlhf-pipeline status runs/copy_digits
  rlhf-pipeline status runs/copy_digits --json | jq '.alarms[] | select(.severity == "page")'
  rlhf-pipeline status runs/copy_digits --check            for a cron job or a readiness probe
  rlhf-pipeline status runs/mine --check --process learner
  rlhf-pipeline status s3://bucket/run --check --process learner --local       for a liveness probe

Each alarm has a severity. `page`: the run ended early or is incomplete, a process is frozen, failing or
gone, no step has finished for a long time, or the disk is full. `note`: trajectories failed, there are no gradients
although the task is not solved, or the disk will be full in less than a day. The exit code is 1 if an alarm has the
severity `page`."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN", help="a run")
    command.add_argument(
        "--check",
        action="store_true",
        help="print only the alarms, preceded by `healthy` if none of them has the severity `page`",
    )
    command.add_argument(
        "--process",
        metavar="NAME",
        help="check only one process, for example `learner` or `collector-3`",
    )
    command.add_argument(
        "--local",
        action="store_true",
        help="with --process: read only the heartbeat that the process writes on this machine, and send no requests to "
        "an object store; an outage of the object store is then not reported as a frozen process",
    )
    add_json(command)


def execute(args: argparse.Namespace) -> int:
    """Print the state of a run; 1 if there is an alarm of severity `page`."""
    from rlhf_pipeline.errors import count
    from rlhf_pipeline.report.formatting import aligned, duration, number
    from rlhf_pipeline.report.query import View
    from rlhf_pipeline.report.status import alarms_of_process, local_alarms, status
    from rlhf_pipeline.run.address import address_of
    from rlhf_pipeline.run.lookup import is_run
    from rlhf_pipeline.run.place import not_found

    address, now = address_of(args.path), time.time()
    if args.local:
        if args.process is None:
            raise DefinitionError("--local checks one process on this machine. Add its name: --process learner")
        return _checked({"alarms": local_alarms(address, args.process, now)}, as_json=args.json)
    if not is_run(address):
        raise not_found(address, "run")
    with closing(View(address)) as view:
        answer = status(view, now)
    if args.process is not None:
        answer["alarms"] = alarms_of_process(answer, args.process, now)
    if args.check or args.json:
        return _checked(answer, as_json=args.json)

    def ago(at: float | None) -> str:
        return "-" if at is None else f"{duration(max(now - at, 0.0))} ago"

    of = f" of {answer['of']:,}" if answer["of"] else ""
    since = f", since {ago(answer['since'])}" if answer["since"] else ""
    echo(f"{answer['address']}: {answer['state']}{since}")
    rewards = f"{number(answer['reward_first'])} -> {number(answer['reward_last'])}"
    growth = answer["bytes_per_hour"]
    rows = [
        ("  step", f"{answer['step'] or 0:,}{of}, reward {rewards}"),
        ("  seen", ago(answer["seen"])),
        ("  stored", f"{count(answer['stored'], 'trajectory')}, {answer['failed']:,} of them failed"),
        ("  disk", f"{answer['bytes'] / 1e6:.1f} MB" + ("" if growth is None else f", {growth / 1e6:.1f} MB per hour")),
        *(
            (f"  {process['name']}", _process(process, ago(process["seen"]), answer["state"]))
            for process in answer["processes"]
        ),
        *(("  grader", f"from step {grader['from_step']}: {grader['what']}") for grader in answer["graders"]),
        *(("  waits", text) for text in answer["waits_for"]),
        *(("  ALARM" if alarm["severity"] == "page" else "  note", alarm["text"]) for alarm in answer["alarms"]),
    ]
    echo("\n".join(aligned(rows)))
    return _code(answer)


def _checked(state: dict[str, Any], *, as_json: bool) -> int:
    """Print the alarms alone, or all as JSON; return the exit code."""
    if as_json:
        echo_json(state)
    else:
        lines = [f"{alarm['severity']}: {alarm['text']}" for alarm in state["alarms"]]
        echo("\n".join(lines if _code(state) else ["healthy", *lines]))
    return _code(state)


def _code(state: dict[str, Any]) -> int:
    return int(any(alarm["severity"] == "page" for alarm in state["alarms"]))


def _process(process: dict[str, Any], last_report: str, run_state: str) -> str:
    state = str(process.get("state"))
    if not process["alive"] and state != "ended":
        state = "ended" if run_state == "ended" else f"gone, was: {state}"
    return f"{state}, seen {last_report}"
