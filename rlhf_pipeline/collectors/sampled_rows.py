"""What a rollout sampled, of one turn or several, and its form for the write path."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlhf_pipeline.collectors.conversations import Conversation
from rlhf_pipeline.collectors.grading import Grade
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.keys import POLICY_ROLE, Key
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.rewards import Reward, as_column, of_turn
from rlhf_pipeline.data.trajectories import Flat, Trajectories
from rlhf_pipeline.policies.engines.protocol import RaggedCompletions


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRows:
    """`n` sampled rows, prompt first; text is never encoded again.

    Attributes:
        lengths: int64 [n], tokens of each row.
        num_prompt_tokens: int64 [n].
        tokens: int64 [sum(lengths)].
        assistant: bool [sum(lengths)], True where the policy sampled the token.
        log_probs: float32 [sum(lengths)], NaN elsewhere; under the whole distribution, as a policy scores them.
        log_mass: float32 [sum(lengths)], of truncated sampling; None without.
        prompt_index: int64 [n].
        member: int64 [n].
        reasons: [n], why each ended.
        texts: [n], what is stored as `completion`.
        metas: [n], what `meta` holds beside the prompt's own.
        version_spans: place and version of each span, with a count per row; None if no version is known.
        turn_spans: place and role of each turn, with a count per row; None for rows of one turn.
    """

    lengths: npt.NDArray[np.int64]
    num_prompt_tokens: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    assistant: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[np.float32]
    log_mass: npt.NDArray[np.float32] | None
    prompt_index: npt.NDArray[np.int64]
    member: npt.NDArray[np.int64]
    reasons: Sequence[str]
    texts: Sequence[str]
    metas: Sequence[Mapping[str, Any]]
    version_spans: Flat | None
    turn_spans: Flat | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def turns(self) -> npt.NDArray[np.int64] | None:
        """The turns of the policy in each row, int64 [n]; None for rows of one turn."""
        if self.turn_spans is None or self.turn_spans.lengths is None:
            return None
        roles, counts = self.turn_spans.values.numpy()[:, 1], self.turn_spans.lengths.numpy()
        return np.bincount(np.repeat(np.arange(len(counts)), counts), roles == POLICY_ROLE, len(counts)).astype(
            np.int64
        )


def drawn_completions(
    prompt_ids: Sequence[Sequence[int]],
    completions: RaggedCompletions,
    texts: Sequence[str],
    shown: Sequence[str | None],
) -> SampledRows:
    """Return rows of one turn.

    Args:
        prompt_ids: token ids of the prompts, [P].
        completions: `n` completions with behaviour log-probs, each naming its prompt.
        texts: the completions as text, [n].
        shown: the prompts as the model reads them, [P]; None where no reward function asks for it.
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
    log_mass = None
    if completions.support_log_mass is not None:
        log_mass = np.zeros_like(log_probs)
        log_mass[assistant] = completions.support_log_mass
        log_probs += log_mass
    spans = completions.spans
    return SampledRows(
        lengths=lengths,
        num_prompt_tokens=prompt_lengths,
        tokens=tokens,
        assistant=assistant,
        log_probs=log_probs,
        log_mass=log_mass,
        prompt_index=owner,
        member=completions.member,
        reasons=np.where(completions.stopped, "stop", "length").tolist(),
        texts=texts,
        metas=[{} if shown[index] is None else {"prompt_text": shown[index]} for index in owner],
        version_spans=None
        if spans is None
        else Flat(torch.from_numpy(spans.placed(prompt_lengths)), torch.from_numpy(spans.counts)),
    )


def drawn_conversations(conversations: Sequence[Conversation], texts: Sequence[str], *, group_size: int) -> SampledRows:
    """Return rows of several turns."""
    rows = [conversation.row for conversation in conversations if conversation.row is not None]
    lengths = np.array([len(row.ids) for row in rows], np.int64)
    log_probs = np.array([value for row in rows for value in row.log_probs], np.float32)
    truncated = any(row.log_mass for row in rows)
    log_mass = np.array([value for row in rows for value in row.log_mass], np.float32) if truncated else None
    assistant = np.zeros(int(lengths.sum()), np.bool_)
    for row, begin in zip(rows, (np.cumsum(lengths) - lengths).tolist(), strict=True):
        ends = [start for start, _ in row.turn_spans[1:]] + [len(row.ids)]
        for (start, role), end in zip(row.turn_spans, ends, strict=True):
            assistant[begin + start : begin + end] = role == POLICY_ROLE
    place = np.arange(len(rows))
    versioned = all(row.version_spans for row in rows)
    return SampledRows(
        lengths=lengths,
        num_prompt_tokens=np.array([row.num_prompt for row in rows], np.int64),
        tokens=np.array([token for row in rows for token in row.ids], np.int64),
        assistant=assistant,
        log_probs=log_probs if log_mass is None else log_probs + log_mass,
        log_mass=log_mass,
        prompt_index=place // group_size,
        member=place % group_size,
        reasons=[conversation.finish_reason for conversation in conversations],
        texts=texts,
        metas=[_meta(conversation) for conversation in conversations],
        version_spans=_spans([row.version_spans for row in rows]) if versioned else None,
        turn_spans=_spans([row.turn_spans for row in rows]),
    )


def joined(parts: Sequence[SampledRows]) -> SampledRows:
    """Return the rows of several rounds as those of one; prompts are numbered on."""
    num_prompts = np.cumsum([0, *(int(part.prompt_index.max(initial=-1)) + 1 for part in parts)])
    masses = [np.zeros_like(part.log_probs) if part.log_mass is None else part.log_mass for part in parts]
    return SampledRows(
        lengths=np.concatenate([part.lengths for part in parts]),
        num_prompt_tokens=np.concatenate([part.num_prompt_tokens for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        assistant=np.concatenate([part.assistant for part in parts]),
        log_probs=np.concatenate([part.log_probs for part in parts]),
        log_mass=None if all(part.log_mass is None for part in parts) else np.concatenate(masses),
        prompt_index=np.concatenate(
            [part.prompt_index + before for part, before in zip(parts, num_prompts[:-1], strict=True)]
        ),
        member=np.concatenate([part.member for part in parts]),
        reasons=[reason for part in parts for reason in part.reasons],
        texts=[text for part in parts for text in part.texts],
        metas=[meta for part in parts for meta in part.metas],
        version_spans=_joined_spans([part.version_spans for part in parts]),
        turn_spans=_joined_spans([part.turn_spans for part in parts]),
    )


def _joined_spans(parts: Sequence[Flat | None]) -> Flat | None:
    """Return the spans of all rows; None where those of a part are not known."""
    known = [(one.values, one.lengths) for one in parts if one is not None and one.lengths is not None]
    if len(known) < len(parts):
        return None
    values, lengths = zip(*known, strict=True)
    return Flat(torch.cat(values), torch.cat(lengths))


def _meta(conversation: Conversation) -> dict[str, Any]:
    graded = {
        "completion": conversation.last_text,
        "num_asked": conversation.num_asked,
        "rewards": conversation.rewards,
    }
    graded |= {} if conversation.prompt_text is None else {"prompt_text": conversation.prompt_text}
    known = {"messages": conversation.messages, "turn_rewards": conversation.turn_rewards, "graded": graded}
    beside = {
        "info": conversation.info,
        "retried": conversation.retried,
        "call_errors": conversation.call_errors,
        "cut_replies": conversation.cut_replies,
    }
    return known | {name: value for name, value in beside.items() if value}


def _spans(several: Sequence[Sequence[tuple[int, int]]]) -> Flat:
    """Return the pairs of all rows, `[sum, 2]`, with a count per row."""
    pairs = [pair for spans in several for pair in spans]
    return Flat(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2), torch.tensor([len(one) for one in several]))


def trajectories(
    prompts: Sequence[Prompt],
    drawn: SampledRows,
    grades: Sequence[Grade],
    *,
    groups: npt.NDArray[np.int64],
    group_size: int,
    policy_version: int,
    digests: Mapping[int, int] | None = None,
) -> Trajectories:
    """Return `n` completed trajectories.

    Args:
        prompts: the prompts that were sampled from, [P].
        drawn: the sampled rows, [n].
        grades: the rewards, [n].
        groups: int64 [P], the id of each prompt's group.
        group_size: members of a whole group; makes `trajectory_id` unique.
        policy_version: optimizer steps behind the behaviour policy's weights, if the rows do not record it.
        digests: of the published weights, by version; a missing digest is unknown.
    """
    owner = drawn.prompt_index
    # A prompt's own, the same for each member without an error.
    own: list[dict[str, Any]] = [
        {"answer": prompt.answer, "prompt": prompt.meta}
        | ({} if prompt.messages is None else {"messages": prompt.messages})
        for prompt in prompts
    ]
    shared = [json.dumps(meta, ensure_ascii=False) for meta in own]
    beside = [{**more, **_beside(item, more)} for more, item in zip(drawn.metas, grades, strict=True)]
    out = Trajectories.completed(
        drawn.lengths,
        tokens=drawn.tokens,
        assistant=drawn.assistant,
        log_probs=drawn.log_probs,
        num_prompt_tokens=drawn.num_prompt_tokens,
        rewards=[item.reward for item in grades],
        group_ids=groups[owner],
        trajectory_ids=groups[owner] * group_size + drawn.member,
        policy_versions=np.full(len(drawn), policy_version),
        version_spans=drawn.version_spans,
        finish_reasons=[
            "failed" if item.broken else reason for reason, item in zip(drawn.reasons, grades, strict=True)
        ],
        prompts=[prompts[index].text for index in owner],
        completions=drawn.texts,
        metas=[
            shared[index] if not more else json.dumps({**own[index], **more}, ensure_ascii=False)
            for index, more in zip(owner, beside, strict=True)
        ],
    )
    if drawn.log_mass is not None:
        out[keys.SUPPORT_LOG_MASS] = Flat(torch.from_numpy(drawn.log_mass), torch.from_numpy(drawn.lengths))
    if drawn.turn_spans is not None:
        out[keys.TURN_SPANS] = drawn.turn_spans
    if digests is not None:
        oldest: Any = out[keys.POLICY_VERSION]
        out[keys.POLICY_DIGEST] = Flat(torch.tensor([digests.get(version, 0) for version in oldest.values.tolist()]))
    return out


def turn_rewards(drawn: SampledRows, grades: Sequence[Grade], rewards: Sequence[Reward]) -> dict[Key, Flat]:
    """Return the rewards of the turns of conversations, float32, with a count per row: weighted, and each by name.

    What a trajectory's reward has beside the environment's counts at its last turn.
    """
    rows, names = list[list[float]](), dict[str, None]()
    for meta, grade in zip(drawn.metas, grades, strict=True):
        names |= dict.fromkeys(name for gains in meta["turn_rewards"] for name in gains)
        before = [of_turn(rewards, gains) for gains in meta["turn_rewards"][:-1]]
        rows.append([*before, grade.reward - sum(before)])
    lengths = torch.tensor([len(row) for row in rows])
    found: dict[Key, Flat] = {keys.TURN_REWARDS: Flat(torch.tensor([value for row in rows for value in row]), lengths)}
    for name in sorted(names):
        each = [[gains.get(name, 0.0) for gains in meta["turn_rewards"]] for meta in drawn.metas]
        values = [value for given, row in zip(each, rows, strict=True) for value in given or [0.0] * len(row)]
        if (column := as_column(name)) is not None:
            found[keys.turn_reward_column(column)] = Flat(torch.tensor(values, dtype=torch.float32), lengths)
    return found


def _beside(item: Grade, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `meta` holds of a grade, beside what it has of the conversation."""
    found: dict[str, Any] = {} if item.error is None else {"error": item.error}
    found |= {"rewards": item.parts} if item.parts else {}
    return found | ({"retried": [*more.get("retried", ()), *item.retried]} if item.retried else {})
