"""The base of the sampling strategies.

A strategy is a pure function of a snapshot, a seed and a step: `strategy.select(snapshot, n, seed=, step=)`. It has no
cursor, so drawing a step again gives the same rows. Used as a TorchRL sampler, the number of draws takes the place of
the step.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrl.data.replay_buffers.samplers import Sampler

from rlhf_pipeline.buffer.trajectory_schema import USES
from rlhf_pipeline.errors import DataError, DefinitionError
from trajectory_store.reads import StoreReads

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass
class StoreView:
    """The rows that a strategy may choose from; scalars are read when first needed.

    Attributes:
        store: the source of the scalars, now or as of a snapshot.
        ids: int64 `[n]`, row ids in the order of arrival.
        version: the learner's version; None takes the newest policy version in the view.
        uses: how often each row has been used, `[n]`; None reads what `ConsumingSampler` counted in this store.
        newest: bool `[n]`, which rows are of the newest rollout; None if their age shows it, as in a single process.
    """

    store: StoreReads
    ids: Ints
    version: int | None = None
    uses: Ints | None = None
    newest: npt.NDArray[np.bool_] | None = None
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str) -> Any:
        """Return a scalar column of the rows, `[n]`."""
        if name not in self._cache:
            self._cache[name] = self.store.read_scalars(name, self.ids, checked=False)
        return self._cache[name]

    @property
    def use_count(self) -> Ints:
        """The number of times each row has been used, `[n]`."""
        if self.uses is not None:
            return self.uses
        return self.column(USES.name) if USES.name in self.store.schema else np.zeros(len(self), np.int64)

    @property
    def age(self) -> Ints:
        """Learner version minus policy version, at least 0, `[n]`."""
        versions = self.column("policy_version")
        newest = self.version if self.version is not None else int(versions.max(initial=0))
        return np.maximum(newest - versions, 0)


def gumbel_order(log_weights: Floats, rng: np.random.Generator) -> Ints:
    """Return a weighted random permutation; items of weight 0 are dropped."""
    order = np.argsort(-(log_weights + rng.gumbel(size=len(log_weights))), kind="stable")
    return order[np.isfinite(log_weights[order])]


def step_generator(seed: int, step: int) -> np.random.Generator:
    """Return the random generator of one step: counter-based, and the same on every machine.

    >>> bool(step_generator(1, 7).random() == step_generator(1, 7).random())
    True
    """
    return np.random.Generator(np.random.Philox(key=[index(seed) % (1 << 64), index(step) % (1 << 64)]))


@dataclass(kw_only=True, eq=False, repr=False)
class TrajectorySampler(Sampler):
    """Base of the strategies, and a TorchRL sampler over `TrajectoryStorage`.

    Rows of priority 0 are never drawn (`MCAdvantage(zero_variance="mark")` sets it).

    Args:
        max_staleness: skip trajectories whose policy is more than this many versions behind. Trajectories newer than
            the learner have age 0.
        max_uses: skip trajectories that have been used this many times.
        seed: of the TorchRL interface; `select` gets its own.

    Attributes:
        version: the learner's version in the TorchRL interface; None takes the newest in the storage.

    Raises:
        DefinitionError: if a limit is out of range.
    """

    max_staleness: int | None = None
    max_uses: int | None = None
    seed: int = 0
    version: int | None = field(default=None, init=False)
    _draws: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise DefinitionError(f"max_staleness is {self.max_staleness}; it must be at least 0.")
        if self.max_uses is not None and self.max_uses < 1:
            raise DefinitionError(f"max_uses is {self.max_uses}; it must be at least 1.")

    def eligible(self, view: StoreView) -> Ints:
        """Return the positions in the view that the limits allow, in the order of arrival."""
        keep = np.ones(len(view), bool)
        if "priority" in view.store.schema:
            keep &= view.column("priority") > 0
        if self.max_staleness is not None:
            keep &= view.age <= self.max_staleness
        if self.max_uses is not None:
            keep &= view.use_count < self.max_uses
        return np.flatnonzero(keep)

    def select(self, view: StoreView, batch_size: int | None, *, seed: int, step: int) -> Ints:
        """Choose rows.

        Args:
            view: the rows to choose from.
            batch_size: how many; fewer if fewer are allowed. None takes all that are allowed.
            seed: of the run.
            step: number of the optimizer step.

        Returns:
            Positions in the view, int64, each at most once.

        Raises:
            DefinitionError: the batch size is below 1.
        """
        if batch_size is not None and batch_size < 1:
            raise DefinitionError(f"batch_size is {batch_size}; it must be at least 1, or None.")
        allowed = self.eligible(view)
        if not len(allowed):
            return allowed
        most = len(allowed) if batch_size is None else batch_size
        return self._choose(view, allowed, most, step_generator(seed, step))

    @abc.abstractmethod
    def _choose(self, view: StoreView, allowed: Ints, most: int, rng: np.random.Generator) -> Ints:
        """Choose at most `most` of the allowed positions; there is at least one."""

    # -- TorchRL's interface -----------------------------------------------------------------------------------

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw slots of a `TrajectoryStorage`.

        Raises:
            DataError: if the limits leave nothing.
        """
        ids = storage.row_ids()
        slots = np.flatnonzero(ids >= 0)
        view = StoreView(storage.store, ids[slots], version=self.version)
        selected = self.select(view, batch_size, seed=self.seed, step=self._draws)
        self._draws += 1
        if not len(selected):
            raise DataError(
                f"none of the {len(view)} trajectories can be drawn: max_staleness={self.max_staleness}, "
                f"max_uses={self.max_uses}, version={self.version}. Collect more, or widen the limits."
            )
        return torch.from_numpy(slots[selected]), self.info(view, selected)

    def info(self, view: StoreView, chosen: Ints) -> dict[str, Any]:
        """Return extra entries for TorchRL's batch: importance weights under `_weight`, if there are any."""
        weights = self.weights(view, chosen)
        return {} if weights is None else {"_weight": torch.from_numpy(weights).float()}

    def weights(self, view: StoreView, chosen: Ints) -> Floats | None:
        """Return importance weights of the chosen rows; None if the strategy has none."""
        del view, chosen
        return None

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> dict[str, Any] | None:
        """Write priorities to the store; TorchRL calls this after a learner step."""
        if storage is None:
            raise DefinitionError("priorities are written to the store; pass the buffer's storage as storage=")
        storage.set_priority(index, priority)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of draws and the seed."""
        return {"draws": self._draws, "seed": self.seed, "version": self.version}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._draws, self.seed = int(state_dict["draws"]), int(state_dict["seed"])
        self.version = state_dict["version"]

    def _empty(self) -> None:
        self._draws = 0

    def dumps(self, path: str | Path) -> None:
        """Write the state as JSON."""
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "sampler.json").write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def loads(self, path: str | Path) -> None:
        """Read the state back."""
        self.load_state_dict(json.loads((Path(path) / "sampler.json").read_text(encoding="utf-8")))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_staleness={self.max_staleness}, max_uses={self.max_uses})"


class UniformSampler(TrajectorySampler):
    """All allowed trajectories with equal probability, none twice in a batch."""

    def _choose(self, view: StoreView, allowed: Ints, most: int, rng: np.random.Generator) -> Ints:
        del view
        return rng.choice(allowed, min(most, len(allowed)), replace=False)
