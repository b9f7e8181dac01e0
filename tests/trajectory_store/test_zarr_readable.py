"""A segment is valid Zarr v3 at every instant, also while it is written."""

from __future__ import annotations

import numpy as np
import pytest

from trajectory_store import Column, Schema, TrajectoryStore

from .contract import example_rows, example_schema

zarr = pytest.importorskip("zarr")


def test_zarr_python_reads_a_live_segment(tmp_path):
    """Between two appends, plain zarr finds every column, with names, dtypes, fills and values."""
    schema = Schema([*example_schema().columns, Column("experts", "int16", ragged=True, shape=(2,))])
    store = TrajectoryStore.create(tmp_path / "s", schema)
    seen = 0
    for seed in range(3):
        data = example_rows(6, seed=seed)
        data["ref_log_probs"] = data["log_probs"]
        experts = np.arange(2 * len(data["input_ids"].values), dtype=np.int16).reshape(-1, 2)
        data["experts"] = data["input_ids"].beside(experts)
        store.append(data)
        group = zarr.open_group(tmp_path / "s", mode="r")["seg-00000000"]
        offsets = group["tokens.offsets"][: seen + 7]
        start, end = int(offsets[seen]), int(offsets[seen + 6])
        np.testing.assert_array_equal(group["input_ids"][start:end], data["input_ids"].values)
        np.testing.assert_array_equal(group["experts"][start:end], experts)
        np.testing.assert_array_equal(group["log_probs"][start:end], data["log_probs"].values)
        np.testing.assert_array_equal(group["task_reward"][seen : seen + 6], data["task_reward"])
        assert group["input_ids"].metadata.dimension_names == ("tokens",)
        assert np.isnan(group["ref_log_probs"].fill_value)
        assert group["experts"].shape[1:] == (2,)
        text = group["prompt.offsets"][seen : seen + 2]
        assert bytes(group["prompt"][text[0] : text[1]]).decode() == data["prompt"][0]
        seen += 6
    store.close()


def test_every_member_of_a_store_is_a_zarr_node(tmp_path):
    """Walking the hierarchy raises no warning: there are no foreign files in it."""
    with TrajectoryStore.create(tmp_path / "s", example_schema(), segment_rows=4) as store:
        for seed in range(3):
            store.append(example_rows(4, seed=seed))
    names = {name for name, _ in zarr.open_group(tmp_path / "s", mode="r").members(max_depth=None)}
    assert {"catalog", "seg-00000002", "seg-00000002/commits", "seg-00000001/input_ids"} <= names
