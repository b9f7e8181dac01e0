"""Disk: what the store takes for GSM8K, raw, and sealed with zstd.

    python benchmarks/bench_store_disk.py [--quick] [--check]

GSM8K as whole trajectories (`_gsm8k.py`): text, ids, mask, two log-probs, scalars. Disk is the blocks of all files
(st_blocks), metadata included. Raw is the default backend with sparse segments, measured against the values of every
column of the schema and 8 bytes per row and axis that say where the row ends, as no store does without them; against
the given values alone it has a line of its own, because short texts have five such ends. A segment has a small file
of metadata per column, a block each, so a store of a few MB takes more: the data is written four times, and once.
Sealed is `backend="zarr"` after `compact()`, against the given values. The rows of the other benchmarks (mean 600
tokens, random values) are the second part: there zstd has nothing to find but the shape of the numbers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from _gsm8k import DATA, part, payload, trajectories
from _stores import BATCH, Table, disk_bytes, fill, parser

from trajectory_store import Schema, TrajectoryStore

RAW, COMMITTED, SEALED = 1.01, 0.6, 0.48
EPOCHS = 4


def stored_bytes(schema: Schema, data: dict[str, Any], rows: int) -> int:
    """The values of every column, filled in where none were given, and where rows end."""
    missing = sum(c.np_dtype.itemsize for c in schema if c.name not in data and c.axis is None)
    return payload(data) + rows * (missing + 8 * len(schema.axes))


def write(path: Path, schema: Schema, data: dict[str, Any], epochs: int = 1, **options: Any) -> None:
    """Append all rows, 64 per commit."""
    with TrajectoryStore.create(path, schema, **options) as store:
        for first in [*range(0, len(data["prompt"]), BATCH)] * epochs:
            store.append(part(data, first, first + BATCH))


def gsm8k(table: Table, limit: int | None, folder: Path) -> None:
    """The lines of GSM8K."""
    from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema

    schema, data = trajectory_schema(), trajectories(limit)
    rows, given = len(data["prompt"]), payload(data)
    print(f"GSM8K: {rows} trajectories, {given / 1e6:.1f} MB given, {given / rows:.0f} bytes each")
    epochs = EPOCHS if limit is None else 4 * EPOCHS  # as many bytes, from fewer rows
    write(folder / "raw", schema, data, epochs=epochs)
    used = disk_bytes(folder / "raw")
    stored = epochs * stored_bytes(schema, data, rows)
    table.line(f"raw, sparse, {epochs} times: disk / stored values", used / stored, "x", RAW)
    table.line("  disk / given values", used / given / epochs, "x")
    write(folder / "once", schema, data)
    table.line("  once: disk / stored values", disk_bytes(folder / "once") * epochs / stored, "x")
    write(folder / "zarr", schema, data, backend="zarr")
    table.line("zarr, as committed in 64s: disk / given values", disk_bytes(folder / "zarr") / given, "x")
    objects = sum(1 for f in (folder / "zarr").rglob("*") if f.is_file())
    size = sum(f.stat().st_size for f in (folder / "zarr").rglob("*") if f.is_file())
    table.line(f"  the {objects} objects themselves / given values", size / given, "x", COMMITTED)
    with TrajectoryStore.open(folder / "zarr", "a") as store:
        store.compact()
        assert store.verify().ok
    table.line(
        "sealed with zstd after compact(): disk / given values", disk_bytes(folder / "zarr") / given, "x", SEALED
    )


def main() -> int:
    """Print the table; exit 1 with --check where a goal is missed."""
    options = parser(__doc__, "fewer rows").parse_args()
    table = Table()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if DATA.is_dir():
            gsm8k(table, 3000 if options.quick else None, folder)
        else:
            print(f"GSM8K is skipped: its files are not at {DATA.resolve()}")
        count = 2048 if options.quick else 10_240
        given = fill(folder / "random", count, mean=600, per_commit=BATCH)
        print(f"random rows: {count} trajectories, {given / 1e6:.1f} MB given")
        table.line("raw, sparse: disk / given values", disk_bytes(folder / "random") / given, "x", RAW)
        given = fill(folder / "random.zarr", count, mean=600, per_commit=BATCH, backend="zarr")
        table.line("zarr, as committed in 64s", disk_bytes(folder / "random.zarr") / given, "x")
        with TrajectoryStore.open(folder / "random.zarr", "a") as store:
            store.compact()
        table.line("sealed with zstd after compact()", disk_bytes(folder / "random.zarr") / given, "x")
    return int(options.check and not table.good)


if __name__ == "__main__":
    raise SystemExit(main())
