"""`rlhf-pipeline compact`: merge the segments of a store that no process writes to."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.cli.output import echo, progress_lines
from rlhf_pipeline.errors import RunExistsError, RunStorageError, count, typed
from rlhf_pipeline.report.formatting import duration

if TYPE_CHECKING:
    from rlhf_pipeline.run.address import Address
    from rlhf_pipeline.run.folder import RunFolder
    from trajectory_store import CompactReport

HELP = "merge the segments of a store while no process is writing to it"
DETAILS = """\
Merges finished segments into fewer segments, keeps only the latest version of each updated value, and frees the space
of older versions. Ids, order and values do not change, so a run resumes and replays as before. A zarr store is
converted to sharded, zstd-compressed Zarr groups. Until the command ends, the disk contains both the old and the new
segments. You can stop the command at any time, and other processes can read the store while it is running. The
command rejects a store to which a run, an import or a recorder is writing.

examples:
  rlhf-pipeline compact runs/copy_digits
  rlhf-pipeline compact runs/mine/store
  rlhf-pipeline compact s3://bucket/run"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE", help="a run or a store")


def execute(args: argparse.Namespace) -> int:
    """Compact the store and report the result."""
    from rlhf_pipeline.run.disk import disk_usage
    from rlhf_pipeline.run.lookup import open_run_or_store
    from trajectory_store import TrajectoryStore

    run, path = open_run_or_store(args.path)
    before = disk_usage(path)
    started = time.perf_counter()
    if isinstance(path, Path) and not os.access(path, os.W_OK):
        raise RunStorageError(
            f"{path} is read-only, so it cannot be compacted. Make a compacted copy: rlhf-pipeline copy "
            f"{typed(args.path)} --to NEW_STORE"
        )
    with alone(run, path), TrajectoryStore.open(path, mode="a") as store:
        if store.being_written():
            raise RunExistsError(
                f"a process is writing to {path}. The process merges small segments automatically, and compacting "
                "now would omit its open segment. Stop the process first. (With the zarr backend, a killed writer is "
                "considered active for an hour.)"
            )
        with progress_lines("compacting for {}; it can be stopped without loss"):
            report = store.compact()
        num = len(store)
    if report.skipped:
        raise RunExistsError(f"{path} was not compacted: {report.skipped}. Try again later.")
    echo("\n".join(_lines(report, path, num, (before, disk_usage(path)), time.perf_counter() - started)))
    echo(f"check it:  rlhf-pipeline verify {typed(args.path)}")
    return 0


@contextmanager
def alone(run: RunFolder | None, store: Address) -> Iterator[None]:
    """Keep runs, imports and recorders out of a store."""
    from rlhf_pipeline.data.store_errors import as_ours
    from trajectory_store.recorder.source_ids import store_lock

    with ExitStack() as stack:
        if isinstance(store, Path):  # imports and recorders write to folders
            refusal = f"an import or a recorder is writing to {store}. Wait for it, or stop it first."
            with as_ours():
                stack.enter_context(store_lock(store, refusal=refusal))
        if run is not None:
            stack.enter_context(run.lock(advice="Stop that first."))
        yield


def _lines(report: CompactReport, path: Address, num: int, sizes: tuple[int, int], seconds: float) -> Iterator[str]:
    yield f"{path}: {count(num, 'trajectory')}, {duration(seconds)}"
    if report.segments_before == report.segments_after and not report.rows:
        yield f"  nothing to merge: {count(report.segments_before, 'segment')}, {sizes[0] / 1e6:.1f} MB"
        return
    moved = f"{count(report.rows, 'trajectory')} moved; ids and order are unchanged"
    yield f"  segments  {report.segments_before:,} -> {report.segments_after:,}  ({moved})"
    yield f"  on disk   {sizes[0] / 1e6:.1f} MB -> {sizes[1] / 1e6:.1f} MB"
