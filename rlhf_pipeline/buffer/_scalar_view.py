"""The result of `storage[:]`: values per trajectory, and TorchRL's in-place writes, which reach the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlhf_pipeline.buffer.batches import scalar_batch
from rlhf_pipeline.data.keys import KL_PENALTY, LOG_PROBS, REWARD, ROW_ID, TOKENS, Key, column_name
from rlhf_pipeline.data.padding import pad_rows
from rlhf_pipeline.data.tensordicts import unchecked
from rlhf_pipeline.errors import DataError, MissingKeyError


class ScalarView(TensorDict):
    """The values of a storage that exist once per trajectory, `[n]`.

    `set_`, `set_at_` and `update_` write to the store, so TorchRL's `rb.set_("priority", ...)` works. A clone, a
    selection or a slice of a view is a separate TensorDict without a connection to the store.
    """

    _home: tuple[Any, np.ndarray] | None = None

    @classmethod
    def of(cls, storage: Any, rows: np.ndarray) -> Self:
        """Read rows of a storage.

        Args:
            storage: a `TrajectoryStorage`.
            rows: int64 `[n]`, the row ids.
        """
        plain = scalar_batch(storage.store, rows, text=storage.text)
        out = unchecked(dict(plain.items()), plain.batch_size, kind=cls)
        out._home = (storage, np.array(rows, dtype=np.int64))
        return out

    def get(self, key: Any, *args: Any, as_list: bool = False, as_padded_tensor: bool = False, **kwargs: Any) -> Any:
        """Return a value per trajectory, or a ragged value per token, which is read on demand."""
        rows = self._per_token(_flat(key))
        if rows is None:
            name = _flat(key)
            if self._home is not None and isinstance(name, tuple) and name[0] == "next" and len(name) == 2:
                rest = super().get(name[1], None) if name not in self.keys(True) else None
                if rest is not None:
                    return rest
            return super().get(key, *args, **kwargs)
        if as_list:
            return rows
        if as_padded_tensor:
            side = kwargs.get("padding_side", "right")
            return pad_rows(rows, pad_value=kwargs.get("padding_value", 0), side=side, dtype=rows[0].dtype)[0]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def __getitem__(self, index: Any) -> Any:
        is_key = isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(part, str) for part in index))
        if is_key and self._home is not None and index not in self.keys(True):
            leaf = self.get(index, None)
            if leaf is not None:
                return leaf
        return super().__getitem__(index)

    def _per_token(self, key: Key) -> list[torch.Tensor] | None:
        """Return the rows of a per-token value, or None if the key has no such value."""
        if self._home is None or not len(self):
            return None
        storage, ids = self._home
        whole = _RAGGED.get(key, key)
        column = storage.store.schema.find(column_name(whole))
        if whole not in _DERIVED and (column is None or not column.ragged):
            return None
        ragged_rows = storage.read(row_ids=ids, keys=[whole]).get(whole, None)
        if ragged_rows is None:
            return None
        lengths = storage.store.lengths(column_name(TOKENS) if column is None else column.name, ids)
        rows = [row[:n] for row, n in zip(ragged_rows, lengths.tolist(), strict=True)]
        if key == whole:
            return rows
        starts = [int(n) for n in storage.store.read_scalars("num_prompt_tokens", ids)]
        prompt = key[-1] == "prompt"
        return [row[:n] if prompt else row[n:] for row, n in zip(rows, starts, strict=True)]

    def set_(self, key: Any, item: Any, **kwargs: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set the value of every trajectory, here and in the store."""
        if self._home is not None:
            self._write({key: item})
        return super().set_(key, item, **kwargs)

    def set_at_(self, key: Any, value: Any, index: Any, **kwargs: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set the value of some trajectories, here and in the store."""
        if self._home is not None:
            self._write({key: value}, index)
        return super().set_at_(key, value, index, **kwargs)

    def update_(self, input_dict_or_td: Any, *args: Any, **kwargs: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set several values of every trajectory, here and in the store."""
        if self._home is not None:
            keys_to_update = kwargs.get("keys_to_update")
            self._write(dict(_leaves(input_dict_or_td)), keys=keys_to_update)
        home, self._home = self._home, None  # TensorDict may call `set_`
        try:
            super().update_(input_dict_or_td, *args, **kwargs)
        finally:
            self._home = home
        return self

    def _write(self, values: Mapping[Any, Any], index: Any = slice(None), keys: Iterable[Any] | None = None) -> None:
        assert self._home is not None
        storage, rows = self._home
        index = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else index
        rows = np.atleast_1d(rows[index])
        columns: dict[str, Any] = {}
        for key, value in values.items():
            if keys is None or key in keys:
                name = self._column(storage, key)
                columns[name] = _one_each(key, value, len(rows))
        storage.update(rows, **columns)

    def _column(self, storage: Any, key: Key) -> str:
        key = _flat(key)
        name = column_name(key)
        schema = storage.store.schema
        if key == ROW_ID or name not in schema:
            columns = sorted(c.name for c in schema if not c.ragged)
            raise MissingKeyError(
                f"{key!r} is not a column of the store at {storage.store.path}, so it cannot be set. Columns with one "
                f"value per trajectory: {', '.join(columns)}."
            )
        if schema[name].ragged and schema[name].mutable:  # one that is not is rejected by the store
            raise DataError(
                f"{key!r} has one value per token, so set it with storage.update(row_ids, {name}=[...]), passing one "
                "array per trajectory."
            )
        return name

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_home"}


_DERIVED: tuple[Key, ...] = (REWARD, KL_PENALTY)
_RAGGED: dict[Key, Key] = {
    ("tokens", "prompt"): TOKENS,
    ("tokens", "response"): TOKENS,
    ("log_probs", "prompt"): LOG_PROBS,
    ("log_probs", "response"): LOG_PROBS,
}
"""Keys of the prompt and response parts of a value, and the key of the complete value."""


def _flat(key: Any) -> Any:
    return key[0] if isinstance(key, tuple) and len(key) == 1 else key


def _leaves(data: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(data, TensorDictBase):
        return data.items(include_nested=True, leaves_only=True)
    leaves: list[tuple[Any, Any]] = []
    for key, value in data.items():
        if isinstance(value, (Mapping, TensorDictBase)):
            leaves += [((key, *(k if isinstance(k, tuple) else (k,))), v) for k, v in _leaves(value)]
        else:
            leaves.append((key, value))
    return leaves


def _one_each(key: Any, value: Any, n: int) -> np.ndarray:
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.size not in (1, n):
        raise DataError(f"{key!r} has {array.size} values for {n} trajectories.")
    return np.broadcast_to(array.reshape(-1), n).copy()
