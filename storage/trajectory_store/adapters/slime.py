"""slime and miles: every sample of a rollout, those that a filter dropped too.

    TRAJECTORY_STORE=runs/slime/store python train.py ... \
        --rollout-all-samples-process-path trajectory_store.adapters.slime.record

Source: the end of `generate_rollout_async` in `slime/rollout/sglang_rollout.py` (commit 624b824), which calls the hook
with `(args, all_samples, data_source)`; `Sample` of `slime/utils/types.py`.
"""

# pyright: standard
# Foreign data, whose types are told apart at run time.
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trajectory_store.adapters import recorder_here
from trajectory_store.recorder import TrajectoryRecorder

_FAILURES = {"aborted": "engine", "pending": "engine", "failed": "tool_error"}
_ENDS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def record(args: Any, all_samples: Any, data_source: Any = None, *, recorder: TrajectoryRecorder | None = None) -> None:
    """Record the samples of a rollout in one commit, in the groups of `group_index`."""
    samples = [sample for sample in _flat(all_samples) if len(sample.tokens)]
    if not samples:
        return
    starts = [len(sample.tokens) - sample.response_length for sample in samples]
    statuses = [str(getattr(sample.status, "value", sample.status)) for sample in samples]
    removed = [getattr(sample, "remove_sample", False) for sample in samples]
    masks = [sample.loss_mask or [1] * sample.response_length for sample in samples]
    (recorder or recorder_here()).record(
        prompts=[sample.prompt for sample in samples],
        prompt_ids=[list(sample.tokens[:start]) for sample, start in zip(samples, starts, strict=True)],
        completions=[sample.response for sample in samples],
        completion_ids=[list(sample.tokens[start:]) for sample, start in zip(samples, starts, strict=True)],
        completion_masks=[[not out and bool(on) for on in m] for m, out in zip(masks, removed, strict=True)],
        log_probs=[sample.rollout_log_probs or None for sample in samples],
        rewards=[_reward(args, sample.reward) for sample in samples],
        answers=[sample.label for sample in samples],
        finish_reasons=[_ENDS.get(status, "") for status in statuses],
        failures=[_FAILURES.get(status, "") for status in statuses],
        policy_version=[_version(sample.weight_versions) for sample in samples],
        temperature=getattr(args, "rollout_temperature", None),
        groups=[sample.index if sample.group_index is None else sample.group_index for sample in samples],
        metas=[{"index": sample.index, "status": status} for sample, status in zip(samples, statuses, strict=True)],
        engine="sglang",
        source="slime",
    )


def _flat(samples: Any) -> Iterator[Any]:
    """Yield samples of groups, which may be groups of what one rollout was split into."""
    for item in samples:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item


def _reward(args: Any, reward: Any) -> float | None:
    return reward[args.reward_key] if isinstance(reward, dict) else reward


def _version(versions: Any) -> int:
    """Return the oldest version of the weights that sampled; -1 where the engine named none."""
    return min((int(version) for version in versions or ()), default=-1)
