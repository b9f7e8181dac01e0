"""What `storage[:]` gives: one value per trajectory, and TorchRL's in-place writes that reach the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlhf_pipeline.errors import DataError, MissingKeyError
from rlhf_pipeline.keys import COLUMN_OF_KEY, ROW_ID, Key
from rlhf_pipeline.replay._read import scalar_batch


class ScalarView(TensorDict):
    """The values of a storage that are one per trajectory, `[n]`.

    `set_`, `set_at_` and `update_` write to the store, so TorchRL's `rb.set_("priority", ...)` does what it says.
    Whatever is made of a view (a clone, a selection, a slice) is a TensorDict of its own, which nothing connects to the
    store.
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
        out = cls._new_unsafe(dict(plain.items()), batch_size=plain.batch_size)
        out._home = (storage, np.array(rows, dtype=np.int64))
        return out

    def set_(self, key: Any, item: Any, **kwargs: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set the value of every trajectory, here and in the store.

        Raises:
            MissingKeyError: there is no such value, or it is not one per trajectory.
        """
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
            wanted = kwargs.get("keys_to_update")
            self._write(dict(_leaves(input_dict_or_td)), keys=wanted)
        home, self._home = self._home, None  # TensorDict may come back through `set_`
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
                columns[self._column(storage, key)] = _one_each(key, value, len(rows))
        storage.update(rows, **columns)

    def _column(self, storage: Any, key: Key) -> str:
        key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
        name = COLUMN_OF_KEY.get(key, key if isinstance(key, str) else None)
        schema = storage.store.schema
        if key == ROW_ID or name is None or name not in schema:
            known = sorted(c.name for c in schema if not c.ragged)
            raise MissingKeyError(
                f"{key!r} is not a column of the store at {storage.store.path}, so it cannot be set. Columns with one "
                f"value per trajectory: {', '.join(known)}."
            )
        if schema[name].ragged:
            raise DataError(
                f"{key!r} has one value per token; give later values with storage.update(row_ids, {name}=[...]), one "
                "array per trajectory."
            )
        return name

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_home"}


def _leaves(data: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(data, TensorDictBase):
        return data.items(include_nested=True, leaves_only=True)
    found: list[tuple[Any, Any]] = []
    for key, value in data.items():
        if isinstance(value, (Mapping, TensorDictBase)):
            found += [((key, *(k if isinstance(k, tuple) else (k,))), v) for k, v in _leaves(value)]
        else:
            found.append((key, value))
    return found


def _one_each(key: Any, value: Any, n: int) -> np.ndarray:
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.size not in (1, n):
        raise DataError(f"{key!r} has {array.size} values for {n} trajectories.")
    return np.broadcast_to(array.reshape(-1), n).copy()
