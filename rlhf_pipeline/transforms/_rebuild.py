"""From flat columns back to TensorDicts, to longer batches and to checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.tensorclass import NonTensorStack
from torch import Tensor

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.keys import Key
from rlhf_pipeline.transforms._columns import Columns, Flat, Text, as_ragged


def jagged(flat: Flat, offsets: Tensor | None = None) -> Tensor:
    """A `torch.jagged` nested tensor over the values of a ragged column."""
    if flat.lengths is None:
        raise DataError("a column with one entry per trajectory has no jagged form")
    if offsets is None:
        offsets = torch.zeros(flat.lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(flat.lengths, 0, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(flat.values, offsets)


def text_stack(items: Sequence[Any]) -> Any:
    """A NonTensorStack of one object per row, wrapped or not."""
    stack: Any = NonTensorStack
    return stack(*items)


def td_of(columns: Columns) -> TensorDictBase:
    """A TensorDict of batch size `[n]` with jagged leaves, the fast form of the write path.

    Rows that differ in more than their first dimension cannot be jagged: those batches come back as a lazy stack.
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
        _plant(tree, key, leaf)
    return TensorDict(tree, batch_size=[columns.n])


def stack_of(columns: Columns) -> TensorDictBase:
    """A lazy stack `[n]`, one TensorDict per row."""
    trees: list[dict[str, Any]] = [{} for _ in range(columns.n)]
    for key, column in columns.items():
        for tree, leaf in zip(trees, column.items if isinstance(column, Text) else column.rows(), strict=True):
            _plant(tree, key, leaf)
    return lazy_stack([TensorDict(tree, batch_size=[]) for tree in trees])  # pyright: ignore[reportReturnType]


def _plant(tree: dict[str, Any], key: Key, leaf: Any) -> None:
    names = key if isinstance(key, tuple) else (key,)
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = leaf


def concat(parts: Sequence[Columns]) -> Columns:
    """Put several batches one after the other.

    Raises:
        DataError: if the parts do not hold the same keys.
    """
    if len(parts) == 1:
        return parts[0]
    out = Columns(sum(part.n for part in parts))
    keys = {key for part in parts for key in part}
    shared: dict[tuple[int, ...], Tensor] = {}
    for key in sorted(keys, key=str):
        missing = next((part for part in parts if key not in part), None)
        if missing is not None:
            raise DataError(f"{missing.n} of {out.n} trajectories lack the key {key!r} that others have")
        out[key] = _concat_one([part[key] for part in parts], [part.n for part in parts], key)
        _share_lengths(out[key], [part[key] for part in parts], shared)
    return out


def _share_lengths(whole: Flat | Text, parts: Sequence[Flat | Text], shared: dict[tuple[int, ...], Tensor]) -> None:
    """Columns whose parts share their lengths share them when put together, too."""
    if not isinstance(whole, Flat) or whole.lengths is None:
        return
    found = [part.lengths for part in parts if isinstance(part, Flat)]
    if all(lengths is not None for lengths in found):
        whole.lengths = shared.setdefault(tuple(map(id, found)), whole.lengths)


def _concat_one(columns: Sequence[Flat | Text], counts: Sequence[int], key: Key) -> Flat | Text:
    if all(isinstance(c, Text) for c in columns):
        return Text([item for c in columns if isinstance(c, Text) for item in c.items])
    flats = [c for c in columns if isinstance(c, Flat)]
    if len(flats) != len(columns):
        raise DataError(f"{key!r} is text in some trajectories and a tensor in others")
    return concat_flat(flats, counts)


def concat_flat(flats: Sequence[Flat], counts: Sequence[int]) -> Flat:
    """Put several columns of `counts` rows one after the other."""
    if all(c.lengths is None for c in flats) and len({c.values.shape[1:] for c in flats}) == 1:
        return Flat(torch.cat([c.values for c in flats]))
    ragged = [as_ragged(c, n) for c, n in zip(flats, counts, strict=True)]
    lengths = torch.cat([c.lengths for c in ragged if c.lengths is not None])
    if all(c.shapes is None for c in ragged) and len({c.values.shape[1:] for c in ragged}) == 1:
        return Flat(torch.cat([c.values for c in ragged]), lengths)
    rows = [row for c in flats for row in c.rows()]
    return Flat(
        torch.cat([row.reshape(-1) for row in rows]),
        torch.tensor([row.numel() for row in rows]),
        [row.shape for row in rows],
    )


def columns_state(columns: Columns) -> dict[str, Any]:
    """Plain tensors, lists and strings that `torch.load(weights_only=True)` reads back.

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


def columns_from_state(state: Mapping[str, Any]) -> Columns:
    """The inverse of `columns_state`."""
    out = Columns(int(state["n"]))
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
