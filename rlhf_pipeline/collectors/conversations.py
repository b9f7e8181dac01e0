"""Conversations between a policy and environments, turn by turn.

The engine schedules (see `policies.engines.turn_rows`); here a turn becomes text, calls and a message, an environment's
answer becomes tokens, and whatever goes wrong ends one conversation and is kept as its failure.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from rlhf_pipeline.collectors.calls import Caller
from rlhf_pipeline.config import Collect
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.rewards import describe_error
from rlhf_pipeline.environments.environment import (
    Environment,
    Failure,
    Message,
    Step,
    Turn,
    checked,
    checked_rewards,
    tools_of,
)
from rlhf_pipeline.environments.tools import maker_of
from rlhf_pipeline.errors import DataError, DefinitionError, EngineError
from rlhf_pipeline.policies.chat import decode_completion, encode_prompt, encode_reply, encode_text
from rlhf_pipeline.policies.engines.protocol import Request, WeightRefresh
from rlhf_pipeline.policies.engines.sampling import Truncation, stream_keys
from rlhf_pipeline.policies.engines.turn_rows import Answers, EndedTurn, TurnRow, converse
from rlhf_pipeline.policies.stop_strings import StopStrings
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.policies.tool_calls import ParsedTurn, TurnParser, schema_of

_CHARACTERS_A_TOKEN: Final = 32
"""A reply with more characters per token of room is not encoded to see that it is too long."""
_PREFIX_TOKENS: Final = 64
"""Tokens before a turn that may decide how it is read."""
_UNBOUNDED: Final = 1 << 30


@dataclass(slots=True, eq=False)
class Conversation:
    """One conversation, in progress or over.

    Attributes:
        prompt: what it is about.
        environment: answers it.
        messages: all of them; the content of the policy's is decoded for reading.
        num_asked: messages before the first turn.
        num_turns: turns of the policy.
        finish_reason: `stop` (the environment said so), `length` (no room for more), `turns` (the limit of turns) or
            `failed`.
        rewards: of the environment, summed by name.
        turn_rewards: those of each turn, by name; what `end` gives belongs to the last one.
        info: what the environment wants stored.
        failure: why its reward is not to be trusted, or None.
        row: its tokens, once it is over.
        last_text: the last turn as text.
        prompt_text: what the model read before it, if a reward function asks for that.
        as_chat: it goes through the chat template.
    """

    prompt: Prompt
    environment: Environment
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_asked: int = 1
    num_turns: int = 0
    finish_reason: str = ""
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    turn_rewards: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    failure: Failure | None = None
    row: TurnRow | None = None
    last_text: str = ""
    prompt_text: str | None = None
    as_chat: bool = False

    def gain(self, gains: Mapping[str, float]) -> None:
        """Add named rewards to those of the newest turn and of the conversation."""
        for counted in (self.rewards, *self.turn_rewards[-1:]):
            for name, value in gains.items():
                counted[name] = counted.get(name, 0.0) + value

    def fail(self, error: BaseException) -> None:
        """Note a failure; the first one stays."""
        kind = "timeout" if isinstance(error, TimeoutError) else "tool_error"
        self.failure = self.failure or Failure(kind=kind, error=describe_error(error))
        self.finish_reason = "failed"


class Conversations:
    """Runs the conversations of rollouts; the engine's partner."""

    def __init__(
        self,
        environment: Callable[..., Any],
        *,
        policy: TokenPolicy,
        config: Collect,
        temperature: float,
        seed: int,
        as_chat: bool,
        template: Mapping[str, Any],
    ) -> None:
        self.make = maker_of(environment)
        self.policy, self.config, self.temperature, self.seed = policy, config, temperature, seed
        self.template = dict(template)
        self.has_template = getattr(policy.tokenizer, "chat_template", None) is not None
        self.as_chat = as_chat and self.has_template
        self.tools = [schema_of(tool) for tool in tools_of(self.make)]
        self.parser: TurnParser | None = None
        if self.tools:
            if not self.has_template:
                raise DefinitionError("the environment has tools, and the tokenizer has no chat template to show them.")
            model_type = getattr(getattr(policy.model, "config", None), "model_type", None)
            self.parser = TurnParser(policy.tokenizer, model_type, self.tools)
        self.stops = StopStrings(policy.tokenizer, config.stop) if config.stop else None
        self.conversations: list[Conversation] = []
        self._caller = Caller(config.step_timeout_s)
        self._ended: Callable[[int, Conversation], None] | None = None
        self._turns: dict[int, EndedTurn] = {}
        self._places: Sequence[int] = ()

    def run(
        self,
        prompts: Sequence[Prompt],
        cursors: Sequence[int],
        *,
        refresh: WeightRefresh | None = None,
        ended: Callable[[int, Conversation], None] | None = None,
        only: Sequence[int] | None = None,
    ) -> list[Conversation]:
        """Run a group of conversations on each prompt until all are over."""
        size = self.config.group_size
        most = min(self.config.max_row_tokens or _UNBOUNDED, self.policy.max_positions or _UNBOUNDED)
        self._ended, self._turns = ended, {}
        self._places = range(len(prompts) * size) if only is None else only
        whole = len(self._places) == len(prompts) * size
        self._caller = Caller(self.config.step_timeout_s)
        try:
            firsts = self._reset(prompts, cursors, most)
            truncation = Truncation(top_k=self.config.top_k, top_p=self.config.top_p, min_p=self.config.min_p)
            rows = converse(
                self.policy.engine,
                Request(
                    prompts=[*firsts.values()] if whole else [firsts[place // size] for place in self._places],
                    group_size=size if whole else 1,
                    members=None if whole else [place % size for place in self._places],
                    max_new_tokens=self.config.max_new_tokens,
                    temperature=self.temperature,
                    end_token_ids=self.policy.eos_token_ids,
                    seed=self.seed,
                    stream_ids=[int(cursors[place // size]) for place in self._places[:: size if whole else 1]],
                    truncation=truncation if self.config.is_truncated else None,
                    stops=self.stops,
                ),
                self,
                row_tokens=most,
                refresh=refresh,
            )
        finally:
            self._caller.close()
        aborted = sum(row.aborted for row in rows)
        if aborted:
            raise EngineError(
                f"the engine {self.policy.engine.name} aborted {aborted} of {len(rows)} conversations of this rollout; "
                "none of it was stored. Did another client of the engine stop them? Type the same command with "
                "--resume: the rollout is sampled again."
            )
        return self.conversations

    # Beginnings

    def _reset(self, prompts: Sequence[Prompt], cursors: Sequence[int], most: int) -> dict[int, list[int]]:
        """Make and reset all environments, and return the first tokens of each group that has any."""
        size = self.config.group_size
        prompt_of = [place // size for place in self._places]
        made = self._caller.run([self.make] * len(prompt_of))
        seeds = [int(stream_keys(self.seed, [int(cursor)], [-1])[0] >> 1) for cursor in cursors]
        calls = [
            functools.partial(_reset, environment, prompts[index], seeds[index])
            for index, environment in zip(prompt_of, made, strict=True)
        ]
        shown = self._caller.run(calls)
        for place, outcome in enumerate(shown):
            if inspect.isawaitable(outcome):
                self._caller.begin(place, outcome)
        while any(inspect.isawaitable(outcome) for outcome in shown):
            for place, outcome in self._caller.arrived(wait=True).items():
                shown[place] = outcome
        self.conversations, firsts = [], dict[int, list[int]]()
        for index, members in itertools.groupby(range(len(prompt_of)), prompt_of.__getitem__):
            group, prompt = [*members], prompts[index]
            good = [place for place in group if not isinstance(shown[place], BaseException)]
            first = shown[good[0]] if good else None
            messages, ids, as_chat = [], [self.policy.pad_token_id], False
            if good:  # otherwise nothing of the group is learned, and the engine needs a token
                messages, ids, as_chat = self._first(prompt, first)
            if len(ids) >= most:
                raise DataError(
                    f"prompt {int(cursors[index])} has {len(ids)} tokens as the environment shows it, and a row has "
                    f"{most}: nothing can follow. Raise collect.max_row_tokens, or leave the prompt out."
                )
            firsts[index] = ids
            for place in group:
                said = [dict(message) for message in messages]
                conversation = Conversation(prompt, made[place], said, len(said), as_chat=as_chat)
                self.conversations.append(conversation)
                if isinstance(shown[place], BaseException):
                    conversation.fail(shown[place])
                elif shown[place] != first:
                    raise DefinitionError(
                        f"reset shows members of the group of prompt {int(cursors[index])} different things, and a "
                        "group compares answers to one: let it depend on the prompt and the seed alone."
                    )
        return firsts

    def _first(self, prompt: Prompt, shown: Any) -> tuple[list[dict[str, Any]], list[int], bool]:
        """Return the messages and the tokens that begin a conversation, and whether it goes through the template."""
        codec = self.policy.tokenizer
        if isinstance(shown, str) and self.as_chat:
            system = [dict(message) for message in prompt.messages or () if message["role"] == "system"]
            shown = [*system, {"role": "user", "content": shown}]
        if shown is None:
            shown = prompt.text if prompt.messages is None else prompt.messages
        if not isinstance(shown, (str, list, tuple)):
            raise DefinitionError(f"reset returned {type(shown).__name__}; it must return text, messages or None.")
        as_chat = self.as_chat or not isinstance(shown, str)
        ids = encode_prompt(codec, shown, as_chat=as_chat, tools=self.tools or None, template=self.template)
        said = [{"role": "user", "content": shown}] if isinstance(shown, str) else [dict(one) for one in shown]
        return said, ids, as_chat

    # Turns

    def answer(self, ended: Sequence[EndedTurn]) -> Answers:
        """See `Partner.answer`."""
        calls: list[Callable[[], Any]] = []
        asked: list[EndedTurn] = []
        over: list[int] = []
        answers: dict[int, Sequence[int] | None] = {}
        for turn in ended:
            self._turns[turn.place] = turn
            call = self._call(turn)
            if call is None:
                answers[turn.place] = None
                over.append(turn.place)
            elif inspect.iscoroutinefunction(self.conversations[turn.place].environment.step):
                self._caller.begin(turn.place, call())
            else:
                calls.append(call)
                asked.append(turn)
        for turn, outcome in zip(asked, self._caller.run(calls), strict=True):
            if inspect.isawaitable(outcome):
                self._caller.begin(turn.place, outcome)
                continue
            answers[turn.place] = self._taken(turn, outcome)
            if answers[turn.place] is None:
                over.append(turn.place)
        self._end(over)
        return answers

    def arrived(self, *, wait: bool) -> Answers:
        """See `Partner.arrived`."""
        came = self._caller.arrived(wait=wait)
        answers = {place: self._taken(self._turns[place], outcome) for place, outcome in sorted(came.items())}
        self._end([place for place, reply in answers.items() if reply is None])
        return answers

    def _call(self, ended: EndedTurn) -> Callable[[], Any] | None:
        """Note a turn and return the call that asks its environment; None if the conversation has failed before."""
        conversation, tokens = self.conversations[ended.place], ended.tokens
        text = self.text(tokens)
        conversation.num_turns += 1
        conversation.turn_rewards.append({})
        conversation.last_text = text
        parsed = ParsedTurn(message={"role": "assistant", "content": text})
        if self.parser is not None:
            before = ended.row.ids[max(0, ended.row.began - _PREFIX_TOKENS) : ended.row.began]
            parsed = self.parser.parse(tokens, self.policy.tokenizer.decode(before), text)
        conversation.messages.append(parsed.message)
        if conversation.failure is not None:
            return None
        turn = Turn(
            text=text,
            number=conversation.num_turns,
            finish_reason="stop" if ended.stopped else "length",
            content=str(parsed.message.get("content") or ""),
            tool_calls=parsed.calls,
            call_error=parsed.error,
            token_ids=tuple(tokens),
        )
        return functools.partial(conversation.environment.step, turn)

    def text(self, tokens: Sequence[int]) -> str:
        """Return a turn as environments and rewards see it."""
        keep, ends = not self.config.skip_special_tokens, self.policy.eos_token_ids
        text = decode_completion(self.policy.tokenizer, tokens, keep_special=keep, end_token_ids=ends)
        return text if self.stops is None or self.config.keep_stop else self.stops.without(text)

    def _taken(self, ended: EndedTurn, outcome: Any) -> list[int] | None:
        """Take what an environment gave; return the reply's tokens, or None if the conversation is over."""
        conversation = self.conversations[ended.place]
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            step = checked(outcome)
            gains = checked_rewards(step.rewards)
            json.dumps(dict(step.info))
            conversation.gain(gains)
            conversation.info.update(step.info)
            if step.done:
                conversation.finish_reason = "stop"
            elif conversation.num_turns >= self.config.max_turns:
                conversation.finish_reason = "turns"
            elif (ids := self._reply(conversation, ended, step)) is None:
                conversation.finish_reason = "length"
            else:
                return ids
        except (DefinitionError, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - an environment may raise anything; it is recorded, not hidden
            conversation.fail(error)
        return None

    def _reply(self, conversation: Conversation, ended: EndedTurn, step: Step) -> list[int] | None:
        """Return the tokens of a reply, and note its messages; None if there is no room for it and another token."""
        room, codec = ended.row.room, self.policy.tokenizer
        texts = [step.reply] if isinstance(step.reply, str) else [str(one.get("content", "")) for one in step.reply]
        if room < 0 or sum(map(len, texts)) > _CHARACTERS_A_TOKEN * max(room, 1):
            return None
        replies: list[Message] = []
        if isinstance(step.reply, str):
            replies = [{"role": "user", "content": step.reply}] if step.reply or conversation.as_chat else []
        else:
            replies = [dict(one) for one in step.reply]
        if conversation.as_chat or any(one["role"] != "user" for one in replies):
            ids = encode_reply(
                codec,
                conversation.messages[:-1],
                ended.tokens,
                replies,
                turn=conversation.messages[-1],
                tools=self.tools or None,
                template=self.template,
                end_token_ids=self.policy.eos_token_ids,
            )
        else:
            ids = encode_text(codec, "".join(str(one["content"]) for one in replies), add_special_tokens=False)
        if len(ids) > room:
            return None
        conversation.messages += [dict(one) for one in replies]
        return ids

    def _end(self, places: Sequence[int]) -> None:
        """Ask environments for their last rewards, and pass on the conversations that are over."""
        for place in places:
            self.conversations[place].row = self._turns.pop(place).row
        asked = [place for place in places if hasattr(self.conversations[place].environment, "end")]
        calls = [
            functools.partial(
                cast(Any, self.conversations[place].environment).end, self.conversations[place].finish_reason
            )
            for place in asked
        ]
        for place, outcome in zip(asked, self._caller.run(calls), strict=True):
            conversation = self.conversations[place]
            try:
                if isinstance(outcome, BaseException):
                    raise outcome
                conversation.gain(checked_rewards(outcome or {}))
            except BaseException as error:  # noqa: BLE001 - an environment may raise anything; it is recorded
                conversation.fail(error)
        for place in places:
            if self._ended is not None:
                self._ended(self._places[place], self.conversations[place])


def _reset(environment: Any, prompt: Prompt, seed: int) -> Any:
    """Reset an environment; if making it failed, raise that."""
    if isinstance(environment, BaseException):
        raise environment
    return environment.reset(prompt, seed)
