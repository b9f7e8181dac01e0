"""verl 0.9, the v1 trainer: every trajectory that the trainer samples, and those of groups that it clears.

    trainer.v1.sampler.custom_sampler.path=pkg://trajectory_store.adapters.verl
    trainer.v1.sampler.custom_sampler.name=RecordingBuffer        # of the sync trainer; else RecordingBufferAsync

with `TRAJECTORY_STORE=FOLDER` in the environment. `StoredBuffer` in its place serves the groups of that store.

Source: `ReplayBuffer.sample` and `_clear_groups` of `verl/trainer/ppo/v1/replay_buffer.py` (verl 0.9.1); the fields
and tags of `verl/trainer/ppo/v1/agent_loop_tq.py`.
"""

# pyright: standard
# Foreign data, whose types are told apart at run time.
from __future__ import annotations

import math
from typing import Any

from trajectory_store import extras
from trajectory_store.adapters import recorder_here
from trajectory_store.recorder import TrajectoryRecorder

FIELDS = ["uid", "prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "reward_model"]


def __getattr__(name: str) -> Any:
    """Return a class over verl's own, which is imported when verl names it."""
    bases = {"RecordingBuffer": "ReplayBuffer", "RecordingBufferAsync": "ReplayBufferAsync"}
    if name not in bases:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = extras.load("verl.trainer.ppo.v1.replay_buffer", "verl's sampler")
    return recording(getattr(module, bases[name]), extras.load("transfer_queue", "verl's sampler"))


def recording(base: Any, queue: Any, recorder: TrajectoryRecorder | None = None) -> Any:
    """Return a subclass of verl's replay buffer that records; `queue` is the module `transfer_queue`."""

    class Recording(base):
        def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
            meta, metrics = super().sample(global_steps, partition_id, batch_size)
            record(recorder or recorder_here(), queue, partition_id, dict(zip(meta.keys, meta.tags, strict=True)))
            return meta, metrics

        def _clear_groups(self, partition_id: str, uids: Any) -> None:
            there = self.partitions[partition_id]
            cleared = {key: tag for key, tag in there.items() if key.split("_")[0] in uids}
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


def _version(step: Any) -> int:
    return -1 if step is None else int(step)


def _rows(values: Any) -> list[Any]:
    """Return the rows of a nested or a padded tensor as lists, and those of anything else as they are."""
    rows = values.unbind() if hasattr(values, "unbind") else values
    return [row.tolist() if hasattr(row, "tolist") else getattr(row, "data", row) for row in rows]
