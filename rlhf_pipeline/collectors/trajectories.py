"""From sampled completions to the batch that the write path takes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import numpy as np
import torch

from rlhf_pipeline.collectors.grading import Grade
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories
from rlhf_pipeline.policies.engines.completions import RaggedCompletions


def trajectories(
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[Sequence[int]],
    completions: RaggedCompletions,
    texts: Sequence[str],
    grades: Sequence[Grade],
    *,
    cursors: np.ndarray,
    group_size: int,
    policy_version: int,
) -> Trajectories:
    """Return `n` completed trajectories.

    Token ids are the sampler's own, prompt first; nothing is decoded and encoded again. Log-probs are NaN on prompt
    tokens: no behaviour policy produced those.

    Args:
        prompts: the prompts that were sampled from, [P].
        prompt_ids: their token ids.
        completions: `n` completions with behaviour log-probs, each naming its prompt.
        texts: the completions as text, [n].
        grades: the rewards, [n].
        cursors: int64 [P], the cursor of each prompt; it is the group's id.
        group_size: members of a whole group; makes `trajectory_id` unique.
        policy_version: optimizer steps behind the behaviour policy's weights, where the completions do not say it.
    """
    owner = completions.prompt_index
    prompt_lengths = np.array([len(ids) for ids in prompt_ids])[owner]
    lengths = prompt_lengths + completions.lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    assistant = position >= np.repeat(prompt_lengths, lengths)

    tokens = np.empty(offsets[-1], dtype=np.int64)
    tokens[~assistant] = np.concatenate([prompt_ids[index] for index in owner])
    tokens[assistant] = completions.token_ids
    log_probs = np.full(offsets[-1], np.nan, dtype=np.float32)
    log_probs[assistant] = completions.log_probs

    groups = cursors[owner]
    reasons = np.where(completions.stopped, "stop", "length").tolist()
    reasons = [reason if item.error is None else "failed" for reason, item in zip(reasons, grades, strict=True)]

    return trajectory_rows(
        tokens,
        assistant,
        log_probs,
        offsets,
        rewards=[item.reward for item in grades],
        groups=groups,
        trajectory_ids=groups * group_size + completions.member,
        policy_version=policy_version,
        versions=completions.versions,
        num_prompt_tokens=prompt_lengths,
        finish_reasons=reasons,
        prompts=[prompts[index].text for index in owner],
        completions=list(texts),
        metas=[_meta(prompts[index], item) for index, item in zip(owner, grades, strict=True)],
    )


def trajectory_rows(
    tokens: np.ndarray,
    assistant: np.ndarray,
    log_probs: np.ndarray,
    offsets: np.ndarray,
    *,
    rewards: Sequence[float],
    groups: np.ndarray,
    trajectory_ids: np.ndarray,
    policy_version: int,
    versions: np.ndarray | None = None,
    num_prompt_tokens: np.ndarray,
    finish_reasons: list[str],
    prompts: list[str],
    completions: list[str],
    metas: list[str],
) -> Trajectories:
    """Return `n` trajectories given as flat columns.

    Args:
        tokens: int64 `[sum T]`; likewise `assistant` bool and `log_probs` float32.
        assistant: True at the tokens that the policy sampled.
        log_probs: NaN where the policy sampled nothing.
        offsets: int64 `[n + 1]`.
        rewards: one per trajectory, and so are the others.
        groups: int64.
        trajectory_ids: int64.
        policy_version: of all of them.
        versions: int64 `[n, 2]`, of the first and the last token of each, where weights were replaced on the way; a
            trajectory is as old as its first token.
        num_prompt_tokens: int64.
        finish_reasons: why each ended.
        prompts: text.
        completions: text.
        metas: JSON.
    """
    num, lengths = len(offsets) - 1, torch.from_numpy(np.diff(offsets))
    data = Trajectories(num)
    for key, values in ((keys.TOKENS, tokens), (keys.ASSISTANT_MASK, assistant), (keys.LOG_PROBS, log_probs)):
        data[key] = Flat(torch.from_numpy(values), lengths)
    data[keys.TASK_REWARD] = Flat(torch.tensor(rewards))
    scalars = {
        keys.GROUP_ID: groups,
        keys.TRAJECTORY_ID: trajectory_ids,
        keys.POLICY_VERSION: np.full(num, policy_version) if versions is None else versions[:, 0],
        keys.NUM_PROMPT_TOKENS: num_prompt_tokens,
        keys.DONE: np.ones(num, np.bool_),
        keys.CREATED_AT: np.full(num, time.time()),
    }
    if versions is not None:
        first, last = versions[:, 0], versions[:, 1]
        scalars[keys.NEWEST_POLICY_VERSION] = np.where(first < last, last, -1)
    for key, values in scalars.items():
        data[key] = Flat(torch.from_numpy(np.ascontiguousarray(values)))
    data[keys.FINISH_REASON], data[keys.PROMPT] = Text(finish_reasons), Text(prompts)
    data[keys.COMPLETION], data[keys.META] = Text(completions), Text(metas)
    return data


def _meta(prompt: Prompt, item: Grade) -> str:
    meta: dict[str, object] = {"answer": prompt.answer, "prompt": dict(prompt.meta)}
    if item.error is not None:
        meta["error"] = item.error
    return json.dumps(meta, ensure_ascii=False)
