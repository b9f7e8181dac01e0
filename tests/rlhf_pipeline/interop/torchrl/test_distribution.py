"""Distributions over the tokens of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchrl.modules.distributions.discrete import LLMMaskedCategorical
from torchrl.modules.llm.policies.common import LogProbDistribution as TorchRLLogProbDistribution

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.functional.head import Head
from rlhf_pipeline.interop.torchrl.distribution import LogProbDistribution, TokenDistribution

MASK = torch.tensor([[False, True, True], [False, False, True]])


def _parts(bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, generator=generator)
    weight = torch.randn(7, 4, generator=generator)
    return hidden, weight, torch.randn(7, generator=generator) if bias else None


@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_and_entropies_are_those_of_the_softmax(bias: bool) -> None:
    """Against log_softmax in float64, at temperature 0.5; 0 outside the mask."""
    hidden, weight, b = _parts(bias)
    dist = TokenDistribution(hidden, Head(weight, b, 0.5), MASK)
    logits = hidden.double() @ weight.double().T + (0 if b is None else b.double())
    exact = torch.log_softmax(logits / 0.5, -1)
    tokens = torch.tensor([[9, 3, 6], [-5, 1, 0]])
    found = dist.log_prob(tokens)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    expected[0, 1], expected[0, 2], expected[1, 2] = exact[0, 3], exact[1, 6], exact[2, 0]
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    entropy = -(exact.exp() * exact).sum(-1)
    torch.testing.assert_close(dist.entropy()[MASK].double(), entropy, atol=1e-6, rtol=0)
    assert not dist.entropy()[~MASK].any()
    torch.testing.assert_close(dist.logits[MASK].double(), logits / 0.5, atol=1e-5, rtol=0)
    assert dist.logits.shape == (2, 3, 7)


def test_it_agrees_with_torchrls_class_where_that_is_right() -> None:
    """The same log-probs as LLMMaskedCategorical on materialised logits, and it is one."""
    hidden, weight, b = _parts()
    dist = TokenDistribution(hidden, Head(weight, b), MASK)
    peer = LLMMaskedCategorical(logits=dist.logits, mask=MASK)
    tokens = torch.tensor([[0, 3, 6], [-100, 1, 2]])
    torch.testing.assert_close(dist.log_prob(tokens), peer.log_prob(tokens.clamp(min=0)), atol=1e-6, rtol=0)
    assert isinstance(dist, LLMMaskedCategorical)
    torch.testing.assert_close(dist.probs[MASK], peer.probs[MASK])


def test_samples_and_modes_stay_inside_the_mask() -> None:
    """Frequencies follow the softmax; -100 outside the mask, which log_prob reads as nothing."""
    hidden, weight, b = _parts()
    dist = TokenDistribution(hidden, Head(weight, b), MASK)
    torch.manual_seed(0)
    drawn = dist.sample((20_000,))
    assert drawn.shape == (20_000, 2, 3)
    assert bool((drawn[:, ~MASK] == -100).all())
    share = torch.bincount(drawn[:, 0, 1], minlength=7) / 20_000
    torch.testing.assert_close(share, dist.probs[0, 1], atol=0.02, rtol=0)
    assert torch.equal(dist.mode[MASK], dist.logits[MASK].argmax(-1))
    assert not dist.log_prob(torch.full((2, 3), -100)).any()


def test_gradients_reach_the_hidden_states() -> None:
    """log_prob and entropy are differentiable."""
    hidden, weight, b = _parts()
    hidden.requires_grad_()
    dist = TokenDistribution(hidden, Head(weight, b), MASK)
    (dist.log_prob(torch.ones(2, 3, dtype=torch.int64)).sum() + dist.entropy().sum()).backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.abs().sum(1).all())


def test_values_that_do_not_fit_are_refused() -> None:
    """Another shape, an id outside the vocabulary."""
    hidden, weight, b = _parts()
    dist = TokenDistribution(hidden, Head(weight, b), MASK)
    with pytest.raises(DataError, match=r"\[2, 2\], but the distribution has shape \[2, 3\]"):
        dist.log_prob(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(DataError, match=r"vocabulary \(0 to 6\)"):
        dist.log_prob(torch.full((2, 3), 7))


def test_known_log_probs_know_their_tokens() -> None:
    """Right tokens give the log-probs, others are an error that names the first; outside the mask nothing counts."""
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    dist = LogProbDistribution(log_probs, MASK, tokens)
    assert isinstance(dist, TorchRLLogProbDistribution)
    assert dist.log_prob(tokens).tolist() == [[0.0, -2.0, -3.0], [0.0, 0.0, -6.0]]
    elsewhere = tokens.clone()
    elsewhere[~MASK] = 99
    assert torch.equal(dist.log_prob(elsewhere), dist.log_prob(tokens))
    with pytest.raises(
        DataError,
        match=r"not the tokens that were scored \(differences: 1; the first is in row 1, column 2: 7, not 6\)",
    ):
        dist.log_prob(torch.tensor([[1, 2, 3], [4, 5, 7]]))
    with pytest.raises(DataError, match="value has shape"):
        dist.log_prob(tokens[:1])
    with pytest.raises(DataError, match="mask has shape"):
        LogProbDistribution(log_probs, MASK[:1])
    for unknown in (dist.sample, dist.entropy):
        with pytest.raises(NotImplementedError):
            unknown()
