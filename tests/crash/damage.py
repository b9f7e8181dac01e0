"""One bad byte anywhere: stores are damaged in one file and judged from outside.

    python -m tests.crash.damage --count 2000

A writer commits rows and updates, and closes, or is killed, or its segments are merged and more is written. Then one
file is damaged: a flipped bit, a cut, a zeroed block, a missing file, a file of another store; or both objects of the
newest record of the catalog, or those of all. The judge knows what was acknowledged, and nothing of the format but the
names of its folders:

- every acknowledged row reads as it was written, or `verify` names it, or the segment and commit that were damaged;
- damage in the catalog costs nothing;
- a flipped bit in the values costs the rows of the commits that it touches, at most two;
- what is damaged in a segment costs no row of another, and no update but its own;
- opening to read changes no file; and after a writer and a merge too, the right file put back restores everything.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
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
from typing import Final

import numpy as np

from tests.damage import KINDS, damage
from trajectory_store import Column, StoreError, TrajectoryStore

COLUMNS: Final = [
    *(Column("tag", "int64"), Column("tokens", "int32", ragged=True), Column("text", "str")),
    *(Column("later", "int64", mutable=True), Column("score", "float32", ragged=True, fill=0.0)),
]
WRITERS: Final = ("closed", "killed", "merged")
COMMIT_ROWS: Final = 3
COMMITS: Final = 12


def truth(tag: int) -> tuple[list[int], str, int]:
    """Return the tokens, the text and the later value of a row."""
    rng = random.Random(tag)
    return [rng.randrange(1000) for _ in range(rng.randrange(1, 9))], f"row {tag} " * rng.randrange(1, 4), 100 + tag


def write(folder: Path, backend: str, first_tag: int, how: str) -> list[int]:
    """Write a store in a process of its own that ends as `how` says; return the ids that it acknowledged, by tag."""
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
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
            os.write(into, ids.astype("<i8").tobytes())
        if how != "killed":
            store.close()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        ids = np.frombuffer(pipe.read(), "<i8").tolist()
    os.waitpid(pid, 0)
    return ids


def homes_of(folder: Path) -> tuple[dict[int, str], set[str]]:
    """Return the folder that holds each row, and the folders of updates."""
    with TrajectoryStore.open(folder) as store:
        catalog = store._catalog
        rows = {row: s.name for s in catalog.segments.values() for row in s.row_ids(0, s.rows).tolist()}
        return rows, {segment.name for segment in catalog.updates.values()}


def files_of(folder: Path) -> list[Path]:
    """Return the files that a store consists of."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_all(folder: Path, ids: list[int], first_tag: int) -> tuple[set[int], list[str]]:
    """Return the ids that read right, and what is wrong with others that read at all."""
    right, wrong = set[int](), list[str]()
    with TrajectoryStore.open(folder) as store:
        for place, row_id in enumerate(ids):
            try:
                row = store.read([row_id])
            except StoreError:
                continue
            tokens, text, later = truth(first_tag + place)
            expected = later if place // COMMIT_ROWS % 2 else 0
            found = (*(row[name][0] for name in ("tag", "text", "later")), row["tokens"][0].tolist())
            if (*found, row["score"][0].tolist()) == (first_tag + place, text, expected, tokens, [0.0] * len(tokens)):
                right.add(row_id)
            else:
                wrong.append(f"row {place} reads {found}")
    return right, wrong


def state_of(folder: Path) -> str:
    """Return a digest of all files and their names."""
    digest = hashlib.sha256()
    for path in files_of(folder):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def judge(folder: Path, ids: list[int], damaged: Path, kind: str, homes: tuple[dict[int, str], set[str]]) -> list[str]:
    """Return what a damaged store does that it must not do."""
    found, first_tag = list[str](), 0
    before = state_of(folder)
    try:
        right, _ = read_all(folder, ids, first_tag)
        with TrajectoryStore.open(folder) as store:
            report = store.verify()
            seen, watermark = set(store.ids().tolist()), store.watermark
    except StoreError as error:
        return [f"the store does not open, for {damaged}: {error}"]
    finally:
        if state_of(folder) != before:
            found.append("reading changed a file")
    missing, inside = set(ids) - right, damaged.relative_to(folder).parts
    unnamed = missing - set(report.damaged_ids.tolist())
    values = kind == "flip" and "c" in inside
    # Of a damaged object only its number is known, and of damaged targets of updates not whose they were: the commit
    # is named.
    said = [line for line in report.problems if line.startswith(inside[0]) and re.search("commit|object|opened", line)]
    if unnamed and ("catalog" in inside or not said or (values and "target" not in inside)):
        found.append(f"{len(unnamed)} rows are gone or wrong, verify does not name them ({report.problems})")
    if others := [row for row in missing if homes[0][row] != inside[0] and inside[0] not in homes[1]]:
        found.append(f"{len(others)} rows of other segments are gone or wrong")
    if values and len(missing) > 2 * COMMIT_ROWS and not inside[0].endswith("merged"):
        found.append(f"a flipped bit cost {len(missing)} rows")
    timeless = {
        row for row in ids if "row_time" in inside and homes[0][row] == inside[0]
    }  # they have no place in order
    if hidden := (right & set(ids)) - seen - timeless:
        found.append(f"{len(hidden)} rows that read right are not in ids()")
    if watermark < len(ids) and report.ok:
        found.append(f"the watermark is {watermark}, of {len(ids)} acknowledged, and verify names nothing")
    return found


def records_of(folder: Path, rng: random.Random) -> list[Path]:
    """Return both objects of the newest record of the catalog, or those of all records."""
    every = sorted((folder / "catalog").glob("[0-9]*"))
    return [path for path in every if path.stem == every[-1].stem] if rng.random() < 0.5 else every


def one(
    base: Path,
    others: Path,
    ids: list[int],
    homes: tuple[dict[int, str], set[str]],
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
    kept = {one: one.read_bytes() for one in paths}
    newest = max((item for item in path.parent.glob("*.zip")), default=None)
    if kind == "missing" and path == newest and writer == "killed":
        return "", []  # nothing else has seen the last object of a writer that was killed
    if sum(damage(one, kind, rng, others / one.relative_to(folder)) for one in paths) < len(paths):
        return "", []
    found = judge(folder, ids, path, kind, homes)
    with contextlib.suppress(StoreError):
        TrajectoryStore.open(folder, "a").close()
    with contextlib.suppress(StoreError), TrajectoryStore.open(folder, "a") as store:
        store.compact()
    for one, raw in kept.items():
        if one.parent.is_dir():
            one.write_bytes(raw)
    try:
        right, wrong = read_all(folder, ids, 0)
        found += [f"after merging and putting it back: {words}" for words in wrong]
        if len(right) < len(ids):
            found.append(f"after merging and putting the file back, {len(ids) - len(right)} rows do not read")
    except StoreError as error:
        found.append(f"after merging and putting the file back, the store does not open: {error}")
    return f"{kind} {name}{' and more' * (len(paths) > 1)}", found


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
            what, found = one(work / "base", work / "others", ids, homes, rng, work, writer)
            done += bool(what)
            wrong.update(f"{what}: {words}" for words in found)
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
