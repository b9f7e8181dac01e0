"""The forms of a batch of trajectories besides lazy stacks: padded, jagged and dense TensorDicts, `[n]` or `[n, T]`.

Importing this module makes `extend` and the transforms of the write path accept them, and give back the form they got.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection, lazy_stack
from tensordict.tensorclass import NonTensorData, NonTensorStack
from torch import Tensor

from rlhf_pipeline.data.keys import ATTENTION_MASK, DONE, TOKENS, Key
from rlhf_pipeline.data.padding import length_mask, under_mask
from rlhf_pipeline.data.tensordicts import (
    Forms,
    entries_of,
    plant,
    register_forms,
    stack_of,
    steps_of,
    text_stack,
    with_leaves,
)
from rlhf_pipeline.data.trajectories import RAGGED_KEYS, Flat, Text, Trajectories, unwrap
from rlhf_pipeline.errors import DataError, IncompleteError


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


def _rows(td: TensorDictBase) -> TensorDictBase:
    """Return the trajectories, or steps, of a TensorDict of two or more dimensions along one dimension.

    Raises:
        IncompleteError: a row of steps ends within a trajectory.
    """
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
                f"the last trajectory of row {i} of {len(rows)} is not complete: its last step has no {DONE!r}. Pass "
                "whole trajectories, so that nothing is lost."
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


def _like(td: TensorDictBase, batch: Trajectories) -> TensorDictBase:
    """Return a TensorDict `[m]` of other trajectories in the form of `td`: padded, dense or jagged."""
    if _has_jagged(td):
        return td_of(batch)
    if td.get(ATTENTION_MASK, None) is not None:
        return padded_of(batch)
    flat = {
        key: Flat(leaf) if isinstance(column, Flat) and (leaf := _dense(column)) is not None else column
        for key, column in batch.items()
    }
    return td_of(Trajectories(batch.n, flat))


register_forms(Forms(columns=_columns, rows=_rows, attach=_attach, like=_like))
