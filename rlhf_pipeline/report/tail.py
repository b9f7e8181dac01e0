"""The newest trajectories of a store, and later ones from other processes, as one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_pipeline.buffer.filters import num_completion_tokens
from rlhf_pipeline.buffer.stored_groups import NewIds
from rlhf_pipeline.errors import plain
from rlhf_pipeline.report.stored import Ids, Stored
from rlhf_pipeline.report.words import number
from rlhf_pipeline.run.rows import Row
from trajectory_store import MissingRowError

BATCH_ROWS = 512
_SCAN_ROWS = 16_384
_TRIES = 8
_MOST_TOKENS = 32

_HEADINGS = ("id", "version", "group", "reward", "tokens", "finish")
_LEAST_WIDTHS = (6, 7, 6, 7, 6, 6)

Choose = Callable[[Ids], Ids]
"""Returns the ids to show, in the given order; raises MissingRowError if a trajectory is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One trajectory in brief."""

    place: int
    """Its ordinal in the store, from 1."""
    fields: tuple[str, ...]
    """Id, policy version, group, reward, completion tokens, finish reason."""
    completion: str


class Tail:
    """Follows a store. It only reads, so other processes may append, evict and compact meanwhile.

    Args:
        stored: the open store.
        choose: selects the trajectories to show; None shows all.
    """

    def __init__(self, stored: Stored, choose: Choose | None = None) -> None:
        self._stored = stored
        self._store = stored.store
        self._choose = choose
        self._new = NewIds(self._store, seen=True)

    def newest(self, num: int) -> Iterator[list[Arrival]]:
        """Yield the newest `num` of the selected trajectories, oldest first, in batches."""
        ids = self._stored.ids()
        found: list[Ids] = []
        end, missing = len(ids), num
        while end > 0 and missing > 0:
            first = max(end - (num if self._choose is None else _SCAN_ROWS), 0)
            some = self._wanted(ids[first:end])[-missing:]
            found.append(some)
            end, missing = first, missing - len(some)
        yield from self._batches(np.concatenate(found[::-1]) if found else ids[:0])

    def fresh(self) -> Iterator[list[Arrival]]:
        """Yield the trajectories committed since the last call, in the order of arrival, in batches."""
        self._store.refresh()
        yield from self._batches(self._wanted(self._new.take()))

    def _wanted(self, ids: Ids) -> Ids:
        if self._choose is None:
            return ids
        for _ in range(_TRIES):
            try:
                return self._choose(ids)
            except MissingRowError:
                ids = self._still_there(ids)
        return ids[:0]

    def _batches(self, ids: Ids) -> Iterator[list[Arrival]]:
        for first in range(0, len(ids), BATCH_ROWS):
            some = ids[first : first + BATCH_ROWS]
            for _ in range(_TRIES):
                try:
                    read = self._read(some)
                except MissingRowError:
                    some = self._still_there(some)
                else:
                    yield read
                    break

    def _still_there(self, ids: Ids) -> Ids:
        """Return the ids that have not been evicted."""
        self._store.refresh()
        return ids[np.isin(ids, self._stored.ids())]

    def _read(self, ids: Ids) -> list[Arrival]:
        stored, num = self._stored, len(ids)
        rewards = stored.scalars("task_reward", ids)
        versions, groups = (_wholes(stored.scalars(name, ids), num) for name in ("policy_version", "group_id"))
        tokens = num_completion_tokens(stored.store, ids)
        reasons, completions = stored.texts("finish_reason", ids), stored.texts("completion", ids)
        for row, text in self._token_texts(ids, completions, tokens):
            completions[row] = text
        places = self._places(ids)
        return [
            Arrival(
                place=places[row],
                fields=(
                    str(ids[row]),
                    versions[row],
                    groups[row],
                    "-" if rewards is None else number(float(rewards[row])),
                    str(tokens[row]) if "input_ids" in stored.columns else "-",
                    plain(reasons[row]) or "-",
                ),
                completion=completions[row],
            )
            for row in range(num)
        ]

    def _token_texts(self, ids: Ids, completions: Sequence[str], tokens: Ids) -> Iterator[tuple[int, str]]:
        """Yield the first token ids of the completions whose text is not stored."""
        rows = [row for row, text in enumerate(completions) if not text and tokens[row] > 0]
        # If the prompt's text is stored, an empty completion is really empty.
        prompts = self._stored.texts("prompt", ids[rows])
        rows = [row for row, prompt in zip(rows, prompts, strict=True) if not prompt]
        if not rows:
            return
        heads = self._stored.scalars("num_prompt_tokens", ids[rows])
        for at, (row, values) in enumerate(zip(rows, self._stored.rows("input_ids", ids[rows]) or [], strict=True)):
            said = values[0 if heads is None else int(heads[at]) :].tolist()
            yield row, f"[{' '.join(map(str, said[:_MOST_TOKENS]))}{' ...' if len(said) > _MOST_TOKENS else ''}]"

    def _places(self, ids: Ids) -> list[int]:
        """Return each trajectory's ordinal in the store; `ids` are in the order of arrival."""
        known = self._stored.ids()
        first = self._store.watermark - len(known) + 1
        for nearby in (known[-4 * BATCH_ROWS :], known):
            at = np.flatnonzero(np.isin(nearby, ids))
            if len(at) == len(ids):
                return (at + (first + len(known) - len(nearby))).tolist()
        return [first] * len(ids)  # some were just evicted, so these are the oldest


def _wholes(values: Any, num: int) -> list[str]:
    return ["-"] * num if values is None else ["-" if value < 0 else str(value) for value in values.tolist()]


class Table:
    """The lines of a growing table, whose columns only get wider.

    Args:
        width: columns of the terminal; completions are cut to fit.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._widths = list(_LEAST_WIDTHS)

    def lines(self, arrivals: Sequence[Arrival], *, heading: bool = False) -> list[str]:
        """Return one line per trajectory, with an optional heading."""
        for item in arrivals:
            self._widths = [max(space, len(text)) for space, text in zip(self._widths, item.fields, strict=True)]
        above = [self._line(_HEADINGS, "completion")] if heading else []
        return above + [self._line(item.fields, item.completion) for item in arrivals]

    def _line(self, fields: Sequence[str], completion: str) -> str:
        head = "  ".join(f"{text:>{space}}" for text, space in zip(fields, self._widths, strict=True))
        room = max(self._width - len(head) - 2, 12)
        start = plain(completion[: room + 1]).replace("\n", "\\n")  # the rest may be long and is not shown
        return f"{head}  {start if len(start) <= room else start[: room - 3] + '...'}"


_SHOWN = (
    ("task_reward", "reward", 3),
    ("loss", "loss", 4),
    ("kl_k1", "kl", 4),
    ("clip_fraction", "clip", 3),
    ("entropy", "entropy", 2),
    ("ess", "ess", 2),
    ("grad_norm", "grad", 3),
    ("staleness", "age", 1),
    ("tokens_per_s", "tok/s", 0),
)


def step_line(row: Row) -> str:
    """Return one row of `metrics.jsonl` as a line.

    >>> step_line({"step": 3, "task_reward": 0.25, "loss": -0.01, "kl_k1": None, "tokens_per_s": 21450.0})
    'step 3: reward 0.250, loss -0.0100, tok/s 21.4k'
    """
    parts = [f"{name} {number(row[key], digits)}" for key, name, digits in _SHOWN if row.get(key) is not None]
    return f"step {row['step']}{': ' if parts else ''}{', '.join(parts)}"


def interleaved(arrivals: Sequence[Arrival], lines: Sequence[str], steps: Sequence[Row]) -> list[str]:
    """Return trajectory and step lines in order: a step follows the trajectories that it could have used.

    Args:
        arrivals: trajectories in the order of arrival.
        lines: their lines.
        steps: rows of `metrics.jsonl` in order; one without a `watermark` goes last.
    """
    places = [item.place for item in arrivals]
    keys = [(place, 0, at) for at, place in enumerate(places)]
    marks = [row.get("watermark") for row in steps]
    keys += [(max([0, *places]) if mark is None else mark, 1, at) for at, mark in enumerate(marks)]
    return [lines[at] if kind == 0 else step_line(steps[at]) for _, kind, at in sorted(keys)]
