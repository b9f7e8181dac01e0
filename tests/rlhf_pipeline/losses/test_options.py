"""Tests of the options of the loss: objectives, corrections, KL, masks, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from rlhf_pipeline import GRPO, GRPOLoss
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.functional.aggregation import token_weights
from rlhf_pipeline.losses.loss_settings import clip_settings

MASK = ("masks", "all_assistant_mask")
LOG_PROBS = ("log_probs", "full")
REF = ("next", "ref_log_probs", "full")


def one_row(tiny, log_probs, behaviour, advantage, **more):
    """A scorer and a batch of one trajectory whose tokens after the first all count."""
    pad = [[0.0, *row] for row in (log_probs, behaviour, advantage)]
    actor = tiny.Scorer([pad[0]])
    mask = [[False] + [True] * len(log_probs)]
    extra = {key: [[0.0, *value]] for key, value in more.items()}
    return actor, tiny.scorer_batch(mask, [pad[1]], [pad[2]], **extra)


def run(actor, td, **options: Any):
    """The output, and the gradient of the summed losses by the scorer's log-probs without the first."""
    actor.zero_grad()
    out = GRPOLoss(actor, entropy_bonus=False, **options)(td)
    out.total_loss().backward()
    return out, actor.values.grad[0, 1:].tolist()


def test_cispo_keeps_the_gradient_of_clipped_tokens(tiny):
    """Ratios 1, e^.5, e^-.5, e^.1 with A = 1: gradients -1, -1.2, -0.8, -1.105, which a peer gives as 0 twice."""
    actor, td = one_row(tiny, [-1.0, -1.0, -1.0, -1.0], [-1.0, -1.5, -0.5, -1.1], [1.0] * 4)
    out, gradient = run(actor, td, objective="cispo", reduction="sum", clip_epsilon=0.2)
    assert gradient == pytest.approx([-1.0, -1.2, -0.8, -math.exp(0.1)])
    assert out.clip_fraction_high.item() == 0.25
    assert out.clip_fraction_low.item() == 0.25
    for options in ({}, {"clip_epsilon": (1.0, 0.2)}):  # as in the paper
        out, gradient = run(actor, td, objective="cispo", reduction="sum", **options)
        assert gradient == pytest.approx([-1.0, -1.2, -math.exp(-0.5), -math.exp(0.1)])
        assert out.clip_fraction_low.item() == 0.0


def test_corrections_leave_the_kl_term_alone(tiny):
    """A token that IcePop drops from the policy loss still pays its KL, and the count stays."""
    actor, td = one_row(tiny, [-1.0, -1.0], [-3.0, -1.0], [1.0, 1.0], prox=[-1.0, -1.0], ref=[-1.5, -1.0])
    out, _ = run(actor, td, decoupled=True, icepop=(0.5, 2.0), kl_to_ref_coeff=1.0, kl_estimator="k2")
    assert out.loss_objective.item() == pytest.approx(-0.5)
    assert out.loss_kl_to_ref.item() == pytest.approx(0.125 / 2)


def test_a_reference_that_is_not_finite_has_no_kl(tiny):
    """A NaN reference log-prob adds nothing to the KL or its gradient, and is not counted in the mean."""
    actor, td = one_row(tiny, [-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], ref=[math.nan, -1.5])
    out, gradient = run(actor, td, kl_to_ref_coeff=1.0, kl_estimator="k2", reduction="sum")
    assert out.kl_to_ref.item() == pytest.approx(0.125)
    assert gradient == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_trust_region_mask(tiny, aggregation):
    """Tokens beyond the threshold leave the loss; the rest carry the count, unless it was fixed before."""
    actor, td = one_row(tiny, [-1.0, -1.0, -1.0], [-1.0, -2.0, -1.0], [1.0, 1.0, 3.0])
    out, gradient = run(actor, td, kl_mask_threshold=0.4, aggregation=aggregation)
    assert out.loss_objective.item() == pytest.approx(-2.0)
    assert gradient == pytest.approx([-0.5, 0.0, -1.5])
    td["loss_weight"] = token_weights(torch.tensor([3]))[:, None] * td[MASK]
    out, _ = run(actor, td, kl_mask_threshold=0.4, aggregation=aggregation)
    assert out.loss_objective.item() == pytest.approx(-4.0 / 3)


def test_masking_strategies(tiny):
    """`rlhf` counts assistant tokens, `sft` all after the prompt, `generic` all but the first."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    td[MASK][0, 6] = False
    total = sum(tiny.completions)
    rows = len(tiny.completions)
    counts: dict[Any, int] = {
        "rlhf": total - 1,
        "sft": total,
        "generic": total + (tiny.prompt - 1) * rows,
    }
    for strategy, count in counts.items():
        out = GRPOLoss(policy, masking_strategy=strategy)(td)
        assert out.num_tokens.item() == count
    del td["num_prompt_tokens"]
    assert GRPOLoss(policy, masking_strategy="sft")(td).num_tokens.item() == total
    del td[MASK]
    with pytest.raises(DataError, match="separate the response from the prompt"):
        GRPOLoss(policy, masking_strategy="sft")(td)
    with pytest.raises(DataError, match="pass 'sft'"):
        GRPOLoss(policy)(td)


def test_temperature_of_the_policy_is_used(tiny):
    """Log-probs are scored at the sampling temperature; an argument overrides it."""
    warm, plain = tiny.Policy(temperature=0.5), tiny.Policy()
    td = tiny.make_batch(warm, spread=0.0)
    exact = GRPOLoss(warm)(td)
    assert exact.kl_approx.abs().item() < 1e-6
    assert exact.ESS.item() == pytest.approx(1.0)
    assert GRPOLoss(plain)(td).kl_approx.abs().item() > 0.01
    assert GRPOLoss(plain, temperature=0.5)(td).kl_approx.abs().item() < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_estimator": "k1"}, "expected gradient of zero"),
        ({"gamma": 0.99}, "no discount"),
        ({"clip_value": 0.2}, "no value network"),
        ({"critic_network": None}, "no critic"),
        ({"advantage_key": "a"}, r"set_keys\(advantage"),
        ({"clip_epsilons": 0.2}, "Did you mean 'clip_epsilon'"),
        ({"objective": "cisp"}, "Did you mean 'cispo'"),
        ({"aggregation": "token"}, "unknown aggregation"),
        ({"reduction": "avg"}, "reduction is 'avg'. Available: mean, none, sum"),
        ({"masking_strategy": "rlhff"}, "Did you mean 'rlhf'"),
        ({"dual_clip": 1.0}, "above 1"),
        ({"delta": 1.1}, "above 1 \\+ clip_high"),
        ({"objective": "cispo", "dual_clip": 3.0}, "objective=cispo does not use"),
        ({"tis_cap": 2.0}, "decoupled=True"),
        ({"head": "fused", "objective": "gspo"}, "need all log-probs first"),
        ({"head": "fused", "reduction": "none"}, "need all log-probs first"),
        ({"samples_mc_entropy": 0}, "at least 1"),
        ({"clip_epsilon": 1.5}, "clip_epsilon"),
        ({"sapo_tau": 1.0}, "sapo_tau is 1.0; it must be a pair"),
        ({"icepop": (0.5, 2.0, 3.0), "decoupled": True}, "one of token, sequence, product"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(tiny, options, message):
    """Arguments that would do nothing or the wrong thing are refused at construction."""
    with pytest.raises(DefinitionError, match=message):
        GRPOLoss(tiny.Policy(), **options)


def test_gamma_of_one_and_no_clip_value_are_what_it_does_anyway(tiny):
    """Values that ask for nothing are accepted."""
    policy = tiny.Policy()
    loss = GRPOLoss(policy, gamma=1.0, clip_value=False, device="cpu", ref_log_prob_padding_side="left")
    assert loss.padding_side == "left"
    assert torch.isfinite(loss(tiny.make_batch(policy)).total_loss())


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("advantage", "MCAdvantage writes it"),
        (LOG_PROBS, "Store the behaviour log-probs"),
        (("tokens", "full"), "scores token ids"),
        (("masks", "all_attention_mask"), "mask of its real tokens"),
    ],
)
def test_a_missing_key_is_named_with_its_remedy(tiny, key, message):
    """The error names the key, says who writes it, and lists what the batch has."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    del td[key]
    with pytest.raises(DataError, match=message):
        GRPOLoss(policy)(td)


def test_wrong_shapes_and_missing_parts_are_named(tiny):
    """A leaf of another length, a KL without reference and dr_grpo without its constant say what to do."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy, ref=False)
    with pytest.raises(DataError, match="RetrieveLogProb"):
        GRPOLoss(policy, kl_to_ref_coeff=0.1)(td)
    assert GRPOLoss(policy, kl_to_ref_coeff=0.0)(td).loss_kl_to_ref is None
    with pytest.raises(DefinitionError, match="max_completion_tokens"):
        GRPOLoss(policy, aggregation="dr_grpo")(td)
    td["loss_weight"] = td[MASK] / 8.0
    assert torch.isfinite(GRPOLoss(policy, aggregation="dr_grpo")(td).total_loss())
    td["advantage"] = td["advantage"][:, :4]
    with pytest.raises(DataError, match=r"\[4, 4\], but the tokens have shape \[4, 9\]"):
        GRPOLoss(policy)(td)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_the_weighted_kl_of_a_policy_has_the_exact_gradient_off_policy(estimator, decoupled):
    """All tokens of a vocabulary, each counted by the sampler's chance: the gradient is that of the KL, exactly."""
    vocab, g = 7, torch.Generator().manual_seed(0)

    class Bandit(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head_weight = torch.nn.Parameter(torch.randn(vocab, 1, generator=g, dtype=torch.float64))

        def hidden_states(self, input_ids, attention_mask):
            return torch.ones(*input_ids.shape, 1, dtype=torch.float64)

    policy = Bandit()
    logits = policy.head_weight.detach()[:, 0]
    ref = (logits + torch.randn(vocab, generator=g, dtype=torch.float64)).log_softmax(0)
    sampler = (logits + 0.7 * torch.randn(vocab, generator=g, dtype=torch.float64)).log_softmax(0)

    def after_a_prompt(values):
        return torch.stack([torch.zeros(vocab, dtype=torch.float64), values], 1)

    mask = torch.tensor([[False, True]] * vocab)
    td = TensorDict(
        {
            "tokens": {"full": torch.tensor([[0, token] for token in range(vocab)])},
            "masks": {"all_assistant_mask": mask, "all_attention_mask": torch.ones_like(mask)},
            "log_probs": {"full": after_a_prompt(sampler)},
            "prox_log_probs": {"full": after_a_prompt(logits.log_softmax(0))},
            "next": {"ref_log_probs": {"full": after_a_prompt(ref)}},
            "advantage": torch.zeros(vocab, 2, dtype=torch.float64),
            "loss_weight": after_a_prompt(sampler.exp()),
        },
        [vocab],
    )
    log_p = policy.head_weight[:, 0].log_softmax(0)
    (want,) = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), policy.head_weight)
    out = GRPOLoss(
        policy,
        entropy_bonus=False,
        kl_to_ref_coeff=1.0,
        kl_estimator=estimator,
        kl_importance_weight=True,
        clip_epsilon=(0.999, 1e6),
        decoupled=decoupled,
    )(td)
    (found,) = torch.autograd.grad(out.loss_kl_to_ref, policy.head_weight)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", [("prox_log_probs", "full"), REF])
def test_a_token_without_a_finite_log_prob_leaves_loss_and_count(tiny, key, bad):
    """A proximal or reference log-prob that is not finite acts as if the mask had left the token out."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    td["prox_log_probs", "full"] = td[LOG_PROBS] + 0.1
    hurt, masked = td.clone(), td.clone()
    hurt[key][0, 5] = bad
    masked[MASK][0, 5] = False
    loss = GRPOLoss(policy, decoupled=True, kl_to_ref_coeff=0.1)
    got, want = loss(hurt), loss(masked)
    for name, value in want.items():
        torch.testing.assert_close(got.get(name), value, rtol=1e-5, atol=1e-6, msg=name)
    assert tiny.relative(tiny.gradient(policy, got.total_loss()), tiny.gradient(policy, want.total_loss())) < 1e-6
    assert torch.isfinite(GRPOLoss(policy, decoupled=True)(hurt).total_loss())


RULES: list[dict[str, Any]] = [
    {"clip_low": 0.0},
    {"clip_low": 1.0},
    {"clip_low": 0.5},
    {"clip_high": 0.0},
    {"dual_clip": 0.5},
    {"dual_clip": 3.0},
    {"delta": 1.2},
    {"delta": 1.3},
    {"tis_cap": 0.0},
    {"icepop_low": 6.0},
    {"entropy_coeff": -0.1},
    {"objective": "cispo", "delta": 2.0},
]


@pytest.mark.parametrize("given", RULES, ids=str)
def test_a_definition_and_a_loss_accept_the_same(tiny, given):
    """What `config.GRPO` refuses `GRPOLoss` refuses, and the other way round."""
    fields: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "icepop_low": 0.5, "icepop": "token", **given}
    options = {name: value for name, value in fields.items() if name not in ("clip_low", "clip_high", "icepop_low")}
    options["icepop"] = (fields["icepop_low"], 5.0)
    clip = (fields["clip_low"], fields["clip_high"])

    def accepts(make) -> bool:
        try:
            make()
        except DefinitionError:
            return False
        return True

    one = accepts(lambda: GRPO(**fields))
    assert one == accepts(lambda: GRPOLoss(tiny.Policy(), clip_epsilon=clip, decoupled=True, **options))
    assert one == (given in ({"clip_low": 0.5}, {"dual_clip": 3.0}, {"delta": 1.3}))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_tokens_of_any_integer_type(tiny, dtype):
    """An actor gets int64, which every embedding takes."""
    actor, td = one_row(tiny, [-1.0, -2.0], [-1.1, -1.5], [1.0, -1.0])
    expected = GRPOLoss(actor, entropy_bonus=False)(td).loss_objective
    td["tokens", "full"] = td["tokens", "full"].to(dtype)
    actor.log_probs, scored = (
        lambda ids, *rest: scored(ids, *rest) if ids.dtype == torch.int64 else None,
        actor.log_probs,
    )
    assert GRPOLoss(actor, entropy_bonus=False)(td).loss_objective == expected
    td["tokens", "full"] = td["tokens", "full"].float()
    with pytest.raises(DataError, match="token ids must be integers"):
        GRPOLoss(actor, entropy_bonus=False)(td)


def test_a_lazy_stack_with_one_advantage_per_trajectory(tiny):
    """As MCAdvantage leaves it where the reward is one number; also next to rows of another length."""
    actor, td = one_row(tiny, [-1.0, -2.0], [-1.1, -1.5], [0.5, 0.5])
    expected = GRPOLoss(actor, entropy_bonus=False)(td).loss_objective
    row = td[0]
    row["advantage"] = torch.tensor(0.5)
    assert GRPOLoss(actor, entropy_bonus=False)(lazy_stack([row])).loss_objective == expected


def test_a_loss_takes_the_settings_of_a_definition(tiny):
    """One object, by which it computes what keywords in TorchRL's spelling give; keywords change single settings."""
    policy = tiny.Policy()
    declared = GRPO(clip_low=0.1, clip_high=0.3, entropy_coeff=0.02, tis_cap=2.0, icepop="sequence", clip_cov=0.5)
    loss = GRPOLoss(policy, declared)
    spelled = GRPOLoss(
        policy,
        clip_epsilon=(0.1, 0.3),
        entropy_coeff=0.02,
        decoupled=True,
        tis_cap=2.0,
        icepop=(0.5, 5.0),
        icepop_level="sequence",
        clip_cov=0.5,
        clip_cov_bounds=(1.0, 5.0),
        sapo_tau=(1.0, 1.05),
    )
    assert loss.settings == spelled.settings
    assert not GRPOLoss(policy, GRPO()).settings.entropy_bonus
    assert GRPOLoss(policy, loss.settings).settings == loss.settings
    other = GRPOLoss(policy, declared, clip_cov=None, dual_clip=3)
    assert (other.settings.clip_cov, other.dual_clip, other.tis_cap) == (None, 3.0, 2.0)
    with pytest.raises(DefinitionError, match=r"does not accept 'clip_hihg'\. Did you mean 'clip_high'"):
        GRPOLoss(policy, declared, clip_hihg=0.3)
    with pytest.raises(DefinitionError, match=r"tis_floor is 3\.0; it must be below tis_cap, 2\.0"):
        GRPOLoss(policy, declared, tis_floor=3.0)


def test_a_setting_that_changes_is_checked(tiny):
    """A coefficient may change between steps, to what a new loss would take; None is the default."""
    loss = GRPOLoss(tiny.Policy(), kl_to_ref_coeff=0.1)
    before = loss.settings
    with pytest.raises(DefinitionError, match=r"dual_clip is 0\.5; it must be above 1"):
        loss.dual_clip = 0.5
    assert loss.settings is before
    loss.kl_to_ref_coeff, loss.clip_epsilon = None, 0.3
    assert (loss.kl_to_ref_coeff, loss.clip_epsilon_low, loss.clip_epsilon_high) == (0.0, 0.3, 0.3)


@pytest.mark.parametrize("epsilon", [(0.1, 0.2, 0.3), -0.1, (1.0, 0.2), (0.2, -0.1)])
def test_impossible_clip_bounds_are_refused(epsilon):
    """A low side of 1 or more, a negative side or three numbers are refused."""
    with pytest.raises(DefinitionError, match="clip_epsilon"):
        clip_settings(epsilon)
