"""Norms and MLPs that are compiled where tokens are scored."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch._dynamo.utils import counters

from rlhf_pipeline import scratch_policy
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.learner.lora import add_adapters
from rlhf_pipeline.policies import compiled_modules
from rlhf_pipeline.policies.compiled_modules import compiled_by, prepare_modules
from rlhf_pipeline.policies.token_policy import TokenPolicy
from tests.moments import Call, at_call

EAGER = "aot_eager"
"""Traces and differentiates as inductor does, and then runs torch's own kernels."""


def policy() -> TokenPolicy:
    """A tiny model with RMS norms and gated MLPs."""
    return scratch_policy("0123456789=", hidden_size=16, num_layers=2, num_heads=2, seed=0)


def scored(policy: TokenPolicy, rows: int, columns: int) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of random rows of different lengths, and the gradients of a weighted sum of them."""
    drawn = torch.Generator().manual_seed(rows * columns)
    ids = torch.randint(0, 10, (rows, columns), generator=drawn)
    present = torch.arange(columns) < torch.randint(2, columns + 1, (rows, 1), generator=drawn)
    found = policy.log_probs(ids, present)
    weights = [weight for weight in policy.model.parameters() if weight.requires_grad]
    return found.detach(), list(torch.autograd.grad((found * torch.linspace(0, 1, columns)).sum(), weights))


def assert_same(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    """Equal up to the rounding of float32."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_scores_and_gradients_are_the_same_for_all_lengths(layout):
    """Other lengths, and another layout, compile nothing again; the state dict has the same names."""
    counters["graph_break"].clear()  # torch counts for the whole process
    eager, fused = policy(), policy()
    names = list(fused.model.state_dict())
    eager.set_scoring(layout=layout, compiled="off")
    assert fused.set_scoring(layout=layout, compiled="on", backend=EAGER) is None
    assert_same(scored(fused, 3, 9), scored(eager, 3, 9))
    with torch.no_grad():
        fused.log_probs(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool))
    graphs = counters["stats"]["unique_graphs"]
    for rows, columns in ((2, 17), (5, 8), (4, 33), (3, 5)):
        assert_same(scored(fused, rows, columns), scored(eager, rows, columns))
    fused.scoring_layout = "packed" if layout == "padded" else "padded"
    scored(fused, 4, 7)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert list(fused.model.state_dict()) == names
    assert (fused.take_computed()["compiled"], eager.take_computed()["compiled"]) == ("norms+mlps", "none")


@contextmanager
def compiled_calls() -> Iterator[list[Call]]:
    """The calls of modules whose compiled code runs."""
    compiled: list[Call] = []

    def note(call: Call) -> None:
        if compiled_modules._backend.get() is not None:
            compiled.append(call)

    with at_call(compiled_modules._forward, before=note):
        yield compiled


def test_sampling_stays_eager():
    """Completions and log-probs have the same bits, and nothing compiled runs."""
    eager, fused = policy(), policy()
    fused.set_scoring(layout="padded", compiled="on", backend=EAGER)
    prompt = eager.tokenizer.encode("12=")
    with compiled_calls() as compiled:
        one, other = (each.generate_groups([prompt], group_size=3, seed=1) for each in (eager, fused))
    assert not compiled
    for a, b in zip(one, other, strict=True):
        assert (a.token_ids, a.log_probs.tolist()) == (b.token_ids, b.log_probs.tolist())


def test_a_recomputed_layer_runs_the_modules_of_the_forward_pass():
    """The backward pass, outside of the context, runs the compiled modules again, with the same gradients."""
    eager, fused = policy(), policy()
    fused.set_scoring(layout="padded", compiled="on", backend=EAGER)
    expected = scored(eager, 3, 9)
    with compiled_calls() as once:
        assert_same(scored(fused, 3, 9), expected)
    fused.checkpoint_activations()
    fused.train()
    with compiled_calls() as again:
        assert_same(scored(fused, 3, 9), expected)
    assert len(again) == 2 * len(once) - 1  # the norm behind the layers is not recomputed


def test_a_copy_of_the_model_runs_its_own_weights():
    """Also where the model it was copied from is compiled."""
    fused = policy()
    fused.set_scoring(layout="padded", compiled="on", backend=EAGER)
    other = copy.deepcopy(fused.model)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad(), compiled_by(EAGER):
        before = fused.model(input_ids=ids).logits
        for weight in other.parameters():
            weight.mul_(1.5)
        assert torch.equal(fused.model(input_ids=ids).logits, before)
        assert not torch.allclose(other(input_ids=ids).logits, before)


@register_backend(name="wrong_by_a_thousandth")
def wrong_compiler(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler whose code gives other values."""
    return lambda *inputs: [1.001 * output for output in graph(*inputs)]


class OnGPU(TokenPolicy):
    """A policy that reports that it is on a GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]


def test_modules_that_fail_the_check_are_not_compiled():
    """`on` is an error with the figures, and the modules stay as they were."""
    fused = policy()
    with pytest.raises(DefinitionError, match=r"learn.compile is on, but \w+ cannot be compiled .*no_such_compiler"):
        fused.set_scoring(layout="padded", compiled="on", backend="no_such_compiler")
    with pytest.raises(
        DefinitionError, match=r"differs when compiled: output by 1.0e-03 .rounding explains at most 1.0e-05.*=off"
    ):
        fused.set_scoring(layout="padded", compiled="on", backend="wrong_by_a_thousandth")
    assert not any("forward" in vars(module) for module in fused.model.modules())
    assert fused.take_computed()["compiled"] == "none"
    assert fused.set_scoring(layout="padded", compiled="auto") is None
    fused.__class__ = OnGPU
    notice = fused.set_scoring(layout="padded", compiled="auto", backend="wrong_by_a_thousandth")
    assert "norms and MLPs run eagerly, because" in str(notice)


def test_a_model_without_such_modules_is_not_compiled():
    """Torch's own layers are left alone."""
    assert "no norms" in str(prepare_modules(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), backend=EAGER))


def test_adapters_stay_eager():
    """An MLP with adapters has a forward that may change; the norms around it are compiled."""
    pytest.importorskip("peft")
    one, other = policy(), policy()
    for each in (one, other):
        add_adapters(each, rank=2, alpha=4.0, targets="all-linear", seed=0)
    other.set_scoring(layout="padded", compiled="on", backend=EAGER)
    found = {type(module).__name__ for module in other.model.modules() if "forward" in vars(module)}
    assert found == {"LlamaRMSNorm"}
    assert_same(scored(other, 3, 9), scored(one, 3, 9))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_passes_the_check(dtype):
    """The compiler that a run uses; it takes a minute on two cores."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler")
    fused = policy()
    fused.model.to(dtype)
    assert fused.set_scoring(layout="padded", compiled="on") is None
