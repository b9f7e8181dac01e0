"""`rlhf-pipeline show`: stored trajectories, token by token."""

from __future__ import annotations

import argparse
import shutil

from rlhf_pipeline.cli.output import say
from rlhf_pipeline.cli.parser import natural, positive
from rlhf_pipeline.errors import typed

_MAX_TOKENS = 64

HELP = "show stored trajectories, token by token"
DETAILS = """\
examples:
  rlhf-pipeline show runs/copy_digits              the newest trajectory, token by token
  rlhf-pipeline show runs/copy_digits --id 17
  rlhf-pipeline show runs/copy_digits --group 3    all completions of one prompt
  rlhf-pipeline show runs/copy_digits --last 20
  rlhf-pipeline show runs/copy_digits --step 12    the batch of optimizer step 12

One trajectory is shown token by token, several as one line each; --full shows every token of each."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--id", type=natural, metavar="N", help="the trajectory with this id")
    which.add_argument("--group", type=natural, metavar="G", help="all trajectories of this group")
    which.add_argument("--last", type=positive, metavar="N", help="the newest N trajectories")
    which.add_argument("--step", type=positive, metavar="S", help="the trajectories that optimizer step S learned from")
    command.add_argument("--full", action="store_true", help="show every token of every trajectory")


def execute(args: argparse.Namespace) -> int:
    """Print one trajectory in full, or several as one line each."""
    from rlhf_pipeline.report.samples import read_trajectories
    from rlhf_pipeline.report.show import brief, choose, full
    from rlhf_pipeline.report.stored import Stored
    from rlhf_pipeline.report.tokens import TokenTexts
    from rlhf_pipeline.report.words import evaluation_words
    from rlhf_pipeline.run.folder import open_run_or_store, run_of_evaluation

    run, store_path = open_run_or_store(args.path)
    with Stored(store_path) as stored:
        ids = choose(stored, run, id=args.id, group=args.group, step=args.step, last=args.last)
        items = read_trajectories(stored, ids, TokenTexts(run or run_of_evaluation(store_path)))
    if args.full or len(items) == 1:
        for place, item in enumerate(items):
            if place:
                say()
            say("\n".join(full(item, max_tokens=None if args.full else _MAX_TOKENS)))
        return 0
    say("\n".join(brief(items, shutil.get_terminal_size((110, 24)).columns)))
    row = run.ledger.of_step(args.step) if run is not None and args.step is not None else None
    if row is not None and len(row["row_ids"]) > len(items):
        learned = len(row["row_ids"])
        say(f"of the {learned:,} trajectories of step {args.step}, {learned - len(items):,} were evicted")
    figures = run.metrics.of_step(args.step) if run is not None and args.step is not None else None
    if figures is not None and "evaluation/reward" in figures:
        words = evaluation_words({name: value for name, value in figures.items() if name.startswith("evaluation/")})
        say(f"evaluation of the weights after step {args.step}: {words}")
    say(f"one of them, token by token: rlhf-pipeline show {typed(args.path)} --id {items[-1].id}")
    return 0
