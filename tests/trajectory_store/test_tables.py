"""Tables in and out: Arrow, Parquet, pandas, polars, DuckDB and datasets, with nulls that stay nulls."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajectory_store import BatchError, Column, RaggedArray, SchemaError, TrajectoryStore, UnknownColumnError

pa = pytest.importorskip("pyarrow")
BIG = 2**62 + 1
COLUMNS = [
    Column("tokens", "int32", ragged=True),
    Column("lp", "float32", ragged=True, fill=math.nan),
    Column("reward", "float32"),
    Column("number", "int64", fill=0),
    Column("right", "bool", mutable=True),
    Column("prompt", "str", fill=""),
    Column("raw", "bytes", fill=""),
    Column("spans", "int16", ragged=True, axis="spans", shape=(2,), fill=0),
]
ROWS = {
    "tokens": [[1, 2, 3], [], [4]],
    "lp": [[-0.5, math.nan, -1.0], None, None],
    "reward": [1.0, math.nan, 0.0],
    "number": [BIG, None, 0],
    "right": [None, True, False],
    "prompt": ["é", None, ""],
    "raw": [b"\xff", None, b""],
    "spans": [[[1, 2], [3, 4]], None, []],
}


@pytest.fixture(params=["memmap", "zarr"])
def store(request, tmp_path):
    with TrajectoryStore.create(tmp_path / "store", COLUMNS, backend=request.param) as made:
        made.append(ROWS)
        yield made


def plain(table: Any) -> list[dict[str, Any]]:
    """Return an Arrow table as Python values, NaN as the text `nan`."""
    return [{name: clear(value) for name, value in row.items()} for row in table.to_pylist()]


def clear(value: Any) -> Any:
    if isinstance(value, list):
        return [clear(item) for item in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def wanted() -> list[dict[str, Any]]:
    return [{name: clear(values[i]) for name, values in ROWS.items()} for i in range(3)]


def test_what_was_not_given_is_null_in_arrow(store):
    """In a table, and in the stream that other libraries read; whole numbers of 64 bits stay whole."""
    assert plain(store.to_arrow()) == wanted()
    assert plain(pa.table(store)) == wanted()
    assert pa.table(store).schema == store.to_arrow().schema
    assert pa.schema(store) == store.to_arrow().schema
    assert str(store.to_arrow().schema.field("spans").type) == "large_list<item: fixed_size_list<item: int16>[2]>"
    nested = pa.table({"tokens": [[1]], "reward": [1.0], "spans": [[[5, 6], [7, 8]]]})  # lists of no fixed size
    assert store.read(store.append(nested), "spans")["spans"][0].tolist() == [[5, 6], [7, 8]]
    part = store.to_arrow(["prompt", "reward"], store.ids()[[2, 0]])
    assert part.column_names == ["prompt", "reward"]
    assert part["prompt"].to_pylist() == ["", "é"]


def forms(store: TrajectoryStore, tmp_path: Path) -> dict[str, Any]:
    """Return the rows of a store as each tool has them."""
    datasets, polars, duckdb = (pytest.importorskip(name) for name in ("datasets", "polars", "duckdb"))
    table = store.to_arrow()
    return {
        "a table": table,
        "a record batch": table.to_batches()[0],
        "a stream": table.to_reader(),
        "a store": store,
        "polars": polars.DataFrame(store),
        "duckdb": duckdb.sql("select * from store"),
        "datasets": datasets.Dataset(table),
        "rows": table.to_pylist(),
        "a generator": iter(table.to_pylist()),
        "columns": table.to_pydict(),
    }


@pytest.mark.peer
def test_every_form_of_table_is_appended_and_read_without_loss(store, tmp_path):
    """What each library holds of a store is appended to another one, and gives the same table."""
    for name, data in forms(store, tmp_path).items():
        with TrajectoryStore.create(tmp_path / name, COLUMNS) as other:
            assert len(other.append(data)) == 3, name
            assert plain(other.to_arrow()) == wanted(), name


def test_pandas_keeps_whole_numbers_and_missing_values(store, tmp_path):
    """`to_pandas` makes no float of an int64 that may be missing; appending the frame gives the same rows."""
    pandas = pytest.importorskip("pandas")
    frame = store.to_pandas()
    assert frame["number"].dtype == pandas.Int64Dtype()
    assert frame["number"].tolist() == [BIG, pandas.NA, 0]
    assert frame["right"].dtype == pandas.BooleanDtype()
    assert frame["right"].isna().tolist() == [True, False, False]
    assert frame["prompt"].isna().tolist() == [False, True, False]
    assert frame["reward"].dtype == np.float32
    assert frame["tokens"][0].tolist() == [1, 2, 3]
    with TrajectoryStore.create(tmp_path / "again", COLUMNS) as again:
        again.append(frame.drop(columns="spans"))
        assert plain(again.to_arrow()) == [row | {"spans": None} for row in wanted()]
        made = pandas.DataFrame({"tokens": [[1]] * 2, "reward": [1, 2], "number": [5, math.nan], "prompt": ["a", None]})
        ids = again.append(made)
        assert again.read(ids, "number")["number"].tolist() == [5, 0]
        assert again.present("number", ids).tolist() == again.present("prompt", ids).tolist() == [True, False]
        with pytest.raises(BatchError, match="column 'number' is int64"):
            again.append(made.assign(number=0.5))


def test_parquet_and_back(store, tmp_path):
    """A file has the nulls and the definitions of the columns; a store made of it is equal."""
    parquet = pytest.importorskip("pyarrow.parquet")
    store.to_parquet(tmp_path / "rows.parquet")
    assert plain(parquet.read_table(tmp_path / "rows.parquet")) == wanted()
    with TrajectoryStore.from_parquet(tmp_path / "again", tmp_path / "rows.parquet") as again:
        assert again.schema == store.schema
        assert plain(again.to_arrow()) == wanted()
    some = [store.ids()[2]]
    store.to_parquet(tmp_path / "rows.parquet", ["reward", "tokens"], some)
    assert parquet.read_table(tmp_path / "rows.parquet").to_pydict() == {"reward": [0.0], "tokens": [[4]]}
    assert [file.name for file in tmp_path.glob("*.parquet*")] == ["rows.parquet"]


def test_a_store_of_another_tools_table(tmp_path):
    """Types follow Arrow's; every column may be null; what a store does not hold is refused with its name."""
    table = pa.table(
        {"text": pa.array(["a", None]).dictionary_encode(), "n": pa.array([None, BIG]), "xs": [[1.5], None]}
    )
    with TrajectoryStore.from_arrow(tmp_path / "store", table) as store:
        assert [(c.name, c.dtype, c.ragged) for c in store.schema] == [
            *(("text", "str", False), ("n", "int64", False), ("xs", "float64", True)),
        ]
        assert store.to_arrow().to_pydict() == {"text": ["a", None], "n": [None, BIG], "xs": [[1.5], None]}
        assert store.where("n is None").tolist() == store.ids()[:1].tolist()
    odd = pa.table({"when": pa.array([0], pa.timestamp("s"))})
    with pytest.raises(SchemaError, match=r"column 'when' has the Arrow type timestamp.*cast it to a number or text"):
        TrajectoryStore.from_arrow(tmp_path / "other", odd)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": [1.0, None, 0.0]}, "row 1 of column 'reward' is null, but the column has no fill value"),
        ({"reward": ["1", "2", "3"]}, "column 'reward' is float32 in the store and string in Arrow"),
        (
            {"tokens": [1, 2, 3]},
            "column 'tokens' is ragged in the store, but its Arrow type, int64, is not a list type",
        ),
        ({"tokens": [[1, None], [], [4]]}, "column 'tokens' contains a null within a row"),
        ({"tokens": [[2**31], [], [4]]}, "column 'tokens': 2147483648 does not fit in int32"),
        ({"number": [0.5, 1.0, 2.0]}, "column 'number' is int64"),
        ({"spans": [[[1, 2, 3]], [], []]}, r"column 'spans' has elements of shape \[2\]"),
        ({"tokens": [[[1]], [], [[4]]]}, "column 'tokens' has one number per row"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(store, change, said):
    """With the column, the row and what is wrong; nothing is written."""
    good = store.to_arrow(["tokens", "reward", "number"]).to_pydict()
    with pytest.raises(BatchError, match=said):
        store.append(pa.table(good | change))
    with pytest.raises(UnknownColumnError, match="Did you mean 'prompt'"):
        store.append(pa.table(good | {"promt": ["a"] * 3}))
    assert len(store) == 3


@pytest.mark.slow
@pytest.mark.peer
def test_a_million_rows_in_four_libraries(tmp_path):
    """polars, DuckDB, pandas and datasets read a store of 10^6 rows in many segments, with the right sums."""
    datasets, polars, duckdb = (pytest.importorskip(name) for name in ("datasets", "polars", "duckdb"))
    pytest.importorskip("pandas")
    columns = [
        *(Column("n", "int64"), Column("reward", "float32"), Column("maybe", "int64", fill=0)),
        *(Column("finish", "str"), Column("xs", "int32", ragged=True)),
    ]
    num, part = 1_000_000, 50_000
    with TrajectoryStore.create(tmp_path / "store", columns, segment_rows=200_000) as store:
        for first in range(0, num, part):
            n = np.arange(first, first + part)
            there = [int(k) if k % 3 else None for k in n]
            text = ["stop" if k % 4 else "length" for k in n]
            xs = np.repeat(n, n % 3).astype(np.int32)
            rows = {"n": n, "reward": (n % 8) / 8, "maybe": there, "finish": text, "xs": RaggedArray(xs, n % 3)}
            store.append(rows)
        n = np.arange(num)
        sums = {"n": int(n.sum()), "maybe": int(n[n % 3 != 0].sum()), "xs": int((n * (n % 3)).sum())}
        null = int((n % 3 == 0).sum())
        picked = int(((n % 4 == 0) & ((n % 8) / 8 >= 0.5)).sum())

        found = duckdb.sql(
            "select sum(n), sum(maybe), sum(list_sum(xs)), count(*) - count(maybe), "
            "count(*) filter (where finish = 'length' and reward >= 0.5) from store"
        ).fetchall()
        assert found == [(sums["n"], sums["maybe"], sums["xs"], null, picked)]

        frame = polars.DataFrame(store)
        assert frame.height == num
        assert frame["maybe"].null_count() == null
        assert frame["xs"].list.sum().cast(polars.Int64).sum() == sums["xs"]
        assert frame.filter((polars.col("finish") == "length") & (polars.col("reward") >= 0.5)).height == picked

        wide = store.to_pandas()
        assert int(wide["maybe"].sum()) == sums["maybe"]
        assert int(wide["maybe"].isna().sum()) == null
        assert ((wide["finish"] == "length") & (wide["reward"] >= 0.5)).sum() == picked

        held = datasets.Dataset(pa.table(store)).with_format("arrow")
        assert len(held) == num
        assert pa.compute.sum(held[:]["n"]).as_py() == sums["n"]
        assert store.count("finish == 'length' and reward >= 0.5") == picked
