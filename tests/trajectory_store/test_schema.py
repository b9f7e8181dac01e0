"""Schemas and columns."""

from __future__ import annotations

import math

import pytest

from trajectory_store import Column, Schema, SchemaError, UnknownColumnError

from .contract import example_schema


def test_a_schema_survives_json():
    """NaN and infinite fills, axes and flags come back equal."""
    import json

    schema = Schema([*example_schema().columns, Column("low", "float64", fill=-math.inf)])
    again = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert again == schema
    assert again["low"].fill == -math.inf
    assert math.isnan(again["ref_log_probs"].fill)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a b", "int32"), "a b"),
        (("commits", "int32"), "commits"),
        (("x", "int33"), "Did you mean 'int"),
        (("x", "str", True), "ragged"),
        (("x", "int32", False, False, "tokens"), "scalar"),
        (("x", "int32", True, False, "a.b"), "axis"),
        (("x", "int8", False, False, None, 300), "300"),
        (("x", "int8", False, False, None, 0.5), "0.5"),
        (("x", "float32", False, False, None, "no"), "no"),
        (("x", "str", False, False, None, 1), "1"),
    ],
)
def test_wrong_columns_are_refused(arguments, words):
    """Each contradiction is named."""
    with pytest.raises(SchemaError, match=words):
        Column(*arguments)


def test_wrong_schemas_are_refused():
    """No columns, a name twice, text that shares its axis, an unknown name."""
    with pytest.raises(SchemaError, match="at least one"):
        Schema([])
    with pytest.raises(SchemaError, match="twice"):
        Schema([Column("x", "int8"), Column("x", "int16")])
    with pytest.raises(SchemaError, match="text"):
        Schema([Column("x", "int8", ragged=True), Column("t", "str", axis="tokens")])
    with pytest.raises(UnknownColumnError, match="Did you mean 'prompt'"):
        example_schema()["promt"]


def test_defaults():
    """Axes, optionality and fills follow from the definition."""
    assert Column("x", "int32", ragged=True).axis == "tokens"
    assert Column("t", "str").axis == "t"
    assert Column("x", "int32").axis is None
    assert not Column("x", "int32").optional
    assert Column("x", "int32", mutable=True).fill_value == 0
    assert math.isnan(Column("x", "float32").fill_value)
