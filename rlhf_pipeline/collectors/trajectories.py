"""From sampled completions to the TensorDict that the write path takes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_pipeline import keys
from rlhf_pipeline.collectors.grading import Grade
from rlhf_pipeline.policies.slot_engine import RaggedCompletions
from rlhf_pipeline.prompts import Prompt


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
) -> TensorDict:
    """Return `n` completed trajectories as one TensorDict with jagged leaves, batch size `[n]`.

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
        policy_version: optimizer steps behind the behaviour policy's weights.
    """
    num, owner = len(completions), completions.prompt_index
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

    def jagged(values: np.ndarray) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), torch.from_numpy(offsets))

    data = TensorDict(batch_size=[num])
    data[keys.TOKENS] = jagged(tokens)
    data[keys.ASSISTANT_MASK] = jagged(assistant)
    data[keys.LOG_PROBS] = jagged(log_probs)
    data[keys.TASK_REWARD] = torch.tensor([item.reward for item in grades])
    data[keys.GROUP_ID] = torch.from_numpy(groups)
    data[keys.TRAJECTORY_ID] = torch.from_numpy(groups * group_size + completions.member)
    data[keys.POLICY_VERSION] = torch.full((num,), policy_version, dtype=torch.int64)
    data[keys.NUM_PROMPT_TOKENS] = torch.from_numpy(prompt_lengths)
    data[keys.DONE] = torch.ones(num, dtype=torch.bool)
    data[keys.CREATED_AT] = torch.full((num,), time.time(), dtype=torch.float64)
    # One list per key: a stack of single strings costs 20 times as much.
    data.set_non_tensor(keys.FINISH_REASON, reasons)
    data.set_non_tensor(keys.PROMPT, [prompts[index].text for index in owner])
    data.set_non_tensor(keys.COMPLETION, list(texts))
    data.set_non_tensor(keys.META, [_meta(prompts[index], item) for index, item in zip(owner, grades, strict=True)])
    return data


def select(completions: RaggedCompletions, rows: np.ndarray) -> RaggedCompletions:
    """Return the completions whose flag in `rows` (bool [n]) is set."""
    tokens = np.repeat(rows, completions.lengths)
    return RaggedCompletions(
        token_ids=completions.token_ids[tokens],
        log_probs=completions.log_probs[tokens],
        lengths=completions.lengths[rows],
        prompt_index=completions.prompt_index[rows],
        member=completions.member[rows],
        stopped=completions.stopped[rows],
    )


def _meta(prompt: Prompt, item: Grade) -> str:
    meta: dict[str, object] = {"answer": prompt.answer, "prompt": dict(prompt.meta)}
    if item.error is not None:
        meta["error"] = item.error
    return json.dumps(meta, ensure_ascii=False)
