"""TorchRL's `RayReplayBuffer` over ours: trajectories from other nodes of a Ray cluster, and batches for them."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict, lazy_stack
from torchrl.data import RayReplayBuffer

from rlhf_pipeline import MCAdvantage, TrajectoryReplayBuffer
from tests.rlhf_pipeline import small
from tests.rlhf_pipeline.small import drawn_trajectory
from trajectory_store import TrajectoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray"),
    pytest.mark.filterwarnings("ignore"),  # what Ray warns of is about itself
]
SMALL = {"object_store_memory": 80_000_000, "include_dashboard": False}


def collect_and_sample(buffer: Any, first: int) -> tuple[str, TensorDict]:
    """What runs on another node: extend by two groups, one at a time, and read a batch."""
    import ray

    for start in (first, first + 4):
        buffer.extend(lazy_stack([drawn_trajectory(number) for number in range(start, start + 4)]))
    return ray.get_runtime_context().get_node_id(), buffer.sample(6)


def test_other_nodes_extend_and_sample(tmp_path: Path):
    """Two nodes fill the buffer of a third: every trajectory once, with the advantage of its group, on disk."""
    import ray
    from ray.cluster_utils import Cluster

    for module in (sys.modules[__name__], small):  # the nodes do not have the tests
        ray.cloudpickle.register_pickle_by_value(module)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **SMALL})
    for name in ("one", "two"):
        cluster.add_node(num_cpus=1, resources={name: 1}, **SMALL)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        buffer = RayReplayBuffer(
            replay_buffer_cls=TrajectoryReplayBuffer,
            storage=str(tmp_path / "store"),
            transform_factory=partial(MCAdvantage, 4, estimator="dr_grpo"),
            remote_config={"num_cpus": 1},
        )
        work = [
            ray.remote(collect_and_sample).options(num_cpus=0, resources={name: 1}).remote(buffer.client(), first)
            for name, first in (("one", 0), ("two", 8))
        ]
        nodes, batches = zip(*ray.get(work), strict=True)
        assert len({*nodes, ray.get_runtime_context().get_node_id()}) == 3
        assert len(buffer) == 16
        for batch in (*batches, buffer.sample(6)):
            assert batch.shape == (6,)
            for row in batch:
                given = drawn_trajectory(int(row["trajectory_id"]))["tokens", "full"]
                assert row["tokens", "full"][row["masks", "all_attention_mask"]].tolist() == given.tolist()
        buffer.close()
    finally:
        ray.shutdown()
        cluster.shutdown()
    with TrajectoryStore.open(tmp_path / "store") as store:
        numbers, rewards = store.read_scalars("trajectory_id"), store.read_scalars("task_reward")
        assert sorted(numbers.tolist()) == list(range(16))
        for group in range(4):
            inside = store.read_scalars("group_id") == group
            expected = rewards[inside] - rewards[inside].mean()
            assert store.read_scalars("advantage")[inside] == pytest.approx(expected, abs=1e-6)
