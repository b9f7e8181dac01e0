"""TorchRL's `RayReplayBuffer` over ours: trajectories from other nodes of a Ray cluster, and batches for them."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import RayReplayBuffer

from rlhf_pipeline import MCAdvantage, TrajectoryReplayBuffer
from trajectory_store import TrajectoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray"),
    pytest.mark.filterwarnings("ignore"),  # what Ray warns of is about itself
]
SMALL = {"object_store_memory": 80_000_000, "include_dashboard": False}


def trajectory(number: int) -> TensorDict:
    """One of a group of four, 3 to 9 tokens long."""
    generator, length = torch.Generator().manual_seed(number), 3 + number * 5 % 7
    assistant = torch.arange(length) >= 2
    return TensorDict(
        {
            ("tokens", "full"): torch.randint(2, 12, (length,), generator=generator),
            ("masks", "all_assistant_mask"): assistant,
            ("log_probs", "full"): torch.where(assistant, -2.4, torch.nan),
            "group_id": torch.tensor(number // 4),
            "trajectory_id": torch.tensor(number),
            "policy_version": torch.tensor(0),
            "num_prompt_tokens": torch.tensor(2),
            "task_reward": torch.rand((), generator=generator),
            ("next", "done"): torch.tensor(True),
        }
    )


def collect_and_sample(buffer: Any, first: int) -> tuple[str, TensorDict]:
    """What runs on another node: extend by two groups, one at a time, and read a batch."""
    import ray

    for start in (first, first + 4):
        buffer.extend(lazy_stack([trajectory(number) for number in range(start, start + 4)]))
    return ray.get_runtime_context().get_node_id(), buffer.sample(6)


def test_other_nodes_extend_and_sample(tmp_path: Path):
    """Two nodes fill the buffer of a third: every trajectory once, with the advantage of its group, on disk."""
    import ray
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the nodes do not have the tests
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
                given = trajectory(int(row["trajectory_id"]))["tokens", "full"]
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
