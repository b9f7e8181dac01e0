"""One damaged byte, anywhere: every way to read a store returns right values, omits the damaged rows, or rejects."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajectory_store import Column, CorruptionError, StoreError, TrajectoryStore, copy_rows

COLUMNS = [
    Column("tag", "int64"),
    Column("x", "int32", ragged=True),
    Column("y", "float32", ragged=True, fill=0.0),
    Column("text", "str", fill=""),
    Column("score", "float32", mutable=True),
]
COMMITS, ROWS = 6, 5
BACKENDS = ("memmap", "zarr")
MEMORY = Path("/dev/shm")
ARRAYS = ("tag", "x", "y", "text", "score", "tokens.offsets", "text.offsets", "present", "later score")
UPDATED = ((3, 4, 5), (20, 21))
"""The rows of each commit of updates."""
OF_SOME_COLUMNS = tuple(f"store['{name}']" for name in ("x", "y", "text", "score"))
Stores = dict[tuple[str, bool], Path]
Truth = dict[int, tuple[Any, ...]]
Kept = frozenset[int] | None
"""The tags of the rows that a method returned, or None where it rejected."""


def rows_of(commit: int) -> list[dict[str, Any]]:
    """The rows of a commit; rows of some lack the optional columns."""
    rows = []
    for tag in range(commit * ROWS, (commit + 1) * ROWS):
        length = 3 + tag % 4
        row = {"tag": tag, "x": [tag] * length, "score": 0.5 * tag}
        rows.append(row | ({"y": [tag / 8] * length, "text": f"text {tag}"} if tag % 3 else {}))
    return rows


def made(path: Path, backend: str, *, merged: bool) -> None:
    """Six commits of five rows, and two updates."""
    with TrajectoryStore.create(
        path, COLUMNS, backend=backend, compress=False, segment_rows=15, segment_elements=512
    ) as store:
        ids = np.concatenate([store.append(rows_of(commit)) for commit in range(COMMITS)])
        for first, rows in zip((100.0, 103.0), UPDATED, strict=True):
            store.update(ids[[*rows]], score=first + np.arange(len(rows)))
    if merged:
        with TrajectoryStore.open(path, "a") as store:
            store.compact()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory, where there is one: nothing here is about what a disk keeps."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as made_folder:
        yield Path(made_folder)


@pytest.fixture(scope="module")
def stores(folder: Path) -> Stores:
    """An intact store of each backend, plain and merged."""
    out = {(backend, merged): folder / f"{backend}-{merged}" for backend in BACKENDS for merged in (False, True)}
    for (backend, merged), path in out.items():
        made(path, backend, merged=merged)
    return out


@pytest.fixture(scope="module")
def truth(stores: Stores) -> Truth:
    """Every row by its tag."""
    truths = [truth_of(path) for path in stores.values()]
    assert all(one == truths[0] for one in truths)
    return truths[0]


def truth_of(path: Path) -> Truth:
    """Every row by its tag."""
    with TrajectoryStore.open(path) as store:
        return {row["tag"]: _flat(row) for row in store}


def _flat(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(value.tolist() if isinstance(value, np.ndarray) else value for value in row.values())


def methods(folder: Path) -> dict[str, Callable[[TrajectoryStore], list[dict[str, Any]]]]:
    """Every way to read, or to write elsewhere, as a list of rows, of all columns or some."""

    def by_columns(values: dict[str, Any]) -> list[dict[str, Any]]:
        values = {name: value for name, value in values.items() if name in {"tag", "x", "y", "text", "score"}}
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    def alone(name: str) -> Callable[[TrajectoryStore], list[dict[str, Any]]]:
        def read(store: TrajectoryStore) -> list[dict[str, Any]]:
            found, ids = store[name], store.ids()
            assert len(found) == len(ids)
            return by_columns({"tag": (ids >> 32) * 3 * ROWS + (ids & 0xFFFFFFFF), name: found})

        return read

    def padded(store: TrajectoryStore) -> list[dict[str, Any]]:
        found = store.read_padded(store.ids())
        lengths = found["lengths"]
        for name in ("x", "y"):
            found[name] = [row[:length] for row, length in zip(found[name], lengths, strict=True)]
        return by_columns(found)

    def places(store: TrajectoryStore) -> list[dict[str, Any]]:
        out = []
        for place in range(len(store.ids())):
            with contextlib.suppress(CorruptionError, IndexError):
                out.append(store[place])
        return out

    def conditions(store: TrajectoryStore) -> list[dict[str, Any]]:
        # All columns first: rows that are found damaged later would be an error by their ids.
        assert store.count("tag < 0 or score < 0 or max(x) > 29 or max(y) > 4 or len(x) > 6 or 'none' in text") == 0
        ids = [store.where(c) for c in ("score >= 0", "len(x) > 0 and tag >= 0", "text is None or 'text' in text")]
        common = set(ids[0].tolist()).intersection(*(some.tolist() for some in ids[1:]))
        return by_columns(store.read(sorted(common)))

    def table(store: TrajectoryStore) -> list[dict[str, Any]]:
        return [filled(row) for row in store.to_arrow().to_pylist()]

    def filled(row: dict[str, Any]) -> dict[str, Any]:
        row = row | {"text": row["text"] or "", "y": row["y"] or [0.0] * len(row["x"])}
        return {name: np.array(value) if isinstance(value, list) else value for name, value in row.items()}

    def parquet(store: TrajectoryStore) -> list[dict[str, Any]]:
        store.to_parquet(folder / "rows.parquet", skip_damaged=True)
        with TrajectoryStore.from_parquet(folder / "from-parquet", folder / "rows.parquet") as again:
            return list(again)

    def copied(store: TrajectoryStore) -> list[dict[str, Any]]:
        with TrajectoryStore.create(folder / "copied", store.schema) as target:
            copy_rows(store, target, skip_damaged=True)
            return list(target)

    def backup(store: TrajectoryStore) -> list[dict[str, Any]]:
        store.copy(folder / "backup", skip_damaged=True)
        with TrajectoryStore.open(folder / "backup") as again:
            return by_columns(again.read(again.intact(skip_damaged=True)))

    def compacted(store: TrajectoryStore) -> list[dict[str, Any]]:
        shutil.copytree(store.path, folder / "compacted")
        with TrajectoryStore.open(folder / "compacted", "a") as writer:
            writer.compact()
            return by_columns(writer.read(writer.intact(skip_damaged=True)))

    return {
        "iteration": list,
        "batches": lambda store: [row for batch in store.batches(7) for row in by_columns(batch)],
        "read": lambda store: by_columns(store.read(store.ids())),
        "read intact": lambda store: by_columns(store.read(store.intact(skip_damaged=True))),
        "read_padded": padded,
        "store[place]": places,
        "__getitems__": lambda store: store.__getitems__(range(len(store.ids()))),
        "store[slice]": lambda store: by_columns(store[:]),
        **{name: alone(name.split("'")[1]) for name in OF_SOME_COLUMNS},
        "where": conditions,
        "to_arrow": table,
        "arrow stream": lambda store: [filled(row) for row in __import__("pyarrow").table(store).to_pylist()],
        "to_parquet": parquet,
        "copy_rows": copied,
        "copy": backup,
        "compact": compacted,
        "snapshot": lambda store: list(store.as_of(store.snapshot())),
    }


def outcomes(path: Path, truth: Truth, folder: Path) -> dict[str, Kept]:
    """What each method returned of a store, checked value by value; each reads with a reader of its own."""
    out: dict[str, Kept] = {}
    for name, method in methods(folder).items():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            with TrajectoryStore.open(path) as store:
                rows = method(store)
        except (StoreError, OSError, ValueError):  # Arrow gives an error of a stream as one of its own
            out[name] = None
            continue
        for row in rows:
            right = dict(zip((column.name for column in COLUMNS), truth[int(row["tag"])], strict=True))
            for column, value in row.items():
                plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
                assert plain == right[column], (name, row)
        assert len({int(row["tag"]) for row in rows}) == len(rows), name
        out[name] = frozenset(int(row["tag"]) for row in rows)
    return out


def damage_value(path: Path, backend: str, array: str, commit: int, rng: random.Random, place: float) -> set[int]:
    """Flip a bit of an array of a commit, at the same place of its values on both backends; return the damaged rows."""
    flat, rows, segment, seq = f"{array}/c/0", set(range(commit * ROWS, (commit + 1) * ROWS)), commit // 3, commit % 3
    if array == "later score":
        flat, rows, segment, seq = "score/c/0", set(UPDATED[commit % 2]), 2, commit % 2
    if array == "text":  # a row without text has no part of the block
        rows = {row for row in rows if row % 3}
    if backend == "memmap":
        file = path / f"seg-{segment:08d}" / flat
        first, end = _used(file, array, seq)
        at = first + int(place * (end - first))
        if array.endswith(".offsets") and at >= end - 8 and commit % 3 < 2:  # the next commit begins there
            rows |= {(commit + 1) * ROWS}
    else:
        file = path / f"seg-{segment:08d}" / f"{seq:08d}.zip"
        with zipfile.ZipFile(file) as archive:
            entry = archive.getinfo(flat)
        raw, header = file.read_bytes(), entry.header_offset
        begin = header + 30 + sum(int.from_bytes(raw[header + i : header + i + 2], "little") for i in (26, 28))
        skip = 8 if array.endswith(".offsets") else 0  # the first is 0 here, and the end of the commit before there
        at = begin + skip + int(place * (entry.file_size - skip))
    flip(file, at, rng)
    return rows


def _used(file: Path, array: str, commit: int) -> tuple[int, int]:
    """The bytes of an array of a memmap segment that a commit wrote."""
    if array == "later score":
        first = sum(map(len, UPDATED[:commit]))
        return 4 * first, 4 * (first + len(UPDATED[commit]))
    segment = file.parents[len(Path(array, "c").parts)]
    sizes = {"tag": 8, "score": 4, "present": 8, "x": 4, "y": 4, "text": 1}
    axis = {"x": "tokens", "y": "tokens", "text": "text"}.get(array)
    first, end = commit * ROWS, (commit + 1) * ROWS
    if array.endswith(".offsets"):
        return 8 * (first + 1), 8 * (end + 1)
    if axis is None:
        return sizes[array] * first, sizes[array] * end
    offsets = np.fromfile(segment / f"{axis}.offsets" / "c" / "0", "<i8")
    return sizes[array] * int(offsets[first]), sizes[array] * int(offsets[end])


def flip(file: Path, at: int, rng: random.Random) -> None:
    """Flip a bit of a byte."""
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)


def check_values(stores: Stores, truth: Truth, folder: Path, seed: int) -> None:
    """Damage the same value on both backends: every method returns the same rows, and the same rows are named."""
    rng = random.Random(seed)
    array, commit, place = rng.choice(ARRAYS), rng.randrange(COMMITS), rng.random()
    kept, rows = dict[str, dict[str, Kept]](), dict[str, set[int]]()
    for backend in BACKENDS:
        path = folder / backend
        shutil.copytree(stores[backend, False], path)
        rows[backend] = damage_value(path, backend, array, commit, rng, place)
        kept[backend] = outcomes(path, truth, folder / "scratch")
        with TrajectoryStore.open(path) as store:
            damaged = store.damaged().tolist()
            assert damaged == store.verify().damaged_ids.tolist()
            assert damaged == [((row // 15) << 32) + row % 15 for row in sorted(rows[backend])]
            for refused in (store.intact, lambda s=store: s.to_parquet(folder / "x.parquet")):
                with pytest.raises(CorruptionError, match=", ".join(map(str, damaged[:2]))):
                    refused()
    beside = rows["memmap"] - rows["zarr"]  # a row of the next commit, which begins where the damaged one ends
    for name, mine in kept["memmap"].items():
        other = kept["zarr"][name]
        assert mine == other or (mine is not None and other is not None and other - mine == beside), (name, array)
        assert mine is None or set(truth) - mine <= rows["memmap"], (name, array)


def check_any_byte(stores: Stores, truth: Truth, folder: Path, seed: int) -> None:
    """Damage any byte of any file of a store."""
    rng = random.Random(seed)
    backend, merged = rng.choice(BACKENDS), rng.random() < 0.5
    path = folder / "store"
    shutil.copytree(stores[backend, merged], path)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    file = rng.choice(files)
    used = np.flatnonzero(np.fromfile(file, np.uint8)[: 1 << 16])
    flip(file, int(rng.choice(used.tolist() or [0])), rng)
    outcomes(path, truth, folder / "scratch")


CHECKS = pytest.mark.parametrize("check", [check_values, check_any_byte])


def run(check: Callable[..., None], stores: Stores, truth: Truth, folder: Path, seeds: range) -> None:
    """Run a check with several seeds, each in a folder of its own; warnings name the damage, and are expected."""
    for seed in seeds:
        place = folder / f"{check.__name__}-{seed}"
        place.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                check(stores, truth, place, seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error}") from error
        shutil.rmtree(place)


@CHECKS
def test_one_damaged_byte(stores: Stores, truth: Truth, folder: Path, check: Callable[..., None]):
    """A few places; more are behind markers."""
    run(check, stores, truth, folder, range(3))


@pytest.mark.crash
@CHECKS
def test_one_damaged_byte_in_more_places(stores: Stores, truth: Truth, folder: Path, check: Callable[..., None]):
    """Twelve places of values on both backends, and twelve of any file."""
    run(check, stores, truth, folder, range(100, 112))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@CHECKS
def test_one_damaged_byte_in_many_places(stores: Stores, truth: Truth, folder: Path, check: Callable[..., None]):
    """500 places of each kind, or as many as `STORE_PLACES` says."""
    run(check, stores, truth, folder, range(1000, 1000 + int(os.environ.get("STORE_PLACES", "500"))))
