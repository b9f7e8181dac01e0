"""Tests of the head on a CUDA device, in bfloat16."""

from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.functional.head import Head, fused_token_loss, token_log_probs, writes_float32
from tests.rlhf_pipeline.functional.watch import no_waits, relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

N, H, V = 300, 256, 4001


def make():
    """bfloat16 leaves on the device, and the same in float64."""
    g = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device="cuda")

    hidden = normal(N, H).bfloat16().requires_grad_()
    weight = (normal(V, H) * 3 / H**0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, V, (N,), generator=g, device="cuda")
    exact = [z.detach().double().requires_grad_() for z in (hidden, weight)]
    log_p = torch.log_softmax(exact[0] @ exact[1].t(), -1)
    chosen = log_p.gather(1, targets[:, None])[:, 0]
    return hidden, weight, targets, normal(N), exact, chosen, -(log_p.exp() * log_p).sum(-1)


def test_a_bfloat16_matmul_writes_float32():
    """The device takes the fast path, which the next tests rely on for their accuracy."""
    assert writes_float32(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("head", ["fused", "recompute"])
def test_bfloat16_head_equals_float64(head, entropy_gradient):
    """Log-probs are right to 1e-4 and gradients to the grain of bfloat16."""
    hidden, weight, targets, row, exact, chosen, entropy = make()

    def objective(lp, ent, a):
        terms = [a * lp.exp(), -a * lp]
        return terms if ent is None else [*terms, 0.1 * ent]

    want = torch.stack([t.sum() for t in objective(chosen, entropy, row.double())][: 2 + entropy_gradient])
    if head == "fused":
        out = fused_token_loss(
            hidden,
            Head(weight),
            targets,
            objective,
            [row],
            terms=2 + entropy_gradient,
            entropy_gradient=entropy_gradient,
            chunk_size=64,
        )
        log_probs, got, seen = out.log_probs, torch.stack(out.losses), out.entropy
    else:
        log_probs, seen = token_log_probs(hidden, Head(weight), targets, chunk_size=64, return_entropy=True)
        terms = objective(log_probs, seen if entropy_gradient else None, row)
        got = torch.stack([t.sum() for t in terms])
    assert (log_probs.double() - chosen).abs().max() < 1e-4
    assert relative(seen.detach(), entropy) < 1e-2
    gradients = torch.autograd.grad(got.sum(), (hidden, weight))
    exacts = torch.autograd.grad(want.sum(), exact)
    assert max(relative(a, b) for a, b in zip(gradients, exacts, strict=True)) < 1e-2


def test_the_head_does_not_synchronise():
    """Forward and backward of the fused head queue their work without waiting for the device."""
    hidden, weight, targets, row, *_ = make()
    writes_float32(hidden.device)

    def step():
        out = fused_token_loss(
            hidden, Head(weight), targets, lambda lp, _, a: [a * lp, lp], [row], terms=2, chunk_size=64
        )
        (out.losses[0] + out.losses[1]).backward()

    step()
    with no_waits():
        step()
    torch.cuda.synchronize()


def test_memory_is_a_chunk_not_the_batch():
    """The peak above the inputs is the gradients and a chunk, a small part of [N, V] float32 logits."""
    rows, vocab = 8192, 32_000
    hidden = torch.randn(rows, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, device="cuda", dtype=torch.long)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fused_token_loss(hidden, Head(weight), targets, lambda lp, _: [lp], chunk_size=512)
    out.losses[0].backward()
    assert torch.cuda.max_memory_allocated() - before < rows * vocab * 4 / 4
