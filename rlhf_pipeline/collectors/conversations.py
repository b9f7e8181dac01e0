"""Conversations between a policy and environments, turn by turn.

The engine schedules (see `policies.engines.turn_requests`); here a turn becomes text, calls and a message, an answer of
the environment becomes tokens, and the outcome of a conversation is decided, by the table in `environments.outcomes`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from rlhf_pipeline.config import Collect
from rlhf_pipeline.data.keys import POLICY_ROLE
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.rewards import describe_error
from rlhf_pipeline.environments.environment import (
    Environment,
    Failure,
    Step,
    Turn,
    checked,
    is_parallel,
    rewards_of_environment,
    tools_of,
)
from rlhf_pipeline.environments.histories import Histories, canonical
from rlhf_pipeline.environments.makers import Environments, Maker, maker_of
from rlhf_pipeline.environments.outcomes import CALLS, FAILED, LENGTH, STOP, TURNS, failure_kind
from rlhf_pipeline.errors import DataError, DefinitionError, EngineError
from rlhf_pipeline.policies.call_formats import call_format_of, call_id, name_of, refused_calls, with_call_ids
from rlhf_pipeline.policies.chat import (
    continued_text,
    cut_text,
    decode_completion,
    encode_prompt,
    encode_reply,
    encode_text,
    end_texts,
    known_text,
)
from rlhf_pipeline.policies.engines.protocol import Request, WeightRefresh
from rlhf_pipeline.policies.engines.sampling import Truncation, stream_keys
from rlhf_pipeline.policies.engines.turn_requests import converse
from rlhf_pipeline.policies.engines.turn_rows import Answer, Answers, EndedTurn, TurnRow
from rlhf_pipeline.policies.stop_strings import StopStrings
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.policies.tool_calls import ParsedTurn, TurnParser, schema_of
from rlhf_pipeline.user_code.arguments import own_copy
from rlhf_pipeline.user_code.outputs import checked_info, checked_messages, checked_rewards, plain_json
from rlhf_pipeline.user_code.runtime import Call, Limit, process_runtime
from rlhf_pipeline.user_code.threads import Lane

_CHARACTERS_A_TOKEN: Final = 32
"""A reply with more characters than this per remaining token is rejected as too long without being encoded."""
_PREFIX_TOKENS: Final = 64
"""The number of tokens before a turn that can affect how it is parsed."""
_UNBOUNDED: Final = 1 << 30
_LOOK_S: Final = 0.5
"""The interval at which a wait for a reply checks whether the engine must end."""
_LONG_S: Final = 1.0
"""Sequential calls are reported if they take longer than this, and most of the time, in one rollout."""


@dataclass(frozen=True, slots=True)
class RenderedTools:
    """The tools that the policy is shown, and the parser of its calls."""

    schemas: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    parser: TurnParser | None = None

    def formed(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose calls have the form that the chat template accepts."""
        return [
            dict(message) if self.parser is None else self.parser.call_format.message(message) for message in messages
        ]


@dataclass(frozen=True, slots=True)
class RowTurn:
    """The position of a turn in its row.

    Attributes:
        row: the row.
        num_messages: messages of the row, this turn included.
        num_exchanged: the same of those that the environment knows.
        began: the position of its first token.
        ended: the place after its last token.
        text: the turn as text.
        variant: see `Step.variant`.
    """

    row: ConversationRow
    num_messages: int
    num_exchanged: int
    began: int
    ended: int
    text: str
    variant: str


@dataclass(slots=True, eq=False)
class ConversationRow:
    """One row of a conversation: the input of the policy and its samples.

    Attributes:
        messages: all of them; the content of the policy's is decoded for reading.
        num_asked: messages before the first turn.
        row: its tokens, once a turn has ended.
        last_text: its last turn as text.
        turns: the numbers of its turns in the conversation, from 0.
        tools: those that the policy is shown.
        exchanged: the messages as the environment knows them, which were perhaps shown in another form.
        variant: see `Step.variant`.
    """

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_asked: int = 1
    row: TurnRow | None = None
    last_text: str = ""
    turns: list[int] = field(default_factory=list[int])
    tools: RenderedTools = field(default_factory=RenderedTools)
    exchanged: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    variant: str = ""


@dataclass(slots=True, eq=False)
class Conversation:
    """One conversation, in progress or over: an episode.

    Attributes:
        prompt: what it is about.
        environment: answers it.
        rows: its rows, in the order in which they began.
        current: the number of the row that has the turn.
        num_turns: turns of the policy.
        finish_reason: of `environments.outcomes`.
        rewards: of the environment, summed by name.
        turn_rewards: those of each turn, by name; what `end` gives belongs to the last one.
        info: what the environment wants stored.
        failure: why its reward is not to be trusted, or None.
        retried: the failures of earlier tries.
        call_errors: the number of tool calls by the policy that could not be executed.
        cut_replies: replies that were cut.
        fallback_replies: replies of tools to malformed calls that were sent as messages of the user.
        turn_stopped: whether the newest turn ended by itself.
        has_malformed_call: whether a call of the newest turn could not be read, or not be shown by the template.
        prompt_text: what the model read before it, if a reward function asks for that.
        closing: what the environment replied to the last turn, which the policy was not shown.
        as_chat: it goes through the chat template.
        row_turns: its turns.
        returned: those of them that a history may continue, by the messages up to each.
        outcome_row: the number of the row that has the outcome; None is the one that ended last.
        edited_histories: histories that contain a turn of the policy in another form than it was returned.
    """

    prompt: Prompt
    environment: Environment
    rows: list[ConversationRow] = field(default_factory=list[ConversationRow])
    current: int = 0
    num_turns: int = 0
    finish_reason: str = ""
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    turn_rewards: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    failure: Failure | None = None
    retried: tuple[str, ...] = ()
    call_errors: int = 0
    cut_replies: int = 0
    fallback_replies: int = 0
    turn_stopped: bool = True
    has_malformed_call: bool = False
    prompt_text: str | None = None
    closing: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    as_chat: bool = False
    row_turns: list[RowTurn] = field(default_factory=list[RowTurn])
    returned: Histories[RowTurn] = field(default_factory=Histories[RowTurn])
    outcome_row: int | None = None
    edited_histories: int = 0
    first_key: int = 0
    """The offset of the conversation's stream of random numbers."""

    @property
    def at(self) -> ConversationRow:
        """The row that has the turn; in the end, the one that has the outcome."""
        return self.rows[self.current]

    @property
    def row(self) -> TurnRow | None:
        """The tokens of that row."""
        return self.at.row

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of that row."""
        return self.at.messages

    @property
    def sampled_rows(self) -> list[ConversationRow]:
        """The rows in which the policy had a turn, as stored: in the order in which they ended.

        The last one has the outcome; an environment may name another one, which is then the last.
        """
        last = None if self.outcome_row is None else self.rows[self.outcome_row]
        return sorted((row for row in self.rows if row.turns), key=lambda row: (row is last, row.turns[-1]))

    def begin(
        self,
        messages: Sequence[dict[str, Any]],
        tools: RenderedTools,
        row: TurnRow | None = None,
        *,
        exchanged: Sequence[Mapping[str, Any]] | None = None,
    ) -> ConversationRow:
        """Begin a row."""
        begun = ConversationRow([*messages], len(messages), row, tools=tools)
        begun.exchanged = [*(messages if exchanged is None else exchanged)]
        self.rows.append(begun)
        self.current = len(self.rows) - 1
        return begun

    def gain(self, gains: Mapping[str, float]) -> None:
        """Add named rewards to the newest turn and to the conversation."""
        for counted in (self.rewards, *self.turn_rewards[-1:]):
            for name, value in gains.items():
                counted[name] = counted.get(name, 0.0) + value

    def fail(self, error: BaseException) -> None:
        """Record a failure, unless one is already recorded."""
        self.failure = self.failure or Failure(kind=failure_kind(error), error=describe_error(error))
        self.finish_reason = FAILED


@dataclass(frozen=True, slots=True)
class _Kind:
    """One environment of a definition: what makes it, and how its tools are shown and its calls read."""

    make: Maker
    tools: RenderedTools
    rewards: tuple[str, ...] | None
    overlaps: bool
    """Whether its calls run concurrently with sampling; see `environments.environment.is_parallel`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _First:
    """The input with which a conversation begins."""

    messages: Sequence[Mapping[str, Any]] = ()
    ids: list[int]
    as_chat: bool = False
    tools: RenderedTools = field(default_factory=RenderedTools)
    variant: str = ""
    is_other: bool = False
    """Whether it is a history other than the prompt, so its random numbers depend on its tokens."""


class Conversations:
    """Runs the conversations of rollouts; the engine's partner."""

    def __init__(
        self,
        environment: Callable[..., Any] | dict[str, Any],
        *,
        policy: TokenPolicy,
        config: Collect,
        temperature: float,
        seed: int,
        as_chat: bool,
        template: Mapping[str, Any],
        names: Sequence[str] = (),
        same_tasks: int | None = None,
    ) -> None:
        self.make = maker_of(environment)
        self.same_tasks = same_tasks
        self.reply_after = config.reply_after
        self.policy, self.config, self.temperature, self.seed = policy, config, temperature, seed
        self.template = dict(template)
        self.has_template = getattr(policy.tokenizer, "chat_template", None) is not None
        self.as_chat = as_chat and self.has_template
        self._parsers: dict[str, TurnParser] = {}
        """The parser for each set of tools."""
        self.ends = end_texts(policy.tokenizer, policy.eos_token_ids)
        makers = self.make.makers if isinstance(self.make, Environments) else {"": self.make}
        self.kinds = {name: self._kind(make) for name, make in makers.items()}
        self.names = tuple(names)
        self.stops = StopStrings(policy.tokenizer, config.stop) if config.stop else None
        self.conversations: list[Conversation] = []
        late = config.step_timeout_s
        self._late = "" if late is None else f"no reply after {late:g} s (collect.step_timeout_s)"
        self._in_place = Limit(1)
        """Calls that are made one after the other, in one thread, while sampling waits."""
        self._in_place_s = 0.0
        self._lanes: list[Lane] = []
        """The thread of each conversation."""
        self._overlaps: list[bool] = []
        """For each conversation, whether its calls run concurrently with sampling."""
        self._calls: dict[int, Call] = {}
        """The newest of these calls for each conversation."""
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._wake: Callable[[], None] = _nothing
        self._ended: Callable[[int, Conversation], None] | None = None
        self._turns: dict[int, EndedTurn] = {}
        self._places: Sequence[int] = ()
        self._ending: set[int] = set()
        self._may_retry = False

    def _kind(self, make: Maker) -> _Kind:
        return _Kind(make, self._rendered_tools(tools_of(make)), rewards_of_environment(make), is_parallel(make))

    def _rendered_tools(self, tools: Sequence[Any]) -> RenderedTools:
        """Return tools as the policy is shown them."""
        if not tools:
            return RenderedTools()
        if not self.has_template:
            raise DefinitionError("the environment has tools, but the tokenizer has no chat template to render them.")
        schemas = [schema_of(tool) for tool in tools]
        name = json.dumps(schemas, sort_keys=True)
        if name not in self._parsers:
            model_type = getattr(getattr(self.policy.model, "config", None), "model_type", None)
            call_format = call_format_of(self.policy.tokenizer, schemas, template=self.template, ends=self.ends)
            self._parsers[name] = TurnParser(self.policy.tokenizer, model_type, schemas, call_format)
        return RenderedTools(schemas, self._parsers[name])

    def _kind_of(self, prompt: Prompt) -> _Kind:
        """Return the environment that answers a prompt."""
        return self.kinds[self.make.of(prompt) if isinstance(self.make, Environments) else ""]

    def _kind_overlaps(self, prompt: Prompt) -> bool:
        """Return whether the environment of a prompt is known to run beside sampling; one that is missing is not."""
        name = prompt.meta.get(self.make.column) if isinstance(self.make, Environments) else ""
        return isinstance(name, str) and name in self.kinds and self.kinds[name].overlaps

    def run(
        self,
        prompts: Sequence[Prompt],
        cursors: Sequence[int],
        *,
        refresh: WeightRefresh | None = None,
        ended: Callable[[int, Conversation], None] | None = None,
        only: Sequence[int] | None = None,
    ) -> list[Conversation]:
        """Run a group of conversations on each prompt until all are over.

        Those that the world failed are begun again, `collect.retries` times at most: their tokens follow from the
        prompt, the seed and what their environments answer.
        """
        size = self.config.group_size
        every = range(len(prompts) * size) if only is None else only
        newest: dict[int, Conversation] = {}
        left: Sequence[int] = every
        started, self._in_place_s = time.monotonic(), 0.0
        for again in range(self.config.retries + 1):
            self._ended, self._may_retry = ended, again < self.config.retries
            for places in self._alive_at_once(left):
                rows = self._run(prompts, cursors, places, refresh)
                for place, conversation, row in zip(places, self.conversations, rows, strict=True):
                    if place in newest:
                        before = newest[place].failure
                        error = "the engine aborted it" if before is None else f"{before.kind}: {before.error}"
                        conversation.retried = (*newest[place].retried, error)
                    if conversation.at.row is None or row.aborted:  # otherwise its turns noted it
                        conversation.at.row = row
                    newest[place] = conversation
                aborted = sum(row.aborted for row in rows)
                if aborted and not self._may_retry:
                    raise EngineError(
                        f"the engine {self.policy.engine.name} aborted {aborted} of {len(rows)} conversations of "
                        "this rollout, so it was not stored. Check whether another client of the engine cancelled "
                        "them, then repeat the command with --resume to sample the rollout again."
                    )
            left = [place for place in left if _is_to_retry(newest[place])]
            if not left:
                break
        self._mention_slow_steps(time.monotonic() - started)
        self.conversations = [newest[place] for place in every]
        return self.conversations

    def _alive_at_once(self, places: Sequence[int]) -> list[Sequence[int]]:
        """Return the conversations in parts that run one after the other: `collect.live_conversations` of them each."""
        most, size = self.config.live_conversations or max(len(places), 1), self.config.group_size
        most = max(most - most % size, 1) if most >= size else most  # whole groups, where there is room for one
        return [places[first : first + most] for first in range(0, len(places), most)]

    def _mention_slow_steps(self, taken_s: float) -> None:
        if self._in_place_s > max(_LONG_S, taken_s / 2):
            process_runtime().notice(
                f"calls of the environment, one after the other, took {self._in_place_s:.0f} of the {taken_s:.0f} s of "
                "a rollout. If its objects can be used in several threads, set `parallel = True` on the class: the "
                "calls then run concurrently (docs/environments.md).",
                once="slow steps in place",
            )

    def _run(
        self, prompts: Sequence[Prompt], cursors: Sequence[int], places: Sequence[int], refresh: WeightRefresh | None
    ) -> list[TurnRow]:
        """Begin conversations and let the engine run them."""
        size = self.config.group_size
        most = min(self.config.max_row_tokens or _UNBOUNDED, self.policy.max_positions or _UNBOUNDED)
        self._turns, self._places, self._ending, self.conversations = {}, places, set(), []
        self._lanes, self._calls, self._arrived = [Lane() for _ in places], {}, queue.SimpleQueue()
        self._wake = _nothing
        in_place = Lane()
        self._in_place = Limit(1, in_place)
        whole = len(places) == len(prompts) * size
        try:
            firsts = self._reset(prompts, cursors, most)
            moved = [conversation.first_key for conversation in self.conversations]
            begun = [*zip(firsts, moved, strict=True)]
            whole = whole and all(
                conversation == begun[place - place % size] for place, conversation in enumerate(begun)
            )
            streams = [int(cursors[place // size]) + key for place, key in zip(places, moved, strict=True)]
            truncation = Truncation(top_k=self.config.top_k, top_p=self.config.top_p, min_p=self.config.min_p)
            rows = converse(
                self.policy.engine,
                Request(
                    prompts=firsts[::size] if whole else firsts,
                    group_size=size if whole else 1,
                    members=None if whole else [place % size for place in places],
                    max_new_tokens=self.config.max_new_tokens,
                    temperature=self.temperature,
                    end_token_ids=self.policy.eos_token_ids,
                    seed=self.seed,
                    stream_ids=streams[:: size if whole else 1],
                    truncation=truncation if self.config.is_truncated else None,
                    stops=self.stops,
                ),
                self,
                row_tokens=most,
                refresh=refresh,
            )
            if not any(row.aborted for row in rows):
                self._take_ends(wait=True)
            return rows
        finally:
            process_runtime().cancel_unawaited([*self._calls.values()])
            for lane in (*self._lanes, in_place):
                process_runtime().pool.close(lane)

    # Beginnings

    def _reset(self, prompts: Sequence[Prompt], cursors: Sequence[int], most: int) -> list[list[int]]:
        """Make and reset all environments, and return the first tokens of each conversation."""
        prompt_of = [place // self.config.group_size for place in self._places]
        self._overlaps = [self._kind_overlaps(prompts[index]) for index in prompt_of]
        every = range(len(prompt_of))
        environments = self._outcomes(
            [(place, functools.partial(self._make_environment, prompts[prompt_of[place]])) for place in every]
        )
        self._overlaps = [
            overlaps or is_parallel(environment)
            for overlaps, environment in zip(self._overlaps, environments, strict=True)
        ]
        seeds = [self._task_seed(int(cursor)) for cursor in cursors]
        observations = self._outcomes(
            [
                (
                    place,
                    _reset(environments[place], self._prompt_copy(prompts[prompt_of[place]]), seeds[prompt_of[place]]),
                )
                for place in every
            ]
        )
        for place, outcome in enumerate(observations):
            try:
                observations[place] = _readable(outcome)
            except TypeError as error:
                observations[place] = error
        self.conversations, firsts = [], list[list[int]]()
        for index, members in itertools.groupby(range(len(prompt_of)), prompt_of.__getitem__):
            group, prompt = [*members], prompts[index]
            good = [place for place in group if not isinstance(observations[place], BaseException)]
            if any(
                observations[place] != observations[good[0]] and not isinstance(observations[place], Step)
                for place in good
            ):
                raise DefinitionError(
                    f"reset returns different inputs for members of the group of prompt {int(cursors[index])}, but "
                    "a group compares answers to the same input. Make reset depend only on the prompt and the seed."
                )
            begun: tuple[Any, _First] | None = None
            for place in group:
                first = _First(ids=[self.policy.pad_token_id])  # the engine needs a token
                conversation = Conversation(prompt, environments[place])
                self.conversations.append(conversation)
                if isinstance(observations[place], BaseException):
                    conversation.fail(observations[place])
                else:
                    try:
                        if begun is None or begun[0] != observations[place]:
                            begun = observations[place], self._first(prompt, observations[place], most)
                        first = begun[1]
                    except Exception as error:  # noqa: BLE001 - what was shown may be anything
                        conversation.fail(error)
                conversation.as_chat = first.as_chat
                conversation.begin([dict(message) for message in first.messages], first.tools).variant = first.variant
                if first.is_other:
                    conversation.first_key = self._key(conversation, first.ids, first.variant)
                firsts.append(first.ids)
        return firsts

    def _task_seed(self, cursor: int) -> int:
        """Return what seeds the task of a prompt: that of a group in training, that of a prompt in an evaluation."""
        if self.same_tasks is None:
            return int(stream_keys(self.seed, [cursor], [-1])[0] >> 1)
        return int(stream_keys(0, [cursor % self.same_tasks], [-2])[0] >> 1)

    # Calls

    def _call(self, place: int, work: Callable[[], Any], on_end: Callable[[Call], None] | None = None) -> Call:
        return Call(
            self._name_of(place),
            work,
            timeout_s=self.config.step_timeout_s,
            late=self._late,
            on_end=on_end,
            is_async=inspect.iscoroutinefunction(work),
        )

    def _name_of(self, place: int) -> str:
        environment = self.conversations[place].environment if place < len(self.conversations) else None
        return "the environment" if environment is None else f"the environment {type(environment).__name__}"

    def _outcomes(self, works: Sequence[tuple[int, Callable[[], Any]]]) -> list[Any]:
        """Make a call for each of these conversations and wait for all of them.

        Side by side where the environment allows that, otherwise one after the other.
        """
        runtime, calls = process_runtime(), [self._call(place, work) for place, work in works]
        for (place, _), call in zip(works, calls, strict=True):
            if self._overlaps[place]:
                runtime.begin([call], lane=self._lanes[place])
        in_place = [call for (place, _), call in zip(works, calls, strict=True) if not self._overlaps[place]]
        started = time.monotonic()
        runtime.begin(in_place, limit=self._in_place)
        for call in in_place[-1:]:
            runtime.wait(call)
        self._in_place_s += time.monotonic() - started
        return [runtime.wait(call) for call in calls]

    def _begin(self, place: int, work: Callable[[], Any], on_end: Callable[[Call], None] | None = None) -> None:
        """Let a call of a conversation run beside sampling."""
        call = self._calls[place] = self._call(place, work, on_end)
        process_runtime().begin([call], lane=self._lanes[place])

    def _make_environment(self, prompt: Prompt) -> Any:
        """Make a prompt's environment."""
        return self._kind_of(prompt).make()

    def _prompt_copy(self, prompt: Prompt) -> Prompt:
        """Return a copy of a prompt for one environment, without the column that chose it."""
        column = self.make.column if isinstance(self.make, Environments) else None
        return replace(prompt, meta={name: value for name, value in prompt.meta.items() if name != column})

    def _first(self, prompt: Prompt, observation: Any, most: int) -> _First:
        """Return what begins a conversation."""
        tools, variant, is_other = self._kind_of(prompt).tools, "", False
        if isinstance(observation, Step):
            tools = tools if observation.tools is None else self._rendered_tools(observation.tools)
            prompt_messages = [{"role": "user", "content": prompt.text}] if prompt.messages is None else prompt.messages
            observation, variant = observation.history or (), observation.variant
            is_other = bool(variant) or [*map(canonical, observation)] != [*map(canonical, prompt_messages)]
        if isinstance(observation, str) and self.as_chat:
            system = [dict(message) for message in prompt.messages or () if message["role"] == "system"]
            observation = [*system, {"role": "user", "content": observation}]
        if observation is None:
            observation = prompt.text if prompt.messages is None else prompt.messages
        if not isinstance(observation, str):
            observation = tools.formed(checked_messages(observation, "the prompt"))
        as_chat = self.as_chat or not isinstance(observation, str)
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        if not any(message["content"].strip() for message in messages):
            raise DataError("reset returned empty text, so the policy has no input.")
        schemas = tools.schemas or None
        ids = encode_prompt(self.policy.tokenizer, observation, as_chat=as_chat, tools=schemas, template=self.template)
        if len(ids) >= most:
            raise DataError(
                f"the text that reset returned has {len(ids)} tokens, but a row has at most {most}, so no completion "
                "fits. Raise collect.max_row_tokens, or skip the prompt."
            )
        return _First(messages=messages, ids=ids, as_chat=as_chat, tools=tools, variant=variant, is_other=is_other)

    # Turns

    def answer(self, ended: Sequence[EndedTurn]) -> Answers:
        """See `Partner.answer`."""
        in_place: list[tuple[int, Callable[[], Any]]] = []
        over: list[int] = []
        answers: dict[int, Answer] = {}
        arrived, wake = self._arrived, self._wake

        def ends(_: Call, place: int) -> None:
            arrived.put(place)
            wake()

        for turn in ended:
            place = turn.place
            self._turns[place] = turn
            if (work := self._step_of(turn)) is None:
                over.append(place)
            elif self._overlaps[place]:
                self._begin(place, work, functools.partial(ends, place=place))
            else:
                in_place.append((place, work))
        for (place, _), outcome in zip(in_place, self._outcomes(in_place), strict=True):
            if (reply := self._take_step(self._turns[place], outcome)) is None:
                over.append(place)
            else:
                answers[place] = reply
        self._end(over)
        return answers | dict.fromkeys(over)

    def listen(self, wake: Callable[[], None]) -> None:
        """See `Partner.listen`."""
        self._wake = wake

    def arrived(self) -> Answers:
        """See `Partner.arrived`."""
        places: list[int] = []
        with contextlib.suppress(queue.Empty):
            while True:
                places.append(self._arrived.get_nowait())
        return self._replies(sorted(places))

    def fetch(self, places: Sequence[int], go_on: Callable[[], bool]) -> Answers | None:
        """See `Partner.fetch`."""
        runtime = process_runtime()
        for call in [self._calls[place] for place in places]:
            while not call.has_ended:
                runtime.wait(call, _LOOK_S)
                if not call.has_ended and not go_on():
                    return None
        return self._replies(places)

    def _replies(self, places: Sequence[int]) -> Answers:
        """Return the replies of conversations whose calls have ended."""
        answers = {place: self._take_step(self._turns[place], self._calls.pop(place).outcome) for place in places}
        self._end([place for place, reply in answers.items() if reply is None])
        self._take_ends(wait=False)
        return answers

    def _step_of(self, ended: EndedTurn) -> Callable[[], Any] | None:
        """Note a turn and return the call that answers it; None if the conversation has failed before."""
        conversation, tokens = self.conversations[ended.place], ended.tokens
        text = self.text(tokens)
        conversation.at.turns.append(conversation.num_turns)
        conversation.num_turns += 1
        conversation.turn_rewards.append({})
        conversation.at.row, conversation.at.last_text = ended.row, text
        # A turn of one token has no room for an end: it is complete.
        conversation.turn_stopped = ended.stopped or self.config.max_new_tokens == 1
        parsed = ParsedTurn(message={"role": "assistant", "content": text})
        if conversation.failure is None and (parser := conversation.at.tools.parser) is not None:
            before = ended.row.ids[max(0, ended.row.began - _PREFIX_TOKENS) : ended.row.began]
            id_of = functools.partial(call_id, self.seed, conversation.num_turns)
            parsed = parser.parse(tokens, self.policy.tokenizer.decode(before), text, id_of)
            if parsed.calls and (refusal := self._refused_calls(conversation, parsed.message)) is not None:
                parsed = ParsedTurn(message={"role": "assistant", "content": text}, error=refusal)
        conversation.messages.append(parsed.message)
        at, row = conversation.at, ended.row
        at.exchanged.append(parsed.message)
        conversation.row_turns.append(
            RowTurn(at, len(at.messages), len(at.exchanged), row.began, len(row.ids), text, at.variant)
        )
        if conversation.failure is not None:
            return None
        conversation.has_malformed_call = parsed.error is not None
        conversation.call_errors += conversation.has_malformed_call
        turn = Turn(
            text=text,
            number=conversation.num_turns,
            finish_reason=STOP if conversation.turn_stopped else LENGTH,
            content=str(parsed.message.get("content") or ""),
            tool_calls=own_copy(parsed.calls),
            call_error=parsed.error,
            token_ids=tuple(tokens),
        )
        return functools.partial(conversation.environment.step, turn)

    def _refused_calls(self, conversation: Conversation, turn: Mapping[str, Any]) -> str | None:
        """Return why the chat template cannot show the calls of a turn: it is then a turn with a malformed call."""
        tools = conversation.at.tools
        assert tools.parser is not None
        return refused_calls(
            tools.parser.call_format,
            self.policy.tokenizer,
            conversation.messages[: conversation.at.num_asked],
            turn,
            tools=tools.schemas,
            template=self.template,
            ends=self.ends,
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn for environments and reward functions."""
        keep, ends = not self.config.skip_special_tokens, self.policy.eos_token_ids
        text = decode_completion(self.policy.tokenizer, tokens, keep_special=keep, end_token_ids=ends)
        return text if self.stops is None or self.config.keep_stop else self.stops.without(text)

    def _take_step(self, ended: EndedTurn, outcome: Any) -> Answer:
        """Take what an environment gave; return how the policy continues, or None if the conversation is over."""
        conversation = self.conversations[ended.place]
        if isinstance(outcome, BaseException):
            conversation.fail(outcome)
            return None
        try:
            step = checked(outcome)
            self._gain(conversation, step.rewards)
            conversation.info.update(step.info)
            conversation.call_errors += step.call_errors
            if step.done:
                conversation.finish_reason = STOP if conversation.turn_stopped else LENGTH
                conversation.closing = _messages_of(step.reply)
                if step.row is not None and (
                    step.row >= len(conversation.rows) or not conversation.rows[step.row].turns
                ):
                    raise ValueError(
                        f"the step refers to row {step.row}; the index must be below {len(conversation.rows)}, the "
                        "number of rows of the episode, and the row must have at least one turn"
                    )
                conversation.outcome_row = step.row
            elif conversation.num_turns >= self.config.max_turns:
                conversation.finish_reason = TURNS
            elif conversation.call_errors >= (self.config.max_call_errors or _UNBOUNDED):
                conversation.finish_reason = CALLS
            elif (going := self._next_input(conversation, ended, step)) is None:
                conversation.finish_reason = LENGTH
            else:
                return going
        except Exception as error:  # noqa: BLE001 - an answer may be anything; it costs its own conversation
            conversation.fail(error)
        return None

    def _gain(self, conversation: Conversation, gains: Mapping[str, float]) -> None:
        """Take rewards, whose names are among those that the environment declares, if it does."""
        declared = self._kind_of(conversation.prompt).rewards
        undeclared = [name for name in gains if declared is not None and name not in declared]
        if undeclared:
            raise ValueError(f"the environment does not declare the reward {undeclared[0]!r}; it declares {declared}")
        conversation.gain(gains)

    def _next_input(self, conversation: Conversation, ended: EndedTurn, step: Step) -> Answer:
        """Return the tokens of a reply, or the row that the policy continues in place of its own; None without room."""
        if step.history is not None:
            return self._continued(conversation, ended, step.history, step)
        if step.row is None or step.row == conversation.current:
            return self._reply(conversation, ended, step)
        if step.row >= len(conversation.rows) or (row := conversation.rows[step.row].row) is None:
            raise ValueError(
                f"the step continues row {step.row}; the index must be below {len(conversation.rows)}, the number of "
                "rows of the episode, and the row must have at least one turn"
            )
        conversation.current = step.row
        return self._going_on(conversation, ended, row, step)

    def _going_on(self, conversation: Conversation, ended: EndedTurn, row: TurnRow, step: Step) -> TurnRow | None:
        """Return the row of the episode that has the turn now, with a reply."""
        reply = self._reply(conversation, EndedTurn(ended.place, row, stopped=True), step)
        if reply is None or isinstance(reply, TurnRow):
            return reply
        row.reply(reply)
        return row

    def _continued(
        self, conversation: Conversation, ended: EndedTurn, history: Sequence[Mapping[str, Any]], step: Step
    ) -> TurnRow | None:
        """Return the row that a history continues, or a new one; None if there is no room for it and a token."""
        tools = self._kind_of(conversation.prompt).tools if step.tools is None else self._rendered_tools(step.tools)
        for turn in conversation.row_turns[len(conversation.returned) :]:
            conversation.returned.add(turn.row.exchanged[: turn.num_exchanged], turn, tools=turn.row.tools.schemas)
        match = conversation.returned.find(history, tools=tools.schemas)
        if match.is_edited:
            conversation.edited_histories += 1
            process_runtime().notice(
                "a history contains a turn of the policy whose text or preceding messages were changed (a space "
                "is enough). It begins a new row of the episode, in which that turn is encoded as text. "
                "`edited_histories` in meta counts these histories.",
                once="edited history",
            )
        turn = match.place
        if turn is None or turn.row.row is None:
            return self._new_row(
                conversation, [dict(message) for message in history], tools=tools, variant=step.variant
            )
        reply = Step([dict(message) for message in history[match.count :]])
        row = turn.row.row
        if len(row.ids) == turn.ended:
            conversation.current = conversation.rows.index(turn.row)
            going = self._going_on(conversation, ended, row, reply)
            if going is row and step.variant != turn.row.variant:
                turn.row.variant, row.key = step.variant, self._key(conversation, row.ids, step.variant)
            return going
        # The row continued in another way: a new one begins with its tokens up to this turn.
        until = row.new_row(row.ids[: turn.ended], 0)
        until.turn_spans = [(turn.began, POLICY_ROLE)]
        current = conversation.current
        branch = conversation.begin(
            turn.row.messages[: turn.num_messages], tools, exchanged=turn.row.exchanged[: turn.num_exchanged]
        )
        branch.num_asked, branch.last_text, branch.variant = turn.row.num_asked, turn.text, step.variant
        ids = self._reply(conversation, EndedTurn(ended.place, until, stopped=True), reply)
        if ids is None or isinstance(ids, TurnRow):
            conversation.rows.remove(branch)
            conversation.current = current if ids is None else len(conversation.rows) - 1
            return ids
        branch.num_asked = len(branch.messages)
        branch.row = row.branch(ids, turn.ended, row.key)
        if step.variant != turn.variant or _num_asked(conversation, branch.row.ids, step.variant):
            branch.row.key = self._key(conversation, branch.row.ids, step.variant)
        return branch.row

    def _new_row(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        *,
        tools: RenderedTools,
        variant: str = "",
        exchanged: Sequence[Mapping[str, Any]] | None = None,
    ) -> TurnRow | None:
        """Begin a row of the episode with other messages; return None if they leave no room for a token."""
        before, messages = conversation.at.row, tools.formed(messages)
        assert before is not None
        as_chat = conversation.as_chat or any(message["role"] != "user" for message in messages)
        ids = encode_prompt(
            self.policy.tokenizer,
            messages if as_chat else "".join(message["content"] for message in messages),
            as_chat=as_chat,
            tools=tools.schemas or None,
            template=self.template,
        )
        if len(ids) >= before.most:
            return None
        row = before.new_row(ids, self._key(conversation, ids, variant))
        conversation.begin(messages, tools, row, exchanged=exchanged).variant = variant
        return row

    @staticmethod
    def _key(conversation: Conversation, ids: Sequence[int], variant: str) -> int:
        """Return the key of the random numbers of a row.

        They follow from its tokens, and from how many turns of the episode had the same ones before them: the order in
        which a program sends requests does not change what it receives.
        """
        same = _num_asked(conversation, ids, variant)
        digest = hashlib.blake2b(np.array([same, *ids], np.int64).tobytes() + variant.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") | 1) - conversation.first_key

    def _reply(self, conversation: Conversation, ended: EndedTurn, step: Step) -> Answer:
        """Return the tokens of a reply, and note its messages; None if there is no room for it and another token."""
        may_begin, codec = self.config.history == "rewritten", self.policy.tokenizer
        room = ended.row.most if may_begin else ended.row.tokens_left
        exchanged = _messages_of(step.reply)
        replies = with_call_ids(exchanged, conversation.messages[-1])
        if not replies and conversation.as_chat and isinstance(step.reply, str):
            replies = [{"role": "user", "content": ""}]
        if self.config.max_reply_tokens is not None:
            replies = self._cut(conversation, replies, self.config.max_reply_tokens)
        if room < 0 or sum(len(message["content"]) for message in replies) > _CHARACTERS_A_TOKEN * max(room, 1):
            return None
        if conversation.at.tools.parser is not None:  # it may quote a call, in its own characters
            replies = [{**message, "content": known_text(codec, message["content"])} for message in replies]
        if conversation.as_chat or any(message["role"] != "user" for message in replies):
            rendered = self._rendered(conversation, ended, replies) if may_begin else None
            if rendered is None:
                ids, replies = self._encoded(conversation, ended, replies)
            elif (ids := rendered[0]) is None:
                exchanged = [*conversation.at.exchanged, *exchanged]
                return self._new_row(conversation, rendered[1], tools=conversation.at.tools, exchanged=exchanged)
            else:
                conversation.messages[-1] = rendered[1][len(conversation.messages) - 1]
        else:
            ids = encode_text(codec, "".join(message["content"] for message in replies), add_special_tokens=False)
        if len(ids) > ended.row.tokens_left:
            return None
        conversation.messages.extend(replies)
        conversation.at.exchanged.extend(exchanged)
        return ids

    def _rendered(
        self, conversation: Conversation, ended: EndedTurn, replies: list[dict[str, Any]]
    ) -> tuple[list[int] | None, list[dict[str, Any]]] | None:
        """Return what the chat template shows the policy next: the tokens after its turn, and all messages.

        Without tokens where it rewrites what came before; None if it rejects the messages.
        """
        before, turn = conversation.messages[:-1], conversation.messages[-1]
        for assistant in (turn, {"role": "assistant", "content": conversation.at.last_text}):
            with contextlib.suppress(DataError):
                ids = continued_text(
                    self.policy.tokenizer,
                    before,
                    ended.tokens,
                    assistant,
                    replies,
                    tools=conversation.at.tools.schemas or None,
                    template=self.template,
                    end_token_ids=self.policy.eos_token_ids,
                )
                return ids, [*before, assistant, *replies]
        return None

    def _cut(self, conversation: Conversation, replies: list[dict[str, Any]], left: int) -> list[dict[str, Any]]:
        """Return a reply with at most so many tokens of text; its messages share them, and a mark shows what is cut."""
        has_parser = conversation.at.tools.parser is not None
        cut: list[dict[str, Any]] = []
        for place, message in enumerate(replies):
            most, content = left // (len(replies) - place), message["content"]
            if has_parser:  # as below, of what may be kept
                head = content[: _CHARACTERS_A_TOKEN * (most + 1)]
                content = known_text(self.policy.tokenizer, head) + content[len(head) :]
            shortened, num = cut_text(self.policy.tokenizer, content, most)
            conversation.cut_replies += shortened != content
            cut.append({**message, "content": shortened})
            left -= num
        return cut

    def _encoded(
        self, conversation: Conversation, ended: EndedTurn, replies: list[dict[str, Any]]
    ) -> tuple[list[int], list[dict[str, Any]]]:
        """Return the tokens of a reply by the chat template, and its messages as sent.

        Some templates reject an earlier turn with the words that they are made of: the earlier turns are then excluded
        of what the template sees. Some reject a tool's result after a turn without a call that they can show: only
        then it is sent as a message of the user. The policy's tokens stay in the row in any case, and what it writes
        ends no conversation.
        """
        messages, turn = conversation.messages, conversation.messages[-1]
        prompt = messages[: conversation.at.num_asked]
        text: dict[str, Any] = {"role": "assistant", "content": conversation.at.last_text}
        by_user = [{"role": "user", "content": "\n".join(message["content"] for message in replies)}]
        attempts = [(messages[:-1], turn, replies), (prompt, turn, replies)]
        if conversation.has_malformed_call:
            attempts = [attempts[0], (messages[:-1], text, by_user), (prompt, text, by_user)]
        elif "tool_calls" not in turn or all(message["role"] == "user" for message in replies):
            attempts += [(messages[:-1], text, replies), (prompt, text, replies)]
        refusal: DataError | DefinitionError | None = None
        for before, assistant, sent in attempts:
            try:
                ids = encode_reply(
                    self.policy.tokenizer,
                    before,
                    ended.tokens,
                    sent,
                    turn=assistant,
                    tools=conversation.at.tools.schemas or None,
                    template=self.template,
                    end_token_ids=self.policy.eos_token_ids,
                )
            except (DataError, DefinitionError) as error:
                refusal = refusal or error
                continue
            conversation.messages[-1] = assistant
            if sent is by_user and any(message["role"] != "user" for message in replies):
                conversation.fallback_replies += 1
                process_runtime().notice(
                    f"{name_of(self.policy.tokenizer)} does not support a tool's reply to a malformed call. Such "
                    f"replies are sent as user messages and counted as fallback_replies in `meta` ({refusal}).",
                    once="fallback replies",
                )
            return ids, sent
        assert refusal is not None
        raise refusal

    # Ends

    def _end(self, places: Sequence[int]) -> None:
        """Ask the environments of conversations that are over for their last rewards."""
        in_place: list[tuple[int, Callable[[], Any]]] = []
        for place in places:
            conversation = self.conversations[place]
            del self._turns[place]
            conversation.current = conversation.rows.index(conversation.sampled_rows[-1])
            end = getattr(conversation.environment, "end", None)
            if not callable(end):
                self._take_end(place, None)
            elif self._overlaps[place]:
                self._ending.add(place)
                self._begin(place, functools.partial(end, conversation.finish_reason))
            else:
                in_place.append((place, functools.partial(end, conversation.finish_reason)))
        for (place, _), outcome in zip(in_place, self._outcomes(in_place), strict=True):
            self._take_end(place, outcome)

    def _take_ends(self, *, wait: bool) -> None:
        """Take what `end` returned where it has; nothing that is sampled depends on when that is."""
        for place in sorted(self._ending):
            call = self._calls[place]
            if wait or call.has_ended:
                self._ending.remove(place)
                self._take_end(place, process_runtime().wait(call))

    def _take_end(self, place: int, outcome: Any) -> None:
        """Take the last rewards and values of a conversation, and pass it on."""
        conversation = self.conversations[place]
        try:
            if isinstance(outcome, BaseException):
                conversation.fail(outcome)
            else:
                last = outcome if isinstance(outcome, Step) else Step(rewards=outcome or {})
                conversation.info.update(plain_json(checked_info(last.info)))
                self._gain(conversation, checked_rewards(last.rewards))
        except Exception as error:  # noqa: BLE001 - what `end` gives may be anything; it costs its own conversation
            conversation.fail(error)
        declared = (
            (*(self._kind_of(conversation.prompt).rewards or ()), *self.names) if conversation.failure is None else ()
        )
        conversation.rewards = dict.fromkeys(declared, 0.0) | conversation.rewards
        if self._ended is not None and not (self._may_retry and _is_to_retry(conversation)):
            self._ended(self._places[place], conversation)


def _nothing() -> None:
    """Do nothing: the engine waits for answers itself."""


def _num_asked(conversation: Conversation, ids: Sequence[int], variant: str) -> int:
    """Return the number of turns of an episode that had these tokens before them."""
    return sum(
        turn.variant == variant and turn.row.row is not None and turn.row.row.ids[: turn.began] == ids
        for turn in conversation.row_turns
    )


def _is_to_retry(conversation: Conversation) -> bool:
    """Return whether the world failed a conversation, or the engine left it before it was over."""
    return conversation.failure is not None or conversation.row is None or conversation.row.aborted


def _messages_of(reply: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a reply as messages; none for empty text."""
    if isinstance(reply, str):
        return [{"role": "user", "content": reply}] if reply else []
    return [dict(message) for message in reply]


def _readable(observation: Any) -> Any:
    """Return what `reset` showed as text, messages or None; an error unchanged."""
    if observation is None or isinstance(observation, (str, BaseException)):
        return observation
    if isinstance(observation, Step):
        if observation.history is None:
            raise TypeError(
                "reset returned a Step without a history; it must return text, a list of messages, or a Step with a "
                "history"
            )
        return checked(observation)
    return checked_messages(observation, "what reset returned")


def _reset(environment: Any, prompt: Prompt, seed: int) -> Callable[[], Any]:
    """Return the call that resets an environment; if making it failed, the call raises that."""
    if isinstance(environment, BaseException):
        return functools.partial(_raise, environment)
    return functools.partial(environment.reset, prompt, seed)


def _raise(error: BaseException) -> Any:
    raise error
