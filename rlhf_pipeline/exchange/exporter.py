"""A store, or a part of it, as a Parquet file, a JSONL file or a Hugging Face dataset, streamed and without loss.

Or as agent trajectories in ATIF, for tools that read those.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_pipeline.buffer.checked_rows import sound_rows
from rlhf_pipeline.buffer.filters import Ids, select
from rlhf_pipeline.data.files import Container
from rlhf_pipeline.data.optional_packages import need
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.exchange._values import schema_beside, to_json
from rlhf_pipeline.exchange.atif_documents import atif_documents
from rlhf_pipeline.exchange.target import check_absent
from trajectory_store import Schema, TrajectoryStore
from trajectory_store.arrow import arrow_schema, write_parquet
from trajectory_store.new_files import new_file
from trajectory_store.recorder.learnable_rows import learnable_rows
from trajectory_store.recorder.standard import INTERNAL

BATCH_ROWS = 512
Backend = Literal["memmap", "zarr"]
_KINDS: dict[str, Container] = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", "": "hf"}
_ATIF = (".atif.jsonl", ".atif")
"""Suffixes of a file with one ATIF document per line, and of a folder with one file per document."""


@dataclass(kw_only=True)
class ExportReport:
    """The result of an export or a copy."""

    path: Path
    kind: Container | Backend | Literal["atif"]
    num_trajectories: int
    num_left_out: int
    """The number of trajectories that a filter excluded or that are damaged."""
    columns: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the file, or of the files in the folder."""
        files = [self.path] if self.path.is_file() else self.path.rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())


def export_store(
    store: str | Path | TrajectoryStore,
    to: str | Path,
    *,
    filters: Sequence[str] = (),
    columns: Sequence[str] | None = None,
    batch_rows: int = BATCH_ROWS,
    on_batch: Callable[[int, int], None] | None = None,
    skip_damaged: bool = False,
    learnable: bool = False,
) -> ExportReport:
    """Write the trajectories of a store to one file, or to a folder that `datasets.load_from_disk` reads.

    All columns are written with their latest values (`update`), ragged columns as lists of numbers. Values that are
    only fills are null. The columns' definitions are stored in the Parquet file's metadata, or in a file next to the
    others, so that `import_files` restores an identical store. The target is either complete or absent.

    Args:
        store: an open store, or its folder.
        to: `FILE.parquet`, `FILE.jsonl`, or a folder for a Hugging Face dataset; `FILE.atif.jsonl` or a folder
            `NAME.atif` for agent trajectories in ATIF 1.8, which contain the sampled tokens, their log-probs, and every
            other column in `extra`. The target must not exist.
        filters: conditions that a trajectory must meet, see `rlhf_pipeline.buffer.filters.select`.
        columns: only these columns; an import of the file then has no others.
        batch_rows: the number of trajectories in memory at a time.
        on_batch: called with the number of trajectories written and the total number.
        skip_damaged: exclude trajectories that do not match their checksums; otherwise they are an error.
        learnable: export only the rows that may be used for training: see
            `trajectory_store.recorder.learnable_rows`.

    Raises:
        DataError: some trajectories are damaged.
        RunExistsError: the target exists.
        DefinitionError: a filter or a column is unknown, no row meets the filters, or pyarrow or datasets is not
            installed.
        StoreError: the store cannot be read.
    """
    target = Path(to).expanduser()
    if target.name.endswith(_ATIF):
        if columns is not None:
            raise DefinitionError("the columns of ATIF documents are fixed; omit --columns.")
        selection = chosen(store, filters, skip_damaged=skip_damaged, learnable=learnable)
        return _export_atif(selection, target, batch_rows, on_batch)
    kind = _KINDS.get(target.suffix.lower())
    if kind is None:
        endings = ", ".join((*(ending for ending in _KINDS if ending), *_ATIF))
        raise DefinitionError(f"{target}: the suffix must be one of {endings}. For a dataset folder, omit the suffix.")
    beside = schema_beside(target, kind)
    check_absent(target, *([beside] if kind == "jsonl" else []))
    with chosen(store, filters, skip_damaged=skip_damaged, learnable=learnable) as (opened, ids, left_out):
        schema = opened.schema if columns is None else Schema([opened.schema[name] for name in columns])
        with new_file(target, exclusive=False, parents=True) as part:
            _WRITERS[kind](part, opened, schema, _parts(ids, batch_rows, on_batch))
            if kind != "parquet":
                written = beside if kind == "jsonl" else schema_beside(part, kind)
                written.write_text(json.dumps(schema.to_json(), indent=1), encoding="utf-8")
    return ExportReport(path=target, kind=kind, num_trajectories=len(ids), num_left_out=left_out, columns=schema.names)


def _export_atif(
    selection: AbstractContextManager[tuple[TrajectoryStore, Ids, int]],
    target: Path,
    batch_rows: int,
    on_batch: Callable[[int, int], None] | None,
) -> ExportReport:
    check_absent(target)
    with selection as (opened, ids, left_out), new_file(target, exclusive=False, parents=True) as part:
        documents = (
            document for some in _parts(ids, batch_rows, on_batch) for document in atif_documents(opened, some)
        )
        if target.name.endswith(".jsonl"):
            with part.open("w", encoding="utf-8") as file:
                file.writelines(
                    json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n" for document in documents
                )
        else:
            part.mkdir()
            for document in documents:
                text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)
                (part / f"trajectory-{document['trajectory_id']}.json").write_text(text, encoding="utf-8")
        used = tuple(name for name in opened.schema.names if name not in INTERNAL)
    return ExportReport(path=target, kind="atif", num_trajectories=len(ids), num_left_out=left_out, columns=used)


@contextmanager
def chosen(
    store: str | Path | TrajectoryStore,
    filters: Sequence[str],
    *,
    skip_damaged: bool = False,
    learnable: bool = False,
) -> Iterator[tuple[TrajectoryStore, Ids, int]]:
    """Yield an open store, the ids of the trajectories that meet all conditions, and the number of the others.

    Damaged ones are an error, or among the others.
    """
    if isinstance(store, TrajectoryStore):
        intact = sound_rows(store, skip=skip_damaged)
        ids, count = select(store, filters, intact), len(intact) + len(store.damaged())
        if len(intact) and not len(ids):
            raise DefinitionError(f"none of the {count:,} trajectories in {store.path} meets {' and '.join(filters)}.")
        if learnable:
            ids = learnable_rows(store, ids, skip_damaged=skip_damaged).row_ids
            if not len(ids):
                raise DefinitionError(f"none of the {count:,} trajectories in {store.path} may be used for training.")
        yield store, ids, count - len(ids)
        return
    address = store if "://" in str(store) else Path(store).expanduser()
    with (
        TrajectoryStore.open(address, mode="r") as opened,
        chosen(opened, filters, skip_damaged=skip_damaged, learnable=learnable) as selection,
    ):
        yield selection


Parts = Iterator[Ids]
"""Consecutive parts of the trajectory ids."""


def _parts(ids: Ids, rows: int, on_batch: Callable[[int, int], None] | None) -> Parts:
    for first in range(0, len(ids), rows):
        some = ids[first : first + rows]
        yield some
        if on_batch is not None:
            on_batch(first + len(some), len(ids))


def _write_parquet(part: Path, store: TrajectoryStore, schema: Schema, parts: Parts) -> None:
    need("pyarrow")
    write_parquet(part, schema, (store.to_arrow(schema.names, some) for some in parts))


def _write_dataset(part: Path, store: TrajectoryStore, schema: Schema, parts: Parts) -> None:
    pyarrow, datasets = need("pyarrow"), need("datasets")
    arrow = arrow_schema(schema, large=False).remove_metadata()
    with tempfile.TemporaryDirectory(prefix=part.name, dir=part.parent) as scratch:
        stream = Path(scratch) / "rows.arrow"
        with stream.open("wb") as file, pyarrow.ipc.new_stream(file, arrow) as writer:
            for some in parts:
                writer.write_table(store.to_arrow(schema.names, some).cast(arrow))
        dataset = datasets.Dataset.from_file(str(stream))  # mapped, not read into memory
        shows_progress = datasets.utils.logging.is_progress_bar_enabled()
        datasets.utils.logging.disable_progress_bar()
        try:
            dataset.save_to_disk(str(part))
        finally:
            if shows_progress:
                datasets.utils.logging.enable_progress_bar()


def _write_jsonl(part: Path, store: TrajectoryStore, schema: Schema, parts: Parts) -> None:
    with part.open("w", encoding="utf-8") as file:
        for some in parts:
            values = store.read(some, schema.names)
            presence = {column.name: store.present(column.name, some) for column in schema.optional}
            for i in range(len(some)):
                row = {
                    column.name: to_json(column, values[column.name][i])
                    for column in schema
                    if column.name not in presence or presence[column.name][i]  # else the import fills it in again
                }
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")


_WRITERS: dict[Container, Callable[[Path, TrajectoryStore, Schema, Parts], None]] = {
    "parquet": _write_parquet,
    "jsonl": _write_jsonl,
    "hf": _write_dataset,
}
