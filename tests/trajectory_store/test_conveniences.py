"""What users of arrays and tables expect of a store, and clear refusals of what it cannot do."""

from __future__ import annotations

import time

import numpy as np
import pytest

from trajectory_store import BatchError, Column, PlaceError, SchemaError, TrajectoryStore, UnknownColumnError

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
    assert store[1:3]["text"] == TEXTS[1:3]
    assert store[-1:]["text"] == TEXTS[-1:]
    assert store[np.arange(6) % 2 == 0]["text"] == TEXTS[::2]
    assert store["text"] == TEXTS
    assert store["reward"][:5].tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert store[[True, False, True, False, False, True]]["text"] == TEXTS[::2][:2] + TEXTS[5:]
    assert store[[4, 0], "text"] == store[np.array([-2, 0]), "text"] == [TEXTS[4], TEXTS[0]]
    assert set(store[:2, ["text", "reward"]]) == set(store[["text", "reward"]]) == {"text", "reward"}
    assert store[[]]["text"] == []


def test_a_place_means_the_same_in_every_segment(tmp_path):
    """`store[i]` is the row of `store[i:i+1]` and of the i-th step of a loop, with several writers and segments."""
    with TrajectoryStore.create(tmp_path / "store", [Column("tag", "int64")], max_trajectories=1200) as store:
        with TrajectoryStore.open(tmp_path / "store", "a") as other:
            for k in range(30):
                (store, other)[k % 2].append({"tag": np.arange(k * 50, k * 50 + 50)})
        store.refresh()
        tags = [row["tag"] for row in store]
        assert len(store._catalog.segments) > 2
        assert [store[i]["tag"] for i in range(0, len(store), 97)] == tags[::97]
        assert store[5:6]["tag"][0] == store[5]["tag"] == store[5, "tag"] == store[np.int64(5)]["tag"] == tags[5]
        assert store[-1]["tag"] == tags[-1]
        for place in (len(store), -len(store) - 1, int(store.ids()[-1])):
            with pytest.raises(PlaceError, match=f"no row at position {place}: the store has {len(store)} rows"):
                store[place]
        with pytest.raises(IndexError):
            store[[0, len(store)]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_reads_a_store_of_several_segments(tmp_path, workers):
    """PyTorch's DataLoader takes the store itself: every row once, a batch with one read."""
    torch = pytest.importorskip("torch")
    schema = [Column("tag", "int64"), Column("reward", "float32"), Column("x", "int32", ragged=True)]
    with TrajectoryStore.create(tmp_path / "store", schema, segment_rows=20) as store:
        for k in range(0, 60, 10):
            store.append({"tag": range(k, k + 10), "reward": [0.5] * 10, "x": [[1] * (i % 3) for i in range(10)]})
        options = {"batch_size": 7, "num_workers": workers, "multiprocessing_context": "spawn" if workers else None}
        loader = torch.utils.data.DataLoader(store, collate_fn=list, shuffle=True, **options)
        rows = [row for batch in loader for row in batch]
        assert sorted(row["tag"] for row in rows) == list(range(60))
        assert all(len(row["x"]) == row["tag"] % 10 % 3 for row in rows)


@pytest.mark.parametrize("key", [None, True, (None, "text"), ("text", "reward")])
def test_a_key_that_means_nothing_is_refused(store, key):
    """`store[None]` is not everything."""
    with pytest.raises(BatchError, match="a position, a slice, an array of positions, a mask, or column names"):
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
    with TrajectoryStore.create(tmp_path / "store", [Column("text", "str", mutable=True, fill="")]) as store:
        ids = store.append({"text": ["ab", "ca", "b", "", "aab"]})
        assert store.where("'ab' in text").tolist() == ids[[0, 4]].tolist()
        store.update(ids[[0, 3]], text=["x", "cab"])
        assert store.where("'ab' in text").tolist() == ids[[3, 4]].tolist()


NULLS = {
    "later is None": [0, 2],
    "later is not None": [1],
    "later == null": [0, 2],
    "note is None and later is not None": [],
    "note == null": [0],
    "note is not None": [1, 2],
    "score is None": [1],
    "score != nan": [0, 2],
}


@pytest.mark.parametrize("condition", NULLS)
def test_null_tests(tmp_path, condition):
    """A row has no value where none was given, or it is NaN or an empty text; 0 is a value."""
    columns = [Column("later", "int64", fill=0), Column("note", "str", fill=""), Column("score", "float32")]
    with TrajectoryStore.create(tmp_path / "store", columns) as store:
        store.append([{"score": 1.0}, {"score": np.nan, "later": 0, "note": "a"}, {"score": 0.0, "note": "b"}])
        assert store.where(condition).tolist() == store.ids()[NULLS[condition]].tolist()
        assert store.count(condition) == len(NULLS[condition])


AGGREGATES = {
    "sum(x) == 6": [0],
    "sum(x) == 0": [1, 3],
    "max(x) > 2": [0],
    "min(x) < 0": [2],
    "mean(x) == 2": [0],
    "max(x) is None": None,
    "sum(lp) < -0.4": [0],
    "max(lp) == -0.25": [0],
    "isnan(max(lp))": [1, 2, 3],
    "len(x) - sum(flag) > 1": [0, 2],
    "sum(pair) == 10": [2],
    "sum(x) > len(x) and len(lp) == 3": [0],
}


@pytest.mark.parametrize("condition", AGGREGATES)
def test_aggregates_of_ragged_columns(tmp_path, condition):
    """len, sum, min, max and mean of a row; NaN is no element, and a row without elements has a sum of 0."""
    columns = [
        *(Column("x", "int64", ragged=True), Column("lp", "float32", ragged=True, fill=np.nan)),
        *(Column("flag", "bool", ragged=True, fill=False), Column("pair", "int16", ragged=True, axis="p", shape=(2,))),
    ]
    rows = {"x": [[1, 2, 3], [], [-5, 2], [0]], "lp": [[np.nan, -0.25, -0.25], [], [np.nan] * 2, [np.nan]]}
    rows |= {"flag": [[True, False, False], [], [False, False], [True]], "pair": [[], [], [[1, 2], [3, 4]], []]}
    with TrajectoryStore.create(tmp_path / "store", columns) as store:
        ids = store.append(rows)
        if AGGREGATES[condition] is None:
            with pytest.raises(SchemaError, match="None can only be compared with a column, using 'is'"):
                store.where(condition)
        else:
            assert store.where(condition).tolist() == ids[AGGREGATES[condition]].tolist()
        with pytest.raises(SchemaError, match=r"has several values per trajectory; compare its len.*max\(x\) > 0"):
            store.where("x > 0")


def test_the_short_form_and_expressions_are_one_language(store):
    """Values as a shell gives them, dates, ranges; both forms agree, and compose."""
    ids = store.ids()
    pairs = [
        ("text=cat", "text == 'cat'"),
        ("text == cat", "text == 'cat'"),
        ("text ~ CAT", "'cat' in text"),
        ("text=a cat sat", "text == 'a cat sat'"),
        ("raw=dog", "raw == b'dog'"),
        ("reward = 0.25..0.75", "0.25 <= reward <= 0.75"),
        ("reward == ..0.25", "reward <= 0.25"),
        ("reward != nan", "not isnan(reward)"),
        ("reward >= 1970-01-01", "reward >= 0"),
        ("reward >= 1970-01-01 and text == cat", "reward >= 0 and text == 'cat'"),
        ("reward == 1970-01-01T00:00:01", "reward == 1.0"),
    ]
    for short, long in pairs:
        assert store.where(short).tolist() == store.where(long).tolist() != [], short
    names = {"score": "reward", "tokens_twice": lambda store, ids: 2 * store.lengths("tokens", ids)}
    assert store.where("score >= 0.5 and tokens_twice < 8", names=names).tolist() == ids[[2, 3]].tolist()
    with pytest.raises(
        SchemaError, match=r"has no column 'rewart', which the condition .* uses\. Did you mean 'reward'"
    ):
        store.where("rewart > 0")
    for wrong in (lambda row: row, 5, "reward >", "reward", "__import__('os')", "reward >== 1", "text is 'cat'"):
        with pytest.raises(SchemaError, match=r"Write, for example,|the operator must be >=|a condition must be text"):
            store.where(wrong)


def test_sample_and_count(store):
    """Different rows, the same for the same seed, and of those that meet a condition."""
    assert store.count() == 6
    assert store.count("reward >= 0.5") == 3
    drawn = store.sample(4, seed=3)
    assert drawn.tolist() == store.sample(4, seed=3).tolist() != store.sample(4, seed=4).tolist()
    assert len(set(drawn.tolist())) == 4
    assert set(store.sample(3, condition="reward >= 0.5").tolist()) == set(store.ids()[2:5].tolist())
    assert set(store.sample(6, 0).tolist()) == set(store.ids().tolist())
    with pytest.raises(BatchError, match="7 different trajectories cannot be drawn from 6"):
        store.sample(7)


def test_a_column_that_is_not_mutable_keeps_its_values(store):
    """With a fill or without, given or not: the update is refused as a whole, and says what to do instead."""
    ids = store.ids()
    before, names = store.read(ids), {"reward": 9.0, "half": 0.5, "text": "more", "tokens": [[9]]}
    for name, value in names.items():
        with pytest.raises(BatchError, match=f"'{name}' of {store.path} cannot be updated: only columns with mutable="):
            store.update(ids[:1], later=1, **{name: value})
    with TrajectoryStore.open(store.path) as reader:
        for one in (store, reader):
            found = one.read(ids)
            assert {name: list(map(str, values)) for name, values in found.items()} == {
                name: list(map(str, values)) for name, values in before.items()
            }
            assert not np.concatenate([one.present("half"), one.present("later")]).any()
    store.update(ids[:1], later=2)
    assert store.read(ids[:1], ["reward", "later", "half"]) == {"reward": [0.0], "later": [2], "half": [0.0]}


def test_an_open_writer_and_reader_see_columns_that_another_adds(tmp_path):
    """Appending, reading, searching and updating find them without a refresh by hand."""
    create, more = TrajectoryStore.create, Column("more", "int64", mutable=True)
    with create(tmp_path / "store", [Column("x", "int64")]) as one, TrajectoryStore.open(tmp_path / "store") as reader:
        one.append({"x": [1]})
        with TrajectoryStore.open(tmp_path / "store", "a", add_columns=[more]):
            pass
        assert reader.where("more is None").tolist() == one.ids().tolist()
        one.append({"x": [2], "more": [5]})
        assert one.read(one.ids(), "more")["more"].tolist() == [0, 5]
        with TrajectoryStore.open(tmp_path / "store", "a", add_columns=[Column("last", "str", mutable=True, fill="")]):
            pass
        one.update(one.ids()[:1], last="later")
        assert one.where("last == later").tolist() == one.ids()[:1].tolist()
        with pytest.raises(UnknownColumnError):
            one.append({"x": [3], "none": [5]})


def test_tensors_are_numbers(tmp_path):
    """Of any kind: one that requires a gradient, bfloat16."""
    torch = pytest.importorskip("torch")
    columns = [Column("x", "float32", ragged=True), Column("reward", "float32")]
    with TrajectoryStore.create(tmp_path / "store", columns) as store:
        rows = [torch.tensor([0.5, 1.5], dtype=torch.bfloat16), torch.ones(1, requires_grad=True)]
        ids = store.append({"x": rows, "reward": torch.tensor([1.0, 2.0], requires_grad=True)})
        assert [row.tolist() for row in store.read(ids)["x"]] == [[0.5, 1.5], [1.0]]
        assert store.read(ids)["reward"].tolist() == [1.0, 2.0]


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


def test_rows_are_a_batch(store):
    """Rows as other tools hold them, in a list or from a generator; one may lack what has a fill, and nothing else."""
    rows = [{"tokens": [7], "reward": 2.0}, {"tokens": [7, 8], "reward": 3.0, "text": "x", "later": None}]
    for given in (rows, (row for row in rows), iter(rows)):
        ids = store.append(given)
        assert store.read(ids, "text")["text"] == ["", "x"]
        assert store.present("text", ids).tolist() == [False, True]
        assert store.present("later", ids).tolist() == [False, False]
    with pytest.raises(BatchError, match="row 1 has no value for column 'reward', which has no fill value"):
        store.append([{"tokens": [7], "reward": 2.0}, {"tokens": [7]}])
    with pytest.raises(UnknownColumnError, match=r"row 0: the store has no column 'rewart'\. Did you mean 'reward'"):
        store.append([{"tokens": [7], "rewart": 2.0}])
    for wrong in (3, "rows", [1, 2], lambda row: row):
        with pytest.raises(
            BatchError, match="a batch must be a dict of columns, a table or data frame, or a list or gen"
        ):
            store.append(wrong)
    assert len(store) == 12


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"reward": [2**24 + 1]}, "16777217 cannot be represented exactly as float32"),
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
        (
            {"max_trajectories": 2.5},
            "max_trajectories=2.5 is not valid; it must be a whole number of at least 1, or None",
        ),
        ({"max_trajectories": True}, "max_trajectories=True is not valid; it must be a whole number"),
        ({"segment_rows": 2**40}, "segment_rows=1099511627776 is too large"),
        ({"max_bytes": "many"}, "max_bytes='many' is not a size. Specify a number of bytes, or text such as '20GB'"),
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
    with pytest.raises(SchemaError, match=r"not be one of .*ids"):
        Column("ids", "int32")


def test_a_schema_of_something_else_and_a_padding_that_does_not_fit(store):
    """Both end in a sentence, not in a traceback of a library."""
    with pytest.raises(SchemaError, match="a schema must be a list of Column objects"):
        TrajectoryStore.create(store.path / "other", {"a": "int32"})
    for pad in (2**40, "x"):
        with pytest.raises(
            SchemaError, match=r"pad_value=.* cannot be converted to int32, the dtype of column 'tokens'"
        ):
            store.read_padded(store.ids(), "tokens", pad_value=pad)
