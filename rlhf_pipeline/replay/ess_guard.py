"""Which trajectories of a batch are still worth learning from, by their effective sample size.

Importance weights let a learner use what an older policy wrote, until a few tokens carry all of the weight. Then the
step is mostly noise, and it is better to take less of it, or to leave it out, than to trust it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.functional.diagnostics import ess_from_sums, weight_sums

Level = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class AgeVerdict:
    """What became of the trajectories of one age.

    Attributes:
        age: in versions.
        trajectories: how many there are.
        ess: effective sample size over their number of tokens (or of sequences), in [0, 1].
        weight: what their loss is multiplied with, in [0, 1]; 0 leaves them out.
    """

    age: int
    trajectories: int
    ess: float
    weight: float


@dataclass(frozen=True, slots=True)
class EssVerdict:
    """What the guard makes of a batch.

    Attributes:
        weights: float32 `[B]`, multiply the loss weights of the trajectories with these.
        ages: one verdict per age, the youngest first.
    """

    weights: Tensor
    ages: tuple[AgeVerdict, ...]

    @property
    def skip(self) -> bool:
        """Whether nothing of the batch is left to learn from."""
        return not bool((self.weights > 0).any())

    @property
    def message(self) -> str:
        """One sentence per age whose trajectories do not count in full; empty where all do."""
        said = []
        for found in self.ages:
            if found.weight < 1:
                fate = "they are left out" if found.weight == 0 else f"they count at {found.weight:.2f}"
                said.append(
                    f"Age {found.age}: the effective sample size of {found.trajectories} trajectories is "
                    f"{found.ess:.3f}, {fate}."
                )
        return " ".join(said)


def ess_guard(
    log_ratio: Tensor,
    mask: Tensor,
    ages: Tensor | None = None,
    *,
    min_ess: float = 0.3,
    skip_below: float = 0.1,
    level: Level = "token",
) -> EssVerdict:
    """Weigh the trajectories of a batch by the effective sample size of all that are as old as they are.

    With `w = exp(log_ratio)` clamped to +-20, `ESS = (sum w)^2 / (n * sum w^2)` over the trajectories of one age. From
    `min_ess` on they count in full; below it their weight is `ESS / min_ess`; below `skip_below` it is 0. With both
    limits equal the guard only leaves out. Ages are judged apart, as fresh trajectories, whose weights are all near 1,
    would hide what stale ones look like. One single token, or sequence, of an age always has an ESS of 1.

    A pure function; who calls it logs `message`, multiplies the loss weights, and passes over a batch with `skip`.

    Args:
        log_ratio: `[B, T]`, log-prob of the learner (at the start of the step) minus that of the behaviour policy.
        mask: bool `[B, T]`, the assistant's tokens. A token whose ratio is not finite does not count.
        ages: integers `[B]`, learner version minus policy version; None takes the batch as one age.
        min_ess: limit below which trajectories count less, above 0 and at most 1.
        skip_below: limit below which they do not count, from 0 to `min_ess`.
        level: `token` weighs tokens, `sequence` whole responses, by the product of their tokens' weights.

    Returns:
        The weights, and what was found of each age.

    Raises:
        DefinitionError: if a limit is out of range, or the level is not known.
        DataError: if the shapes do not fit.

    >>> log_ratio = torch.tensor([[1.0, 1.0], [1.0, 16.0]]).log()
    >>> verdict = ess_guard(log_ratio, torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 4]), min_ess=0.8)
    >>> [round(found.ess, 3) for found in verdict.ages]  # (1 + 16)^2 / (2 * (1 + 256))
    [1.0, 0.562]
    >>> verdict.message
    'Age 4: the effective sample size of 1 trajectories is 0.562, they count at 0.70.'
    """
    if not 0 < min_ess <= 1 or not 0 <= skip_below <= min_ess:
        raise DefinitionError(
            f"min_ess ({min_ess}) must lie above 0 and at most 1, skip_below ({skip_below}) between 0 and min_ess."
        )
    if level not in ("token", "sequence"):
        raise DefinitionError(f"level is {level!r}; it must be 'token' or 'sequence'.")
    if log_ratio.ndim != 2 or mask.shape != log_ratio.shape or (ages is not None and ages.shape != mask.shape[:1]):
        raise DataError(
            f"log_ratio {tuple(log_ratio.shape)} and mask {tuple(mask.shape)} must both be [B, T], and ages "
            f"{None if ages is None else tuple(ages.shape)} [B]."
        )
    with torch.no_grad():
        counts, totals, squares = _sums(log_ratio, mask, level)
        of_row = torch.zeros(len(mask), dtype=torch.int64) if ages is None else ages.cpu()
        found, place = torch.unique(of_row, return_inverse=True)
        sums = torch.zeros(3, len(found), dtype=torch.float64)
        sums.index_add_(1, place, torch.stack([counts, totals, squares]).cpu())
        ess = ess_from_sums(*sums)
        weight = torch.where(ess < skip_below, 0.0, (ess / min_ess).clamp_max(1.0))
        weight = torch.where(sums[0] > 0, weight, 1.0)  # nothing to judge: no token counts anyway
        verdicts = tuple(
            AgeVerdict(int(age), int(rows), float(e), float(w))
            for age, rows, e, w in zip(found, place.bincount(minlength=len(found)), ess, weight, strict=True)
        )
    return EssVerdict(weight[place].float().to(log_ratio.device), verdicts)


def _sums(log_ratio: Tensor, mask: Tensor, level: Level) -> tuple[Tensor, Tensor, Tensor]:
    """Number, sum and sum of squares of the weights of each trajectory, float64 `[B]`."""
    keep = mask & log_ratio.isfinite()
    ratio = torch.where(keep, log_ratio, 0.0).double()
    if level == "sequence":
        ratio, keep = ratio.sum(1, keepdim=True), keep.any(1, keepdim=True)
    return weight_sums(ratio, keep, dim=1)
