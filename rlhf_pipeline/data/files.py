r"""Rows of other people's files, the one reader of prompts and of other tools' rollouts.

Supported are JSON Lines, JSON arrays and objects, CSV, TSV, Parquet, Arrow (Feather), each of these compressed with
gzip or zstd, folders of them, and data sets saved by Hugging Face `datasets`. The content determines the format where
it can, otherwise the name. JSON and CSV need the standard library only; the rest needs pyarrow, a saved data set
`datasets`, and zstd `zstandard` (extra `exchange`).

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> _ = (folder / "a.csv").write_text("question,answer\n1 + 1,2\n")
>>> [source] = find_sources([folder])
>>> [(source.where(number), row) for number, row in source.rows()] == [
...     (f"{folder.resolve()}/a.csv:2", {"question": "1 + 1", "answer": "2"})]
True
"""

from __future__ import annotations

import csv
import glob
import io
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from rlhf_pipeline.data.compression import SUFFIXES as COMPRESSED
from rlhf_pipeline.data.compression import decompressed, is_compressed
from rlhf_pipeline.data.optional_packages import need
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, typed

Container = Literal["jsonl", "csv", "parquet", "arrow", "hf"]
"""The container of the rows. `jsonl` is JSON Lines or one JSON array; `hf` is a folder that `datasets` saved."""
ROWS_PER_READ = 64

_SUMMARIES = ("aggregated_results.jsonl",)
"""Files with figures that tools write next to their rollouts."""
_SUFFIXES: dict[str, Container] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_STARTS: dict[bytes, Container | str] = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",
    b"PK\x03\x04": "a zip file (as are xlsx, npz and torch files)",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"%PDF": "a PDF",
    b"version https://git-lfs": "a Git LFS pointer to a file that was not downloaded (git lfs pull)",
}
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, or one folder of a saved data set."""

    path: Path
    container: Container

    def rows(
        self, *, arrays: bool = False, growing: bool = False, on_bad: Callable[[DataError], None] | None = None
    ) -> Generator[tuple[int, dict[str, Any]], None, None]:
        """Yield `(number, row)`: the line's number in a file of lines, from 1; else the row's, from 0.

        In a `growing` file, a last line or CSV row without a line break is incomplete and skipped.
        """
        if self.container == "jsonl":
            yield from _json_rows(self, on_bad, growing)
        elif self.container == "csv":
            yield from _csv_rows(self, growing)
        else:
            yield from enumerate(
                row for batch in self._arrow_batches() for row in (_with_arrays(batch) if arrays else batch.to_pylist())
            )

    def parquet_metadata(self) -> Mapping[bytes, bytes]:
        """Return what the writer of a Parquet file noted beside its columns.

        Raises:
            DataError: the file is incomplete or damaged.
        """
        with self._arrow_errors(), need("pyarrow.parquet").ParquetFile(self._arrow_place()) as file:
            return file.schema_arrow.metadata or {}

    def _arrow_place(self) -> io.BytesIO | str:
        return io.BytesIO(_bytes_of(self.path)) if is_compressed(self.path) else str(self.path)

    @contextmanager
    def _arrow_errors(self) -> Iterator[None]:
        try:
            yield
        except (need("pyarrow").ArrowException, OSError) as error:
            kind = "a saved dataset" if self.container == "hf" else self.container
            raise DataError(f"{self.path} cannot be read as {kind}: {str(error).splitlines()[0]}") from error

    def _arrow_batches(self) -> Iterator[Any]:
        with self._arrow_errors():
            if self.container == "hf":
                # datasets itself cannot load what it saved without rows
                if json.loads((self.path / "state.json").read_text(encoding="utf-8"))["_data_files"]:
                    dataset = need("datasets").load_from_disk(str(self.path))
                    for table in dataset.with_format("arrow").iter(batch_size=ROWS_PER_READ):
                        yield from table.to_batches()
                return
            if self.container == "parquet":
                with need("pyarrow.parquet").ParquetFile(self._arrow_place()) as file:
                    yield from file.iter_batches(batch_size=ROWS_PER_READ)
            else:
                yield from _arrow_file(need("pyarrow.ipc"), need("pyarrow"), self._arrow_place())

    def files(self) -> list[Path]:
        """Return every file that the rows come from."""
        return sorted(file for file in self.path.rglob("*") if file.is_file()) if self.path.is_dir() else [self.path]

    def where(self, number: int) -> str:
        """Return the location of a row for error messages."""
        lines = self.container == "csv" or (self.container == "jsonl" and not _is_array(self.path))
        return f"{self.path}:{number}" if lines else f"{self.path}, row {number}"


def find_sources(paths: Sequence[str | Path], container: Container | None = None) -> list[SourceFile]:
    """Return what is to be read, in order: files, saved data sets, and for a folder the files in it.

    A pattern such as `part-*.jsonl` names the files that fit it. `10.jsonl` comes after `9.jsonl`, and a file that is
    named twice, or that a folder or a link names again, is read once.
    """
    sources: list[SourceFile] = []
    for pattern in paths:
        path = Path(pattern).expanduser()
        if path.is_dir():
            sources += _in_folder(path)
        elif path.exists():
            sources.append(SourceFile(path, _container_of(path, container)))
        elif matching := sorted(map(Path, glob.glob(str(path), recursive=True)), key=natural):
            sources += [SourceFile(file, _container_of(file, container)) for file in matching if file.is_file()]
        else:
            near = sorted(item.name for item in path.parent.iterdir())[:6] if path.parent.is_dir() else []
            nearby = f" Its parent folder contains: {near}." if near else ""
            raise MissingPathError(f"there is no file or folder at {path}.{nearby}")
    return list(dict.fromkeys(SourceFile(source.path.resolve(), source.container) for source in sources))


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a field of a row: by its name, or by a dotted path into nested objects and lists.

    >>> field_of({"reward_model": {"ground_truth": "7"}, "a.b": 1}, "reward_model.ground_truth")
    '7'
    >>> field_of({"a.b": 1}, "a.b"), field_of({"turns": [{"text": "hi"}]}, "turns.0.text")
    (1, 'hi')
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, Mapping):
            value = cast("Mapping[str, Any]", value).get(part, _ABSENT)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(cast("list[Any]", value)):
            value = cast("list[Any]", value)[int(part)]
        else:
            value = _ABSENT
        if value is _ABSENT:
            raise KeyError(name)
    return value


def _container_of(path: Path, container: Container | None) -> Container:
    with decompressed(path) as file:
        head = file.read(4096)
    content_kind = next((what for start, what in _STARTS.items() if head.startswith(start)), None)
    if content_kind in ("parquet", "arrow"):
        return content_kind
    suffixes = [suffix for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    kind = container or _SUFFIXES.get(suffixes[-1].lower() if suffixes else "")
    if content_kind is None and head and b"\0" in head:
        content_kind = "binary"
    if content_kind is None and kind in ("parquet", "arrow"):
        content_kind = f"not in {kind.capitalize()} format, according to its content"
    if content_kind is not None:
        raise DefinitionError(
            f"{path} is {content_kind}. Supported formats: JSON Lines, JSON arrays, CSV (in UTF-8), Parquet and Arrow, "
            "optionally compressed with gzip or zstd."
        )
    if kind is None:
        raise DefinitionError(
            f"{path}: neither the name nor the content identifies the format. Rename the file so that its name ends in "
            ".jsonl, .json, .csv, .parquet or .arrow, or use import --format jsonl."
        )
    return kind


def _in_folder(folder: Path) -> list[SourceFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        raise DefinitionError(f"{folder} has several splits. Choose one: {folder / (splits[0] if splits else 'train')}")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return [SourceFile(folder, "hf")]
    files = [
        path
        for path in folder.iterdir()
        if path.is_file()
        # A lone .json beside other files is most often a tool's settings.
        and re.search(r"\.(jsonl|ndjson|csv|tsv|parquet|arrow|feather)(\.gz|\.zst)?$", path.name.lower())
        and path.name not in _SUMMARIES
    ] or [path for path in folder.iterdir() if re.search(r"\.json(\.gz|\.zst)?$", path.name.lower())]
    if not files:
        raise DefinitionError(
            f"{folder} is not a saved dataset and contains no .jsonl, .csv, .parquet or .arrow files. Specify the "
            "files."
        )
    return [SourceFile(path, _container_of(path, None)) for path in sorted(files, key=natural)]


def natural(path: Path) -> list[tuple[int, int, str]]:
    """Return a key by which `10.jsonl` comes after `9.jsonl`."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _bytes_of(path: Path) -> bytes:
    with decompressed(path) as file:
        return file.read()


def _is_array(path: Path) -> bool:
    with decompressed(path) as file:
        while head := file.read(4096):
            if head := head.removeprefix(b"\xef\xbb\xbf").lstrip():
                return head.startswith(b"[")
    return False


def _json_rows(
    source: SourceFile, on_bad: Callable[[DataError], None] | None, growing: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    path = source.path
    array = _is_array(path)
    for number, value in _array_items(path) if array else _document(path) or _json_lines(path, growing):
        error = value if isinstance(value, DataError) else None
        if error is None and not isinstance(value, dict):
            place = f"{path}, row {number}" if array else f"{path}:{number}"
            error = DataError(f"{place}: expected a JSON object, got {type(value).__name__}.")
        if error is None:
            yield number, cast("dict[str, Any]", value)
        elif on_bad is None:
            raise error
        else:
            on_bad(error)


def _document(path: Path) -> list[tuple[int, Any]]:
    """Return the one object that a `.json` file of several lines is; nothing for lines of JSON."""
    if ".json" not in (suffix.lower() for suffix in path.suffixes):
        return []
    with decompressed(path) as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        try:
            return [(1, json.loads(_bytes_of(path)))]
        except (ValueError, RecursionError):
            pass
    return []


def _array_items(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield from enumerate(cast("list[Any]", json.loads(_bytes_of(path))))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} begins like a JSON array but cannot be read as one: {error}.") from error


def _json_lines(path: Path, growing: bool) -> Iterator[tuple[int, Any]]:
    """Yield what each line holds, or the error of one that holds no JSON."""
    with decompressed(path, growing=growing) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except RecursionError:
                yield number, DataError(f"{path}:{number}: this line is nested too deeply.")
            except ValueError as error:
                if growing and not line.endswith(b"\n"):
                    return
                torn = "" if line.endswith(b"\n") else " It has no line break: its writer may still be writing it."
                excerpt = line.strip()[:60].decode("utf-8", "replace")
                show = f"sed -n {number}p {typed(path)}"
                yield (
                    number,
                    DataError(
                        f"{path}:{number}: this line is not JSON ({error}): {excerpt!r}.{torn} Fix or delete it; "
                        f"`{show}` prints the complete line."
                    ),
                )


def _csv_rows(source: SourceFile, growing: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    path = source.path
    tabs = ".tsv" in (suffix.lower() for suffix in path.suffixes)
    with (
        decompressed(path, growing=growing) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
    ):
        lines = _complete_lines(text) if growing else text
        rows = csv.DictReader(lines, delimiter="\t" if tabs else ",", strict=True)
        before, number = 0, 1
        try:
            before = 1 if rows.fieldnames is not None else 0
            for row in rows:
                number, before = before + 1, rows.line_num
                if None in row or None in row.values():
                    width = len(rows.fieldnames or ())
                    raise DataError(
                        f"{path}:{number}: this row does not have as many columns as the first line ({width})."
                    )
                yield number, dict(row)
        except (csv.Error, UnicodeDecodeError) as error:
            if growing and "unexpected end of data" in str(error):
                return  # a quoted field continues on a line that is not written yet
            raise DataError(
                f"{path}:{max(number, before) + 1}: this line is not valid CSV in UTF-8: {error}."
            ) from error


def _complete_lines(text: Iterable[str]) -> Iterator[str]:
    """Yield the lines that end with a line break."""
    return (line for line in text if line.endswith(("\n", "\r")))


def _arrow_file(ipc: Any, pyarrow: Any, place: Any) -> Iterator[Any]:
    """Yield the batches of an Arrow file, or of an Arrow stream, which is what `datasets` writes."""
    try:
        with ipc.open_file(place if isinstance(place, io.BytesIO) else pyarrow.memory_map(place)) as file:
            for index in range(file.num_record_batches):
                yield from _cut(file.get_batch(index))
            return
    except pyarrow.ArrowInvalid as error:
        if "Not an Arrow file" not in str(error):
            raise
    if isinstance(place, io.BytesIO):
        place.seek(0)
    with ipc.open_stream(place if isinstance(place, io.BytesIO) else pyarrow.memory_map(place)) as stream:
        for batch in stream:
            yield from _cut(batch)


def _cut(batch: Any) -> Iterator[Any]:
    return (batch.slice(start, ROWS_PER_READ) for start in range(0, batch.num_rows, ROWS_PER_READ))


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
