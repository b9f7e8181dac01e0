"""What users of arrays and tables expect of a store, and clear refusals of what it cannot do."""

from __future__ import annotations

import time

import numpy as np
import pytest

from trajectory_store import BatchError, Column, SchemaError, TrajectoryStore

COLUMNS = [
    *(Column("tokens", "int32", ragged=True), Column("reward", "float32"), Column("half", "float16", fill=0.0)),
    *(Column("text", "str", fill=""), Column("raw", "bytes", fill=""), Column("later", "int64", mutable=True)),
]
TEXTS = ["a cat sat", "dog", "cat", "", "größe 🙂", "concatenate"]


@pytest.fixture(params=["memmap", "zarr"])
def store(request, tmp_path):
    with TrajectoryStore.create(tmp_path / "store", COLUMNS, backend=request.param) as made:
        made.append(
            {
                "tokens": [list(range(n)) for n in range(6)],
                "reward": [0.0, 0.25, 0.5, 0.75, 1.0, np.nan],
                "text": TEXTS,
                "raw": [text.encode() for text in TEXTS],
            }
        )
        yield made


def test_a_loop_gives_one_trajectory_at_a_time(store):
    """In the order of arrival, each as a dict of its own values."""
    rows = list(store)
    assert [row["text"] for row in rows] == TEXTS
    assert [row["tokens"].tolist() for row in rows] == [list(range(n)) for n in range(6)]
    assert set(rows[0]) == {column.name for column in COLUMNS}


def test_slices_masks_columns_and_pairs(store):
    """Places in the order of arrival, a mask over all rows, one column of all rows, columns of some rows."""
    ids = store.ids()
    assert store[1:3]["text"] == TEXTS[1:3]
    assert store[-1:]["text"] == TEXTS[-1:]
    assert store[np.arange(6) % 2 == 0]["text"] == TEXTS[::2]
    assert store["text"] == TEXTS
    assert store["reward"][:5].tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert store[ids[[4, 0]], "text"] == [TEXTS[4], TEXTS[0]]
    assert set(store[ids[:2], ["text", "reward"]]) == {"text", "reward"}


@pytest.mark.parametrize("key", [None, True, (None, "text"), ("text", "reward")])
def test_a_key_that_means_nothing_is_refused(store, key):
    """`store[None]` is not everything."""
    with pytest.raises(BatchError, match="give ids, a slice, a mask, or the name of a column"):
        store[key]


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("'cat' in text", [0, 2, 5]),
        ("'cat' not in text", [1, 3, 4]),
        ("b'cat' in raw", [0, 2, 5]),
        ("text == 'cat'", [2]),
        ("text != 'cat'", [0, 1, 3, 4, 5]),
        ("raw == b'dog'", [1]),
        ("text in ('dog', '')", [1, 3]),
        ("text.startswith('c')", [2, 5]),
        ("text.endswith('e 🙂')", [4]),
        ("len(text) == 7", [4]),
        ("len(raw) == 11", [5]),
        ("len(tokens) > 3", [4, 5]),
        ("text < 'b'", [0, 3]),
        ("text > 'd'", [1, 4]),
        ("'' in text and reward >= 0.5", [2, 3, 4]),
        ("'ß' in text or 'tt' in text", [4]),
    ],
)
def test_conditions_on_texts(store, condition, rows):
    """Texts and bytes are compared and searched as users of Python expect, on both media."""
    assert store.where(condition).tolist() == store.ids()[rows].tolist()
    assert store.where(condition, store.ids()[2:]).tolist() == store.ids()[[row for row in rows if row >= 2]].tolist()


def test_a_search_does_not_cross_rows(tmp_path):
    """The end of one text and the beginning of the next are no match; later values count."""
    with TrajectoryStore.create(tmp_path / "store", [Column("text", "str")]) as store:
        ids = store.append({"text": ["ab", "ca", "b", "", "aab"]})
        assert store.where("'ab' in text").tolist() == ids[[0, 4]].tolist()
        store.update(ids[[0, 3]], text=["x", "cab"])
        assert store.where("'ab' in text").tolist() == ids[[3, 4]].tolist()


@pytest.mark.parametrize(
    "condition", ["text < 5", "text == 5", "5 in text", "reward in text", "reward.startswith('a')"]
)
def test_conditions_that_mix_kinds_are_refused(store, condition):
    """A number is compared with no text, and a number is searched in none."""
    with pytest.raises(SchemaError):
        store.where(condition)


def test_equal_texts_of_a_million_rows_take_milliseconds(tmp_path):
    """They are compared as bytes: decoding took 1.5 s. The bound is ten times what a quiet machine needs."""
    with TrajectoryStore.create(tmp_path / "store", [Column("finish", "str")]) as store:
        store.append({"finish": ["stop", "length", "stop", "stop", "abort"] * 200_000})
        store.where("finish == 'x'")
        begin = time.process_time()
        found = store.where("finish == 'length'")
        assert time.process_time() - begin < 0.3
        assert len(found) == 200_000


def test_a_list_of_dicts_is_a_batch(store):
    """Rows as other tools hold them; a row with other columns is named."""
    (one,) = store.append([{"tokens": [7], "reward": 2.0, "text": "x"}])
    assert store[[one], "text"] == ["x"]
    with pytest.raises(BatchError, match="row 1 and row 0 have other columns: 'text'"):
        store.append([{"tokens": [7], "reward": 2.0}, {"tokens": [7], "reward": 2.0, "text": "x"}])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"reward": [2**24 + 1]}, "16777217 is not a float32, which would round it"),
        ({"half": [1e6]}, r"1000000.0 is too large for float16"),
        ({"reward": [1e300]}, "too large for float32"),
    ],
)
def test_silent_roundings_are_refused(store, row, said):
    """What would change a whole number, or become infinite, is an error, and nothing is written."""
    with pytest.raises(BatchError, match=said):
        store.append({"tokens": [[1]], "reward": [1.0]} | row)
    assert len(store) == 6


def test_as_of_is_complete(store):
    """Rows, conditions, lengths and columns are those of then, as the values are."""
    then = store.snapshot()
    ids = store.ids()
    store.append({"tokens": [[1]], "reward": [0.75]})
    store.update(ids[:1], later=5)
    view = store.as_of(then)
    assert view.ids().tolist() == ids.tolist()
    assert len(view) == view.watermark == 6
    assert view.where("reward >= 0.5").tolist() == ids[2:5].tolist()
    assert view["later"].tolist() == [0] * 6
    assert len(list(view)) == 6
    assert not view.holds(store.ids()[-1:]).any()
    assert len(store.where("reward >= 0.5")) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_trajectories": 2.5}, "max_trajectories=2.5 is not a whole number"),
        ({"max_trajectories": True}, "max_trajectories=True is not a whole number"),
        ({"segment_rows": 2**40}, "segment_rows=1099511627776 is too large"),
        ({"max_bytes": "many"}, "max_bytes='many' is not a size. Give bytes, or text such as '20GB'"),
        ({"max_bytes": 0}, "max_bytes=0 is too small"),
    ],
)
def test_arguments_are_checked_at_the_door(tmp_path, arguments, said):
    """Nothing is made, and the message has the value and what is taken."""
    with pytest.raises(SchemaError, match=said):
        TrajectoryStore.create(tmp_path / "store", COLUMNS, **arguments)
    assert not (tmp_path / "store").exists()


def test_a_size_may_be_text(tmp_path):
    """`"1GB"` is 10^9 bytes."""
    with TrajectoryStore.create(tmp_path / "store", COLUMNS, max_bytes="1GB") as store:
        assert store._root.max_bytes == 10**9


def test_a_column_may_not_be_called_ids():
    """It would hide the ids that `batches` gives."""
    with pytest.raises(SchemaError, match=r"is none of .*ids"):
        Column("ids", "int32")


def test_a_schema_of_something_else_and_a_padding_that_does_not_fit(store):
    """Both end in a sentence, not in a traceback of a library."""
    with pytest.raises(SchemaError, match="a schema is a list of Column"):
        TrajectoryStore.create(store.path / "other", {"a": "int32"})
    for pad in (2**40, "x"):
        with pytest.raises(SchemaError, match=r"pad_value=.* is no int32, which column 'tokens' holds"):
            store.read_padded(store.ids(), "tokens", pad_value=pad)
