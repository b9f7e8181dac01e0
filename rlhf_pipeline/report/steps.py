"""How optimizer steps used trajectories, as the ledger records: learned from, without a gradient, or excluded."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.report.stored import Ids, Stored
from rlhf_pipeline.run.folder import RunFolder

Answer = dict[str, Any]

MOST_CELLS: Final = 256
"""Members of a group that a step lists one by one; its counts cover all members."""
_PROMPT_CHARACTERS: Final = 200
"""Characters of a prompt in a table."""
_MOST_LEDGER_BYTES = 1 << 26


def groups_of(stored: Stored, ids: Ids, no_gradient: Ids | None, *, offset: int, limit: int) -> list[Answer]:
    """Return the groups of a step's trajectories, in the order of the batch, with counts over all their members here.

    Args:
        stored: the store.
        ids: the step's trajectories that are stored still, [N].
        no_gradient: those of them that taught nothing; None if the ledger does not record it.
        offset: the number of groups to skip.
        limit: return at most so many.

    Returns:
        Of each group `group`, `num`, `num_failed`, `reward_mean`, `advantages` (lowest, highest), `num_taught` and
        the beginning of its `prompt`; and of its first members `ids`, `rewards`, `taught`. Trajectories without a group
        are one group.
    """
    if not len(ids):
        return []
    codes, first, place = _groups(stored, ids)
    order = np.argsort(first, kind="stable")[offset : offset + limit]
    rewards, advantages = (_floats(stored, name, ids) for name in ("task_reward", "advantage"))
    teaches = None if no_gradient is None else ~np.isin(ids, no_gradient)
    prompts = stored.texts("prompt", ids[first[order]])
    return [
        _group(int(codes[code]), np.flatnonzero(place == code), ids, rewards, advantages, teaches, prompt)
        for code, prompt in zip(order.tolist(), prompts, strict=True)
    ]


def num_groups(stored: Stored, ids: Ids) -> int:
    """Return the number of groups of trajectories; trajectories without a group count as one group."""
    return len(_groups(stored, ids)[0]) if len(ids) else 0


def _groups(stored: Stored, ids: Ids) -> tuple[Ids, Ids, Ids]:
    """Return the groups' numbers, the position of each group's first member, and that of each trajectory's group."""
    groups = stored.scalars("group_id", ids)
    return np.unique(np.full(len(ids), -1) if groups is None else groups, return_index=True, return_inverse=True)


def _group(
    code: int,
    at: Ids,
    ids: Ids,
    rewards: npt.NDArray[np.float64],
    advantages: npt.NDArray[np.float64],
    teaches: npt.NDArray[np.bool_] | None,
    prompt: str,
) -> Answer:
    graded = rewards[at][np.isfinite(rewards[at])]
    finite_advantages = advantages[at][np.isfinite(advantages[at])]
    some = at[:MOST_CELLS]
    return {
        "group": code if code >= 0 else None,
        "num": len(at),
        "num_failed": len(at) - len(graded),
        "reward_mean": float(graded.mean()) if len(graded) else None,
        "advantages": [float(finite_advantages.min()), float(finite_advantages.max())]
        if len(finite_advantages)
        else None,
        "num_taught": None if teaches is None else int(teaches[at].sum()),
        "prompt": prompt[:_PROMPT_CHARACTERS],
        "ids": [str(id) for id in ids[some].tolist()],
        "rewards": [reward if np.isfinite(reward) else None for reward in rewards[some].tolist()],
        "taught": None if teaches is None else [int(teach) for teach in teaches[some]],
    }


def _floats(stored: Stored, name: str, ids: Ids) -> npt.NDArray[np.float64]:
    values = stored.scalars(name, ids)
    return np.full(len(ids), np.nan) if values is None else values.astype(np.float64)


def uses_of(run: RunFolder | None, ids: Sequence[int], version: int | None) -> list[Answer]:
    """Return the steps that used trajectories: `step`, the ids in `taught`, and the ids `without_gradient`.

    A ledger row that does not record which rows taught something has None for both.

    Args:
        run: the run; None or one without a ledger gives no steps.
        ids: trajectories that were sampled at about the same time.
        version: the version that sampled them; the ledger is read from it on. None reads it from the start.
    """
    if run is None or not ids or not len(ledger := run.rows(run.ledger_file)):
        return []
    replay = run.config.pipeline.get("replay")
    age = run.config.pipeline.get("buffer", {}).get("max_staleness")
    place = None if replay or version is None else ledger.place_of(version + 1)
    last = len(ledger) if place is None or age is None else min(place + age + 2, len(ledger))
    begin, end = (ledger.start_of(ledger[0]["step"] + at) for at in (place or 0, last))
    with run.ledger_file.open("rb") as file:
        file.seek(begin)
        data = file.read(min(end - begin, _MOST_LEDGER_BYTES))
    row_ids, names = set(ids), b"|".join(b"%d" % id for id in ids)
    pattern = re.compile(rb'"row_ids": ?\[[\d, ]*?(?<!\d)(?:%b)(?!\d)' % names)
    uses = []
    for line in data.split(b"\n"):
        if not pattern.search(line):
            continue
        row = json.loads(line)
        mine, idle = row_ids & set(row["row_ids"]), row.get("no_gradient")
        uses.append(
            {
                "step": row["step"],
                "taught": None if idle is None else sorted(map(str, mine.difference(idle))),
                "without_gradient": None if idle is None else sorted(map(str, mine.intersection(idle))),
            }
        )
    return uses
