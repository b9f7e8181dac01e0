"""Copies of a live store, file by file in any order: what a copy holds, it serves, and no upkeep of it takes away.

    python -m tests.crash.copies --count 200

A writer appends, updates, merges and evicts between any two files that are copied, as under `rsync` or `cp -r` of a
store that is in use. Then the judge looks for every row of which the copy has a segment whose commit holds, wherever it
lies, unless the copy's own catalog says that it was removed for good: a reader serves it, and so does one after a
writer has opened the copy and merged it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from trajectory_store import Column, CorruptionError, StoreError, TrajectoryStore
from trajectory_store.backend import Segment
from trajectory_store.catalog_log import runs_of
from trajectory_store.format import ORDINAL_SHIFT

COLUMNS: Final = [
    Column("tag", "int64"),
    Column("tokens", "int32", ragged=True),
    Column("later", "int64", mutable=True),
]
STEPS: Final = 60


def tokens_of(tag: int) -> list[int]:
    """Return the tokens of a row."""
    return [tag * 7 + i for i in range(1 + tag % 5)]


class Live:
    """A store that is written while it is copied."""

    def __init__(self, path: Path, backend: str, rng: random.Random) -> None:
        self.rng, self.path, self.tag = rng, path, 0
        self.tags: dict[int, int] = {}
        limit = 40 if rng.random() < 0.4 else None
        TrajectoryStore.create(path, COLUMNS, backend=backend, segment_rows=10, max_trajectories=limit).close()
        self.store = TrajectoryStore.open(path, "a")

    def step(self) -> None:
        """Do one thing."""
        what = self.rng.random()
        if what < 0.5 or not self.tags:
            tags = list(range(self.tag, self.tag + self.rng.randrange(1, 6)))
            self.tag += len(tags)
            ids = self.store.append({"tag": tags, "tokens": [tokens_of(tag) for tag in tags]})
            self.tags |= dict(zip(ids.tolist(), tags, strict=True))
        elif what < 0.65:
            row_ids = self.store.ids().tolist()
            some = self.rng.sample(row_ids, min(3, len(row_ids)))
            self.store.update(some, later=[1000 + self.tags[row] for row in some])
        elif what < 0.85:
            self.store.close()
            self.store = TrajectoryStore.open(self.path, "a")
        else:
            self.store.compact()


def files_in_any_order(folder: Path, rng: random.Random) -> Iterator[Path]:
    """Yield the files below a folder; a folder is listed when it is come to, so what is made later may be missed."""
    try:
        inside = sorted(folder.iterdir())
    except FileNotFoundError:
        return
    rng.shuffle(inside)
    for path in inside:
        if path.is_dir():
            yield from files_in_any_order(path, rng)
        else:
            yield path


def held_by(path: Path) -> set[int]:
    """Return the rows of which a copy has a commit that holds, without those that its catalog says are gone."""
    row_ids: set[int] = set()
    with TrajectoryStore.open(path) as store:
        catalog = store._catalog
        state = catalog.journal.state
        for one in catalog.medium.survey(catalog.root.first_state):
            if one.entry.kind == "rows" and not (one.entry.merged and not one.is_complete):
                owners = runs_of(sorted(one.sources)) if one.entry.merged else ()
                entry = one.entry.__class__(one.entry.ordinal, "rows", one.entry.salt, one.entry.merged, None, owners)
                segment = catalog.medium.open_segments([entry])[0]
                if isinstance(segment, Segment):
                    segment.find_damage(slice(0, segment.rows), tuple(segment.specs))
                    rows = segment.row_ids(0, segment.rows)
                    for gap in segment.gaps:
                        rows[gap.first : gap.end] = -1
                    row_ids |= set(rows[rows >= 0].tolist())
        return {row for row in row_ids if not state.was_removed(row >> ORDINAL_SHIFT)}


def wrong_in(path: Path, copied_ids: set[int], tags: dict[int, int], limit: int | None) -> list[str]:
    """Return what a copy does not serve as it was written."""
    violations: list[str] = []
    with TrajectoryStore.open(path) as store:
        read_ids = store.ids().tolist()
        hidden = copied_ids.difference(read_ids)
        if hidden and (limit is None or len(read_ids) < limit):
            violations.append(f"{len(hidden)} rows that the copy holds are not served")
        for row in read_ids:
            try:
                got = store.read([row], ["tag", "tokens"], checked=True)
            except StoreError:
                if row in copied_ids:
                    violations.append("a row that the copy holds cannot be read")
                continue
            if (got["tag"].tolist(), got["tokens"][0].tolist()) != ([tags[row]], tokens_of(tags[row])):
                violations.append("a row is another one")
        for row in read_ids:
            try:
                later = int(store.read([row], ["later"], checked=True)["later"][0])
            except CorruptionError:  # an update that the copy has in part: its rows are damaged from now on
                continue
            if later not in (0, 1000 + tags[row]):
                violations.append("a later value is another one")
        if not set(read_ids).difference(store.ids().tolist()) <= set(store.verify().damaged_ids.tolist()):
            violations.append("a row with a damaged later value is not named")
        if len(set(read_ids)) < len(read_ids):
            violations.append("a row is served twice")
    return violations


def judge_copy(work: Path, backend: str, rng: random.Random) -> list[str]:
    """Copy a store while it is written, and judge the copy."""
    for path in (work / "live", work / "copy"):
        shutil.rmtree(path, ignore_errors=True)
    live = Live(work / "live", backend, rng)
    for _ in range(rng.randrange(STEPS)):
        live.step()
    often = rng.choice([0.02, 0.1, 0.4])
    for path in files_in_any_order(work / "live", rng):
        while rng.random() < often:
            live.step()
        copied_file = work / "copy" / path.relative_to(work / "live")
        copied_file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(path, copied_file)
    live.store.close()
    limit = live.store.max_trajectories
    try:
        copied_ids = held_by(work / "copy")
        violations = [f"as copied: {words}" for words in wrong_in(work / "copy", copied_ids, live.tags, limit)]
        TrajectoryStore.open(work / "copy", "a").close()
        violations += [f"after a writer: {words}" for words in wrong_in(work / "copy", copied_ids, live.tags, limit)]
        with TrajectoryStore.open(work / "copy", "a") as store:
            store.compact()
        violations += [f"after a merge: {words}" for words in wrong_in(work / "copy", copied_ids, live.tags, limit)]
    except StoreError as error:
        return [f"{type(error).__name__}: {error}"]
    return violations


def sweep(backend: str, count: int, seed: int) -> collections.Counter[str]:
    """Copy so many stores; return how often what went wrong."""
    wrong = collections.Counter[str]()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(count):
            violations = judge_copy(Path(place), backend, random.Random(f"{backend} {seed} {number}"))
            wrong.update(f"{words} (copy {number})" for words in dict.fromkeys(violations))
    return wrong


def main() -> None:
    """Copy stores of both media."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    np.seterr(all="raise")
    for backend in ("memmap", "zarr"):
        wrong = sweep(backend, args.count, args.seed)
        sys.stdout.write(f"{backend}: {args.count} copies, {sum(wrong.values())} violations\n")
        for words, times in wrong.most_common(20):
            sys.stdout.write(f"  {times} x {words}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
