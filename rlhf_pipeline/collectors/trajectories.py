"""From sampled completions to the TensorDict that the write path takes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from rlhf_pipeline import keys
from rlhf_pipeline.collectors.grading import Grade
from rlhf_pipeline.policies.slot_engine import Completion
from rlhf_pipeline.prompts import Prompt


def trajectories(
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    texts: Sequence[str],
    grades: Sequence[Grade],
    *,
    group_ids: Sequence[int],
    group_size: int,
    policy_version: int,
) -> TensorDict:
    """Return `n` completed trajectories as one TensorDict with jagged leaves, batch size `[n]`.

    Token ids are the sampler's own, prompt first; nothing is decoded and encoded again. Log-probs are NaN on prompt
    tokens: no behaviour policy produced those.

    Args:
        prompts: the prompt of each trajectory.
        prompt_ids: its token ids.
        completions: what the policy sampled, with behaviour log-probs.
        texts: the completions as text.
        grades: the rewards.
        group_ids: the group of each trajectory.
        group_size: members of a whole group; makes `trajectory_id` unique.
        policy_version: optimizer steps behind the behaviour policy's weights.
    """
    num = len(completions)
    prompt_lengths = torch.tensor([len(ids) for ids in prompt_ids])
    completion_lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    lengths = prompt_lengths + completion_lengths
    offsets = torch.zeros(num + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    position = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], lengths)
    assistant = position >= torch.repeat_interleave(prompt_lengths, lengths)

    tokens = torch.empty(len(assistant), dtype=torch.int64)
    tokens[~assistant] = torch.tensor([token for ids in prompt_ids for token in ids], dtype=torch.int64)
    tokens[assistant] = torch.cat([torch.as_tensor(completion.token_ids) for completion in completions]).long()
    log_probs = torch.full((len(assistant),), torch.nan)
    log_probs[assistant] = torch.cat([torch.as_tensor(completion.log_probs) for completion in completions]).float()

    rewards = torch.tensor([item.reward for item in grades])
    groups = torch.tensor(group_ids, dtype=torch.int64)
    members = torch.tensor([completion.member for completion in completions], dtype=torch.int64)
    reasons = [
        completion.finish_reason if item.error is None else "failed"
        for completion, item in zip(completions, grades, strict=True)
    ]
    data = TensorDict(batch_size=[num])
    data[keys.TOKENS] = _jagged(tokens, offsets)
    data[keys.ASSISTANT_MASK] = _jagged(assistant, offsets)
    data[keys.LOG_PROBS] = _jagged(log_probs, offsets)
    data[keys.TASK_REWARD] = rewards
    data[keys.GROUP_ID] = groups
    data[keys.TRAJECTORY_ID] = groups * group_size + members
    data[keys.POLICY_VERSION] = torch.full((num,), policy_version, dtype=torch.int64)
    data[keys.NUM_PROMPT_TOKENS] = prompt_lengths
    data[keys.DONE] = torch.ones(num, dtype=torch.bool)
    data[keys.CREATED_AT] = torch.full((num,), time.time(), dtype=torch.float64)
    data[keys.FINISH_REASON] = NonTensorStack(*reasons)
    data[keys.PROMPT] = NonTensorStack(*(prompt.text for prompt in prompts))
    data[keys.COMPLETION] = NonTensorStack(*texts)
    data[keys.META] = NonTensorStack(*map(_meta, prompts, grades))
    return data


def _jagged(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _meta(prompt: Prompt, item: Grade) -> str:
    meta: dict[str, object] = {"answer": prompt.answer, "prompt": dict(prompt.meta)}
    if item.error is not None:
        meta["error"] = item.error
    return json.dumps(meta, ensure_ascii=False)
