"""The choice of trajectories that a run over stores learns from: made once, at the first start, and recorded."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.checked_rows import sound_rows
from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.config import Replay
from rlhf_pipeline.data.episodes import complete_episodes, stored_last_rows
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError
from rlhf_pipeline.run.address import Address, resolved
from rlhf_pipeline.run.choice_record import record_choice, recorded_choice
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.lookup import open_run_or_store
from trajectory_store import StoreNotFoundError, TrajectoryStore
from trajectory_store.recorder.learnable_rows import learnable_rows, numbered

Ints = npt.NDArray[np.int64]

BATCH_ROWS: Final = 1024
"""The number of trajectories in one commit, which limits memory use; a larger group is not split."""
BATCH_TOKENS: Final = 1 << 20
"""The number of tokens in one commit."""
_LOOKED_AT: Final = 256
"""The number of trajectories of each store whose token ids are checked before a run folder is created."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of what a policy can read."""

    vocabulary: int
    positions: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenStore:
    """The choice from one store."""

    path: str
    watermark: int
    num_stored: int
    num_chosen: int
    num_ungraded: int
    num_repeated: int
    num_damaged: int = 0
    trajectory_shift: int = 0
    group_shift: int = 0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The trajectories to learn from, in the order in which they are gathered, groups together.

    Attributes:
        sources: one for each store.
        source: int64 [n], the store of each row.
        row: int64 [n], its row id in that store.
        trajectory_id: int64 [n], its trajectory id in the run's store.
        group_id: int64 [n], its group id in the run's store.
        ends: int64, where the batches end; each consists of whole groups of one store.
    """

    sources: tuple[ChosenStore, ...]
    source: Ints
    row: Ints
    trajectory_id: Ints
    group_id: Ints
    ends: Ints

    def __len__(self) -> int:
        return len(self.row)

    def save(self, run: RunFolder) -> None:
        """Save the choice; it counts once `gather.json` exists."""
        table, content = np.stack([self.source, self.row, self.trajectory_id, self.group_id]), io.BytesIO()
        np.save(content, table, allow_pickle=False)
        run.write(run.choice_table, content.getvalue())
        record_choice(
            run,
            {
                "format": 1,
                "table_crc32c": google_crc32c.value(content.getvalue()),
                "ends": self.ends.tolist(),
                "sources": [asdict(source) for source in self.sources],
            },
        )

    @classmethod
    def load(cls, run: RunFolder) -> Choice | None:
        """Read what `save` wrote, or return None if nothing was chosen yet."""
        state = recorded_choice(run)
        if state is None:
            return None
        table_file = run.bring(run.choice_table)
        content = table_file.read_bytes() if table_file.is_file() else b""
        if google_crc32c.value(content) != state["table_crc32c"]:
            raise DataError(
                f"{run.choice_table} {'fails its checksum' if content else 'does not exist'}. Restore it from a "
                "copy, or start a new run with --out OTHER_FOLDER."
            )
        table = np.load(io.BytesIO(content), allow_pickle=False)
        return cls(
            sources=tuple(ChosenStore(**item) for item in state["sources"]),
            source=table[0],
            row=table[1],
            trajectory_id=table[2],
            group_id=table[3],
            ends=np.asarray(state["ends"], np.int64),
        )


def stores_of(replay: Replay) -> list[Address]:
    """Return where the stores to learn from are; the store of a run, if a run is named."""
    if not replay.stores:
        raise DefinitionError(
            "there is no store to learn from. Use rlhf-pipeline replay STORE..., or --set "
            "replay.stores=STORE,OTHER_STORE"
        )
    if replay.weights and len(replay.weights) != len(replay.stores):
        raise DefinitionError(
            f"replay.weights must be empty or contain one value per store: expected {len(replay.stores)}, got "
            f"{len(replay.weights)}."
        )
    stores = [resolved(open_run_or_store(path)[1]) for path in replay.stores]
    for at, store in enumerate(stores):
        if store in stores[:at]:
            raise DefinitionError(
                f"the store {store} is listed twice. To draw more trajectories from it, increase its weight "
                "(replay.weights)."
            )
    return stores


@contextmanager
def open_sources(paths: Sequence[Address]) -> Iterator[list[TrajectoryStore]]:
    """Open stores for reading; they are never changed."""
    with ExitStack() as stack:
        stores: list[TrajectoryStore] = []
        for path in paths:
            try:
                stores.append(stack.enter_context(TrajectoryStore.open(path, mode="r")))
            except StoreNotFoundError as error:
                raise MissingPathError(f"there is no longer a store at {path}. Restore it from a copy.") from error
        yield stores


def choose(replay: Replay, limits: Limits) -> Choice:
    """Choose the trajectories to learn from."""
    folders = stores_of(replay)
    with open_sources(folders) as stores:
        parts = [_choose_from(store, replay, limits) for store in stores]
    filled = [part for part in parts if len(part.row)]
    if not filled or (replay.weights and len(filled) < len(parts)):
        empty = [part for part in parts if not len(part.row)]
        raise DataError("; ".join(part.why_empty for part in empty))
    trajectory_shifts = _shifts([part.trajectory_id for part in parts])
    group_shifts = _shifts([part.group_id for part in parts])
    ends: list[int] = []
    for part in parts:
        ends += (_batch_ends(part.group_id, part.tokens) + (ends[-1] if ends else 0)).tolist()
    shifts = zip(parts, trajectory_shifts, group_shifts, strict=True)
    return Choice(
        sources=tuple(replace(part.source, trajectory_shift=t, group_shift=g) for part, t, g in shifts),
        source=np.repeat(np.arange(len(parts)), [len(part.row) for part in parts]),
        row=np.concatenate([part.row for part in parts]),
        trajectory_id=np.concatenate([p.trajectory_id + s for p, s in zip(parts, trajectory_shifts, strict=True)]),
        group_id=np.concatenate([p.group_id + s for p, s in zip(parts, group_shifts, strict=True)]),
        ends=np.asarray(ends, np.int64),
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The rows chosen from one store, groups together in the order of their first member."""

    row: Ints
    trajectory_id: Ints
    group_id: Ints
    tokens: Ints
    source: ChosenStore
    why_empty: str


def _choose_from(store: TrajectoryStore, replay: Replay, limits: Limits) -> _Part:
    _check_columns(store)
    watermark, filters = store.watermark, replay.filters
    ids = sound_rows(store, skip=replay.skip_damaged)
    num_damaged, counts = len(store.damaged()), [len(ids)]
    for condition in filters:
        ids = select(store, [condition], ids)
        counts.append(len(ids))
    learnable = learnable_rows(store, ids, skip_damaged=replay.skip_damaged)
    # A filter decides by the last row of an episode, which has its reward; the others follow it.
    ids, num_unscored = learnable.row_ids, learnable.num_unscored
    ids, _ = complete_episodes(store, ids[stored_last_rows(store, ids)])
    trajectories, groups = numbered(store, "trajectory_id", ids), numbered(store, "group_id", ids)
    if len(np.unique(trajectories)) < len(trajectories):
        trajectories = np.arange(
            len(trajectories)
        )  # numbers that start again in each group do not identify trajectories
    _, first, member = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(first[member], kind="stable")
    ids = ids[order]
    tokens = np.asarray(store.lengths("input_ids", ids), np.int64)
    steps = [f"{count:,} after {condition!r}" for condition, count in zip(filters, counts[1:], strict=True)]
    unscored = [f"{num_unscored:,} of those have no reward"] if num_unscored else []
    why_empty = f"{store.path} has nothing to learn from: {', '.join([f'{counts[0]:,} stored', *steps, *unscored])}."
    source = ChosenStore(
        path=str(store.path),
        watermark=watermark,
        num_stored=counts[0] + num_damaged,
        num_chosen=len(ids),
        num_ungraded=num_unscored,
        num_repeated=learnable.num_replaced,
        num_damaged=num_damaged,
    )
    part = _Part(
        row=ids,
        trajectory_id=trajectories[order],
        group_id=groups[order],
        tokens=tokens,
        source=source,
        why_empty=why_empty,
    )
    _check_readable(store, part, limits)
    return part


def _check_columns(store: TrajectoryStore) -> None:
    lacking = [name for name in ("input_ids", "assistant_mask", "task_reward") if name not in store.schema]
    if lacking:
        raise DataError(f"{store.path} lacks columns that learning requires: {', '.join(lacking)}.")


def _check_readable(store: TrajectoryStore, part: _Part, limits: Limits) -> None:
    if not len(part.row):
        return
    longest = int(part.tokens.max())
    if limits.positions is not None and longest > limits.positions:
        too_long = int(np.count_nonzero(part.tokens > limits.positions))
        raise DataError(
            f"{store.path}: {too_long:,} of {len(part.row):,} trajectories {'has' if too_long == 1 else 'have'} "
            f"more tokens than the policy has positions ({limits.positions:,}); the longest has {longest:,}. Exclude "
            f"such trajectories: --filter 'num_tokens<={limits.positions}'"
        )
    looked_at = part.row[:: max(len(part.row) // _LOOKED_AT, 1)]
    check_vocabulary(store.read_ragged("input_ids", looked_at).values, limits, str(store.path))
    if not store.read_ragged("assistant_mask", looked_at).values.any():
        raise DataError(
            f"{store.path}: the column assistant_mask, which marks the tokens of the policy, marks no token, so "
            "there is nothing to learn from. Were the rows stored without a mask?"
        )


def check_vocabulary(tokens: npt.NDArray[Any], limits: Limits, path: str) -> None:
    """Reject token ids that the policy does not know."""
    highest = int(tokens.max(initial=0))
    if highest >= limits.vocabulary:
        raise DataError(
            f"{path} contains the token id {highest:,}, but the policy's vocabulary has {limits.vocabulary:,} tokens: "
            "the store was created with another tokenizer. Import the data again with the policy's tokenizer "
            "(--tokenizer FOLDER), or use the policy for which the store was created (--set policy.path=FOLDER)."
        )


def _shifts(ids: Sequence[Ints]) -> list[int]:
    """Return a number per store to add to its ids, so that no two stores share one.

    >>> _shifts([np.array([0, 5]), np.array([7, 8]), np.array([3, 4])])
    [0, 0, 6]
    """
    shifts: list[int] = []
    used: tuple[int, int] | None = None
    for values in ids:
        if not len(values):
            shifts.append(0)
            continue
        low, high = int(values.min()), int(values.max())
        shift = 0 if used is None or low > used[1] or high < used[0] else used[1] + 1 - low
        shifts.append(shift)
        low, high = low + shift, high + shift
        used = (low, high) if used is None else (min(low, used[0]), max(high, used[1]))
    return shifts


def _batch_ends(groups: Ints, tokens: Ints) -> Ints:
    """Return where to cut rows, groups together, into batches of whole groups.

    >>> _batch_ends(np.array([1, 1, 2, 2, 2]), np.array([3, 3, 3, 3, 3]))
    array([5])
    """
    if not len(groups):
        return np.empty(0, np.int64)
    edges = np.append(np.flatnonzero(groups[1:] != groups[:-1]) + 1, len(groups))
    before = np.concatenate([[0], np.cumsum(tokens)])
    ends, start = list[int](), 0
    while start < len(groups):
        last = min(start + BATCH_ROWS, int(np.searchsorted(before, before[start] + BATCH_TOKENS, "right")) - 1)
        at = max(int(np.searchsorted(edges, last, "right")) - 1, int(np.searchsorted(edges, start, "right")))
        start = int(edges[at])
        ends.append(start)
    return np.asarray(ends, np.int64)
