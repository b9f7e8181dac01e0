"""Stores that keep Arrow tables: an IPC stream, Hugging Face datasets, Lance."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from _stores import TOKEN_COLUMNS

from _peers.base import Batch, Padder, Peer, make_commits, octets, row_of_table


def arrow_table(commit: Batch) -> Any:
    """A commit as Arrow lists; the mask as bytes, because Arrow's booleans are bits and unpacking costs more."""
    import pyarrow as pa

    offsets = pa.array(commit["input_ids"].offsets.astype(np.int32))
    flat = {n: commit[n].values.view(np.uint8) if d == "bool" else commit[n].values for n, d in TOKEN_COLUMNS.items()}
    return pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(v)) for name, v in flat.items()})


def list_rows(column: Any) -> tuple[list[memoryview], np.ndarray]:
    """Views of the rows of an Arrow list array, and their lengths."""
    edges = column.offsets.to_numpy()
    values = column.values.to_numpy()
    data, size = octets(values), values.itemsize
    cuts = (edges * size).tolist()
    return [data[a:b] for a, b in itertools.pairwise(cuts)], np.diff(edges)


def pad_table(table: Any, pad: Padder) -> dict[str, np.ndarray]:
    """The rows of a small Arrow table, padded."""
    import pyarrow as pa

    rows, lengths = {}, np.zeros(0)
    for name in TOKEN_COLUMNS:
        rows[name], lengths = list_rows(pa.concat_arrays(table[name].chunks))
    return pad(rows, lengths.astype(np.int64))


class Arrow(Peer):
    """An IPC stream with one record batch per commit; read from a map through views of the buffers."""

    name = "Arrow IPC stream (pyarrow)"
    needs = "pyarrow"

    def create(self, path, rows):
        import pyarrow as pa

        path.mkdir()
        self.schema = arrow_table(make_commits(1)[0]).schema
        self.sink = pa.OSFile(str(path / "data.arrow"), "wb")
        self.writer = pa.ipc.new_stream(self.sink, self.schema)

    def append(self, commit):
        self.writer.write_table(arrow_table(commit))

    def close(self):
        self.writer.close()
        self.sink.close()

    def open(self, path, rows):
        import pyarrow as pa

        self._views(pa.ipc.open_stream(pa.memory_map(str(path / "data.arrow"))).read_all())

    def _views(self, table):
        parts = {name: [list_rows(chunk) for chunk in table[name].chunks] for name in TOKEN_COLUMNS}
        self.rows = {name: [row for rows, _ in part for row in rows] for name, part in parts.items()}
        self.lengths = np.concatenate([sizes for _, sizes in parts["input_ids"]]).astype(np.int64)
        self.pad = Padder()

    def count(self):
        return len(self.lengths)

    def sample(self, rows):
        picked = rows.tolist()
        return self.pad({name: [view[i] for i in picked] for name, view in self.rows.items()}, self.lengths[rows])

    def salvage(self, path: Path) -> int:
        """Rows of the whole record batches before the torn one, read one by one."""
        import pyarrow as pa

        count, stream = 0, pa.ipc.open_stream(pa.memory_map(str(path / "data.arrow")))
        try:
            while True:
                count += stream.read_next_batch().num_rows
        except (StopIteration, pa.ArrowInvalid, OSError):
            return count


class HuggingFace(Peer):
    """`ArrowWriter`, one table per commit; `Dataset.from_file` in Arrow format, indexed by a list of rows."""

    name = "Hugging Face datasets"
    needs = "datasets"

    def create(self, path, rows):
        from datasets import Features, List, Value
        from datasets.arrow_writer import ArrowWriter

        path.mkdir()
        kinds = {**TOKEN_COLUMNS, "assistant_mask": "uint8"}
        features = Features({name: List(Value(kind)) for name, kind in kinds.items()})
        self.writer = ArrowWriter(path=str(path / "data.arrow"), features=features)

    def append(self, commit):
        self.writer.write_table(arrow_table(commit))

    def close(self):
        self.writer.finalize()

    def open(self, path, rows):
        from datasets import Dataset

        self.data = Dataset.from_file(str(path / "data.arrow")).with_format("arrow")
        self.pad = Padder()

    def count(self):
        return len(self.data)

    def sample(self, rows):
        return pad_table(self.data[rows.tolist()], self.pad)

    salvage = Arrow.salvage


class Lance(Peer):
    """One appended version per commit; compacted and old versions removed before reading; `take`."""

    name = "Lance"
    needs = "lance"

    def create(self, path, rows):
        self.path = str(path)

    def append(self, commit):
        import lance

        lance.write_dataset(arrow_table(commit), self.path, mode="append" if Path(self.path).exists() else "create")

    def close(self):
        import lance

        data = lance.dataset(self.path)
        data.optimize.compact_files()
        data.cleanup_old_versions(older_than=datetime.timedelta(0))

    def open(self, path, rows):
        import lance

        self.data = lance.dataset(str(path))
        self.pad = Padder()

    def count(self):
        return self.data.count_rows()

    def sample(self, rows):
        return pad_table(self.data.take(rows.tolist(), columns=list(TOKEN_COLUMNS)), self.pad)

    def row(self, number):
        return row_of_table(self.data.take([number], columns=list(TOKEN_COLUMNS)))


class DuckDb(Peer):
    """One table with a list per column, inserted from Arrow, one transaction per commit; read by the row's number."""

    name = "DuckDB"
    needs = "duckdb"

    def create(self, path, rows):
        import duckdb

        self.database, self.at = duckdb.connect(str(path)), 0
        kinds = {"int32": "integer[]", "bool": "utinyint[]", "float32": "float[]"}
        columns = ", ".join(f"{name} {kinds[dtype]}" for name, dtype in TOKEN_COLUMNS.items())
        self.database.execute(f"create table rows (number bigint primary key, {columns})")

    def append(self, commit):
        new = arrow_table(commit)  # noqa: F841 - the statement names it
        names = ", ".join(TOKEN_COLUMNS)
        self.database.execute(f"insert into rows select {self.at} + row_number() over () - 1, {names} from new")
        self.at += len(commit["input_ids"])

    def close(self):
        self.database.close()

    def open(self, path, rows):
        import duckdb

        self.database = duckdb.connect(str(path), read_only=True)
        self.database.execute("set threads = 1")
        self.pad, self.names = Padder(), ", ".join(TOKEN_COLUMNS)

    def count(self):
        return self.database.execute("select count(*) from rows").fetchone()[0]

    def sample(self, rows):
        numbers = ", ".join(map(str, rows.tolist()))
        found = self.database.execute(f"select number, {self.names} from rows where number in ({numbers})")
        table = found.to_arrow_table()
        order = np.argsort(table["number"].to_numpy())[np.argsort(np.argsort(rows))]
        return pad_table(table.take(order), self.pad)

    def row(self, number):
        found = self.database.execute(f"select {self.names} from rows where number = ?", [number])
        return row_of_table(found.to_arrow_table())
