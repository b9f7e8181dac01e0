"""Which trajectories the learner sees next.

A strategy is a pure function of a snapshot, a seed and a step: `strategy.select(snapshot, n, seed=, step=)`. Nothing
remembers where it was, so a step drawn again draws the same rows. Wrapped as a TorchRL sampler, the number of draws
takes the place of the step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlhf_pipeline.errors import DefinitionError, did_you_mean
from rlhf_pipeline.replay._group_samplers import GroupSampler, SuccessSampler, VarianceSampler
from rlhf_pipeline.replay._strategy import Floats, Ints, StoreView, TrajectorySampler, step_generator
from rlhf_pipeline.replay._torchrl_samplers import ConsumingSampler, StalenessAwareSampler

__all__ = [
    "ConsumingSampler",
    "Floats",
    "FreshSampler",
    "GroupSampler",
    "Ints",
    "MixSampler",
    "PrioritySampler",
    "RecencySampler",
    "StalenessAwareSampler",
    "StoreView",
    "SuccessSampler",
    "TrajectorySampler",
    "UniformSampler",
    "VarianceSampler",
    "as_sampler",
    "step_generator",
]


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
    """Chances of `(|priority| + eps)^alpha * exp(-age / tau)`, none twice in a batch.

    Drawn by Gumbel top-k, which is sampling without replacement one by one. Source for the age factor, without which
    priority degrades: https://arxiv.org/abs/2604.16918.

    Args:
        alpha: how much the priority counts.
        tau: age in versions at which the chance has fallen to 1/e; infinity ignores the age.
        eps: added to the priority.
        column: the scalar that is the priority: `priority`, which may be changed, or for example `advantage`, which
            may not, so that a step drawn again later is the same.
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
        column: str = "priority",
        beta: float | None = None,
        max_staleness: int | None = None,
        max_uses: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(max_staleness=max_staleness, max_uses=max_uses, seed=seed)
        if not tau > 0 or not eps > 0:
            raise DefinitionError(f"tau ({tau}) and eps ({eps}) must be above 0.")
        self.alpha, self.tau, self.eps = float(alpha), float(tau), float(eps)
        self.column = column
        self.beta = None if beta is None else float(beta)

    def log_weights(self, view: StoreView, allowed: Ints) -> Floats:
        """Logarithm of the unnormalised chances."""
        out = np.zeros(len(allowed))
        if self.alpha and self.column in view.store.schema:
            priority = np.abs(view.column(self.column)[allowed].astype(np.float64))
            out += self.alpha * np.log(np.nan_to_num(priority) + self.eps)
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


_STRATEGIES: dict[str, type[TrajectorySampler]] = {
    "fresh": FreshSampler,
    "uniform": UniformSampler,
    "recency": RecencySampler,
    "priority": PrioritySampler,
    "group": GroupSampler,
    "success": SuccessSampler,
    "variance": VarianceSampler,
    "mix": MixSampler,
    "staleness": StalenessAwareSampler,
    "consuming": ConsumingSampler,
}


def as_sampler(strategy: str | TrajectorySampler, **arguments: Any) -> TrajectorySampler:
    """A strategy as it is, or by name.

    The names are `fresh`, `uniform`, `recency`, `priority`, `group`, `success`, `variance`, `mix`, `staleness` and
    `consuming`.

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
