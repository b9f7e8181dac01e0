"""What scoring and learning ask of a GPU, found without one: no tensor of another device, and few waits of the host."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import lazy_stack
from torchrl.envs.transforms import Compose
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_pipeline import (
    CausalLMPolicy,
    Collect,
    Collector,
    CopyDigits,
    GRPOLoss,
    Learn,
    MCAdvantage,
    RetrieveLogProb,
    TrajectoryReplayBuffer,
    scratch_policy,
    token_match,
)
from rlhf_pipeline.config import Sample
from rlhf_pipeline.functional.aggregation import scorable
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.losses import grpo
from rlhf_pipeline.losses.loss_batch import LossBatch
from rlhf_pipeline.policies import _scoring
from rlhf_pipeline.policies.engines import device_steps
from rlhf_pipeline.policies.engines.slots import SYNC_EVERY, SlotEngine
from rlhf_pipeline.transforms import base, retrieve_log_prob
from rlhf_pipeline.transforms.retrieve_log_prob import stream_beside
from tests.rlhf_pipeline.fake_device import FakeDevice, FakeStream, OnDevice, to_device
from tests.rlhf_pipeline.small import trajectory

LAYOUTS = ["auto", "padded", "packed", "prefix_shared"]
WAITS_OF_A_STEP = {
    ("learner/learner.py", "_local_scalar_dense"): 2,  # is the gradient's norm finite, and how large is it
    ("learner/metrics.py", "tolist"): 1,  # the figures of the loss, all at once
    ("learner/metrics.py", "synchronize"): 1,  # the time of the step is that of the device
}
"""Where the host waits in an optimizer step, whatever the number of its micro-batches; everything else is a fault."""

PROMPTS = [[3 + i % 7 for i in range(12)], [2, 9, 4, 4, 8, 1, 6, 2, 5, 7]]


def rows(count: int = 8) -> Any:
    """Groups of two with prompts of ten tokens or more, and completions of 1 to 8."""
    made = []
    for i in range(count):
        prompt, own = PROMPTS[i // 2 % 2], 1 + (5 * i) % 8
        tokens = [*prompt, *((7 * i + j) % 10 for j in range(own))]
        made.append(trajectory(i, [0] * len(prompt) + [1] * own, float(i % 3), tokens=tokens))
    return lazy_stack(made)


def policy_of(layout: str = "padded", *, dtype: torch.dtype = torch.float32) -> CausalLMPolicy:
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=2, num_heads=2, seed=0)
    policy.model.to(dtype)
    policy.scoring_layout = layout
    return policy


def on_the_first_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whatever stream is current."""

    def called(*args: Any, **named: Any) -> Any:
        with FakeStream.made_current(FakeStream.every[0]):
            return function(*args, **named)

    return called


def host_waits(seen: FakeDevice) -> Counter[tuple[str, str]]:
    """How often the host waited, by file and reason."""
    found: Counter[tuple[str, str]] = Counter()
    for (kind, what, place), count in seen.events.items():
        if kind == "wait":
            found[place.partition(":")[0], what] += count
    return found


def batch_of(folder: Path) -> LossBatch:
    """A micro-batch as the learner makes it: on the host."""
    buffer = TrajectoryReplayBuffer(storage=folder, transform=MCAdvantage(2, estimator="dr_grpo"))
    buffer.extend(rows())
    td = buffer.read(buffer.store.ids())
    buffer.trajectories.close()
    tokens, mask = td["tokens", "full"], td["masks", "all_assistant_mask"]
    attention, behaviour = td["masks", "all_attention_mask"], td["log_probs", "full"]
    return LossBatch(
        tokens=tokens,
        attention=attention,
        candidates=mask,
        mask=scorable(mask, attention, behaviour),
        behaviour=behaviour,
        advantage=td["advantage"],
        weight=0.1 * mask,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [{"entropy_bonus": True}, {"head": "recompute"}, {"objective": "gspo"}, {"kl_mask_threshold": 0.5}],
    ids=lambda options: next(iter(options)),
)
def test_loss_and_gradient_without_a_wait(layout: str, options: dict[str, Any], tmp_path: Path):
    """Forward and backward of a micro-batch: the loss and the gradient of the CPU, and nobody waits."""
    batch = batch_of(tmp_path / "store")
    policy = policy_of(layout)
    there = copy.deepcopy(policy)
    expected = GRPOLoss(policy, **options)(batch).total_loss()
    expected.backward()
    loss = GRPOLoss(there, **options)
    loss(batch)  # the layout looks at the model once
    to_device(there.model)
    with FakeDevice() as seen:
        found = loss(batch).total_loss()
        found.backward()
    assert seen.total("refused") == 0, seen.events
    assert seen.total("wait") == 0, seen.events
    assert isinstance(found, OnDevice)
    assert found.item() == expected.item()
    for own, other in zip(policy.parameters(), there.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad.held)


def with_heads(layout: str, *, heads: int, key_heads: int, size: int = 8, head_bias: bool = False) -> CausalLMPolicy:
    """A bfloat16 Qwen2 with such heads of attention, and with a bias of its head if asked."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=11,
        hidden_size=heads * size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=not head_bias,
    )
    model = Qwen2ForCausalLM(config)
    if head_bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(11))
    policy = CausalLMPolicy(model.to(torch.bfloat16), eos_token_id=[], pad_token_id=0)
    policy.scoring_layout = layout
    return policy


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 2, "key_heads": 2},
        {"heads": 4, "key_heads": 2},
        {"heads": 4, "key_heads": 4, "size": 4},
        {"heads": 2, "key_heads": 1, "head_bias": True},
    ],
    ids=["equal heads", "grouped heads", "heads that the kernel refuses", "a head with a bias"],
)
def test_half_precision_in_every_layout_without_a_wait(layout: str, shape: dict[str, Any], tmp_path: Path):
    """bfloat16: the loss and the gradient of the CPU up to rounding, one kernel for all rows, and nobody waits."""
    batch = batch_of(tmp_path / "store")
    policy = with_heads(layout, **shape)
    there = copy.deepcopy(policy)
    expected = GRPOLoss(policy)(batch).total_loss()
    expected.backward()
    to_device(there.model)
    loss = GRPOLoss(there)
    with FakeDevice() as seen:
        loss(batch)  # the layout looks at the model once, and matmuls at the device
        assert there.layout_notices() == []
        seen.events.clear()
        seen.kernels.clear()
        found = loss(batch).total_loss()
        found.backward()
    assert seen.total("refused") == 0, seen.events
    assert seen.total("wait") == 0, seen.events
    calls = 2 if layout != "padded" and shape.get("size", 8) == 8 else 0  # one per layer
    assert [seen.kernels[name] for name in ("_varlen_attn", "_varlen_attn_backward")] == [calls, calls]
    assert found.item() == pytest.approx(expected.item(), rel=1e-2)
    own = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]).float()
    other = torch.cat([parameter.grad.held.flatten() for parameter in there.parameters()]).float()
    assert float((own - other).norm() / own.norm()) < 2e-2


def test_recomputed_layers_wait_once(tmp_path: Path):
    """Layers that are computed again take no cache, so transformers looks at the positions; that is one wait."""
    batch, policy = batch_of(tmp_path / "store"), policy_of()
    policy.checkpoint_activations()
    policy.train()
    to_device(policy.model)
    with FakeDevice() as seen:
        GRPOLoss(policy, entropy_bonus=False)(batch).total_loss().backward()
    assert seen.total("refused") == 0, seen.events
    assert seen.total("wait") == 1, seen.events


def learner_of(
    folder: Path, policy: CausalLMPolicy, *, loss: Any = None, sample: Sample | None = None, **config: Any
) -> Learner:
    buffer = TrajectoryReplayBuffer(storage=folder, transform=MCAdvantage(2, estimator="dr_grpo"))
    buffer.extend(rows())
    return Learner(
        policy=policy,
        loss=GRPOLoss(policy, entropy_bonus=True, **(loss or {})),
        sample=sample,
        buffer=buffer,
        # The pretended device has no compiler.
        config=Learn(token_budget=48, lr=1e-2, compile="off", **config),
        max_staleness=None,
        max_completion_tokens=8,
        ledger=None,
        seed=0,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_waits_as_often_as_is_written_down(layout: str, tmp_path: Path):
    """Three micro-batches and the optimizer: the weights of the CPU, and the waits of the list, by file."""
    learners = [learner_of(tmp_path / name, policy_of(), layout=layout) for name in ("here", "there")]
    for learner in learners:
        learner.step(1)
    here, there = learners
    to_device(there.policy.model)
    there = learner_of(tmp_path / "again", there.policy, layout=layout)
    here = learner_of(tmp_path / "plain", here.policy, layout=layout)
    expected = here.step(2)
    with FakeDevice() as seen:
        found = there.step(2)
    assert seen.total("refused") == 0, seen.events
    assert host_waits(seen) == WAITS_OF_A_STEP, seen.events
    assert (found["loss"], found["grad_norm"]) == (expected["loss"], expected["grad_norm"])
    for own, other in zip(here.policy.parameters(), there.policy.parameters(), strict=True):
        torch.testing.assert_close(other.held, own, rtol=0, atol=1e-6)  # the optimizer's kernels are others there
    for learner in (*learners, here, there):
        learner.buffer.trajectories.close()


@pytest.mark.parametrize(
    "options", [{"loss": {"decoupled": True}}, {"sample": Sample(min_ess=0.5)}], ids=["own log-probs", "ess guard"]
)
def test_scores_before_a_step_wait_once(options: dict[str, Any], tmp_path: Path):
    """Log-probs of three micro-batches, and then the step: the weights of the CPU, and one more wait."""
    policy = policy_of()
    there = policy_of()
    learner_of(tmp_path / "plain", policy, layout="padded", **options).step(2)
    there.log_probs(torch.ones(1, 4), torch.ones(1, 4))
    to_device(there.model)
    learner = learner_of(tmp_path / "store", there, layout="padded", **options)
    with FakeDevice() as seen:
        learner.step(2)
    assert seen.total("refused") == 0, seen.events
    assert host_waits(seen) == WAITS_OF_A_STEP | {("data/upload.py", "synchronize"): 1}, seen.events
    for own, other in zip(policy.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(other.held, own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offload", [False, True])
def test_half_precision_and_moments_on_the_host(offload: bool, layout: str, tmp_path: Path):
    """bfloat16 with float32 masters waits no more often; masters on the host wait once for all gradients."""
    policy = policy_of(dtype=torch.bfloat16)
    policy.log_probs(torch.ones(1, 4), torch.ones(1, 4))
    to_device(policy.model)
    with FakeDevice() as seen:
        learner = learner_of(tmp_path / "store", policy, offload_optimizer=offload, layout=layout)
        learner.step(1)  # the layout looks at the model once, and matmuls at the device
        before = [parameter.held.clone() for parameter in policy.parameters()]
        seen.events.clear()
        learner.step(2)
    learner.buffer.trajectories.close()
    assert seen.total("refused") == 0, seen.events
    extra = {("data/upload.py", "synchronize"): 1} if offload else {}
    assert host_waits(seen) == WAITS_OF_A_STEP | extra, seen.events
    assert not all(torch.equal(one, now.held) for one, now in zip(before, policy.parameters(), strict=True))


def test_reference_log_probs_wait_once_per_rollout(tmp_path: Path):
    """The write path scores a rollout on the device in several batches, and waits for the last alone."""
    reference = policy_of()
    to_device(reference.model)
    with FakeDevice() as seen:
        buffer = TrajectoryReplayBuffer(
            storage=tmp_path / "store", transform=RetrieveLogProb(reference, token_budget=48)
        )
        buffer.extend(rows())
    plain = TrajectoryReplayBuffer(storage=tmp_path / "plain", transform=RetrieveLogProb(policy_of(), token_budget=48))
    plain.extend(rows())
    one, other = (b.store.read_ragged("ref_log_probs", b.store.ids()).values for b in (buffer, plain))
    assert one.tobytes() == other.tobytes()
    assert seen.total("refused") == 0, seen.events
    assert host_waits(seen) == {("data/upload.py", "synchronize"): 1}, seen.events
    for made in (buffer, plain):
        made.trajectories.close()


def test_a_batch_on_the_device_comes_back_once():
    """Scoring decides on the host what is computed: tokens and masks that are on the device are one copy."""
    policy = policy_of()
    ids, mask = torch.tensor([[0, 5, 6, 7], [3, 4, 5, 6]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    expected = policy.log_probs(ids, mask, mask)
    to_device(policy.model)
    with FakeDevice() as seen:
        found = policy.log_probs(OnDevice(ids), OnDevice(mask), OnDevice(mask))
    assert torch.equal(found.held, expected)
    assert seen.total("refused") == 0, seen.events
    assert host_waits(seen) == {("policies/_scoring.py", "a copy to the host"): 1}, seen.events


TOKENS = 20


def rollout_of(folder: Path, *, there: bool, beside: bool, layout: str = "padded") -> tuple[dict[str, Any], FakeDevice]:
    """The trajectories of a rollout, collected on the device or on the CPU, and what was seen there."""
    policy, reference = policy_of(), policy_of(layout)
    retrieve = RetrieveLogProb(reference, token_budget=64)
    buffer = TrajectoryReplayBuffer(storage=folder, transform=Compose(MCAdvantage(4), retrieve))
    collector = Collector(
        policy=policy,
        prompts=CopyDigits(num_digits=2),
        reward=token_match,
        buffer=buffer,
        config=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=TOKENS),
        seed=0,
        retrieve=retrieve if beside else None,
    )
    assert isinstance(policy.engine, SlotEngine)
    policy.engine.sync_every = SYNC_EVERY if there else 1
    policy.generate_groups([[1]], max_new_tokens=1, seed=0)  # the engine looks at the model once
    some = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    reference.log_probs(some, torch.ones_like(some))  # and so does the layout
    seen = FakeDevice()
    if there:
        for model in (policy.model, reference.model):
            to_device(model)
        with seen:
            collector.collect(0, policy_version=0)
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.add_(1)
    else:
        collector.collect(0, policy_version=0)
    rows = buffer.store.read(buffer.store.ids())
    buffer.trajectories.close()
    return rows, seen


@pytest.fixture
def new_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stream beside is one of the fake device, which captures no graphs."""
    monkeypatch.setattr(device_steps, "graphs_of", lambda device: None)  # which asks the driver of a GPU
    stream_beside.cache_clear()
    yield
    stream_beside.cache_clear()


@pytest.mark.usefixtures("new_stream")
@pytest.mark.parametrize(("beside", "layout"), [(False, "padded"), *((True, layout) for layout in LAYOUTS)])
def test_collecting_waits_at_host_syncs_and_once_more(beside: bool, layout: str, tmp_path: Path):
    """Sampling, reference log-probs and advantages of a rollout: the trajectories of the CPU, and no other wait.

    The passes of the reference wait for nobody either, on the stream of sampling or beside it; and the weights may move
    after the rollout.
    """
    here, _ = rollout_of(tmp_path / "here", there=False, beside=False)
    there, seen = rollout_of(tmp_path / "there", there=True, beside=beside, layout=layout)
    assert [row.tolist() for row in here["input_ids"]] == [row.tolist() for row in there["input_ids"]]
    for own, other in zip(here["ref_log_probs"], there["ref_log_probs"], strict=True):
        assert own == pytest.approx(other, abs=1e-5, nan_ok=True)
    assert seen.total("refused") == 0, seen.events
    assert host_waits(seen) == {
        ("policies/engines/device_steps.py", "a copy to the host"): -(-TOKENS // SYNC_EVERY),
        ("data/upload.py", "synchronize"): 1,
    }, seen.events


def put_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Put a fault into the code."""
    monkeypatch.setattr(owner, name, fault)  # the fault is what is tested: that the fake device finds it


@pytest.mark.usefixtures("new_stream")
@pytest.mark.parametrize(
    ("owner", "name", "fault", "told"),
    [
        (FakeStream, "wait_stream", lambda stream, other: None, "of what another stream may still write"),
        (retrieve_log_prob, "placed", on_the_first_stream(retrieve_log_prob.placed), "of a tensor of another stream"),
        (base, "download", lambda tensors: [t.held for t in tensors], "into what another stream may still read"),
    ],
    ids=["weights that may still move", "results of another stream", "nobody waits"],
)
def test_faults_between_streams_are_found(
    owner: Any, name: str, fault: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What scoring beside sampling keeps away, put in."""
    put_in(monkeypatch, owner, name, fault)
    _, seen = rollout_of(tmp_path / "store", there=True, beside=True)
    assert any(kind == "refused" and what.endswith(told) for kind, what, _ in seen.events), seen.events


@pytest.mark.parametrize(
    ("kind", "owner", "name", "fault"),
    [
        ("refused", grpo, "upload", lambda tensors, device: list(tensors)),
        ("wait", grpo, "upload", lambda tensors, device: [t.to(device) for t in tensors]),
        ("wait", _scoring, "recomputes", lambda trunk: True),
    ],
    ids=["left on the host", "moved one by one", "without a cache"],
)
def test_faults_of_a_step_are_found(
    kind: str, owner: Any, name: str, fault: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What the checks above keep away, put in."""
    batch, policy = batch_of(tmp_path / "store"), policy_of()
    to_device(policy.model)
    put_in(monkeypatch, owner, name, fault)
    with FakeDevice() as seen:
        GRPOLoss(policy)(batch)
    assert seen.total(kind) > 0
