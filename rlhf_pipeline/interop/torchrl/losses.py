"""TorchRL's names for two settings of `GRPOLoss`."""

from __future__ import annotations

from typing import Any

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.losses.grpo import GRPOLoss

__all__ = ["CISPOLoss", "DAPO"]


class CISPOLoss(GRPOLoss):
    """`GRPOLoss(objective="cispo")`: a clipped, detached importance weight on every token's log-prob.

    MiniMax-M1, arXiv:2506.13585. TorchRL's class of this name differentiates through the clip, so a clipped token has
    no gradient there. It also clips below by default, unlike the paper: pass `clip_epsilon=0.2` for that.

    Args:
        actor_network: as `GRPOLoss`.
        **options: as `GRPOLoss`.

    Raises:
        DefinitionError: another objective is given.
    """

    def __init__(self, actor_network: Any = None, **options: Any) -> None:
        if options.setdefault("objective", "cispo") != "cispo":
            raise DefinitionError(f"CISPOLoss has the objective 'cispo', not {options['objective']!r}: use GRPOLoss.")
        super().__init__(actor_network, **options)


class DAPO(GRPOLoss):
    """`GRPOLoss` under TorchRL's name for an asymmetric clip: pass `clip_epsilon=(0.20, 0.28)`, as arXiv:2503.14476."""
