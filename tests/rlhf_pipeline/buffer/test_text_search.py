"""A search in the texts of a store finds what a search in the decoded texts does."""

from __future__ import annotations

import random
import string
from itertools import pairwise

import numpy as np
import pytest

from rlhf_pipeline.buffer.text_search import search, text_bytes
from trajectory_store import Column, TrajectoryStore

LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
"""Letters of other alphabets differ by case: no text is decoded."""


def found(store, wanted, ids, name="text"):
    """All places in `ids`, and after each part the place down to which it was searched."""
    parts = list(search(store, name, wanted, ids))
    return sorted(int(place) for places, _ in parts for place in places), [down for _, down in parts]


@pytest.fixture(params=["memmap", "zarr"])
def store(request, tmp_path):
    columns = [Column("tag", "int64"), Column("text", "str", mutable=True, fill="nothing")]
    with TrajectoryStore.create(tmp_path / "store", columns, backend=request.param) as made:
        yield made


@pytest.mark.parametrize("wanted", ["ab", "B", "é", "É", "b🙂", "aba", "nothing", "x"])
def test_places_are_those_of_the_texts(store, wanted):
    """ASCII letters of either case are equal; no text crosses rows, and later values and fills are searched, too."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("aAbBéÉ🙂", k=rng.randrange(6))) for _ in range(300)]
    ids = store.append({"tag": range(300), "text": texts})
    ids = np.concatenate([ids, store.append({"tag": [0, 1]})])
    store.update(ids[10:20], text=["Nothing"] * 10)
    texts = [*texts[:10], *["Nothing"] * 10, *texts[20:], "nothing", "nothing"]
    some = ids[3::2]  # places are those in the ids that are asked for
    want = [at for at, text in enumerate(texts[3::2]) if wanted.translate(LOWER) in text.translate(LOWER)]
    assert found(store, wanted, some)[0] == want
    assert bool(want) == (wanted != "x")


def test_a_column_that_no_row_has_is_searched_by_its_fill(store):
    """As `read` gives it: all rows have the fill of a column that came later."""
    ids = store.append({"tag": range(3), "text": ["a", "b", "c"]})
    store.add_columns([Column("late", "str", fill="Größe"), Column("empty", "str", fill="")])
    assert found(store, "öSSE"[:2], ids, "late") == ([], [0])
    assert found(store, "rö", ids, "late") == ([0, 1, 2], [0])
    assert found(store, "r", ids, "empty") == ([], [0])
    values, starts = text_bytes(store, "late", ids)
    assert [values[a:b].tobytes().decode() for a, b in pairwise(starts)] == ["Größe"] * 3


def test_the_newest_rows_come_first_and_each_is_searched_once(store):
    """Whoever stops after the first part has the newest finds; the parts cover all rows, whatever their size."""
    texts = [f"row {at} {'x' * (8000 if at % 500 == 7 else 4)} {'z' * 8000}" for at in range(3000)]
    ids = store.append({"tag": range(3000), "text": texts})
    end = len(ids)
    for places, down in search(store, "text", "row", ids):
        assert places.tolist() == list(range(down, end))
        end = down
    assert end == 0
    assert found(store, "xxxxx", ids)[0] == list(range(7, 3000, 500))
    assert len(found(store, "row 2999", ids)[1]) > 2
    assert found(store, "row", ids[:0]) == ([], [])
