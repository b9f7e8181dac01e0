"""Checks whether a run is intact: the store's checksums, the ledger, the steps, the checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from rlhf_pipeline.errors import DataError, count, typed
from rlhf_pipeline.report.drift import drift_text, drifted
from rlhf_pipeline.report.stored import Ids, Stored
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.checkpoint import read_checkpoint_state, step_of
from rlhf_pipeline.run.completeness import came_to_nothing, missing_parts
from rlhf_pipeline.run.files import folder_problem
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.place import is_store
from rlhf_pipeline.run.processes.weights import Published, read_published, weights_problem
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.selection import Choice
from trajectory_store import StoreError, TrajectoryStore

_STEPS_AT_ONCE: Final = 1024
"""Ledger rows whose trajectories are looked up together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check."""

    part: str
    """The part that was checked: `store`, `metrics.jsonl`, ..."""
    ok: bool
    text: str


def check_store(path: Address, *, part: str = "store", what: str = "trajectory") -> Iterator[Finding]:
    """Check every checksum of a store, and its conversations for tokens that were not sampled so."""
    try:
        with Stored(path, copies=True) as stored:
            report = stored.store.verify()
            strayed = list(drifted(stored)) if report.ok else []
    except StoreError as error:
        yield Finding(part=part, ok=False, text=str(error))
        return
    if report.ok:
        text = f"{count(report.trajectories, what)}, {report.bytes / 1e6:.1f} MB: every checksum matches"
        yield Finding(part=part, ok=True, text=text)
        if strayed:
            yield Finding(part=part, ok=False, text=drift_text(strayed))
        return
    for problem in report.problems:
        yield Finding(part=part, ok=False, text=problem)
    damaged = report.damaged_ids
    if len(damaged):
        some = ", ".join(str(row) for row in damaged[:8].tolist()) + (", ..." if len(damaged) > 8 else "")
        text = f"{count(len(damaged), what)} are corrupted (ids {some}); all others are intact. "
        way_out = f"Restore it from a copy, or accept the loss: rlhf-pipeline verify {typed(path)} --accept-loss"
        yield Finding(part=part, ok=False, text=text + way_out)


def check_run(run: RunFolder) -> Iterator[Finding]:
    """Check a run's store, and that ledger, metrics and checkpoints agree. The run may be active meanwhile."""
    if is_store(run.store_path):
        yield from check_store(run.store_path)
    elif came_to_nothing(run):
        yield Finding(part="store", ok=True, text="no rows are stored yet")
    if is_store(run.rollouts):
        yield from check_store(run.rollouts, part=run.rollouts.name, what="rollout")
    for check in (_check_choice, _check_rows, _check_checkpoints, _check_weights):
        findings = list(check(run))
        if not all(finding.ok for finding in findings):
            # A step, a checkpoint or weights may have been written between two reads: damage shows in a second check.
            findings = list(check(RunFolder(run.address)))
        yield from findings


def _check_choice(run: RunFolder) -> Iterator[Finding]:
    """Check a replay's record of the trajectories that it learns from."""
    try:
        choice = Choice.load(run)
    except DataError as error:
        yield Finding(part=run.choice_file.name, ok=False, text=str(error))
        return
    if choice is not None:
        yield Finding(part=run.choice_file.name, ok=True, text=f"{count(len(choice), 'trajectory')} were chosen")


def _check_rows(run: RunFolder) -> Iterator[Finding]:
    """Check the files with one line per step."""
    try:
        yield from _check_parts(run)
        yield _check_steps(run.metrics)
        yield _check_steps(run.ledger)
        yield from _check_ledger_ids(run)
    except DataError as error:
        yield Finding(part="run", ok=False, text=str(error))


def _check_parts(run: RunFolder) -> Iterator[Finding]:
    """Check that store, ledger, metrics and checkpoints agree on the steps."""
    problems = [] if came_to_nothing(run) else list(missing_parts(run))
    # A step's ledger row is written before the step, its metrics after: the ledger may be one row ahead.
    if not problems and not 0 <= len(run.ledger) - len(run.metrics) <= 1:
        problems = [
            f"{run.ledger_file.name} has {len(run.ledger)} rows, but {run.metrics_file.name} has {len(run.metrics)}"
        ]
    for problem in problems:
        yield Finding(part="run", ok=False, text=problem)
    if not problems:
        yield Finding(part="run", ok=True, text="store, ledger, metrics and checkpoints agree on the steps")


def _check_steps(rows: StepRows) -> Finding:
    name = rows.path.name
    for problem in rows.problems():
        return Finding(part=name, ok=False, text=problem)
    torn = " (its last line is incomplete because of a kill; a resume discards it)" if rows.is_torn else ""
    return Finding(part=name, ok=True, text=f"{count(len(rows), 'step')} without a gap{torn}")


def _check_ledger_ids(run: RunFolder) -> Iterator[Finding]:
    if not len(run.ledger) or not is_store(run.store_path):
        return
    try:
        with Stored(run.store_path) as stored:
            uses = _uses(run, stored.store)
    except StoreError:
        return  # the store's own check has reported it
    num_uses, evicted, missing, example = uses
    if missing:
        text = f"{count(missing, 'trajectory')} in the ledger are not in the store ({example})"
        yield Finding(part="ledger ids", ok=False, text=text)
        return
    left = f" or evicted ({evicted:,}) because of max_trajectories" if evicted else ""
    yield Finding(part="ledger ids", ok=True, text=f"{num_uses:,} uses of trajectories, all of them in the store{left}")


def _uses(run: RunFolder, store: TrajectoryStore) -> tuple[int, int, int, str]:
    """Return how many uses the ledger names, how many of them of evicted and of missing rows, and an example."""
    limited = run.config.pipeline.get("buffer", {}).get("max_trajectories") is not None
    firsts, _ = store.arrivals().runs()
    oldest = int(firsts.min()) if len(firsts) and limited else -1
    num_uses, evicted, missing, example = 0, 0, 0, ""
    ledger = iter(run.ledger)
    while rows := list(itertools.islice(ledger, _STEPS_AT_ONCE)):
        steps = np.concatenate([np.full(len(row.get("row_ids", ())), row["step"]) for row in rows])
        used: Ids = np.concatenate([np.asarray(row.get("row_ids", ()), np.int64) for row in rows])
        num_uses += len(used)
        is_absent = ~store.holds(used)
        # The oldest segments are evicted first, so evicted rows have smaller ids than the remaining ones.
        is_evicted = is_absent & (used < oldest)
        evicted += int(is_evicted.sum())
        if (at := np.flatnonzero(is_absent & ~is_evicted)).size:
            missing += len(at)
            example = example or f"step {steps[at[0]]} used trajectory {used[at[0]]}"
    return num_uses, evicted, missing, example


def _check_checkpoints(run: RunFolder) -> Iterator[Finding]:
    checkpoints = run.saved()
    for checkpoint in checkpoints:
        problem = folder_problem(run.bring(checkpoint)) or _lines_problem(run, checkpoint)
        if problem is not None:
            yield Finding(part="checkpoints", ok=False, text=f"{checkpoint.name}: {problem}")
            return
    newest = f"; the newest is {checkpoints[-1].name}: every checksum matches" if checkpoints else ""
    yield Finding(part="checkpoints", ok=True, text=f"{count(len(checkpoints), 'checkpoint')}{newest}")


def _lines_problem(run: RunFolder, checkpoint: Path) -> str | None:
    """Compare what a checkpoint has noted of its step's lines with the lines that are there."""
    try:
        return run.lines_problem(step_of(checkpoint), read_checkpoint_state(checkpoint).get("lines", {}))
    except DataError:
        return None  # the check of the rows has reported it


def _check_weights(run: RunFolder) -> Iterator[Finding]:
    """Check the weights that a run of several processes has published."""
    if not run.is_of_several:
        return
    published = read_published(run)
    problem = (published and weights_problem(run, published)) or _weights_misfit(run, published)
    which = "" if published is None else f"the newest, of step {published.version}: "
    if problem is not None:
        text = f"{which}{problem}. The learner publishes them again when it starts"
    elif published is None:
        text = "no weights are published yet"
    else:
        text = f"the newest are from step {published.version}: every checksum matches"
    yield Finding(part="weights", ok=problem is None, text=text)


def _weights_misfit(run: RunFolder, published: Published | None) -> str | None:
    """Compare the published weights with the steps that were taken: the first are published before the first step."""
    if run.place.is_alive("learner"):
        return None  # it compares them itself when it starts, and replaces those of steps that the run has lost
    try:
        if published is None:
            num_steps = run.metrics.last_step
            return f"none are published, but {count(num_steps, 'step')} were taken" if num_steps else None
        is_recorded = not published.version or run.ledger.place_of(published.version) is not None
        return None if is_recorded else "the ledger has no such step"
    except DataError:
        return None  # the check of the rows has reported it
