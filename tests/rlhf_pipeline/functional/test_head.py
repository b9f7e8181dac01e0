"""Tests of the chunked head."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.head import Head, default_chunk_rows, entropy_of, row_chunks, token_log_probs
from tests.rlhf_pipeline.functional.watch import Watch, relative

N, H, V = 37, 16, 53


def make(dtype, bias=True, seed=0):
    """Hidden states, weight, bias and targets with gradients on."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    b = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, V, (N,), generator=g)
    rows = torch.randn(2, N, generator=g, dtype=torch.float64)
    return hidden, weight, b, targets, rows


def reference(hidden, weight, bias, targets, temperature):
    """Log-probs, entropies and the leaves they depend on, in float64 by log_softmax over all logits."""
    leaves = [z.detach().double().requires_grad_() for z in (hidden, weight, bias) if z is not None]
    logits = leaves[0] @ leaves[1].t()
    if bias is not None:
        logits = logits + leaves[2]
    log_p = torch.log_softmax(logits / temperature, -1)
    chosen = log_p.gather(1, targets[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1), leaves


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients_equal_log_softmax(dtype, limit, temperature, chunk):
    """Loss and gradients agree with a float64 log_softmax over all logits, for any chunk."""
    hidden, weight, bias, targets, rows = make(dtype)
    log_probs, entropy = token_log_probs(
        hidden, Head(weight, bias, temperature=temperature), targets, chunk_size=chunk, return_entropy=True
    )
    want, want_entropy, leaves = reference(hidden, weight, bias, targets, temperature)
    assert log_probs.dtype == dtype
    assert relative(log_probs, want) < limit
    assert relative(entropy, want_entropy) < limit
    assert bias is not None
    got = torch.autograd.grad((log_probs * rows[0] + entropy * rows[1]).sum(), [hidden, weight, bias])
    exact = torch.autograd.grad((want * rows[0] + want_entropy * rows[1]).sum(), leaves)
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == dtype
        assert relative(a, b) < limit


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gradient_without_entropy(dtype, limit):
    """The path without entropy has its own backward pass and the same gradient."""
    hidden, weight, _, targets, rows = make(dtype, bias=False)
    log_probs = token_log_probs(hidden, Head(weight), targets, chunk_size=8)
    want, _, leaves = reference(hidden, weight, None, targets, 1.0)
    got = torch.autograd.grad((log_probs * rows[0]).sum(), (hidden, weight))
    exact = torch.autograd.grad((want * rows[0]).sum(), leaves)
    assert max(relative(a, b) for a, b in zip(got, exact, strict=True)) < limit


def test_hand_computed_values():
    """Two logits ln 3 and 0 give 3/4 and 1/4; at temperature 2 the odds are sqrt 3 to 1."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[math.log(3.0)], [0.0]])
    value = token_log_probs(hidden, Head(weight), torch.tensor([0]))
    assert value.item() == pytest.approx(math.log(0.75), abs=1e-7)
    value, entropy = token_log_probs(hidden, Head(weight, temperature=2.0), torch.tensor([1]), return_entropy=True)
    p = 1.0 / (1.0 + math.sqrt(3.0))
    assert value.item() == pytest.approx(math.log(p), abs=1e-7)
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-7)


def test_improbable_target_keeps_its_log_prob():
    """A target whose probability underflows in float32 still has its exact log-prob and gradient."""
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[200.0], [0.0]])
    value = token_log_probs(hidden, Head(weight), torch.tensor([1]))
    value.sum().backward()
    assert value.item() == -200.0
    assert hidden.grad is not None
    assert hidden.grad.item() == -200.0


def test_never_more_than_a_chunk_of_logits():
    """The largest tensor in forward and backward is [chunk, V], far below [N, V]."""
    rows, vocab, hidden_size, chunk = 256, 512, 8, 16
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    with Watch() as seen:
        out, entropy = token_log_probs(
            hidden, Head(weight), torch.zeros(rows, dtype=torch.long), chunk_size=chunk, return_entropy=True
        )
        (out.sum() + entropy.sum()).backward()
    assert seen.numel == chunk * vocab


@pytest.mark.parametrize(
    ("need_hidden", "need_weight", "matmuls"), [(True, True, 4), (True, False, 3), (False, True, 3)]
)
def test_only_asked_gradients_are_computed(need_hidden, need_weight, matmuls):
    """A frozen head or frozen hidden states save one of the four matmuls."""
    hidden, weight, _, targets, _ = make(torch.float32, bias=False)
    hidden.requires_grad_(need_hidden)
    weight.requires_grad_(need_weight)
    with Watch() as seen:
        token_log_probs(hidden, Head(weight), targets).sum().backward()
    assert seen.matmuls == matmuls
    assert (hidden.grad is not None, weight.grad is not None) == (need_hidden, need_weight)


def test_non_contiguous_slice_keeps_its_gradient():
    """A strided slice of a larger state gets the whole gradient (a peer drops it without a word)."""
    base = torch.randn(2, 9, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.float64)
    targets = torch.arange(8)
    token_log_probs(base[0, :-1], Head(weight), targets).sum().backward()
    leaf = base.detach().clone().requires_grad_()
    want = torch.log_softmax(leaf[0, :-1] @ weight.t(), -1).gather(1, targets[:, None]).sum()
    want.backward()
    assert base.grad is not None
    torch.testing.assert_close(base.grad, leaf.grad, rtol=1e-12, atol=1e-14)


def test_bfloat16_operands_give_float32_log_probs():
    """From bfloat16 operands the log-prob is float32 and agrees with float64 to 1e-5, not to 1e-2."""
    hidden, weight, _, targets, _ = make(torch.bfloat16, bias=False)
    out = token_log_probs(hidden, Head(weight), targets)
    want, _, _ = reference(hidden, weight, None, targets, 1.0)
    assert out.dtype == torch.float32
    assert (out.double() - want).abs().max() < 1e-5
    out.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_autocast_does_not_lower_the_head():
    """Under bfloat16 autocast the head still computes in float32."""
    hidden, weight, _, targets, _ = make(torch.float32, bias=False)
    plain = token_log_probs(hidden, Head(weight), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = token_log_probs(hidden, Head(weight), targets)
        out.sum().backward()
    assert torch.equal(out, plain)


def test_no_rows():
    """No row gives no log-prob and zero gradients, not an error."""
    hidden = torch.zeros(0, H, requires_grad=True)
    weight = torch.ones(V, H, requires_grad=True)
    out = token_log_probs(hidden, Head(weight), torch.zeros(0, dtype=torch.long))
    out.sum().backward()
    assert out.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


def test_chunks_are_equal_and_cover_all_rows():
    """No tail of a few rows: sizes differ by at most one and stay within the limit."""
    for rows in (1, 5, 64, 65, 1000):
        chunks = row_chunks(rows, 64)
        sizes = [e - s for s, e in chunks]
        assert sum(sizes) == rows
        assert max(sizes) <= 64
        assert max(sizes) - min(sizes) <= 1
    assert [default_chunk_rows(v, torch.device("cpu")) for v in (10, 65_536, 10**9)] == [1024, 256, 256]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": Head(torch.zeros(V, H), temperature=0.0)}, "temperature must be above 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"head": Head(torch.zeros(V, H), torch.zeros(3))}, r"bias must have shape \[53\]"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets must be int64 of shape \[37\]"),
        ({"head": Head(torch.zeros(V, H + 1))}, r"hidden must have shape \[N, H\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    """An error names the value seen and the one that is right."""
    hidden, weight, _, targets, _ = make(torch.float32, bias=False)
    arguments = {"hidden": hidden, "head": Head(weight), "targets": targets} | change
    with pytest.raises(DefinitionError, match=message):
        token_log_probs(**arguments)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [8, 1000])
def test_a_soft_cap_is_part_of_the_head(temperature, chunk):
    """`c tanh(z / c)` before the temperature: values and gradients of log-probs and entropies, in float64."""
    hidden, weight, bias, targets, rows = make(torch.float64)
    assert bias is not None
    log_probs, entropy = token_log_probs(
        hidden,
        Head(weight, bias, temperature=temperature, soft_cap=2.5),
        targets,
        chunk_size=chunk,
        return_entropy=True,
    )
    logits = 2.5 * torch.tanh((hidden @ weight.t() + bias) / 2.5) / temperature
    log_p = torch.log_softmax(logits, -1)
    want, want_entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    assert relative(log_probs, want) < 1e-12
    assert relative(entropy, want_entropy) < 1e-12
    leaves = [hidden, weight, bias]
    for pair, exact in (
        ((log_probs * rows[0] + entropy * rows[1]).sum(), (want * rows[0] + want_entropy * rows[1]).sum()),
        ((log_probs * rows[0]).sum(), (want * rows[0]).sum()),
    ):
        found = torch.autograd.grad(pair, leaves, retain_graph=True)
        expected = torch.autograd.grad(exact, leaves, retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            assert relative(a, b) < 1e-12
    with pytest.raises(DefinitionError, match="soft_cap must be above 0"):
        token_log_probs(hidden, Head(weight, soft_cap=0.0), targets)


def test_a_banned_token_has_no_share_in_the_entropy():
    """A bias of -inf: the entropy and its gradient are those of the other tokens alone."""
    hidden, weight, bias, targets, rows = make(torch.float64)
    assert bias is not None
    targets = targets.remainder(V - 1)
    banned = torch.cat([bias.detach()[:-1], torch.tensor([-math.inf], dtype=torch.float64)])
    log_probs, entropy = token_log_probs(hidden, Head(weight, banned), targets, return_entropy=True)
    others = token_log_probs(hidden, Head(weight[:-1], banned[:-1]), targets, return_entropy=True)
    torch.testing.assert_close((log_probs, entropy), others)
    found = torch.autograd.grad((log_probs * rows[0] + entropy * rows[1]).sum(), (hidden, weight), retain_graph=True)
    want = torch.autograd.grad((others[0] * rows[0] + others[1] * rows[1]).sum(), (hidden, weight), retain_graph=True)
    torch.testing.assert_close(found, want)
    logits = torch.tensor([[0.3, -math.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    kept = entropy_of(torch.log_softmax(logits, -1))
    (gradient,) = torch.autograd.grad(kept.sum(), logits)
    assert kept.item() == pytest.approx(entropy_of(torch.log_softmax(logits[:, ::2], -1)).item(), rel=1e-12)
    assert gradient[0, 1] == 0
    assert torch.isfinite(gradient).all()
