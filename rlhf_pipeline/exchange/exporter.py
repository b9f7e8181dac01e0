"""Exporting a store to a Parquet file, a JSONL file or a Hugging Face dataset, streamed and without loss."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.exchange._column_values import arrow_schema, to_json
from rlhf_pipeline.exchange._tables import Container, need, schema_beside
from rlhf_pipeline.exchange.filters import Ids, select
from rlhf_pipeline.exchange.target import appearing_whole, check_absent
from trajectory_store import Schema, TrajectoryStore

BATCH_ROWS = 512
ROW_GROUP_BYTES = 16 << 20
"""A Parquet file is written in groups of about this size, which are in memory whole while they are written."""
_KINDS: dict[str, Container] = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}


@dataclass(kw_only=True)
class ExportReport:
    """What an export wrote."""

    path: Path
    kind: Container
    num_trajectories: int
    num_left_out: int
    """Trajectories that a filter left out."""
    columns: tuple[str, ...]
    size_bytes: int


def export_store(
    store: str | Path | TrajectoryStore,
    to: str | Path,
    *,
    filters: Sequence[str] = (),
    columns: Sequence[str] | None = None,
    kind: Literal["parquet", "jsonl", "hf"] | None = None,
    batch_rows: int = BATCH_ROWS,
    on_batch: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write the trajectories of a store to one file, or to a folder that `datasets.load_from_disk` reads.

    All columns are written, ragged ones as lists of numbers, later values (`update`) folded in. What the store
    only fills in is null. The columns' definitions go into the Parquet file's metadata, or into a file beside the
    others, so that `import_files` gives an equal store again. The target appears whole or not at all.

    Args:
        store: an open store, or its folder.
        to: `FILE.parquet`, `FILE.jsonl`, or a folder for a Hugging Face dataset; must not exist.
        filters: conditions that a trajectory must meet, see `rlhf_pipeline.exchange.filters.select`.
        columns: only these columns; then an import gives them alone.
        kind: what to write, where the name does not tell.
        batch_rows: trajectories that are in memory at once.
        on_batch: called with the number written and the number to write.

    Returns:
        What was written.

    Raises:
        RunExistsError: the target is there already.
        DefinitionError: a filter or a column is not known, or pyarrow or datasets is not installed.
        StoreError: the store cannot be read.

    >>> import tempfile
    >>> from trajectory_store import Column, diff
    >>> from rlhf_pipeline.exchange import import_files
    >>> folder = Path(tempfile.mkdtemp())
    >>> schema = Schema([Column("input_ids", "int32", ragged=True), Column("trajectory_id", "int64")])
    >>> with TrajectoryStore.create(folder / "a", schema) as store:
    ...     _ = store.append({"input_ids": [[1, 2], [3]], "trajectory_id": [7, 8]})
    >>> export_store(folder / "a", folder / "a.jsonl").num_trajectories
    2
    >>> _ = import_files([folder / "a.jsonl"], folder / "b", format="store")
    >>> with TrajectoryStore.open(folder / "a") as a, TrajectoryStore.open(folder / "b") as b:
    ...     print(diff(a, b, key="trajectory_id"))
    The stores hold the same rows.
    """
    if not isinstance(store, TrajectoryStore):
        with TrajectoryStore.open(Path(store).expanduser(), mode="r") as opened:
            return export_store(
                opened, to, filters=filters, columns=columns, kind=kind, batch_rows=batch_rows, on_batch=on_batch
            )
    target = Path(to).expanduser()
    found = kind or _KINDS.get(target.suffix.lower(), cast(Container, "hf"))
    if target.suffix and kind is None and found == "hf":
        raise DefinitionError(f"{target}: the ending is none of {', '.join(_KINDS)}. A folder for a dataset has none.")
    beside = schema_beside(target, found)
    check_absent(target, *([beside] if found == "jsonl" else []))
    schema = store.schema if columns is None else Schema([store.schema[name] for name in columns])
    num_all = len(store)  # a store that others write to may change while it is read
    ids = select(store, filters)
    writer = _writer(found)
    with appearing_whole(target) as part:
        writer(part, store, schema, _parts(ids, batch_rows, on_batch))
        if found == "jsonl":
            beside.write_text(json.dumps(schema.to_json(), indent=1), encoding="utf-8")
    size = sum(path.stat().st_size for path in ([target] if target.is_file() else target.rglob("*")) if path.is_file())
    return ExportReport(
        path=target,
        kind=found,
        num_trajectories=len(ids),
        num_left_out=num_all - len(ids),
        columns=schema.names,
        size_bytes=size,
    )


Parts = Iterator[Ids]
"""The ids of some trajectories after the other."""


def _parts(ids: Ids, rows: int, on_batch: Callable[[int, int], None] | None) -> Parts:
    for first in range(0, len(ids), rows):
        some = ids[first : first + rows]
        yield some
        if on_batch is not None:
            on_batch(first + len(some), len(ids))


def _writer(kind: Container) -> Callable[[Path, TrajectoryStore, Schema, Parts], None]:
    if kind == "jsonl":
        return _write_jsonl
    need("pyarrow")
    if kind == "parquet":
        return _write_parquet
    need("datasets")
    return _write_dataset


def _tables(store: TrajectoryStore, schema: Schema, arrow: Any, parts: Parts) -> Iterator[Any]:
    return (store.to_arrow(schema.names, some).cast(arrow) for some in parts)


def _write_parquet(part: Path, store: TrajectoryStore, schema: Schema, parts: Parts) -> None:
    pyarrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    arrow = arrow_schema(pyarrow, schema)
    with parquet.ParquetWriter(part, arrow, compression="zstd") as file:
        waiting: list[Any] = []
        for table in _tables(store, schema, arrow, parts):
            waiting.append(table)
            if sum(ready.nbytes for ready in waiting) >= ROW_GROUP_BYTES:
                file.write_table(pyarrow.concat_tables(waiting))  # one row group; write_batch would keep more
                waiting = []
        if waiting:
            file.write_table(pyarrow.concat_tables(waiting))


def _write_dataset(part: Path, store: TrajectoryStore, schema: Schema, parts: Parts) -> None:
    pyarrow, datasets = need("pyarrow"), need("datasets")
    arrow = arrow_schema(pyarrow, schema).remove_metadata()
    with tempfile.TemporaryDirectory(prefix=part.name, dir=part.parent) as scratch:
        stream = Path(scratch) / "rows.arrow"
        with stream.open("wb") as file, pyarrow.ipc.new_stream(file, arrow) as writer:
            for table in _tables(store, schema, arrow, parts):
                writer.write_table(table)
        found = datasets.Dataset.from_file(str(stream))  # mapped, not read into memory
        shown = datasets.utils.logging.is_progress_bar_enabled()
        datasets.utils.logging.disable_progress_bar()
        try:
            found.save_to_disk(str(part))
        finally:
            if shown:
                datasets.utils.logging.enable_progress_bar()
    schema_beside(part, "hf").write_text(json.dumps(schema.to_json(), indent=1), encoding="utf-8")


def _write_jsonl(part: Path, store: TrajectoryStore, schema: Schema, parts: Parts) -> None:
    with part.open("w", encoding="utf-8") as file:
        for some in parts:
            values = store.read(some, schema.names)
            there = {column.name: store.present(column.name, some) for column in schema.optional}
            for i in range(len(some)):
                row = {
                    column.name: to_json(column, values[column.name][i])
                    for column in schema
                    if column.name not in there or there[column.name][i]  # else the import fills it in again
                }
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
