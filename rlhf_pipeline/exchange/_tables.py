"""Rows of JSONL files, Parquet files and saved Hugging Face datasets, streamed."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError

Container = Literal["jsonl", "parquet", "hf"]
SCHEMA_FILE = "trajectory_schema.json"
"""Beside an exported dataset: the columns of the store, which Arrow alone does not tell."""
SCHEMA_KEY = b"trajectory_schema"
"""The same in the metadata of an exported Parquet file."""
ROWS_PER_READ = 64

_SUMMARIES = ("aggregated_results.jsonl",)
"""Files of figures that tools write beside their rollouts."""
_SUFFIXES: dict[str, Container] = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one folder of a saved dataset."""

    path: Path
    container: Container

    def rows(self, *, arrays: bool = False) -> Generator[tuple[int, dict[str, Any]], None, None]:
        """Yield `(number, row)`: the line's number in a JSONL file, from 1; else the row's, from 0.

        With `arrays`, a list of numbers in Arrow is a NumPy array, which takes a fraction of the time of a list.
        """
        if self.container == "jsonl":
            yield from _jsonl_rows(self.path)
            return
        batches = self._arrow_batches()
        yield from enumerate(row for batch in batches for row in (_with_arrays(batch) if arrays else batch.to_pylist()))

    def _arrow_batches(self) -> Iterator[Any]:
        pyarrow = need("pyarrow")
        try:
            if self.container == "parquet":
                with need("pyarrow.parquet").ParquetFile(self.path) as file:
                    yield from file.iter_batches(batch_size=ROWS_PER_READ)
            elif json.loads((self.path / "state.json").read_text(encoding="utf-8"))["_data_files"]:
                # datasets itself cannot load what it saved without rows
                found = need("datasets").load_from_disk(str(self.path))
                for table in found.with_format("arrow").iter(batch_size=ROWS_PER_READ):
                    yield from table.to_batches()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.path} cannot be read as {self.container}: {str(error).splitlines()[0]}") from error

    def schema_json(self) -> str | None:
        """Return the store's columns that an export wrote down, or None."""
        if self.container == "parquet":
            found = need("pyarrow.parquet").read_schema(self.path).metadata or {}
            return found[SCHEMA_KEY].decode() if SCHEMA_KEY in found else None
        beside = schema_beside(self.path, self.container)
        return beside.read_text(encoding="utf-8") if beside.is_file() else None

    def where(self, number: int) -> str:
        """Return the place of a row as an error message names it."""
        return f"{self.path}:{number}" if self.container == "jsonl" else f"{self.path}, row {number}"


def _with_arrays(batch: Any) -> Iterator[dict[str, Any]]:
    columns = [_arrays(column) for column in batch.columns]
    return (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def _arrays(column: Any) -> list[Any]:
    """Return the values of an Arrow array, lists of numbers as arrays unless one of their items is null."""
    types = need("pyarrow").types
    item = column.type.value_type if types.is_list(column.type) else None
    numbers = item is not None and (types.is_integer(item) or types.is_floating(item) or types.is_boolean(item))
    if not numbers or (flat := column.flatten()).null_count:
        return column.to_pylist()
    values, lengths = flat.to_numpy(zero_copy_only=False), column.value_lengths()
    ends = np.cumsum(lengths.fill_null(0))
    return [
        None if length is None else values[end - length : end]
        for end, length in zip(ends.tolist(), lengths.to_pylist(), strict=True)
    ]


def schema_beside(path: Path, container: Container) -> Path:
    """Return where the columns of an export are written down."""
    return path / SCHEMA_FILE if container == "hf" else path.with_name(f"{path.name}.schema.json")


def need(module: str) -> Any:
    """Import pyarrow or datasets, which are optional."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DefinitionError(
            f"this needs {module.partition('.')[0]}, which is not installed: pip install 'rlhf-pipeline[exchange]'"
        ) from error


def find_sources(paths: Sequence[str | Path], container: Container | None = None) -> list[Source]:
    """Return what is to be read, in order: files, saved datasets, and for a folder the JSONL and Parquet files in it.

    `container` is what files are whose names do not tell; `10.jsonl` comes after `9.jsonl`.
    """
    found: list[Source] = []
    for given in paths:
        path = Path(given).expanduser()
        if not path.exists():
            near = sorted(item.name for item in path.parent.iterdir())[:6] if path.parent.is_dir() else []
            raise MissingPathError(f"there is no file or folder at {path}." + (f" Beside it: {near}." if near else ""))
        if path.is_dir():
            found += _in_folder(path)
        else:
            found.append(Source(path, container or _container_of(path)))
    # A file that is named twice, or that a folder or a link names again, is read once.
    return list(dict.fromkeys(Source(source.path.resolve(), source.container) for source in found))


def _container_of(path: Path) -> Container:
    if path.suffix.lower() in _SUFFIXES:
        return _SUFFIXES[path.suffix.lower()]
    raise DefinitionError(
        f"{path}: the name ends neither in .jsonl nor in .parquet. Add --format jsonl or --format parquet, or "
        "rename it."
    )


def _in_folder(folder: Path) -> list[Source]:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        raise DefinitionError(f"{folder} holds several splits. Name one: {folder / (splits[0] if splits else 'train')}")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return [Source(folder, "hf")]
    files = [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in (".jsonl", ".ndjson", ".parquet") and path.name not in _SUMMARIES
    ]
    if not files:
        raise DefinitionError(
            f"{folder} is no saved dataset, and holds no .jsonl or .parquet files. Name the files themselves."
        )
    return [Source(path, _container_of(path)) for path in sorted(files, key=_natural)]


def _natural(path: Path) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except RecursionError:
                raise DataError(f"{path}:{number}: this line is nested too deeply to be read.") from None
            except ValueError as error:
                what = line.strip()[:60].decode("utf-8", "replace")
                if number == 1 and what.startswith("["):
                    raise DataError(
                        f"{path} is one JSON array, not one object per line. Convert it: jq -c '.[]' FILE > FILE.jsonl"
                    ) from error
                torn = "" if line.endswith(b"\n") else " It has no line break: its writer may still be at work."
                raise DataError(
                    f"{path}:{number}: this line is not JSON ({error}): {what!r}.{torn} Fix or delete it and type the "
                    "command again; what was imported before it stays and is not imported twice."
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}.")
            yield number, row
