"""verl 0.9, the v1 trainer: every trajectory that the trainer samples, and those of groups that it clears.

    trainer.v1.sampler.custom_sampler.path=pkg://trajectory_store.adapters.verl
    trainer.v1.sampler.custom_sampler.name=RecordingBuffer        # of the sync trainer; else RecordingBufferAsync

with `TRAJECTORY_STORE=FOLDER` in the environment. `ServingBuffer` in its place serves the groups of that store.

Source: `ReplayBuffer.sample` and `_clear_groups` of `verl/trainer/ppo/v1/replay_buffer.py` (verl 0.9.1); the fields
and tags of `verl/trainer/ppo/v1/agent_loop_tq.py`.
"""

# pyright: standard
# Foreign data, whose types are told apart at run time.
from __future__ import annotations

import math
from typing import Any

import numpy as np

from trajectory_store import extras
from trajectory_store.adapters import recorder_here, store_here
from trajectory_store.errors import BatchError
from trajectory_store.recorder import TrajectoryRecorder, learnable_rows
from trajectory_store.store import TrajectoryStore

FIELDS = ["uid", "prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "reward_model"]


def __getattr__(name: str) -> Any:
    """Return a class over verl's own, which is imported when verl names it."""
    bases = {
        "RecordingBuffer": "ReplayBuffer",
        "RecordingBufferAsync": "ReplayBufferAsync",
        "ServingBuffer": "ReplayBuffer",
    }
    if name not in bases:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = extras.load("verl.trainer.ppo.v1.replay_buffer", "verl's sampler")
    queue = extras.load("transfer_queue", "verl's sampler")
    if name == "ServingBuffer":
        return serving(getattr(module, bases[name]), queue, store_here(), _tensors)
    return recording(getattr(module, bases[name]), queue)


def recording(base: Any, queue: Any, recorder: TrajectoryRecorder | None = None) -> Any:
    """Return a subclass of verl's replay buffer that records; `queue` is the module `transfer_queue`."""

    class Recording(base):
        def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
            meta, metrics = super().sample(global_steps, partition_id, batch_size)
            record(recorder or recorder_here(), queue, partition_id, dict(zip(meta.keys, meta.tags, strict=True)))
            return meta, metrics

        def _clear_groups(self, partition_id: str, uids: Any) -> None:
            partition = self.partitions[partition_id]
            cleared = {key: tag for key, tag in partition.items() if key.split("_")[0] in uids}
            record(recorder or recorder_here(), queue, partition_id, cleared, cleared=True)
            super()._clear_groups(partition_id, uids)

    return Recording


def record(
    recorder: TrajectoryRecorder, queue: Any, partition: str, tags: dict[str, Any], *, cleared: bool = False
) -> None:
    """Record the trajectories of keys `PROMPT_SESSION_OUTPUT` from verl's queue, in the groups of their prompts."""
    keys = [key for key, tag in tags.items() if tag.get("status", "success") == "success" and "is_padding" not in tag]
    if not keys:
        return
    data = queue.kv_batch_get(keys=keys, partition_id=partition, select_fields=FIELDS)
    fields = {name: _rows(data[name]) for name in FIELDS if name in data}
    scores, truths = fields.get("rm_scores"), fields.get("reward_model")
    recorder.record(
        prompt_ids=fields["prompts"],
        completion_ids=fields["responses"],
        completions=[""] * len(keys),
        completion_masks=fields["response_mask"],
        log_probs=fields.get("rollout_log_probs"),
        rewards=None if scores is None else [math.fsum(row) for row in scores],
        answers=None if truths is None else [dict(truth or {}).get("ground_truth") for truth in truths],
        policy_version=[_version(tags[key].get("min_global_steps")) for key in keys],
        evaluation=partition == "val",
        groups=[key.rsplit("_", 2)[0] for key in keys],
        metas=[{"key": key, "cleared": cleared, "newest": tags[key].get("max_global_steps")} for key in keys],
        source="verl",
    )


def _tensors(rows: list[dict[str, Any]]) -> Any:
    """Return rows as verl's own TensorDict, each array a tensor."""
    tensordict_of = extras.load("verl.utils.tensordict_utils", "verl's sampler").list_of_dict_to_tensordict
    tensor = extras.load("torch", "verl's sampler").as_tensor
    return tensordict_of([{k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in rows])


def _version(step: Any) -> int:
    return -1 if step is None else int(step)


def _rows(values: Any) -> list[Any]:
    """Return the rows of a nested or a padded tensor as lists, and those of anything else as they are."""
    rows = values.unbind() if hasattr(values, "unbind") else values
    return [row.tolist() if hasattr(row, "tolist") else getattr(row, "data", row) for row in rows]


def serving(base: Any, queue: Any, store: str, fields_of: Any) -> Any:
    """Return a subclass of verl's replay buffer that serves the groups of a store as the samples of training.

    Whole groups are served in the order of the store, over and over. What the trainer generates meanwhile is left where
    it is: give it as few prompts as it takes.

    Args:
        base: verl's `ReplayBuffer` or `ReplayBufferAsync`.
        queue: the module `transfer_queue`.
        store: folder of the store.
        fields_of: makes a TensorDict of rows, such as verl's `list_of_dict_to_tensordict`.
    """
    with TrajectoryStore.open(store, mode="r") as opened:
        names = ["input_ids", "num_prompt_tokens", "assistant_mask", "log_probs", "task_reward", "group_id"]
        stored = opened.read(learnable_rows(opened).row_ids, names)
    groups = [np.flatnonzero(stored["group_id"] == group) for group in dict.fromkeys(stored["group_id"].tolist())]
    if not groups:
        raise BatchError(f"{store} holds no rows that may be learned from.")

    class Serving(base):
        served = 0

        def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
            if partition_id != "train":
                return super().sample(global_steps, partition_id, batch_size)
            chosen = [groups[(self.served + i) % len(groups)] for i in range(batch_size)]
            uids = [f"stored-{self.served + i}" for i in range(batch_size)]
            self.served += batch_size
            rows = [(uid, i, int(row)) for uid, group in zip(uids, chosen, strict=True) for i, row in enumerate(group)]
            fields_of_rows = [_fields(stored, row, uid) for uid, _, row in rows]
            tags = [_tag(fields, global_steps) for fields in fields_of_rows]
            keys = [f"{uid}_{i}_0" for uid, i, _ in rows]
            return queue.kv_batch_put(keys=keys, partition_id="train", fields=fields_of(fields_of_rows), tags=tags), {}

    return Serving


def _fields(stored: Any, row: int, uid: str) -> dict[str, Any]:
    """Return what verl's agent loop puts for a trajectory, as far as a store knows it."""
    start, ids = int(stored["num_prompt_tokens"][row]), stored["input_ids"][row].astype(np.int64)
    mask = stored["assistant_mask"][row][start:].astype(np.int64)
    scores = np.zeros(len(mask), np.float32)
    scores[-1:] = stored["task_reward"][row]
    fields = {"prompts": ids[:start], "responses": ids[start:], "input_ids": ids, "position_ids": np.arange(len(ids))}
    fields |= {"attention_mask": np.ones(len(ids), np.int64), "response_mask": mask, "loss_mask": mask}
    fields |= {"rollout_log_probs": np.nan_to_num(stored["log_probs"][row][start:]), "rm_scores": scores}
    return {**fields, "uid": uid}


def _tag(fields: dict[str, Any], step: int) -> dict[str, Any]:
    sizes = {"prompt_len": len(fields["prompts"]), "response_len": len(fields["responses"])}
    steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), step)
    return {"status": "success", **sizes, "seq_len": len(fields["input_ids"]), **steps}
