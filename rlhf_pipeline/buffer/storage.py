"""`TrajectoryStorage`: a trajectory store behind TorchRL's storage interface."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase
from torchrl.data.replay_buffers.storages import Storage

from rlhf_pipeline.buffer._dumps import copy_rows, dump_store, find_dump
from rlhf_pipeline.buffer._scalar_view import ScalarView
from rlhf_pipeline.buffer._slot_map import UNBOUNDED, SlotMap
from rlhf_pipeline.buffer.batches import padded_batch, padded_columns, single
from rlhf_pipeline.buffer.checked_rows import check_rows
from rlhf_pipeline.buffer.trajectory_schema import (
    FAILED_MEMBERS,
    NEWEST_VERSION,
    POLICY_DIGEST,
    PROVENANCE,
    SLOT,
    WAITING,
    column_of_key,
    extra_columns,
    trajectory_schema,
)
from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    ATTENTION_MASK,
    CREATED_AT,
    KL_COEF,
    KL_PENALTY,
    LOSS_WEIGHT,
    NUM_PROMPT_TOKENS,
    RETURN,
    REWARD,
    REWARD_COLUMN,
    ROW_ID,
    TASK_REWARD,
    TOKENS,
    Key,
    column_name,
)
from rlhf_pipeline.data.tensordicts import trajectories_of
from rlhf_pipeline.data.trajectories import (
    Flat,
    Text,
    Trajectories,
    as_ragged,
    last_position,
    one_advantage,
    segment_sum,
)
from rlhf_pipeline.errors import (
    DataError,
    DefinitionError,
    MissingKeyError,
    MissingPathError,
    RunMismatchError,
    did_you_mean,
)
from rlhf_pipeline.transforms.base import outcomes
from rlhf_pipeline.transforms.waiting_rows import RowUpdate
from trajectory_store import (
    BufferPool,
    Column,
    MissingRowError,
    RaggedArray,
    Schema,
    StoreExistsError,
    StoreNotFoundError,
    TrajectoryStore,
)
from trajectory_store.reads import StoreReads
from trajectory_store.recorder.standard import LEFT_OUT

Index = int | slice | Sequence[int] | np.ndarray | torch.Tensor | range | tuple[Any, ...]


class TrajectoryCheckpointer(StorageCheckpointerBase):
    """Copies the rows of a store into a folder, atomically."""

    def dumps(self, storage: TrajectoryStorage, path: str | Path) -> None:
        """Write a copy of the store under `path`."""
        dump_store(storage.store, storage.rows_to_copy(), Path(path), first_slot=storage.first_slot)

    def loads(self, storage: TrajectoryStorage, path: str | Path) -> None:
        """Load the rows of a dump into an empty storage."""
        folder, first_slot = find_dump(Path(path))
        storage.import_rows(folder, first_slot=first_slot)


class TrajectoryStorage(Storage):
    """Trajectories on disk: ragged, durable, append-only, one row each.

    `set` appends one atomic commit, durable on return; nothing is overwritten: writing a slot again makes it refer to a
    newer row. `get` of several indices returns a padded TensorDict with masks (`rlhf_pipeline.buffer.batches`); of one
    index, that trajectory without padding; of a slice, only the values that exist once per trajectory, so that
    samplers may scan whole storages. Reopening a path shows all rows again. Several processes may write: each
    opens the path itself, and `refresh()` shows the rows of the others.

    It also works in TorchRL's own `ReplayBuffer`. In a `torch.utils.data.DataLoader`, which reads the storage as a
    map-style dataset, pass `collate_fn=collated`, because the batches are already collated. A copy of the storage in
    another process reopens the store, with this process's slots, but without the buffers attached to it.

    Args:
        path_or_store: folder or URL of the store (created if it does not exist), or an open `TrajectoryStore`.
        max_size: keep at most this many trajectories; the oldest are evicted first. None keeps all.
        backend: `memmap` or `zarr`; only for a new store.
        durability: `process` survives kill -9, `power` and `group` a power loss as well.
        schema: columns of a new store; `trajectory_schema()` by default.
        extra: further keys to keep, each with its dtype: `{"step_count": "int64", ("next", "score"): "float32"}`; or
            columns, see `trajectory_schema`. An existing store gains the columns that it lacks.
        mode: `r` opens an existing store for reading only.
        text: also read the text columns into batches (they cost more than all numbers together).
        pad_to_multiple_of: round padded lengths up.

    Raises:
        DefinitionError: if the arguments contradict each other or an existing store.
        StoreError: if the store cannot be opened or created.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict, lazy_stack
    >>> folder = tempfile.TemporaryDirectory()
    >>> storage = TrajectoryStorage(folder.name + "/store")
    >>> row = lambda n: TensorDict({"tokens": {"full": torch.arange(n)}, "num_prompt_tokens": torch.tensor(1)})
    >>> storage.set(torch.tensor([0, 1]), lazy_stack([row(2), row(3)]))
    >>> storage.get([1, 0])["tokens", "full"]
    tensor([[0, 1, 2],
            [0, 1, 0]])
    >>> len(TrajectoryStorage(folder.name + "/store", mode="r"))
    2
    >>> storage.close(); folder.cleanup()
    """

    _default_checkpointer = TrajectoryCheckpointer  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        path_or_store: str | Path | TrajectoryStore,
        *,
        max_size: int | None = None,
        backend: Literal["memmap", "zarr"] = "memmap",
        durability: Literal["process", "power", "group"] = "process",
        schema: Schema | None = None,
        extra: Mapping[Key, str] | Iterable[Column] = (),
        mode: Literal["a", "r"] = "a",
        text: bool = False,
        pad_to_multiple_of: int = 1,
    ) -> None:
        if max_size is not None and max_size < 1:
            raise DefinitionError(f"max_size is {max_size}; it must be at least 1, or None for no limit.")
        super().__init__(UNBOUNDED if max_size is None else int(max_size), compilable=True)  # see TrajectoryWriter
        if isinstance(path_or_store, TrajectoryStore):
            self.store = path_or_store
        else:
            path = path_or_store if "://" in str(path_or_store) else Path(path_or_store)
            self.store = _open(path, max_size, backend, durability, schema, extra_columns(extra), mode)
        _check_columns(self.store, [*(schema or ()), *extra_columns(extra)])
        if self.store.max_trajectories is not None:
            self.max_size = min(self.max_size, self.store.max_trajectories)
        self.text = text
        self.pad_to_multiple_of = pad_to_multiple_of
        self.device = torch.device("cpu")
        self._pool = BufferPool()
        self.appended = np.empty(0, np.int64)
        """int64: the ids of the rows of the newest append."""
        self._checked = 0
        self._slots, self._lock = SlotMap(self.max_size), threading.RLock()
        self._slots.sync(self.store)

    # -- TorchRL's interface -----------------------------------------------------------------------------------

    def attach(self, buffer: Any) -> None:
        """Register a buffer that reads from here; a buffer without a `collate_fn` gets uncollated batches."""
        super().attach(buffer)
        if getattr(buffer, "_init_collate_fn", collated) is None:  # TorchRL has defaults for its own storages only
            buffer._init_collate_fn = collated

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Append trajectories in one atomic commit; they are durable when this returns.

        Args:
            cursor: the slots, one per trajectory.
            data: trajectories in any of the forms of the write path, or a list of them.
            set_cursor: remember the last slot for TorchRL.

        Raises:
            DataError: if the data are not complete trajectories, or do not fit the cursor or the schema.
            StoreError: if the store could not write them; then none of them is stored.
        """
        if isinstance(data, (list, tuple)):
            data = lazy_stack(list(data))
        n, rows = append_data(data, self.store.schema)
        with self._lock:
            slots = self._cursor_slots(cursor)
            if len(slots) != n:
                raise DataError(
                    f"the numbers of trajectories ({n}) and slots ({len(slots)}) differ; pass one trajectory per slot"
                )
            if n:
                self._append(rows, slots, in_turn=np.array_equal(slots, self._slots.expected(n)))
                if set_cursor:
                    self._set_last_cursor(int(slots[-1]))

    def extend(self, data: TensorDictBase | Trajectories) -> np.ndarray:
        """Append trajectories to the next slots and return these, int64 `[n]`; see `set`."""
        n, rows = append_data(data, self.store.schema)
        waiting = rows.get(WAITING.name)
        with self._lock:
            slots = self._slots.expected(n if waiting is None else int(np.count_nonzero(np.asarray(waiting) < 0)))
            if n and self._append(rows, slots, in_turn=True) and len(slots):
                slots = self._slots.of(self.appended[: len(slots)])
            if len(slots):
                self._set_last_cursor(int(slots[-1]))
        return slots

    def update_waiting(self, later: RowUpdate) -> np.ndarray:
        """Write the new values of rows that waited.

        Returns:
            The slots of the rows that are complete now, int64.
        """
        try:
            return self._update_waiting(later)
        except MissingRowError:  # a ring has dropped some of them
            stored = self.store.holds(later.rows)
            columns = {
                name: [value for value, keep in zip(values, stored, strict=True) if keep]
                if isinstance(values, list)
                else values[stored]
                for name, values in later.columns.items()
            }
            return self._update_waiting(later._replace(rows=later.rows[stored], columns=columns))

    def _update_waiting(self, later: RowUpdate) -> np.ndarray:
        rows, columns = later.rows, dict(later.columns)
        if not len(rows):
            return np.empty(0, np.int64)
        with self._lock:  # a refresh in between would see the update and give the rows slots as well
            if later.complete:
                columns[WAITING.name] = -3 - self._slots.turn - np.arange(len(rows))
            self.update(rows, **columns)
            if later.complete:
                slots = self._slots.complete(rows)
                return self._slots.of(rows) if self._slots.drop_evicted(self.store) else slots
            if WAITING.name in columns:
                self._slots.leave_out(rows)
        return np.empty(0, np.int64)

    @property
    def waits(self) -> np.ndarray:
        """int64: the ids of the rows that wait for the rest of their group."""
        return self._slots.waits

    def ready(self, row_ids: np.ndarray, then: StoreReads | None = None) -> np.ndarray | None:
        """Return which rows neither wait for nor were excluded from their group, bool `[n]`; None if all may be drawn.

        Args:
            row_ids: int64 `[n]`.
            then: the store as of a snapshot; None is the current state.
        """
        if then is not None:
            waiting = then.read_scalars(WAITING.name, row_ids) if WAITING.name in then.schema else np.full(1, -1)
            return np.broadcast_to((waiting == -1) | (waiting < LEFT_OUT), row_ids.shape)
        with self._lock:  # rows that another thread appends wait as soon as they can be seen
            aside = self._slots.aside
        return ~np.isin(row_ids, aside) if len(aside) else None

    def _append(self, rows: dict[str, Any], slots: np.ndarray, *, in_turn: bool) -> bool:
        """Append rows; return whether slots other than the given ones have changed."""
        if not in_turn:
            if SLOT not in self.store.schema:
                raise DataError(
                    f"the store at {self.store.path} has no column '{SLOT}', so rows can only be appended in order "
                    f"(the next slot is {self._slots.next_slot}, but the requested slots are {slots[:4].tolist()})"
                )
            rows[SLOT] = slots
        self.appended = np.asarray(self.store.append(rows))
        if self._slots.push(self.store, self.appended, slots, in_turn):
            moved = self._slots.drop_evicted(self.store)
        else:
            self._slots.sync(self.store)
            moved = True
        self._bump_mutation_revision()
        return moved

    def get(self, index: Any) -> Any:
        """Read trajectories.

        Args:
            index: an int reads one trajectory without padding; a slice reads the values that exist once per trajectory;
                anything else reads a padded batch.

        Raises:
            IndexError: if a slot was never written.
        """
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        if isinstance(index, slice):
            return ScalarView.of(self, self._slots.rows[index])
        if _is_one(index):
            return single(self.store, int(self.row_ids([int(index)])[0]))
        return self.read(index)

    def read(
        self,
        index: Index | None = None,
        *,
        row_ids: Any = None,
        keys: Sequence[Key] | None = None,
        text: bool | None = None,
        then: StoreReads | None = None,
    ) -> TensorDict:
        """Read a batch.

        Args:
            index: slots; or
            row_ids: ids of the store.
            keys: TensorDict keys or column names; None reads all numbers.
            text: whether to read text; None takes the storage's setting.
            then: the store as of a snapshot (`store.as_of(snapshot)`); None is the current state.

        Returns:
            A TensorDict `[B]`, see `rlhf_pipeline.buffer.batches.padded_batch`.

        Raises:
            IndexError: if a slot was never written.
            StoreError: if a row id is not in the store.
        """
        ids = self.row_ids(index) if row_ids is None else np.asarray(row_ids, dtype=np.int64).reshape(-1)
        text = self.text if text is None else text
        store = self.store if then is None else then
        return padded_batch(
            store, ids, keys=keys, text=text, pad_to_multiple_of=self.pad_to_multiple_of, pool=self._pool
        )

    def columns(self, row_ids: np.ndarray, keys: Sequence[Key]) -> dict[Key, Any]:
        """Return the padded tensors of rows by key, as `read` puts them into a TensorDict."""
        return padded_columns(
            self.store, row_ids, keys=keys, pad_to_multiple_of=self.pad_to_multiple_of, pool=self._pool
        )

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        """Return a whole batch, for `torch.utils.data.DataLoader(storage, batch_size=, collate_fn=collated)`."""
        return self.read(indices)

    def read_text(self, column: str, row_ids: Any) -> list[str]:
        """Return one text column of the given rows."""
        return self.store.read(np.asarray(row_ids, dtype=np.int64), [column])[column]

    def update(self, row_ids: Any, **values: Any) -> None:
        """Set new values of columns for the given rows; other processes see them at their next refresh.

        Args:
            row_ids: the rows.
            **values: by column name: one value per row, one for all, or ragged values as in `TrajectoryStore.update`.
        """
        arrays = {k: v.detach().cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        self.store.update(np.asarray(row_ids, dtype=np.int64).reshape(-1), **arrays)
        self._bump_mutation_revision()

    def set_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of the trajectories in slots `index`, one number each or one for all.

        Raises:
            DataError: a priority is negative or not finite, or their number differs from the number of slots.
        """
        self.prioritize(self.row_ids(index), priority)

    def prioritize(self, ids: np.ndarray, priority: Any) -> None:
        """Set the priorities of rows by their ids, as `set_priority` does by slot."""
        values = torch.as_tensor(priority, dtype=torch.float32).detach().cpu().reshape(-1)
        if values.numel() not in (1, len(ids)):
            raise DataError(
                f"the numbers of priorities ({values.numel()}) and rows ({len(ids)}) differ; pass one per row, or one "
                "for all"
            )
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise DataError(f"priorities must be finite and at least 0; got {values[:8].tolist()}")
        self.update(ids, priority=values.expand(len(ids)))

    def row_ids(self, index: Any = None) -> np.ndarray:
        """Return the row ids of the given slots, int64 `[B]`; of all slots when None.

        If a slot is beyond the last one, the storage is refreshed once, so that the workers of a data loader follow a
        growing storage.

        Raises:
            IndexError: if a slot was never written.
        """
        if index is None:
            with self._lock:
                return self._slots.rows.copy()
        index = _plain(index)
        try:
            with self._lock:
                row_ids = self._slots.rows[index].reshape(-1)
        except IndexError:
            self.refresh()  # the process that chose the indices may have seen newer rows
            rows = self._slots.rows
            try:
                row_ids = rows[index].reshape(-1)
            except IndexError as error:
                raise IndexError(
                    f"index out of range: the storage at {self.store.path} has {len(rows)} trajectories ({error})"
                ) from None
        if row_ids.size and int(row_ids.min()) < 0:
            raise IndexError(f"no row was ever written to {int((row_ids < 0).sum())} of the requested slots")
        return row_ids

    def mapped_rows(self) -> np.ndarray:
        """Return the row ids of all slots, from the oldest on: in a full ring, the slot that is written next."""
        rows = self._slots.rows
        rows = rows if len(rows) < self.max_size else np.roll(rows, -self.next_slot)
        return rows[rows >= 0]

    @property
    def first_slot(self) -> int:
        """The slot of the first of `rows_to_copy`: in a full ring the one that is written next, else 0."""
        return self.next_slot if len(self._slots) == self.max_size and not len(self._slots.waits) else 0

    def rows_to_copy(self) -> np.ndarray:
        """Return the row ids to copy: the rows of the slots, then the rows that wait for their group."""
        return np.concatenate([self.mapped_rows(), self._slots.waits])

    def _cursor_slots(self, cursor: Any) -> np.ndarray:
        """Return the slots that a write names, int64 `[n]`."""
        cursor = _plain(cursor)
        if isinstance(cursor, slice):
            return np.arange(*cursor.indices(len(self)), dtype=np.int64)
        if cursor.dtype == np.bool_:
            return np.flatnonzero(cursor)
        slots = cursor.astype(np.int64, copy=False).reshape(-1)
        if slots.size and int(slots.min()) < 0:
            slots = np.where(slots < 0, slots + len(self), slots)
        if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < self.max_size:
            raise IndexError(f"slots {slots[:4].tolist()} are out of range: max_size is {self.max_size}")
        return slots

    def __len__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return len(self._slots)

    @property
    def next_slot(self) -> int:
        """The slot of the next trajectory."""
        return self._slots.next_slot

    @property
    def floor(self) -> int:
        """The watermark at which the storage was emptied; rows before it stay on disk but are no longer drawn."""
        return self._slots.floor

    def contains(self, item: Any) -> Any:
        """Return whether slots contain a trajectory: a bool for one slot, a bool tensor for several."""
        index = np.atleast_1d(np.asarray(item.cpu() if isinstance(item, torch.Tensor) else item))
        inside = (index >= -len(self)) & (index < len(self))
        return bool(inside[0]) if _is_one(item) else torch.from_numpy(inside)

    def _empty(self) -> None:
        self._slots.clear()
        self._bump_mutation_revision()

    # -- the store ---------------------------------------------------------------------------------------------

    def refresh(self) -> int:
        """Show rows written by other processes; return the watermark."""
        with self._lock:
            mark = self.store.refresh()
            before = len(self._slots), self._slots.next_slot
            self._slots.sync(self.store)
            if before != (len(self._slots), self._slots.next_slot):
                self._bump_mutation_revision()
        return mark

    def check_new(self, since: int = 0) -> None:
        """Compare the rows that have arrived since the last call with their checksums.

        Args:
            since: rows up to this watermark are not checked: they are too old to be chosen.

        Raises:
            CorruptionError: names the rows and the segment.
        """
        store, since = self.store, max(since, self._checked)
        before = store.watermark
        if before > since:
            every = store.ids()
            check_rows(store, every[max(len(every) - (store.watermark - since), 0) :])
            self._checked = before

    def flush(self) -> None:
        """Wait until all rows are on disk."""
        self.store.flush()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the location and number of the rows; the rows themselves are already on disk."""
        return {
            "path": self._address,
            "watermark": self.store.watermark,
            "rows": torch.from_numpy(self.rows_to_copy()),
            "first_slot": self.first_slot,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Return to a saved state.

        For the same path only the number of rows is checked; another, empty storage gets a copy of the rows.

        Raises:
            RunMismatchError: if the store has fewer rows than the state.
            MissingPathError: if the store in the state no longer exists.
        """
        source = str(state_dict["path"])
        if source == self._address:
            mark = self.refresh()
            if mark < state_dict["watermark"]:
                raise RunMismatchError(
                    f"the store at {source} has {mark} trajectories, but had "
                    f"{state_dict['watermark']} when the checkpoint was saved; restore the folder, or start a new run"
                )
            return
        self.import_rows(source, np.asarray(state_dict["rows"]), first_slot=int(state_dict.get("first_slot", 0)))

    def import_rows(self, path: str | Path, ids: np.ndarray | None = None, *, first_slot: int = 0) -> None:
        """Copy the rows of another store to the end of this one, which must be empty.

        Args:
            path: folder or URL of the other store.
            ids: which rows, in order; all when None.
            first_slot: the slot of the first row in the other ring; a ring of the same size keeps all positions.

        Raises:
            RunMismatchError: if this storage is not empty.
            MissingPathError: if there is no store at `path`.
        """
        if len(self):
            raise RunMismatchError(
                f"the storage at {self.store.path} contains {len(self)} trajectories; load the state into an "
                "empty storage"
            )
        try:
            source = TrajectoryStore.open(path, mode="r")
        except StoreNotFoundError as error:
            raise MissingPathError(
                f"there is no store at {path}, the path that is recorded in the saved state"
            ) from error
        with source:
            ids = source.ids() if ids is None else ids
            copy_rows(source, self.store, ids, first_slot=first_slot if len(ids) == self.max_size else 0)
        self._slots.sync(self.store)
        self._bump_mutation_revision()

    @property
    def _address(self) -> str:
        """The store's URL, or its absolute folder."""
        path = self.store.path
        return str(path.absolute() if isinstance(path, Path) else path)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_pool"], state["_lock"]
        state["_attached_entities_list"] = []  # a buffer attaches itself again; a data loader needs none
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pool, self._lock = BufferPool(), threading.RLock()
        self._slots.sync(self.store)

    def __repr__(self) -> str:
        size = "None" if self.max_size == UNBOUNDED else self.max_size
        return f"TrajectoryStorage({str(self.store.path)!r}, len={len(self)}, max_size={size})"


def collated(batch: Any) -> Any:
    """Return the batch unchanged: the `collate_fn` for TorchRL buffers and PyTorch loaders over a `TrajectoryStorage`.

    >>> collated([1, 2])
    [1, 2]
    """
    return batch


def _plain(index: Any) -> Any:
    """Return an index for numpy: a slice or an array."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if index is Ellipsis or isinstance(index, slice):
        return slice(None) if index is Ellipsis else index
    if isinstance(index, torch.Tensor):
        return index.detach().cpu().numpy()
    array = np.asarray(index)
    return array if array.size else array.astype(np.int64)


def _is_one(index: Any) -> bool:
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return index.ndim == 0
    return isinstance(index, (int, np.integer)) and not isinstance(index, bool)


def _open(
    path: str | Path,
    max_size: int | None,
    backend: Any,
    durability: Any,
    schema: Schema | None,
    extra: list[Column],
    mode: Any,
) -> TrajectoryStore:
    try:
        if mode == "r":
            return TrajectoryStore.open(path, mode=mode)
        # Stores made before these columns existed gain them.
        gained = [WAITING, FAILED_MEMBERS, NEWEST_VERSION, POLICY_DIGEST, *extra]
        return TrajectoryStore.open(path, mode=mode, durability=durability, add_columns=gained)
    except StoreNotFoundError:
        if mode == "r":
            raise
    schema = schema or trajectory_schema()
    more = (column for column in (WAITING, FAILED_MEMBERS, *extra) if column.name not in schema)
    schema = Schema([*schema, *more])
    try:
        return TrajectoryStore.create(path, schema, backend=backend, durability=durability, max_trajectories=max_size)
    except StoreExistsError:
        if not isinstance(path, str):
            raise
        return TrajectoryStore.open(path, mode=mode, durability=durability, add_columns=extra)  # another process did


def _check_columns(store: TrajectoryStore, columns: Iterable[Column]) -> None:
    if "input_ids" not in store.schema:
        raise DefinitionError(
            f"the store at {store.path} has no column 'input_ids'; its columns are {store.schema.names}"
        )
    missing = [c.name for c in columns if c.name not in store.schema]
    if missing:
        raise DefinitionError(
            f"the store at {store.path} already exists but lacks these columns: {', '.join(missing)}. Choose another "
            "folder."
        )


_log = logging.getLogger("rlhf_pipeline")
_DERIVED: frozenset[Key] = frozenset(
    {REWARD, KL_PENALTY, ATTENTION_MASK, ROW_ID, LOSS_WEIGHT, "index", "_weight", ("next", "terminated")}
    | {("next", "truncated"), "done", "terminated", "truncated", ("masks", "all_attention_mask")}
    | {("tokens", "prompt"), ("tokens", "response"), ("log_probs", "prompt"), ("log_probs", "response")}
)
"""Keys that a batch may have but that are not stored: they are derived on read or belong to TorchRL."""


def append_data(data: Any, schema: Schema) -> tuple[int, dict[str, Any]]:
    """Return the arguments of `TrajectoryStore.append` for a batch."""
    if not isinstance(data, (TensorDictBase, Trajectories)):
        raise DataError(f"a trajectory storage accepts only TensorDicts; got {type(data).__name__}")
    columns = trajectories_of(data) if isinstance(data, TensorDictBase) else data
    if not columns.n:
        return 0, {}
    tokens = columns.get(TOKENS)
    if not isinstance(tokens, Flat) or tokens.lengths is None:
        raise MissingKeyError(
            f"the batch has no token ids under {TOKENS!r}. A trajectory is stored as its token ids. Keys of the "
            f"batch: {list(columns)[:12]}"
        )
    if not tokens.lengths.numpy().all():
        raise DataError(f"trajectory {int(tokens.lengths.argmin())} of {columns.n} has no tokens; remove it.")
    _check_per_token(columns, tokens.lengths)
    _derive(columns, tokens, schema)
    out: dict[str, Any] = {}
    plan, alike = column_of_key(schema), Alike()
    for key, value in columns.items():
        column = plan.get(key)
        if column is not None:
            out[column.name] = stored_array(column, key, value, columns.n, alike)
        elif key not in _DERIVED:
            _report_unknown(key, value, schema)
    if CREATED_AT not in columns and "created_at" in schema:
        out["created_at"] = np.full(columns.n, time.time())
    return columns.n, out


def _check_per_token(columns: Trajectories, lengths: torch.Tensor) -> None:
    """Check lengths and positions that the store cannot check, because no column holds them unchanged."""
    for key in (ADVANTAGE, REWARD, KL_PENALTY):
        value = columns.get(key)
        column_lengths = value.lengths if isinstance(value, Flat) else None
        if (
            column_lengths is None
            or column_lengths is lengths
            or torch.equal(column_lengths, lengths)
            or bool((column_lengths == 1).all())
        ):
            continue
        row = int((column_lengths != lengths).nonzero()[0])
        raise DataError(
            f"{key!r} of trajectory {row} has {int(column_lengths[row])} values for {int(lengths[row])} tokens; it "
            "must have one value, or one per token"
        )
    prompt = columns.get(NUM_PROMPT_TOKENS)
    if isinstance(prompt, Flat) and prompt.values.numel() == columns.n:
        count = prompt.values.detach().reshape(-1).numpy()  # of few values, NumPy needs a third of torch's time
        outside = (count < 0) | (count > lengths.numpy())
        if outside.any():
            row = int(outside.argmax())
            raise DataError(
                f"{NUM_PROMPT_TOKENS!r} of trajectory {row} is {count[row]}; it must be between 0 and "
                f"{int(lengths[row])}, the number of tokens in the trajectory"
            )


def _derive(columns: Trajectories, tokens: Flat, schema: Schema) -> None:
    """Fill in columns that follow from the others."""
    mask, prompt = columns.get(ASSISTANT_MASK), columns.get(NUM_PROMPT_TOKENS)
    lengths = tokens.lengths
    assert lengths is not None  # append_data checked it
    if mask is None and isinstance(prompt, Flat):
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        position = torch.arange(int(lengths.sum())) - starts
        mask = Flat(position >= torch.repeat_interleave(prompt.values.reshape(-1), lengths), lengths)
        columns[ASSISTANT_MASK] = mask
    if prompt is None and isinstance(mask, Flat) and mask.lengths is not None:
        flat = torch.arange(mask.values.numel(), dtype=torch.float64)
        flat = torch.where(mask.values.to(torch.bool), flat, float(mask.values.numel()))
        first = torch.segment_reduce(flat, "min", lengths=mask.lengths).to(torch.int64)
        columns[NUM_PROMPT_TOKENS] = Flat((first - (lengths.cumsum(0) - lengths)).clamp_max(lengths))
    advantage = columns.get(ADVANTAGE)
    if isinstance(advantage, Flat) and "advantage" in schema and not schema["advantage"].ragged:
        values = advantage.values
        if advantage.lengths is not None:
            keep = torch.ones_like(values.reshape(-1), dtype=torch.bool)
            if isinstance(mask, Flat) and mask.lengths is not None and torch.equal(mask.lengths, advantage.lengths):
                keep = mask.values.to(torch.bool)
            columns[ADVANTAGE] = Flat(one_advantage(values.detach().reshape(-1), keep, advantage.lengths))
        elif values.ndim > 1 and values.numel():
            columns[ADVANTAGE] = Flat(values.reshape(columns.n, -1)[:, 0])
    _derive_reward(columns, schema)


def _derive_reward(columns: Trajectories, schema: Schema) -> None:
    """Reduce rewards to what the store keeps: their sum before the penalty, read back at the last token."""
    reward, task = columns.get(REWARD), columns.get(TASK_REWARD)
    if not isinstance(reward, Flat) or (REWARD_COLUMN in schema and task is not None):
        return
    values, n = reward.values.detach().double().reshape(-1), columns.n
    per_token = reward.lengths is not None and int(reward.lengths.max()) > 1
    lengths = reward.lengths if reward.lengths is not None and per_token else torch.ones(n, dtype=torch.int64)
    kl, coef = columns.get(KL_PENALTY), columns.get(KL_COEF)
    eps = torch.finfo(reward.values.dtype).eps if reward.values.is_floating_point() else 0.0
    rounding = 1e-5 + 4 * eps * values.abs()
    if per_token and isinstance(kl, Flat) and isinstance(coef, Flat):
        penalty = torch.repeat_interleave(coef.values.double(), lengths) * kl.values.double().reshape(-1)
        values, rounding = values + penalty, rounding + 4 * eps * penalty.abs()
    total = segment_sum(values, lengths)
    if REWARD_COLUMN not in schema and per_token:
        mask = columns.get(ASSISTANT_MASK)
        keep = mask.values.to(torch.bool) if isinstance(mask, Flat) else torch.ones_like(values, dtype=torch.bool)
        elsewhere = values.abs() > rounding
        elsewhere[last_position(keep, lengths)] = False
        if bool(elsewhere.any()):
            raise DataError(
                "the batch has rewards on tokens other than the last, but the store has no column for them: create "
                "the store with schema=trajectory_schema(token_rewards=True)"
            )
    if isinstance(task, Flat):
        stored_reward = outcomes(columns, task.values)
        differs = (total - stored_reward).abs() > segment_sum(rounding, lengths) + 4 * eps * stored_reward.abs()
        differs |= total.isnan() != stored_reward.isnan()
        if bool(differs.any()):
            row = int(differs.nonzero()[0])
            raise DataError(
                f"{TASK_REWARD!r} of trajectory {row} is {stored_reward[row].item():g}, but the rewards under "
                f"{REWARD!r} sum to {total[row].item():g} without the KL penalty; the store would record the first "
                "and return the second. Omit one, or store rewards per token: "
                "schema=trajectory_schema(token_rewards=True)"
            )
        return
    columns[TASK_REWARD] = Flat(total.float())
    if per_token and RETURN not in columns:
        columns[RETURN] = Flat(segment_sum(reward.values, lengths).float())


Alike = dict[int, tuple[torch.Tensor, RaggedArray]]
"""Ragged columns by the id of their lengths. It keeps the lengths alive, so no other object gets the same id."""


def stored_array(column: Column, key: Key, value: Flat | Text, n: int, alike: Alike) -> Any:
    """Return the argument of `append` for one column."""
    if isinstance(value, Text):
        plain = value.plain()
        if not column.is_text:
            return np.asarray(plain)
        if set(map(type, plain)) == {str}:
            return plain
        odd = next((item for item in plain if item is None or isinstance(item, (bytes, bytearray))), "")
        if odd != "":
            raise DataError(f"{key!r} contains {odd!r}, but the column '{column.name}' contains text; pass a str")
        return list(map(str, plain))
    if column.is_text:
        raise DataError(f"{key!r} is a tensor, but the column '{column.name}' contains text")
    if column.ragged and value.values.ndim >= 2:  # all rows of the batch have one length
        value = as_ragged(value, n)
    values = value.values
    if values.requires_grad or values.is_cuda:
        values = values.detach().cpu()
    if values.ndim != 1 and not column.shape:
        values = values.reshape(-1)
    array = (values.float() if values.dtype is torch.bfloat16 else values).numpy()
    if array.dtype.kind == "f" and array.dtype != column.np_dtype and column.np_dtype.kind == "f":
        with np.errstate(over="ignore"):
            stored = array.astype(column.np_dtype)
        if stored.itemsize < array.itemsize and bool((np.isinf(stored) & np.isfinite(array)).any()):
            large = array[np.isinf(stored) & np.isfinite(array)][0]
            raise DataError(
                f"{key!r} contains {large}, which is too large for the column '{column.name}' ({column.dtype})"
            )
        array = stored
    if not column.ragged:
        if len(array) != n:
            raise DataError(
                f"{key!r} has length {len(array)}; the column '{column.name}' needs one value per trajectory, {n} in "
                "total"
            )
        return array
    if value.lengths is None:
        raise DataError(f"{key!r} must have one value per token; got shape {tuple(value.values.shape)}")
    like = alike.get(id(value.lengths))
    if like is not None:
        return like[1].beside(array)
    ragged = RaggedArray(array, value.lengths.numpy())
    alike[id(value.lengths)] = value.lengths, ragged
    return ragged


_reported: set[Key] = set()


def _report_unknown(key: Key, value: Flat | Text, schema: Schema) -> None:
    """Log, once per key, that it has no column and is not stored."""
    if key not in _reported:
        _reported.add(key)
        hint = did_you_mean(str(key), schema.names)
        per_token = isinstance(value, Flat) and (value.lengths is not None or value.values.ndim > 1)
        kind = "str" if isinstance(value, Text) else str(value.values.dtype).removeprefix("torch.")
        column = f"[Column({column_name(key)!r}, {kind!r}, ragged=True)]" if per_token else f"{{{key!r}: {kind!r}}}"
        if any(column.name == key for column in PROVENANCE):
            column = "rlhf_pipeline.buffer.trajectory_schema.PROVENANCE"
        _log.warning(
            "not stored, because the schema has no column for it: %r.%s To keep it: TrajectoryStorage(path, extra=%s).",
            key,
            hint if hint.startswith(" Did") else "",
            column,
        )
