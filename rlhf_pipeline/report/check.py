"""Is a run whole: the store's checksums, the ledger, the steps, the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.files import folder_problem
from rlhf_pipeline.report.run_folder import Row, RunFolder, is_store
from rlhf_pipeline.report.stored import Ids, Stored
from rlhf_pipeline.report.words import count
from rlhf_pipeline.run.checkpoint import list_checkpoints
from trajectory_store import StoreError


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found."""

    part: str
    """What was checked: `store`, `metrics.jsonl`, ..."""
    ok: bool
    text: str


def check_store(path: Path) -> Iterator[Finding]:
    """Check every checksum of a store."""
    try:
        with Stored(path) as stored:
            report = stored.store.verify()
    except StoreError as error:
        yield Finding(part="store", ok=False, text=str(error))
        return
    if report.ok:
        what = f"{count(report.trajectories, 'trajectory')}, {report.bytes / 1e6:.1f} MB: every checksum holds"
        yield Finding(part="store", ok=True, text=what)
        return
    for problem in report.problems:
        yield Finding(part="store", ok=False, text=problem)
    damaged = report.damaged_ids
    if len(damaged):
        some = ", ".join(str(row) for row in damaged[:8].tolist()) + (", ..." if len(damaged) > 8 else "")
        text = f"{count(len(damaged), 'trajectory')} cannot be trusted (ids {some}); all others are good. "
        yield Finding(part="store", ok=False, text=text + "Restore the segment from a copy, or leave these ids out.")


def check_run(run: RunFolder) -> Iterator[Finding]:
    """Check a run: its store, and that ledger, metrics and checkpoints fit together."""
    try:
        metrics, ledger = run.metric_lines, run.ledger
    except DataError as error:
        yield Finding(part="run", ok=False, text=str(error))
        metrics, ledger = [], []
    if is_store(run.store_path):
        yield from check_store(run.store_path)
    elif metrics or ledger:
        yield Finding(
            part="store", ok=False, text=f"there is no store at {run.store_path}, but the run has taken steps"
        )
    else:
        yield Finding(part="store", ok=True, text="nothing is stored yet")
    yield _check_steps("metrics.jsonl", metrics, run.path)
    yield _check_steps("ledger.jsonl", ledger, run.path)
    yield from _check_ledger_ids(run, ledger)
    yield from _check_ahead(metrics, ledger)
    yield from _check_checkpoints(run.path / "checkpoints")


def _check_steps(name: str, rows: Sequence[Row], folder: Path) -> Finding:
    steps = [row["step"] for row in rows]
    torn = (
        " (its last line is torn: a kill cut it short; a resume goes on without it)" if _is_torn(folder / name) else ""
    )
    for place, step in enumerate(steps):
        if step != place + 1:
            text = f"line {place + 1} is step {step}, expected step {place + 1}: lines are missing, repeated or moved"
            return Finding(part=name, ok=False, text=text)
    return Finding(part=name, ok=True, text=f"{count(len(steps), 'step')} without a gap{torn}")


def _check_ledger_ids(run: RunFolder, ledger: Sequence[Row]) -> Iterator[Finding]:
    if not ledger or not is_store(run.store_path):
        return
    try:
        with Stored(run.store_path) as stored:
            ids = np.sort(stored.ids())
    except StoreError:
        return  # the store's own check has said so
    limited = run.config.pipeline.get("buffer", {}).get("max_trajectories") is not None
    wanted, evicted, missing = 0, 0, 0
    example = ""
    for row in ledger:
        used: Ids = np.asarray(row.get("row_ids", []), np.int64)
        wanted += len(used)
        places = np.minimum(np.searchsorted(ids, used), max(len(ids) - 1, 0))
        absent = used[ids[places] != used] if len(ids) else used
        # Whole segments leave from the old end, so what was evicted has smaller ids than anything that is left.
        gone = int((absent < ids[0]).sum()) if limited and len(ids) else 0
        evicted += gone
        if len(absent) > gone:
            missing += len(absent) - gone
            example = example or f"step {row['step']} used trajectory {absent[-1]}"
    if missing:
        text = f"{count(missing, 'trajectory')} that the ledger names are not in the store ({example})"
        yield Finding(part="ledger ids", ok=False, text=text)
        return
    left = f"; {evicted:,} were evicted since, as max_trajectories asks" if evicted else ""
    yield Finding(part="ledger ids", ok=True, text=f"{wanted:,} uses of trajectories, all of them in the store{left}")


def _check_ahead(metrics: Sequence[Row], ledger: Sequence[Row]) -> Iterator[Finding]:
    """A step's ledger row is written before the step, its metrics after: the ledger may be one row ahead."""
    if not 0 <= len(ledger) - len(metrics) <= 1:
        text = (
            f"{count(len(ledger), 'row')} for {count(len(metrics), 'line')} of metrics.jsonl; there should be as many"
        )
        yield Finding(part="ledger.jsonl", ok=False, text=text)


def _check_checkpoints(folder: Path) -> Iterator[Finding]:
    found = list_checkpoints(folder)
    for checkpoint in found:
        problem = folder_problem(checkpoint)
        if problem is not None:
            yield Finding(part="checkpoints", ok=False, text=f"{checkpoint.name}: {problem}")
            return
    newest = f", the newest {found[-1].name}" if found else ""
    yield Finding(part="checkpoints", ok=True, text=f"{count(len(found), 'checkpoint')}{newest}: every checksum holds")


def _is_torn(file: Path) -> bool:
    if not file.is_file() or not file.stat().st_size:
        return False
    with file.open("rb") as stream:
        stream.seek(-1, 2)
        return stream.read(1) != b"\n"
