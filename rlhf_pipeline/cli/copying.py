"""`rlhf-pipeline copy`: a store into a new one, of either backend."""

from __future__ import annotations

import argparse
import shlex
import sys
import time

from rlhf_pipeline.exchange.copier import copy_store
from rlhf_pipeline.report.inspect import disk_usage
from rlhf_pipeline.report.stored import Stored, open_run_or_store
from rlhf_pipeline.report.words import count, duration

_SAY_EVERY_S = 5.0


def execute(args: argparse.Namespace) -> int:
    """Copy, and say what was written and how to compare it."""
    _, path = open_run_or_store(args.path)
    started = time.perf_counter()
    said = started

    def say(done: int, total: int) -> None:
        nonlocal said
        if time.perf_counter() - said >= _SAY_EVERY_S:
            said = time.perf_counter()
            print(f"  {done:,} of {count(total, 'trajectory')}", file=sys.stderr, flush=True)

    with Stored(path) as stored:
        report = copy_store(stored.store, args.to, backend=args.backend, filters=args.filters, on_rows=say)
    chosen = f", {report.num_left_out:,} left out by the filter" if report.num_left_out else ""
    sizes = f"{disk_usage(path) / 1e6:.1f} MB -> {disk_usage(report.path) / 1e6:.1f} MB"
    took = duration(time.perf_counter() - started)
    print(f"{report.path}: {count(report.num_trajectories, 'trajectory')}{chosen}, {args.backend}, {sizes}, {took}")
    print("the ids of the store are new; trajectory_id and all other columns are as they were")
    made = shlex.quote(str(report.path))
    print(f"compare:       rlhf-pipeline diff {shlex.quote(args.path)} {made}")
    print(f"look at them:  rlhf-pipeline inspect {made}")
    return 0
