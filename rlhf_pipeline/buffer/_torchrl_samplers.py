"""Replacements for TorchRL samplers that do not work on a store.

`torchrl.data.replay_buffers.samplers.StalenessAwareSampler` 0.14 divides by zero when data are one version newer than
the learner, and draws with negative weights beyond that. `ConsumingSampler` accepts only TorchRL's list and tensor
storages, frees slots for overwriting, and loses its counts when the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_pipeline.buffer._strategy import Ints, StoreView, TrajectorySampler, UniformSampler, gumbel_order
from rlhf_pipeline.buffer.trajectory_schema import USES
from rlhf_pipeline.errors import DataError, DefinitionError
from trajectory_store import TrajectoryStore
from trajectory_store.locks import locked

LOCK = "claims.lock"
"""The lock file in the store's folder; it is empty, and may be deleted while no process reads the store."""


def claiming(store: TrajectoryStore) -> AbstractContextManager[None]:
    """Lock out all other processes, and other threads, that claim rows of the store.

    The kernel releases the lock when its holder dies. A store outside a local folder has no lock, and only one process
    may claim its rows. On a network file system, `flock` must work across machines, as for writers.
    """
    folder = Path(str(store.path))
    return locked(folder / LOCK) if folder.is_dir() else nullcontext()


@dataclass(kw_only=True, eq=False, repr=False)
class StalenessAwareSampler(TrajectorySampler):
    """Draws newer trajectories more often and stale trajectories never; the names are TorchRL's.

    Probabilities follow `staleness_weight_fn(consumer_version - policy_version)`; no row is drawn twice in a batch.
    Trajectories newer than the learner have staleness 0.

    Args:
        max_staleness: largest staleness in versions; None or -1 sets no limit.
        staleness_weight_fn: maps staleness, int64 `[n]`, to weights `[n]`, at least 0; `1 / (staleness + 1)` by
            default.
        max_uses: uses after which a trajectory is spent.
        seed: of the TorchRL interface.

    Raises:
        DefinitionError: if a limit is out of range.

    >>> sampler = StalenessAwareSampler(max_staleness=4)
    >>> sampler.consumer_version = 3
    >>> sampler.increment_consumer_version()
    >>> sampler.consumer_version
    4
    """

    max_staleness: int | None = field(default=None, kw_only=False)
    staleness_weight_fn: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, kw_only=False)

    def __post_init__(self) -> None:
        self.max_staleness = None if self.max_staleness == -1 else self.max_staleness
        super().__post_init__()
        self.version = 0

    @property
    def consumer_version(self) -> int:
        """The learner's version."""
        return self.version or 0

    @consumer_version.setter
    def consumer_version(self, version: int) -> None:
        self.version = int(version)

    def increment_consumer_version(self) -> None:
        """Record that the learner has made a new version."""
        self.version = self.consumer_version + 1

    def _choose(self, view: StoreView, allowed: Ints, most: int, rng: np.random.Generator) -> Ints:
        age = view.age[allowed].astype(np.int64)
        if self.staleness_weight_fn is None:
            weights = 1.0 / (age + 1.0)
        else:
            weights = torch.as_tensor(self.staleness_weight_fn(torch.from_numpy(age))).double().numpy()
        if weights.shape != age.shape or not bool((weights >= 0).all()):
            raise DataError(
                f"staleness_weight_fn must return a weight of at least 0 for each of the {len(age)} rows; it returned "
                f"{weights[:4]}"
            )
        allowed, weights = allowed[weights > 0], weights[weights > 0]
        return allowed[gumbel_order(np.log(weights), rng)[:most]]

    def info(self, view: StoreView, chosen: Ints) -> dict[str, Any]:
        """Return the staleness of each drawn row, float32 `[n]`, as TorchRL's sampler does."""
        return {"staleness": torch.from_numpy(view.age[chosen].astype(np.float32))}


@dataclass(kw_only=True, eq=False, repr=False)
class ConsumingSampler(UniformSampler):
    """Draws each trajectory at most `max_sample_count` times: the store counts every draw as a use.

    The count is the column `use_count`, which the first draw adds, so it outlives the process, and consumed rows stay
    on disk. `ran_out` is True
    when nothing is left, which also ends an iteration over the buffer. Any number of processes may consume one store in
    a local folder: each draws under a lock, from all rows that are written and not used up, and the count is raised
    before the rows are returned. If a process dies in between, its last batch is lost.

    Args:
        max_sample_count: how often a trajectory may be drawn.
        max_staleness: largest age in versions.
        seed: of the TorchRL interface.

    Raises:
        DefinitionError: if a limit is out of range.

    >>> ConsumingSampler(max_sample_count=2)
    ConsumingSampler(max_staleness=None, max_uses=2)
    """

    max_sample_count: int = field(default=1, kw_only=False)
    max_uses: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.max_uses = self.max_sample_count
        super().__post_init__()
        self._ran_out = False
        self._lock = threading.Lock()

    @property
    def ran_out(self) -> bool:
        """Whether the last draw took the remaining rows."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = value

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw slots of a `TrajectoryStorage` and count the use before they are returned.

        Raises:
            DataError: if nothing is left.
        """
        # Prefetching threads and other processes take turns.
        with self._lock, claiming(storage.store):
            storage.refresh()
            try:
                index, info = super().sample(storage, batch_size)
            except DataError:
                self._ran_out = True
                raise
            ids = storage.row_ids(index)
            storage.store.add_columns([USES])
            storage.update(ids, **{USES.name: storage.store.read_scalars(USES.name, ids) + 1})
            self._remaining_batches = -(-self._sampleable_count(storage, batch_size) // batch_size)
            self._ran_out = self._remaining_batches == 0
        return index, info

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        del batch_size
        ids = storage.row_ids()
        return len(self.eligible(StoreView(storage.store, ids[ids >= 0], version=self.version)))

    def extend(self, index: Any) -> None:
        """Record that there are new rows to draw."""
        del index
        self._ran_out = False

    add = extend

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the counts are in the store."""
        super().load_state_dict(state_dict)
        self._ran_out = False

    def _empty(self) -> None:
        super()._empty()
        self._ran_out = False

    def __getstate__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {**super().__getstate__(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()


def check_consuming(sampler: Any) -> None:
    """Reject TorchRL's own consuming sampler, with the alternative."""
    kind = type(sampler)
    if kind.__name__ == "ConsumingSampler" and not isinstance(sampler, TrajectorySampler):
        raise DefinitionError(
            "TorchRL's ConsumingSampler works only on lists and tensors; pass rlhf_pipeline.buffer.samplers."
            f"ConsumingSampler(max_sample_count={sampler.max_sample_count}), which records in the "
            "store how often each row was used."
        )
