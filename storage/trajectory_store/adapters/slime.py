"""slime and miles: every sample of a rollout, those that a filter dropped too.

    TRAJECTORY_STORE=runs/slime/store python train.py ... \
        --rollout-all-samples-process-path trajectory_store.adapters.slime.record

Source: the end of `generate_rollout_async` in `slime/rollout/sglang_rollout.py` (commit 624b824), which calls the hook
with `(args, all_samples, data_source)`; `Sample` of `slime/utils/types.py`.
"""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from trajectory_store.adapters import recorder_here
from trajectory_store.adapters.recorded_rewards import episode_outcomes
from trajectory_store.recorder import TrajectoryRecorder

_FAILURES = {"aborted": "engine", "pending": "engine", "failed": "tool_error"}
_ENDS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def record(args: Any, all_samples: Any, data_source: Any = None, *, recorder: TrajectoryRecorder | None = None) -> None:
    """Record the samples of a rollout in one commit, in the groups of `group_index`.

    Samples of one rollout (a list within a group, or one `rollout_id`) are an episode. slime counts groups from 0 where
    a training starts from scratch, so they are named within this process; it records whole groups.
    """
    rows = _in_episodes([row for row in _flat(all_samples) if len(row[0].tokens)])
    if not rows:
        return
    samples, episodes = [sample for sample, _ in rows], [episode for _, episode in rows]
    writer = recorder or recorder_here()
    starts = [len(sample.tokens) - sample.response_length for sample in samples]
    statuses = [str(getattr(sample.status, "value", sample.status)) for sample in samples]
    removed = [getattr(sample, "remove_sample", False) for sample in samples]
    masks = [sample.loss_mask or [1] * sample.response_length for sample in samples]
    rewards = [_reward(args, sample.reward) for sample in samples]
    writer.record(
        prompts=[sample.prompt for sample in samples],
        prompt_ids=[list(sample.tokens[:start]) for sample, start in zip(samples, starts, strict=True)],
        completions=[sample.response for sample in samples],
        completion_ids=[list(sample.tokens[start:]) for sample, start in zip(samples, starts, strict=True)],
        completion_masks=[[not out and bool(on) for on in m] for m, out in zip(masks, removed, strict=True)],
        log_probs=[sample.rollout_log_probs or None for sample in samples],
        rewards=episode_outcomes(rewards, episodes),
        answers=[sample.label for sample in samples],
        finish_reasons=[_ENDS.get(status, "") for status in statuses],
        failures=[_FAILURES.get(status, "") for status in statuses],
        policy_version=[_version(sample.weight_versions) for sample in samples],
        temperature=getattr(args, "rollout_temperature", None),
        groups=[sample.index if sample.group_index is None else sample.group_index for sample in samples],
        episodes=episodes,
        run_id=writer.session_id,
        one_prompt=False,  # slime forms the groups, and its own rollout may write each prompt
        metas=[
            {"index": sample.index, "status": status, "reward": reward}
            for sample, status, reward in zip(samples, statuses, rewards, strict=True)
        ],
        engine="sglang",
        source="slime",
    )


def _flat(all_samples: Any) -> Iterator[tuple[Any, Hashable | None]]:
    """Yield samples of groups, and what one rollout was split into, with the name of its episode."""
    for group in all_samples:
        for item in group if isinstance(group, (list, tuple)) else [group]:
            siblings = list(item) if isinstance(item, (list, tuple)) else [item]
            for sample in siblings:
                rollout = getattr(sample, "rollout_id", None)
                yield (
                    sample,
                    (id(item) if len(siblings) > 1 else None) if rollout is None else (sample.group_index, rollout),
                )


def _in_episodes(rows: list[tuple[Any, Hashable | None]]) -> list[tuple[Any, Hashable | None]]:
    """Return rows with those of an episode next to each other."""
    first: dict[Hashable, int] = {}
    places = [i if episode is None else first.setdefault(episode, i) for i, (_, episode) in enumerate(rows)]
    return [rows[i] for i in sorted(range(len(rows)), key=lambda i: places[i])]


def _reward(args: Any, reward: Any) -> float | None:
    return reward[args.reward_key] if isinstance(reward, dict) else reward


def _version(versions: Any) -> int:
    """Return the oldest version of the weights that sampled; -1 where the engine named none, or not by a number.

    SGLang's version is "default" until slime updates the weights for the first time.
    """
    numbers = [int(version) if str(version).isdecimal() else -1 for version in versions or ()]
    return min(numbers, default=-1)
