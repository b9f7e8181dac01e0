"""`rlhf-pipeline ledger`: which trajectories entered which step, in numbers."""

from __future__ import annotations

import argparse

from rlhf_pipeline.cli.output import echo, echo_json
from rlhf_pipeline.cli.parser import add_json, positive

HELP = "show the number and age of the trajectories used in the latest steps"
DETAILS = """\
examples:
  rlhf-pipeline ledger runs/copy_digits
  rlhf-pipeline ledger runs/copy_digits -n 100 --json
  rlhf-pipeline show runs/copy_digits --step 12        the trajectories used in one step"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN", help="a run")
    command.add_argument(
        "-n", "--num", type=positive, default=20, metavar="N", help="number of steps (default: %(default)s)"
    )
    add_json(command)


def execute(args: argparse.Namespace) -> int:
    """Print one line per step: trajectories, their age in steps, the watermark."""
    from rlhf_pipeline.report.formatting import aligned, number
    from rlhf_pipeline.report.query import View

    view = View(args.path)
    steps, graders = view.ledger(last=args.num), view.graders()
    view.close()
    if args.json:
        echo_json(steps)
        return 0
    rows = [("step", "trajectories", "mean age", "oldest", "watermark", *(["grader"] if graders else []))]
    for step in steps:
        ages = number(step["age_mean"]), str(step["age_max"] if step["age_max"] is not None else "-")
        grader = [str(step["grader"])] if graders else []
        rows.append((str(step["step"]), str(step["num"]), *ages, str(step.get("watermark", "-")), *grader))
    echo("\n".join(aligned(rows, left=0)))
    for place, grader in enumerate(graders, start=1):
        echo(f"grader {place}, from step {grader['from_step']}: {grader['what']}")
    return 0
