"""`rlhf-pipeline export`: a store to Parquet, JSONL or a Hugging Face dataset."""

from __future__ import annotations

import argparse
import shlex
import sys
import time

from rlhf_pipeline.exchange import export_store
from rlhf_pipeline.report.stored import open_run_or_store
from rlhf_pipeline.report.words import count, duration

_SAY_EVERY_S = 5.0


def execute(args: argparse.Namespace) -> int:
    """Export, and say what was written and how to read it."""
    _, store = open_run_or_store(args.path)
    started = time.perf_counter()
    said = started

    def say(done: int, total: int) -> None:
        nonlocal said
        if time.perf_counter() - said >= _SAY_EVERY_S:
            said = time.perf_counter()
            print(f"  {done:,} of {count(total, 'trajectory')}", file=sys.stderr, flush=True)

    report = export_store(store, args.to, filters=args.filters, columns=args.columns, on_batch=say)
    chosen = f", {report.num_left_out:,} left out by the filter" if report.num_left_out else ""
    print(
        f"{report.path}: {count(report.num_trajectories, 'trajectory')}{chosen}, "
        f"{count(len(report.columns), 'column')}, {report.size_bytes / 1e6:.1f} MB, "
        f"{duration(time.perf_counter() - started)}"
    )
    path = str(report.path)
    readers = {
        "parquet": f"pyarrow.parquet.read_table({path!r})",
        "hf": f"datasets.load_from_disk({path!r})",
        "jsonl": f"head -n 1 {shlex.quote(path)} | jq .",
    }
    print(f"read it:   {readers[report.kind]}")
    print(f"and back:  rlhf-pipeline import {shlex.quote(path)} --into NEW_STORE")
    return 0
