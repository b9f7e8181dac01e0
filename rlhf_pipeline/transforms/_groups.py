"""Batches of whole trajectories in any form: reading and writing columns, taking some, joining several."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from rlhf_pipeline.data.trajectories import (
    Flat,
    Text,
    Trajectories,
    columns_of,
    concat,
    concat_flat,
    entries_of,
    flatten_leaves,
    is_jagged,
    is_stack,
    jagged,
    leaves_of,
    rows_of,
    td_of,
    unjagged,
    walk,
)
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.keys import ATTENTION_MASK, Key


def read(td: TensorDictBase, key: Key) -> Flat | Text | None:
    """One column of a batch `[n]` in any form, or None where the key is missing."""
    if is_stack(td):
        leaves = leaves_of(rows_of(td), key)
        return None if leaves is None else flatten_leaves(key, leaves)
    leaf = td.get(key, None)
    if leaf is None:
        return None
    if not isinstance(leaf, Tensor):
        items = leaf.tolist() if hasattr(leaf, "tolist") else leaf
        return Text(list(items) if isinstance(items, list) else [items] * td.shape[0])
    if is_jagged(leaf):
        return unjagged(leaf)
    if leaf.ndim >= 2:
        mask = td.get(ATTENTION_MASK, None)
        if isinstance(mask, Tensor) and not is_jagged(mask) and mask.shape[:2] == leaf.shape[:2]:
            mask = mask.to(torch.bool)
            return Flat(leaf[mask], mask.sum(1))
    return Flat(leaf)


def write(td: TensorDictBase, values: dict[Key, Flat]) -> TensorDictBase:
    """A shallow copy of `td` (any form, `[n]`) with these columns set, each in the form of the batch."""
    if is_stack(td):
        return _write_rows(td, values)
    mask = td.get(ATTENTION_MASK, None)
    padded = mask.to(torch.bool) if isinstance(mask, Tensor) and not is_jagged(mask) else None
    lengths = None if padded is None else padded.sum(1)
    leaves: dict[Key, Tensor] = {}
    for key, column in values.items():
        if column.lengths is None:
            leaves[key] = column.values
        elif column.shapes is not None:
            raise DataError(f"rows of {key!r} differ in more than their length; pass a lazy stack")
        elif padded is not None and lengths is not None and torch.equal(lengths, column.lengths):
            leaf = column.values.new_zeros((*padded.shape, *column.values.shape[1:]))
            leaf[padded] = column.values
            leaves[key] = leaf
        elif padded is None and _is_rectangular(td, column.lengths):
            leaves[key] = column.values.unflatten(0, (len(column.lengths), -1))
        else:
            leaves[key] = jagged(column)
    return _with(td, leaves)


def _is_rectangular(td: TensorDictBase, lengths: Tensor) -> bool:
    """Whether a batch has rows of one length, `[n, T]`, without padding and as plain tensors."""
    one = bool(lengths.numel()) and bool((lengths == lengths[0]).all()) and int(lengths[0]) > 0
    return one and not any(isinstance(leaf, Tensor) and is_jagged(leaf) for leaf in td.values(True, True))


def in_next(key: Key) -> Key:
    """A key as a step of an environment calls it inside `next`."""
    if isinstance(key, str) or key[0] != "next":
        return key
    return key[1] if len(key) == 2 else key[1:]


def put(td: TensorDictBase, filled: TensorDictBase) -> TensorDictBase:
    """Set in `td` what `filled`, made from it by `write`, has more or other; `td` comes back.

    A batch that `write` could only answer in another form comes back in that form, and is not changed.
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


def _write_rows(td: TensorDictBase, values: dict[Key, Flat]) -> TensorDictBase:
    split = {key: column.rows() for key, column in values.items()}
    rows = rows_of(td)
    news = [dict(zip(split, leaves, strict=True)) for leaves in zip(*split.values(), strict=True)]
    return lazy_stack([_with(row, new) for row, new in zip(rows, news, strict=True)])  # pyright: ignore[reportReturnType]


def _with(td: Any, new: Mapping[Key, Tensor]) -> TensorDictBase:
    """A copy with more leaves, which shares all other leaves and every container that no new key goes through.

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
    return TensorDict._new_unsafe(items, batch_size=td.batch_size)


def select(td: TensorDictBase, index: Tensor) -> TensorDictBase:
    """The rows `index` (int64 `[m]`) of a batch `[n]` in any form, in that order."""
    if index.numel() == td.shape[0] and torch.equal(index, torch.arange(index.numel())):
        return td
    if is_stack(td):
        rows = rows_of(td)
        return lazy_stack([rows[i] for i in index.tolist()])  # pyright: ignore[reportReturnType]
    if any(is_jagged(leaf) for leaf in td.values(True, True)):
        return td_of(columns_of(td).select(index))
    return td[index]  # pyright: ignore[reportReturnType]


def join(parts: Sequence[TensorDictBase]) -> TensorDictBase:
    """Put batches `[n_i]` one after the other, in the common form if they share one."""
    if len(parts) == 1:
        return parts[0]
    if all(is_stack(part) for part in parts):
        return lazy_stack([row for part in parts for row in rows_of(part)])  # pyright: ignore[reportReturnType]
    if not any(isinstance(part, LazyStackedTensorDict) for part in parts):
        leaves = [leaf for part in parts for leaf in part.values(True, True) if isinstance(leaf, Tensor)]
        masks = {part.get(ATTENTION_MASK).shape[1] for part in parts if part.get(ATTENTION_MASK, None) is not None}
        if not any(is_jagged(leaf) for leaf in leaves) and len(masks) <= 1:
            try:
                return torch.cat(list(parts), 0)  # pyright: ignore[reportReturnType,reportArgumentType,reportCallIssue]
            except RuntimeError:  # shapes that differ between the parts: go the ragged way
                pass
    return td_of(concat([columns_of(part) for part in parts]))


@dataclass(slots=True)
class Chunk:
    """Whole trajectories that arrived together.

    Attributes:
        td: `[n]` steps in any form. On the LLM path every trajectory is one step.
        bounds: `k + 1` step offsets of the `k` trajectories.
        groups: the identity of each trajectory's group.
        reward: the reward column of `td`, by step.
        returns: float64 `[k]`.
        lengths: int64 `[k]`, completion tokens (or steps) of each trajectory.
        stored: whether it came back from disk, where only the columns of the store are.
    """

    td: TensorDictBase
    bounds: list[int]
    groups: list[Hashable]
    reward: Flat
    returns: Tensor
    lengths: Tensor
    stored: bool = False

    def rows(self, trajectories: Sequence[int]) -> Tensor:
        """Step indices of some trajectories, int64."""
        b = self.bounds
        if len(b) == self.td.shape[0] + 1:
            return torch.tensor(trajectories, dtype=torch.int64)
        return torch.tensor([s for i in trajectories for s in range(b[i], b[i + 1])], dtype=torch.int64)

    def take(self, trajectories: Sequence[int]) -> Chunk:
        """Only some trajectories; keeps none of the others alive."""
        if list(trajectories) == list(range(len(self.groups))):
            return self
        rows = self.rows(trajectories)
        bounds = [0]
        for i in trajectories:
            bounds.append(bounds[-1] + self.bounds[i + 1] - self.bounds[i])
        index = torch.tensor(trajectories, dtype=torch.int64)
        return Chunk(
            select(self.td, rows),
            bounds,
            [self.groups[i] for i in trajectories],
            self.reward.select(rows),
            self.returns[index],
            self.lengths[index],
            self.stored,
        )


def gather(trajectories: Iterable[tuple[Chunk, int]]) -> Chunk:
    """One chunk of the given trajectories (chunk, and number in it), in the given order."""
    parts: dict[int, tuple[int, Chunk, list[int]]] = {}
    places: list[tuple[int, int]] = []
    for chunk, index in trajectories:
        part, _, taken = parts.setdefault(id(chunk), (len(parts), chunk, []))
        places.append((part, len(taken)))
        taken.append(index)
    chosen = [(chunk, taken) for _, chunk, taken in parts.values()]
    if len(chosen) == 1:
        return chosen[0][0].take(chosen[0][1])
    first = torch.tensor([0, *(len(taken) for _, taken in chosen)]).cumsum(0).tolist()
    return _joined(chosen).take([first[part] + place for part, place in places])


def _joined(parts: Sequence[tuple[Chunk, list[int]]]) -> Chunk:
    """Some trajectories of several chunks, one chunk after the other.

    Jagged leaves are taken apart and put together once; a nested tensor per part would cost more than all the rest.
    """
    rows = [chunk.rows(taken) for chunk, taken in parts]
    bounds, groups = [0], []
    for chunk, taken in parts:
        for i in taken:
            bounds.append(bounds[-1] + chunk.bounds[i + 1] - chunk.bounds[i])
            groups.append(chunk.groups[i])
    if any(_has_jagged(chunk.td) for chunk, _ in parts) or any(chunk.stored for chunk, _ in parts):
        columns = _alike([chunk for chunk, _ in parts])
        td = td_of(
            concat(
                [
                    found if _is_whole(chunk, taken) else found.select(index)
                    for found, index, (chunk, taken) in zip(columns, rows, parts, strict=True)
                ]
            )
        )
    else:
        td = join([select(chunk.td, index) for (chunk, _), index in zip(parts, rows, strict=True)])
    rewards = [
        chunk.reward if _is_whole(chunk, taken) else chunk.reward.select(index)
        for (chunk, taken), index in zip(parts, rows, strict=True)
    ]
    members = [torch.tensor(taken, dtype=torch.int64) for _, taken in parts]
    return Chunk(
        td,
        bounds,
        groups,
        concat_flat(rewards, [index.numel() for index in rows]),
        torch.cat([chunk.returns[index] for (chunk, _), index in zip(parts, members, strict=True)]),
        torch.cat([chunk.lengths[index] for (chunk, _), index in zip(parts, members, strict=True)]),
    )


def _is_whole(chunk: Chunk, taken: Sequence[int]) -> bool:
    return len(taken) == len(chunk.groups) and list(taken) == list(range(len(taken)))


def _has_jagged(td: TensorDictBase) -> bool:
    return not is_stack(td) and any(is_jagged(leaf) for leaf in td.values(True, True))


def _alike(chunks: Sequence[Chunk]) -> list[Trajectories]:
    """Their columns; beside trajectories from disk, others leave out what is not on disk either."""
    columns = [columns_of(chunk.td) for chunk in chunks]
    kept = next((set(found) for found, chunk in zip(columns, chunks, strict=True) if chunk.stored), None)
    if kept is None:
        return columns
    return [Trajectories(found.n, {key: found[key] for key in found if key in kept}) for found in columns]


def group_ids(column: Flat | Text, first: Sequence[int], key: Key) -> list[Hashable]:
    """Hashable identities of the groups of the trajectories whose first steps are `first`.

    Raises:
        DataError: if an identity is neither a string, nor a number, nor a tensor.
    """
    if isinstance(column, Text):
        items: list[Any] = column.plain()
        out: list[Hashable] = []
        for i in first:
            item = items[i]
            if isinstance(item, (list, tuple)):
                item = tuple(item)
            elif not isinstance(item, (str, int)):
                raise DataError(
                    f"the group identity under {key!r} is a {type(item).__name__}; it must be a string, a number "
                    "or a tensor"
                )
            out.append(item)
        return out
    if column.lengths is None:
        values = column.values[torch.tensor(first)] if len(first) != column.values.shape[0] else column.values
        if values.numel() == values.shape[0]:
            return values.reshape(-1).tolist()
        return [tuple(row) for row in values.reshape(values.shape[0], -1).tolist()]
    rows = column.values.split(column.lengths.tolist())
    return [tuple(rows[i].reshape(-1).tolist()) if rows[i].numel() != 1 else rows[i].item() for i in first]
