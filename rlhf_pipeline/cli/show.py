"""`rlhf-pipeline show`: stored trajectories, token by token."""

from __future__ import annotations

import argparse
import shutil

import numpy as np

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.report.run_folder import RunFolder
from rlhf_pipeline.report.samples import read_trajectories
from rlhf_pipeline.report.show import brief, full
from rlhf_pipeline.report.stored import Ids, Stored, open_run_or_store
from rlhf_pipeline.report.tokens import TokenTexts

_MAX_TOKENS = 64


def execute(args: argparse.Namespace) -> int:
    """Print one trajectory whole, or several as one line each."""
    run, store_path = open_run_or_store(args.path)
    with Stored(store_path) as stored:
        ids = choose(stored, run, args)
        items = read_trajectories(stored, ids, TokenTexts(run))
    if args.full or len(items) == 1:
        for place, item in enumerate(items):
            if place:
                print()
            print("\n".join(full(item, max_tokens=None if args.full else _MAX_TOKENS)))
        return 0
    print("\n".join(brief(items, shutil.get_terminal_size((110, 24)).columns)))
    print(f"one of them, token by token: rlhf-pipeline show {args.path} --id {items[-1].id}")
    return 0


def choose(stored: Stored, run: RunFolder | None, args: argparse.Namespace) -> Ids:
    """Return the ids that were asked for.

    Raises:
        DataError: there are none.
        MissingRowError: the id is not in the store (raised when it is read).
    """
    ids = stored.ids()
    if not len(ids):
        raise DataError(f"{stored.path} holds no trajectories yet.")
    if args.id is not None:
        if not bool((ids == args.id).any()):
            raise DataError(f"there is no trajectory {args.id} in {stored.path}. {_what_is_there(ids)}")
        return np.array([args.id], np.int64)
    if args.group is not None:
        return _group(stored, ids, args.group)
    if args.step is not None:
        return _step(stored, run, ids, args.step)
    return ids[-(args.last or 1) :]


def _group(stored: Stored, ids: Ids, group: int) -> Ids:
    groups = stored.scalars("group_id")
    if groups is None:
        raise DataError(f"{stored.path} has no column group_id. Use --id or --last.")
    found = ids[groups == group]
    if not len(found):
        raise DataError(f"there is no group {group} in {stored.path}; groups go from {groups.min()} to {groups.max()}.")
    return found


def _step(stored: Stored, run: RunFolder | None, ids: Ids, step: int) -> Ids:
    if run is None:
        raise DataError(
            f"{stored.path} is a store alone; --step needs the ledger of a run. Use --id, --group or --last."
        )
    rows = {row["step"]: row for row in run.ledger}
    if step not in rows:
        known = f"steps {min(rows)} to {max(rows)}" if rows else "no steps"
        raise DataError(f"the ledger {run.path / 'ledger.jsonl'} has no step {step}; it has {known}.")
    wanted = np.array(rows[step].get("row_ids", []), np.int64)
    there = wanted[np.isin(wanted, ids)]
    if not len(there):
        raise DataError(f"none of the {len(wanted)} trajectories of step {step} is in the store any more (evicted).")
    return there


def _what_is_there(ids: Ids) -> str:
    return f"It holds {len(ids):,}, from id {ids[0]} to {ids[-1]}; `show RUN --last 20` lists the newest."
