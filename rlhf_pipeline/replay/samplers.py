"""Which trajectories the learner sees next.

A strategy is a pure function of a snapshot, a seed and a step: `strategy.select(snapshot, n, seed=, step=)`. Nothing
remembers where it was, so a step drawn again draws the same rows. Wrapped as a TorchRL sampler, the number of draws
takes the place of the step.
"""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrl.data.replay_buffers.samplers import Sampler

from rlhf_pipeline.errors import DataError, DefinitionError, did_you_mean
from trajectory_store import TrajectoryStore

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass
class StoreView:
    """The rows that a strategy may choose from, with their scalars read when they are first needed.

    Attributes:
        store: where the scalars are.
        ids: int64 `[n]`, row ids in the order of arrival.
        version: the learner's version; None takes the newest policy version in the view.
        uses: how often each row has been used, `[n]`; None reads the column `use_count`.
    """

    store: TrajectoryStore
    ids: Ints
    version: int | None = None
    uses: Ints | None = None
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str) -> Any:
        """A scalar column of the rows, `[n]`."""
        if name not in self._cache:
            self._cache[name] = self.store.read_scalars(name, self.ids)
        return self._cache[name]

    @property
    def use_count(self) -> Ints:
        """How often each row has been used, `[n]`."""
        return self.column("use_count") if self.uses is None else self.uses

    @property
    def age(self) -> Ints:
        """Learner version minus policy version, at least 0, `[n]`."""
        versions = self.column("policy_version")
        newest = self.version if self.version is not None else int(versions.max(initial=0))
        return np.maximum(newest - versions, 0)


def step_generator(seed: int, step: int) -> np.random.Generator:
    """The random numbers of one step: a counter-based generator, the same on every machine.

    >>> bool(step_generator(1, 7).random() == step_generator(1, 7).random())
    True
    """
    return np.random.Generator(np.random.Philox(key=[seed % (1 << 64), step % (1 << 64)]))


class TrajectorySampler(Sampler):
    """Base of the strategies, and a TorchRL sampler over `TrajectoryStorage`.

    Rows of priority 0 are never drawn (`MCAdvantage(zero_variance="mark")` sets it).

    Args:
        max_staleness: pass over trajectories whose policy is more than so many versions behind. Trajectories newer
            than the learner have age 0.
        max_uses: pass over trajectories that have been used so often.
        seed: of the TorchRL interface; `select` gets its own.

    Attributes:
        version: the learner's version in the TorchRL interface; None takes the newest in the storage.

    Raises:
        DefinitionError: if a limit is out of range.
    """

    def __init__(self, *, max_staleness: int | None = None, max_uses: int | None = None, seed: int = 0) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise DefinitionError(f"max_staleness is {max_staleness}; it must not be negative.")
        if max_uses is not None and max_uses < 1:
            raise DefinitionError(f"max_uses is {max_uses}; it must be at least 1.")
        self.max_staleness = max_staleness
        self.max_uses = max_uses
        self.seed = int(seed)
        self.version: int | None = None
        self._draws = 0

    def eligible(self, view: StoreView) -> Ints:
        """Positions in the view that the limits allow, in the order of arrival."""
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
            view: the rows there are.
            batch_size: how many; fewer come where fewer are allowed. None takes all that are allowed.
            seed: of the run.
            step: number of the optimizer step.

        Returns:
            Positions in the view, int64, each at most once.
        """
        allowed = self.eligible(view)
        if not len(allowed):
            return allowed
        return self._choose(view, allowed, batch_size, step_generator(seed, step))

    @abc.abstractmethod
    def _choose(self, view: StoreView, allowed: Ints, batch_size: int | None, rng: np.random.Generator) -> Ints: ...

    # -- TorchRL's interface -----------------------------------------------------------------------------------

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw slots of a `TrajectoryStorage`.

        Raises:
            DataError: if the limits leave nothing.
        """
        ids = storage.row_ids()
        slots = np.flatnonzero(ids >= 0)
        view = StoreView(storage.store, ids[slots], version=self.version)
        found = self.select(view, batch_size, seed=self.seed, step=self._draws)
        self._draws += 1
        if not len(found):
            raise DataError(
                f"none of the {len(view)} trajectories may be drawn: max_staleness={self.max_staleness}, "
                f"max_uses={self.max_uses}, version={self.version}. Collect more, or widen the limits."
            )
        weights = self.weights(view, found)
        return torch.from_numpy(slots[found]), {} if weights is None else {"_weight": torch.from_numpy(weights).float()}

    def weights(self, view: StoreView, chosen: Ints) -> Floats | None:
        """Importance weights of chosen rows; None where the strategy has none."""
        del view, chosen
        return None

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> dict[str, Any] | None:
        """Write priorities to the store; TorchRL calls this after a learner step."""
        if storage is None:
            raise DefinitionError("priorities live in the store: pass storage=")
        ids = storage.row_ids(index)
        values = torch.as_tensor(priority, dtype=torch.float32).reshape(-1).expand(len(ids))
        storage.update(ids, priority=values)
        return None

    def state_dict(self) -> dict[str, Any]:
        """The number of draws and the seed."""
        return {"draws": self._draws, "seed": self.seed, "version": self.version}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned."""
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


class FreshSampler(TrajectorySampler):
    """The oldest trajectories that are fresh enough and not used up, in the order of arrival; no chance in it.

    Args:
        max_staleness: largest age in versions.
        max_uses: uses after which a trajectory is spent.
        seed: has no effect.

    >>> FreshSampler(max_staleness=1)
    FreshSampler(max_staleness=1, max_uses=1)
    """

    def __init__(self, *, max_staleness: int | None = 0, max_uses: int | None = 1, seed: int = 0) -> None:
        super().__init__(max_staleness=max_staleness, max_uses=max_uses, seed=seed)

    def _choose(self, view: StoreView, allowed: Ints, batch_size: int | None, rng: np.random.Generator) -> Ints:
        del view, rng
        return allowed if batch_size is None else allowed[:batch_size]


class UniformSampler(TrajectorySampler):
    """Every allowed trajectory with the same chance, none twice in a batch."""

    def _choose(self, view: StoreView, allowed: Ints, batch_size: int | None, rng: np.random.Generator) -> Ints:
        del view
        n = len(allowed) if batch_size is None else min(batch_size, len(allowed))
        return rng.choice(allowed, n, replace=False)


class PrioritySampler(TrajectorySampler):
    """Chances of `(priority + eps)^alpha * exp(-age / tau)`, none twice in a batch.

    Drawn by Gumbel top-k, which is sampling without replacement one by one. Source for the age factor, without which
    priority degrades: https://arxiv.org/abs/2604.16918.

    Args:
        alpha: how much the priority counts.
        tau: age in versions at which the chance has fallen to 1/e; infinity ignores the age.
        eps: added to the priority.
        beta: how far importance weights undo the chances, `(N p)^-beta` over the largest of the batch; TorchRL's
            `sample` puts them under `_weight`. None gives no weights.
        max_staleness: largest age in versions.
        max_uses: uses after which a trajectory is spent.
        seed: of the TorchRL interface.

    Raises:
        DefinitionError: if `tau` or `eps` is not above 0.
    """

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        tau: float = math.inf,
        eps: float = 1e-6,
        beta: float | None = None,
        max_staleness: int | None = None,
        max_uses: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(max_staleness=max_staleness, max_uses=max_uses, seed=seed)
        if not tau > 0 or not eps > 0:
            raise DefinitionError(f"tau ({tau}) and eps ({eps}) must be above 0.")
        self.alpha, self.tau, self.eps = float(alpha), float(tau), float(eps)
        self.beta = None if beta is None else float(beta)

    def log_weights(self, view: StoreView, allowed: Ints) -> Floats:
        """Logarithm of the unnormalised chances."""
        out = np.zeros(len(allowed))
        if self.alpha and "priority" in view.store.schema:
            out += self.alpha * np.log(view.column("priority")[allowed].astype(np.float64) + self.eps)
        if math.isfinite(self.tau):
            out -= view.age[allowed] / self.tau
        return out

    def _choose(self, view: StoreView, allowed: Ints, batch_size: int | None, rng: np.random.Generator) -> Ints:
        n = len(allowed) if batch_size is None else min(batch_size, len(allowed))
        keys = self.log_weights(view, allowed) + rng.gumbel(size=len(allowed))
        return allowed[np.argsort(-keys, kind="stable")[:n]]

    def weights(self, view: StoreView, chosen: Ints) -> Floats | None:
        """Importance weights of chosen rows, the largest 1; None without `beta`.

        Args:
            view: what they were chosen from.
            chosen: positions in the view.
        """
        if self.beta is None or not len(chosen):
            return None
        allowed = self.eligible(view)
        chance = self.log_weights(view, allowed)
        chance -= np.logaddexp.reduce(chance)
        log_weight = -self.beta * (math.log(len(allowed)) + chance[np.searchsorted(allowed, chosen)])
        return np.exp(log_weight - log_weight.max())


class MixSampler(TrajectorySampler):
    """A part of every batch by one strategy, the rest by another, no row twice.

    Args:
        fresh: draws first.
        replay: fills up.
        fraction: part of the batch that `fresh` draws.
        seed: of the TorchRL interface.

    Raises:
        DefinitionError: if the fraction is not between 0 and 1.

    >>> MixSampler(FreshSampler(), UniformSampler(max_staleness=8), fraction=0.75).fraction
    0.75
    """

    def __init__(
        self,
        fresh: TrajectorySampler | None = None,
        replay: TrajectorySampler | None = None,
        *,
        fraction: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed)
        if not 0 <= fraction <= 1:
            raise DefinitionError(f"fraction is {fraction}; it must lie between 0 and 1.")
        self.fresh, self.replay = fresh or FreshSampler(), replay or UniformSampler()
        self.fraction = float(fraction)

    def _choose(self, view: StoreView, allowed: Ints, batch_size: int | None, rng: np.random.Generator) -> Ints:
        n = len(allowed) if batch_size is None else batch_size
        first = self.fresh.eligible(view)
        if len(first):
            first = self.fresh._choose(view, first, round(n * self.fraction), rng)
        second = np.setdiff1d(self.replay.eligible(view), first)
        if len(second) and n > len(first):
            second = self.replay._choose(view, second, n - len(first), rng)
        else:
            second = second[:0]
        return np.concatenate([first, second])


class RecencySampler(PrioritySampler):
    """Newer trajectories more often: chances of `exp(-age / tau)`.

    Args:
        tau: age in versions at which the chance has fallen to 1/e.
        max_staleness: largest age in versions.
        max_uses: uses after which a trajectory is spent.
        seed: of the TorchRL interface.
    """

    def __init__(
        self, *, tau: float = 4.0, max_staleness: int | None = None, max_uses: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(alpha=0.0, tau=tau, max_staleness=max_staleness, max_uses=max_uses, seed=seed)


class GroupSampler(TrajectorySampler):
    """Whole groups: all trajectories of a `group_id`, or none.

    A group counts only if the limits allow every trajectory of it that is in the view.

    Args:
        group_size: only groups of exactly this size; None takes any.
        order: `uniform` draws groups by chance, `fresh` takes them in the order in which they were completed.
        max_staleness: largest age in versions.
        max_uses: uses after which a trajectory is spent.
        seed: of the TorchRL interface.

    Raises:
        DefinitionError: if the order is not known.
    """

    def __init__(
        self,
        *,
        group_size: int | None = None,
        order: str = "uniform",
        max_staleness: int | None = None,
        max_uses: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(max_staleness=max_staleness, max_uses=max_uses, seed=seed)
        if order not in ("uniform", "fresh"):
            raise DefinitionError(f"order is {order!r}; it must be 'uniform' or 'fresh'.")
        self.group_size, self.order = group_size, order

    def _choose(self, view: StoreView, allowed: Ints, batch_size: int | None, rng: np.random.Generator) -> Ints:
        named = view.column("group_id").astype(np.int64)
        named = np.where(named < 0, -1 - np.arange(len(named)), named)  # no group given: a group of its own
        groups, code = np.unique(named, return_inverse=True)
        present = np.bincount(code, minlength=len(groups))
        whole = np.bincount(code[allowed], minlength=len(groups)) == present
        if self.group_size is not None:
            whole &= present == self.group_size
        order = np.argsort(code, kind="stable")  # rows by group, in the order of arrival
        starts = np.cumsum(present) - present
        names = np.flatnonzero(whole)
        if self.order == "uniform":
            names = rng.permutation(names)
        else:
            completed = order[starts + present - 1]
            names = names[np.argsort(completed[names], kind="stable")]
        sizes = np.cumsum(present[names])
        if batch_size is not None:
            names = names[: max(int(np.searchsorted(sizes, batch_size, side="right")), min(1, len(names)))]
        if not len(names):
            return np.empty(0, np.int64)
        return np.concatenate([order[starts[g] : starts[g] + present[g]] for g in names])


_STRATEGIES: dict[str, type[TrajectorySampler]] = {
    "fresh": FreshSampler,
    "uniform": UniformSampler,
    "recency": RecencySampler,
    "priority": PrioritySampler,
    "group": GroupSampler,
    "mix": MixSampler,
}


def as_sampler(strategy: str | TrajectorySampler, **arguments: Any) -> TrajectorySampler:
    """A strategy by name (`fresh`, `uniform`, `recency`, `priority`, `group`, `mix`) or as it is.

    Raises:
        DefinitionError: if the name is not known.

    >>> as_sampler("uniform", max_uses=2)
    UniformSampler(max_staleness=None, max_uses=2)
    """
    if isinstance(strategy, TrajectorySampler):
        return strategy
    if strategy not in _STRATEGIES:
        raise DefinitionError(f"unknown sampling strategy {strategy!r}.{did_you_mean(str(strategy), _STRATEGIES)}")
    return _STRATEGIES[strategy](**arguments)
