"""The batch of trajectories: flat columns and lengths, converted from and to every form of a TensorDict.

A batch of trajectories reaches the write path in one of three forms: a lazy stack with ragged leaves, a
TensorDict with `torch.jagged` leaves, or a padded TensorDict with an attention mask. Reading a leaf per
trajectory costs more than the arithmetic, so every form is flattened once per column here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection, lazy_stack
from tensordict.tensorclass import NonTensorData, NonTensorStack
from torch import Tensor

from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    ATTENTION_MASK,
    COMPLETION,
    CREATED_AT,
    DONE,
    FINISH_REASON,
    GROUP_ID,
    KL_PENALTY,
    LOG_PROBS,
    META,
    NEWEST_POLICY_VERSION,
    NUM_PROMPT_TOKENS,
    POLICY_VERSION,
    PROMPT,
    REF_LOG_PROBS,
    REWARD,
    TASK_REWARD,
    TOKENS,
    TRAJECTORY_ID,
    VERSION_SPANS,
    Key,
)
from rlhf_pipeline.data.padding import length_mask, under_mask
from rlhf_pipeline.data.upload import upload
from rlhf_pipeline.errors import DataError, IncompleteError, MissingKeyError
from trajectory_store import BufferPool

TOKEN_KEYS: tuple[Key, ...] = (TOKENS, ASSISTANT_MASK, LOG_PROBS, REF_LOG_PROBS)
"""Keys that always hold one value per token."""

RAGGED_KEYS: tuple[Key, ...] = (*TOKEN_KEYS, REWARD, KL_PENALTY, ADVANTAGE, ATTENTION_MASK)
"""Keys that stay ragged even if all trajectories of a batch have the same length."""

T = TypeVar("T", bound=TensorDict)

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.bool: np.bool_}
_NO_BATCH = torch.Size([])


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

    @classmethod
    def completed(
        cls,
        lengths: npt.NDArray[np.int64],
        *,
        tokens: npt.NDArray[np.int64],
        assistant: npt.NDArray[np.bool_],
        log_probs: npt.NDArray[np.float32],
        num_prompt_tokens: npt.NDArray[np.int64],
        rewards: npt.ArrayLike,
        group_ids: npt.ArrayLike,
        trajectory_ids: npt.ArrayLike,
        policy_versions: npt.NDArray[np.int64],
        version_spans: Flat | None = None,
        finish_reasons: Sequence[str],
        prompts: Sequence[str],
        completions: Sequence[str],
        metas: Sequence[str],
    ) -> Trajectories:
        """Build a collector's completed trajectories, with the current time as creation time.

        Args:
            lengths: `[n]`, tokens of each, prompt included.
            tokens: `[sum(lengths)]`, the sampler's own; text is never re-encoded.
            assistant: `[sum(lengths)]`, True at sampled tokens.
            log_probs: `[sum(lengths)]`, NaN where no behaviour policy produced the token.
            num_prompt_tokens: `[n]`, tokens before the first sampled one.
            rewards: `[n]`, unshaped; NaN for a failed trajectory.
            group_ids: `[n]`.
            trajectory_ids: `[n]`.
            policy_versions: `[n]`, optimizer steps behind the weights that sampled them, as far as there are no spans.
            version_spans: `[spans, 2]` with a count per trajectory: the place of a span's first token, and its version.
                A trajectory is as old as its oldest token. The spans of one that has several are kept.
            finish_reasons: `[n]`.
            prompts: `[n]`, text, as are the following two.
            completions: `[n]`.
            metas: `[n]`, JSON.
        """
        n, shared = len(lengths), torch.from_numpy(lengths)
        per_token = {TOKENS: tokens, ASSISTANT_MASK: assistant, LOG_PROBS: log_probs}
        single = {
            TASK_REWARD: np.asarray(rewards, np.float32),
            GROUP_ID: np.asarray(group_ids, np.int64),
            TRAJECTORY_ID: np.asarray(trajectory_ids, np.int64),
            POLICY_VERSION: policy_versions,
            NUM_PROMPT_TOKENS: num_prompt_tokens,
            DONE: np.ones(n, np.bool_),
            CREATED_AT: np.full(n, time.time()),
        }
        kept = None
        if version_spans is not None:
            single[POLICY_VERSION], single[NEWEST_POLICY_VERSION], kept = _ages(policy_versions, version_spans)
        texts = {FINISH_REASON: finish_reasons, PROMPT: prompts, COMPLETION: completions, META: metas}
        return cls(
            n,
            {key: Flat(torch.from_numpy(values), shared) for key, values in per_token.items()}
            | {key: Flat(torch.from_numpy(values)) for key, values in single.items()}
            | {key: Text(list(items)) for key, items in texts.items()}
            | ({} if kept is None else {VERSION_SPANS: kept}),
        )

    def select(self, index: Tensor) -> Trajectories:
        """Return the rows `index` of every column."""
        shared: dict[int, Tensor] = {}
        return Trajectories(
            int(index.numel()),
            {k: c.select(index) if isinstance(c, Text) else c.select(index, shared) for k, c in self.items()},
        )


def _ages(
    versions: npt.NDArray[np.int64], spans: Flat
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Flat | None]:
    """Return the oldest version of each trajectory, the newest or -1, and the spans of those with several, if any."""
    assert spans.lengths is not None
    counts, pairs = spans.lengths.numpy(), spans.values.numpy()
    known = counts > 0
    begins = (np.cumsum(counts) - counts)[known]
    oldest, newest = versions.copy(), versions.copy()
    if len(begins):
        oldest[known] = np.minimum.reduceat(pairs[:, 1], begins)
        newest[known] = np.maximum.reduceat(pairs[:, 1], begins)
    several = counts > 1
    kept = None
    if several.any():
        inside = torch.from_numpy(np.repeat(several, counts))
        kept = Flat(spans.values[inside], torch.from_numpy(np.where(several, counts, 0)))
    return oldest, np.where(oldest < newest, newest, -1), kept


def _rows_in_order(parts: Sequence[Flat], order: Sequence[int], pool: BufferPool | None = None) -> Tensor:
    """Concatenate the rows `order` of ragged columns; rows are numbered across all columns.

    Whole rows are copied once, into a pool's memory if there is one: an index of every element would be larger than
    most columns. Slicing an array takes a tenth of the time of slicing a tensor.
    """
    values = [part.values for part in parts]
    plain = all(v.dtype in _NUMPY and not v.requires_grad and v.is_cpu for v in values)
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


def is_jagged(leaf: object) -> bool:
    """Return whether `leaf` is a nested tensor of either layout; for most leaves without a dispatch."""
    if not isinstance(leaf, Tensor):
        return False
    # Reading the attribute of a jagged tensor goes through two dispatchers; its own dict has the same answer.
    return "_offsets" in leaf.__dict__ or leaf.is_nested


def unjagged(leaf: Tensor, shared: dict[int, Tensor] | None = None) -> Flat:
    """Return values and lengths of a nested tensor of any layout, detached.

    Args:
        leaf: the nested tensor.
        shared: lengths by the id of their offsets, so that leaves of one batch share them.
    """
    inner = leaf.__dict__
    values, offsets = inner.get("_values"), inner.get("_offsets")
    if not isinstance(values, Tensor) or not isinstance(offsets, Tensor) or inner.get("_lengths") is not None:
        rows = list(leaf.detach().unbind())  # strided, or with gaps between the rows
        return Flat(torch.cat(rows), torch.tensor([row.shape[0] for row in rows]))
    lengths = None if shared is None else shared.get(id(offsets))
    if lengths is None:
        lengths = offsets.diff().to(torch.int64)
        if shared is not None:
            shared[id(offsets)] = lengths
    return Flat(values.detach() if values.requires_grad else values, lengths)


def walk(td: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[Key, Any]]:
    """Yield `(key, leaf)` of a TensorDict or tensorclass; top-level keys are plain strings."""
    for name, leaf in td.items():
        if type(leaf) is TensorDict:
            yield from walk(leaf, (*prefix, name))
        elif isinstance(leaf, (Tensor, NonTensorData, NonTensorStack)):
            yield ((*prefix, name) if prefix else name), leaf
        elif is_tensor_collection(leaf):
            yield from walk(leaf, (*prefix, name))
        else:
            yield ((*prefix, name) if prefix else name), leaf


def is_stack(td: object) -> bool:
    """Return whether `td` is a lazy stack along its only batch dimension."""
    return isinstance(td, LazyStackedTensorDict) and td.batch_dims == 1 and td.stack_dim == 0


def rows_of(td: Any) -> list[TensorDictBase]:
    """Return the TensorDicts of a lazy stack, not copied."""
    return td.tensordicts


def columns_of(td: TensorDictBase) -> Trajectories:
    """Flatten a batch of trajectories in any of the accepted forms.

    Args:
        td: a lazy stack `[n]`, a TensorDict `[n]` with jagged, dense or padded leaves, a token-level
            TensorDict `[n, T]`, or one trajectory with an empty batch size.

    Returns:
        One column per key, without padding and attention mask.

    Raises:
        DataError: if the trajectories do not have the same keys, or a leaf's shapes do not match.
    """
    if td.batch_dims == 0:
        columns = _from_rows([td])
    elif is_stack(td):
        columns = _from_rows(rows_of(td))
    elif td.batch_dims == 2:
        columns = _from_dense(token_level(td))
    else:
        columns = _from_dense(td)
    for column in columns.values():
        # The store and the bookkeeping of groups and lengths are on the CPU.
        if isinstance(column, Flat) and column.values.is_cuda:
            column.values = column.values.cpu()
            column.lengths = None if column.lengths is None else column.lengths.cpu()
    return _drop_padding(columns)


def is_token_level(td: Any) -> bool:
    """Return whether the second dimension of a TensorDict `[n, T]` is the token, not the step of an environment."""
    try:
        tokens = td.get(TOKENS, None)
    except RuntimeError:  # ragged steps in a lazy stack of lazy stacks
        return False
    return isinstance(tokens, Tensor) and tokens.ndim == 2


def token_level(td: TensorDictBase) -> TensorDictBase:
    """View a `[n, T]` TensorDict whose second dimension is the token as a padded batch `[n]`.

    Raises:
        DataError: if its rows are not trajectories of tokens.
    """
    if td.batch_dims == 1:
        return td
    out = td.clone(recurse=False) if not isinstance(td, LazyStackedTensorDict) else td.contiguous()
    for node in (out, *(leaf for leaf in out.values(True) if isinstance(leaf, TensorDictBase))):
        node.batch_size = node.batch_size[:1]  # pyright: ignore[reportAttributeAccessIssue]  # it has a setter
    tokens = out.get(TOKENS, None)
    if tokens is None:
        raise MissingKeyError(
            f"a TensorDict of batch size {tuple(td.batch_size)} has no {TOKENS} leaf, so its rows are not "
            "trajectories of tokens; pass [n] trajectories, or steps that end with ('next', 'done')"
        )
    mask = out.get(ATTENTION_MASK, None)
    last = torch.full((out.shape[0],), tokens.shape[1] - 1) if mask is None else mask.long().sum(1) - 1
    for key, leaf in list(walk(out)):
        if key in RAGGED_KEYS or not isinstance(leaf, Tensor) or leaf.ndim < 2:
            continue
        if leaf.shape[1] == tokens.shape[1]:
            out.set(key, leaf[torch.arange(leaf.shape[0]), last.clamp_min(0)])
    return out


def _from_rows(rows: Sequence[Any]) -> Trajectories:
    out = Trajectories(len(rows))
    shared: dict[tuple[int, ...], Tensor] = {}
    for key, leaves in _transpose(rows, ()):
        out[key] = flatten_leaves(key, leaves, shared)
    return out


def _transpose(rows: Sequence[Any], prefix: tuple[str, ...]) -> Iterator[tuple[Key, list[Any]]]:
    """Yield each key with its leaf of every row, from each row's dict instead of one `get` per leaf."""
    # `items()` of a TensorDict checks its entries; its dict gives the same ten times faster.
    plain = set(map(type, rows)) == {TensorDict}
    entries: list[dict[str, Any]] = [row._tensordict for row in rows] if plain else [entries_of(row) for row in rows]
    # Rows have the same keys, in any order, if all have as many keys as the first and each of its keys.
    if sum(map(len, entries)) != len(entries[0]) * len(entries):
        _check_same_keys(entries, prefix)
    for name, leaf in entries[0].items():
        try:
            leaves = list(map(itemgetter(name), entries))
        except KeyError:
            _check_same_keys(entries, prefix)
            raise
        kind = type(leaf)
        if kind is Tensor or (kind is not TensorDict and _is_leaf(leaf)):
            yield ((*prefix, name) if prefix else name), leaves
        else:
            yield from _transpose(leaves, (*prefix, name))


def _is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, NonTensorData, NonTensorStack)) or not is_tensor_collection(leaf)


def _check_same_keys(entries: Sequence[dict[str, Any]], prefix: tuple[str, ...]) -> None:
    for i, entry in enumerate(entries):
        if entry.keys() != entries[0].keys():
            odd = sorted(map(str, entry.keys() ^ entries[0].keys()))
            names = ", ".join(repr((*prefix, name)) if prefix else repr(name) for name in odd)
            raise DataError(f"trajectory {i} of {len(entries)} and trajectory 0 do not hold the same keys: {names}")


def entries_of(row: Any) -> dict[str, Any]:
    """Return the top-level entries of a TensorDict or tensorclass; do not change them."""
    return row._tensordict if type(row) is TensorDict else dict(row.items())


def copied_rows(rows: Sequence[Any]) -> list[Any]:
    """Copy TensorDicts; each leaf is copied for all rows at once, in a third of the time of copying row by row.

    >>> row = TensorDict({"a": torch.tensor([1, 2]), "b": {"c": torch.tensor(3)}})
    >>> [copy] = copied_rows([row])
    >>> _ = row["a"].zero_()
    >>> copy["a"].tolist(), copy["b", "c"].item()
    ([1, 2], 3)
    """
    entries = [row._tensordict for row in rows if type(row) is TensorDict and not row.batch_dims]
    if len(entries) != len(rows) or any(entry.keys() != entries[0].keys() for entry in entries):
        return [row.clone() for row in rows]
    out: list[dict[str, Any]] = [{} for _ in rows]
    for name, first in entries[0].items() if entries else ():
        leaves = list(map(itemgetter(name), entries))
        if type(first) is TensorDict:
            copies = copied_rows(leaves)
        elif all(isinstance(leaf, Tensor) for leaf in leaves):
            copies = _copied_leaves(leaves)
        else:
            copies = [leaf.clone() if hasattr(leaf, "clone") else leaf for leaf in leaves]
        for items, copy in zip(out, copies, strict=True):
            items[name] = copy
    return [unchecked(items, row.batch_size, device=row.device) for items, row in zip(out, rows, strict=True)]


def _copied_leaves(leaves: list[Tensor]) -> Iterable[Tensor]:
    kinds = {(type(leaf), leaf.ndim, leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad) for leaf in leaves}
    if len(kinds) == 1:
        kind, ndim, _, _, layout, graph = kinds.pop()
        if kind is Tensor and ndim < 2 and layout is torch.strided and not graph:
            return torch.cat(leaves).split(list(map(len, leaves))) if ndim else torch.stack(leaves).unbind()
    return [leaf.clone() for leaf in leaves]


def unchecked(
    items: dict[str, Any], batch_size: torch.Size, *, device: torch.device | None = None, kind: type[T] = TensorDict
) -> T:
    """Build a TensorDict, without checks, from leaves and inner TensorDicts known to have this batch size.

    Args:
        items: the entries by name.
        batch_size: of all entries.
        device: of all entries, if it is to be recorded.
        kind: TensorDict, or a class derived from it.
    """
    return kind._new_unsafe(items, batch_size=batch_size, device=device)


def on_device(batch: TensorDict, device: torch.device) -> TensorDict:
    """Move a batch to a device; its dense leaves go to a GPU in one copy that the host does not wait for.

    >>> batch = TensorDict({"a": torch.arange(3)}, batch_size=[3])
    >>> on_device(batch, torch.device("cpu")) is batch
    True
    """
    if device.type != "cuda":
        return batch if device.type == "cpu" else batch.to(device)
    dense = [leaf for leaf in batch.values(True, True) if isinstance(leaf, Tensor) and not is_jagged(leaf)]
    return _with_leaves(batch, dict(zip(map(id, dense), upload(dense, device), strict=True)), device)


def _with_leaves(batch: TensorDict, there: Mapping[int, Tensor], device: torch.device) -> TensorDict:
    """Replace leaves by their copies on a device, found by the id of the original; move the other leaves one by one."""
    items: dict[str, Any] = {}
    for name, leaf in entries_of(batch).items():
        if type(leaf) is TensorDict:
            items[name] = _with_leaves(leaf, there, device)
        elif isinstance(leaf, Tensor):
            items[name] = there[id(leaf)] if id(leaf) in there else leaf.to(device)
        else:
            items[name] = leaf
    return unchecked(items, batch.batch_size, device=device)


def leaves_of(rows: Sequence[Any], key: Key) -> list[Any] | None:
    """Return one leaf of every row, or None if any row lacks it."""
    found: Sequence[Any] = rows
    for name in (key,) if isinstance(key, str) else key:
        if set(map(type, found)) == {TensorDict}:
            try:
                found = [row._tensordict[name] for row in found]
            except KeyError:
                return None
        else:
            found = [row.get(name, None) if is_tensor_collection(row) else None for row in found]
            if any(leaf is None for leaf in found):
                return None
    return list(found)


def holds(td: TensorDictBase, key: Key) -> bool:
    """Return whether all trajectories of a TensorDict `[n]` have a key."""
    return (leaves_of(rows_of(td), key) if is_stack(td) else td.get(key, None)) is not None


def flatten_leaves(key: Key, column: list[Any], shared: dict[tuple[int, ...], Tensor] | None = None) -> Flat | Text:
    """Build one column from a leaf of each row; `shared` lets columns of equal lengths share them."""
    first = column[0]
    if not isinstance(first, Tensor):
        return Text(column)
    if first.ndim == 0:
        return Flat(_stacked(column))
    if first.ndim == 1:
        try:
            # In one dimension the number of elements is the length, and five times faster to read.
            sizes = tuple(map(Tensor.numel, column))
            if key not in RAGGED_KEYS and sizes.count(sizes[0]) == len(sizes):
                return Flat(_stacked(column).unsqueeze(1) if sizes[0] == 1 else torch.stack(column))
            lengths = None if shared is None else shared.get(sizes)
            if lengths is None:
                lengths = torch.from_numpy(np.array(sizes))
                if shared is not None:
                    shared[sizes] = lengths
            return Flat(torch.cat(column), lengths)
        except (RuntimeError, TypeError):  # not all one-dimensional: the general way
            pass
    shapes = [leaf.shape for leaf in column]
    if key not in RAGGED_KEYS and shapes.count(first.shape) == len(shapes):
        return Flat(torch.stack(column))
    if all(shape[1:] == first.shape[1:] and len(shape) == first.ndim for shape in shapes):
        return Flat(torch.cat(column), torch.tensor([shape[0] for shape in shapes]))
    counts = torch.tensor([leaf.numel() for leaf in column])
    return Flat(torch.cat([leaf.reshape(-1) for leaf in column]), counts, shapes)


def _stacked(column: list[Tensor]) -> Tensor:
    """Return one element of each row, `[n]`; going through Python numbers is faster than `torch.stack`."""
    dtype = _NUMPY.get(column[0].dtype)
    items = list(map(Tensor.item, column)) if dtype is not None and column[0].is_cpu else []
    return torch.from_numpy(np.array(items, dtype)) if len(set(map(type, items))) == 1 else torch.stack(column).view(-1)


def _from_dense(td: TensorDictBase) -> Trajectories:
    out = Trajectories(td.shape[0])
    _collect(td, (), out, {})
    return out


def _collect(td: Any, prefix: tuple[str, ...], out: Trajectories, shared: dict[int, Tensor]) -> None:
    for name, leaf in entries_of(td).items():
        key: Key = (*prefix, name) if prefix else name
        if isinstance(leaf, Tensor):
            out[key] = unjagged(leaf, shared) if is_jagged(leaf) else Flat(leaf)
        elif isinstance(leaf, NonTensorStack):
            out[key] = Text(list(leaf.tensordicts))
        elif isinstance(leaf, NonTensorData) or not is_tensor_collection(leaf):
            # One list with an item per row is also a column, far cheaper to build than a stack of wrapped strings.
            plain = unwrap(leaf)
            out[key] = Text(list(plain) if isinstance(plain, list) and len(plain) == out.n else [plain] * out.n)
        elif isinstance(leaf, LazyStackedTensorDict):
            for inner, column in _from_rows(leaf.tensordicts).items():
                out[(*prefix, name, *(inner if isinstance(inner, tuple) else (inner,)))] = column
        else:
            _collect(leaf, (*prefix, name), out, shared)


def _drop_padding(columns: Trajectories) -> Trajectories:
    """Make padded or dense token columns ragged, with the lengths of the attention mask."""
    mask = columns.pop(ATTENTION_MASK, None)
    if isinstance(mask, Flat) and mask.lengths is None:
        _unpad(columns, mask.values.to(torch.bool))
    elif isinstance(mask, Flat) and mask.lengths is not None and not bool(mask.values.all()):
        _strip(columns, mask.values.to(torch.bool), mask.lengths)
    return columns


def ragged_tokens(columns: Trajectories) -> Trajectories:
    """Give every token column lengths, even if all trajectories of the batch are equally long; in place."""
    for key in RAGGED_KEYS:
        column = columns.get(key)
        if isinstance(column, Flat) and column.lengths is None and column.values.ndim >= 2:
            columns[key] = as_ragged(column, columns.n)
    return columns


def _unpad(columns: Trajectories, keep: Tensor) -> None:
    lengths, width = keep.sum(1), keep.shape[1]
    for key, column in columns.items():
        if not isinstance(column, Flat) or column.lengths is not None or column.values.ndim < 2:
            continue
        if column.values.shape[1] == width and (key in RAGGED_KEYS or width > 1):
            columns[key] = Flat(column.values[keep], lengths)


def _strip(columns: Trajectories, keep: Tensor, padded: Tensor) -> None:
    lengths = segment_sum(keep, padded).to(torch.int64)
    for key, column in columns.items():
        if not isinstance(column, Flat) or column.lengths is None:
            continue
        if torch.equal(column.lengths, padded):
            columns[key] = Flat(column.values[keep], lengths)


def as_ragged(column: Flat, n: int) -> Flat:
    """Return the column with lengths, adding them if it has none."""
    if column.lengths is not None:
        return column
    if column.values.ndim < 2:
        return Flat(column.values, torch.ones(n, dtype=torch.int64))
    width = column.values.shape[1]
    return Flat(column.values.flatten(0, 1), torch.full((n,), width))


def jagged(flat: Flat, offsets: Tensor | None = None) -> Tensor:
    """Return a `torch.jagged` nested tensor over the values of a ragged column."""
    if flat.lengths is None:
        raise DataError("a column with one entry per trajectory has no jagged form")
    if offsets is None:
        offsets = torch.zeros(flat.lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(flat.lengths, 0, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(flat.values, offsets)


def text_stack(items: Sequence[Any]) -> Any:
    """Return a NonTensorStack of one object per row, wrapped or not."""
    stack: Any = NonTensorStack
    return stack(*items)


def td_of(columns: Trajectories) -> TensorDictBase:
    """Return a TensorDict of batch size `[n]` with jagged leaves, the fast form of the write path.

    Rows that differ in more than their first dimension cannot be jagged: such batches become a lazy stack.
    """
    if any(isinstance(column, Flat) and column.shapes is not None for column in columns.values()):
        return stack_of(columns)
    tree: dict[str, Any] = {}
    offsets: list[tuple[Tensor, Tensor]] = []
    for key, column in columns.items():
        if isinstance(column, Text):
            leaf: Any = text_stack(column.items)
        elif column.lengths is None:
            leaf = column.values
        else:
            shared = next((o for ls, o in offsets if ls is column.lengths or torch.equal(ls, column.lengths)), None)
            leaf = jagged(column, shared)
            if shared is None:
                offsets.append((column.lengths, leaf.offsets()))
        plant(tree, key, leaf)
    return TensorDict(tree, batch_size=[columns.n])


def stack_of(columns: Trajectories) -> TensorDictBase:
    """Return a lazy stack `[n]`, one TensorDict per row."""
    trees: list[dict[str, Any]] = [{} for _ in range(columns.n)]
    texts: list[tuple[Key, Text]] = []
    for key, column in columns.items():
        if isinstance(column, Text):
            texts.append((key, column))
            continue
        for tree, leaf in zip(trees, column.rows(), strict=True):
            plant(tree, key, leaf)
    rows = [unchecked_tree(tree, _NO_BATCH) for tree in trees]
    for key, column in texts:
        for row, item in zip(rows, column.items, strict=True):
            row.set(key, item)
    return lazy_stack(rows)  # pyright: ignore[reportReturnType]


def unchecked_tree(tree: dict[str, Any], batch_size: torch.Size) -> TensorDict:
    """Return the TensorDict of a tree made by `plant`, whose leaves have this batch size."""
    items = {name: unchecked_tree(leaf, batch_size) if type(leaf) is dict else leaf for name, leaf in tree.items()}
    return unchecked(items, batch_size)


def plant(tree: dict[str, Any], key: Key, leaf: Any) -> None:
    """Set a leaf of a tree of dicts."""
    names = key if isinstance(key, tuple) else (key,)
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = leaf


def concat(
    parts: Sequence[Trajectories], order: Sequence[int] | None = None, pool: BufferPool | None = None
) -> Trajectories:
    """Concatenate batches, optionally selecting and reordering their rows.

    Args:
        parts: batches with the same keys.
        order: indices into the rows of all parts; all rows in order by default.
        pool: provides the memory of ragged columns; None allocates it.

    Raises:
        DataError: if the parts do not have the same keys.
    """
    if len({ROWS in part for part in parts}) == 2:
        parts = [whole(part) for part in parts]
    counts = [part.n for part in parts]
    order = range(sum(counts)) if order is None else order
    out, shared = Trajectories(len(order)), dict[tuple[int, ...], Tensor]()
    for key in sorted({key for part in parts for key in part}, key=str):
        missing = next((part for part in parts if key not in part), None)
        if missing is not None:
            raise DataError(f"{missing.n} of {sum(counts)} trajectories lack the key {key!r} that others have")
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
    found = tuple(id(c.lengths) for c in flats)
    lengths = shared.get(found) if all(c.lengths is not None for c in flats) else None
    if lengths is None:
        lengths = torch.cat([c.lengths for c in ragged if c.lengths is not None])[torch.tensor(order)]
        shared[found] = lengths
    return Flat(_rows_in_order(ragged, order, pool), lengths)


def columns_state(columns: Trajectories) -> dict[str, Any]:
    """Return plain tensors, lists and strings that `torch.load(weights_only=True)` reads back.

    Raises:
        DataError: if a non-tensor value is not plain data.
    """
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
                f"a pending trajectory holds a {type(item).__name__} under {key!r}, which a checkpoint cannot "
                "carry; store JSON text instead"
            )


# -- at the interfaces -------------------------------------------------------------------------------------------


def along_one_dimension(td: TensorDictBase) -> TensorDictBase:
    """Return the trajectories, or steps, of a TensorDict of any batch size along one dimension.

    Raises:
        IncompleteError: a row of steps ends within a trajectory.
    """
    if td.batch_dims == 0:
        return lazy_stack([td])  # pyright: ignore[reportReturnType]
    if td.batch_dims == 1:
        return td
    flat: Any = td.flatten(0, -2) if td.batch_dims > 2 else td
    if is_token_level(flat):
        return token_level(flat)
    rows = [list(row.unbind(0)) for row in flat.unbind(0)]
    for i, row in enumerate(rows):
        done = row[-1].get(DONE, None) if row else None
        if done is not None and len(rows) > 1 and not bool(done.any()):
            raise IncompleteError(
                f"the last trajectory of row {i} of {len(rows)} is not complete: its last step has no {DONE!r}. Pass "
                "whole trajectories, so that nothing is lost."
            )
    return lazy_stack([step for row in rows for step in row])  # pyright: ignore[reportReturnType]


def trajectories_of(td: TensorDictBase) -> Trajectories:
    """Return one row per trajectory, from any form; steps are merged.

    Raises:
        IncompleteError: if the last trajectory is not complete.
    """
    return merge_steps(steps_of(td))


def steps_of(td: TensorDictBase) -> Trajectories:
    """Return one row per step or trajectory, from any form, with lengths on every token column."""
    return ragged_tokens(columns_of(along_one_dimension(td)))


ROWS: Key = ("", "rows")
"""Key of a column of whole TensorDicts, one per trajectory: the rows of a lazy stack that were not flattened."""


def some_steps_of(td: TensorDictBase, keys: Iterable[Key]) -> Trajectories:
    """Like `steps_of`, but flatten only some keys of a lazy stack, and keep its rows under `ROWS`.

    This saves work for code that needs a few columns and returns the rows. `whole` flattens the rest on demand.
    """
    td = along_one_dimension(td)
    if not is_stack(td) or not len(rows := rows_of(td)):
        return ragged_tokens(columns_of(td))
    out, shared = Trajectories(len(rows), {ROWS: Text(list(rows))}), dict[tuple[int, ...], Tensor]()
    for key in keys:
        leaves = leaves_of(rows, key)
        if leaves is not None:
            out[key] = flatten_leaves(key, leaves, shared)
    mask = leaves_of(rows, ATTENTION_MASK)
    if mask is not None or any(isinstance(column, Flat) and column.values.is_cuda for column in out.values()):
        return ragged_tokens(columns_of(td))  # padded rows, or rows on a device
    return ragged_tokens(out)


def whole(batch: Trajectories) -> Trajectories:
    """Return all columns of a batch, flattening the rows under `ROWS` if there are any."""
    rows = batch.get(ROWS)
    if not isinstance(rows, Text):
        return batch
    return Trajectories(batch.n, steps_of(lazy_stack(rows.items)) | {k: c for k, c in batch.items() if k != ROWS})  # pyright: ignore[reportArgumentType]


def attach(td: TensorDictBase, columns: Mapping[Key, Flat]) -> TensorDictBase:
    """Return a shallow copy of `td` (any form, `[n]`) with these columns set, each in the form of the batch."""
    if not columns:
        return td
    if is_stack(td):
        return stack_with(rows_of(td), columns)
    mask = td.get(ATTENTION_MASK, None)
    padded = mask.to(torch.bool) if isinstance(mask, Tensor) and not is_jagged(mask) else None
    lengths = None if padded is None else padded.sum(1)
    dense = padded is None and not _has_jagged(td)
    leaves: dict[Key, Tensor] = {}
    for key, column in columns.items():
        if column.lengths is None:
            leaves[key] = column.values
        elif column.shapes is not None:
            raise DataError(f"rows of {key!r} differ in more than their length; pass a lazy stack")
        elif padded is not None and lengths is not None and torch.equal(lengths.cpu(), column.lengths):
            leaves[key] = under_mask(padded, column.values)
        else:
            leaf = _dense(column) if dense else None
            leaves[key] = jagged(column) if leaf is None else leaf
    device = td.device
    return _with(td, leaves if device is None else {key: leaf.to(device) for key, leaf in leaves.items()})


def stack_with(rows: Sequence[TensorDictBase], columns: Mapping[Key, Flat]) -> TensorDictBase:
    """Return a lazy stack of shallow copies of the TensorDicts, with these columns set."""
    masks = leaves_of(rows, ATTENTION_MASK)
    split = [_padded_rows(column, masks) for column in columns.values()]
    news = (dict(zip(columns, leaves, strict=True)) for leaves in zip(*split, strict=True))
    return lazy_stack([_with(row, new) for row, new in zip(rows, news, strict=True)])  # pyright: ignore[reportReturnType]


def _padded_rows(column: Flat, masks: list[Any] | None) -> list[Tensor]:
    """Return the rows of a column, padding each again as its attention mask has it."""
    rows = column.rows()
    if masks is None or column.lengths is None:
        return rows
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        if isinstance(mask, Tensor) and mask.ndim == 1 and mask.numel() != row.shape[0] == int(mask.sum()):
            rows[i] = under_mask(mask.to(torch.bool), row)
    return rows


def put(td: TensorDictBase, filled: TensorDictBase) -> TensorDictBase:
    """Set in `td` the leaves that `attach` added or changed in `filled`, and return `td`.

    If `attach` had to change the form of the batch, return `filled` and leave `td` unchanged.
    """
    if filled is td or filled.batch_size != td.batch_size:
        return filled
    if is_stack(td) != is_stack(filled):
        return filled
    if is_stack(td):
        for row, new in zip(rows_of(td), rows_of(filled), strict=True):
            put(row, new)
        return td
    for key, leaf in walk(filled):
        if td.get(key, None) is not leaf:
            td.set(key, leaf)
    return td


def in_form_of(td: TensorDictBase, batch: Trajectories) -> TensorDictBase:
    """Return a TensorDict `[m]` of other trajectories in the form of `td`: lazy stack, padded, dense or jagged."""
    if is_stack(td) or td.batch_dims != 1:
        return stack_of(batch)
    if td.get(ATTENTION_MASK, None) is not None and not _has_jagged(td):
        return padded_of(batch)
    if _has_jagged(td):
        return td_of(batch)
    dense = {k: _dense(c) if isinstance(c, Flat) and c.lengths is not None else None for k, c in batch.items()}
    flat = {key: column if (leaf := dense[key]) is None else Flat(leaf) for key, column in batch.items()}
    return td_of(Trajectories(batch.n, flat))


def padded_of(batch: Trajectories) -> TensorDictBase:
    """Return a TensorDict `[n]` whose token columns are padded on the right, with the attention mask."""
    tokens = batch.get(TOKENS)
    lengths = tokens.lengths if isinstance(tokens, Flat) else None
    if lengths is None:
        return td_of(batch)
    real = length_mask(lengths)
    out = Trajectories(batch.n, batch)
    for key, column in batch.items():
        if isinstance(column, Flat) and column.lengths is not None and torch.equal(column.lengths, lengths):
            out[key] = Flat(under_mask(real, column.values))
    out[ATTENTION_MASK] = Flat(real)
    return td_of(out)


def _dense(column: Flat) -> Tensor | None:
    """Return rows of equal length as one tensor `[n, T, ...]`; None if lengths differ."""
    lengths = column.lengths
    if lengths is None or column.shapes is not None or not lengths.numel() or not bool((lengths == lengths[0]).all()):
        return None
    return column.values.reshape(lengths.numel(), int(lengths[0]), *column.values.shape[1:])


def _has_jagged(td: TensorDictBase) -> bool:
    return any(is_jagged(leaf) for leaf in td.values(True, True))


def _with(td: Any, new: Mapping[Key, Tensor]) -> TensorDictBase:
    """Return a copy with new leaves; all other leaves, and containers without a new leaf, are shared.

    `clone(recurse=False)` copies stacks of strings item by item, which costs more than all the rest.
    """
    if type(td) is not TensorDict:
        out = td.clone(recurse=False)
        for key, leaf in new.items():
            out.set(key, leaf)
        return out
    items = dict(entries_of(td))
    nested: dict[str, dict[Key, Tensor]] = {}
    for key, leaf in new.items():
        if isinstance(key, str) or len(key) == 1:
            items[key if isinstance(key, str) else key[0]] = leaf
        else:
            nested.setdefault(key[0], {})[key[1:]] = leaf
    for name, inner in nested.items():
        items[name] = _with(items.get(name, TensorDict(batch_size=td.batch_size)), inner)
    # The leaves belong to a TensorDict of the same batch size, so nothing needs checking again.
    return unchecked(items, td.batch_size)


def per_token(batch: Trajectories, key: Key, like: Flat | None = None) -> Flat | None:
    """Return a column with one value per token, or None if missing; trailing dimensions of 1 are dropped.

    Raises:
        DataError: if its lengths differ from those of `like`.
    """
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
        seen = "one value each" if column.lengths is None else f"lengths {column.lengths.tolist()[:8]}"
        raise DataError(f"{key!r} has {seen}, the tokens have lengths {like.lengths.tolist()[:8]}")
    return column


# -- steps of one trajectory -------------------------------------------------------------------------------------


def merge_steps(columns: Trajectories) -> Trajectories:
    """Merge rows that may be steps into one row per trajectory.

    Raises:
        DataError: if the last trajectory is not complete.
    """
    ended = ends(columns)
    if ended is None or bool(ended.all()):
        return columns  # the usual case: every row ends a trajectory
    last = torch.nonzero(ended).reshape(-1)
    if not last.numel() or int(last[-1]) != columns.n - 1:
        first = int(last[-1]) + 1 if last.numel() else 0
        raise IncompleteError(
            f"the last trajectory is not complete: steps {first} to {columns.n - 1} of {columns.n} have no {DONE!r}. "
            "Write whole trajectories, so that nothing is lost."
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
        found = np.searchsorted(np.flatnonzero(flat.numpy()), np.stack([ends - counts, ends]))
        return torch.from_numpy((found[1] - found[0]).astype(np.float64))
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

    Raises:
        DataError: the advantages differ between the tokens of a trajectory.

    >>> one_advantage(torch.tensor([0.0, 2.0, 2.0]), torch.tensor([False, True, True]), torch.tensor([3]))
    tensor([2.])
    """
    last = values[last_position(mask, lengths)]
    if not bool(values.isclose(last.repeat_interleave(lengths), equal_nan=True)[mask].all()):
        raise DataError(
            "the advantage differs between the tokens of a trajectory, and the store keeps one for all of them. Make "
            "the store with a schema whose column 'advantage' is ragged, or let MCAdvantage form one return per "
            "trajectory: trajectory_return='sum'"
        )
    return last


def last_position(mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the flat index of the last True of each row; the row's last position if there is none.

    Args:
        mask: bool, flat.
        lengths: int64 `[n]`, all at least 1.

    Raises:
        DataError: if a row has no tokens.

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
