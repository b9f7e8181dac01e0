"""`TrajectoryReplayBuffer`: the write path in front of a store, and reproducible samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import ReplayBuffer, RoundRobinWriter, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler
from torchrl.data.replay_buffers.writers import TensorDictMaxValueWriter, Writer
from torchrl.envs.transforms import Compose, Transform

from rlhf_pipeline.buffer._torchrl_samplers import check_consuming
from rlhf_pipeline.buffer.samplers import Ints, StoreView, TrajectorySampler, as_sampler
from rlhf_pipeline.buffer.storage import TrajectoryStorage, collated
from rlhf_pipeline.data.keys import ROW_ID, TRAJECTORY_ID, WAITING, Key
from rlhf_pipeline.data.tensordicts import along_one_dimension, on_device, stack_of, steps_of
from rlhf_pipeline.data.trajectories import Trajectories, merge_steps
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError
from rlhf_pipeline.transforms.base import ColumnTransform
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
from rlhf_pipeline.transforms.waiting_rows import WaitingRows
from trajectory_store import MissingRowError, Snapshot, TrajectoryStore


class TrajectoryWriter(RoundRobinWriter):
    """TorchRL's round-robin writer with the storage's cursor, which is also correct after reopening."""

    def __init__(self, *, track_generations: bool = False) -> None:
        # Plain numbers: a semaphore brings a tracker process, which reports a leak when this process is killed.
        super().__init__(compilable=True, track_generations=track_generations)

    @RoundRobinWriter._cursor.getter
    def _cursor(self) -> int:
        """The slot of the next trajectory."""
        return self._storage.next_slot if isinstance(self._storage, TrajectoryStorage) else super()._cursor

    def extend(self, data: Any) -> torch.Tensor:
        """Write trajectories in one commit and return their slots."""
        if not isinstance(self._storage, TrajectoryStorage):
            return super().extend(data)
        index = torch.from_numpy(self._storage.extend(data))
        self.count(index, data)
        return index

    def count(self, index: torch.Tensor, data: Any = None) -> None:
        """Count the slots of rows that may be drawn now: written just now, with their data, or earlier."""
        self._write_count += len(index)
        if data is not None:
            self._bump_generation(index, data)
        self._mark_update_entities(index)


class TrajectoryReplayBuffer(TensorDictReplayBuffer):
    """A replay buffer of trajectories on disk.

    `extend` runs the inverse transforms, last in the list first, and commits the result in one commit; `sample` returns
    padded batches; `sample_step` returns the batch of an optimizer step as a pure function of the stored rows, the seed
    and the step.

    Args:
        storage: a `TrajectoryStorage`, or a path or store to make one from.
        batch_size: of `sample()`.
        transform: the write path, `Compose(MCAdvantage(...), KLRewardTransform(...), RetrieveLogProb(...))`.
        sampler: of `sample()`: a TorchRL sampler, or a strategy of `rlhf_pipeline.buffer.samplers` or its name. None
            draws uniformly with replacement, like TorchRL.
        seed: of all draws.
        writer: a TorchRL `Writer`, or a function that makes one. None appends, as this storage is designed for.
        device: where `sample`, `sample_step` and `read` put batches; batches reach a CUDA device through pinned memory
            in one asynchronous copy. None leaves them on the CPU.
        **kwargs: passed to TorchRL's `TensorDictReplayBuffer` (`prefetch`, `pin_memory`, ...).

    Raises:
        DefinitionError: if the storage is of another kind.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict, lazy_stack
    >>> folder = tempfile.TemporaryDirectory()
    >>> rb = TrajectoryReplayBuffer(storage=folder.name + "/store", transform=MCAdvantage(2), batch_size=2)
    >>> def row(reward):
    ...     tokens, mask = torch.tensor([5, 6, 7]), torch.tensor([False, True, True])
    ...     return TensorDict({
    ...         "tokens": {"full": tokens}, "masks": {"all_assistant_mask": mask},
    ...         "group_id": torch.tensor(0), "task_reward": torch.tensor(reward),
    ...     })
    >>> rb.add(row(0.0)).numel(), len(rb)  # waits for its group
    (0, 0)
    >>> rb.add(row(1.0)).tolist()
    [0, 1]
    >>> rb.sample_step(0, strategy="fresh")["advantage"]
    tensor([[ 0.0000, -0.7071, -0.7071],
            [ 0.0000,  0.7071,  0.7071]])
    >>> rb.storage.close(); folder.cleanup()
    """

    def __init__(
        self,
        *,
        storage: TrajectoryStorage | TrajectoryStore | str | Path,
        batch_size: int | None = None,
        transform: Transform | None = None,
        sampler: Sampler | str | None = None,
        seed: int = 0,
        writer: Writer | Callable[[], Writer] | None = None,
        device: str | torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(storage, (str, Path, TrajectoryStore)):
            storage = TrajectoryStorage(storage)
        if not isinstance(storage, TrajectoryStorage):
            raise DefinitionError(
                f"the storage is of type {type(storage).__name__}; pass a TrajectoryStorage or a path."
            )
        self.trajectories: TrajectoryStorage = storage
        """The storage, with its specific type."""
        self.store: TrajectoryStore = storage.store
        """The store underneath."""
        self.seed = int(seed)
        self._to_device = collated if device is None else partial(on_device, device=torch.device(device))
        if sampler is None:
            sampler = RandomSampler()
        elif isinstance(sampler, str):
            sampler = as_sampler(sampler, seed=self.seed)
        check_consuming(sampler)
        writer = _writer(writer, storage)
        super().__init__(
            storage=storage,
            sampler=sampler,
            batch_size=batch_size,
            transform=transform,
            **{
                "writer": writer,
                "collate_fn": self._to_device,
                "generator": torch.Generator().manual_seed(self.seed),
                **kwargs,
            },
        )
        if self.initialized:
            self._keep_groups()

    # -- parts -------------------------------------------------------------------------------------------------

    def set_storage(self, storage: Any, collate_fn: Callable[..., Any] | None = None) -> Any:
        """Set another storage of trajectories, and return the one before; batches go to the same device."""
        self.trajectories, self.store = storage, storage.store
        return super().set_storage(storage, collate_fn or self._to_device)

    def _transforms(self) -> list[Transform]:
        transform: Any = self.transform
        return list(transform) if isinstance(transform, Compose) else [transform]

    def _advantage(self) -> MCAdvantage | None:
        for transform in self._transforms():
            if isinstance(transform, MCAdvantage):
                return transform
        return None

    def _group_transform(self) -> MCAdvantage:
        advantage = self._advantage()
        if advantage is None:
            raise DefinitionError("the write path has no MCAdvantage, so there are no waiting groups.")
        return advantage

    @property
    def batch_groups(self) -> int | None:
        """The number of groups that the write path writes together, as one batch; None if each is written alone."""
        advantage = self._advantage()
        return None if advantage is None else advantage.settings.batch_groups

    def append_transform(self, transform: Transform, *, invert: bool = False) -> TrajectoryReplayBuffer:
        """Add a transform to the write path, which runs from the last transform to the first.

        Args:
            transform: is added at the end, but before a transform that turns incoming turns into trajectories.
            invert: as in TorchRL; True has no effect on a transform of this package, which already has an inverse.

        Returns:
            The buffer.
        """
        if not getattr(transform, "on_write_path", False):
            super().append_transform(transform, invert=invert)
            return self
        last = self._transforms()[-1:] or [None]
        if getattr(last[0], "takes_steps", False):
            self.insert_transform(len(self._transforms()) - 1, transform)
        else:
            super().append_transform(transform)
        self._keep_groups()
        return self

    # -- writing -----------------------------------------------------------------------------------------------

    def extend(
        self,
        tensordicts: TensorDictBase | Trajectories,
        *,
        update_priority: bool | None = None,
        write: bool = True,
    ) -> torch.Tensor:
        """Run the write path and commit complete groups in one atomic commit.

        Args:
            tensordicts: complete trajectories, in any of the forms of the write path, or flat columns.
            update_priority: ignored; a `priority` key is stored with the row.
            write: False runs the write path without writing, to update its state: for complete groups that the store
                already has, or that the write path once dropped.

        Returns:
            The slots written, int64 `[n]`; empty with shape `[0, 1]` if every group is still waiting.

        Raises:
            DataError: if a trajectory is not complete, or does not fit the schema.
            StoreError: if the store could not write the rows; then none of them is stored.
        """
        del update_priority
        if not isinstance(tensordicts, (TensorDictBase, Trajectories)):
            raise DataError(f"extend needs a TensorDict of trajectories; got {type(tensordicts).__name__}")
        advantage = self._keep_groups()
        if tensordicts.n == 0 if isinstance(tensordicts, Trajectories) else 0 in tensordicts.batch_size:
            return self._write(None) if advantage is None else self.close_overdue()
        with nullcontext() if advantage is None else advantage.call():
            rows = self._through(tensordicts, self._transforms())
            return self._complete_stored(advantage, self._write(rows)) if write else self._write(None)

    def extend_raw(self, tensordicts: TensorDictBase | None) -> torch.Tensor:
        """Commit trajectories unchanged, bypassing the write path."""
        return self._write(tensordicts)

    def add(self, data: TensorDictBase) -> int | torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write one trajectory; if it completes a group, every trajectory of the group gets its own row.

        Args:
            data: a trajectory with an empty batch size, or the steps of one.

        Returns:
            The slot, or the slots of the completed group, or an empty tensor if the trajectory waits.
        """
        index = self.extend(data)
        return int(index) if index.numel() == 1 else index

    def _through(self, td: TensorDictBase | Trajectories, transforms: Sequence[Transform]) -> Any:
        """Run the write path; returns flat columns, or TensorDicts after a transform of another library."""
        data: Any = td
        for transform in reversed(transforms):
            if isinstance(transform, (ColumnTransform, MCAdvantage)):
                if not isinstance(data, Trajectories):
                    if isinstance(transform, ColumnTransform):
                        data = transform.prepared(along_one_dimension(data))
                    data = self._columns(data, transforms)
                data = transform.write(data)
            else:
                data = transform.inv(stack_of(data) if isinstance(data, Trajectories) else data)
            if data is None:
                return None
        return data

    def _columns(self, td: TensorDictBase, transforms: Sequence[Transform]) -> Trajectories:
        """Flatten trajectories: several steps become one row, unless a transform needs the steps' rewards."""
        columns = steps_of(td)
        return columns if any(_needs_steps(t) for t in transforms) else merge_steps(columns)

    def _write(self, data: TensorDictBase | Trajectories | None) -> torch.Tensor:
        """Commit rows and return the slots of those that need not wait."""
        self.trajectories.appended = np.empty(0, np.int64)
        if data is None or (data.n == 0 if isinstance(data, Trajectories) else 0 in data.batch_size):
            return torch.zeros((0, 1), dtype=torch.int64)
        rows = merge_steps(data if isinstance(data, Trajectories) else steps_of(data))
        if not isinstance(self.writer, TrajectoryWriter):
            return ReplayBuffer._extend(self, cast(Any, stack_of(rows)))
        with self._replay_lock, self._write_lock:
            slots = torch.from_numpy(self.trajectories.extend(rows))
            self._drawable(slots, rows)
        return slots if len(slots) else slots[:, None]

    def _drawable(self, slots: torch.Tensor, rows: Trajectories | None = None) -> None:
        """Notify writer and sampler of slots whose rows may be drawn now."""
        if len(slots):
            writer: Any = self.writer
            writer.count(slots, rows)
            self._sampler.extend(slots)

    def _complete_stored(self, advantage: MCAdvantage | None, written: torch.Tensor) -> torch.Tensor:
        """Complete the groups whose last members were just written; return all slots that may be drawn now."""
        if advantage is None or advantage.rows is None:
            return written
        storage, slot_parts = self.trajectories, [written] if written.numel() else []
        for later in advantage.stored_updates(storage.appended):
            with self._replay_lock, self._write_lock:
                slots = torch.from_numpy(storage.update_waiting(later))
                self._drawable(slots)
                slot_parts += [slots] if len(slots) else []
        return torch.cat(slot_parts) if slot_parts else written

    def report_failed(self, group: Hashable, count: int = 1) -> torch.Tensor:
        """Report that trajectories of a group will never arrive, and write the group if that completes it.

        Returns:
            The slots written.
        """
        return self._close(lambda advantage: advantage.report_failed(group, count))

    def close_groups(self, min_size: int = 1) -> torch.Tensor:
        """Close the waiting groups that have at least `min_size` trajectories, and write them.

        Returns:
            The slots written.
        """
        return self._close(lambda advantage: advantage.close(min_size=min_size))

    def close_overdue(self) -> torch.Tensor:
        """Close the overdue groups that have enough members, as every `extend` does.

        Returns:
            The slots written.
        """
        return self._close(lambda advantage: advantage.close_overdue())

    def _close(self, how: Callable[[MCAdvantage], TensorDictBase | None]) -> torch.Tensor:
        """Write the groups that the group transform closes."""
        transforms, advantage = self._transforms(), self._group_transform()
        self._keep_groups()
        with advantage.call():
            done = how(advantage)
            before = transforms[: transforms.index(advantage)]
            written = self._write(None if done is None else self._through(done, before))
            return self._complete_stored(advantage, written)

    def waiting(self, key: Key = TRAJECTORY_ID) -> list[Any]:
        """Return one value of each trajectory that waits for its group.

        Raises:
            DefinitionError: if the write path has no `MCAdvantage`.
        """
        self.close_overdue()  # complete groups do not wait
        return self._group_transform().waiting_values(key)

    def _keep_groups(self) -> MCAdvantage | None:
        """Make incomplete groups wait in the store, if it can hold them; return the group transform."""
        advantage = self._advantage()
        if advantage is None:
            return None
        storage, store = self.trajectories, self.store
        writes = isinstance(self.writer, TrajectoryWriter) and store.mode == "a" and WAITING in store.schema
        if writes and (advantage.rows is None or advantage.rows.store is not store):
            advantage.attach(WaitingRows(store, lambda: storage.waits, storage.refresh))
        return advantage

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of trajectories, which are a column of the store, whatever the sampler.

        Args:
            index: slots, as `sample` returns them under `index`.
            priority: one number each, or one for all.
        """
        self.trajectories.set_priority(index, priority)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set priorities from a sampled batch's `priority_key` (`td_error`), the largest value of each trajectory.

        Trajectories that have left the store are skipped, even if another trajectory has their slot.

        Raises:
            MissingKeyError: the batch has no such key, or no `row_id`.
        """
        value, rows = data.get(self.priority_key, None), data.get(ROW_ID, None)
        if value is None or rows is None:
            key = ROW_ID if rows is None else self.priority_key
            advice = "Pass a batch that the buffer returned." if rows is None else "Set it before the call."
            raise MissingKeyError(f"the batch has no {key!r}. {advice}")
        ids = rows.reshape(-1).cpu().numpy()
        priority = value.detach().cpu().reshape(len(ids), -1).amax(1)
        try:
            self.trajectories.prioritize(ids, priority)
        except MissingRowError:  # a ring has evicted some of them
            is_stored = self.store.holds(ids)
            self.trajectories.prioritize(ids[is_stored], priority[torch.from_numpy(is_stored)])

    def refresh(self) -> int:
        """Show rows written by other processes; return the watermark."""
        return self.trajectories.refresh()

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write trajectories to slots; with a key, set a value of every trajectory, see `set_`."""
        if isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(part, str) for part in index)):
            self.set_(index, value)
            return
        super().__setitem__(index, value)

    # -- reading -----------------------------------------------------------------------------------------------

    def view(
        self,
        *,
        version: int | None = None,
        at: Snapshot | int | None = None,
        start: int = 0,
        uses: Any = None,
    ) -> StoreView:
        """Return the rows that a step may choose from, in the order of arrival.

        Args:
            version: the learner's version.
            at: a snapshot, which fixes rows and values; or a watermark, which fixes the rows (if one process writes),
                with their current values; None is the current state.
            start: exclude rows that arrived before this watermark.
            uses: row ids that count as used, once for each time they are named (a ledger); None reads what
                `ConsumingSampler` counted in this store.

        Raises:
            DataError: if the store has not reached the watermark, or rows have left it since.
        """
        store, values = self.store, self.store
        if isinstance(at, Snapshot):
            watermark, ids, values = at.watermark, store.ids(at), store.as_of(at)
            if watermark > store.watermark:
                self.refresh()
                ids = store.ids(at)
        else:
            watermark = store.watermark if at is None else int(at)
            if watermark > store.watermark:
                self.refresh()
            ids = store.ids()
            ids = ids[: max(len(ids) - (store.watermark - watermark), 0)] if watermark <= store.watermark else ids
        if watermark > store.watermark:
            raise DataError(
                f"the store at {store.path} has {store.watermark} trajectories, but the step needs {watermark}. "
                "Wait for the collector, or check the path of the store."
            )
        start = max(start, self.trajectories.floor)
        expected = min(max(watermark - start, 0), self.trajectories.max_size)
        if at is not None and len(ids) < expected:
            raise DataError(
                f"the store at {store.path} no longer contains {expected - len(ids)} of the {expected} trajectories of "
                "this step, so the batch cannot be drawn again; raise max_size to keep more."
            )
        ids = np.asarray(ids[max(len(ids) - expected, 0) :])
        ready = self.trajectories.ready(ids, None if values is store else values)
        ids = ids if ready is None else ids[ready]
        return StoreView(values, ids, version=version, uses=None if uses is None else _count(ids, uses))

    def select_step(
        self,
        step: int,
        batch_size: int | None = None,
        *,
        strategy: str | TrajectorySampler | None = None,
        seed: int | None = None,
        **view: Any,
    ) -> Ints:
        """Return the row ids of an optimizer step, int64; see `sample_step`."""
        return self._drawn(self.view(**view), step, batch_size, strategy, seed)

    def _drawn(
        self,
        rows: StoreView,
        step: int,
        batch_size: int | None,
        strategy: str | TrajectorySampler | None,
        seed: int | None,
    ) -> Ints:
        chosen = strategy if strategy is not None else self.sampler
        sampler = as_sampler(chosen) if isinstance(chosen, (str, TrajectorySampler)) else as_sampler("uniform")
        size = self._batch_size if batch_size is None else batch_size
        return rows.ids[sampler.select(rows, size, seed=self.seed if seed is None else seed, step=step)]

    def sample_step(
        self,
        step: int,
        batch_size: int | None = None,
        *,
        strategy: str | TrajectorySampler | None = None,
        seed: int | None = None,
        keys: Sequence[Key] | None = None,
        text: bool | None = None,
        **view: Any,
    ) -> TensorDict:
        """Return the batch of an optimizer step: a pure function of the stored rows, the seed and the step.

        There is no cursor or other state, so the same call returns the same batch again, in any process, if
        `at` is the same snapshot. A watermark fixes only the rows: their values are current, and so is which rows wait
        for their group (pass the ledger as `uses`; otherwise what `ConsumingSampler` has counted in the
        store decides).

        Args:
            step: number of the step.
            batch_size: rows; fewer if fewer are allowed. None takes the buffer's, or all that are allowed.
            strategy: a sampler or its name; None takes the buffer's own strategy, or `uniform`.
            seed: None takes the buffer's.
            keys: what to read, see `TrajectoryStorage.read`.
            text: whether to read text.
            **view: `version`, `at`, `start`, `uses`, see `view`.

        Returns:
            A TensorDict `[B]` with `row_id`.

        Raises:
            DataError: if nothing may be drawn, or the store has not reached the watermark.
            SnapshotGoneError: if a merge removed values as of the snapshot.
        """
        rows = self.view(**view)
        ids = self._drawn(rows, step, batch_size, strategy, seed)
        if not len(ids):
            raise DataError(
                f"no trajectory in the store at {self.store.path} can be drawn for step {step} "
                f"({', '.join(f'{k}={v!r}' for k, v in view.items() if k != 'uses') or 'no limits given'}). Widen the "
                "limits of the strategy, or collect more."
            )
        return self._to_device(self.trajectories.read(row_ids=ids, keys=keys, text=text, then=rows.store))

    def read(
        self,
        row_ids: Any,
        *,
        keys: Sequence[Key] | None = None,
        text: bool | None = None,
    ) -> TensorDict:
        """Read a batch of the given rows, as listed in a ledger; see `TrajectoryStorage.read`."""
        return self._to_device(self.trajectories.read(row_ids=row_ids, keys=keys, text=text))

    # -- sharing -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Carry the generator's state as bytes: TorchRL's tensor is gone before a spawned process receives it."""
        state = super().__getstate__()
        rng = state.get("_rng")
        if rng is not None:
            state["_rng"] = None
            state["_rng_bytes"] = rng["rng_state"].numpy().tobytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator_state = state.pop("_rng_bytes", None)
        if generator_state is not None:
            bits = torch.frombuffer(bytearray(generator_state), dtype=torch.uint8)
            state["_rng"] = TensorDict({"rng_state": bits}, device=torch.device("cpu"))
        super().__setstate__(state)
        if self.initialized:
            self._storage.attach(self)


def _writer(choice: Any, storage: TrajectoryStorage) -> Writer:
    """Return the writer of a buffer."""
    if choice is None:
        return TrajectoryWriter()
    if isinstance(choice, str):
        raise DefinitionError(
            f"writer={choice!r} is a name, but writer= needs a TorchRL Writer. Processes that write to the same store "
            "need no names, because they share its waiting groups."
        )
    writer = choice if isinstance(choice, Writer) else choice()
    if not isinstance(writer, Writer):
        raise DefinitionError(
            f"writer returned an object of type {type(writer).__name__}, not a TorchRL Writer. Pass a Writer or a "
            "function that returns one, or omit writer=."
        )
    if isinstance(writer, TensorDictMaxValueWriter):
        raise DefinitionError(
            "TensorDictMaxValueWriter keeps the best rows by overwriting the others, but a trajectory store never "
            "overwrites rows. Keep all rows, and draw them by value: sampler='priority' with the column 'priority'."
        )
    if isinstance(writer, RoundRobinWriter):
        writer._cursor = storage.next_slot  # after the rows in the store
    return writer


def _needs_steps(transform: Transform) -> bool:
    return isinstance(transform, MCAdvantage) and transform.settings.reads_steps


def _count(ids: Ints, uses: Any) -> Ints:
    used_ids, times = np.unique(np.asarray(uses, dtype=np.int64).reshape(-1), return_counts=True)
    out = np.zeros(len(ids), np.int64)
    if len(used_ids):
        at = np.searchsorted(used_ids, ids).clip(max=len(used_ids) - 1)
        hit = used_ids[at] == ids
        out[hit] = times[at[hit]]
    return out
