"""One bad byte anywhere: stores are damaged in one file and judged from outside.

    python -m tests.crash.damage --count 2000

A writer commits rows and updates, and closes, or is killed, or its segments are merged and more is written. Then one
file is damaged: a flipped bit, a cut, a zeroed block, a missing file, a file of another store; or both objects of the
newest record of the catalog, or those of all. The judge knows what was acknowledged, and nothing of the format but the
names of its folders:

- every acknowledged row reads as it was written, or `verify` names it, or the segment and commit that were damaged;
- damage in the catalog costs nothing;
- a flipped bit in the values costs the rows of the commits that it touches, at most two;
- what is damaged in a segment costs no row of another, and no update but its own; no checked read is wrong;
- opening to read changes no file; after a writer and a merge too what is gone is named, and the right file put back
  restores everything.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.damage import KINDS, damage
from tests.processes import Children
from trajectory_store import Column, StoreError, TrajectoryStore
from trajectory_store.format import TARGET

COLUMNS: Final = [
    *(Column("tag", "int64"), Column("tokens", "int32", ragged=True), Column("text", "str")),
    *(Column("later", "int64", mutable=True), Column("score", "float32", ragged=True, mutable=True, fill=0.0)),
]
WRITERS: Final = ("closed", "killed", "merged")
COMMIT_ROWS: Final = 3
COMMITS: Final = 12


@functools.lru_cache
def truth(tag: int) -> tuple[list[int], str, int]:
    """Return the tokens, the text and the later value of a row."""
    rng = random.Random(tag)
    return [rng.randrange(1000) for _ in range(rng.randrange(1, 9))], f"row {tag} " * rng.randrange(1, 4), 100 + tag


def write(folder: Path, backend: str, first_tag: int, how: str) -> list[int]:
    """Write a store in a process of its own that ends as `how` states; return the ids that it acknowledged, by tag."""

    def act() -> None:
        store = TrajectoryStore.create(folder, COLUMNS, backend=backend, segment_rows=24, segment_elements=256)
        for commit in range(COMMITS):
            if how == "merged" and commit in (COMMITS // 3, 2 * COMMITS // 3):
                store.compact()
            tags = [first_tag + commit * COMMIT_ROWS + i for i in range(COMMIT_ROWS)]
            tokens, texts, later = zip(*map(truth, tags), strict=True)
            ids = store.append({"tag": tags, "tokens": list(tokens), "text": list(texts)})
            if commit % 2:
                store.update(ids, later=[-1] * COMMIT_ROWS)
                store.update(ids, later=list(later))
            sys.stdout.write(f"{' '.join(map(str, ids.tolist()))}\n")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        store.close()

    with Children(folder.with_suffix(".processes")) as children:
        writer = children.fork(act)
        assert writer.wait() == (-signal.SIGKILL if how == "killed" else 0), writer.output()
        return [int(row_id) for row_id in writer.output().split()]


Homes = tuple[dict[int, str], dict[str, set[int]]]


def homes_of(folder: Path) -> Homes:
    """Return the folder that holds each row, and the folders of updates with the rows that they are for."""
    with TrajectoryStore.open(folder) as store:
        catalog = store._catalog
        rows = {row: s.name for s in catalog.segments.values() for row in s.row_ids(0, s.rows).tolist()}
        return rows, {s.name: set(s.array(TARGET)[: s.rows].tolist()) for s in catalog.updates.values()}


def files_of(folder: Path) -> list[Path]:
    """Return the files that a store consists of."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_all(
    folder: Path, ids: list[int], columns: list[str] | None = None, *, checked: bool = False
) -> tuple[set[int], list[str]]:
    """Return the ids that read right, and what is wrong with others that read at all.

    They are read together, and one by one where that fails or not all are right.
    """
    right, wrong = set[int](), list[str]()
    with TrajectoryStore.open(folder) as store:
        with contextlib.suppress(StoreError):
            rows = store.read(ids, columns, checked=checked)
            if not any(wrong_in(rows, place, place) for place in range(len(ids))):
                return set(ids), []
        for place, row_id in enumerate(ids):
            try:
                rows = store.read([row_id], columns, checked=checked)
            except StoreError:
                continue
            if words := wrong_in(rows, 0, place):
                wrong.append(words)
            else:
                right.add(row_id)
    return right, wrong


def wrong_in(rows: dict[str, Any], at: int, place: int) -> str:
    """Return what is wrong with one of the rows that were read, in words."""
    tokens, text, later = truth(place)
    expected = {"tag": place, "text": text, "tokens": tokens, "score": [0.0] * len(tokens)}
    expected["later"] = later if place // COMMIT_ROWS % 2 else 0
    row_values = {name: np.asarray(values[at]).tolist() for name, values in rows.items()}
    return "" if all(row_values[name] == expected[name] for name in rows) else f"row {place} reads {row_values}"


def state_of(folder: Path) -> str:
    """Return a digest of all files and their names."""
    digest = hashlib.sha256()
    for path in files_of(folder):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def judge(folder: Path, ids: list[int], damaged: Path, kind: str, homes: Homes) -> list[str]:
    """Return what a damaged store does that it must not do."""
    violations = list[str]()
    before = state_of(folder)
    try:
        right, wrong = read_all(folder, ids)
        if wrong:
            violations += [f"checked, {words}" for words in read_all(folder, ids, checked=True)[1]]
        with TrajectoryStore.open(folder) as store:
            report = store.verify()
            read_ids, watermark = set(store.ids().tolist()), store.watermark
    except StoreError as error:
        return [f"the store does not open, for {damaged}: {error}"]
    finally:
        if state_of(folder) != before:
            violations.append("reading changed a file")
    missing, inside = set(ids) - right, damaged.relative_to(folder).parts
    unnamed = missing - set(report.damaged_ids.tolist())
    values = kind == "flip" and "c" in inside
    # Of a damaged object, and of the record of a last commit, only its number is known, and of damaged targets of
    # updates not whose they were: the commit is named.
    reported = [
        line for line in report.problems if line.startswith(inside[0]) and re.search("commit|object|opened", line)
    ]
    is_known = values and "target" not in inside and not any("contains no known row" in line for line in reported)
    if unnamed and ("catalog" in inside or not reported or is_known):
        violations.append(f"{len(unnamed)} rows are gone or wrong, verify does not name them ({report.problems})")
    # Of a damaged object, and of damaged targets, it is not known whose later values they were.
    of_any = inside[0] in homes[1] and (inside[1] == "target" or damaged.suffix == ".zip")
    mine = homes[1].get(inside[0], {row for row, home in homes[0].items() if home == inside[0]})
    if not of_any and missing - mine:
        violations.append(f"{len(missing - mine)} rows that the damaged segment has nothing of are gone or wrong")
    if inside[0] in homes[1]:
        base = [column.name for column in COLUMNS if column.name != "later"]
        if len(read_all(folder, ids, base)[0]) < len(ids):
            violations.append("a damaged update costs columns that it does not have")
    if values and len(missing) > 2 * COMMIT_ROWS and not inside[0].endswith("merged"):
        violations.append(f"a flipped bit cost {len(missing)} rows")
    if hidden := (right & set(ids)) - read_ids:
        violations.append(f"{len(hidden)} rows that read right are not in ids()")
    if watermark < len(ids) and report.ok:
        violations.append(f"the watermark is {watermark}, of {len(ids)} acknowledged, and verify names nothing")
    return violations


def records_of(folder: Path, rng: random.Random) -> list[Path]:
    """Return both objects of the newest record of the catalog, or those of all records."""
    every = sorted((folder / "catalog").glob("[0-9]*"))
    return [path for path in every if path.stem == every[-1].stem] if rng.random() < 0.5 else every


def damage_once(
    base: Path,
    others: Path,
    ids: list[int],
    homes: Homes,
    rng: random.Random,
    work: Path,
    writer: str,
) -> tuple[str, list[str]]:
    """Damage a copy of a store once, and judge it; return what was done and what was wrong."""
    folder = work / "store"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    paths = records_of(folder, rng) if rng.random() < 0.1 else [rng.choice(files_of(folder))]
    path, kind = paths[0], rng.choice(KINDS)
    name = path.relative_to(folder)
    contents = {file: file.read_bytes() for file in paths}
    newest = max((item for item in path.parent.glob("*.zip")), default=None)
    if kind == "missing" and path == newest and writer == "killed":
        return "", []  # nothing else has seen the last object of a writer that was killed
    if sum(damage(file, kind, rng, others / file.relative_to(folder)) for file in paths) < len(paths):
        return "", []
    violations = judge(folder, ids, path, kind, homes)
    with contextlib.suppress(StoreError):
        TrajectoryStore.open(folder, "a").close()
    with contextlib.suppress(StoreError), TrajectoryStore.open(folder, "a") as store:
        store.compact()
    with contextlib.suppress(StoreError):
        right = read_all(folder, ids)[0]
        with TrajectoryStore.open(folder) as store:
            if len(right) < len(ids) and store.verify().ok:
                violations.append(
                    f"after merging, {len(ids) - len(right)} rows are gone or wrong, and verify names nothing"
                )
    for file, raw in contents.items():
        if file.parent.is_dir():
            file.write_bytes(raw)
    try:
        right, wrong = read_all(folder, ids)
        violations += [f"after merging and putting it back: {words}" for words in wrong]
        if len(right) < len(ids):
            violations.append(f"after merging and putting the file back, {len(ids) - len(right)} rows do not read")
    except StoreError as error:
        violations.append(f"after merging and putting the file back, the store does not open: {error}")
    return f"{kind} {name}{' and more' * (len(paths) > 1)}", violations


def sweep(backend: str, writer: str, count: int, seed: int) -> collections.Counter[str]:
    """Damage a store so many times; return how often what went wrong."""
    rng, wrong = random.Random(f"{backend} {writer} {seed}"), collections.Counter[str]()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work = Path(place)
        ids = write(work / "base", backend, 0, writer)
        write(work / "others", backend, 5000, writer)
        homes, done = homes_of(work / "base"), 0
        while done < count:
            what, violations = damage_once(work / "base", work / "others", ids, homes, rng, work, writer)
            done += bool(what)
            wrong.update(f"{what}: {words}" for words in violations)
    return wrong


def main() -> None:
    """Sweep both media and all ends of a writer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=700, help="of each medium and end of a writer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    for backend in ("memmap", "zarr"):
        for writer in WRITERS:
            wrong = sweep(backend, writer, args.count, args.seed)
            sys.stdout.write(f"{backend}, {writer}: {args.count} damages, {sum(wrong.values())} violations\n")
            for words, times in wrong.most_common(20):
                sys.stdout.write(f"  {times} x {words}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
