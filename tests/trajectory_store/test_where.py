"""Conditions compute and compare numbers as Python does, whatever the types of the columns."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajectory_store import Column, SchemaError, TrajectoryStore

INTEGERS = {"i8": "int8", "u8": "uint8", "i32": "int32", "u32": "uint32", "i64": "int64", "u64": "uint64"}
FLOATS = {"f16": "float16", "f32": "float32", "f64": "float64"}
RAGGED = {"r8": "int8", "r64": "int64", "q64": "uint64", "rf": "float64"}
EDGES = (0, 1, -1, 2, 3, 127, -128, 255, 2**53, 2**53 + 1, 2**63 - 1, 2**63 - 2, -(2**63), 2**63, 2**64 - 1)
REALS = (0.0, -0.5, 0.1, 2.0**53, 2.0**63, -(2.0**63), 2.0**64, 1e300, math.inf, -math.inf, math.nan, 65504.0)
SIGNS = ("<", "<=", ">", ">=", "==", "!=")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Rows of numbers at the edges of their types, as Python's."""
    rng = random.Random(7)

    def drawn(dtype: str) -> Any:
        if dtype.startswith("f"):
            with np.errstate(over="ignore"):
                return float(np.dtype(dtype).type(rng.choice(REALS)))
        info = np.iinfo(dtype)
        return rng.choice([edge for edge in EDGES if info.min <= edge <= info.max])

    made = []
    for _ in range(120):
        row: dict[str, Any] = {name: drawn(dtype) for name, dtype in (INTEGERS | FLOATS).items()}
        row |= {name: [drawn(dtype) for _ in range(rng.randrange(4))] for name, dtype in RAGGED.items()}
        made.append(row)
    return made


@pytest.fixture(scope="module")
def store(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory):
    """The same rows in a store."""
    scalars = [Column(name, dtype) for name, dtype in (INTEGERS | FLOATS).items()]
    ragged = [Column(name, dtype, ragged=True, axis=name) for name, dtype in RAGGED.items()]
    with TrajectoryStore.create(tmp_path_factory.mktemp("where") / "store", [*scalars, *ragged]) as made:
        made.append(
            {c.name: np.array([row[c.name] for row in rows], c.dtype) for c in scalars}
            | {c.name: [np.array(row[c.name], c.dtype) for row in rows] for c in ragged}
        )
        yield made


def expected(condition: str, rows: list[dict[str, Any]]) -> list[int]:
    """The places of the rows that meet a condition in plain Python; a row without a value meets none but `!=`."""
    named = {
        "min": lambda row: min(_numbers(row), default=math.nan),
        "max": lambda row: max(_numbers(row), default=math.nan),
        "sum": lambda row: sum(_numbers(row)),
        "len": len,
    }

    def meets(row: dict[str, Any]) -> bool:
        try:
            return eval(condition, {"__builtins__": {}}, row | named)
        except ZeroDivisionError:
            return "!=" in condition

    return [place for place, row in enumerate(rows) if meets(row)]


def _numbers(row: list[Any]) -> list[Any]:
    return [value for value in row if value == value]


def test_random_expressions_of_integers_agree_with_python(store: TrajectoryStore, rows: list[dict[str, Any]]):
    """Sums, differences, products, remainders and comparisons are those of Python's integers: nothing wraps."""
    rng, ids = random.Random(11), store.ids()

    def term(depth: int) -> str:
        if depth and rng.random() < 0.7:
            return f"({term(depth - 1)} {rng.choice('+-*')} {term(depth - 1)})"
        figures = [f"{figure}({name})" for figure in ("sum", "len") for name in ("r8", "r64", "q64")]
        return rng.choice([*INTEGERS, *INTEGERS, *figures, str(rng.choice(EDGES)), f"-{rng.choice([*INTEGERS])}"])

    for _ in range(400):
        left = term(2)
        left = f"{left} % {rng.choice([*INTEGERS, '7', '-3'])}" if rng.random() < 0.2 else left
        condition = f"{left} {rng.choice(SIGNS)} {term(1)}"
        found = store.where(condition)
        assert found.tolist() == ids[expected(condition, rows)].tolist(), condition


def test_comparisons_of_all_types_are_exact(store: TrajectoryStore, rows: list[dict[str, Any]]):
    """int64, uint64 and floats are compared by value with each other and with constants."""
    ids = store.ids()
    names = ["i8", "i64", "u64", *FLOATS, "max(r64)", "min(q64)"]
    constants = [*map(str, EDGES), "0.5", "9007199254740992.0", "9007199254740992.5", "1e300", "16777215.5", "1000000"]
    for left in names:
        for right in [*names, *constants]:
            for sign in SIGNS:
                condition = f"{left} {sign} {right}"
                assert store.where(condition).tolist() == ids[expected(condition, rows)].tolist(), condition
        condition = f"{left} in (9007199254740993, 18446744073709551615, -1, 0.5, 9223372036854775808.0)"
        assert store.where(condition).tolist() == ids[expected(condition, rows)].tolist(), condition


def test_division_rounds_once(store: TrajectoryStore, rows: list[dict[str, Any]]):
    """A quotient of integers is the float nearest to it; a row that is divided by 0 has no value."""
    ids = store.ids()
    for left in INTEGERS:
        for condition in (
            f"{left} / 3 == 3074457345618258602",
            f"{left} / i8 > 1",
            f"u64 / {left} <= 9007199254740992",
        ):
            assert store.where(condition).tolist() == ids[expected(condition, rows)].tolist(), condition
    assert store.count("isnan(u8 % 0)") == store.count("isnan(f64 / 0)") == len(rows)


def test_sums_and_means_of_floats_agree_with_fsum(tmp_path: Path):
    """The sum and mean of each row of float32 differ from the exact ones by rounding in float64 at most."""
    rng = np.random.default_rng(5)
    rows = [(rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(np.float32) for n in (1, 5, 300, 4000)]
    with TrajectoryStore.create(tmp_path / "store", [Column("x", "float32", ragged=True)]) as store:
        ids = store.append({"x": rows})
        for place, row in enumerate(rows):
            exact, scale = math.fsum(row.tolist()), math.fsum(np.abs(row).tolist())
            near = f"{exact - 1e-12 * scale!r} <= sum(x) and sum(x) <= {exact + 1e-12 * scale!r}"
            assert ids[place] in store.where(near)
            mean, scale = exact / len(row), scale / len(row)
            assert ids[place] in store.where(f"{mean - 1e-12 * scale!r} <= mean(x) <= {mean + 1e-12 * scale!r}")


def test_a_decimal_is_the_float32_that_prints_like_it(tmp_path: Path):
    """What is shown as 0.7 is found as 0.7, in every form, while a decimal between two float32s is compared exactly."""
    with TrajectoryStore.create(tmp_path / "store", [Column("x", "float32")]) as store:
        ids = store.append({"x": np.array([0.7, 0.1, 16777216.0], np.float32)})
        for condition in ("x == 0.7", "x=0.7", "x in (0.7, 5)", "x = 0.7..0.71", "0.1 < x <= 0.7"):
            assert store.where(condition).tolist() == ids[:1].tolist(), condition
        assert store.where("x > 16777215.5").tolist() == ids[2:].tolist()
        assert store.where("x + 0 == 0.7").size == 0


def test_the_short_form_is_an_expression_in_short(tmp_path: Path):
    """Every short form finds what its expression finds."""
    columns = [Column("reward", "float32"), Column("my-note", "str"), Column("note", "str"), Column("at", "float64")]
    with TrajectoryStore.create(tmp_path / "store", columns) as store:
        store.append(
            {
                "reward": [0.25, math.nan, 0.5],
                "my-note": ["a", "b", "a"],
                "note": ["A Cat", "", "1..2"],
                "at": [0.0, 1769817600.0, 2e9],
            }
        )
        for short, full in (
            ("reward=0.25", "reward == 0.25"),
            ("reward = 0.3..", "reward >= 0.3"),
            ("reward != ..0.3", "not reward <= 0.3"),
            ("reward=null", "reward is None"),
            ("reward != nan", "not isnan(reward)"),
            ("note ~ cat", "note.contains('cat')"),
            ("note = A Cat", "note == 'A Cat'"),
            ("note = 1..2", "note == '1..2'"),
            ("at >= 2026-01-31", "at >= '2026-01-31'"),
            ("at in (2026-01-31, 0)", "at == 1769817600 or at == 0"),
        ):
            assert store.where(short).tolist() == store.where(full).tolist(), short
            assert len(store.where(short)), short
        assert store.where("my-note = a").tolist() == store.ids()[[0, 2]].tolist()
        for wrong in ("reward > ..0.3", "reward ~ 1", "note ~ ''", "note + 1 > 2", "-note == 1", "reward=> 1"):
            with pytest.raises(SchemaError):
                store.where(wrong)
