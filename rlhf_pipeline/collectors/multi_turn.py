"""Conversations of several turns between a policy and a function that answers it (a tool, a user, an environment)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from tensordict import TensorDict

from rlhf_pipeline.data.rewards import describe_error
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories, td_of
from rlhf_pipeline.errors import DataError, DefinitionError, EngineError
from rlhf_pipeline.policies.adapters import Policy
from rlhf_pipeline.policies.chat import Message, decode_completion, encode_prompt, encode_reply

__all__ = ["Conversation", "Respond", "conversation_rows", "converse"]

Respond = Callable[[Sequence[Message]], Sequence[Message] | None]
"""Maps a conversation that ends with the assistant's message to the messages that answer it, or None at the end."""

_LARGEST_ID = 2**63 - 1
# Random streams must differ between turns and between members.
_TURN, _MEMBER = 1 << 48, 1 << 40


@dataclass(slots=True)
class Conversation:
    """One trajectory of one or several turns, with the sampler's own tokens.

    Attributes:
        prompt_index: which prompt of the call it belongs to.
        member: its index in the prompt's group.
        messages: the prompt's messages, then turns and replies. The assistant's content is decoded for reading.
        token_ids: prompt, sampled turns and replies, in one row that ends with a sampled token.
        assistant_mask: True at the sampled tokens.
        log_probs: of the sampled tokens, in nats at the sampling temperature; NaN elsewhere.
        num_prompt_tokens: tokens before the first sampled one.
        num_turns: turns of the assistant.
        finish_reason: "stop" (nothing more to answer), "length" (a turn or the row was cut), "turns" (the limit of
            turns), "failed" (`respond` raised, or its reply cannot be encoded).
        error: one line about that failure, or None.
        version_spans: which weights sampled which tokens: the place of a span's first token in the row, and the
            version; empty if the engine does not report all of them.
        group_id: of its group; drawn at random by each call of `converse`, so that no two calls share one.
        group_size: conversations of its prompt in that call.
        num_prompts: prompts in that call.
    """

    prompt_index: int
    member: int
    messages: list[dict[str, Any]]
    token_ids: list[int]
    assistant_mask: list[bool]
    log_probs: list[float]
    num_prompt_tokens: int
    num_turns: int = 0
    finish_reason: Literal["stop", "length", "turns", "failed"] = "stop"
    error: str | None = None
    version_spans: list[tuple[int, int]] = field(default_factory=list)
    group_id: int = field(default_factory=lambda: _new_group(1))
    group_size: int = 1
    num_prompts: int = 1
    _pending: list[int] = field(default_factory=list, repr=False)

    def _note_versions(self, sampled: list[tuple[int, int]]) -> None:
        """Add the spans of a turn that is about to be appended; without them, no version of the row is known."""
        known = bool(sampled) and (self.num_turns == 0 or bool(self.version_spans))
        if not known:
            self.version_spans = []
        for start, version in sampled if known else []:
            if not self.version_spans or self.version_spans[-1][1] != version:
                self.version_spans.append((len(self.token_ids) + start, version))

    def _append(self, ids: list[int], log_probs: list[float] | None) -> None:
        self.token_ids += ids
        self.assistant_mask += [log_probs is not None] * len(ids)
        self.log_probs += [float("nan")] * len(ids) if log_probs is None else log_probs


def converse(
    policy: Policy,
    prompts: Sequence[str | Sequence[Message]],
    respond: Respond,
    *,
    group_size: int = 1,
    max_turns: int = 8,
    max_new_tokens: int | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    stream_ids: Sequence[int] | None = None,
    tools: Sequence[Any] | None = None,
) -> list[Conversation]:
    """Run conversations between a policy and `respond` in parallel until each has ended.

    A sampled turn keeps its tokens and log-probs; only replies are encoded, with the text that the chat template puts
    around them. So the assistant mask is the sampler's own over all turns, and no row is tokenized again. The result is
    a pure function of the weights, the seed and the stream ids, except for the group ids, which are drawn at random so
    that groups of different calls and processes have different ids.

    Args:
        policy: with a tokenizer that has a chat template.
        prompts: chat messages; a string is a user message.
        respond: called with the conversation so far. An exception ends that conversation only.
        group_size: conversations per prompt.
        max_turns: the most turns of the assistant.
        max_new_tokens: of one turn; the policy's own when None.
        max_tokens: of a whole row; the model's positions when None.
        temperature: of sampling; the policy's own when None.
        seed: of sampling.
        stream_ids: one per prompt, for example its cursor; the index when None. They select the random stream, not the
            stored ids.
        tools: handed to the chat template.

    Returns:
        Conversations, prompt-major and member-minor.

    Raises:
        DefinitionError: a limit is out of range, there is no chat template, or it moves replies.
        EngineError: the engine aborted turns.

    >>> from rlhf_pipeline import scratch_policy
    >>> policy = scratch_policy("01+=?U:A", hidden_size=16, num_layers=1, num_heads=2)
    >>> policy.tokenizer.chat_template = (
    ...     "{% for m in messages %}{{ 'U:' if m.role == 'user' else 'A:' }}{{ m.content }}{% endfor %}"
    ...     "{% if add_generation_prompt %}A:{% endif %}")
    >>> def respond(messages):
    ...     return [{"role": "user", "content": "0?"}]
    >>> talk = converse(policy, ["1+1=?"], respond, max_turns=2, max_new_tokens=3, seed=1)[0]
    >>> talk.token_ids[:talk.num_prompt_tokens] == policy.tokenizer.encode("U:1+1=?A:")
    True
    >>> len(talk.token_ids) == len(talk.assistant_mask) == len(talk.log_probs), talk.assistant_mask[-1]
    (True, True)
    """
    if max_turns < 1 or group_size < 1:
        raise DefinitionError(f"max_turns is {max_turns} and group_size {group_size}; both must be at least 1.")
    limit = min(x for x in (max_tokens, policy.max_positions, 1 << 62) if x is not None)
    per_turn = policy.max_new_tokens if max_new_tokens is None else max_new_tokens
    streams = list(range(len(prompts)) if stream_ids is None else stream_ids)
    if len(streams) != len(prompts):
        raise DefinitionError(f"{len(streams)} stream ids for {len(prompts)} prompts; give one each.")
    talks = [
        talk
        for index, prompt in enumerate(prompts)
        for talk in _group(policy.tokenizer, index, prompt, group_size, len(prompts), tools, limit)
    ]
    live = talks
    for turn in range(max_turns):
        if not live:
            break
        done = policy.generate_ragged(
            [talk.token_ids + talk._pending for talk in live],
            max_new_tokens=[min(per_turn, limit - len(t.token_ids) - len(t._pending)) for t in live],
            temperature=temperature,
            seed=seed + turn * _TURN,
            stream_ids=[streams[talk.prompt_index] + talk.member * _MEMBER for talk in live],
        )
        if done.aborted is not None:
            raise EngineError(
                f"the engine aborted {int(done.aborted.sum())} of {len(done)} turns, so none of these conversations is "
                "whole. Did another client of the engine stop them? Call converse again: equal seeds sample the same."
            )
        going = []
        spans = [[]] * len(live) if done.spans is None else done.spans.lists()
        for talk, sampled, stopped, named in zip(live, done, done.stopped.tolist(), spans, strict=True):
            talk._append(talk._pending, None)
            talk._note_versions(named)
            talk._append(sampled.token_ids, sampled.log_probs.tolist())
            talk._pending = []
            talk.num_turns += 1
            before = list(talk.messages)
            content = decode_completion(policy.tokenizer, sampled.token_ids)
            talk.messages.append({"role": "assistant", "content": content})
            talk.finish_reason = "stop" if stopped else "length"
            replies = _answer(talk, respond) if stopped else []
            if not replies:
                continue
            try:
                pending = encode_reply(
                    policy.tokenizer,
                    before,
                    sampled.token_ids,
                    replies,
                    tools=tools,
                    end_token_ids=policy.eos_token_ids,
                )
            except DataError as error:
                talk.finish_reason, talk.error = "failed", str(error)
                continue
            if turn + 1 == max_turns or len(talk.token_ids) + len(pending) >= limit:
                talk.finish_reason = "turns" if turn + 1 == max_turns else "length"
                continue
            talk.messages += replies
            talk._pending = pending
            going.append(talk)
        live = going
    return talks


def _new_group(size: int) -> int:
    """Draw a group id that no other call draws; the ids of its members follow from it, see `_member_id`."""
    return secrets.randbelow((_LARGEST_ID - size) // size)


def _member_id(group: int, size: int, member: int) -> int:
    """Return the trajectory id of a member, `group * size + member`, as in a single-turn rollout."""
    return group * size + member


def _group(
    tokenizer: Any, index: int, prompt: str | Sequence[Message], size: int, num_prompts: int, tools: Any, limit: int
) -> list[Conversation]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    ids = encode_prompt(tokenizer, messages, tools=tools)
    if len(ids) >= limit:
        raise DefinitionError(f"Prompt {index} has {len(ids)} tokens; a row has at most {limit}. Leave it out.")
    group = _new_group(size)
    return [
        Conversation(
            prompt_index=index,
            member=member,
            messages=list(messages),
            token_ids=list(ids),
            assistant_mask=[False] * len(ids),
            log_probs=[float("nan")] * len(ids),
            num_prompt_tokens=len(ids),
            group_id=group,
            group_size=size,
            num_prompts=num_prompts,
        )
        for member in range(size)
    ]


def _answer(talk: Conversation, respond: Respond) -> list[dict[str, Any]]:
    """Return the messages that answer the last turn; empty at the end of the conversation."""
    try:
        replies = respond(tuple(talk.messages))
        return [] if replies is None else [dict(reply) for reply in replies]
    except Exception as error:  # noqa: BLE001 - user code may raise anything; it is recorded, not hidden
        talk.finish_reason, talk.error = "failed", describe_error(error)
        return []


def conversation_rows(
    conversations: Sequence[Conversation],
    rewards: Sequence[float],
    *,
    group_ids: Sequence[int] | None = None,
    policy_version: int = 0,
    tokenizer: Any = None,
) -> TensorDict:
    """Return conversations in the form of the write path: one row per trajectory, batch size `[n]`.

    Args:
        conversations: as `converse` returns them, whole groups or some of their members.
        rewards: one per conversation; NaN for a failed one.
        group_ids: one per prompt of the call of `converse`, for example its cursor, unique in the store. None takes
            the conversations' own, which are unique. A trajectory's id is `group_id * group_size + member`, so the
            rows of a group may be made in several calls.
        policy_version: optimizer steps behind the weights that sampled them, if the engine reports no versions. A
            conversation is as old as its oldest token; one that several versions sampled also has `version_spans`.
        tokenizer: writes `prompt` and `completion` as text, special tokens included; without one they are empty.

    Raises:
        DefinitionError: the number of rewards or group ids is wrong, an id is out of range, or two conversations would
            have the same id.
    """
    n = len(conversations)
    if len(rewards) != n:
        raise DefinitionError(f"{len(rewards)} rewards for {n} conversations; give one each.")
    given = None if group_ids is None else [int(group) for group in group_ids]
    named = [talk.group_id if given is None else _given(given, talk) for talk in conversations]
    ids = [_member_id(group, t.group_size, t.member) for group, t in zip(named, conversations, strict=True)]
    _check_ids(conversations, named, ids)

    def text(ids: Sequence[int]) -> str:
        return "" if tokenizer is None else tokenizer.decode(list(ids), skip_special_tokens=False)

    def flat(name: str, dtype: Any) -> np.ndarray:
        parts = [np.array(getattr(talk, name), dtype=dtype) for talk in conversations]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    spans = [span for talk in conversations for span in talk.version_spans]
    counts = np.array([len(talk.version_spans) for talk in conversations], np.int64)
    metas = []
    for talk in conversations:
        meta: dict[str, Any] = {"messages": talk.messages, "turns": talk.num_turns}
        metas.append(json.dumps(meta | ({"error": talk.error} if talk.error else {}), ensure_ascii=False))
    rows = Trajectories.completed(
        np.array([len(talk.token_ids) for talk in conversations], np.int64),
        tokens=flat("token_ids", np.int64),
        assistant=flat("assistant_mask", np.bool_),
        log_probs=flat("log_probs", np.float32),
        num_prompt_tokens=np.array([talk.num_prompt_tokens for talk in conversations], np.int64),
        rewards=rewards,
        group_ids=named,
        trajectory_ids=ids,
        policy_versions=np.full(n, policy_version),
        version_spans=Flat(torch.tensor(spans), torch.from_numpy(counts)) if spans else None,
        finish_reasons=[talk.finish_reason for talk in conversations],
        prompts=[text(talk.token_ids[: talk.num_prompt_tokens]) for talk in conversations],
        completions=[text(talk.token_ids[talk.num_prompt_tokens :]) for talk in conversations],
        metas=metas,
    )
    texts = {key: column.items for key, column in rows.items() if isinstance(column, Text)}
    data = td_of(Trajectories(n, {key: column for key, column in rows.items() if key not in texts}))
    for key, items in texts.items():  # one list per key: stacking single strings costs 20 times as much
        data.set_non_tensor(key, items)
    return cast(TensorDict, data)


def _given(group_ids: Sequence[int], talk: Conversation) -> int:
    if len(group_ids) != talk.num_prompts:
        raise DefinitionError(f"{len(group_ids)} group ids for {talk.num_prompts} prompts; give one each.")
    return group_ids[talk.prompt_index]


def _check_ids(conversations: Sequence[Conversation], groups: Sequence[int], ids: Sequence[int]) -> None:
    owners: dict[int, int] = {}
    seen: set[int] = set()
    for talk, group, name in zip(conversations, groups, ids, strict=True):
        if group < 0 or name > _LARGEST_ID:
            raise DefinitionError(
                f"the group id {group} is out of range: from 0 to {_LARGEST_ID // talk.group_size - 1} for groups of "
                f"{talk.group_size}."
            )
        if owners.setdefault(group, talk.prompt_index) != talk.prompt_index:
            raise DefinitionError(f"the group id {group} is given to two prompts; give each its own.")
        if name in seen or talk.member >= talk.group_size:
            raise DefinitionError(
                f"two conversations would have the trajectory id {name} (group {group}, member {talk.member} of "
                f"{talk.group_size}). Give each conversation once, with its own member and group_size."
            )
        seen.add(name)
