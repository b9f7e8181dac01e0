"""Conversations as an engine sees them: rows of tokens that a partner answers, turn by turn.

A turn ends with an end token or at its limit. The partner answers it with tokens, which the policy reads and has not
sampled, or ends the conversation; or it answers later, and the conversation waits without a slot. Sampled ids stay as
they are: nothing is encoded again. Where the policy is to read something else than the row and more tokens, the partner
answers with another row: a new one, or an earlier one with its reply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from rlhf_pipeline.data.keys import POLICY_ROLE, REPLY_ROLE
from rlhf_pipeline.policies.engines.protocol import Engine, Request, WeightRefresh

LONG_REPLY: Final = 16
"""A longer reply is computed in one pass with the complete row; a shorter one token by token with the other rows."""


@dataclass(slots=True, eq=False)
class TurnRow:
    """One row of a conversation, which usually has no other."""

    ids: list[int]
    num_prompt: int
    most: int
    log_probs: list[float]
    log_mass: list[float] = field(default_factory=list)
    turn_spans: list[tuple[int, int]] = field(default_factory=list)
    version_spans: list[tuple[int, int]] = field(default_factory=list)
    over: bool = False
    aborted: bool = False
    key: int = 0
    """Separates the random numbers of the rows of a conversation; 0 in the first row."""
    branched: tuple[int, int] = (0, 0)
    """If the row continues a part of another row: the numbers of tokens and of spans of that part after its prompt. The
    random numbers of a turn also depend on its position among them, so the order of two continuations has no effect."""

    @classmethod
    def begin(cls, prompt: Sequence[int], most: int, *, key: int = 0, has_mass: bool = False) -> TurnRow:
        """Return a row before its first turn."""
        ids = [int(token) for token in prompt]
        row = cls(ids, len(ids), most, [math.nan] * len(ids), [0.0] * len(ids) if has_mass else [], key=key)
        row.turn_spans.append((len(ids), POLICY_ROLE))
        return row

    def new_row(self, prompt: Sequence[int], key: int) -> TurnRow:
        """Return a new row of the same conversation."""
        return TurnRow.begin(prompt, self.most, key=key, has_mass=bool(self.log_mass))

    def branch(self, reply: Sequence[int], until: int, key: int) -> TurnRow:
        """Return a new row that begins with the tokens of this one up to a place, and a reply."""
        row = self.new_row([*self.ids[:until], *reply], key)
        spans = sum(start < until for start, _ in self.turn_spans) + bool(reply)
        before, spans_before = self.branched
        row.branched = (before + row.num_prompt - self.num_prompt, spans_before + spans)
        return row

    @property
    def began(self) -> int:
        """The position of the first token of the newest turn or reply."""
        return self.turn_spans[-1][0]

    @property
    def tokens_left(self) -> int:
        """The maximum number of tokens of a reply after which one more token can be sampled."""
        return self.most - len(self.ids) - 1

    @property
    def mask(self) -> list[bool]:
        """Which tokens the policy sampled, bool [T]."""
        sampled = [False] * len(self.ids)
        ends = [start for start, _ in self.turn_spans[1:]] + [len(self.ids)]
        for (start, role), end in zip(self.turn_spans, ends, strict=True):
            sampled[start:end] = [role == POLICY_ROLE] * (end - start)
        return sampled

    def sampled(self, tokens: Sequence[int], log_probs: Sequence[float], log_mass: Sequence[float] = ()) -> None:
        """Append tokens of the policy."""
        self.ids += tokens
        self.log_probs += log_probs
        self.log_mass += log_mass

    def version(self, place: int, version: int | None) -> None:
        """Note the version that sampled the tokens from a place on."""
        if version is not None and (not self.version_spans or self.version_spans[-1][1] != version):
            self.version_spans.append((place, version))

    def reply(self, tokens: Sequence[int]) -> None:
        """Append a reply, and begin the next turn of the policy."""
        if tokens:
            self.turn_spans.append((len(self.ids), REPLY_ROLE))
        self.ids += tokens
        self.log_probs += [math.nan] * len(tokens)
        if self.log_mass:
            self.log_mass += [0.0] * len(tokens)
        self.turn_spans.append((len(self.ids), POLICY_ROLE))


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that has ended."""

    place: int
    row: TurnRow
    stopped: bool

    @property
    def tokens(self) -> list[int]:
        """The sampled tokens of the turn."""
        return self.row.ids[self.row.began :]


Answer = Sequence[int] | TurnRow | None
"""The tokens of a reply, at most `TurnRow.tokens_left`; another row of the conversation, including its reply, which the
policy continues next; or None if the conversation is over."""
Answers = Mapping[int, Answer]
"""The answer for each conversation."""


class Partner(Protocol):
    """Answers turns; called in the thread that samples."""

    reply_after: int
    """Token steps after a turn at which a reply that was not returned immediately is due."""

    def answer(self, ended: Sequence[EndedTurn]) -> Answers:
        """Take turns that ended together; those that the result lacks are answered later."""
        ...

    def fetch(self, places: Sequence[int], go_on: Callable[[], bool]) -> Answers | None:
        """Wait for exactly these missing answers, which are due; None if `go_on` has returned False meanwhile."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake`, in any thread, whenever a missing answer has arrived."""
        ...

    def arrived(self) -> Answers:
        """Return the missing answers that have arrived: for an engine whose batches are not reproducible."""
        ...


@runtime_checkable
class TurnEngine(Engine, Protocol):
    """An engine with its own loop for conversations, because it keeps caches or counts steps between turns."""

    def converse(
        self, request: Request, partner: Partner, *, row_tokens: int, refresh: WeightRefresh | None = None
    ) -> list[TurnRow]:
        """Run conversations until each is over, prompt-major and member-minor.

        A deadline and `abort` also end those that wait for an answer: their rows are `aborted`.

        Args:
            request: the prompts of the conversations; its limits are those of a turn.
            partner: answers turns.
            row_tokens: the most tokens of a row.
            refresh: loads newer weights during sampling.
        """
        ...


def begin_rows(request: Request, row_tokens: int) -> list[TurnRow]:
    """Return the rows of a request's conversations before their first turn, prompt-major and member-minor."""
    has_mass = request.truncation is not None
    return [
        TurnRow.begin(prompt, row_tokens, has_mass=has_mass)
        for prompt in request.prompts
        for _ in range(request.group_size)
    ]
