"""`rlhf-pipeline copy`: a store into a new one, of either backend."""

from __future__ import annotations

import argparse
import time

from rlhf_pipeline.cli.output import Ticker, echo
from rlhf_pipeline.cli.parser import add_filter, add_skip_damaged
from rlhf_pipeline.errors import count, typed
from rlhf_pipeline.report.formatting import duration

HELP = "copy a store, or part of it, to a new store with either backend"
DETAILS = """\
Copies all columns of the trajectories, in order of arrival, with updates applied. The copy is a separate store with
new row ids; it is not a run. The values of trajectory_id do not change. With --backend zarr, the copy is sealed: it
consists of sharded, zstd-compressed Zarr groups that any Zarr library can read, and its size is at most half that of a
memmap store. Filters have the same syntax as for `export`.

examples:
  rlhf-pipeline copy runs/copy_digits --to archive --backend zarr
  rlhf-pipeline copy archive --to runs/again
  rlhf-pipeline copy runs/copy_digits --to best --filter 'reward>=1'"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE", help="a run or a store")
    command.add_argument("--to", required=True, metavar="STORE", help="the new folder; must not exist yet")
    command.add_argument(
        "--backend",
        choices=("memmap", "zarr"),
        default="memmap",
        help="memmap: raw, for training; zarr: compressed, for archives (default: %(default)s)",
    )
    add_filter(command)
    add_skip_damaged(command)


def execute(args: argparse.Namespace) -> int:
    """Copy the store and report the result."""
    from rlhf_pipeline.exchange.copier import copy_store
    from rlhf_pipeline.report.stored import Stored
    from rlhf_pipeline.run.disk import disk_usage
    from rlhf_pipeline.run.lookup import open_run_or_store

    _, path = open_run_or_store(args.path)
    started = time.perf_counter()
    with Stored(path) as stored:
        options = {"filters": args.filters, "skip_damaged": args.skip_damaged, "on_rows": Ticker()}
        report = copy_store(stored.store, args.to, backend=args.backend, **options)
    chosen = f", {report.num_left_out:,} excluded" if report.num_left_out else ""
    sizes = f"{disk_usage(path) / 1e6:.1f} MB -> {disk_usage(report.path) / 1e6:.1f} MB"
    took = duration(time.perf_counter() - started)
    echo(f"{report.path}: {count(report.num_trajectories, 'trajectory')}{chosen}, {args.backend}, {sizes}, {took}")
    echo("the copy has new ids; trajectory_id and all other columns are unchanged")
    copied_path = typed(report.path)
    echo(f"compare:       rlhf-pipeline diff {typed(args.path)} {copied_path}")
    echo(f"look at them:  rlhf-pipeline inspect {copied_path}")
    return 0
