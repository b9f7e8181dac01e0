"""The published losses as recipes: by hand on three tokens, and every option against autograd in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlhf_pipeline import DPPO, GRPOLoss

MASK = ("masks", "all_assistant_mask")
ATTENTION = ("masks", "all_attention_mask")
R = [1.5, 0.5, 1.1]
S = math.sqrt(0.75)  # the geometric mean of the first trajectory's ratios


def three_tokens(tiny):
    """Two trajectories of 2 and 1 tokens, ratios 1.5, 0.5 and 1.1, advantages 1 and -1, log-probs -1, -2, -0.5."""
    actor = tiny.Scorer([[0.0, -1.0, -2.0], [0.0, -0.5, 0.0]])
    behaviour = [[0.0, -1.0 - math.log(R[0]), -2.0 - math.log(R[1])], [0.0, -0.5 - math.log(R[2]), 0.0]]
    td = tiny.scorer_batch(
        [[False, True, True], [False, True, False]],
        behaviour,
        [[0.0, 1.0, 1.0], [0.0, -1.0, 0.0]],
        attention=[[True, True, True], [True, True, False]],
    )
    return actor, td


RECIPES = {
    # -(1.2 + 0.5) / 2 and 1.1, averaged over two trajectories; the first token is clipped.
    "grpo": ({"aggregation": "sequence_mean"}, (-0.85 + 1.1) / 2, [0.0, -0.5 / 4, 1.1 / 2]),
    # The same tokens over 2 trajectories of at most 4 tokens.
    "dr_grpo": (
        {"aggregation": "dr_grpo", "max_completion_tokens": 4},
        (-1.7 + 1.1) / 8,
        [0.0, -0.5 / 8, 1.1 / 8],
    ),
    # The upper clip at 1.28, the mean over three tokens.
    "dapo": (
        {"aggregation": "token_mean", "clip_epsilon": (0.2, 0.28)},
        (-1.28 - 0.5 + 1.1) / 3,
        [0.0, -0.5 / 3, 1.1 / 3],
    ),
    # TRL's name of the mean over the tokens of the batch.
    "bnpo": ({"aggregation": "bnpo"}, (-1.2 - 0.5 + 1.1) / 3, [0.0, -0.5 / 3, 1.1 / 3]),
    # -clip(w) A lp: 1.2 x 1, 0.8 x 2, -1.1 x 0.5; clipped tokens keep their gradient.
    "cispo": ({"objective": "cispo", "clip_epsilon": 0.2}, (1.2 + 1.6 - 0.55) / 3, [-1.2 / 3, -0.8 / 3, 1.1 / 3]),
    # s = sqrt(0.75) for both tokens of the first trajectory and 1.1 for the second.
    "gspo": (
        {"objective": "gspo", "aggregation": "sequence_mean", "clip_epsilon": 0.3},
        (-S + 1.1) / 2,
        [-S / 4, -S / 4, 1.1 / 2],
    ),
    # With the paper's narrow clip the first sequence is below 1 - 3e-4 and not clipped (A > 0); the second is above
    # and not clipped (A < 0).
    "gspo, narrow": (
        {"objective": "gspo", "aggregation": "sequence_mean", "clip_epsilon": (3e-4, 4e-4)},
        (-S + 1.1) / 2,
        [-S / 4, -S / 4, 1.1 / 2],
    ),
    # A < 0 costs at most 1.05.
    "dual clip": ({"dual_clip": 1.05}, (-1.2 - 0.5 + 1.05) / 3, [0.0, -0.5 / 3, 0.0]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_by_hand(tiny, name):
    """Loss and gradient of each published loss, worked out by hand."""
    options, value, slopes = RECIPES[name]
    actor, td = three_tokens(tiny)
    out = GRPOLoss(actor, entropy_bonus=False, **options)(td)
    out.total_loss().backward()
    gradient = actor.values.grad
    assert out.loss_objective.item() == pytest.approx(value, rel=1e-12)
    assert [gradient[0, 1].item(), gradient[0, 2].item(), gradient[1, 1].item()] == pytest.approx(slopes, rel=1e-12)
    assert gradient[1, 2] == 0


def kept_tokens(td, s: dict[str, Any], lp_all, h_all):
    """The tokens that keep their policy loss, by sorting; the draw of Clip-Cov takes every candidate here."""
    tokens = [(i, t) for i, t in td[MASK].nonzero().tolist()]
    if not {"top_entropy_quantile", "clip_cov"} & s.keys():
        return set(tokens)
    entropy = {(i, t): float(h_all[i, t - 1]) for i, t in tokens}
    at = (1 - s.get("top_entropy_quantile", 1.0)) * (len(tokens) - 1)
    below, above = (sorted(entropy.values())[n] for n in (math.floor(at), math.ceil(at)))
    threshold = below + (at - math.floor(at)) * (above - below)
    kept = {token for token in tokens if entropy[token] >= threshold}
    if "clip_cov" in s:
        lp = {(i, t): float(lp_all[i, t - 1]) for i, t in tokens}
        a = {(i, t): float(td["advantage"][i, t]) for i, t in tokens}
        mean_lp, mean_a = (sum(values.values()) / len(tokens) for values in (lp, a))
        for i, t in tokens:
            w = math.exp(lp[i, t] - float(td["log_probs", "full"][i, t]))
            clipped = w > 1.2 if a[i, t] > 0 else w < 0.8
            low, high = s["clip_cov_bounds"]
            if not clipped and low < (a[i, t] - mean_a) * (lp[i, t] - mean_lp) < high:
                kept.discard((i, t))
    return kept


def plain(policy, td, s: dict[str, Any], banned: int | None = None):
    """The loss of a dictionary of options from all logits, token by token, with nothing of the library in it.

    A banned token is counted and has no term of its own.
    """
    from_logits = policy(td["tokens", "full"], td[ATTENTION])
    log_p = torch.log_softmax(from_logits[:, :-1] / policy.temperature, -1)
    lp_all = log_p.gather(2, td["tokens", "full"][:, 1:, None])[..., 0]
    h_all = -(log_p.exp() * log_p).sum(-1)
    low, high = s.get("clip_epsilon", (0.2, 0.2))
    rows = [i for i in range(len(td)) if bool(td[MASK][i].any())]
    count = sum(int(td[MASK][i].sum()) for i in rows)
    total = torch.zeros((), dtype=torch.float64)
    chosen = kept_tokens(td, s, lp_all.detach(), h_all.detach())
    for i in rows:
        length = int(td[MASK][i].sum())
        at = [t for t in td[MASK][i].nonzero()[:, 0].tolist() if td["tokens", "full"][i, t] != banned]
        lp = {t: lp_all[i, t - 1] for t in at}
        lb = {t: td["log_probs", "full"][i, t] for t in at}
        lo = {t: td["prox_log_probs", "full"][i, t] for t in at} if s.get("decoupled") else lb
        ref = {t: td["next", "ref_log_probs", "full"][i, t] for t in at}
        gap_sum = sum(float(lo[t] - lb[t]) for t in at)
        mean = torch.stack([lp[t] - lo[t] for t in at]).mean()
        for t in at:
            a = td["advantage"][i, t]
            w = (mean if s.get("objective") == "gspo" else lp[t] - lo[t]).exp()
            inside = w.detach().clamp(1 - low, 1 + high)
            if s.get("objective") == "cispo":
                loss = -inside * a * lp[t]
            elif s.get("objective") == "dppo":  # against the sampler, also where decoupled
                pi, mu = lp[t].exp().item(), lb[t].exp().item()
                outside = abs(pi - mu) > 0.004 and (pi > mu) == (a > 0)
                loss = -(0.0 if outside else min(pi / mu, 20.0)) * a * lp[t]
            elif s.get("objective") == "vespo":
                log_w = sum((lp[u] - lb[u]).item() for u in at)
                k, scale = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
                loss = -math.exp(scale + k * log_w - scale * math.exp(log_w)) * a * lp[t]
            elif s.get("objective") == "sapo":
                tau = 0.8 if a > 0 else 1.3
                loss = -a * 4 / tau / (1 + (-tau * (w - 1)).exp())
            elif s.get("objective") == "gmpo":  # the sequence's loss, divided among its tokens
                ratios = [(lp[u] - lo[u]).exp() for u in at]
                kept = [r.clamp(max=math.exp(high)) if a > 0 else r.clamp(min=math.exp(-low)) for r in ratios]
                loss = -a * torch.stack(kept).prod() ** (1 / len(at))
            else:
                free = w.clamp(max=s["delta"]) if "delta" in s else w
                best = free * a if free * a <= inside * a else (w.clamp(1 - low, 1 + high) * a)
                if "dual_clip" in s and a < 0 and best < s["dual_clip"] * a:
                    best = s["dual_clip"] * a
                loss = -best
            loss = loss * ((i, t) in chosen)
            if "off_policy_threshold" in s and a < 0:
                loss = loss * float(
                    sum(float(lb[u] - lp[u].detach()) for u in at) / len(at) <= s["off_policy_threshold"]
                )
            rho = math.exp(gap_sum if s.get("tis_level") == "sequence" else float(lo[t] - lb[t]))
            if "tis_cap" in s:
                loss = loss * max(min(rho, s["tis_cap"]), s.get("tis_floor", 0.0))
            if "icepop" in s:
                levels = {"token": float(lo[t] - lb[t]), "sequence": gap_sum / len(at), "product": gap_sum}
                ratio = math.exp(levels[s.get("icepop_level", "token")])
                inside = s["icepop"][0] <= ratio <= s["icepop"][1]
                loss = loss * (float(inside) if "tis_cap" in s else ratio * inside)
            if "entropy_coeff" in s:
                loss = loss - s["entropy_coeff"] * h_all[i, t - 1]
            for coefficient, other in (("kl_to_ref_coeff", ref), ("kl_to_inference_coeff", lb)):
                if coefficient in s:
                    d = lp[t] - other[t]
                    kind = s["kl_estimator"]
                    k3 = (-d).exp() - 1 + d
                    kl = {"k2": d**2 / 2, "k3": k3, "k3+": d**2 / 2 + (k3 - d**2 / 2).detach()}[kind]
                    if s.get("kl_importance_weight"):
                        weight = (lp[t] - lb[t]).exp()
                        kl = kl * (weight if kind == "k3" else weight.detach())
                    loss = loss + s[coefficient] * kl
            total = total + loss * (1 / (len(rows) * length) if s.get("aggregation") == "sequence_mean" else 1 / count)
    return total


VARIANTS: dict[str, dict[str, Any]] = {
    "dapo": {"clip_epsilon": (0.2, 0.28)},
    "cispo": {"objective": "cispo", "clip_epsilon": (0.2, 0.28)},
    "gspo": {"objective": "gspo", "clip_epsilon": (0.05, 0.05), "aggregation": "sequence_mean"},
    "sapo": {"objective": "sapo", "sapo_tau": (0.8, 1.3)},
    "gmpo": {"objective": "gmpo", "clip_epsilon": (0.1, 0.15), "aggregation": "sequence_mean"},
    "dppo": {"objective": "dppo", "dppo": DPPO(low=0.004, high=0.004)},
    "decoupled dppo": {"objective": "dppo", "dppo": DPPO(low=0.004, high=0.004), "decoupled": True},
    "vespo": {"objective": "vespo"},
    "decoupled vespo": {"objective": "vespo", "decoupled": True, "aggregation": "sequence_mean"},
    "dual clip": {"dual_clip": 1.3},
    "delta": {"delta": 1.3},
    "decoupled": {"decoupled": True},
    "tis": {"decoupled": True, "tis_cap": 1.1},
    "tis of sequences": {"decoupled": True, "tis_cap": 1.5, "tis_level": "sequence"},
    "icepop": {"decoupled": True, "icepop": (0.9, 1.2)},
    "off-policy mask": {"off_policy_threshold": 0.05},
    "top entropy": {"top_entropy_quantile": 0.3, "kl_to_ref_coeff": 0.2, "kl_estimator": "k3"},
    "clip-cov": {"clip_cov": 1.0, "clip_cov_bounds": (0.05, 1.0)},
    "both choices": {
        "top_entropy_quantile": 0.6,
        "clip_cov": 1.0,
        "clip_cov_bounds": (0.05, 5.0),
        "entropy_coeff": 0.1,
    },
    "tis with a floor": {"decoupled": True, "tis_cap": 1.1, "tis_floor": 0.95},
    "mask by product": {"decoupled": True, "icepop": (0.9, 1.2), "icepop_level": "product"},
    "sequence mask": {"decoupled": True, "icepop": (0.95, 1.05), "icepop_level": "sequence"},
    "tis and mask": {"decoupled": True, "tis_cap": 1.02, "icepop": (0.94, 1.1), "icepop_level": "sequence"},
    "decoupled cispo with tis": {
        "objective": "cispo",
        "clip_epsilon": (0.2, 0.2),
        "decoupled": True,
        "tis_cap": 1.1,
    },
    "decoupled gspo": {
        "objective": "gspo",
        "decoupled": True,
        "clip_epsilon": (0.1, 0.1),
        "tis_cap": 1.2,
        "tis_level": "sequence",
    },
    "k2": {"kl_to_ref_coeff": 0.2, "kl_estimator": "k2"},
    "k3": {"kl_to_ref_coeff": 0.2, "kl_estimator": "k3"},
    "k3+": {"kl_to_ref_coeff": 0.2, "kl_estimator": "k3+"},
    "both KL terms": {"kl_to_ref_coeff": 0.2, "kl_to_inference_coeff": 0.3, "kl_estimator": "k3"},
    "weighted k2": {"kl_to_ref_coeff": 0.2, "kl_estimator": "k2", "kl_importance_weight": True},
    "weighted k3": {"kl_to_ref_coeff": 0.2, "kl_estimator": "k3", "kl_importance_weight": True},
    "weighted k3+": {"kl_to_ref_coeff": 0.2, "kl_estimator": "k3+", "kl_importance_weight": True, "decoupled": True},
    "entropy": {"entropy_coeff": 0.05},
    "everything": {
        "decoupled": True,
        "tis_cap": 1.2,
        "icepop": (0.8, 1.3),
        "dual_clip": 1.5,
        "entropy_coeff": 0.05,
        "kl_to_ref_coeff": 0.2,
        "kl_to_inference_coeff": 0.1,
        "kl_estimator": "k3+",
        "aggregation": "sequence_mean",
    },
}


@pytest.mark.parametrize("head", ["auto", "recompute"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_autograd_in_float64(tiny, name, head):
    """Loss to 1e-12, gradient to 1e-7 of its norm (Qwen2 computes its norm in float32), and not that of plain GRPO."""
    policy = tiny.Policy(dtype=torch.float64, temperature=0.8)
    td = tiny.as_double(tiny.make_batch(policy, spread=0.35, seed=4))
    noise = 0.15 * torch.randn(td[MASK].shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    td["prox_log_probs", "full"] = (td["log_probs", "full"] + noise) * td[MASK]
    options = VARIANTS[name]
    settings = {"entropy_bonus": "entropy_coeff" in options, "head": head, **options}
    total = GRPOLoss(policy, **settings)(td).total_loss()
    expected = plain(policy, td, options)
    assert total.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-13)
    found, reference = tiny.gradient(policy, total), tiny.gradient(policy, expected)
    assert tiny.relative(found, reference) < 1e-7
    without = tiny.gradient(policy, GRPOLoss(policy, entropy_bonus=False)(td).total_loss())
    assert tiny.relative(without, reference) > 1e-4


@pytest.mark.parametrize("head", ["auto", "recompute"])
@pytest.mark.parametrize(
    "name", ["cispo", "gspo", "gmpo", "sapo", "dppo", "vespo", "k3+", "both KL terms", "weighted k3"]
)
def test_a_token_that_the_policy_bans_has_no_term(tiny, name, head):
    """Its log-prob is -inf: the others' loss and gradient are as without it, and every figure is finite."""
    policy = tiny.Policy(dtype=torch.float64, temperature=0.8, bias=True)
    td = tiny.as_double(tiny.make_batch(policy, spread=0.35, seed=4))
    at = td[MASK][0].nonzero()[1, 0]
    banned = int(td["tokens", "full"][0, at])
    assert int((td["tokens", "full"][td[MASK]] == banned).sum()) == 1
    with torch.no_grad():
        policy.head_bias[banned] = -torch.inf
    out = GRPOLoss(policy, entropy_bonus=False, head=head, **VARIANTS[name])(td)
    expected = plain(policy, td, VARIANTS[name], banned)
    assert out.total_loss().item() == pytest.approx(expected.item(), rel=1e-12)
    found, reference = (
        torch.cat([g.flatten() for g in torch.autograd.grad(total, list(policy.model.parameters()))])
        for total in (out.total_loss(), expected)
    )
    assert tiny.relative(found, reference) < 1e-7
    assert out.num_tokens.item() == int(td[MASK].sum()) - 1
    assert all(torch.isfinite(value).all() for value in out.values())
