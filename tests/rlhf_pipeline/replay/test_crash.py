"""What a killed collector leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from rlhf_pipeline.data import keys
from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.replay.storage import TrajectoryStorage

pytestmark = pytest.mark.crash

WRITER = """
import torch
from tensordict import TensorDict, lazy_stack
from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.replay.storage import TrajectoryStorage
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(PATH), transform=MCAdvantage(2))
def row(i):
    n = 3 + i % 5
    return TensorDict({
        "tokens": {"full": torch.full((n,), i % 1000)}, "masks": {"all_assistant_mask": torch.arange(n) > 0},
        "group_id": torch.tensor(i // 2), "trajectory_id": torch.tensor(i), "task_reward": torch.tensor(float(i % 2)),
        "prompt": f"prompt {i}",
    })
for i in range(0, 10**9, 8):
    rb.extend(lazy_stack([row(j) for j in range(i, i + 8)]))
    print(i + 8, flush=True)
"""


def test_acknowledged_trajectories_survive_a_kill(tmp_path):
    """After SIGKILL every trajectory whose `extend` returned is there, whole, with its own text and advantage."""
    path = tmp_path / "store"
    code = textwrap.dedent(WRITER).replace("PATH", repr(str(path)))
    env = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    assert child.stdout is not None
    acknowledged = int(child.stdout.readline())
    time.sleep(0.5)
    os.kill(child.pid, signal.SIGKILL)
    rest = child.stdout.read().split("\n")
    child.wait()
    child.stdout.close()
    acknowledged = max([acknowledged, *(int(line) for line in rest[:-1] if line)])
    rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(path))
    assert len(rb) >= acknowledged > 8
    assert len(rb) % 8 == 0  # one commit per call: all of a batch or nothing
    batch = rb.trajectories.read(range(len(rb)), text=True)
    assert batch[keys.TRAJECTORY_ID].tolist() == list(range(len(rb)))
    assert list(batch["prompt"]) == [f"prompt {i}" for i in range(len(rb))]
    assert batch[keys.ADVANTAGE][:, 1].tolist() == pytest.approx([-0.70710678, 0.70710678] * (len(rb) // 2))
    assert batch[keys.TOKENS][:, 0].tolist() == [i % 1000 for i in range(len(rb))]
    rb.storage.close()
