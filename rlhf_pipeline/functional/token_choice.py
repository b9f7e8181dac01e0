"""Which tokens of a step keep their policy loss: tokens of high entropy, or all except some of high covariance.

Both look at all tokens of the step at once. The tokens that go keep their place in the counts, as in the sources, so
the weights of the others do not change.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

__all__ = ["clip_cov_mask", "top_entropy_mask"]

SAME_ENTROPY: Final = 1e-5
"""In nats. The members of a group begin in the same context: rounding must not separate tokens at the threshold."""


def top_entropy_mask(entropy: torch.Tensor, share: float) -> torch.Tensor:
    """Return which tokens are among the `share` of highest entropy: `H >= quantile(H, 1 - share) - 1e-5`.

    The quantile is interpolated linearly. arXiv:2506.01939 (0.2 there); TRL's `top_entropy_quantile`. The margin is
    ours: tokens of the same context stay together, whatever the rounding.

    Args:
        entropy: [N], of all tokens, in nats.
        share: above 0, at most 1.

    Returns:
        bool [N].

    >>> top_entropy_mask(torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3]), 0.4)
    tensor([False,  True, False,  True, False])
    """
    if share >= 1 or not entropy.numel():
        return torch.ones_like(entropy, dtype=torch.bool)
    threshold = float(np.quantile(entropy.detach().cpu().double().numpy(), 1 - share))
    return entropy.detach().double() >= threshold - SAME_ENTROPY


def clip_cov_mask(
    log_probs: torch.Tensor,
    advantage: torch.Tensor,
    clipped: torch.Tensor,
    *,
    share: float,
    low: float,
    high: float,
    seed: tuple[int, ...],
) -> torch.Tensor:
    """Return which tokens stay when some whose covariance with the advantage is high are drawn and excluded (Clip-Cov).

    With `c = (A - mean A) (lp - mean lp)` over all tokens, `max(floor(share N), 1)` of those with `low < c < high` that
    the ratio's clip does not stop anyway go; all of them if there are fewer. arXiv:2505.22617; verl's `clip_cov`.

    Args:
        log_probs: [N], of the current policy, in a fixed order. A banned token (-inf) is not a candidate and in no
            mean.
        advantage: [N].
        clipped: bool [N], where PPO's clip is taken.
        share: of all tokens.
        low: lower bound of the covariance.
        high: upper bound.
        seed: of the draw, which is a function of it and the candidates.

    Returns:
        bool [N].

    >>> lp, advantage = torch.tensor([-0.1, -3.0, -0.2, -3.0]), torch.tensor([2.0, -2.0, -2.0, 2.0])
    >>> clip_cov_mask(lp, advantage, torch.zeros(4) > 0, share=0.5, low=1.0, high=5.0, seed=(0,))
    tensor([False, False,  True,  True])
    """
    lp_N, advantage_N = log_probs.detach().double(), advantage.double()
    known_N = torch.isfinite(lp_N)
    keep_N = torch.ones_like(known_N)
    if not bool(known_N.any()):
        return keep_N
    covariance_N = (advantage_N - advantage_N[known_N].mean()) * (lp_N - lp_N[known_N].mean())
    candidates = (known_N & ~clipped & (covariance_N > low) & (covariance_N < high)).nonzero()[:, 0]
    number = max(int(share * int(known_N.sum())), 1)
    drawn = np.random.default_rng(seed).permutation(len(candidates))[:number]
    keep_N[candidates[torch.from_numpy(drawn).to(candidates.device)]] = False
    return keep_N
