"""Random histories of a store against a plain-Python model."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore

SCHEMA = Schema(
    [
        Column("x", "int32", ragged=True, mutable=True),
        Column("ref", "float32", ragged=True, mutable=True, fill=-1.0),
        Column("n", "int64", mutable=True),
        Column("adv", "float32", mutable=True, fill=0.5),
        Column("text", "str", mutable=True),
        Column("note", "str", mutable=True, fill="-"),
        Column("uses", "int32", mutable=True),
    ]
)
EXTRA = [Column("late", "int16", ragged=True, mutable=True, fill=9), Column("flag", "int8", mutable=True, fill=3)]


class StoreMachine(RuleBasedStateMachine):
    """Two writers and a reader; the model is a dict of rows in the order of arrival."""

    backend = "memmap"
    limit: int | None = None

    def __init__(self):
        super().__init__()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="store-machine-", dir=memory))
        self.path = self.folder / "s"
        self.rows: dict[int, dict] = {}
        self.gone: set[int] = set()
        self.total = 0
        self.counter = 0
        self.snapshots: list[tuple] = []
        self.evolved = False

    @initialize(segment_rows=st.integers(2, 9), pick=st.booleans())
    def make(self, segment_rows, pick):
        """Start with an empty store."""
        self.limit = 30 if pick and self.backend == "memmap" else None
        self.store = TrajectoryStore.create(
            self.path,
            SCHEMA,
            backend=self.backend,
            segment_rows=segment_rows,
            segment_elements=60,
            max_trajectories=self.limit,
        )
        self.other = TrajectoryStore.open(self.path, "a")
        self.reader = TrajectoryStore.open(self.path)

    def batch(self, lengths, given):
        """Rows with numbers that never repeat, and what the model keeps of them."""
        rows = []
        for length in lengths:
            self.counter += 1
            c = self.counter
            row = {"x": [c + i for i in range(length)], "ref": [-1.0] * length, "n": c, "adv": 0.5}
            row |= {"text": f"t{c}" * length, "note": "-", "uses": 0, "late": [9] * length, "flag": 3}
            if given:
                row |= {"ref": [c / 2] * length, "adv": float(c), "note": f"n{c}", "uses": 2}
            rows.append(row)
        names = ["x", "n", "text", *(["ref", "adv", "note", "uses"] if given else [])]
        data = {name: [row[name] for row in rows] for name in names}
        if len(rows) % 2:
            data["x"] = RaggedArray.from_rows(data["x"], "int32")
        return rows, data

    def keep(self, ids, rows):
        """Add to the model; drop what the limit pushes out."""
        assert len(ids) == len(rows)
        for row_id, row in zip(ids.tolist(), rows, strict=True):
            assert row_id not in self.rows
            assert row_id not in self.gone
            self.rows[row_id] = row
        self.total += len(rows)
        if self.limit is not None:
            for row_id in list(self.rows)[: max(0, len(self.rows) - self.limit)]:
                del self.rows[row_id]
                self.gone.add(row_id)

    def some(self, data):
        """A few ids of rows that exist."""
        self.store.refresh()
        self.other.refresh()
        known = list(self.rows)
        return data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=6, unique=True))

    @rule(lengths=st.lists(st.integers(0, 7), max_size=8), given=st.booleans(), second=st.booleans())
    def append(self, lengths, given, second):
        """One of the writers appends."""
        rows, data = self.batch(lengths, given)
        self.keep((self.other if second else self.store).append(data), rows)

    @rule(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5))
    def append_and_die(self, lengths):
        """A third writer appends and ends without closing anything."""
        rows, data = self.batch(lengths, True)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store = TrajectoryStore.open(self.path, "a")
                ids = store.append(data)
                os.write(write, ids.tobytes())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            ids = np.frombuffer(pipe.read(), np.int64)
        os.waitpid(child, 0)
        self.keep(ids, rows)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), value=st.integers(0, 1000), second=st.booleans())
    def update(self, data, value, second):
        """New values of a scalar."""
        ids = self.some(data)
        store = self.other if second else self.store
        store.update(ids, uses=value + np.arange(len(ids)))
        for i, row_id in enumerate(ids):
            self.rows[row_id]["uses"] = value + i

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), which=st.sets(st.sampled_from(["ref", "adv", "note", "text", "x"]), min_size=1))
    def update_any(self, data, which):
        """Later values through either writer, in turns."""
        ids = self.some(data)
        store = self.other if self.counter % 2 else self.store
        values = {}
        for name in sorted(which):
            column = []
            for row_id in ids:
                self.counter += 1
                c, length = self.counter, len(self.rows[row_id]["x"])
                new = {"ref": [c / 4] * length, "adv": float(c), "note": f"p{c}", "text": "q" * (c % 5)}
                new["x"] = [c] * length
                column.append(new[name])
            values[name] = column
        store.update(ids, **values)
        for name, column in values.items():
            for row_id, value in zip(ids, column, strict=True):
                self.rows[row_id][name] = value

    @rule()
    def compact(self):
        """Merge what is finished."""
        self.other.close()
        self.store.refresh()
        self.store.compact()
        self.other = TrajectoryStore.open(self.path, "a")

    @rule()
    def reopen(self):
        """Close the first writer and open it again."""
        self.store.close()
        self.store = TrajectoryStore.open(self.path, "a")

    @rule()
    def take_snapshot(self):
        """Remember what exists now."""
        self.store.refresh()
        self.snapshots.append((self.store.snapshot(), list(self.rows)))

    @precondition(lambda self: not self.evolved)
    @rule()
    def add_columns(self):
        """Two columns more, one of them per token."""
        self.evolved = True
        for name in ("store", "other", "reader"):
            getattr(self, name).close()
        self.store = TrajectoryStore.open(self.path, "a", add_columns=EXTRA)
        self.other = TrajectoryStore.open(self.path, "a")
        self.reader = TrajectoryStore.open(self.path)

    @precondition(lambda self: self.evolved and self.rows)
    @rule(data=st.data())
    def use_new_columns(self, data):
        """Values for the columns that came later."""
        ids = self.some(data)
        self.counter += 1
        c = self.counter % 100
        self.store.update(ids, flag=c)
        self.store.update(ids, late=[[c] * len(self.rows[i]["x"]) for i in ids])
        for row_id in ids:
            self.rows[row_id]["flag"] = c
            self.rows[row_id]["late"] = [c] * len(self.rows[row_id]["x"])

    @invariant()
    def agrees(self):
        """The reader and the writers see the model."""
        if not hasattr(self, "store"):
            return
        for store in (self.reader, self.store, self.other):
            store.refresh()
            assert store.watermark == self.total
            assert len(store) == len(self.rows)
            assert store.ids().tolist() == list(self.rows)
        store = self.reader
        ids = list(self.rows)[::-1]
        got = store.read(ids)
        for name in store.schema.names:
            for row_id, value in zip(ids, got[name], strict=True):
                wanted = self.rows[row_id][name]
                found = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
                assert found == wanted, (name, row_id, found, wanted)
        if ids:
            padded = store.read_padded(ids, ["x", "ref", "adv"])
            for i, row_id in enumerate(ids):
                length = int(padded["lengths"][i])
                assert padded["x"][i, :length].tolist() == self.rows[row_id]["x"]
                assert padded["ref"][i, :length].tolist() == self.rows[row_id]["ref"]
                assert not padded["x"][i, length:].any()
        assert store.read_scalars("n").tolist() == [row["n"] for row in self.rows.values()]
        for snapshot, known in self.snapshots:
            found = store.ids(snapshot).tolist()
            assert found == [i for i in known if i in self.rows or i in set(found)]

    def teardown(self):
        """Everything checks out at the end, also for a fresh reader."""
        if hasattr(self, "store"):
            report = self.store.verify()
            assert report.ok, report
            for store in (self.store, self.other, self.reader):
                store.close()
            with TrajectoryStore.open(self.path) as fresh:
                assert fresh.ids().tolist() == list(self.rows)
        shutil.rmtree(self.folder)


class ZarrStoreMachine(StoreMachine):
    """The same histories on one Zarr group per commit."""

    backend = "zarr"

    @rule(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5))
    def append_and_die(self, lengths):
        """A third writer appends and leaves its segment unfinished."""
        rows, data = self.batch(lengths, True)
        store = TrajectoryStore.open(self.path, "a")
        self.keep(store.append(data), rows)
        store._stream._pid = 0  # as after a fork: close() leaves the segment alone
        store.close()


EXAMPLES = int(os.environ.get("STORE_EXAMPLES", "0"))


def runs(examples, steps):
    """Settings for so many histories, or as many as STORE_EXAMPLES says."""
    return settings(
        max_examples=EXAMPLES or examples,
        stateful_step_count=25 if EXAMPLES else steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = runs(6, 15)
TestZarrStoreMachine = ZarrStoreMachine.TestCase
TestZarrStoreMachine.settings = runs(2, 10)
