"""DPPO, VESPO and the mean per prompt: by hand, and 100 random steps each against loops in float64."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rlhf_pipeline import DPPO, GRPO, VESPO, CausalLMPolicy, GRPOLoss
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.aggregation import token_weights
from rlhf_pipeline.functional.objectives import PolicyTokens, needs_entropy
from rlhf_pipeline.functional.policy_loss import dppo_loss, vespo_loss
from rlhf_pipeline.losses.grpo import GRPOLossOutput
from rlhf_pipeline.policies.packed import LAYOUTS, plan_micro_batches
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import tiny as tiny_pipeline
from trajectory_store import TrajectoryStore

VOCAB = 23
MASK = ("masks", "all_assistant_mask")
CONFIGURATIONS = 100


# ----------------------------------------------------------------------------------------------------- by hand


def leaf(*values: float) -> torch.Tensor:
    """Return log-probs of these probabilities, float64, with gradient."""
    return torch.tensor(values, dtype=torch.float64).log().requires_grad_()


def test_a_token_outside_the_region_has_no_gradient_and_stays_in_the_counts():
    """Mu is 0.5 throughout: 0.8 with A > 0 and 0.2 with A < 0 are masked; the same moves with the other sign stay."""
    lp = leaf(0.8, 0.2, 0.8, 0.2, 0.6)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    out = dppo_loss(lp, leaf(*[0.5] * 5).detach(), advantage, DPPO(low=0.25, high=0.25))
    out.loss.sum().backward()
    assert lp.grad.tolist() == pytest.approx([0.0, 0.0, 1.6, -0.4, -1.2])
    assert out.clipped_high.tolist() == [True, False, False, False, False]
    assert out.clipped_low.tolist() == [False, True, False, False, False]
    both = dppo_loss(lp, leaf(*[0.5] * 5).detach(), advantage, DPPO(low=0.25, high=0.25, mask="both"))
    assert both.clipped_high.tolist() == [True, False, True, False, False]
    assert both.clipped_low.tolist() == [False, True, False, True, False]


def test_the_ratio_of_a_rare_token_is_not_what_decides():
    """From 1e-4 to 1e-3 the ratio is 10 and the divergence 9e-4: PPO clips, DPPO does not; from 0.5 to 0.72 it does."""
    lp, lb, a = leaf(1e-3, 0.72), leaf(1e-4, 0.5).detach(), torch.ones(2)
    assert dppo_loss(lp, lb, a).clipped_high.tolist() == [False, True]


def test_the_ratio_has_a_cap():
    """A ratio of 40 weighs 20 by default, as in verl, and 40 without a cap, as in the paper."""
    lp, lb = leaf(0.04), leaf(0.001).detach()
    for region, weight in ((DPPO(), 20), (DPPO(ratio_cap=None), 40)):
        assert dppo_loss(lp, lb, torch.ones(1), region).loss.item() == pytest.approx(-weight * math.log(0.04))


def test_the_binary_kl_by_hand():
    """Mu 0.5, pi 0.75: 0.5 log(2/3) + 0.5 log 2 = 0.1438; a limit below it masks and one above does not."""
    lp, lb, a = leaf(0.75), leaf(0.5).detach(), torch.ones(1)
    for limit, masked in ((0.14, True), (0.15, False)):
        assert dppo_loss(lp, lb, a, DPPO(divergence="kl", high=limit)).clipped_high.item() is masked


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_nearly_certain_tokens_have_a_divergence_in_float32(divergence):
    """With `1 - pi` of 1e-9 and of exactly 0, loss and mask are finite; what moved nowhere is never masked."""
    lp = torch.tensor([-1e-9, 0.0, -1e-9, -30.0], requires_grad=True)
    lb = torch.tensor([-1e-9, 0.0, -3.0, -30.0])
    out = dppo_loss(lp, lb, torch.ones(4), DPPO(divergence=divergence))
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all()
    assert torch.isfinite(lp.grad).all()
    assert out.clipped_high.tolist() == [False, False, True, False]


def test_the_weight_of_vespo_is_1_at_1_and_fades():
    """phi(1) = 1; phi(e) = exp(3 + 2 - 3 e) for A >= 0 and exp(2 + 3 - 2 e) below; an extreme weight gives 0."""
    index = torch.tensor([0, 0, 1, 2, 3])
    lb = torch.zeros(5, dtype=torch.float64)
    lp = torch.tensor([0.7, -0.7, 1.0, 1.0, 90.0], dtype=torch.float64, requires_grad=True)
    vespo_loss(lp, lb, torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0]), index, 4).loss.sum().backward()
    e = math.e
    assert lp.grad.tolist() == pytest.approx([-1.0, -1.0, -math.exp(5 - 3 * e), math.exp(5 - 2 * e), 0.0])


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_the_weight_of_vespo_is_that_of_trl():
    """TRL 1.16's own function on random sequences, with and without a correction from trainer to sampler."""
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(40, 6, generator=g) < 0.7
    mask[:, 0] = True
    lp, lo, lb = (0.4 * torch.randn(3, 40, 6, generator=g).double()).unbind(0)
    advantage = torch.randn(40, 1, generator=g).double()
    shape = VESPO()
    settings = {
        "k_pos": shape.power_positive,
        "lambda_pos": shape.scale_positive,
        "k_neg": shape.power_negative,
        "lambda_neg": shape.scale_negative,
    }
    as_tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in settings.items()}
    weights = grpo_trainer.GRPOTrainer.get_gamma_weights
    for proximal, correction in ((lb, None), (lo, ((lo - lb).exp()).masked_fill(~mask, 1.0))):
        wanted = weights(advantage, lp - proximal, mask, correction, **as_tensors)
        row, at = mask.nonzero(as_tuple=True)
        leaf_lp = lp[row, at].requires_grad_()
        vespo_loss(leaf_lp, lb[row, at], advantage[row, 0], row, 40).loss.sum().backward()
        torch.testing.assert_close(-leaf_lp.grad / advantage[row, 0], wanted[row, 0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("objective", ["dppo", "vespo"])
@pytest.mark.parametrize("correction", [{"tis_cap": 2.0}, {"icepop": "token"}])
def test_they_are_not_corrected_a_second_time(objective, correction):
    """`tis_cap` and `icepop` are refused with them, as both already compare with the sampler."""
    with pytest.raises(DefinitionError, match="already corrects for the behaviour policy"):
        GRPO(objective=objective, **correction)


def test_the_mean_per_prompt_needs_groups(tiny):
    """Without `group_id` the loss refuses; two groups of 1 and 3 trajectories weigh the same."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    with pytest.raises(DefinitionError, match="group_mean"):
        GRPOLoss(policy, aggregation="group_mean")(td.exclude("group_id"))
    weights = token_weights(torch.tensor([2, 6, 4, 8]), "group_mean", groups=torch.tensor([0, 0, 0, 5]))
    assert weights.tolist() == pytest.approx([1 / 24, 1 / 24, 1 / 24, 1 / 16])
    alone = token_weights(torch.tensor([2, 6]), "group_mean", groups=torch.tensor([-1, -1]))
    assert alone.tolist() == pytest.approx([1 / 4, 1 / 12])


# ------------------------------------------------------------------------------------- a custom objective


def seen_by_an_objective(tiny, *, entropy: bool, **options: Any) -> tuple[PolicyTokens, Any, Any]:
    """Return the arguments of a custom objective, its policy and its batch."""
    seen: list[PolicyTokens] = []

    def objective(tokens: PolicyTokens) -> torch.Tensor:
        seen.append(tokens)
        loss = -tokens.log_probs * tokens.advantage
        return loss if tokens.entropy is None else loss - 0.1 * tokens.entropy

    policy = tiny.Policy(torch.float64, temperature=0.8)
    td = tiny.as_double(tiny.make_batch(policy))
    td["prox_log_probs", "full"] = td["log_probs", "full"] - 0.25
    marked = needs_entropy(objective) if entropy else objective
    GRPOLoss(policy, entropy_bonus=False, objective=marked, **options)(td).total_loss().backward()
    return seen[1], policy, td


def test_an_objective_of_ones_own_reads_the_sampler_and_the_proximal_policy(tiny):
    """`behaviour` is what is stored and `proximal` the trainer's; entropy and mask level are None unless asked for."""
    tokens, _, td = seen_by_an_objective(tiny, entropy=False, decoupled=True)
    mask = td[MASK]
    assert torch.equal(tokens.behaviour, td["log_probs", "full"][mask])
    assert torch.equal(tokens.proximal, td["log_probs", "full"][mask] - 0.25)
    assert tokens.entropy is None
    assert tokens.mask_level is None
    tokens, _, _ = seen_by_an_objective(tiny, entropy=False)
    assert torch.equal(tokens.behaviour, tokens.proximal)


def test_an_objective_gets_the_entropy_with_gradient_and_the_mask_level_on_request(tiny):
    """The entropy is that of the policy at the temperature, and its gradient reaches the weights."""
    tokens, policy, td = seen_by_an_objective(
        tiny, entropy=True, decoupled=True, icepop=(0.5, 2.0), icepop_level="sequence"
    )
    mask = td[MASK]
    _, entropy = tiny.log_probs_of(policy, td["tokens", "full"], td["masks", "all_attention_mask"])
    torch.testing.assert_close(tokens.entropy, entropy[mask], rtol=1e-12, atol=1e-13)
    assert tokens.entropy.requires_grad
    assert tokens.mask_level == "sequence"


def test_an_actor_without_entropy_refuses_an_objective_that_needs_it(tiny):
    """The error names what is missing, before anything is computed."""
    actor = tiny.Scorer([[0.0, -1.0, -2.0]])
    td = tiny.scorer_batch([[False, True, True]], [[0.0, -1.0, -2.0]], [[0.0, 1.0, 1.0]])
    loss = GRPOLoss(actor, entropy_bonus=False, objective=needs_entropy(lambda t: -t.log_probs * t.entropy))
    with pytest.raises(DefinitionError, match="entropy"):
        loss(td)


# ---------------------------------------------------------------------------------- 100 random configurations each


@dataclass
class Row:
    """One trajectory of a reference: plain numbers, and log-probs with gradient."""

    group: int
    advantage: float
    behaviour: list[float]
    log_probs: list[torch.Tensor] = field(default_factory=list)


def reference_token(row: Row, place: int, options: dict[str, Any], counts: Counter[str]) -> torch.Tensor:
    """Return the loss of one token from the formulas of the papers, in Python's float64."""
    lp, lb, a = row.log_probs[place], row.behaviour[place], row.advantage
    pi, mu = math.exp(lp.item()), math.exp(lb)
    if options.get("objective") == "dppo":
        region: DPPO = options["dppo"]
        low, high = region.bounds
        if region.divergence == "tv":
            divergence = abs(pi - mu)
        else:
            divergence = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        up, down = pi > mu and divergence > high, pi < mu and divergence > low
        masked = (up or down) if region.mask == "both" else (up and a > 0) or (down and a < 0)
        counts["masked" if masked else "kept"] += 1
        ratio = pi / mu if region.ratio_cap is None else min(pi / mu, region.ratio_cap)
        return -(0.0 if masked else ratio) * a * lp
    if options.get("objective") == "vespo":
        shape: VESPO = options["vespo"]
        log_w = sum(p.item() - b for p, b in zip(row.log_probs, row.behaviour, strict=True))
        log_w = min(max(log_w, math.log(1e-8)), 20.0)
        power, scale = shape.power_positive, shape.scale_positive
        if a < 0:
            power, scale = shape.power_negative, shape.scale_negative
        phi = math.exp(scale + power * log_w - scale * math.exp(log_w))
        counts["faded" if phi < 0.5 else "kept"] += 1
        return -phi * a * lp
    ratio = (lp - lb).exp()
    clipped = ratio.clamp(0.8, 1.2)
    counts["kept"] += 1
    return -torch.minimum(ratio * a, clipped * a)


def reference(rows: list[Row], options: dict[str, Any], counts: Counter[str]) -> torch.Tensor:
    """Return the loss of a step: every token's loss, then the mean over tokens, completions or prompts."""
    rows = [row for row in rows if row.log_probs]
    losses = [[reference_token(row, place, options, counts) for place in range(len(row.behaviour))] for row in rows]
    aggregation = options["aggregation"]
    if aggregation == "token_mean":
        return sum(sum(part) for part in losses) / sum(len(part) for part in losses)
    if aggregation == "sequence_mean":
        return sum(sum(part) / len(part) for part in losses) / len(losses)
    groups: dict[int, list[list[torch.Tensor]]] = {}
    for row, part in zip(rows, losses, strict=True):
        groups.setdefault(row.group, []).append(part)
    means = [sum(sum(p) for p in parts) / sum(len(p) for p in parts) for parts in groups.values()]
    return sum(means) / len(means)


def random_options(kind: str, rng: np.random.Generator) -> dict[str, Any]:
    """Draw the settings of one configuration."""
    aggregation = str(rng.choice(["token_mean", "sequence_mean", "group_mean"]))
    if kind == "group_mean":
        objective = [{}, {"objective": "dppo", "dppo": DPPO()}, {"objective": "vespo", "vespo": VESPO()}]
        return {"aggregation": "group_mean", **objective[int(rng.integers(3))]}
    if kind == "vespo":
        settings = {
            name: float(rng.uniform(0.5, 3.0))
            for name in ("power_positive", "scale_positive", "power_negative", "scale_negative")
        }
        return {"objective": "vespo", "vespo": VESPO(**settings), "aggregation": aggregation}
    region = DPPO(
        divergence=str(rng.choice(["tv", "kl"])),
        low=float(10 ** rng.uniform(-3, -0.7)),
        high=float(10 ** rng.uniform(-3, -0.7)),
        mask=str(rng.choice(["harmful", "both"])),
        ratio_cap=[None, 20.0, 1.5][int(rng.integers(3))],
    )
    return {"objective": "dppo", "dppo": region, "aggregation": aggregation}


def random_step(policy: Any, rng: np.random.Generator) -> TensorDict:
    """Draw a step: groups of 1 to 5, lengths of 0 to 9, masks with holes, scores that are missing."""
    sequences, groups, masks = [], [], []
    for group in range(int(rng.integers(1, 5))):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 7)))
        for _ in range(int(rng.integers(1, 6))):
            own = rng.integers(0, VOCAB, int(rng.integers(0, 10)))
            holes = rng.random(len(own)) < rng.choice([0.0, 0.3])  # replies of an environment
            sequences.append((prompt, own))
            masks.append(np.concatenate([np.zeros(len(prompt), bool), ~holes]))
            groups.append(group * 7 + 3)
    width = max(len(mask) for mask in masks)
    tokens = torch.zeros(len(masks), width, dtype=torch.int64)
    attention, assistant = torch.zeros(2, len(masks), width, dtype=torch.bool)
    for i, (pair, mask) in enumerate(zip(sequences, masks, strict=True)):
        tokens[i, : len(mask)] = torch.from_numpy(np.concatenate(pair))
        attention[i, : len(mask)] = True
        assistant[i, : len(mask)] = torch.from_numpy(mask)
    with torch.no_grad():
        current = policy.log_probs(tokens, attention, assistant)
    noise = torch.from_numpy(rng.normal(size=tuple(tokens.shape))) * float(rng.choice([0.0, 0.2, 1.0]))
    behaviour = torch.where(assistant, (current + noise).clamp(max=-1e-6), 0.0)
    lost = assistant & torch.from_numpy(rng.random(tuple(tokens.shape)) < rng.choice([0.0, 0.1]))
    value = torch.from_numpy(rng.choice([-1.0, 1.0], len(masks)) * rng.uniform(0.1, 2.0, len(masks)))
    value[torch.from_numpy(rng.random(len(masks)) < 0.1)] = 0.0
    return TensorDict(
        {
            "tokens": {"full": tokens},
            "masks": {"all_assistant_mask": assistant, "all_attention_mask": attention},
            "log_probs": {"full": behaviour.masked_fill(lost, torch.nan)},
            "advantage": value[:, None] * assistant,
            "group_id": torch.tensor(groups),
            "num_prompt_tokens": torch.tensor([len(prompt) for prompt, _ in sequences]),
        },
        batch_size=[len(masks)],
    )


def loops(
    model: GPT2LMHeadModel, td: TensorDict, temperature: float, options: dict[str, Any], counts: Counter[str]
) -> torch.Tensor | None:
    """Return the loss of a step from all logits; None if no token is in it. Padding comes after every real token."""
    score = torch.log_softmax(model(td["tokens", "full"]).logits / temperature, -1)
    rows = []
    for i in range(len(td)):
        tokens, mask, lb = (td[key][i] for key in (("tokens", "full"), MASK, ("log_probs", "full")))
        produced = mask.nonzero()[:, 0].tolist()
        at = [t for t in produced if t > 0 and not lb[t].isnan()]
        advantage = td["advantage"][i, produced[0]].item() if produced else 0.0
        scores = [score[i, t - 1, tokens[t]] for t in at]
        rows.append(Row(int(td["group_id"][i]), advantage, [lb[t].item() for t in at], scores))
    return reference(rows, options, counts) if any(row.log_probs for row in rows) else None


@pytest.mark.parametrize("kind", ["dppo", "vespo", "group_mean"])
def test_100_random_configurations_equal_loops_in_float64(kind):
    """Value to 1e-11 and gradient to 1e-10 of its norm, over settings, masks, temperatures, layouts and splits."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=32, initializer_range=0.4, bos_token_id=None
    )
    counts: Counter[str] = Counter()
    worst = [0.0, 0.0]
    seed = compared = 0
    model = GPT2LMHeadModel(config).double().eval()
    while compared < CONFIGURATIONS:
        seed += 1
        rng = np.random.default_rng([seed, len(kind)])
        temperature, layout = float(rng.choice([0.5, 1.0, 1.3])), str(rng.choice(LAYOUTS))
        policy = CausalLMPolicy(model, temperature=temperature)
        policy.scoring_layout = layout
        options, td = random_options(kind, rng), random_step(policy, rng)
        expected = loops(model, td, temperature, options, counts)
        if expected is None:
            continue
        compared += 1
        mask = td[MASK] & ~td["log_probs", "full"].isnan()
        mask[:, 0] = False
        weights = token_weights(mask.sum(1), options["aggregation"], groups=td["group_id"], dtype=torch.float64)
        lengths = td["masks", "all_attention_mask"].sum(1)
        plan = plan_micro_batches(
            layout,
            lengths,
            int(rng.integers(int(lengths.max()), 8 * int(lengths.max()))),
            prompt_lengths=td["num_prompt_tokens"],
            group_ids=td["group_id"],
            weight=policy.head_weight,
        )
        loss = GRPOLoss(policy, entropy_bonus=False, head=str(rng.choice(["auto", "recompute"])), **options)
        model.zero_grad(set_to_none=True)
        outputs = []
        for rows in plan.rows:
            part = td[rows]
            part["loss_weight"] = weights[rows][:, None] * part[MASK]
            outputs.append(loss(part))
            outputs[-1].total_loss().backward()
        assert policy.layout_notices() == []
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
        if expected.requires_grad:
            expected.backward()
        wanted = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
        total = float(GRPOLossOutput.merge(outputs).total_loss())
        worst[0] = max(worst[0], abs(total - expected.item()) / max(abs(expected.item()), 1e-3))
        worst[1] = max(worst[1], float((found - wanted).norm() / wanted.norm().clamp_min(1e-6)))
    assert worst[0] < 1e-11, worst
    assert worst[1] < 1e-10, worst
    share = {name: count / counts.total() for name, count in counts.items()}
    assert kind == "group_mean" or 0.05 < share["masked" if kind == "dppo" else "faded"] < 0.9, share


# ------------------------------------------------------------------- from store, ledger and checkpoints of a run


def _fails_sometimes(token_ids: list[int]) -> float:
    """Reward of some completions; others raise, so that groups differ in size."""
    ids = [int(token) for token in token_ids]
    if sum(ids) % 5 == 0:
        raise ValueError("no reward")
    return (sum(ids) % 7) / 7


@pytest.mark.parametrize("kind", ["dppo", "vespo", "group_mean"])
def test_three_steps_of_a_run_are_recomputed_from_its_files(tmp_path, kind):
    """Loss and gradient norm of each step, from rows, ledger line and the checkpoint before it, in float64."""
    settings = {
        "dppo": {"loss__objective": "dppo", "loss__dppo__high": "0.01", "loss__dppo__low": "0.01"},
        "vespo": {"loss__objective": "vespo"},
        "group_mean": {"loss__aggregation": "group_mean"},
    }[kind]
    options: dict[str, Any] = {
        "dppo": {"objective": "dppo", "dppo": DPPO(low=0.01, high=0.01), "aggregation": "token_mean"},
        "vespo": {"objective": "vespo", "vespo": VESPO(), "aggregation": "token_mean"},
        "group_mean": {"aggregation": "group_mean"},
    }[kind]
    every = {"learn__steps": "3", "learn__epochs": "3", "learn__checkpoint_every": "1", "learn__keep_checkpoints": "9"}
    folder = tmp_path / "run"
    pipeline = tiny_pipeline(
        reward=_fails_sometimes,
        **every,
        **settings,
        loss__entropy_coeff="0",
        learn__lr="0.05",
        buffer__max_staleness="3",
    )
    run(pipeline, run_dir=folder)
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    figures = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counts: Counter[str] = Counter()
    with TrajectoryStore.open(folder / "store") as store:
        for step in range(1, 4):
            checkpoint = folder / "checkpoints" / f"step-{step - 1:08}"
            model = AutoModelForCausalLM.from_pretrained(checkpoint).double().eval()
            assert set(load_file(checkpoint / "model.safetensors")) <= {*model.state_dict()}
            read = store.read(np.asarray(ledger[step - 1]["row_ids"]))
            rows = []
            for i, ids in enumerate(read["input_ids"]):
                score = torch.log_softmax(model(torch.tensor(ids[None], dtype=torch.int64)).logits[0], -1)
                at = [t for t in range(1, len(ids)) if read["assistant_mask"][i][t]]
                row = Row(int(read["group_id"][i]), float(read["advantage"][i]), [])
                row.behaviour = [float(read["log_probs"][i][t]) for t in at]
                row.log_probs = [score[t - 1, int(ids[t])] for t in at]
                rows.append(row)
            loss = reference(rows, options, counts)
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            line = figures[step - 1]
            assert line["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=2e-6)
            assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4, abs=1e-6)
            assert len(set(Counter(row.group for row in rows).values())) > 1  # groups differ in size
    assert kind != "dppo" or counts["masked"] > 0
