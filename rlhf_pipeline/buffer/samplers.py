"""The sampling strategies, which choose the next trajectories for the learner; `_strategy` has their base."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from rlhf_pipeline.buffer._group_samplers import GroupSampler, SuccessSampler, VarianceSampler
from rlhf_pipeline.buffer._strategy import (
    Floats,
    Ints,
    StoreView,
    TrajectorySampler,
    UniformSampler,
    gumbel_order,
    step_generator,
)
from rlhf_pipeline.buffer._torchrl_samplers import ConsumingSampler, StalenessAwareSampler
from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.errors import DefinitionError, did_you_mean, function_name, tried
from trajectory_store import RaggedArray, TrajectoryStore

__all__ = [
    "AnchoredSampler",
    "ConsumingSampler",
    "Floats",
    "FreshSampler",
    "FunctionSampler",
    "GroupSampler",
    "Ints",
    "MixSampler",
    "PrioritySampler",
    "RecencySampler",
    "StalenessAwareSampler",
    "STRATEGIES",
    "StoreView",
    "Strategy",
    "StrategyFunction",
    "SuccessSampler",
    "TrajectorySampler",
    "UniformSampler",
    "VarianceSampler",
    "as_sampler",
    "step_generator",
    "strategy_of",
]


@dataclass(kw_only=True, eq=False, repr=False)
class FreshSampler(TrajectorySampler):
    """The oldest trajectories within the limits, in the order of arrival. Deterministic.

    >>> FreshSampler(max_staleness=1)
    FreshSampler(max_staleness=1, max_uses=1)
    """

    max_staleness: int | None = 0
    max_uses: int | None = 1

    def _choose(self, view: StoreView, allowed: Ints, most: int, rng: np.random.Generator) -> Ints:
        del view, rng
        return allowed[:most]


@dataclass(kw_only=True, eq=False, repr=False)
class NewestSampler(TrajectorySampler):
    """The newest rollout, in the order of arrival. Deterministic.

    A rollout of another process may be of any age, and the view names its rows. One of this process has the weights of
    its first step, so its rows are younger than the steps that a rollout has.
    """

    steps_per_rollout: int = 1

    def _choose(self, view: StoreView, allowed: Ints, most: int, rng: np.random.Generator) -> Ints:
        del rng
        newest = view.age < self.steps_per_rollout if view.newest is None else view.newest
        return allowed[newest[allowed]][:most]


@dataclass(kw_only=True, eq=False, repr=False)
class PrioritySampler(TrajectorySampler):
    """Probability proportional to `(|priority| + eps)^alpha * exp(-age / tau)`, no row twice in a batch.

    Drawn by Gumbel top-k, which equals sampling one by one without replacement. Source for the age factor, without
    which priority degrades: https://arxiv.org/abs/2604.16918.
    """

    alpha: float = 1.0
    tau: float = math.inf
    eps: float = 1e-6
    column: str = "priority"
    beta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tau > 0 or not self.eps > 0:
            raise DefinitionError(f"tau ({self.tau}) and eps ({self.eps}) must be above 0.")

    def log_weights(self, view: StoreView, allowed: Ints) -> Floats:
        """Return the logarithm of the unnormalised probabilities."""
        out = np.zeros(len(allowed))
        if self.alpha and self.column in view.store.schema:
            priority = np.abs(view.column(self.column)[allowed].astype(np.float64))
            out += self.alpha * np.log(np.nan_to_num(priority) + self.eps)
        if math.isfinite(self.tau):
            out -= view.age[allowed] / self.tau
        return out

    def _choose(self, view: StoreView, allowed: Ints, most: int, rng: np.random.Generator) -> Ints:
        return allowed[gumbel_order(self.log_weights(view, allowed), rng)[:most]]

    def weights(self, view: StoreView, chosen: Ints) -> Floats | None:
        """Return importance weights of the chosen rows, the largest 1; None without `beta`."""
        if self.beta is None or not len(chosen):
            return None
        allowed = self.eligible(view)
        chance = self.log_weights(view, allowed)
        chance -= np.logaddexp.reduce(chance)
        log_weight = -self.beta * (math.log(len(allowed)) + chance[np.searchsorted(allowed, chosen)])
        return np.exp(log_weight - log_weight.max())


@dataclass(eq=False, repr=False)
class MixSampler(TrajectorySampler):
    """Draws one part of every batch by one strategy and the rest by another, without repeating a row.

    >>> MixSampler(FreshSampler(), UniformSampler(max_staleness=8), fraction=0.75).fraction
    0.75
    """

    fresh: TrajectorySampler = field(default_factory=FreshSampler)
    replay: TrajectorySampler = field(default_factory=UniformSampler)
    fraction: float = field(default=0.5, kw_only=True)
    max_staleness: int | None = field(default=None, init=False)
    max_uses: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.fraction <= 1:
            raise DefinitionError(f"fraction is {self.fraction}; it must be between 0 and 1.")

    def _choose(self, view: StoreView, allowed: Ints, most: int, rng: np.random.Generator) -> Ints:
        share = round(most * self.fraction)
        first = self.fresh.eligible(view) if share else allowed[:0]  # a group strategy draws one for a share of 0
        if len(first):
            first = self.fresh._choose(view, first, share, rng)
        second = np.setdiff1d(self.replay.eligible(view), first)
        if len(second) and most > len(first):
            second = self.replay._choose(view, second, most - len(first), rng)
        else:
            second = second[:0]
        return np.concatenate([first, second])


@dataclass(eq=False, repr=False)
class AnchoredSampler(TrajectorySampler):
    """One update on the complete newest rollout, then updates on replay until the next rollout arrives.

    Source: the recipes of FreshPER, https://arxiv.org/abs/2604.16918, and https://arxiv.org/abs/2606.04560.

    >>> AnchoredSampler(replay=UniformSampler(max_staleness=24), steps_per_rollout=3).replay
    UniformSampler(max_staleness=24, max_uses=None)
    """

    replay: TrajectorySampler = field(default_factory=UniformSampler)
    steps_per_rollout: int = field(default=2, kw_only=True)
    max_staleness: int | None = field(default=None, init=False)
    max_uses: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps_per_rollout < 2:
            raise DefinitionError(
                f"steps_per_rollout is {self.steps_per_rollout}; it must be at least 2, because otherwise no "
                "step remains for replay."
            )
        self._newest = NewestSampler(steps_per_rollout=self.steps_per_rollout)

    def _choose(self, view: StoreView, allowed: Ints, most: int, rng: np.random.Generator) -> Ints:
        # After one update, the newest rollout is one version older: only the version shows the position in the turn.
        version = int(view.column("policy_version").max()) if view.version is None else view.version
        part = self._newest if version % self.steps_per_rollout == 0 else self.replay
        eligible = part.eligible(view)
        return part._choose(view, eligible, most, rng) if len(eligible) else eligible


@dataclass(kw_only=True, eq=False, repr=False)
class RecencySampler(PrioritySampler):
    """Newer trajectories more often: probability proportional to `exp(-age / tau)`."""

    alpha: float = field(default=0.0, init=False)
    tau: float = 4.0


StrategyFunction = Callable[[StoreView, Ints, int, np.random.Generator], Ints]
"""A custom strategy: `(view, allowed int64 [m], most, rng) -> int64 [<= most]`, some of `allowed`, each once.

`allowed` contains the positions in the view that satisfy the limits on age and use, in the order of arrival, at least
one. `view.column(name)`, `view.age` and `view.use_count` are arrays over the complete view. The function must depend
only on its arguments and draw random numbers only from `rng`, so that a resumed run draws the same batches.
"""


@dataclass(kw_only=True, eq=False, repr=False)
class FunctionSampler(TrajectorySampler):
    """A custom strategy.

    >>> newest = FunctionSampler(function=lambda view, allowed, most, rng: allowed[-most:])
    >>> newest
    FunctionSampler(max_staleness=None, max_uses=None)
    """

    function: StrategyFunction

    def __post_init__(self) -> None:
        super().__post_init__()
        contract = (
            "The function must accept view, allowed, most and rng, and return at most `most` of the allowed positions."
        )
        with (
            tried(f"sample.strategy {function_name(self.function)}", f"8 trajectories. {contract}"),
            tempfile.TemporaryDirectory() as folder,
            _small_store(f"{folder}/store") as store,
        ):
            self._choose(StoreView(store, store.ids(), version=2), np.arange(8), 4, step_generator(0, 1))

    def _choose(self, view: StoreView, allowed: Ints, most: int, rng: np.random.Generator) -> Ints:
        chosen = np.asarray(self.function(view, allowed.copy(), most, rng))
        right = chosen.ndim == 1 and (chosen.dtype.kind in "iu" or not chosen.size) and len(chosen) <= most
        if not right or len(np.unique(chosen)) < len(chosen) or not np.isin(chosen, allowed).all():
            raise DefinitionError(
                f"sample.strategy {function_name(self.function)} returned an array of dtype "
                f"{chosen.dtype} and shape {list(chosen.shape)}; it must return at most {most} of the "
                f"{len(allowed)} allowed positions, without repeats."
            )
        return chosen.astype(np.int64)


def _small_store(path: str) -> TrajectoryStore:
    """Make a store of two groups of four graded trajectories, of two policy versions."""
    store = TrajectoryStore.create(path, trajectory_schema())
    at, lengths = np.arange(8), np.full(8, 3)
    store.append(
        {
            "input_ids": RaggedArray(np.arange(24), lengths),
            "assistant_mask": RaggedArray(np.tile([False, True, True], 8), lengths),
            "log_probs": RaggedArray(np.tile(np.array([np.nan, -1, -2], np.float32), 8), lengths),
            "group_id": at // 4,
            "policy_version": at // 4,
            "trajectory_id": at,
            "task_reward": at % 2,
            "advantage": at % 2 - 0.5,
        }
    )
    return store


def _mix(
    *, fresh_fraction: float = 0.5, tau: float = math.inf, steps_per_rollout: int = 1, **limits: Any
) -> MixSampler:
    seed, older = limits.pop("seed", 0), RecencySampler(tau=tau, **limits)
    newest = NewestSampler(steps_per_rollout=steps_per_rollout, max_uses=older.max_uses)
    return MixSampler(newest, older, fraction=fresh_fraction, seed=seed)


def _anchored(*, tau: float = math.inf, steps_per_rollout: int = 2, **limits: Any) -> AnchoredSampler:
    seed, older = limits.pop("seed", 0), RecencySampler(tau=tau, **limits)
    return AnchoredSampler(older, steps_per_rollout=steps_per_rollout, seed=seed)


def _consuming(*, max_uses: int | None = None, max_sample_count: int = 1, **limits: Any) -> ConsumingSampler:
    return ConsumingSampler(max_uses or max_sample_count, **limits)


@dataclass(frozen=True, slots=True)
class Strategy:
    """The meaning of a strategy's name, in a definition and in `sample_step` alike.

    Attributes:
        make: builds the strategy from the limits (`max_staleness`, `max_uses`, `seed`) and its own settings.
        settings: the fields of `config.Sample`, and of the run, that it takes.
        more: arguments of the class that only programs can set.
    """

    make: Callable[..., TrajectorySampler]
    settings: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


STRATEGIES: Final[Mapping[str, Strategy]] = {
    "fresh": Strategy(partial(FreshSampler, max_staleness=None, max_uses=None)),
    "uniform": Strategy(UniformSampler),
    "recency": Strategy(RecencySampler, ("tau",)),
    "priority": Strategy(partial(PrioritySampler, column="advantage"), ("alpha", "tau"), ("eps", "column", "beta")),
    "group": Strategy(GroupSampler, (), ("group_size", "order")),
    "success": Strategy(
        SuccessSampler, ("tau",), ("buckets", "target", "spread", "threshold", "extremes", "group_size")
    ),
    "variance": Strategy(VarianceSampler, ("alpha", "tau"), ("members", "group_size")),
    "mix": Strategy(_mix, ("fresh_fraction", "tau", "steps_per_rollout")),
    "anchored": Strategy(_anchored, ("tau", "steps_per_rollout")),
    "staleness": Strategy(StalenessAwareSampler, (), ("staleness_weight_fn",)),
    "consuming": Strategy(_consuming, (), ("max_sample_count",)),
}
"""The strategies by name. To add one, add it here and to `config.Strategy`; a custom strategy needs neither."""


def strategy_of(strategy: str | StrategyFunction) -> Strategy:
    """Return the entry of a name, or one for a function."""
    if not isinstance(strategy, str):
        return Strategy(partial(FunctionSampler, function=strategy))
    if strategy not in STRATEGIES:
        raise DefinitionError(f"unknown sampling strategy {strategy!r}.{did_you_mean(strategy, STRATEGIES)}")
    return STRATEGIES[strategy]


_LIMITS = ("max_staleness", "max_uses", "seed")


def as_sampler(strategy: str | StrategyFunction | TrajectorySampler, **arguments: Any) -> TrajectorySampler:
    """Return the strategy of a name; a strategy itself is returned unchanged.

    A name means the same here as in a definition. The classes may have other defaults: `priority`, for example, weighs
    by the advantage, which does not change, and `PrioritySampler()` by the column `priority`, which may.

    >>> as_sampler("uniform", max_uses=2)
    UniformSampler(max_staleness=None, max_uses=2)
    """
    if isinstance(strategy, TrajectorySampler):
        return strategy
    known_strategy = strategy_of(strategy)
    options = (*_LIMITS, *known_strategy.settings, *known_strategy.more)
    for name in arguments:
        if name not in options:
            raise DefinitionError(f"the strategy {strategy!r} has no option {name!r}.{did_you_mean(name, options)}")
    return known_strategy.make(**arguments)
