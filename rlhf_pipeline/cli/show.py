"""`rlhf-pipeline show`: stored trajectories, token by token."""

from __future__ import annotations

import argparse
import shutil
from contextlib import closing
from typing import TYPE_CHECKING

from rlhf_pipeline.cli.output import echo, echo_json
from rlhf_pipeline.cli.parser import add_json, natural, positive, row_id
from rlhf_pipeline.errors import DataError, typed

if TYPE_CHECKING:
    from rlhf_pipeline.report.query import Answer, View

_MAX_TOKENS = 64

HELP = "show stored trajectories, token by token"
DETAILS = """\
examples:
  rlhf-pipeline show runs/copy_digits              the newest trajectory, token by token
  rlhf-pipeline show runs/copy_digits --id 17
  rlhf-pipeline show runs/copy_digits --group 3    all completions of one prompt
  rlhf-pipeline show runs/copy_digits --last 20
  rlhf-pipeline show runs/copy_digits --step 12    the batch of optimizer step 12

A single trajectory is shown token by token. Several trajectories are listed, one per line; with --full, every token
of each trajectory is shown."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE", help="a run or a store")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--id", type=row_id, metavar="N", help="the trajectory with this id, as a number or SEGMENT:ROW")
    which.add_argument("--group", type=natural, metavar="G", help="all trajectories of this group")
    which.add_argument("--last", type=positive, metavar="N", help="the newest N trajectories")
    which.add_argument("--step", type=positive, metavar="S", help="the trajectories that were used in optimizer step S")
    command.add_argument("--tokenizer", metavar="FOLDER", help="the tokenizer for a store without a run")
    command.add_argument("--full", action="store_true", help="show every token of every trajectory")
    add_json(command)


def execute(args: argparse.Namespace) -> int:
    """Print one trajectory in full, or several as one line each."""
    import numpy as np

    from rlhf_pipeline.report.formatting import evaluation_words
    from rlhf_pipeline.report.query import View
    from rlhf_pipeline.report.show import brief, full

    with closing(View(args.path, tokenizer=args.tokenizer)) as view:
        step = {} if args.step is None else view.step(args.step)
        if args.id is not None:
            ids = np.array([args.id], np.int64)
        elif args.group is not None:
            ids = view.members(args.group)
        elif args.step is not None:
            ids = view.batch(args.step)
        else:
            ids = view.stored.store.arrivals()[-(args.last or 1) :]
        if not len(ids):
            raise DataError(_nothing(view, step))
        whole = args.full or len(ids) == 1
        items = [view.trajectory(id, most=None) for id in ids.tolist()] if whole else view.rows(ids)
    if args.json:
        echo_json(items)
        return 0
    if whole:
        echo("\n\n".join("\n".join(full(item, max_tokens=None if args.full else _MAX_TOKENS)) for item in items))
        return 0
    echo("\n".join(brief(items, shutil.get_terminal_size((110, 24)).columns)))
    learned = step.get("num", len(items))
    if learned > len(items):
        echo(f"of the {learned:,} trajectories of step {args.step}, {learned - len(items):,} were evicted")
    for evaluation in step.get("evaluations", ()):
        name = f", {evaluation['name']}" if evaluation["name"] else ""
        echo(f"evaluation of the weights after step {args.step}{name}: {evaluation_words(evaluation['figures'])}")
    echo(f"to show one token by token: rlhf-pipeline show {typed(args.path)} --id {items[-1]['id']}")
    return 0


def _nothing(view: View, step: Answer) -> str:
    """Return why there is nothing to show."""
    if step.get("num"):
        return f"none of the {step['num']} trajectories of step {step['step']} is still in the store (evicted)."
    if step:
        why = ", ".join(f"{num:,} {name.replace('_', ' ')}" for name, num in step["left_out"].items())
        return f"step {step['step']} used no trajectory" + (f"; excluded: {why}." if why else ": all were too old.")
    return f"{view.stored.path} has no trajectories."
