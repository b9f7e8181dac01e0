"""Tests of the kinds of actors, and of parity with TorchRL's loss where TorchRL is right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.objectives import llm

from rlhf_pipeline import CausalLMPolicy, GRPOLoss
from rlhf_pipeline.errors import DataError, DefinitionError

MASK = ("masks", "all_assistant_mask")
PeerGRPOLoss: Any = llm.GRPOLoss


class ScoreActor(nn.Module):
    """Gives log-probs and nothing else."""

    def __init__(self, tiny, policy):
        super().__init__()
        self.tiny, self.policy = tiny, policy

    def log_probs(self, input_ids, attention_mask, score_mask):
        """Log-probs [B, T]."""
        return self.tiny.log_probs_of(self.policy, input_ids, attention_mask)[0]


class DistActor(nn.Module):
    """TorchRL's surface: a masked categorical over the tokens, aligned with them."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def _get_rlhf_dist(self, td) -> Any:
        from torchrl.modules.distributions.discrete import LLMMaskedCategorical

        tokens, attention = td["tokens", "full"], td["masks", "all_attention_mask"]
        logits = self.policy(tokens, attention)
        logits = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        return LLMMaskedCategorical(logits=logits, mask=td[MASK])

    def get_dist(self, td, **kwargs):
        """The same, under TorchRL's other name."""
        return self._get_rlhf_dist(td)


def sequential(policy) -> Any:
    """TorchRL's documented actor: a `ProbabilisticTensorDictSequential`, aligned with the tokens."""

    def aligned(tokens, attention):
        logits = policy(tokens, attention)
        return torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)

    inputs = [("tokens", "full"), ("masks", "all_attention_mask")]
    return ProbabilisticTensorDictSequential(
        TensorDictModule(aligned, in_keys=inputs, out_keys=["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["sampled"], distribution_class=torch.distributions.Categorical),
    )


def actors(tiny, policy):
    """Every kind of actor around the same weights."""
    return {
        "CausalLMPolicy": CausalLMPolicy(policy.model),
        "transformers": policy.model,
        "log_probs": ScoreActor(tiny, policy),
        "get_dist": DistActor(policy),
        "sequential": sequential(policy),
        "logits": lambda **inputs: policy.model(**inputs),
        "logits tensor": lambda **inputs: policy(**inputs),
    }


@pytest.mark.parametrize(
    "kind", ["CausalLMPolicy", "transformers", "log_probs", "get_dist", "sequential", "logits", "logits tensor"]
)
def test_every_kind_of_actor_gives_the_same_loss_and_gradient(tiny, kind):
    """Hidden states, a transformers model, scores, a distribution and logits all agree."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    bonus = kind != "log_probs"
    want = GRPOLoss(policy, entropy_bonus=bonus, kl_to_ref_coeff=0.1)(td)
    gradient = tiny.gradient(policy, want.total_loss())
    actor = actors(tiny, policy)[kind]
    loss = GRPOLoss(None, entropy_bonus=bonus, kl_to_ref_coeff=0.1)
    if isinstance(actor, nn.Module):
        loss = GRPOLoss(actor, entropy_bonus=bonus, kl_to_ref_coeff=0.1)
    else:
        object.__setattr__(loss, "actor_network", actor)
    got = loss(td)
    for name, value in got.items():
        if value is not None:
            torch.testing.assert_close(value, want.get(name), rtol=1e-4, atol=1e-5, msg=name)
    assert tiny.relative(tiny.gradient(policy, got.total_loss()), gradient) < 1e-5


def test_scores_without_entropy_refuse_the_bonus(tiny):
    """An actor that gives log-probs only cannot have an entropy bonus, and is told so."""
    policy = tiny.Policy()
    with pytest.raises(DefinitionError, match="entropy_bonus=False"):
        GRPOLoss(ScoreActor(tiny, policy))(tiny.make_batch(policy))


def test_an_actor_of_no_kind_is_refused(tiny):
    """The error lists what would do."""
    loss = GRPOLoss(None)
    with pytest.raises(DefinitionError, match="GRPOLoss needs hidden_states"):
        loss(tiny.make_batch(tiny.Policy()))


def test_an_actor_with_another_padding_is_refused(tiny):
    """Scores of another shape than the tokens are named with the likely cause."""
    actor = tiny.Scorer(torch.zeros(4, 5))
    with pytest.raises(DataError, match="pad on the left"):
        GRPOLoss(actor, entropy_bonus=False)(tiny.make_batch(tiny.Policy()))


def test_a_distribution_without_closed_entropy_is_sampled(tiny):
    """`samples_mc_entropy` samples stand in for an entropy that has no closed form."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    exact = GRPOLoss(DistActor(policy))(td).entropy.item()

    class Sampled(DistActor):
        def _get_rlhf_dist(self, td):
            dist = super()._get_rlhf_dist(td)
            plain = torch.distributions.Categorical(logits=dist.logits)

            def entropy():
                raise NotImplementedError

            return SimpleNamespace(log_prob=plain.log_prob, sample=plain.sample, entropy=entropy)

    torch.manual_seed(0)
    out = GRPOLoss(Sampled(policy), samples_mc_entropy=400)(td)
    assert out.entropy.item() == pytest.approx(exact, rel=0.05)


def peer_batch(td):
    """TorchRL wants a trailing one on the advantage."""
    out = td.clone()
    out["advantage"] = out["advantage"][..., None]
    return out


@pytest.mark.peer
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
@pytest.mark.parametrize("clip", [0.2, (0.1, 0.28)])
def test_objective_and_gradient_equal_torchrl(tiny, clip, aggregation):
    """On a padded batch without empty completions TorchRL's objective, ESS and gradient are ours."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)[torch.tensor([0, 1, 3])]
    peer = PeerGRPOLoss(
        DistActor(policy),
        clip_epsilon=clip,
        aggregation=aggregation,
        entropy_bonus=False,
        masking_strategy="rlhf",
    )
    want = peer(peer_batch(td))
    got = GRPOLoss(policy, clip_epsilon=clip, aggregation=aggregation, entropy_bonus=False)(td)
    torch.testing.assert_close(got.loss_objective, want.loss_objective.squeeze(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.ESS, want.ESS, rtol=1e-5, atol=1e-6)
    ours = tiny.gradient(policy, got.total_loss())
    theirs = tiny.gradient(policy, want.loss_objective.sum())
    assert tiny.relative(ours, theirs) < 1e-5


class Biased(nn.Module):
    """An actor of one's own, with a transformers model inside and something of its own on top."""

    def __init__(self, policy):
        super().__init__()
        self.model = policy.model
        self.delta = nn.Parameter(torch.randn(61, generator=torch.Generator().manual_seed(1)))

    def logits(self, input_ids, attention_mask, position_ids=None):
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids}
        return self.model(input_ids=input_ids, **inputs).logits + self.delta


class OwnForward(Biased):
    """It gives logits."""

    def forward(self, input_ids, attention_mask, position_ids=None):
        return self.logits(input_ids, attention_mask, position_ids)


class OwnDist(OwnForward):
    """It gives a distribution, which counts before its logits."""

    def forward(self, *args, **kwargs):
        raise AssertionError("its own distribution counts")

    def get_dist(self, td, **kwargs):
        logits = self.logits(td["tokens", "full"], td["masks", "all_attention_mask"])
        return torch.distributions.Categorical(
            logits=torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1), validate_args=False
        )


class OwnScores(OwnDist):
    """It gives log-probs, which count before all else."""

    def get_dist(self, td, **kwargs):
        raise AssertionError("its own log-probs count")

    def log_probs(self, input_ids, attention_mask, score_mask):
        log_p = self.logits(input_ids, attention_mask)[:, :-1].log_softmax(-1)
        chosen = log_p.gather(2, input_ids[:, 1:, None])[..., 0]
        return torch.cat([torch.zeros_like(chosen[:, :1]), chosen], 1)


@pytest.mark.parametrize("kind", [OwnForward, OwnDist, OwnScores])
def test_what_an_actor_defines_itself_counts(tiny, kind):
    """A transformers model inside an actor is no way round it: its own parameters get their gradient."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    actor = kind(policy)
    total = GRPOLoss(actor, entropy_bonus=False)(td).total_loss()
    attention = td["masks", "all_attention_mask"]
    log_p = actor.logits(td["tokens", "full"], attention)[:, :-1].log_softmax(-1)
    lp = log_p.gather(2, td["tokens", "full"][:, 1:, None])[..., 0]
    w = (lp - td["log_probs", "full"][:, 1:]).exp()
    a, mask = td["advantage"][:, 1:], td[MASK][:, 1:]
    want = -torch.minimum(w * a, w.clamp(0.8, 1.2) * a)[mask].mean()
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-6)
    found, expected = (torch.autograd.grad(x, actor.delta, retain_graph=True)[0] for x in (total, want))
    assert expected.abs().sum() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_policy_that_scores_in_its_own_way_is_asked(tiny):
    """A subclass of the policy with log-probs of its own is scored by them."""

    class Sharper(CausalLMPolicy):
        def log_probs(self, *args, **kwargs):
            return super().log_probs(*args, **kwargs) * 1.5

    policy = tiny.Policy()
    td = tiny.make_batch(policy, spread=0.0)
    plain = GRPOLoss(CausalLMPolicy(policy.model), entropy_bonus=False)(td)
    sharper = GRPOLoss(Sharper(policy.model), entropy_bonus=False)(td)
    assert plain.kl_approx.abs().item() < 1e-5
    assert sharper.kl_approx.item() > 0.1


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["logits", "head"])
def test_a_banned_token_leaves_loss_and_entropy_finite(tiny, kind, entropy_coeff):
    """Logits of -inf, and a head bias of -inf: loss, entropy and gradient are finite and those of the others."""
    policy = tiny.Policy(bias=True)
    td = tiny.make_batch(policy)
    banned = int(td["tokens", "full"][0, 0])  # in a prompt only
    td["tokens", "full"] = torch.where(td[MASK] & (td["tokens", "full"] == banned), 7, td["tokens", "full"])
    with torch.no_grad():
        policy.head_bias[banned] = -torch.inf
    actor = policy if kind == "head" else OwnLogits(policy)
    out = GRPOLoss(actor, entropy_coeff=entropy_coeff)(td)
    log_p = policy(td["tokens", "full"], td["masks", "all_attention_mask"])[:, :-1].log_softmax(-1)
    log_p = torch.cat([log_p[..., :banned], log_p[..., banned + 1 :]], -1)[td[MASK][:, 1:]]
    assert out.entropy.item() == pytest.approx(-(log_p.exp() * log_p).sum(-1).mean().item(), rel=1e-5)
    assert torch.isfinite(tiny.gradient(policy, out.total_loss())).all()


class OwnLogits(nn.Module):
    """Logits and nothing else."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, input_ids, attention_mask):
        return self.policy(input_ids, attention_mask)


def decoder(kind: str) -> Any:
    """A model without position ids, and one with a recurrent state; both are scored through their logits or states."""
    import transformers as tf

    torch.manual_seed(0)
    if kind == "bart":
        sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
        config = tf.BartConfig(vocab_size=61, **sizes, is_decoder=True, is_encoder_decoder=False)
        model: Any = tf.BartForCausalLM(config)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
        model = tf.RecurrentGemmaForCausalLM(
            tf.RecurrentGemmaConfig(vocab_size=61, **sizes, lru_width=16, attention_window_size=8)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.eval()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bart", "recurrent"])
def test_padding_on_either_side_is_seen_by_no_token(tiny, kind, side):
    """Loss and gradient are those of each trajectory alone, without padding."""
    model = decoder(kind)
    td = tiny.make_batch(tiny.Policy(), ref=False)[torch.tensor([0, 1, 3])]
    lengths = td["masks", "all_attention_mask"].sum(1).tolist()
    count, want = int(td[MASK].sum()), torch.zeros(())
    for row, length in zip(td, lengths, strict=True):
        tokens = row["tokens", "full"][:length]
        lp = model(input_ids=tokens[None]).logits[0, :-1].float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        keep, a = row[MASK][1:length], row["advantage"][1:length]
        w = (lp - row["log_probs", "full"][1:length]).exp()
        want = want - torch.minimum(w * a, w.clamp(0.8, 1.2) * a)[keep].sum() / count
    if side == "left":
        for key in list(td.keys(include_nested=True, leaves_only=True)):
            if td[key].ndim == 2:
                rows = zip(td[key], lengths, strict=True)
                td[key] = torch.stack([row.roll(len(row) - n) for row, n in rows])
    total = GRPOLoss(model, entropy_bonus=False)(td).total_loss()
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5)
    assert tiny.relative(tiny.gradient(model, total), tiny.gradient(model, want)) < 1e-3


@pytest.mark.parametrize(
    ("kind", "message"),
    [("T5", "encoder-decoder"), ("XLNet", "permuted order"), ("Bert", r"not causal.*is_decoder = True")],
)
def test_models_that_do_not_predict_forward_are_named(tiny, kind, message):
    """An encoder-decoder, a permuting and a bidirectional model are refused before they give a number."""
    import transformers as tf

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    models = {
        "T5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        "XLNet": lambda: tf.XLNetLMHeadModel(tf.XLNetConfig(vocab_size=61, d_model=16, n_layer=1, n_head=2)),
        "Bert": lambda: tf.BertLMHeadModel(tf.BertConfig(vocab_size=61, **sizes)),
    }
    with pytest.raises(DefinitionError, match=message):
        GRPOLoss(models[kind](), entropy_bonus=False)(tiny.make_batch(tiny.Policy()))


def test_logits_of_another_length_than_the_tokens_are_named(tiny):
    """A model that puts virtual tokens before the prompt does not line up with its tokens."""

    class Longer(OwnLogits):
        def forward(self, input_ids, attention_mask):
            return self.policy(input_ids, attention_mask).repeat_interleave(2, 1)

    with pytest.raises(DataError, match="virtual tokens"):
        GRPOLoss(Longer(tiny.Policy()), entropy_bonus=False)(tiny.make_batch(tiny.Policy()))
