"""Conversations whose turns are requests: the next turn is sent when its reply has arrived, whatever others wait for.

The random numbers of a turn follow from the request's seed, the stream and member of its conversation, and the place of
the turn in it, so no order of arrival decides them.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

from rlhf_pipeline.policies.engines.protocol import Engine, RaggedCompletions, Request, WeightRefresh
from rlhf_pipeline.policies.engines.turn_rows import Answers, EndedTurn, Partner, TurnEngine, TurnRow, begin_rows

MOST_REQUESTS: Final = 256
"""The maximum number of turns that are sampled concurrently if each has a thread; further turns wait."""
LOOK_S: Final = 0.5
"""The interval at which newer weights, the deadline and an abort are checked while no response arrives."""
_TURN: Final = 1 << 40
"""Separates the random streams of turns."""


def converse(
    engine: Engine, request: Request, partner: Partner, *, row_tokens: int, refresh: WeightRefresh | None = None
) -> list[TurnRow]:
    """Run conversations on any engine until each is over; see `TurnEngine.converse`.

    An engine without its own loop gets one `generate` per turn, in several threads.
    """
    if isinstance(engine, TurnEngine):
        return engine.converse(request, partner, row_tokens=row_tokens, refresh=refresh)
    turns = TurnRequests(request, partner, row_tokens=row_tokens)
    return run_turns(turns, _Generate(engine, request.deadline_s, refresh))


class TurnRequests:
    """The rows of conversations, and which of them are to be sampled, are being sampled, or wait for an answer.

    Args:
        request: the prompts of the conversations; its limits are those of a turn.
        partner: answers turns.
        row_tokens: the most tokens of a row.
    """

    def __init__(self, request: Request, partner: Partner, *, row_tokens: int) -> None:
        self.partner = partner
        self.rows = begin_rows(request, row_tokens)
        self.waiting = 0
        """Conversations that wait for an answer."""
        self._request = request
        self._limits = request.limits().tolist()
        self._streams, self._members = request.streams(), request.member_of.tolist()
        self._ready = list(range(len(self.rows)))

    def take(self) -> Iterator[tuple[int, Request]]:
        """Yield each conversation whose next turn can be sampled, with the request of that turn."""
        while self._ready:
            place = self._ready.pop(0)
            yield place, self._turn(place)

    def _turn(self, place: int) -> Request:
        row, request = self.rows[place], self._request
        stream = self._streams[place // request.group_size]
        spans = len(row.turn_spans) + row.branched[1]
        return Request(
            prompts=[row.ids],
            max_new_tokens=min(self._limits[place], row.tokens_left + 1),
            temperature=request.temperature,
            end_token_ids=request.end_token_ids,
            seed=request.seed,
            stream_ids=[stream + _TURN * (self._members[place] + (spans << 12)) + row.key],
            truncation=request.truncation,
            stops=request.stops,
        )

    def ended(self, place: int, turn: RaggedCompletions) -> bool:
        """Take a sampled turn, and pass it on; return False if it was cut short."""
        row, request = self.rows[place], self._request
        (sampled,) = turn
        if sampled.finish_reason == "abort":
            return False
        tokens, stops = sampled.token_ids, request.stops
        if stops is not None:
            tokens = tokens[: stops.length(tokens)]
        mass = turn.support_log_mass
        for start, version in [] if turn.spans is None else turn.spans.lists()[0]:
            if start < len(tokens):
                row.version(row.began + start, version)
        row.sampled(
            tokens, sampled.log_probs.tolist()[: len(tokens)], [] if mass is None else mass.tolist()[: len(tokens)]
        )
        stopped = tokens[-1] in request.end_token_ids or (stops is not None and stops.ends(tokens))
        self.waiting += 1
        self._take(self.partner.answer([EndedTurn(place, row, stopped)]))
        return True

    def take_arrived(self) -> None:
        """Take the answers that have arrived."""
        self._take(self.partner.arrived())

    def _take(self, answers: Answers) -> None:
        for place, reply in sorted(answers.items()):
            self.waiting -= 1
            if reply is None:
                self.rows[place].over = True
                continue
            if isinstance(reply, TurnRow):
                self.rows[place] = reply
            else:
                self.rows[place].reply(reply)
            self._ready.append(place)

    def result(self) -> list[TurnRow]:
        """Return the rows; those that are not over were cut short."""
        for row in self.rows:
            row.aborted = not row.over
        return self.rows


class TurnSampler(Protocol):
    """Samples the turns of one call."""

    def sample(self, request: Request) -> RaggedCompletions:
        """Sample one turn; called in several threads."""
        ...

    def look(self) -> None:
        """Load newer weights, if there are any; called every `LOOK_S` seconds or more often."""
        ...

    def must_end(self) -> bool:
        """Return whether to end the call early: it is past its deadline, or was aborted."""
        ...

    def drop(self) -> None:
        """End the turns that are being sampled, and drop them; called repeatedly until they have ended."""
        ...


def run_turns(turns: TurnRequests, sampler: TurnSampler, *, look_s: float = LOOK_S) -> list[TurnRow]:
    """Sample each turn in a thread as soon as its reply has arrived; answers are taken in the calling thread."""
    events: queue.SimpleQueue[tuple[int, Future[RaggedCompletions]] | None] = queue.SimpleQueue()
    turns.partner.listen(lambda: events.put(None))
    sampling: set[Future[RaggedCompletions]] = set()
    looked, going = time.monotonic(), True
    pool = ThreadPoolExecutor(max(min(len(turns.rows), MOST_REQUESTS), 1), thread_name_prefix="turns")
    try:
        while going:
            for place, request in turns.take():
                future = pool.submit(sampler.sample, request)
                sampling.add(future)
                future.add_done_callback(lambda future, place=place: events.put((place, future)))
            if not sampling and not turns.waiting:
                break
            event = _next(events, look_s)
            if event is not None:
                place, future = event
                sampling.discard(future)
                going = turns.ended(place, future.result())
            turns.take_arrived()
            if time.monotonic() - looked >= look_s:
                sampler.look()
                looked = time.monotonic()
            going = going and not sampler.must_end()
        return turns.result()
    finally:
        for future in sampling:
            future.cancel()
        while not all(future.done() for future in sampling):
            sampler.drop()
            _next(events, look_s)
        pool.shutdown()


def _next(
    events: queue.SimpleQueue[tuple[int, Future[RaggedCompletions]] | None], seconds: float
) -> tuple[int, Future[RaggedCompletions]] | None:
    """Return the next turn that has ended; None if an answer has arrived, or nothing happens for so many seconds."""
    try:
        return events.get(timeout=seconds)
    except queue.Empty:
        return None


def _ended(index: int, tokens: Sequence[int]) -> None:
    """Do nothing: a turn is taken with its log-probs, which come last."""


class _Generate:
    """Samples turns with the `generate` of an engine."""

    def __init__(self, engine: Engine, deadline_s: float | None, refresh: WeightRefresh | None) -> None:
        self._engine, self._refresh = engine, refresh
        self._end = math.inf if deadline_s is None else time.monotonic() + deadline_s

    def sample(self, request: Request) -> RaggedCompletions:
        """See `TurnSampler.sample`."""
        return self._engine.generate(request, None, _ended)

    def look(self) -> None:
        """See `TurnSampler.look`."""
        if self._refresh is not None:
            self._refresh.look()

    def must_end(self) -> bool:
        """See `TurnSampler.must_end`."""
        return time.monotonic() > self._end

    def drop(self) -> None:
        """See `TurnSampler.drop`."""
        self._engine.abort()
