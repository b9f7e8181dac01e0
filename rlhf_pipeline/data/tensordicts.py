"""TensorDicts of trajectories: lazy stacks, padded, jagged or dense, to columns; and columns to lazy stacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection, lazy_stack
from tensordict.tensorclass import NonTensorData, NonTensorStack
from torch import Tensor

from rlhf_pipeline.data.keys import ASSISTANT_MASK, ATTENTION_MASK, DONE, LOG_PROBS, TOKENS, Key
from rlhf_pipeline.data.padding import length_mask, under_mask
from rlhf_pipeline.data.trajectories import (
    NUMPY_DTYPES,
    RAGGED_KEYS,
    Flat,
    Text,
    Trajectories,
    merge_steps,
    ragged_tokens,
    segment_sum,
    unwrap,
)
from rlhf_pipeline.data.upload import upload
from rlhf_pipeline.errors import DataError, IncompleteError

T = TypeVar("T", bound=TensorDict)

_NO_BATCH = torch.Size([])

ROWS: Key = ("", "rows")
"""Key of a column of complete TensorDicts, one per trajectory: the rows of a lazy stack that were not flattened."""


def is_stack(td: object) -> bool:
    """Return whether `td` is a lazy stack along its only batch dimension."""
    return isinstance(td, LazyStackedTensorDict) and td.batch_dims == 1 and td.stack_dim == 0


def rows_of(td: Any) -> list[TensorDictBase]:
    """Return the TensorDicts of a lazy stack, not copied."""
    return td.tensordicts


def along_one_dimension(td: TensorDictBase) -> TensorDictBase:
    """Return the trajectories, or steps, of a TensorDict of any batch size along one dimension.

    Where the containers of a TensorDict `[n]` are stacks of ragged rows, as TorchRL's wrappers leave them in a step of
    an environment, it becomes a stack of rows as a whole.
    """
    if td.batch_dims == 0:
        return lazy_stack([td])  # pyright: ignore[reportReturnType]
    if td.batch_dims > 1:
        return _flattened(td)
    if not is_stack(td):
        containers = [inner_of(entries_of(td).get(key[0])) for key in (TOKENS, LOG_PROBS)]
        if any(isinstance(container, LazyStackedTensorDict) for container in containers):
            return lazy_stack(list(td.unbind(0)))  # pyright: ignore[reportReturnType]
    return td


def steps_of(td: TensorDictBase) -> Trajectories:
    """Return one row per step or trajectory, with lengths on every token column, without padding."""
    td = along_one_dimension(td)
    columns = _from_rows(rows_of(td)) if is_stack(td) else _columns(td)
    for column in columns.values():
        # The store and the bookkeeping of groups and lengths are on the CPU.
        if isinstance(column, Flat) and column.values.is_cuda:
            column.values = column.values.cpu()
            column.lengths = None if column.lengths is None else column.lengths.cpu()
    mask = columns.pop(ATTENTION_MASK, None)
    if isinstance(mask, Flat) and mask.lengths is not None and not bool(mask.values.all()):
        _strip(columns, mask.values.to(torch.bool), mask.lengths)
    return ragged_tokens(columns)


def trajectories_of(td: TensorDictBase) -> Trajectories:
    """Return one row per trajectory, from any form; steps are merged."""
    return merge_steps(steps_of(td))


def some_steps_of(td: TensorDictBase, keys: Iterable[Key]) -> Trajectories:
    """Like `steps_of`, but flatten only some keys of a lazy stack, and keep its rows under `ROWS`.

    This saves work for code that needs a few columns and returns the rows; `with_all_columns` flattens the rest.
    """
    td = along_one_dimension(td)
    if not is_stack(td) or not len(rows := rows_of(td)):
        return steps_of(td)
    out, shared = Trajectories(len(rows), {ROWS: Text(list(rows))}), dict[tuple[int, ...], Tensor]()
    for key in keys:
        leaves = leaves_of(rows, key)
        if leaves is not None:
            out[key] = flatten_leaves(key, leaves, shared)
    mask = leaves_of(rows, ATTENTION_MASK)
    if mask is not None or any(isinstance(column, Flat) and column.values.is_cuda for column in out.values()):
        return steps_of(td)  # padded rows, or rows on a device
    return ragged_tokens(out)


def with_all_columns(batch: Trajectories) -> Trajectories:
    """Return all columns of a batch, flattening the rows under `ROWS` if there are any."""
    rows = batch.get(ROWS)
    if not isinstance(rows, Text):
        return batch
    return Trajectories(batch.n, steps_of(lazy_stack(rows.items)) | {k: c for k, c in batch.items() if k != ROWS})  # pyright: ignore[reportArgumentType]


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
            raise DataError(
                f"trajectory {i} of {len(entries)} and trajectory 0 do not have the same keys. Keys in only one "
                f"of them: {names}"
            )


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
    dtype = NUMPY_DTYPES.get(column[0].dtype)
    items = list(map(Tensor.item, column)) if dtype is not None and column[0].is_cpu else []
    return torch.from_numpy(np.array(items, dtype)) if len(set(map(type, items))) == 1 else torch.stack(column).view(-1)


def _strip(columns: Trajectories, keep: Tensor, padded: Tensor) -> None:
    lengths = segment_sum(keep, padded).to(torch.int64)
    for key, column in columns.items():
        if not isinstance(column, Flat) or column.lengths is None:
            continue
        if torch.equal(column.lengths, padded):
            columns[key] = Flat(column.values[keep], lengths)


def leaves_of(rows: Sequence[Any], key: Key) -> list[Any] | None:
    """Return one leaf of every row, or None if any row lacks it."""
    leaves: Sequence[Any] = rows
    for name in (key,) if isinstance(key, str) else key:
        if set(map(type, leaves)) == {TensorDict}:
            try:
                leaves = [row._tensordict[name] for row in leaves]
            except KeyError:
                return None
        else:
            leaves = [row.get(name, None) if is_tensor_collection(row) else None for row in leaves]
            if any(leaf is None for leaf in leaves):
                return None
    return list(leaves)


def holds(td: TensorDictBase, key: Key) -> bool:
    """Return whether all trajectories of a TensorDict `[n]` have a key."""
    return (leaves_of(rows_of(td), key) if is_stack(td) else td.get(key, None)) is not None


def with_full_log_probs(td: TensorDictBase, log_probs: Key) -> TensorDictBase:
    """Place log-probs of responses alone, as TorchRL's wrappers return them, in rows of whole tokens.

    A step of an environment that such a wrapper samples for has prompt, response and whole tokens, and log-probs of the
    response; from these follow the assistant's mask and the log-probs per token, NaN over the prompt. The wrapper
    reports 0 for the first sampled token, whatever its log-prob: that one is unknown, and NaN as well.

    Args:
        td: `[n]`, returned unchanged unless it lacks what can be placed.
        log_probs: the key of log-probs per token, whose sibling `response` is read.
    """
    if isinstance(log_probs, str) or td.batch_dims != 1:
        return td
    if not is_stack(td):
        return _placed(td, log_probs)
    rows = [_placed(row, log_probs) for row in rows_of(td)]
    return td if all(new is old for new, old in zip(rows, rows_of(td), strict=True)) else lazy_stack(rows)  # pyright: ignore[reportReturnType]


def inner_of(entry: Any) -> Any:
    """Return the TensorDict of a tensorclass; anything else unchanged."""
    return getattr(entry, "_tensordict", entry) if is_tensor_collection(entry) else entry


def _placed(td: TensorDictBase, log_probs: Key) -> TensorDictBase:
    """Return `with_full_log_probs` of one row, or of a batch of padded ones."""
    prompt, response = (td.get((TOKENS[0], name), None) for name in ("prompt", "response"))
    scores = td.get((*log_probs[:-1], "response"), None)
    if prompt is None or response is None or td.get(TOKENS, None) is None:
        return td
    new: dict[Key, Tensor] = {}
    if td.get(ASSISTANT_MASK, None) is None:
        mask = torch.cat([torch.zeros_like(prompt, dtype=torch.bool), torch.ones_like(response, dtype=torch.bool)], -1)
        real = td.get(ATTENTION_MASK, None)
        new[ASSISTANT_MASK] = mask if real is None or real.shape != mask.shape else mask & real.bool()
    if td.get(log_probs, None) is None and scores is not None and scores.shape == response.shape:
        first = torch.arange(response.shape[-1], device=scores.device) == 0
        sampled = torch.where(first & (scores == 0), torch.nan, scores)
        unknown = torch.full(prompt.shape, torch.nan, dtype=sampled.dtype, device=sampled.device)
        new[log_probs] = torch.cat([unknown, sampled], -1)
    return with_leaves(td, new) if new else td


def entries_of(row: Any) -> dict[str, Any]:
    """Return the top-level entries of a TensorDict or tensorclass; do not change them."""
    return row._tensordict if type(row) is TensorDict else dict(row.items())


def attach(td: TensorDictBase, columns: Mapping[Key, Flat]) -> TensorDictBase:
    """Return a shallow copy of `td` (`[n]`) with these columns set, each in the form of the batch."""
    if not columns:
        return td
    return stack_with(rows_of(td), columns) if is_stack(td) else _attach(td, columns)


def stack_with(rows: Sequence[TensorDictBase], columns: Mapping[Key, Flat]) -> TensorDictBase:
    """Return a lazy stack of shallow copies of the TensorDicts, with these columns set."""
    masks = leaves_of(rows, ATTENTION_MASK)
    split = [_padded_rows(column, masks) for column in columns.values()]
    news = (dict(zip(columns, leaves, strict=True)) for leaves in zip(*split, strict=True))
    return lazy_stack([with_leaves(row, new) for row, new in zip(rows, news, strict=True)])  # pyright: ignore[reportReturnType]


def _padded_rows(column: Flat, masks: list[Any] | None) -> list[Tensor]:
    """Return the rows of a column, padding each again as its attention mask has it."""
    rows = column.rows()
    if masks is None or column.lengths is None:
        return rows
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        if isinstance(mask, Tensor) and mask.ndim == 1 and mask.numel() != row.shape[0] == int(mask.sum()):
            rows[i] = under_mask(mask.to(torch.bool), row)
    return rows


def with_leaves(td: Any, new: Mapping[Key, Tensor]) -> TensorDictBase:
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
        items[name] = with_leaves(items.get(name, TensorDict(batch_size=td.batch_size)), inner)
    # The leaves belong to a TensorDict of the same batch size, so nothing needs checking again.
    return unchecked(items, td.batch_size)


def put(td: TensorDictBase, filled: TensorDictBase) -> TensorDictBase:
    """Set in `td` the leaves that `attach` added or changed in `filled`, and return `td`.

    If `attach` had to change the form of the batch, return `filled` and leave `td` unchanged.
    """
    if filled is td or filled.batch_size != td.batch_size or is_stack(td) != is_stack(filled):
        return filled
    return td.update(filled)


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


def text_stack(items: Sequence[Any]) -> Any:
    """Return a NonTensorStack of one object per row, wrapped or not."""
    stack: Any = NonTensorStack
    return stack(*items)


def plant(tree: dict[str, Any], key: Key, leaf: Any) -> None:
    """Set a leaf of a tree of dicts."""
    names = key if isinstance(key, tuple) else (key,)
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = leaf


def unchecked(
    items: dict[str, Any], batch_size: torch.Size, *, device: torch.device | None = None, kind: type[T] = TensorDict
) -> T:
    """Build a TensorDict, without checks, from leaves and inner TensorDicts known to have this batch size."""
    return kind._new_unsafe(items, batch_size=batch_size, device=device)


def unchecked_tree(tree: dict[str, Any], batch_size: torch.Size) -> TensorDict:
    """Return the TensorDict of a tree made by `plant`, whose leaves have this batch size."""
    items = {name: unchecked_tree(leaf, batch_size) if type(leaf) is dict else leaf for name, leaf in tree.items()}
    return unchecked(items, batch_size)


def on_device(batch: TensorDict, device: torch.device) -> TensorDict:
    """Move a batch that was read; its leaves go to a GPU in one copy that the host does not wait for.

    >>> batch = TensorDict({"a": torch.arange(3)}, batch_size=[3])
    >>> on_device(batch, torch.device("cpu")) is batch
    True
    """
    if device.type != "cuda":
        return batch if device.type == "cpu" else batch.to(device)
    moved = iter(upload([leaf for leaf in batch.values(True, True) if isinstance(leaf, Tensor)], device))
    return batch.apply(lambda _: next(moved), device=device)


# -- padded, jagged and dense TensorDicts ---------------------------------------------------------------------


def is_jagged(leaf: object) -> bool:
    """Return whether `leaf` is a nested tensor of either layout; for most leaves without a dispatch."""
    if not isinstance(leaf, Tensor):
        return False
    # Reading the attribute of a jagged tensor goes through two dispatchers; its own dict has the same answer.
    return "_offsets" in leaf.__dict__ or leaf.is_nested


def unjagged(leaf: Tensor, shared: dict[int, Tensor] | None = None) -> Flat:
    """Return values and lengths of a nested tensor of any layout, detached."""
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


def _flattened(td: TensorDictBase) -> TensorDictBase:
    """Return the trajectories, or steps, of a TensorDict of two or more dimensions along one dimension."""
    flat: Any = td.flatten(0, -2) if td.batch_dims > 2 else td
    try:
        tokens = flat.get(TOKENS, None)
    except RuntimeError:  # ragged steps in a lazy stack of lazy stacks
        tokens = None
    if isinstance(tokens, Tensor) and tokens.ndim == 2:  # the second dimension is the token, not a step
        return _token_level(flat, tokens)
    rows = [list(row.unbind(0)) for row in flat.unbind(0)]
    for i, row in enumerate(rows):
        done = row[-1].get(DONE, None) if row else None
        if done is not None and len(rows) > 1 and not bool(done.any()):
            raise IncompleteError(
                f"the last trajectory of row {i} of {len(rows)} is not complete: its last step has no {DONE!r}. "
                "Pass complete trajectories, so that nothing is lost."
            )
    return lazy_stack([step for row in rows for step in row])  # pyright: ignore[reportReturnType]


def _token_level(td: TensorDictBase, tokens: Tensor) -> TensorDictBase:
    """View a `[n, T]` TensorDict whose second dimension is the token as a padded batch `[n]`."""
    out = td.clone(recurse=False) if not isinstance(td, LazyStackedTensorDict) else td.contiguous()
    for node in (out, *(leaf for leaf in out.values(True) if isinstance(leaf, TensorDictBase))):
        node.batch_size = node.batch_size[:1]  # pyright: ignore[reportAttributeAccessIssue]  # it has a setter
    mask = out.get(ATTENTION_MASK, None)
    last = torch.full((out.shape[0],), tokens.shape[1] - 1) if mask is None else mask.long().sum(1) - 1
    for key, leaf in list(out.items(True, True)):
        if key in RAGGED_KEYS or not isinstance(leaf, Tensor) or leaf.ndim < 2:
            continue
        if leaf.shape[1] == tokens.shape[1]:
            out.set(key, leaf[torch.arange(leaf.shape[0]), last.clamp_min(0)])
    return out


def _columns(td: TensorDictBase) -> Trajectories:
    out = Trajectories(td.shape[0])
    _collect(td, (), out, {})
    mask = out.get(ATTENTION_MASK)
    if isinstance(mask, Flat) and mask.lengths is None:
        del out[ATTENTION_MASK]
        _unpad(out, mask.values.to(torch.bool))
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
            for inner, column in steps_of(leaf).items():
                out[(*prefix, name, *(inner if isinstance(inner, tuple) else (inner,)))] = column
        else:
            _collect(leaf, (*prefix, name), out, shared)


def _unpad(columns: Trajectories, keep: Tensor) -> None:
    lengths, width = keep.sum(1), keep.shape[1]
    for key, column in columns.items():
        if not isinstance(column, Flat) or column.lengths is not None or column.values.ndim < 2:
            continue
        if column.values.shape[1] == width and (key in RAGGED_KEYS or width > 1):
            columns[key] = Flat(column.values[keep], lengths)


def jagged(flat: Flat, offsets: Tensor | None = None) -> Tensor:
    """Return a `torch.jagged` nested tensor over the values of a ragged column."""
    if offsets is None:
        assert flat.lengths is not None
        offsets = torch.cat([flat.lengths.new_zeros(1), flat.lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(flat.values, offsets)


def _dense(column: Flat) -> Tensor | None:
    """Return rows of equal length as one tensor `[n, T, ...]`; None if lengths differ."""
    lengths = column.lengths
    if lengths is None or column.shapes is not None or not lengths.numel() or not bool((lengths == lengths[0]).all()):
        return None
    return column.values.reshape(lengths.numel(), int(lengths[0]), *column.values.shape[1:])


def _has_jagged(td: TensorDictBase) -> bool:
    return any(is_jagged(leaf) for leaf in td.values(True, True))


def _attach(td: TensorDictBase, columns: Mapping[Key, Flat]) -> TensorDictBase:
    """Return a shallow copy of `td` (`[n]`) with these columns set, each in the form of the batch."""
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
    return with_leaves(td, leaves if device is None else {key: leaf.to(device) for key, leaf in leaves.items()})


def in_form_of(td: TensorDictBase, batch: Trajectories) -> TensorDictBase:
    """Return a TensorDict `[m]` of other trajectories in the form of `td`: a lazy stack, padded, dense or jagged."""
    if is_stack(td) or td.batch_dims != 1:
        return stack_of(batch)
    if _has_jagged(td):
        return td_of(batch)
    if td.get(ATTENTION_MASK, None) is not None:
        return padded_of(batch)
    flat = {
        key: Flat(leaf) if isinstance(column, Flat) and (leaf := _dense(column)) is not None else column
        for key, column in batch.items()
    }
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
