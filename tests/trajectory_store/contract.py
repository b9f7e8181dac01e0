"""The contract of a store as a test class: subclass it, define how to make a store, and run pytest.

class TestMemmap(StoreContract):
    def create(self, path, schema, **options):
        return TrajectoryStore.create(path, schema, **options)

    def open(self, path, mode="r"):
        return TrajectoryStore.open(path, mode)
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trajectory_store.errors import (
    BatchError,
    MissingRowError,
    ReadOnlyError,
    SchemaError,
    SnapshotGoneError,
    StoreClosedError,
    StoreExistsError,
    StoreNotFoundError,
    UnknownColumnError,
)
from trajectory_store.ragged import RaggedArray
from trajectory_store.schema import Column, Schema
from trajectory_store.snapshot import Snapshot
from trajectory_store.store import TrajectoryStore


def example_schema() -> Schema:
    """A schema with a column of every kind."""
    return Schema(
        [
            Column("input_ids", "int32", ragged=True),
            Column("assistant_mask", "bool", ragged=True),
            Column("log_probs", "float32", ragged=True),
            Column("ref_log_probs", "float32", ragged=True, mutable=True, fill=float("nan")),
            Column("frames", "uint8", ragged=True, axis="frames", fill=0),
            Column("task_reward", "float32", mutable=True),
            Column("group_id", "int64"),
            Column("advantage", "float32", mutable=True, fill=float("nan")),
            Column("prompt", "str", mutable=True),
            Column("meta", "str", mutable=True, fill="{}"),
            Column("use_count", "int32", mutable=True),
            Column("priority", "float32", mutable=True, fill=1.0),
        ]
    )


def example_rows(count: int, seed: int = 0, longest: int = 40) -> dict[str, Any]:
    """A batch for `example_schema`; lengths include 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, count)
    total = int(lengths.sum())
    log_probs = rng.normal(size=total).astype(np.float32)
    log_probs[::3] = np.nan
    return {
        "input_ids": RaggedArray(rng.integers(0, 50_000, total).astype(np.int32), lengths),
        "assistant_mask": RaggedArray(rng.random(total) < 0.5, lengths),
        "log_probs": RaggedArray(log_probs, lengths),
        "task_reward": rng.normal(size=count).astype(np.float32),
        "group_id": np.arange(count) // 4,
        "prompt": [f"prompt {seed} {i} " + "\u00e9" * int(n) for i, n in enumerate(lengths)],
    }


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Generator[None]:
    """Expect an error of this kind whose message holds these words."""
    try:
        yield
    except kind as error:
        missing = [w for w in words if w not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in the message: {error}") from error
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def check(condition: bool, what: str = "") -> None:
    """Fail with a message unless a condition holds."""
    if not condition:
        raise AssertionError(what or "the condition does not hold")


def same_rows(store: TrajectoryStore, ids: Any, data: dict[str, Any]) -> None:
    """Fail unless the store returns these rows for these ids."""
    rows = store.read(ids, list(data))
    for name, expected in data.items():
        column = store.schema[name]
        if column.is_text:
            check(rows[name] == list(expected), name)
        elif column.axis is not None:
            check(len(rows[name]) == len(expected), name)
            for got, want in zip(rows[name], expected, strict=True):
                np.testing.assert_array_equal(got, np.asarray(want, column.dtype))
        else:
            np.testing.assert_array_equal(rows[name], np.asarray(expected, column.dtype))


class StoreContract:
    """Tests that every backend passes; the module docstring shows how to use it."""

    def create(self, path: Path, schema: Schema, **options: Any) -> TrajectoryStore:
        """Make a store."""
        raise NotImplementedError

    def open(self, path: Path, mode: Any = "r") -> TrajectoryStore:
        """Open a store."""
        raise NotImplementedError

    def test_rows_come_back_as_they_went_in(self, tmp_path: Path) -> None:
        """Every kind of column round-trips in the writer, in a reader and after a reopen."""
        data = example_rows(30)
        with self.create(tmp_path / "s", example_schema()) as store:
            ids = store.append(data)
            same_rows(store, ids, data)
            with self.open(tmp_path / "s") as reader:
                same_rows(reader, ids, data)
        with self.open(tmp_path / "s") as reader:
            same_rows(reader, ids, data)
            same_rows(reader, ids[[5, 5, 2]], {"group_id": [1, 1, 0]})

    def test_left_out_columns_read_as_their_fill(self, tmp_path: Path) -> None:
        """NaN per token, NaN per row, 0 and the default text replace values that were not given."""
        with self.create(tmp_path / "s", example_schema()) as store:
            data = example_rows(9)
            ids = store.append(data)
            rows = store.read(ids)
            for got, want in zip(rows["ref_log_probs"], data["input_ids"], strict=True):
                check(len(got) == len(want) and bool(np.isnan(got).all()))
            check(bool(np.isnan(rows["advantage"]).all()))
            check(rows["meta"] == ["{}"] * 9)
            check(rows["use_count"].tolist() == [0] * 9 and rows["priority"].tolist() == [1.0] * 9)
            check([len(f) for f in rows["frames"]] == [0] * 9)

    def test_ids_are_stable_and_in_order_of_arrival(self, tmp_path: Path) -> None:
        """Ids of several commits and two sessions are distinct, ordered, and the same for every reader."""
        with self.create(tmp_path / "s", example_schema()) as store:
            first = np.concatenate([store.append(example_rows(n, seed=n)) for n in (3, 1, 7)])
            check(store.ids().tolist() == first.tolist())
        with self.open(tmp_path / "s", "a") as store:
            second = store.append(example_rows(4, seed=9))
            everything = [*first.tolist(), *second.tolist()]
            check(len(set(everything)) == 15 and store.ids().tolist() == everything)
            check(len(store) == 15 and store.watermark == 15)
        with self.open(tmp_path / "s") as reader:
            check(reader.ids().tolist() == everything)
            same_rows(reader, second, example_rows(4, seed=9))

    def test_a_reader_follows_with_refresh(self, tmp_path: Path) -> None:
        """Rows appear at refresh, not before, and never in part."""
        with (
            self.create(tmp_path / "s", example_schema()) as store,
            self.open(tmp_path / "s") as reader,
        ):
            check(len(reader) == 0 and reader.ids().tolist() == [])
            ids = store.append(example_rows(5))
            check(len(reader) == 0)
            check(reader.refresh() == 5)
            same_rows(reader, ids, example_rows(5))
            more = store.append(example_rows(6, seed=1))
            with raises(MissingRowError, str(int(more[0])), "refresh"):
                reader.read(more)
            reader.refresh()
            same_rows(reader, more, example_rows(6, seed=1))

    def test_padded(self, tmp_path: Path) -> None:
        """Padding is on the requested side, with the requested values, and T is rounded up."""
        schema = Schema([Column("x", "int64", ragged=True), Column("lp", "float32", ragged=True)])
        with self.create(tmp_path / "s", schema) as store:
            ids = store.append({"x": [[1, 2, 3], [], [4]], "lp": [[1, 2, 3], [], [4]]})
            batch = store.read_padded(ids)
            check(batch["x"].tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]])
            check(batch["lengths"].tolist() == [3, 0, 1] and batch["lp"].dtype == np.float32)
            batch = store.read_padded(ids[::-1], ["x"], pad_value={"x": -1}, side="left", pad_to_multiple_of=4)
            check(batch["x"].tolist() == [[-1, -1, -1, 4], [-1] * 4, [-1, 1, 2, 3]])
            out = {"x": np.zeros((4, 9), np.int64)}
            batch = store.read_padded(ids, "x", pad_value=7, out=out)
            check(batch["x"].tolist() == [[1, 2, 3], [7, 7, 7], [4, 7, 7]])
            check(out["x"][0, :4].tolist() == [1, 2, 3, 0] and out["x"][3].sum() == 0)
            with raises(BatchError, "out['x']", "[3, 3]"):
                store.read_padded(ids, "x", out={"x": np.zeros((2, 3), np.int64)})
            check(store.read_padded([], "x")["x"].shape == (0, 0))
            check(store.read_padded(ids[1:2], "x")["x"].shape == (1, 0))

    def test_a_batch_stays_as_it_is_while_it_is_held(self, tmp_path: Path) -> None:
        """Reused output memory never changes a batch that is still referenced."""
        schema = Schema([Column("x", "int64", ragged=True)])
        with self.create(tmp_path / "s", schema) as store:
            ids = store.append({"x": [[i] * 300 for i in range(40)]})
            views = [store.read_padded(ids[[i]], "x")["x"][0, 5:9] for i in range(40)]
            check([part.tolist() for part in views] == [[i] * 4 for i in range(40)])

    def test_updates_of_any_column(self, tmp_path: Path) -> None:
        """Scalars, text and ragged columns are updated: at once here, after a refresh elsewhere, and permanently."""
        with self.create(tmp_path / "s", example_schema()) as store:
            data = example_rows(6)
            ids = store.append(data)
            reader = self.open(tmp_path / "s")
            reference = [np.full(n, i, np.float32) for i, n in enumerate(data["input_ids"].lengths[[4, 1]].tolist())]
            store.update(ids[[4, 1]], use_count=[40, 10], priority=0.5, ref_log_probs=reference, meta=["a", "b"])
            store.update(ids[1], task_reward=7.0)
            for view in (store, reader):
                view.refresh()
                check(view.read_scalars("use_count").tolist() == [0, 10, 0, 0, 40, 0])
                check(view.read_scalars("priority", ids[:2]).tolist() == [1.0, 0.5])
                check(view.read_scalars("task_reward", ids[[1, 0]]).tolist() == [7.0, float(data["task_reward"][0])])
                check(view.read(ids)["meta"] == ["{}", "b", "{}", "{}", "a", "{}"])
                padded = view.read_padded(ids, ["ref_log_probs", "input_ids"])
                for row, want in ((4, reference[0]), (1, reference[1])):
                    np.testing.assert_array_equal(padded["ref_log_probs"][row, : len(want)], want)
                check(view.present("ref_log_probs").tolist() == [False, True, False, False, True, False])
            with raises(ReadOnlyError, "mode"):
                reader.update(ids, use_count=1)
            with raises(BatchError, "use_count"):
                store.update(ids, use_count=[1, 2])
            with raises(BatchError, "ref_log_probs", "tokens"):
                store.update(ids[:1], ref_log_probs=[[0.5] * 99])
            with raises(UnknownColumnError, "use_count"):
                store.update(ids, use_coumt=1)
            with raises(BatchError, "column"):
                store.update(ids)
            with raises(MissingRowError, "77"):
                store.update([77 << 32], use_count=1)
            check(store.verify().ok, str(store.verify()))
            reader.close()
        with self.open(tmp_path / "s") as again:
            check(again.read_scalars("use_count").tolist() == [0, 10, 0, 0, 40, 0])

    def test_the_last_update_wins(self, tmp_path: Path) -> None:
        """After many interleaved updates by two writers, each value is the last one given."""
        with (
            self.create(tmp_path / "s", example_schema()) as first,
            self.open(tmp_path / "s", "a") as two,
        ):
            ids = first.append(example_rows(40))
            two.refresh()
            rng = np.random.default_rng(3)
            expected = np.ones(40)
            for step in range(30):
                rows = rng.integers(0, 40, 6)
                values = rng.random(6).round(3)
                (first, two)[step % 2].update(ids[rows], priority=values)
                expected[rows] = values  # for a repeated row, the last value counts
            for view in (first, two):
                view.refresh()
                np.testing.assert_allclose(view.read_scalars("priority"), expected, rtol=1e-6)
                np.testing.assert_allclose(view.read_scalars("priority", ids[::-1]), expected[::-1], rtol=1e-6)
            first.compact()
            with self.open(tmp_path / "s") as reader:
                np.testing.assert_allclose(reader.read_scalars("priority"), expected, rtol=1e-6)

    def test_a_snapshot_keeps_rows_and_values(self, tmp_path: Path) -> None:
        """Later rows and updates are not visible in it."""
        with self.create(tmp_path / "s", example_schema()) as store:
            ids = store.append(example_rows(5))
            store.update(ids[:2], priority=[2.0, 3.0])
            then = Snapshot.from_json(store.snapshot().to_json())
            store.append(example_rows(3, seed=1))
            store.update(ids[1:3], priority=[8.0, 9.0])
            check(store.ids(then).tolist() == ids.tolist())
            view = store.as_of(then)
            check(view.read_scalars("priority", ids).tolist() == [2.0, 3.0, 1.0, 1.0, 1.0])
            check(view.read(ids, "priority")["priority"].tolist() == [2.0, 3.0, 1.0, 1.0, 1.0])
            check(store.read_scalars("priority", ids).tolist() == [2.0, 8.0, 9.0, 1.0, 1.0])
            store.compact()
            with raises(SnapshotGoneError, "priority", "snapshot"):
                store.as_of(then).read_scalars("priority", ids)
            store.update(ids[3:4], use_count=[4])
            then = store.snapshot()
        with self.open(tmp_path / "s", "a") as store:  # this session supersedes all updates of the one before
            store.update(ids[3:4], use_count=[5])
            check(store.as_of(then).read_scalars("use_count", ids[3:4]).tolist() == [4])
        with self.open(tmp_path / "s", "a") as store:
            store.compact()
            with raises(SnapshotGoneError, "use_count", "snapshot"):
                store.as_of(then).read_scalars("use_count", ids)

    def test_elements_with_a_shape_and_bytes(self, tmp_path: Path) -> None:
        """`[T, k]` columns share the axis of the tokens and are checked against it; bytes come back as they are."""
        schema = Schema(
            [
                Column("input_ids", "int32", ragged=True),
                Column("experts", "int16", ragged=True, shape=(2, 3), mutable=True, fill=-1),
                Column("image", "bytes", fill=""),
            ]
        )
        with self.create(tmp_path / "s", schema) as store:
            experts = [np.arange(n * 6).reshape(n, 2, 3) for n in (2, 0, 3)]
            images = [b"\x00\xff", b"", b"abc"]
            ids = store.append({"input_ids": [[1, 2], [], [3, 4, 5]], "experts": experts, "image": images})
            more = store.append({"input_ids": [[6]]})
            everything = np.concatenate([ids, more])
            store.compact()
            for view in (store, self.open(tmp_path / "s")):
                rows = view.read(everything)
                for got, want in zip(rows["experts"], [*experts, np.full((1, 2, 3), -1)], strict=True):
                    np.testing.assert_array_equal(got, want)
                check(rows["image"] == [*images, b""])
                padded = view.read_padded(everything[[2, 0]], ["experts"])["experts"]
                check(padded.shape == (2, 3, 2, 3) and padded.dtype == np.int16)
                np.testing.assert_array_equal(padded[1, :2], experts[0])
                check(bool((padded[1, 2] == 0).all()))
            with raises(BatchError, "experts", "2, 3]"):
                store.append({"input_ids": [[1]], "experts": [np.zeros((1, 3))]})
            with raises(BatchError, "experts", "input_ids", "tokens"):
                store.append({"input_ids": [[1]], "experts": [np.zeros((2, 2, 3), np.int16)]})
            store.update(everything[:1], experts=[np.zeros((2, 2, 3), np.int16)])
            check(bool((store.read(everything[:1])["experts"][0] == 0).all()))
            check(store.verify().ok, str(store.verify()))

    def test_conditions_and_batches(self, tmp_path: Path) -> None:
        """`where` finds rows by their newest scalars, `batches` iterates over rows, and a store can be indexed."""
        with self.create(tmp_path / "s", example_schema()) as store:
            data = example_rows(25)
            ids = store.append(data)
            store.update(ids[3], task_reward=50.0)
            rewards = data["task_reward"].copy()
            rewards[3] = 50.0
            matching_ids = store.where("task_reward >= 0.5 and not group_id == 2")
            check(matching_ids.tolist() == ids[(rewards >= 0.5) & (data["group_id"] != 2)].tolist())
            check(
                store.where("group_id in (0, 5) or task_reward > 49").tolist()
                == ids[[0, 1, 2, 3, 20, 21, 22, 23]].tolist()
            )
            check(store.where("isnan(advantage)", ids[:2]).tolist() == ids[:2].tolist())
            parts = list(store.batches(10, ["group_id"]))
            check([len(p["ids"]) for p in parts] == [10, 10, 5])
            check(np.concatenate([p["group_id"] for p in parts]).tolist() == data["group_id"].tolist())
            check(store[ids[[7]]]["prompt"] == [data["prompt"][7]])
            with raises(UnknownColumnError, "task_reward"):
                store.where("task_rewart > 1")
            for wrong in ("task_reward", "task_reward >", "__import__('os')", "task_reward > 1 and 3", "prompt.x == 1"):
                with raises(SchemaError, wrong):
                    store.where(wrong)

    def test_columns_that_were_not_given(self, tmp_path: Path) -> None:
        """Appends give different optional columns; each row reads as it was given, even after a compaction."""
        with self.create(tmp_path / "s", example_schema()) as store:
            lengths = np.array([2, 1])
            base = {**example_rows(2), "input_ids": RaggedArray(np.arange(3, dtype=np.int32), lengths)}
            base |= {"assistant_mask": RaggedArray(np.ones(3, bool), lengths)}
            base |= {"log_probs": RaggedArray(np.zeros(3, np.float32), lengths)}
            first = store.append(base)
            second = store.append({**base, "advantage": [1.0, 2.0], "meta": ["x", "y"]})
            third = store.append({**base, "priority": [5.0, 6.0]})
            ids = np.concatenate([first, second, third])
            for _ in range(2):
                np.testing.assert_array_equal(store.read_scalars("advantage"), [np.nan] * 2 + [1, 2] + [np.nan] * 2)
                check(store.read_scalars("priority", ids).tolist() == [1, 1, 1, 1, 5, 6])
                check(store.read(ids)["meta"] == ["{}", "{}", "x", "y", "{}", "{}"])
                check(store.present("advantage", ids).tolist() == [False, False, True, True, False, False])
                check(store.present("priority", ids).tolist() == [False] * 4 + [True] * 2)
                store.compact()
            check(store.verify().ok, str(store.verify()))

    def test_scalars_and_lengths_of_everything(self, tmp_path: Path) -> None:
        """Whole columns are read in the order of arrival, without reading tokens."""
        with self.create(tmp_path / "s", example_schema()) as store:
            parts = [example_rows(n, seed=n) for n in (5, 8)]
            for part in parts:
                store.append(part)
            expected = np.concatenate([p["task_reward"] for p in parts])
            np.testing.assert_array_equal(store.read_scalars("task_reward"), expected)
            lengths = np.concatenate([p["input_ids"].lengths for p in parts])
            np.testing.assert_array_equal(store.lengths("input_ids"), lengths)
            check(store.read_scalars("prompt").tolist() == parts[0]["prompt"] + parts[1]["prompt"])
            tokens = store.read_ragged("input_ids")
            np.testing.assert_array_equal(tokens.values, np.concatenate([p["input_ids"].values for p in parts]))
            with raises(SchemaError, "ragged"):
                store.read_scalars("input_ids")

    def test_wrong_batches_are_refused_whole(self, tmp_path: Path) -> None:
        """The message names the column and the value, and nothing is written."""
        with self.create(tmp_path / "s", example_schema()) as store:
            good = example_rows(3)
            cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
                ({"task_reward": [1.0, 2.0]}, ("task_reward", "2 rows")),
                ({"task_reward": [[1.0], [2.0], [3.0]]}, ("task_reward", "[3, 1]")),
                ({"group_id": [0.5, 1, 2]}, ("group_id", "float64")),
                ({"input_ids": [[2**40], [1], []]}, ("input_ids", str(2**40), "int32")),
                ({"log_probs": [[0.1], [], []]}, ("log_probs", "tokens", "input_ids")),
                ({"prompt": ["a", 1, "b"]}, ("row 1", "prompt", "int")),
                ({"prompt": ["a", "\ud800", "b"]}, ("row 1", "prompt", "Unicode")),
                ({"inputids": [1, 2, 3]}, ("inputids", "Did you mean 'input_ids'")),
            ]
            for change, words in cases:
                with raises(ValueError, *words):
                    store.append({**good, **change})
            short = dict(good)
            del short["input_ids"]
            with raises(BatchError, "input_ids", "missing"):
                store.append(short)
            check(len(store) == 0 and store.ids().tolist() == [])

    def test_nothing_to_append(self, tmp_path: Path) -> None:
        """An empty batch gives no ids and makes no commit."""
        with self.create(tmp_path / "s", example_schema()) as store:
            check(store.append(example_rows(0)).tolist() == [])
            check(len(store) == 0 and store.read([])["prompt"] == [])
            check(store.verify().ok)

    def test_long_texts_and_odd_texts(self, tmp_path: Path) -> None:
        """Megabytes of text, empty text, NUL and emoji come back."""
        texts = ["", "a\0b", "\U0001f600" * 3, "x" * 3_000_000, "\u4e2d" * 1000]
        with self.create(tmp_path / "s", Schema([Column("t", "str")])) as store:
            ids = store.append({"t": texts})
            check(store.read(ids)["t"] == texts)

    def test_paths_and_modes(self, tmp_path: Path) -> None:
        """Wrong paths and modes raise different errors."""
        with raises(StoreNotFoundError, "create"):
            self.open(tmp_path / "none")
        store = self.create(tmp_path / "s", example_schema())
        with raises(StoreExistsError, "open"):
            self.create(tmp_path / "s", example_schema())
        with raises(ValueError, "'r'"):
            self.open(tmp_path / "s", "w")
        store.close()
        store.close()
        for call in (store.ids, store.refresh, store.verify, lambda: len(store)):
            with raises(StoreClosedError, "open"):
                call()
        check("closed" in repr(store))

    def test_ids_that_are_not_there(self, tmp_path: Path) -> None:
        """Unknown ids are errors that name the id, never other rows."""
        with self.create(tmp_path / "s", example_schema()) as store:
            ids = store.append(example_rows(3))
            for bad in (-1, int(ids[-1]) + 1, 1 << 40, (1 << 62) + 5):
                with raises(MissingRowError, str(bad)):
                    store.read([int(ids[0]), bad], ["group_id"])
            with raises(BatchError, "float64"):
                store.read([0.5])

    def test_many_small_commits(self, tmp_path: Path) -> None:
        """Commits of one row over several segments read back in any order."""
        schema = Schema([Column("x", "int64", ragged=True), Column("n", "int64")])
        with self.create(tmp_path / "s", schema, segment_rows=7) as store:
            ids = [int(store.append({"x": [[i] * (i % 5)], "n": [i]})[0]) for i in range(60)]
            order = np.random.default_rng(0).permutation(60)
            picked = np.array(ids)[order]
            rows = store.read(picked)
            check(rows["n"].tolist() == order.tolist())
            check([r.tolist() for r in rows["x"]] == [[int(i)] * (int(i) % 5) for i in order])
            check(store.read_scalars("n").tolist() == list(range(60)))
            check(store.verify().ok)

    def test_large_reads_in_any_order(self, tmp_path: Path) -> None:
        """Thousands of rows over several segments, shuffled, repeated, and as whole columns."""
        schema = Schema([Column("x", "int32", ragged=True), Column("n", "int64"), Column("t", "str")])
        with self.create(tmp_path / "s", schema, segment_rows=700) as store:
            total = 2_500
            lengths = np.arange(total) % 7
            for first in range(0, total, 500):
                part = np.arange(first, first + 500)
                store.append(
                    {
                        "x": RaggedArray(np.repeat(part, lengths[part]).astype(np.int32), lengths[part]),
                        "n": part,
                        "t": [str(i) for i in part.tolist()],
                    }
                )
            ids = store.ids()
            order = np.random.default_rng(1).integers(0, total, 3_000)
            batch = store.read_padded(ids[order], ["x", "n", "t"], side="left", pad_value=-1)
            check(batch["x"].shape == (3_000, 6) and batch["n"].tolist() == order.tolist())
            check(batch["t"] == [str(i) for i in order.tolist()])
            check(batch["lengths"].tolist() == lengths[order].tolist())
            check(all(set(row[6 - k :]) <= {i} for row, k, i in zip(batch["x"], lengths[order], order, strict=True)))
            check(bool((batch["x"][:, 0] == np.where(lengths[order] == 6, order, -1)).all()))
            np.testing.assert_array_equal(store.read_ragged("x").lengths, lengths)
            np.testing.assert_array_equal(store.read_scalars("n"), np.arange(total))
            np.testing.assert_array_equal(store.read_scalars("n", ids[100:2_300]), np.arange(100, 2_300))
