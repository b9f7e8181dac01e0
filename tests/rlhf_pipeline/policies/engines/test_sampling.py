"""One token per row by inverse CDF."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_pipeline.policies.engines.sampling import sample_rows


def test_hand_made_row() -> None:
    """Probabilities 0.2, 0.3, 0.5: the token is the first whose running sum passes the uniform."""
    logits = torch.tensor([0.2, 0.3, 0.5]).log().repeat(6, 1)
    u = torch.tensor([0.0, 0.1999, 0.2001, 0.4999, 0.5001, 0.9999], dtype=torch.float64)
    tokens, log_probs = sample_rows(logits, u, 1.0)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    expected = torch.tensor([0.2, 0.2, 0.3, 0.3, 0.5, 0.5]).log()
    torch.testing.assert_close(log_probs, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("vocab", [3, 1024, 1025, 1280, 5000])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_the_inverse_cdf_in_float64(vocab: int, temperature: float) -> None:
    """Flat and two-level vocabularies, whole blocks and a rest: the same token as a running sum in float64."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(200, vocab, generator=generator) * 3
    u = torch.rand(200, generator=generator, dtype=torch.float64)
    exact = torch.log_softmax(logits.double() / temperature, -1)
    cdf = exact.exp().cumsum(-1)
    expected = (cdf <= u[:, None] * cdf[:, -1:]).sum(-1)
    tokens, log_probs = sample_rows(logits.clone(), u, temperature)
    # float32 probabilities move a boundary by about 1e-7 of the row: a token may differ only right at one.
    differ = tokens != expected
    distance = (cdf - u[:, None]).abs().amin(-1)
    assert bool((distance[differ] < 1e-6).all())
    assert int(differ.sum()) <= 1
    chosen = exact.gather(1, tokens[:, None])[:, 0]
    # Where scaled logits reach 20, torch's own float32 is off by 2.6e-6 on some processors.
    float32 = torch.log_softmax(logits / temperature, -1).gather(1, tokens[:, None])[:, 0]
    most = max(2e-6, 1.1 * float((float32.double() - chosen).abs().max()))
    torch.testing.assert_close(log_probs.double(), chosen, atol=most, rtol=0, check_dtype=False)
    assert log_probs.dtype == torch.float32


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 5, 256, 1024, 1025, 1281, 2048]),
    seed=st.integers(0, 2**31),
    keep=st.floats(0.0, 1.0),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    u=st.sampled_from([0.0, 1e-300, 0.5, 1 - 2**-53, 1.0]),
)
def test_never_a_token_of_probability_zero(vocab: int, seed: int, keep: float, scale: float, u: float) -> None:
    """Whatever is masked out, and at both ends of the unit interval, the token is allowed and in range."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=generator) * scale
    banned = torch.rand(3, vocab, generator=generator) > keep
    banned[torch.arange(3), torch.randint(vocab, (3,), generator=generator)] = False
    logits.masked_fill_(banned, float("-inf"))
    tokens, log_probs = sample_rows(logits.clone(), torch.full((3,), u, dtype=torch.float64), 1.0)
    assert bool(((tokens >= 0) & (tokens < vocab)).all())
    assert not bool(banned[torch.arange(3), tokens].any())
    assert bool(torch.isfinite(log_probs).all())


def test_temperature_zero_takes_the_mode_and_reports_temperature_one() -> None:
    """Greedy: the largest logit, with its log-prob at temperature 1."""
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, log_probs = sample_rows(logits.clone(), torch.tensor([0.99], dtype=torch.float64), 0.0)
    assert tokens.tolist() == [1]
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, -1)[:, 1])


def test_a_row_that_is_not_a_number_gives_a_log_prob_that_is_not_one() -> None:
    """The caller finds out from the log-prob; the token stays in range."""
    for vocab in (5, 3000):
        logits = torch.full((2, vocab), float("nan"))
        tokens, log_probs = sample_rows(logits, torch.tensor([0.3, 1.0], dtype=torch.float64), 1.0)
        assert bool(((tokens >= 0) & (tokens < vocab)).all())
        assert bool(torch.isnan(log_probs).all())
