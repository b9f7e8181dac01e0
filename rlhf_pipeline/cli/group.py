"""`rlhf-pipeline group`: all completions of one prompt, best first."""

from __future__ import annotations

import argparse
import math
import shutil

from rlhf_pipeline.cli.output import echo, echo_json
from rlhf_pipeline.cli.parser import add_json, natural

HELP = "show the members of a group side by side, best first"
DETAILS = """\
examples:
  rlhf-pipeline group runs/copy_digits 3
  rlhf-pipeline group runs/copy_digits         the newest groups, one per line"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE", help="a run or a store")
    command.add_argument(
        "group", nargs="?", type=natural, metavar="G", help=("the id of the group (default: list the newest groups)")
    )
    add_json(command)


def execute(args: argparse.Namespace) -> int:
    """Print a group's members, or the newest groups."""
    from rlhf_pipeline.errors import count
    from rlhf_pipeline.report.formatting import aligned, number, one_line
    from rlhf_pipeline.report.query import View

    view, room = View(args.path), max(shutil.get_terminal_size((110, 24)).columns - 48, 12)
    answer = view.groups() if args.group is None else view.group(args.group)
    if args.json:
        echo_json(answer)
    elif isinstance(answer, list):
        rows = [("group", "members", "reward", "best", "completion")]
        for group in answer:
            best, num = group["best"], str(len(group["rewards"]))
            texts = number(group["reward_mean"]), number(best["reward"]), one_line(best["completion"], room)
            rows.append((str(group["group"]), num, *texts))
        echo("\n".join(aligned(rows, left=0)))
    else:
        members = sorted(answer["rows"], key=lambda row: -math.inf if row["reward"] is None else row["reward"])[::-1]
        echo(f"group {args.group}: {count(answer['num'], 'member')}, mean reward {number(answer['reward_mean'])}")
        echo(f"prompt: {one_line(members[0]['prompt'], 2 * room)}")
        rows = [("id", "version", "tokens", "reward", "advant.", "finish", "completion")]
        for row in members:
            judged = number(row["reward"]), number(row["advantage"]), row["finish"] or "-"
            facts = row["id"], str(row["version"]), str(row["tokens"])
            rows.append((*facts, *judged, one_line(row["completion"], room)))
        echo("\n".join(aligned(rows, left=0)))
    view.close()
    return 0
