"""Controllers of the weight of the KL penalty."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torchrl.data.llm.utils import KLControllerBase

from rlhf_pipeline.errors import DefinitionError, MissingAttributeError, RunMismatchError

_LARGEST_ERROR = 0.2


class KLController(KLControllerBase):
    """Provides the coefficient of the KL penalty, a plain float, as `coef`.

    Args:
        coef: the initial value.
        model: anything with an attribute `kl_coef`, which is kept equal to `coef`.

    Raises:
        DefinitionError: if the coefficient is not finite and at least 0, or the model has no `kl_coef`.
    """

    def __init__(self, coef: float, model: Any = None) -> None:
        coef = float(coef)
        if not math.isfinite(coef) or coef < 0:
            raise DefinitionError(f"the KL coefficient is {coef}; it must be finite and at least 0.")
        if model is not None and not hasattr(model, "kl_coef"):
            raise MissingAttributeError(f"{type(model).__name__} has no attribute kl_coef for the controller to set.")
        self.model = model
        self._set(coef)

    def _set(self, coef: float) -> None:
        self.coef = coef
        if self.model is not None:
            self.model.kl_coef = coef

    @abc.abstractmethod
    def update(self, kl_values: Sequence[float] | Tensor | None = None) -> float:
        """Update from the measured KL of each trajectory, in nats, and return the new coefficient."""

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, ready for JSON."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            RunMismatchError: if the state has no coefficient.
        """
        if "coef" not in state:
            raise RunMismatchError(f"the state of a KL controller has no 'coef'; it contains {sorted(state)}")
        self._set(float(state["coef"]))


class ConstantKLController(KLController):
    """A constant coefficient.

    Args:
        kl_coef: the coefficient; None takes the model's.
        model: anything with an attribute `kl_coef`, which is set to the coefficient.

    Raises:
        DefinitionError: neither argument gives a coefficient.

    >>> controller = ConstantKLController(kl_coef=0.1)
    >>> controller.update([3.0, 5.0])
    0.1
    """

    def __init__(self, *, kl_coef: float | None = None, model: Any = None) -> None:
        kl_coef = getattr(model, "kl_coef", None) if kl_coef is None else kl_coef
        if kl_coef is None:
            raise DefinitionError("ConstantKLController needs a coefficient: pass kl_coef=, or a model that has one.")
        super().__init__(kl_coef, model)

    def update(self, kl_values: Sequence[float] | Tensor | None = None) -> float:
        """Return the coefficient; the values are ignored."""
        self._set(self.coef)
        return self.coef


class AdaptiveKLController(KLController):
    """Adjusts the coefficient so that the mean KL of a trajectory approaches a target.

    `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`, where `kl` is the mean over the `n` trajectories
    of one update; `n` is capped at the horizon, so the coefficient never changes sign. Unlike TorchRL's controller,
    this one keeps the coefficient a float, and `kl_values` are KLs as measured, neither negated nor multiplied by the
    coefficient.

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2.

    Args:
        init_kl_coef: the initial value; above 0, because multiplication never leaves 0.
        target: the target KL, nats per trajectory.
        horizon: trajectories over which the coefficient adapts.
        model: anything with an attribute `kl_coef`, which is kept equal to the coefficient.

    Raises:
        DefinitionError: if an argument is not above 0.

    >>> controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=100)
    >>> round(controller.update([9.0] * 50), 6)
    0.11
    """

    def __init__(self, *, init_kl_coef: float, target: float, horizon: int, model: Any = None) -> None:
        for name, value in (("init_kl_coef", init_kl_coef), ("target", target), ("horizon", horizon)):
            if not (math.isfinite(float(value)) and float(value) > 0):
                raise DefinitionError(f"{name} is {value}; it must be above 0 for an adaptive KL controller.")
        self.target = float(target)
        self.horizon = int(horizon)
        super().__init__(init_kl_coef, model)

    def update(self, kl_values: Sequence[float] | Tensor | None = None) -> float:
        """Adapt the coefficient.

        Args:
            kl_values: the KL of each trajectory, nats. Values that are not finite are ignored.

        Returns:
            The new coefficient.

        Raises:
            DefinitionError: if no values are given.
        """
        if kl_values is None:
            raise DefinitionError("an adaptive KL controller needs the measured KL of each trajectory.")
        values = kl_values.detach().reshape(-1).tolist() if isinstance(kl_values, Tensor) else list(kl_values)
        values = [float(v) for v in values if math.isfinite(float(v))]
        if values:
            mean = math.fsum(values) / len(values)
            error = min(max(mean / self.target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
            self._set(self.coef * (1.0 + error * min(len(values) / self.horizon, 1.0)))
        return self.coef
