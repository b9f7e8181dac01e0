"""`rlhf-pipeline export`: a store to Parquet, JSONL or a Hugging Face dataset."""

from __future__ import annotations

import argparse
import time

from rlhf_pipeline.cli.output import Ticker, say
from rlhf_pipeline.cli.parser import add_filter, add_skip_damaged
from rlhf_pipeline.errors import typed
from rlhf_pipeline.report.formatting import count, duration

HELP = "write a store as Parquet, JSONL, a Hugging Face dataset or ATIF"
DETAILS = """\
Writes every column, ragged columns as lists of numbers; `import` restores an equal store. A filter is a column (reward,
version, date and group are short names; num_tokens and num_completion_tokens, the policy's tokens, are also available),
one of >= <= == != > <, and a value.

examples:
  rlhf-pipeline export runs/copy_digits --to copy_digits.parquet
  rlhf-pipeline export runs/copy_digits --to dataset --filter 'reward>=0.5' --filter 'version<100'
  rlhf-pipeline export runs/copy_digits --to agents.atif    agent trajectories in ATIF, one file each
  rlhf-pipeline export runs/copy_digits --to best.jsonl --filter 'date>=2026-01-31' --columns prompt completion"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE")
    command.add_argument(
        "--to",
        required=True,
        metavar="FILE.parquet|FILE.jsonl|FOLDER",
        help="must not exist; a folder is a dataset, NAME.atif is ATIF",
    )
    add_filter(command)
    add_skip_damaged(command)
    command.add_argument(
        "--learnable",
        action="store_true",
        help="only rows that may be learned from: no evaluations, replaced rows, or rows without a trusted reward",
    )
    command.add_argument("--columns", nargs="+", metavar="NAME", help="only these columns")


def execute(args: argparse.Namespace) -> int:
    """Export the store, and report the result and how to read it."""
    from rlhf_pipeline.exchange import export_store
    from rlhf_pipeline.run.lookup import open_run_or_store

    _, store = open_run_or_store(args.path)
    started = time.perf_counter()
    report = export_store(
        store,
        args.to,
        filters=args.filters,
        columns=args.columns,
        skip_damaged=args.skip_damaged,
        learnable=args.learnable,
        on_batch=Ticker(),
    )
    chosen = f", {report.num_left_out:,} excluded" if report.num_left_out else ""
    say(
        f"{report.path}: {count(report.num_trajectories, 'trajectory')}{chosen}, "
        f"{count(len(report.columns), 'column')}, {report.size_bytes / 1e6:.1f} MB, "
        f"{duration(time.perf_counter() - started)}"
    )
    path = str(report.path)
    readers = {
        "parquet": f"pyarrow.parquet.read_table({path!r})",
        "hf": f"datasets.load_from_disk({path!r})",
        "jsonl": f"head -n 1 {typed(path)} | jq .",
        "atif": "any reader of ATIF 1.8 can read each document",
    }
    say(f"read it:   {readers[report.kind]}")
    say(f"and back:  rlhf-pipeline import {typed(path)} --into NEW_STORE")
    return 0
