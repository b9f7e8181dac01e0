"""`rlhf-pipeline status`: what a run does now."""

from __future__ import annotations

import argparse
import time

from rlhf_pipeline.cli.output import say, say_json
from rlhf_pipeline.cli.parser import add_json

HELP = "say what a run does now: processes, waits, disk, alarms"
DETAILS = """\
examples:
  rlhf-pipeline status runs/copy_digits
  rlhf-pipeline status runs/copy_digits --json | jq .alarms
  rlhf-pipeline status runs/copy_digits --check            one line, for a probe or a cron job
  rlhf-pipeline status runs/mine --check --process learner

Exit code 1 if there is an alarm: nothing runs, a process is frozen or gone, no step for long, no space."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN")
    command.add_argument("--check", action="store_true", help="print `healthy`, or the alarms and nothing else")
    command.add_argument(
        "--process",
        metavar="NAME",
        help="look at one process only, `learner` or `collector-3`, as a probe beside it does",
    )
    add_json(command)


def execute(args: argparse.Namespace) -> int:
    """Print the state of a run; 1 if there is an alarm."""
    from rlhf_pipeline.report.formatting import aligned, count, duration, number
    from rlhf_pipeline.report.query import View
    from rlhf_pipeline.report.status import process_alarms, status
    from rlhf_pipeline.run.address import address_of
    from rlhf_pipeline.run.folder import is_run, not_found

    if not is_run(address := address_of(args.path)):
        raise not_found(address, "run")
    view, now = View(address), time.time()
    found = status(view, now)
    view.close()
    if args.process is not None:
        found["alarms"] = process_alarms(found, args.process, now)
    if args.check and not args.json:
        say("\n".join(found["alarms"]) or "healthy")
        return 1 if found["alarms"] else 0
    code = 1 if found["alarms"] else 0
    if args.json:
        say_json(found)
        return code

    def ago(at: float | None) -> str:
        return "-" if at is None else f"{duration(max(now - at, 0.0))} ago"

    of = f" of {found['of']:,}" if found["of"] else ""
    since = f", since {ago(found['since'])}" if found["since"] else ""
    say(f"{found['address']}: {found['state']}{since}")
    rewards = f"{number(found['reward_first'])} -> {number(found['reward_last'])}"
    growth = found["bytes_per_hour"]
    rows = [
        ("  step", f"{found['step'] or 0:,}{of}, reward {rewards}"),
        ("  seen", ago(found["seen"])),
        ("  stored", f"{count(found['stored'], 'trajectory')}, {found['failed']:,} of them failed"),
        ("  disk", f"{found['bytes'] / 1e6:.1f} MB" + ("" if growth is None else f", {growth / 1e6:.1f} MB per hour")),
        *((f"  {one['name']}", _process(one, ago(one["seen"]))) for one in found["processes"]),
        *(("  grader", f"from step {grader['from_step']}: {grader['what']}") for grader in found["graders"]),
        *(("  waits", text) for text in found["waits_for"]),
        *(("  ALARM", text) for text in found["alarms"]),
    ]
    say("\n".join(aligned(rows)))
    return code


def _process(one: dict[str, object], seen: str) -> str:
    state = str(one.get("state")) if one["alive"] or one.get("state") == "ended" else f"gone, was: {one.get('state')}"
    return f"{state}, seen {seen}"
