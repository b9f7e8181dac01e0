"""An export imported again is an equal store, whatever is in it."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.data.files import SourceFile
from rlhf_pipeline.errors import DataError, DefinitionError, RunExistsError
from rlhf_pipeline.exchange import copy_store, export_store, import_files, select
from trajectory_store import Column, RaggedArray, TrajectoryStore, diff

NEEDS = {"parquet": "pyarrow", "hf": "datasets", "jsonl": "json"}
NAMES = {"parquet": "out.parquet", "hf": "out", "jsonl": "out.jsonl"}
EXTRA = [
    Column("top_k", "int16", ragged=True, fill=-1),
    Column("experts", "uint8", ragged=True, axis="layers"),
    Column("half", "float16", fill=0.5),
    Column("wide", "float64", ragged=True, axis="wide", fill=0.0),
    Column("spans", "int64", ragged=True, axis="spans", shape=(2,), fill=0),
    Column("pairs", "float32", ragged=True, axis="spans", shape=(2, 1), fill=math.nan),
    Column("count", "uint64", fill=0),
    Column("note", "str"),
    Column("blob", "bytes"),
]
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def ragged(rows: list[list[Any]], dtype: str) -> RaggedArray:
    """Return rows of any length, none of them included, as the store takes them."""
    flat = [item for row in rows for item in row]
    return RaggedArray(np.array(flat, dtype), np.array([len(row) for row in rows], np.int64))


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Some columns of some trajectories; the others are filled in by the store."""
    num = draw(st.integers(1, 5))
    lengths = [draw(st.integers(0, 4)) for _ in range(num)]

    def rows(items: st.SearchStrategy[Any], sizes: list[int]) -> list[list[Any]]:
        return [draw(st.lists(items, min_size=size, max_size=size)) for size in sizes]

    def scalars(items: st.SearchStrategy[Any]) -> list[Any]:
        return [draw(items) for _ in range(num)]

    other = [draw(st.integers(0, 3)) for _ in range(num)]
    data: dict[str, Any] = {
        "input_ids": ragged(rows(st.integers(0, 2**31 - 1), lengths), "int64"),
        "experts": ragged(rows(st.integers(0, 255), other), "uint8"),
        "note": scalars(TEXT),
        "blob": scalars(st.binary(max_size=5)),
    }
    pairs = sum(other)
    more: dict[str, Any] = {
        "spans": lambda: RaggedArray(
            np.array(
                draw(st.lists(st.tuples(*[st.integers(-5, 5)] * 2), min_size=pairs, max_size=pairs)), "int64"
            ).reshape(-1, 2),
            other,
        ),
        "pairs": lambda: RaggedArray(
            np.array(draw(st.lists(FLOATS, min_size=2 * pairs, max_size=2 * pairs)), "float32").reshape(-1, 2, 1), other
        ),
        "assistant_mask": lambda: ragged(rows(st.booleans(), lengths), "bool"),
        "log_probs": lambda: ragged(rows(FLOATS, lengths), "float32"),
        "top_k": lambda: ragged(rows(st.integers(-(2**15), 2**15 - 1), lengths), "int16"),
        "wide": lambda: ragged(rows(st.floats(), other), "float64"),
        "task_reward": lambda: np.array(scalars(FLOATS), "float32"),
        "kl_coef": lambda: np.array(scalars(FLOATS), "float32"),
        "half": lambda: np.array(scalars(st.floats(width=16)), "float16"),
        "count": lambda: np.array(scalars(st.integers(0, 2**64 - 1)), "uint64"),
        "done": lambda: np.array(scalars(st.booleans()), "bool"),
        "prompt": lambda: scalars(TEXT),
        "priority": lambda: np.array(scalars(FLOATS), "float32"),
    }
    data |= {name: make() for name, make in more.items() if draw(st.booleans())}
    return data


def bits(store: TrajectoryStore, column: Column) -> bytes:
    """Return the bytes of a column of numbers, all NaN alike."""
    if column.axis is not None:
        values = store.read_ragged(column.name).values
    else:
        values = store.read_scalars(column.name).copy()
    if values.dtype.kind == "f":
        values = np.where(np.isnan(values), np.nan, values)
    return np.ascontiguousarray(values).tobytes()


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "hf"])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(batches(), min_size=1, max_size=3))
def test_any_store_comes_back_equal(kind: str, drawn: list[dict[str, Any]]):
    """Ragged columns of several axes, NaN, infinities, -0.0, text and left-out columns survive, bit for bit."""
    pytest.importorskip(NEEDS[kind], reason="an optional format")
    schema = trajectory_schema(EXTRA)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with TrajectoryStore.create(folder / "a", schema) as store:
            place = 0
            for data in drawn:
                num = len(data["note"])
                store.append(data | {"trajectory_id": np.arange(place, place + num)})
                place += num
        out = folder / NAMES[kind]
        assert export_store(folder / "a", out, batch_rows=2).num_trajectories == place
        assert import_files([out], folder / "b", batch_rows=3).num_imported == place
        assert import_files([out], folder / "b").num_skipped == place
        with TrajectoryStore.open(folder / "a") as a, TrajectoryStore.open(folder / "b") as b:
            assert b.schema == a.schema
            assert diff(a, b, key="trajectory_id").same
            for column in a.schema:
                if not column.is_text:
                    assert bits(a, column) == bits(b, column), column.name


def small(folder: Path, num: int = 6, **more: Any) -> Path:
    """Make a store of `num` trajectories."""
    with TrajectoryStore.create(folder, trajectory_schema()) as store:
        rows = [list(range(i + 1)) for i in range(num)]
        ids = store.append(
            {"input_ids": rows, "task_reward": np.arange(num) / 4, "policy_version": np.arange(num), **more}
        )
        store.update(ids[:1], priority=3)
        if num > 1:
            store.update(ids[1:2], advantage=[0.5])
    return folder


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_trajectories_without_ids(tmp_path: Path, name: str):
    """A store that names no trajectories comes back in its order, and its export is not imported twice."""
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    store = small(tmp_path / "a")
    export_store(store, tmp_path / name)
    assert import_files([tmp_path / name], tmp_path / "b").num_imported == 6
    assert import_files([tmp_path / name], tmp_path / "b").num_skipped == 6
    with TrajectoryStore.open(store) as a, TrajectoryStore.open(tmp_path / "b") as b:
        assert diff(a, b).same
        assert b.read_scalars("priority").tolist() == [3, 1, 1, 1, 1, 1]
        assert b.present("ref_log_probs").tolist() == [False] * 6  # given in no row: it is not in the export either


@pytest.mark.parametrize("name", NAMES.values())
def test_what_the_store_was_not_given(tmp_path: Path, name: str):
    """Which rows of a column were given comes back, too, so an export of the import is the same."""
    pytest.importorskip(NEEDS[{v: k for k, v in NAMES.items()}[name]], reason="an optional format")
    export_store(small(tmp_path / "a"), tmp_path / name)
    import_files([tmp_path / name], tmp_path / "b")
    with TrajectoryStore.open(tmp_path / "a") as a, TrajectoryStore.open(tmp_path / "b") as b:
        for column in a.schema.optional:
            assert np.array_equal(a.present(column.name), b.present(column.name)), column.name


@pytest.mark.parametrize("write", [export_store, copy_store])
def test_a_filter_that_nothing_meets(tmp_path: Path, write: Any):
    """It is refused, and nothing is made: the command that it would print to read it back would fail."""
    with pytest.raises(DefinitionError, match=r"none of the 6 trajectories in .* meets reward>9"):
        write(small(tmp_path / "a"), tmp_path / "out", filters=["reward>9"])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_two_exports_of_one_store(tmp_path: Path):
    """Each row is imported once, whichever export gave it, and a second import of both finds all of them."""
    for name in ("a.jsonl", "b.jsonl"):
        export_store(small(tmp_path / name[0]), tmp_path / name)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for num_imported, num_skipped in ((6, 6), (0, 12)):
        report = import_files(files, tmp_path / "c")
        assert (report.num_imported, report.num_skipped) == (num_imported, num_skipped)


def test_rows_of_one_id(tmp_path: Path):
    """Steps that a training took twice: an import of them that was stopped in between goes on, and none is lost."""
    ids = {"trajectory_id": [0, 1, 0, 1], "input_ids": [[1], [2], [1], [3]]}
    export_store(small(tmp_path / "a", 4, **ids), tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    for stop in range(1, 4):
        part, store = tmp_path / f"{stop}" / "a.jsonl", tmp_path / f"{stop}" / "b"
        part.parent.mkdir()
        part.write_text("".join(lines[:stop]))
        part.with_name("a.jsonl.schema.json").write_text((tmp_path / "a.jsonl.schema.json").read_text())
        import_files([part], store)
        report = import_files([tmp_path / "a.jsonl"], store)
        assert (report.num_skipped, report.num_imported) == (stop, 4 - stop)
        with TrajectoryStore.open(tmp_path / "a") as left, TrajectoryStore.open(store) as right:
            assert diff(left, right).same


def test_exports_whose_columns_differ(tmp_path: Path):
    """Where a column of one name has another type, the second export is refused rather than rounded."""
    for name, dtype, value in (("a", "int64", 1), ("b", "float64", 1.5)):
        with TrajectoryStore.create(tmp_path / name, trajectory_schema([Column("x", dtype, fill=0)])) as store:
            store.append({"input_ids": [[1]], "trajectory_id": [ord(name)], "x": [value]})
        export_store(tmp_path / name, tmp_path / f"{name}.jsonl")
    with pytest.raises(
        DefinitionError, match=r"'x' has dtype float64 and shape \[\] in the export, but dtype int64 and shape \[\] in "
    ):
        import_files([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "c")
    with TrajectoryStore.open(tmp_path / "c") as store:
        assert store.read_scalars("x").tolist() == [1]


def test_columns_that_nobody_knows(tmp_path: Path):
    """Where the list of columns is not beside an export, a further column is named, not dropped."""
    with TrajectoryStore.create(tmp_path / "a", trajectory_schema([Column("note", "str", fill="")])) as store:
        store.append({"input_ids": [[1]], "trajectory_id": [0], "note": ["kept"]})
    export_store(tmp_path / "a", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.schema.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(
        DataError,
        match=r"a\.jsonl:1: the exported store has no columns for these fields of the row: note\. .*FILE\.schema\.json",
    ):
        import_files([tmp_path / "a.jsonl"], tmp_path / "b")
    (tmp_path / "elsewhere.json").rename(tmp_path / "a.jsonl.schema.json")
    import_files([tmp_path / "a.jsonl"], tmp_path / "b")
    with TrajectoryStore.open(tmp_path / "b") as store:
        assert store.read(store.ids(), ["note"])["note"] == ["kept"]


def test_an_export_of_another_store_is_refused(tmp_path: Path):
    """Equal ids with other tokens are of another store; nothing is silently left out."""
    export_store(small(tmp_path / "a", trajectory_id=np.arange(6)), tmp_path / "a.jsonl")
    other = {"trajectory_id": np.arange(6), "input_ids": [[9]] * 6}
    export_store(small(tmp_path / "b", **other), tmp_path / "b.jsonl")
    import_files([tmp_path / "a.jsonl"], tmp_path / "c")
    with pytest.raises(
        DataError, match=r"b\.jsonl:1: this trajectory is already in .* with a different value of input_ids"
    ):
        import_files([tmp_path / "b.jsonl"], tmp_path / "c")


def test_a_broken_line_of_an_export_is_named(tmp_path: Path):
    """A value that its column cannot hold is named with file and line; the lines before it are imported."""
    export_store(small(tmp_path / "a", trajectory_id=np.arange(6)), tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[4]) | {"policy_version": 1.5}
    (tmp_path / "a.jsonl").write_text("".join([*lines[:4], json.dumps(row) + "\n", lines[5]]))
    with pytest.raises(
        DataError,
        match=r"a\.jsonl:5: the value of column 'policy_version' cannot be stored as int64: 1\.5 does not fit",
    ):
        import_files([tmp_path / "a.jsonl"], tmp_path / "b", batch_rows=2)
    (tmp_path / "a.jsonl").write_text("".join([*lines[:4], "{", "\n", lines[5]]))
    with pytest.raises(DataError, match=r"a\.jsonl:5: this line is not JSON"):
        import_files([tmp_path / "a.jsonl"], tmp_path / "c", batch_rows=3)
    with TrajectoryStore.open(tmp_path / "b") as b, TrajectoryStore.open(tmp_path / "c") as c:
        assert (len(b), len(c)) == (4, 4)


def test_a_parquet_export_that_was_written_again(tmp_path: Path):
    """Lists of other types, null for NaN among them, and rows without a list give the same store."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from pyarrow import parquet

    scores = [np.full(i + 1, np.nan if i % 2 else -0.5, "float32") for i in range(6)]
    with TrajectoryStore.open(small(tmp_path / "a", log_probs=scores), mode="a") as store:
        store.append({"input_ids": [[7, 8]], "task_reward": [1.0]})  # one without log-probs
    export_store(tmp_path / "a", tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    places, metadata = table.schema.get_field_index, table.schema.metadata
    lists = [[None if x != x else x for x in row] if row else row for row in table["log_probs"].to_pylist()]
    table = table.set_column(places("log_probs"), "log_probs", pyarrow.array(lists, pyarrow.list_(pyarrow.float64())))
    wide = table["input_ids"].cast(pyarrow.large_list(pyarrow.int64()))
    table = table.set_column(places("input_ids"), "input_ids", wide).replace_schema_metadata(metadata)
    parquet.write_table(table, tmp_path / "b.parquet")
    import_files([tmp_path / "b.parquet"], tmp_path / "b")
    with TrajectoryStore.open(tmp_path / "a") as a, TrajectoryStore.open(tmp_path / "b") as b:
        assert diff(a, b).same
        assert b.present("log_probs").tolist() == [True] * 6 + [False]


def test_lists_of_numbers_are_read_as_arrays(tmp_path: Path):
    """The lists of an export are not taken apart into Python's numbers, which took most of the time of its import."""
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    export_store(small(tmp_path / "a"), tmp_path / "a.parquet")
    rows = [row for _, row in SourceFile(tmp_path / "a.parquet", "parquet").rows(arrays=True)]
    assert [row["input_ids"].tolist() for row in rows] == [list(range(i + 1)) for i in range(6)]
    assert {row["input_ids"].dtype for row in rows} == {np.dtype("int32")}


def test_numbers_are_no_bytes(tmp_path: Path):
    """A number in a column of bytes is refused; it was taken for so many bytes of 0."""
    with TrajectoryStore.create(tmp_path / "a", trajectory_schema([Column("blob", "bytes", fill="")])) as store:
        store.append({"input_ids": [[1]], "blob": [b"x"]})
    export_store(tmp_path / "a", tmp_path / "a.jsonl")
    row = json.loads((tmp_path / "a.jsonl").read_text()) | {"blob": 3}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"column 'blob' cannot be stored as bytes: it is neither bytes nor Base64"):
        import_files([tmp_path / "a.jsonl"], tmp_path / "b")


def test_what_jsonl_says(tmp_path: Path):
    """A line is plain JSON: null for NaN, lists of numbers, and no field where the store only fills in."""
    export_store(
        small(tmp_path / "a", num=1, log_probs=[np.array([np.nan], "float32")], kl_coef=[math.inf]),
        tmp_path / "a.jsonl",
    )
    row = json.loads((tmp_path / "a.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert row["log_probs"] == [None]
    assert row["kl_coef"] == "Infinity"
    assert "ref_log_probs" not in row


@pytest.mark.parametrize(
    ("conditions", "wanted"),
    [
        ((), [0, 1, 2, 3, 4, 5]),
        (("reward>=0.5", "version<5"), [2, 3, 4]),
        (("num_tokens == 2",), [1]),
        (("priority!=1",), [0]),
        (("finish_reason = stop", "date >= 1970-01-01T00:00:03"), [3, 5]),
    ],
)
def test_filters(tmp_path: Path, conditions: tuple[str, ...], wanted: list[int]):
    """Conditions on columns, lengths, text and dates; all of them must hold."""
    more = {"finish_reason": ["", "stop"] * 3, "created_at": np.arange(6.0)}
    with TrajectoryStore.open(small(tmp_path / "a", **more)) as store:
        assert select(store, conditions).tolist() == wanted


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("reward", r"is a value, not a comparison. Write, for example, .*'finish_reason=stop'"),
        ("rewardd>1", r"has no column 'rewardd'.*Did you mean 'reward'"),
        ("log_probs>1", r"'log_probs' has several values per trajectory; compare its len"),
        ("reward>high", r"'high' is not a number"),
        ("reward=>0.5", r"the operator must be >=, <=,"),
        ("reward>'a'", r"'a' is compared with numbers, but is not a number or a date"),
    ],
)
def test_filters_that_cannot_be(tmp_path: Path, condition: str, wanted: str):
    """A slip in a filter is answered with what can be typed."""
    with TrajectoryStore.open(small(tmp_path / "a")) as store, pytest.raises(DefinitionError, match=wanted):
        select(store, [condition])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "dataset", "one.atif.jsonl", "many.atif"])
def test_an_export_of_no_rows_makes_no_folder(tmp_path: Path, name: str):
    """If no row meets the filters, neither the target nor a folder above it is created."""
    store = small(tmp_path / "a")
    with pytest.raises(DefinitionError):
        export_store(store, tmp_path / "new" / name, filters=["reward>1000"])
    assert not (tmp_path / "new").exists()


def test_an_export_of_some(tmp_path: Path):
    """Filters and columns choose; what is there is never overwritten, and a failed export leaves nothing."""
    store = small(tmp_path / "a")
    report = export_store(store, tmp_path / "some.jsonl", filters=["reward>0.5"], columns=["input_ids", "task_reward"])
    assert (report.num_trajectories, report.num_left_out, report.columns) == (3, 3, ("input_ids", "task_reward"))
    with pytest.raises(RunExistsError, match=r"some.jsonl already exists"):
        export_store(store, tmp_path / "some.jsonl")
    with pytest.raises(DefinitionError, match=r"the suffix must be one of"):
        export_store(store, tmp_path / "some.csv")
    (tmp_path / "sub").mkdir()
    with pytest.raises(DefinitionError):
        export_store(store, tmp_path / "sub" / "x.jsonl", filters=["nothing>1"])
    assert list((tmp_path / "sub").iterdir()) == []


def test_other_tools_read_the_export(tmp_path: Path):
    """Readers such as pyarrow and datasets see lists of numbers of the store's own types."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets are optional")
    from pyarrow import parquet

    store = small(tmp_path / "a")
    export_store(store, tmp_path / "a.parquet")
    export_store(store, tmp_path / "a_dataset")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column("input_ids").type == pyarrow.list_(pyarrow.int32())
    assert table.column("advantage").to_pylist() == [None, 0.5, None, None, None, None]
    found = datasets.load_from_disk(str(tmp_path / "a_dataset"))
    assert found[2]["input_ids"] == [0, 1, 2]
    assert sorted(path.name for path in (tmp_path / "a_dataset").iterdir()) == [
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
        "trajectory_schema.json",
    ]


@pytest.mark.parametrize(
    ("column", "values", "wanted"),
    [
        ("policy_version", [1.5, 2.0], "1.5 does not fit"),
        ("num_prompt_tokens", [2**40, 1], "1099511627776 does not fit"),
        ("task_reward", [1e300, 0.0], "1e.300 does not fit"),
        ("task_reward", ["1", "2"], "it is not a number"),
        ("input_ids", [[1.5], [2.0, 3.0]], "1.5 does not fit"),
        ("input_ids", [[None], [2, 3]], "not a list of numbers"),
        ("assistant_mask", [[2], [0, 1]], "2 does not fit"),
    ],
)
def test_a_column_of_another_type_is_no_other_number(tmp_path: Path, column: str, values: list[Any], wanted: str):
    """A Parquet file that another tool wrote again: what the column cannot hold is named, not rounded or wrapped."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    export_store(small(tmp_path / "a", 2, assistant_mask=[[True], [True, True]]), tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    other = pyarrow.table({**{n: table[n] for n in table.schema.names if n != column}, column: pyarrow.array(values)})
    parquet.write_table(other.replace_schema_metadata(table.schema.metadata), tmp_path / "out.parquet")
    with pytest.raises(DataError, match=f"row 0: the value of column '{column}' cannot be stored as .*({wanted})"):
        import_files([tmp_path / "out.parquet"], tmp_path / "b")
