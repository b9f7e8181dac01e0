"""The batch of trajectories: flat columns and lengths, and the arithmetic on them.

Reading a leaf per trajectory costs more than the arithmetic, so every TensorDict is flattened once per column; see
`rlhf_pipeline.data.tensordicts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict.tensorclass import NonTensorData
from torch import Tensor

from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    ATTENTION_MASK,
    DONE,
    KL_PENALTY,
    LOG_PROBS,
    REF_LOG_PROBS,
    REWARD,
    TASK_REWARD,
    TOKENS,
    Key,
)
from rlhf_pipeline.errors import DataError, IncompleteError
from trajectory_store import BufferPool

TOKEN_KEYS: tuple[Key, ...] = (TOKENS, ASSISTANT_MASK, LOG_PROBS, REF_LOG_PROBS)
"""Keys that always have one value per token."""

RAGGED_KEYS: tuple[Key, ...] = (*TOKEN_KEYS, REWARD, KL_PENALTY, ADVANTAGE, ATTENTION_MASK)
"""Keys that stay ragged even if all trajectories of a batch have the same length."""

NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.bool: np.bool_}
"""The dtypes of columns that NumPy handles faster."""


@dataclass(slots=True)
class Flat:
    """One column of a batch: the `values` of all trajectories, concatenated.

    Attributes:
        values: `[sum(lengths), ...]` for a ragged column, `[n, ...]` where `lengths` is None.
        lengths: int64 `[n]`, or None for a column with one entry per trajectory.
        shapes: the shape of every row if rows differ in more than their first dimension; `values` is then flat and
            `lengths` counts elements.
    """

    values: Tensor
    lengths: Tensor | None = None
    shapes: list[torch.Size] | None = None

    def select(self, index: Tensor, shared: dict[int, Tensor] | None = None) -> Flat:
        """Return the rows `index` (int64 `[m]`), in that order; columns that shared lengths still do."""
        if self.lengths is None:
            return Flat(self.values.index_select(0, index))
        lengths = None if shared is None else shared.get(id(self.lengths))
        if lengths is None:
            lengths = self.lengths[index]
            if shared is not None:
                shared[id(self.lengths)] = lengths
        order = index.tolist()
        values = _rows_in_order([self], order)
        return Flat(values, lengths, None if self.shapes is None else [self.shapes[i] for i in order])

    def rows(self) -> list[Tensor]:
        """Return one tensor per row."""
        if self.lengths is None:
            return list(self.values.unbind(0))
        rows = list(self.values.split(self.lengths.tolist()))
        return rows if self.shapes is None else [row.view(s) for row, s in zip(rows, self.shapes, strict=True)]


@dataclass(slots=True)
class Text:
    """A non-tensor column: one Python object per trajectory, possibly still wrapped as NonTensorData."""

    items: list[Any]

    def plain(self) -> list[Any]:
        """The unwrapped objects."""
        kinds = set(map(type, self.items))
        if kinds == {NonTensorData}:
            # Reading an attribute of a tensorclass costs 4 us; the object's own dict holds the same value.
            try:
                return [inner["_non_tensordict"]["data"] for inner in map(vars, self.items)]
            except (KeyError, TypeError):
                return [item.data for item in self.items]
        return [unwrap(item) for item in self.items] if NonTensorData in kinds else list(self.items)

    def select(self, index: Tensor) -> Text:
        """Return the rows `index` (int64 `[m]`), in that order."""
        return Text([self.items[i] for i in index.tolist()])


class Trajectories(dict[Key, Flat | Text]):
    """A batch of `n` trajectories (or of `n` steps): its columns by key."""

    def __init__(self, n: int, columns: Mapping[Key, Flat | Text] | None = None) -> None:
        super().__init__(columns or {})
        self.n = n

    def numbers(self, key: Key) -> npt.NDArray[Any]:
        """Return the values of a column of numbers."""
        column = self[key]
        assert isinstance(column, Flat)
        return column.values.numpy()

    def lengths(self, key: Key) -> npt.NDArray[np.int64]:
        """Return the lengths of the rows of a ragged column."""
        column = self[key]
        assert isinstance(column, Flat)
        assert column.lengths is not None
        return column.lengths.numpy()

    def texts(self, key: Key) -> list[Any]:
        """Return the objects of a column of text."""
        column = self[key]
        assert isinstance(column, Text)
        return column.plain()

    def select(self, index: Tensor) -> Trajectories:
        """Return the rows `index` of every column."""
        shared: dict[int, Tensor] = {}
        return Trajectories(
            int(index.numel()),
            {k: c.select(index) if isinstance(c, Text) else c.select(index, shared) for k, c in self.items()},
        )


def version_range(
    versions: npt.NDArray[np.int64], spans: Flat, episodes: npt.NDArray[np.int64] | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Flat | None]:
    """Return the oldest version of each trajectory, the newest or -1, and the spans of those with several, if any.

    Args:
        versions: int64 [n], of trajectories without spans.
        spans: which version sampled which tokens.
        episodes: int64 [n], the number of each row's episode, ascending; an episode is as old as its oldest token.
            None where every row is one.
    """
    assert spans.lengths is not None
    counts, pairs = spans.lengths.numpy(), spans.values.numpy()
    has_spans = counts > 0
    begins = (np.cumsum(counts) - counts)[has_spans]
    oldest, newest = versions.copy(), versions.copy()
    if len(begins):
        oldest[has_spans] = np.minimum.reduceat(pairs[:, 1], begins)
        newest[has_spans] = np.maximum.reduceat(pairs[:, 1], begins)
    several = counts > 1
    if episodes is not None and len(episodes) and episodes[-1] + 1 < len(episodes):
        begins = np.flatnonzero(np.diff(episodes, prepend=-1))
        first, last = np.minimum.reduceat(oldest, begins)[episodes], np.maximum.reduceat(newest, begins)[episodes]
        several |= has_spans & (first < last)
        oldest, newest = first, last
    mixed_spans = None
    if several.any():
        inside = torch.from_numpy(np.repeat(several, counts))
        mixed_spans = Flat(spans.values[inside], torch.from_numpy(np.where(several, counts, 0)))
    return oldest, np.where(oldest < newest, newest, -1), mixed_spans


def _rows_in_order(parts: Sequence[Flat], order: Sequence[int], pool: BufferPool | None = None) -> Tensor:
    """Concatenate the rows `order` of ragged columns; rows are numbered across all columns.

    Whole rows are copied once, into a pool's memory if there is one: an index of every element would be larger than
    most columns. Slicing an array takes a tenth of the time of slicing a tensor.
    """
    values = [part.values for part in parts]
    plain = all(v.dtype in NUMPY_DTYPES and not v.requires_grad and v.is_cpu for v in values)
    sources: list[Any] = [np.ascontiguousarray(v.numpy()) for v in values] if plain else values
    rows: list[Any] = []
    for part, source in zip(parts, sources, strict=True):
        start = 0
        for length in [] if part.lengths is None else part.lengths.tolist():
            rows.append(source[start : start + length])
            start += length
    chosen = [rows[i] for i in order] or [source[:0] for source in sources[:1]]
    if not plain:
        return torch.cat(chosen)
    if pool is None:
        return torch.from_numpy(np.concatenate(chosen))
    shape = (sum(map(len, chosen)), *values[0].shape[1:])
    return torch.from_numpy(pool.join(chosen, shape, sources[0].dtype))


def unwrap(item: Any) -> Any:
    """Return the object inside a non-tensor wrapper, or the object itself."""
    return item.data if isinstance(item, NonTensorData) else item


def as_ragged(column: Flat, n: int) -> Flat:
    """Return the column with lengths, adding them if it has none."""
    if column.lengths is not None:
        return column
    if column.values.ndim < 2:
        return Flat(column.values, torch.ones(n, dtype=torch.int64))
    width = column.values.shape[1]
    return Flat(column.values.flatten(0, 1), torch.full((n,), width))


def ragged_tokens(columns: Trajectories) -> Trajectories:
    """Give every token column lengths, even if all trajectories of the batch are equally long; in place."""
    for key in RAGGED_KEYS:
        column = columns.get(key)
        if isinstance(column, Flat) and column.lengths is None and column.values.ndim >= 2:
            columns[key] = as_ragged(column, columns.n)
    return columns


def per_token(batch: Trajectories, key: Key, like: Flat | None = None) -> Flat | None:
    """Return a column with one value per token, or None if missing; trailing dimensions of 1 are dropped."""
    column = batch.get(key)
    if not isinstance(column, Flat):
        return None
    if column.lengths is None and column.values.ndim >= 2:
        n, width = column.values.shape[:2]
        column = Flat(column.values.flatten(0, 1), torch.full((n,), width))
    if column.lengths is not None:
        column = Flat(column.values.reshape(-1), column.lengths)
    if like is None or like.lengths is None or like.lengths is column.lengths:
        return column
    if column.lengths is None or not torch.equal(column.lengths, like.lengths):
        shape_text = "one value per trajectory" if column.lengths is None else f"lengths {column.lengths.tolist()[:8]}"
        raise DataError(f"{key!r} has {shape_text}, but the tokens have lengths {like.lengths.tolist()[:8]}")
    return column


def concat(
    parts: Sequence[Trajectories], order: Sequence[int] | None = None, pool: BufferPool | None = None
) -> Trajectories:
    """Concatenate batches, optionally selecting and reordering their rows."""
    counts = [part.n for part in parts]
    order = range(sum(counts)) if order is None else order
    out, shared = Trajectories(len(order)), dict[tuple[int, ...], Tensor]()
    for key in sorted({key for part in parts for key in part}, key=str):
        missing = next((part for part in parts if key not in part), None)
        if missing is not None:
            raise DataError(f"the key {key!r} is missing from {missing.n} of {sum(counts)} trajectories")
        columns = [part[key] for part in parts]
        if all(isinstance(column, Text) for column in columns):
            items = [item for column in columns if isinstance(column, Text) for item in column.items]
            out[key] = Text([items[i] for i in order])
            continue
        flats = [column for column in columns if isinstance(column, Flat)]
        if len(flats) != len(columns):
            raise DataError(f"{key!r} is text in some trajectories and a tensor in others")
        out[key] = _concat_flat(flats, counts, order, shared, pool)
    return out


def _concat_flat(
    flats: Sequence[Flat],
    counts: Sequence[int],
    order: Sequence[int],
    shared: dict[tuple[int, ...], Tensor],
    pool: BufferPool | None,
) -> Flat:
    """Concatenate the rows of several columns; columns whose parts shared lengths share them in the result."""
    if all(c.lengths is None for c in flats) and len({c.values.shape[1:] for c in flats}) == 1:
        return Flat(torch.cat([c.values for c in flats])[torch.tensor(order, dtype=torch.int64)])
    ragged = [as_ragged(c, n) for c, n in zip(flats, counts, strict=True)]
    alike = all(c.shapes is None for c in ragged) and len({(c.values.shape[1:], c.values.dtype) for c in ragged}) == 1
    if not alike:
        rows = [row for c in ragged for row in c.rows()]
        chosen = [rows[i] for i in order]
        counted = torch.tensor([row.numel() for row in chosen])
        return Flat(torch.cat([row.reshape(-1) for row in chosen]), counted, [row.shape for row in chosen])
    shared_key = tuple(id(c.lengths) for c in flats)
    lengths = shared.get(shared_key) if all(c.lengths is not None for c in flats) else None
    if lengths is None:
        lengths = torch.cat([c.lengths for c in ragged if c.lengths is not None])[torch.tensor(order)]
        shared[shared_key] = lengths
    return Flat(_rows_in_order(ragged, order, pool), lengths)


def columns_state(columns: Trajectories) -> dict[str, Any]:
    """Return plain tensors, lists and strings that `torch.load(weights_only=True)` reads back."""
    entries = []
    for key, column in columns.items():
        path = list(key) if isinstance(key, tuple) else [key]
        if isinstance(column, Text):
            items = column.plain()
            _check_plain(items, key)
            entries.append({"key": path, "text": items})
        else:
            lengths = None if column.lengths is None else column.lengths.clone()
            shapes = None if column.shapes is None else [list(shape) for shape in column.shapes]
            values = column.values.detach().clone()
            entries.append({"key": path, "values": values, "lengths": lengths, "shapes": shapes})
    return {"n": columns.n, "columns": entries}


def columns_from_state(state: Mapping[str, Any]) -> Trajectories:
    """The inverse of `columns_state`."""
    out = Trajectories(int(state["n"]))
    for entry in state["columns"]:
        path = entry["key"]
        key = path[0] if len(path) == 1 else tuple(path)
        if "text" in entry:
            out[key] = Text(list(entry["text"]))
        else:
            shapes = entry["shapes"]
            shapes = None if shapes is None else [torch.Size(shape) for shape in shapes]
            out[key] = Flat(entry["values"], entry["lengths"], shapes)
    return out


def _check_plain(items: Iterable[Any], key: Key) -> None:
    for item in items:
        if isinstance(item, (list, tuple)):
            _check_plain(item, key)
        elif isinstance(item, dict):
            _check_plain([*item.keys(), *item.values()], key)
        elif item is not None and not isinstance(item, (str, int, float, bool, bytes, Tensor)):
            raise DataError(
                f"a pending trajectory has a value of type {type(item).__name__} under {key!r}; a checkpoint cannot "
                "contain this type. Store JSON text instead"
            )


# -- steps of one trajectory -------------------------------------------------------------------------------------


def merge_steps(columns: Trajectories) -> Trajectories:
    """Merge rows that may be steps into one row per trajectory."""
    ended = ends(columns)
    if ended is None or bool(ended.all()):
        return columns  # the usual case: every row ends a trajectory
    last = torch.nonzero(ended).reshape(-1)
    if not last.numel() or int(last[-1]) != columns.n - 1:
        first = int(last[-1]) + 1 if last.numel() else 0
        raise IncompleteError(
            f"the last trajectory is not complete: steps {first} to {columns.n - 1} of {columns.n} have no "
            f"{DONE!r}. Write complete trajectories, so that nothing is lost."
        )
    return _merge(columns, last)


def ends(columns: Trajectories, done_key: Key = DONE) -> torch.Tensor | None:
    """Return whether a trajectory ends with each row, bool `[n]`; None if unknown."""
    done = columns.get(done_key)
    if not isinstance(done, Flat) or columns.n == 0:
        return None
    flags = done.values.to(torch.bool)
    if done.lengths is None:
        return flags.reshape(columns.n, -1).any(1)
    return segment_any(flags, done.lengths)


def _merge(columns: Trajectories, last: torch.Tensor) -> Trajectories:
    """Merge multi-step trajectories: keep the last step, which holds the whole conversation, and add up rewards."""
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    out = columns.select(last)
    if "prompt" in columns:
        out["prompt"] = columns["prompt"].select(first)
    steps = last - first + 1
    reward = columns.get(REWARD)
    if isinstance(reward, Flat) and reward.values.numel() == columns.n:
        out.pop(REWARD)
        total = REWARD if TASK_REWARD in columns else TASK_REWARD
        out[total] = Flat(segment_sum(reward.values, steps).float())
    log_probs, whole = columns.get(LOG_PROBS), out.get(LOG_PROBS)
    if isinstance(log_probs, Flat) and isinstance(whole, Flat) and log_probs.lengths is not None:
        rows, merged = log_probs.rows(), [row.clone() for row in whole.rows()]
        for target, start, stop in zip(merged, first.tolist(), last.tolist(), strict=True):
            for step in rows[start:stop]:  # earlier turns, where the last step has no score
                head = target[: step.shape[0]]
                target[: step.shape[0]] = torch.where(head.isnan(), step[: head.shape[0]], head)
        out[LOG_PROBS] = Flat(torch.cat(merged), whole.lengths)
    return out


# -- sums within rows --------------------------------------------------------------------------------------------


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each row in float64.

    Args:
        values: flat, any number of elements per position; `lengths` counts elements.
        lengths: int64 `[n]`; a row without elements sums to 0.

    Returns:
        float64 `[n]`.

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 1])).tolist()
    [3.0, 0.0, 4.0]
    """
    flat = values.detach().reshape(-1)
    counts = lengths.numpy()
    ends = np.cumsum(counts)
    if flat.dtype == torch.bool:
        bounds = np.searchsorted(np.flatnonzero(flat.numpy()), np.stack([ends - counts, ends]))
        return torch.from_numpy((bounds[1] - bounds[0]).astype(np.float64))
    filled, out = counts > 0, np.zeros(len(counts))
    if filled.any():
        out[filled] = np.add.reduceat(flat.to(torch.float64).numpy(), (ends - counts)[filled])
    return torch.from_numpy(out)


def spread(values: Tensor, lengths: Tensor) -> Tensor:
    """Repeat one value per row for each element, `[sum(lengths)]`, in a quarter of the time of `repeat_interleave`.

    >>> spread(torch.tensor([7, 8]), torch.tensor([2, 1])).tolist()
    [7, 7, 8]
    """
    return torch.from_numpy(np.repeat(values.detach().numpy(), lengths.numpy()))


def step_sum(values: Tensor, bounds: Sequence[int]) -> Tensor:
    """Return the sum over the steps of each trajectory, in the dtype of the values.

    Args:
        values: `[n]`, one per step.
        bounds: `k + 1` step offsets of the trajectories.

    >>> step_sum(torch.tensor([1, 2, 4]), [0, 2, 3]).tolist()
    [3, 4]
    """
    total = torch.zeros(values.numel() + 1, dtype=values.dtype)
    torch.cumsum(values, 0, out=total[1:])
    return total[torch.tensor(bounds)].diff()


def segment_any(flags: Tensor, lengths: Tensor) -> Tensor:
    """Return whether any flag of each row is set, bool `[n]`.

    >>> segment_any(torch.tensor([False, True, False]), torch.tensor([2, 1])).tolist()
    [True, False]
    """
    return segment_sum(flags, lengths) > 0


def one_advantage(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the advantage of each trajectory from its per-token values, which must be equal.

    Args:
        values: flat, one per token.
        mask: bool, flat, the tokens that have an advantage.
        lengths: int64 `[n]`, all at least 1.

    >>> one_advantage(torch.tensor([0.0, 2.0, 2.0]), torch.tensor([False, True, True]), torch.tensor([3]))
    tensor([2.])
    """
    last = values[last_position(mask, lengths)]
    if not bool(values.isclose(last.repeat_interleave(lengths), equal_nan=True)[mask].all()):
        raise DataError(
            "the advantage differs between the tokens of a trajectory, but the store has one advantage per "
            "trajectory. Create the store with a schema whose column 'advantage' is ragged, or have MCAdvantage "
            "compute one return per trajectory: trajectory_return='sum'"
        )
    return last


def last_position(mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the flat index of the last True of each row; the row's last position if there is none.

    Args:
        mask: bool, flat.
        lengths: int64 `[n]`, all at least 1.

    >>> last_position(torch.tensor([True, True, False, False, False]), torch.tensor([3, 2])).tolist()
    [1, 4]
    """
    if bool((lengths <= 0).any()):
        raise DataError(f"trajectory {int((lengths <= 0).nonzero()[0])} has no tokens")
    ends = lengths.cumsum(0) - 1
    if bool(mask[ends].all()):
        return ends
    flat = np.where(mask.numpy(), np.arange(mask.numel()), -1)
    last = torch.from_numpy(np.maximum.reduceat(flat, (ends + 1 - lengths).numpy()))
    return torch.where(last < 0, ends, last)
