"""Whether stored conversations are the tokens that the policy saw and sampled.

Text can be encoded in several ways, so a conversation whose text was encoded again may differ from what was
sampled although its text is equal. The stored columns are checked: turns against mask and log-probs, the prompt of
each member against its group's, and the beginning of a continued conversation against the one that it continues.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.data.keys import EPISODE_ID, EPISODE_ROW, EPISODE_SIZE, POLICY_ROLE
from rlhf_pipeline.errors import count
from rlhf_pipeline.report.stored import Ids, Stored

_NEEDED = ("turn_spans", "assistant_mask", "log_probs", "num_prompt_tokens")
_EXAMPLES = 8


def turns_problem(
    spans: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_], log_probs: npt.NDArray[np.float32], num_prompt: int
) -> str | None:
    """Return the contradiction to the turns of a row, or None.

    Args:
        spans: int64 [n, 2], first token and role (1 the policy, 0 a reply) of each turn.
        mask: bool [T], the tokens that the policy sampled.
        log_probs: float32 [T], in nats; NaN where there is none.
        num_prompt: tokens of the prompt.

    >>> mask, log_probs = np.array([False, True, False]), np.array([np.nan, -1.0, np.nan])
    >>> turns_problem(np.array([[1, 1], [2, 0]]), mask, log_probs, 1) is None
    True
    >>> turns_problem(np.array([[1, 1]]), mask, log_probs, 1)
    'token 2 belongs to a turn of the policy, but the mask marks it as not sampled'
    """
    starts, roles = spans[:, 0], spans[:, 1]
    if starts[0] != num_prompt or (np.diff(starts) <= 0).any() or starts[-1] > len(mask):
        return f"its turns begin at {starts.tolist()}, in a row of {len(mask)} tokens with a prompt of {num_prompt}"
    sampled = np.repeat(np.append(0, roles), np.diff(np.concatenate([[0], starts, [len(mask)]]))) == POLICY_ROLE
    if (wrong := np.flatnonzero(sampled != mask)).size:
        whose, negation = ("a turn of the policy", "not ") if sampled[wrong[0]] else ("the prompt or a reply", "")
        return f"token {wrong[0]} belongs to {whose}, but the mask marks it as {negation}sampled"
    if (wrong := np.flatnonzero(np.isfinite(log_probs) & ~mask)).size:
        return f"token {wrong[0]} was not sampled but has a log-prob"
    return None


def drifted(stored: Stored) -> Iterator[tuple[int, str]]:
    """Yield the conversations that differ from the sampled tokens, as far as a store shows: row id and reason."""
    if set(_NEEDED) <= set(stored.columns):
        prompts: dict[int, tuple[bytes, int]] = {}
        for ids in stored.blocks():
            ids = ids[stored.store.lengths("turn_spans", ids) > 0]
            rows = stored.store.read(ids, [*_NEEDED, "input_ids", "group_id"])
            alone = np.ones(len(ids), bool)  # rows of an episode of several begin with other prompts
            if EPISODE_SIZE in stored.columns:
                alone = stored.store.read_scalars(str(EPISODE_SIZE), ids) == 1
            for i, row in enumerate(ids.tolist()):
                columns = [rows[name][i] for name in _NEEDED]
                problem, group = turns_problem(*columns), int(rows["group_id"][i])
                prompt = rows["input_ids"][i][: columns[-1]].tobytes()
                if problem is None and alone[i] and group >= 0:
                    before, earlier_row = prompts.setdefault(group, (prompt, row))
                    if before != prompt and _have_equal_prompts(stored, earlier_row, row):
                        problem = f"its prompt has other tokens than the prompt of another member of group {group}"
                if problem is not None:
                    yield row, problem
    if EPISODE_SIZE in stored.columns:
        yield from _without_all_rows(stored)
    if {"parent_id", "trajectory_id", "num_prompt_tokens"} <= set(stored.columns):
        yield from _continued(stored)


def _have_equal_prompts(stored: Stored, row_a: int, row_b: int) -> bool:
    """Return whether two members began with the same messages; an agent program may show others to each."""
    if "meta" not in stored.columns:
        return True
    metas = [json.loads(text or "{}") for text in stored.store.read(np.array([row_a, row_b]), ["meta"])["meta"]]
    prompts = [meta.get("messages", [])[: meta.get("graded", {}).get("num_asked")] for meta in metas]
    return prompts[0] == prompts[1]


def _without_all_rows(stored: Stored) -> Iterator[tuple[int, str]]:
    """Look for rows beside which a row of the same episode is missing: rows of an episode have consecutive ids."""
    for ids in stored.blocks():
        names = (str(name) for name in (EPISODE_ID, EPISODE_ROW, EPISODE_SIZE))
        episode, position, size = (stored.store.read_scalars(name, ids) for name in names)
        lacks = np.zeros(len(ids), bool)
        for step, has_neighbour in ((1, position < size - 1), (-1, position > 0)):
            at = np.flatnonzero(has_neighbour)
            is_stored = stored.store.holds(ids[at] + step)
            same = np.zeros(len(at), bool)
            same[is_stored] = (
                stored.store.read_scalars(str(EPISODE_ID), ids[at][is_stored] + step) == (episode[at][is_stored])
            )
            lacks[at[~same]] = True
        for at in np.flatnonzero(lacks).tolist():
            yield (
                int(ids[at]),
                f"it is row {position[at]} of an episode of {size[at]}, but the adjacent row is missing",
            )


def _continued(stored: Stored) -> Iterator[tuple[int, str]]:
    """Compare continued conversations with those that they continue, where these are still stored."""
    arrivals, parents = stored.store.arrivals(), stored.scalars("parent_id")
    trajectory_ids = stored.scalars("trajectory_id")
    if parents is None or trajectory_ids is None:
        return
    order = np.argsort(trajectory_ids, kind="stable")
    for at in np.flatnonzero(parents >= 0).tolist():
        place = min(int(np.searchsorted(trajectory_ids, parents[at], sorter=order)), len(arrivals) - 1)
        if trajectory_ids[order[place]] != parents[at]:
            continue
        pair: Ids = arrivals.take(np.array([at, order[place]]))
        rows: dict[str, Any] = stored.store.read(pair, ["input_ids", "num_prompt_tokens"])
        child, parent = rows["input_ids"]
        common = min(int(rows["num_prompt_tokens"][0]), len(parent))
        if (wrong := np.flatnonzero(child[:common] != parent[:common])).size:
            yield (
                int(pair[0]),
                f"it continues trajectory {parents[at]}, but token {wrong[0]} differs from the sampled token",
            )


def drift_text(problems: list[tuple[int, str]]) -> str:
    """Return the finding on drifted conversations as text."""
    some = "; ".join(f"id {row}: {problem}" for row, problem in problems[:_EXAMPLES])
    return (
        f"{count(len(problems), 'conversation')} with tokens that differ from the sampled tokens ({some}). Exclude "
        "these ids, and store the sampled tokens unchanged."
    )
