"""A reference model that follows the policy: copied every k steps, or an exponential moving average."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import DataError


class MovingReference:
    """Moves a reference towards the policy after optimizer steps: `reference += rate * (policy - reference)`.

    Trajectories keep the reference log-probs that they were stored with. The average is kept in float32 if the
    reference is in lower precision, because small rates would be rounded away.

    >>> reference, policy = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> _ = reference.weight.data.fill_(0.0), policy.weight.data.fill_(1.0)
    >>> moving = MovingReference(reference, policy, every=2, rate=0.25)
    >>> moving.after_step(1), reference.weight.item(), moving.after_step(2), reference.weight.item()
    (False, 0.0, True, 0.25)
    """

    def __init__(self, reference: nn.Module, policy: nn.Module, *, every: int, rate: float) -> None:
        self.every, self.rate = every, rate
        self._policy = dict(policy.named_parameters())
        self._reference = dict(reference.named_parameters())
        self._average = {
            name: parameter.detach().float() if parameter.dtype != torch.float64 else parameter.detach()
            for name, parameter in self._reference.items()
        }  # shares the memory of a float32 parameter

    @torch.no_grad()
    def after_step(self, step: int) -> bool:
        """Update after optimizer step number `step` (1-based) if an update is due; return whether it was."""
        if step % self.every:
            return False
        for name, average in self._average.items():
            average.lerp_(self._policy[name].to(average.dtype), self.rate)
        self._write_back()
        return True

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, for a checkpoint."""
        return dict(self._average)

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned."""
        if tensors.keys() != self._average.keys():
            wrong = sorted(tensors.keys() ^ self._average.keys())
            raise DataError(
                f"the saved reference belongs to another model (differing parameter names: {len(wrong)}, for "
                f"example {wrong[0]!r})."
            )
        for name, average in self._average.items():
            average.copy_(tensors[name])
        self._write_back()

    def _write_back(self) -> None:
        for name, average in self._average.items():
            if self._reference[name].dtype != average.dtype:
                self._reference[name].copy_(average)
