"""`rlhf-pipeline export`: a store to Parquet, JSONL or a Hugging Face dataset."""

from __future__ import annotations

import argparse
import time

from rlhf_pipeline.cli.output import Ticker, echo
from rlhf_pipeline.cli.parser import add_filter, add_skip_damaged
from rlhf_pipeline.errors import count, typed
from rlhf_pipeline.report.formatting import duration

HELP = "export a store as Parquet, JSONL, a Hugging Face dataset or ATIF"
DETAILS = """\
Writes every column; ragged columns become lists of numbers. To restore an identical store, import the exported file.
A filter consists of a column, one of the operators >= <= == != > <, and a value. reward, version, date and group are
short names for columns. num_tokens and num_completion_tokens (the number of tokens that the policy sampled) are also
available.

examples:
  rlhf-pipeline export runs/copy_digits --to copy_digits.parquet
  rlhf-pipeline export runs/copy_digits --to dataset --filter 'reward>=0.5' --filter 'version<100'
  rlhf-pipeline export runs/copy_digits --to agents.atif    agent trajectories in ATIF, one file per trajectory
  rlhf-pipeline export runs/copy_digits --to best.jsonl --filter 'date>=2026-01-31' --columns prompt completion"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE", help="a run or a store")
    command.add_argument(
        "--to",
        required=True,
        metavar="FILE.parquet|FILE.jsonl|FOLDER",
        help="the output path, which must not exist yet; a folder path selects a dataset, and NAME.atif selects ATIF",
    )
    add_filter(command)
    add_skip_damaged(command)
    command.add_argument(
        "--learnable",
        action="store_true",
        help="write only rows that may be used for training; this excludes evaluation rows, superseded rows, and rows "
        "without a trusted reward",
    )
    command.add_argument("--columns", nargs="+", metavar="NAME", help="write only these columns")


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
    echo(
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
    echo(f"read it:   {readers[report.kind]}")
    echo(f"import it: rlhf-pipeline import {typed(path)} --into NEW_STORE")
    return 0
