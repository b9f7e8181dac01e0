"""Objects with the fields of other trainers, as their adapters read them; each names where the fields are read from."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Status(enum.Enum):
    """`Sample.Status` of slime/utils/types.py."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class SlimeSample:
    """`Sample` of slime/utils/types.py."""

    tokens: list[int]
    response_length: int
    reward: Any = 1.0
    prompt: Any = "p"
    response: str = "r"
    group_index: int | None = 0
    index: int = 0
    label: str | None = "2"
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list[str])
    status: Status = Status.COMPLETED
    remove_sample: bool = False
    rollout_id: int | None = None


@dataclass
class Identity:
    """`TrajectoryID` of skyrl/train/generators/base.py."""

    instance_id: str
    repetition_id: int


@dataclass
class Metadata:
    """`BatchMetadata` of the same file."""

    global_step: int
    training_phase: str = "train"


class Generator:
    """`GeneratorInterface` of the same file, of given outputs."""

    def __init__(self, output: dict[str, Any]) -> None:
        self.output = output
        self.tokenizer = "mine"

    async def generate(self, input_batch: Any) -> dict[str, Any]:
        """Return the output."""
        return self.output


class RolloutWorkflow(ABC):
    """The base class of areal/api/workflow_api.py, by which AReaL tells a workflow from an agent."""

    @abstractmethod
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Run one."""


class Workflow(RolloutWorkflow):
    """A workflow of given episodes."""

    def __init__(self, episodes: list[Any]) -> None:
        self.episodes = episodes

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Return the next episode."""
        return self.episodes.pop(0)


def episode(tokens: list[int], mask: list[int], scores: list[float], versions: list[int], reward: float) -> Any:
    """Return what areal/workflow/rlvr.py returns: a batch of one, padded here by one token."""
    row = {"input_ids": [*tokens, 0], "loss_mask": [*mask, 0], "logprobs": [*scores, 0.0], "versions": [*versions, -1]}
    row["attention_mask"] = [1] * len(tokens) + [0]
    return {name: np.array([values]) for name, values in row.items()} | {"rewards": np.array([reward])}


@dataclass
class Meta:
    """`KVBatchMeta` of transfer_queue."""

    keys: list[str]
    tags: list[dict[str, Any]]


class Queue:
    """The module `transfer_queue`: rows by key."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        """Return the fields that are there."""
        present_fields = [name for name in select_fields if all(name in self.rows[key] for key in keys)]
        return {name: [self.rows[key][name] for key in keys] for name in present_fields}

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: Any, tags: list[dict[str, Any]]) -> Meta:
        """Keep rows."""
        self.rows |= dict(zip(keys, fields, strict=True))
        return Meta(keys, tags)

    def kv_clear(self, *, keys: list[str], partition_id: str) -> None:
        """Forget rows."""
        for key in keys:
            self.rows.pop(key, None)


class Buffer:
    """`ReplayBuffer` of verl/trainer/ppo/v1/replay_buffer.py: what a sampler has, and clears."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.partitions: dict[str, dict[str, Any]] = {"train": {}, "val": {}}

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Meta, dict[str, Any]]:
        """Return all trajectories."""
        partition = self.partitions[partition_id]
        return Meta([*partition], [*partition.values()]), {}

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        gone = [key for key in self.partitions[partition_id] if key.split("_")[0] in uids]
        self.queue.kv_clear(keys=gone, partition_id=partition_id)
        for key in gone:
            del self.partitions[partition_id][key]


def verl_row(prompt: list[int], said: list[int], reward: float) -> dict[str, Any]:
    """Return the fields of verl/trainer/ppo/v1/agent_loop_tq.py."""
    scores = [0.0] * (len(said) - 1) + [reward]
    row = {"prompts": prompt, "responses": said, "response_mask": [1] * len(said), "rm_scores": scores}
    row["rollout_log_probs"] = [-0.5] * len(said)
    return {name: np.array(values) for name, values in row.items()} | {"reward_model": {"ground_truth": "2"}}


@dataclass
class RolloutSample:
    """`RolloutSample` of trl/experimental/async_grpo/async_rollout_worker.py."""

    prompt: list[dict[str, str]]
    completion: list[dict[str, str]]
    input_ids: np.ndarray
    completion_mask: np.ndarray
    old_log_probs: np.ndarray
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]


@dataclass
class Entry:
    """`TokenEntry` of nemo_gym/token_id_capture/records.py."""

    rollout_id: str
    model_call_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]

    def model_dump(self, mode: str) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return dict(vars(self))
