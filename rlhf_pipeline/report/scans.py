"""Passes over the rows of a store in parts: filtering, ordering and counting need the memory of one part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.filters import num_completion_tokens
from rlhf_pipeline.buffer.text_search import text_bytes
from rlhf_pipeline.data.episodes import stored_last_rows
from rlhf_pipeline.report.row_fields import order_of
from rlhf_pipeline.report.stored import Ids, Stored
from trajectory_store import Arrivals

_BLOCK_ROWS = 1 << 16
_MOST_VALUES = 50


@dataclass(frozen=True, slots=True)
class MatchingRows:
    """Some of the rows of a store, in the order of arrival; a slice gives their ids."""

    arrivals: Arrivals
    positions: Ids | None = None
    """Their positions in the order of arrival, ascending, [K] int64; None for all."""

    def __len__(self) -> int:
        return len(self.arrivals) if self.positions is None else len(self.positions)

    def __getitem__(self, part: slice) -> Ids:
        if self.positions is None:
            return self.arrivals[part]
        return self.arrivals.take(self.positions[part])

    def parts(self) -> Iterator[Ids]:
        """Yield their ids, some at a time."""
        for first in range(0, len(self), _BLOCK_ROWS):
            yield self[first : first + _BLOCK_ROWS]

    def meeting(self, condition: Callable[[Ids], npt.NDArray[np.bool_]]) -> MatchingRows:
        """Return the rows that meet a condition, a function of ids that returns a mask."""
        places, first = [np.zeros(0, np.int64)], 0
        for ids in self.parts():
            places.append(first + np.flatnonzero(condition(ids)))
            first += len(ids)
        chosen = np.concatenate(places)
        if len(chosen) == len(self):
            return self
        return MatchingRows(self.arrivals, chosen if self.positions is None else self.positions[chosen])

    def count(self, condition: Callable[[Ids], npt.NDArray[np.bool_]]) -> int:
        """Return how many meet a condition."""
        return sum(int(np.count_nonzero(condition(ids))) for ids in self.parts())

    def gathered(self, read: Callable[[Ids], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return one value for each, read in parts."""
        parts = [read(ids) for ids in self.parts()]
        return np.concatenate(parts) if parts else np.zeros(0)


def all_rows(stored: Stored) -> MatchingRows:
    """Return all rows of a store as of its last refresh."""
    return MatchingRows(stored.store.arrivals())


def rows_with(stored: Stored, name: str, value: int) -> Ids:
    """Return the ids of the rows that have a value in a column of whole numbers; none without the column."""
    if name not in stored.columns:
        return np.zeros(0, np.int64)
    return all_rows(stored).meeting(lambda ids: stored.store.read_scalars(name, ids) == value)[:]


def page_of(stored: Stored, matches: MatchingRows, sort: str, offset: int, limit: int) -> Ids:
    """Return a page of ids in an order; no more values than the page needs are kept. NaN comes last.

    Args:
        stored: the store.
        matches: the rows to order.
        sort: `id` or a field with a number, `-` before it for the largest first. Of equal values the first to arrive
            comes first.
        offset: rows before the page.
        limit: rows of the page.
    """
    key, is_descending = sort.removeprefix("-"), sort.startswith("-")
    num = len(matches)
    if key == "id":
        if is_descending:
            return matches[max(num - offset - limit, 0) : max(num - offset, 0)][::-1]
        return matches[offset : offset + limit]
    top = min(offset + limit, num)
    best_values, best_ids = np.zeros(0), np.zeros(0, np.int64)
    for ids in matches.parts():
        values = order_of(stored, key, ids)
        values = np.where(np.isnan(values), np.inf, -values if is_descending else values)
        best_values, best_ids = np.concatenate([best_values, values]), np.concatenate([best_ids, ids])
        if len(best_ids) > max(top, _BLOCK_ROWS):
            first = np.argsort(best_values, kind="stable")[:top]
            first.sort()  # in the order of arrival again, which decides between equal values
            best_values, best_ids = best_values[first], best_ids[first]
    return best_ids[np.argsort(best_values, kind="stable")][offset : offset + limit]


def text_counts(stored: Stored, name: str, matches: MatchingRows) -> dict[str, int]:
    """Count a text column's values by their bytes, the most frequent first."""
    counts: Counter[bytes] = Counter()
    for ids in matches.parts() if name in stored.columns else ():
        flat, starts = text_bytes(stored.store, name, ids)
        lengths = np.diff(starts)
        for length in np.unique(lengths).tolist():
            rows = flat[starts[:-1][lengths == length, None] + np.arange(length)]
            texts = np.ascontiguousarray(rows).view(f"V{length}").ravel() if length else np.zeros(0, "V1")
            counts[b""] += 0 if length else int((lengths == 0).sum())
            for text, num in zip(*np.unique(texts, return_counts=True), strict=True):
                counts[text.tobytes()] += int(num)
    return {text.decode("utf-8", "replace"): num for text, num in counts.most_common(_MOST_VALUES) if num}


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """Statistics of the rows of some policy versions, by version, ascending: [K] each."""

    num_versions: int
    """The number of versions from which these were selected."""
    versions: Ids
    num: npt.NDArray[np.float64]
    graded: npt.NDArray[np.float64]
    """The number of rows with a reward."""
    rewards: npt.NDArray[np.float64]
    """The sum of their rewards."""
    tokens: npt.NDArray[np.float64]
    """The sum of the tokens after the prompt."""
    failed: npt.NDArray[np.float64]
    """The number of episodes without a reward."""
    groups: npt.NDArray[np.float64]
    """The number of their groups with several rewards."""
    flat_groups: npt.NDArray[np.float64]
    """The number of these groups whose rewards are equal."""


def by_version(stored: Stored, most: int, *, first: int = -1) -> Versions:
    """Add up rewards and lengths of at most so many policy versions, evenly spaced, the first and the last included.

    Args:
        stored: the store.
        most: the most versions.
        first: the first version that counts.
    """
    rows = all_rows(stored)
    blocks = rows.parts() if "policy_version" in stored.columns else ()
    parts = [np.unique(stored.store.read_scalars("policy_version", ids)) for ids in blocks]
    distinct = np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))
    distinct = distinct[distinct >= first]
    places = np.linspace(0, max(len(distinct) - 1, 0), min(most, len(distinct))).round().astype(np.int64)
    versions = distinct[np.unique(places)]
    sums = np.zeros((5, len(versions)))
    members = [np.zeros((3, 0))]
    for ids in rows.parts() if len(versions) else ():
        mine = np.asarray(stored.store.read_scalars("policy_version", ids), np.int64)
        place = np.minimum(np.searchsorted(versions, mine), len(versions) - 1)
        is_chosen = versions[place] == mine
        ids, place = ids[is_chosen], place[is_chosen]
        rewards = stored.scalars("task_reward", ids)
        rewards = np.full(len(ids), np.nan) if rewards is None else rewards.astype(np.float64)
        is_graded, groups = np.isfinite(rewards), stored.scalars("group_id", ids)
        is_failed = ~is_graded & stored_last_rows(stored.store, ids)
        lengths = num_completion_tokens(stored.store, ids)
        columns = np.ones(len(ids)), is_graded, np.where(is_graded, rewards, 0.0), lengths, is_failed
        for total, column in zip(sums, columns, strict=True):
            np.add.at(total, place, column)
        if groups is not None:
            counts = is_graded & (groups >= 0)
            members.append(np.stack([place, groups, rewards])[:, counts])
    num, graded, total_rewards, tokens, failed = sums
    groups, flat_groups = _spread(np.concatenate(members, axis=1), len(versions))
    return Versions(
        num_versions=len(distinct),
        versions=versions,
        num=num,
        graded=graded,
        rewards=total_rewards,
        tokens=tokens,
        failed=failed,
        groups=groups,
        flat_groups=flat_groups,
    )


def _spread(
    members: npt.NDArray[np.float64], num_versions: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return how many groups of several members each version has, and how many of them have equal rewards.

    Args:
        members: [3, N], the place of the version, the group and the reward of each.
        num_versions: how many versions there are.
    """
    place, groups, rewards = members[:, np.lexsort(members[1::-1])]
    if not len(place):
        return np.zeros(num_versions), np.zeros(num_versions)
    first = np.flatnonzero(np.append(True, (np.diff(place) != 0) | (np.diff(groups) != 0)))
    lowest, highest = (extreme.reduceat(rewards, first) for extreme in (np.minimum, np.maximum))
    is_group = np.diff(np.append(first, len(place))) > 1
    of_version = place[first].astype(np.int64)
    num = np.bincount(of_version[is_group], minlength=num_versions).astype(np.float64)
    flat = np.bincount(of_version[is_group & (lowest == highest)], minlength=num_versions).astype(np.float64)
    return num, flat
