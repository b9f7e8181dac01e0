"""The samples of a rollout, of one or several turns, in the form of the write path: columns by key."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from rlhf_pipeline.collectors.conversations import Conversation, ConversationRow
from rlhf_pipeline.collectors.grading import Grade
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.episodes import last_rows, row_names
from rlhf_pipeline.data.keys import POLICY_ROLE, Key
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.rewards import Reward, as_column, of_turn
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories, concat, version_range
from rlhf_pipeline.policies.engines.protocol import RaggedCompletions

OWNER: Final[Key] = "prompt_index"
"""int64 [n], the prompt of the rollout that each row continues; used until `trajectories` assigns its group."""
MEMBER: Final[Key] = "member"
"""int64 [n], the position of each row in its group; used until then."""


def sampled_completions(
    prompt_ids: Sequence[Sequence[int]],
    completions: RaggedCompletions,
    texts: Sequence[str],
    prompt_texts: Sequence[str | None],
) -> Trajectories:
    """Return rows of one turn, prompt first; text is never encoded again.

    Args:
        prompt_ids: token ids of the prompts, [P].
        completions: `n` completions with behaviour log-probs, each naming its prompt.
        texts: the completions as text, [n].
        prompt_texts: the prompts as the model reads them, [P]; None where no reward function asks for it.
    """
    owner, spans = completions.prompt_index, completions.spans
    prompt_lengths = np.array([len(ids) for ids in prompt_ids])[owner]
    lengths = prompt_lengths + completions.lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    assistant = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) >= np.repeat(prompt_lengths, lengths)

    tokens = np.empty(offsets[-1], dtype=np.int64)
    tokens[~assistant] = np.concatenate([prompt_ids[index] for index in owner])
    tokens[assistant] = completions.token_ids
    log_probs = np.full(offsets[-1], np.nan, dtype=np.float32)
    log_probs[assistant] = completions.log_probs
    log_mass = None
    if completions.support_log_mass is not None:
        log_mass = np.zeros_like(log_probs)
        log_mass[assistant] = completions.support_log_mass
    rows = _rows(lengths, prompt_lengths, tokens, assistant, log_probs, log_mass, owner, completions.member)
    rows[keys.FINISH_REASON] = Text(np.where(completions.stopped, "stop", "length").tolist())
    rows[keys.COMPLETION] = Text(list(texts))
    rows[keys.META] = Text(
        [{} if prompt_texts[index] is None else {"prompt_text": prompt_texts[index]} for index in owner]
    )
    if spans is not None:
        rows[keys.VERSION_SPANS] = Flat(torch.from_numpy(spans.placed(prompt_lengths)), torch.from_numpy(spans.counts))
    return rows


def sampled_conversations(
    conversations: Sequence[Conversation], text_of: Callable[[Sequence[int]], str], *, group_size: int
) -> Trajectories:
    """Return rows of several turns; the rows of a conversation are adjacent.

    Args:
        conversations: all members of each group.
        text_of: turns the tokens after a prompt into text.
        group_size: members of a group.
    """
    parts = [(number, conversation, conversation.sampled_rows) for number, conversation in enumerate(conversations)]
    of = [row.row for _, _, rows in parts for row in rows if row.row is not None]
    lengths = np.array([len(row.ids) for row in of], np.int64)
    tokens = np.array([token for row in of for token in row.ids], np.int64)
    log_probs = np.array([value for row in of for value in row.log_probs], np.float32)
    log_mass = np.array([value for row in of for value in row.log_mass], np.float32)
    assistant = np.array([is_sampled for row in of for is_sampled in row.mask], np.bool_)
    sizes = [len(rows) for _, _, rows in parts]
    owner, member = np.divmod(np.repeat([number for number, _, _ in parts], sizes).astype(np.int64), group_size)
    prompt_lengths = np.array([row.num_prompt for row in of], np.int64)
    mass = log_mass if len(log_mass) else None
    rows = _rows(lengths, prompt_lengths, tokens, assistant, log_probs, mass, owner, member)
    rows[keys.FINISH_REASON] = Text([conversation.finish_reason for _, conversation, each in parts for _ in each])
    rows[keys.COMPLETION] = Text([text_of(row.ids[row.num_prompt :]) for row in of])
    rows[keys.META] = Text([_meta(conversation, row) for _, conversation, each in parts for row in each])
    if max(sizes, default=1) > 1:
        rows |= _episodes(sizes)
    rows[keys.TURN_SPANS] = _spans([row.turn_spans for row in of])
    if all(row.version_spans for row in of):
        rows[keys.VERSION_SPANS] = _spans([row.version_spans for row in of])
    return rows


def _episodes(sizes: Sequence[int]) -> dict[Key, Flat]:
    """Return the columns that distinguish the rows of episodes of these sizes, except the episode's id."""
    size = np.repeat(np.array(sizes, np.int32), sizes)
    position = np.concatenate([np.arange(each, dtype=np.int32) for each in sizes])
    return {keys.EPISODE_ROW: Flat(torch.from_numpy(position)), keys.EPISODE_SIZE: Flat(torch.from_numpy(size))}


def _rows(
    lengths: npt.NDArray[np.int64],
    prompt_lengths: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    assistant: npt.NDArray[np.bool_],
    log_probs: npt.NDArray[np.float32],
    log_mass: npt.NDArray[np.float32] | None,
    owner: npt.NDArray[np.int64],
    member: npt.NDArray[np.int64],
) -> Trajectories:
    """Return the columns of numbers; log-probs become those under the whole distribution, as a policy scores them."""
    shared = torch.from_numpy(lengths)
    per_token = {keys.TOKENS: tokens, keys.ASSISTANT_MASK: assistant, keys.LOG_PROBS: log_probs}
    if log_mass is not None:
        per_token |= {keys.LOG_PROBS: log_probs + log_mass, keys.SUPPORT_LOG_MASS: log_mass}
    single = {keys.NUM_PROMPT_TOKENS: prompt_lengths, OWNER: owner, MEMBER: member}
    return Trajectories(
        len(lengths),
        {key: Flat(torch.from_numpy(values), shared) for key, values in per_token.items()}
        | {key: Flat(torch.from_numpy(values)) for key, values in single.items()},
    )


def num_turns(rows: Trajectories) -> npt.NDArray[np.int64] | None:
    """Return the turns of the policy in each row, int64 [n]; None for rows of one turn."""
    spans = rows.get(keys.TURN_SPANS)
    if not isinstance(spans, Flat) or spans.lengths is None:
        return None
    roles, counts = spans.values.numpy()[:, 1], spans.lengths.numpy()
    return np.bincount(np.repeat(np.arange(rows.n), counts), roles == POLICY_ROLE, rows.n).astype(np.int64)


def joined(parts: Sequence[Trajectories]) -> Trajectories:
    """Return the rows of several rounds as those of one; prompts are numbered on, and spans that a part lacks go."""
    if any(keys.EPISODE_SIZE in part for part in parts):
        parts = [
            part if keys.EPISODE_SIZE in part else Trajectories(part.n, part | _episodes([1] * part.n))
            for part in parts
        ]
    before = np.cumsum([0, *(int(part.numbers(OWNER).max(initial=-1)) + 1 for part in parts)]).tolist()
    shared_keys = set[Key].intersection(*(set(part) for part in parts))
    numbered = [
        Trajectories(
            part.n,
            {key: part[key] for key in shared_keys} | {OWNER: Flat(torch.from_numpy(part.numbers(OWNER) + number))},
        )
        for part, number in zip(parts, before, strict=False)
    ]
    return concat(numbered)


def _meta(conversation: Conversation, row: ConversationRow) -> dict[str, Any]:
    """Return what `meta` holds of a row: its messages and turns; with the last one, what the episode came to."""
    meta: dict[str, Any] = {
        "messages": row.messages,
        "turn_rewards": [conversation.turn_rewards[turn] for turn in row.turns],
    }
    if row is not conversation.at:
        return meta
    graded = {
        "completion": row.last_text,
        "num_asked": row.num_asked,
        "rewards": conversation.rewards,
    }
    graded |= {} if conversation.prompt_text is None else {"prompt_text": conversation.prompt_text}
    beside = {
        "info": conversation.info,
        "closing": conversation.closing,
        "retried": conversation.retried,
        "call_errors": conversation.call_errors,
        "cut_replies": conversation.cut_replies,
        "edited_histories": conversation.edited_histories,
        "fallback_replies": conversation.fallback_replies,
    }
    return meta | {"graded": graded} | {name: value for name, value in beside.items() if value}


def _spans(several: Sequence[Sequence[tuple[int, int]]]) -> Flat:
    """Return the pairs of all rows, `[sum, 2]`, with a count per row."""
    pairs = [pair for spans in several for pair in spans]
    return Flat(
        torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
        torch.tensor([len(pairs_of_row) for pairs_of_row in several]),
    )


def trajectories(
    prompts: Sequence[Prompt],
    rows: Trajectories,
    grades: Sequence[Grade],
    *,
    groups: npt.NDArray[np.int64],
    group_size: int,
    policy_version: int,
    digests: Mapping[int, int] | None = None,
) -> Trajectories:
    """Return `n` completed trajectories, created now.

    Args:
        prompts: the prompts that were sampled from, [P].
        rows: the sampled rows, [n].
        grades: the rewards, one for each episode.
        groups: int64 [P], the id of each prompt's group.
        group_size: members of a whole group; makes `trajectory_id` unique.
        policy_version: optimizer steps behind the behaviour policy's weights, if the rows do not record it.
        digests: of the published weights, by version; a missing digest is unknown.
    """
    out, owner = Trajectories(rows.n, rows), rows.numbers(OWNER)
    del out[OWNER], out[MEMBER]
    last, of = last_rows(rows), episode_of(rows)
    # A prompt's own, the same for each member without an error.
    prompt_metas: list[dict[str, Any]] = [
        {"answer": prompt.answer, "prompt": prompt.meta}
        | ({} if prompt.messages is None else {"messages": prompt.messages})
        for prompt in prompts
    ]
    shared = [json.dumps(meta, ensure_ascii=False) for meta in prompt_metas]
    beside = [
        {**more, **_beside(grades[place], more)} if is_last else more
        for more, place, is_last in zip(rows.texts(keys.META), of, last, strict=True)
    ]
    out[keys.META] = Text(
        [
            shared[index] if not more else json.dumps({**prompt_metas[index], **more}, ensure_ascii=False)
            for index, more in zip(owner, beside, strict=True)
        ]
    )
    out[keys.PROMPT] = Text([prompts[index].text for index in owner])
    reasons = zip(rows.texts(keys.FINISH_REASON), of, strict=True)
    out[keys.FINISH_REASON] = Text(["failed" if grades[place].broken else reason for reason, place in reasons])
    episodes = groups[owner] * group_size + rows.numbers(MEMBER)
    single = {
        keys.TASK_REWARD: np.where(
            last, np.array([item.reward for item in grades], np.float32)[of], np.float32(np.nan)
        ),
        keys.GROUP_ID: groups[owner],
        keys.TRAJECTORY_ID: episodes,
        keys.POLICY_VERSION: np.full(rows.n, policy_version),
        keys.DONE: np.ones(rows.n, np.bool_),
        keys.CREATED_AT: np.full(rows.n, time.time()),
    }
    if keys.EPISODE_ROW in rows:
        single |= {keys.TRAJECTORY_ID: row_names(episodes, rows.numbers(keys.EPISODE_ROW)), keys.EPISODE_ID: episodes}
    spans = out.pop(keys.VERSION_SPANS, None)
    if isinstance(spans, Flat):
        oldest, newest, ragged = version_range(single[keys.POLICY_VERSION], spans, of)
        single |= {keys.POLICY_VERSION: oldest, keys.NEWEST_POLICY_VERSION: newest}
        out |= {} if ragged is None else {keys.VERSION_SPANS: ragged}
    if digests is not None:
        version_digests = [digests.get(version, 0) for version in single[keys.POLICY_VERSION].tolist()]
        single[keys.POLICY_DIGEST] = np.array(version_digests, np.int64)
    out |= {key: Flat(torch.from_numpy(values)) for key, values in single.items()}
    return out


def episode_of(rows: Trajectories) -> npt.NDArray[np.int64]:
    """Return the number of each row's episode in the batch, int64 [n], from 0."""
    last = last_rows(rows)
    return np.cumsum(last) - last


def turn_rewards(rows: Trajectories, grades: Sequence[Grade], rewards: Sequence[Reward]) -> dict[Key, Flat]:
    """Return the rewards of the turns of conversations, float32, with a count per row: weighted, and each by name.

    What an episode's reward has beside the environment's counts at its last turn.
    """
    weighted, names, metas = list[list[float]](), dict[str, None](), rows.texts(keys.META)
    earlier = 0.0
    for meta, place, is_last in zip(metas, episode_of(rows), last_rows(rows), strict=True):
        names |= dict.fromkeys(name for gains in meta["turn_rewards"] for name in gains)
        each = [of_turn(rewards, gains) for gains in meta["turn_rewards"]]
        if is_last:
            each[-1:] = [grades[place].reward - (earlier + sum(each[:-1]))]
        earlier = 0.0 if is_last else earlier + sum(each)
        weighted.append(each)
    lengths = torch.tensor([len(row) for row in weighted])
    flat = torch.tensor([value for row in weighted for value in row])
    columns: dict[Key, Flat] = {keys.TURN_REWARDS: Flat(flat, lengths)}
    for name in sorted(names):
        by_turn = [[gains.get(name, 0.0) for gains in meta["turn_rewards"]] for meta in metas]
        values = [value for gains, row in zip(by_turn, weighted, strict=True) for value in gains or [0.0] * len(row)]
        if (column := as_column(name)) is not None:
            columns[keys.turn_reward_column(column)] = Flat(torch.tensor(values, dtype=torch.float32), lengths)
    return columns


def _beside(item: Grade, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `meta` holds of a grade, beside what it has of the conversation."""
    meta: dict[str, Any] = {} if item.error is None else {"error": item.error}
    meta |= {"rewards": item.parts} if item.parts else {}
    return meta | ({"retried": [*more.get("retried", ()), *item.retried]} if item.retried else {})
