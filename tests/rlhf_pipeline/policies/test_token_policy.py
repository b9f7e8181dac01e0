"""Scoring, saving and loading of a policy."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_pipeline import scratch_policy
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError
from rlhf_pipeline.policies.token_policy import TokenPolicy

ROWS = [[5, 6, 7, 8, 9, 10, 11], [1, 20, 1], [33], [40, 41, 42, 43]]

Make = Callable[..., PreTrainedModel]
Oracle = Callable[..., Tensor]


def _padded(side: str, width: int = 9, pad: int = 0) -> tuple[Tensor, Tensor, list[int]]:
    """Return ids, mask and the column at which each row begins."""
    ids = torch.full((len(ROWS), width), pad, dtype=torch.int64)
    mask = torch.zeros(len(ROWS), width, dtype=torch.bool)
    starts = []
    for i, row in enumerate(ROWS):
        start = {"right": 0, "left": width - len(row), "middle": 1}[side]
        ids[i, start : start + len(row)] = torch.tensor(row)
        mask[i, start : start + len(row)] = True
        starts.append(start)
    return ids, mask, starts


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2", "qwen2-tied", "qwen2-sliding", "llama", "mistral", "gemma3_text", "gemma2", "granite"),
        *("phi", "gpt2", "gpt_neox", "opt"),
    ],
)
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_log_probs_equal_a_naive_loop(name: str, side: str, make_model: Make, oracle: Oracle) -> None:
    """Every padding side gives the log-probs of each row alone, in float64, within 1e-5; 0 at padding and at starts."""
    model = make_model(name)
    policy = TokenPolicy(model, temperature=1.3)
    ids, mask, starts = _padded(side, pad={"left": 1, "right": 0, "middle": -100}[side])
    scored = policy.log_probs(ids, mask).detach()
    assert scored.dtype == torch.float32
    for i, row in enumerate(ROWS):
        exact = oracle(model, row, 1.3)
        part = scored[i, starts[i] : starts[i] + len(row)].double()
        assert float((part - exact).abs().max()) < 1e-5
        assert float(part[0]) == 0.0
    assert not scored[~mask].any()


def test_only_the_score_mask_is_scored(make_model: Make) -> None:
    """Positions outside the score mask are 0 and those inside are unchanged; first tokens and padding never count."""
    policy = TokenPolicy(make_model())
    ids, mask, _ = _padded("left")
    everything = policy.log_probs(ids, mask)
    score = torch.zeros_like(mask)
    score[0, 4:6] = True
    score[3, :] = True
    scored = policy.log_probs(ids, mask, score)
    torch.testing.assert_close(scored[score], everything[score], atol=1e-6, rtol=0)
    assert not scored[~score].any()
    nothing = policy.log_probs(ids, mask, torch.zeros_like(mask))
    assert not nothing.any()


def test_the_chunk_size_does_not_matter(make_model: Make) -> None:
    """One row per pass through the head gives the same log-probs."""
    policy = TokenPolicy(make_model())
    ids, mask, _ = _padded("right")
    torch.testing.assert_close(
        policy.log_probs(ids, mask, chunk_size=1), policy.log_probs(ids, mask), atol=1e-6, rtol=0
    )


def test_the_head_sees_only_scored_rows(make_model: Make) -> None:
    """The hidden states handed to the head are as many as the scored tokens."""
    policy = TokenPolicy(make_model())
    ids, mask, _ = _padded("right")
    score = torch.zeros_like(mask)
    score[0, 2:4] = True
    score[1, 0] = True
    found = policy.scoring_rows(ids, mask, score)
    assert found.hidden.shape == (2, 32)
    assert found.targets.tolist() == [7, 8]
    assert list(zip(found.rows.tolist(), found.columns.tolist(), strict=True)) == [(0, 2), (0, 3)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen2-tied", "phi", "granite", "gemma3_text-capped"])
def test_gradients_equal_those_of_full_logits(name: str, side: str, make_model: Make) -> None:
    """Every parameter's gradient equals autograd through the model's own logits, in float64."""
    model = make_model(name).double()
    policy = TokenPolicy(model, temperature=0.7)
    ids, mask, starts = _padded(side)
    weight = torch.linspace(-1, 1, ids.numel(), dtype=torch.float64).reshape(ids.shape)
    (policy.log_probs(ids, mask) * weight).sum().backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(ROWS):
        logits = model(input_ids=torch.tensor([row])).logits[0] / 0.7
        scores = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(row[1:], dtype=torch.int64)[:, None])[:, 0]
        loss = loss + (scores * weight[i, starts[i] + 1 : starts[i] + len(row)]).sum()
    loss.backward()
    for n, p in model.named_parameters():
        assert p.grad is not None
        # log_probs returns float32, so the incoming gradient is rounded to it once.
        torch.testing.assert_close(ours[n], p.grad, atol=1e-6, rtol=1e-5)


def test_hidden_states_are_where_their_tokens_are(make_model: Make) -> None:
    """Head of hidden[t] gives the logits after token t, for both padding sides; zero at padding."""
    model = make_model("phi")
    policy = TokenPolicy(model)
    assert policy.head_bias is not None
    for side in ("left", "right"):
        ids, mask, starts = _padded(side)
        hidden = policy.hidden_states(ids, mask)
        assert hidden.shape == (4, 9, 32)
        assert not hidden[~mask].any()
        logits = hidden @ policy.head_weight.T + policy.head_bias
        for i, row in enumerate(ROWS):
            own = model(input_ids=torch.tensor([row])).logits[0]
            torch.testing.assert_close(logits[i, starts[i] : starts[i] + len(row)], own, atol=1e-4, rtol=1e-5)


def test_low_precision_scores_are_float32_and_near(make_model: Make, oracle: Oracle) -> None:
    """A bfloat16 model gives float32 log-probs, near those of the same weights in float32."""
    policy = TokenPolicy(make_model().bfloat16())
    ids, mask, _ = _padded("left")
    scored = policy.log_probs(ids, mask).detach()
    assert scored.dtype == torch.float32
    exact = TokenPolicy(copy.deepcopy(policy.model).float()).log_probs(ids, mask).detach()
    assert float((scored - exact).abs().mean()) < 0.05
    assert len(set(scored[mask].tolist()) - {0.0}) > 8


def test_dropout_is_off_in_training_mode(make_model: Make) -> None:
    """train() leaves the model in eval mode, so two scores of the same tokens are equal."""
    policy = TokenPolicy(make_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)).train()
    ids, mask, _ = _padded("right")
    assert policy.training
    assert torch.equal(policy.log_probs(ids, mask), policy.log_probs(ids, mask))
    assert not any(m.training for m in policy.model.modules())


@pytest.mark.parametrize("name", ["qwen2", "opt", "gpt2"])
def test_recomputed_activations_change_nothing(name: str, make_model: Make) -> None:
    """With activation checkpointing, scores, gradients and generation are the same, and dropout stays off."""
    changes = {"opt": {"dropout": 0.5, "attention_dropout": 0.5}, "gpt2": {"resid_pdrop": 0.5}}.get(name, {})
    policy = TokenPolicy(make_model(name, **changes))
    ids, mask, _ = _padded("left")
    sampled = policy.generate_groups(ROWS, max_new_tokens=5, seed=0)
    policy.log_probs(ids, mask).sum().backward()
    expected = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    calls = []
    layer = next(m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer))
    policy.checkpoint_activations()
    next(layer.children()).register_forward_hook(lambda *_: calls.append(1))
    scored = policy.train().log_probs(ids, mask)
    scored.sum().backward()
    assert len(calls) == 2
    for n, p in policy.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[n], atol=1e-4, rtol=1e-4)
    again = policy.generate_groups(ROWS, max_new_tokens=5, seed=0)
    assert [c.token_ids for c in again] == [c.token_ids for c in sampled]
    policy.checkpoint_activations(False)
    calls.clear()
    policy.log_probs(ids, mask).sum().backward()
    assert len(calls) == 1


def test_autocast_rounds_no_log_probs(make_model: Make) -> None:
    """Under bfloat16 autocast the head stays in float32, in sampling and in scoring alike."""
    policy = TokenPolicy(make_model())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        completions = policy.generate_groups(ROWS, max_new_tokens=6, seed=0)
        gaps = []
        for row, c in zip(ROWS, completions, strict=True):
            ids = torch.tensor([row + c.token_ids])
            scored = policy.log_probs(ids, torch.ones_like(ids, dtype=torch.bool)).detach()
            gaps.append(float((scored[0, len(row) :] - c.log_probs).abs().mean()))
    # The trunk runs in bfloat16, where batching moves the last bits; rounded logits would be off by ten times as much.
    assert max(gaps) < 0.05
    values = torch.cat([c.log_probs for c in completions])
    assert not torch.equal(values, values.bfloat16().float())


def test_rows_beyond_the_models_positions_are_refused(make_model: Make) -> None:
    """The message has both numbers."""
    policy = TokenPolicy(make_model("gpt2", n_positions=8))
    ids = torch.full((1, 9), 5)
    with pytest.raises(DefinitionError, match="9 tokens; the model has 8 positions"):
        policy.log_probs(ids, torch.ones_like(ids, dtype=torch.bool))
    policy.log_probs(ids, torch.tensor([[False] + [True] * 8]))


def test_bad_shapes_and_temperatures_are_refused(make_model: Make) -> None:
    """Shapes that differ, and temperature 0, say what to do."""
    policy = TokenPolicy(make_model(), temperature=0.0)
    ids = torch.full((2, 3), 5)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with pytest.raises(DefinitionError, match=r"temperature=1\.0"):
        policy.log_probs(ids, mask)
    with pytest.raises(DefinitionError, match=r"attention_mask must have the shape of input_ids, \[2, 3\]"):
        policy.log_probs(ids, mask[:, :2], temperature=1.0)
    with pytest.raises(DefinitionError, match=r"input_ids must have shape \[B, T\]"):
        policy.log_probs(ids[0], mask[0], temperature=1.0)
    with pytest.raises(DefinitionError, match="num_slots is 0"):
        TokenPolicy(make_model(), num_slots=0)
    with pytest.raises(DefinitionError, match="max_new_tokens is 0"):
        TokenPolicy(make_model(), max_new_tokens=0)
    with pytest.raises(DefinitionError, match="temperature is -1"):
        TokenPolicy(make_model(), temperature=-1.0)


def test_a_row_of_padding_only_scores_nothing(make_model: Make) -> None:
    """An empty row, an empty batch: zeros of the right shape."""
    policy = TokenPolicy(make_model())
    ids = torch.full((2, 3), 5)
    mask = torch.tensor([[False] * 3, [True] * 3])
    assert not policy.log_probs(ids, mask)[0].any()
    assert policy.log_probs(ids[:0], mask[:0]).shape == (0, 3)
    assert policy.log_probs(ids, torch.zeros_like(mask)).tolist() == [[0.0] * 3] * 2


def test_end_and_padding_tokens_come_from_the_configs(make_model: Make) -> None:
    """Generation config and tokenizer both count; explicit values win; padding falls back to the end token."""
    model = make_model("qwen2", eos_token_id=[3, 4], pad_token_id=None)
    assert TokenPolicy(model).eos_token_ids == (3, 4)
    assert TokenPolicy(model).pad_token_id == 3
    assert TokenPolicy(model, eos_token_id=7).eos_token_ids == (7,)
    assert TokenPolicy(model, eos_token_id=[]).eos_token_ids == ()
    assert TokenPolicy(model, pad_token_id=9).pad_token_id == 9
    tokenizer = scratch_policy("ab").tokenizer
    assert TokenPolicy(model, tokenizer).eos_token_ids == (1, 3, 4)
    assert TokenPolicy(model, tokenizer).pad_token_id == 0


@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied", "gpt2"])
def test_saved_and_loaded_policies_are_equal(name: str, make_model: Make, tmp_path: Path) -> None:
    """A round trip through a folder keeps every weight, the tokens that end and the scores, bit for bit."""
    policy = TokenPolicy(make_model(name), scratch_policy("0123=").tokenizer)
    policy.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    loaded = TokenPolicy.from_pretrained(tmp_path / "model", temperature=0.5, num_slots=3)
    ids, mask, _ = _padded("right")
    assert torch.equal(policy.log_probs(ids, mask, temperature=0.5), loaded.log_probs(ids, mask))
    assert loaded.eos_token_ids == policy.eos_token_ids
    assert loaded.num_slots == 3
    assert loaded.tokenizer.encode("12=") == policy.tokenizer.encode("12=")


def test_loading_needs_no_network(make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a folder opens no connection."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a connection was opened")

    scratch_policy("0123=").save_pretrained(tmp_path / "model")
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    assert TokenPolicy.from_pretrained(tmp_path / "model").tokenizer is not None


def test_a_folder_without_a_tokenizer_loads(make_model: Make, tmp_path: Path) -> None:
    """Token ids need no tokenizer."""
    TokenPolicy(make_model()).save_pretrained(tmp_path / "model")
    assert TokenPolicy.from_pretrained(str(tmp_path / "model")).tokenizer is None


def test_dtype_and_device_are_applied(make_model: Make, tmp_path: Path) -> None:
    """The dtype is a torch dtype or its name; None keeps the checkpoint's."""
    TokenPolicy(make_model().bfloat16()).save_pretrained(tmp_path / "model")
    assert TokenPolicy.from_pretrained(tmp_path / "model").head_weight.dtype == torch.bfloat16
    wide = TokenPolicy.from_pretrained(tmp_path / "model", dtype="float32", device="cpu")
    assert wide.head_weight.dtype == torch.float32
    with pytest.raises(DefinitionError, match="'float31' is not a torch dtype"):
        TokenPolicy.from_pretrained(tmp_path / "model", dtype="float31")


def test_missing_folders_say_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute, relative and bare names; the message has the path and a command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in (str(tmp_path / "nowhere"), "./nowhere", "nowhere", "runs/nowhere", "a/b/c"):
        with pytest.raises(MissingPathError, match="rlhf-pipeline new-model"):
            TokenPolicy.from_pretrained(name)
    with pytest.raises(FileNotFoundError):
        TokenPolicy.from_pretrained("nowhere")


def test_folders_that_are_not_models_are_refused(make_model: Make, tmp_path: Path) -> None:
    """A file, an empty folder, a config without weights, broken JSON, damaged weights, another kind of model."""
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"no config\.json.*\(its files: nothing\)"):
        TokenPolicy.from_pretrained(empty)
    (empty / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(DataError, match="no weights"):
        TokenPolicy.from_pretrained(empty)
    with pytest.raises(DataError, match="is a file"):
        TokenPolicy.from_pretrained(empty / "config.json")
    good = tmp_path / "good"
    TokenPolicy(make_model()).save_pretrained(good)
    whole = (good / "model.safetensors").read_bytes()
    (good / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"damaged|cannot be loaded"):
        TokenPolicy.from_pretrained(good)
    (good / "model.safetensors").write_bytes(whole)
    (good / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(DataError, match="cannot be loaded as a causal language model"):
        TokenPolicy.from_pretrained(good)
    (good / "config.json").write_text("{")
    with pytest.raises(DataError, match="cannot be loaded as a causal language model"):
        TokenPolicy.from_pretrained(good)


def test_parameters_are_listed_once(make_model: Make) -> None:
    """The trunk and the head are not registered a second time, so optimizers and checkpoints see each weight once."""
    model = make_model("qwen2-tied")
    policy = TokenPolicy(model)
    assert [n for n, _ in policy.named_parameters()] == [f"model.{n}" for n, _ in model.named_parameters()]
    assert list(policy.state_dict()) == [f"model.{n}" for n in model.state_dict()]


def test_a_copy_has_its_own_weights(make_model: Make) -> None:
    """A deepcopy is a policy whose trunk and head are its own: the reference model of a run."""
    policy = TokenPolicy(make_model())
    reference = copy.deepcopy(policy).requires_grad_(False)
    ids, mask, _ = _padded("right")
    before = reference.log_probs(ids, mask)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1)
    assert torch.equal(reference.log_probs(ids, mask), before)
    assert not torch.equal(policy.log_probs(ids, mask), before)
    assert reference.head_weight is not policy.head_weight


def test_the_model_may_be_replaced(make_model: Make) -> None:
    """After `policy.model = other`, scores are the other's."""
    policy, other = TokenPolicy(make_model(seed=0)), make_model(seed=1)
    ids, mask, _ = _padded("right")
    expected = TokenPolicy(other).log_probs(ids, mask)
    policy.model = other
    assert torch.equal(policy.log_probs(ids, mask), expected)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_has_the_name_that_the_model_gives_it(make_model: Make, name: str) -> None:
    """A model whose forward calls its cache as another release of transformers does samples and scores the same."""
    expected, model = TokenPolicy(make_model()), make_model()
    trunk: Any = model.model
    forward, known = trunk.forward, inspect.signature(trunk.forward)
    theirs = next(word for word in known.parameters if word in ("past_key_values", "cache"))

    def renamed(**inputs: Any) -> Any:
        assert name == theirs or theirs not in inputs
        return forward(**{theirs if word == name else word: value for word, value in inputs.items()})

    parameters = [p.replace(name=name) if p.name == theirs else p for p in known.parameters.values()]
    renamed.__signature__ = known.replace(parameters=parameters)  # type: ignore[attr-defined]
    model.model.forward = renamed
    model.forward = lambda input_ids, **inputs: SimpleNamespace(
        logits=model.lm_head(renamed(input_ids=input_ids, **inputs).last_hidden_state)
    )
    policy = TokenPolicy(model)
    ids, mask, _ = _padded("right")
    assert torch.equal(policy.log_probs(ids, mask), expected.log_probs(ids, mask))
    sampled = [p.generate_ragged([[5, 6, 7], [8]], max_new_tokens=6, seed=3) for p in (policy, expected)]
    assert sampled[0].token_ids.tolist() == sampled[1].token_ids.tolist()


def test_unsupported_models_are_refused_by_name(make_model: Make) -> None:
    """ALiBi without positions, models without a head, other modules, and heads that are not known here."""
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.lm_head = torch.ao.nn.quantized.dynamic.Linear(32, 97)
    with pytest.raises(DefinitionError, match=r"its head is quantized \(torch\.ao\.nn.*exclude the head from it"):
        TokenPolicy(model)
    model = make_model()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(DefinitionError, match=r"its head is of type torch\.nn\..*Sequential, not torch\.nn\.Linear"):
        TokenPolicy(model)
    with pytest.raises(DefinitionError, match="BloomForCausalLM: its forward method accepts no position_ids"):
        TokenPolicy(make_model("bloom", attention="eager"))
    with pytest.raises(DefinitionError, match="no language model head"):
        TokenPolicy(make_model().model)
    with pytest.raises(DefinitionError, match="not a transformers model"):
        TokenPolicy(nn.Linear(2, 2))


CHANGED_LOGITS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float | None]] = {
    "times_8": (lambda z: z * 8.0, 8.0, None),
    "by_16": (lambda z: z / 16.0, 0.0625, None),
    "odd_factor": (lambda z: z * 0.19611613513818404, 0.19611613513818404, None),
    "capped": (lambda z: 5.0 * torch.tanh(z / 5.0), 1.0, 5.0),
    "scaled_and_capped": (lambda z: 30.0 * torch.tanh(z * 0.3 / 30.0), 0.3, 30.0),
    "squashed": (torch.tanh, 1.0, 1.0),
}
"""What a model does to its logits, and the factor and the cap of it."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGED_LOGITS)
def test_factor_and_cap_of_the_logits_are_measured(
    make_model: Make, oracle: Oracle, change: str, dtype: torch.dtype
) -> None:
    """No field of the config names them; scores are those of the model's own logits."""
    function, factor, cap = CHANGED_LOGITS[change]
    model = make_model().to(dtype)
    model.lm_head.register_forward_hook(lambda _m, _i, output: function(output))
    policy = TokenPolicy(model)
    exact = 1e-5 if dtype == torch.float32 else 3e-3
    assert policy._parts.scale == pytest.approx(factor, rel=exact)
    assert policy.head_soft_cap == (None if cap is None else pytest.approx(cap, rel=exact))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        found = policy.log_probs(ids, torch.ones_like(ids, dtype=torch.bool))[0].double()
    assert float((found - oracle(model, ids[0].tolist())).abs().max()) < (1e-4 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "changes", "factor"),
    [
        ("hyperclovax", {"logits_scaling": 8.0}, 8.0),
        ("hyperclovax", {"logits_scaling": 0.3}, 0.3),
        ("granite", {"logits_scaling": 8.0}, 0.125),
        ("granite", {"logits_scaling": 0.3}, 1 / 0.3),
        ("cohere", {"logit_scale": 0.0625, "num_key_value_heads": 2}, 0.0625),
        ("falcon_h1", {"lm_head_multiplier": 0.039}, 0.039),
    ],
)
def test_a_factor_has_the_direction_of_the_model_and_the_digits_of_its_config(
    make_model: Make, name: str, changes: dict[str, Any], factor: float, dtype: torch.dtype
) -> None:
    """HyperCLOVAX multiplies by the field of the name by which Granite divides."""
    assert TokenPolicy(make_model(name, **changes).to(dtype))._parts.scale == factor


@pytest.mark.parametrize(
    "function", [lambda z: z.sign() * z.abs().sqrt(), lambda z: z + z.roll(1, -1), lambda z: z.clamp(-3.0, 3.0)]
)
def test_logits_that_are_changed_in_other_ways_are_refused(
    make_model: Make, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """One factor and a soft cap do not explain them."""
    model = make_model()
    model.lm_head.register_forward_hook(lambda _m, _i, output: function(output))
    with pytest.raises(DefinitionError, match=r"the relative difference between its logits and head\(hidden\)"):
        TokenPolicy(model)


def test_a_model_that_looks_ahead_is_refused(make_model: Make) -> None:
    """A decoder whose config leaves is_decoder off attends to later tokens, and what it scores are no log-probs."""
    sizes = {"num_key_value_heads": None, "bos_token_id": 2}
    TokenPolicy(make_model("bert-generation", is_decoder=True, **sizes))
    with pytest.raises(
        DefinitionError, match=r"later tokens change the hidden states of earlier tokens \(relative change: .* causal"
    ):
        TokenPolicy(make_model("bert-generation", **sizes))


def test_a_model_whose_own_forward_pass_fails_is_refused_in_one_sentence(make_model: Make) -> None:
    """The grouped matmul of experts knows no float64; torch's message alone would name no model."""
    model = make_model("mixtral", num_local_experts=4).double()
    with pytest.raises(
        DefinitionError, match=r"MixtralForCausalLM: its forward pass over 64 tokens fails in torch.float6"
    ):
        TokenPolicy(model)


def changed(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    """A model whose own forward pass changes its logits, as code that comes with a checkpoint may."""
    forward = model.forward

    def own(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = own
    return model


def test_a_cap_that_small_logits_do_not_reach_is_measured(make_model: Make) -> None:
    """Of an untrained head, whose logits are far below it."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)
    assert TokenPolicy(changed(model, lambda logits: 30 * torch.tanh(logits / 30))).head_soft_cap == pytest.approx(30.0)


def test_a_factor_that_depends_on_the_position_is_refused(make_model: Make) -> None:
    """Another factor from the ninth position on."""
    factors = torch.ones(64, 1)
    factors[8:] = 1.5
    with pytest.raises(DefinitionError, match=r"the relative difference between its logits and head\(hidden\)"):
        TokenPolicy(changed(make_model(), lambda logits: logits * factors[: logits.shape[1]]))


ROPES: dict[str, dict[str, Any]] = {
    "phi3": {
        "original_max_position_embeddings": 24,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    },
    "llama": {"max_position_embeddings": 24, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
}


@pytest.mark.parametrize("name", ROPES)
def test_a_rotary_embedding_that_depends_on_the_batch_is_refused_past_its_limit(make_model: Make, name: str) -> None:
    """Within the limit a row does not depend on its neighbours; a longer one is refused, and none is sampled."""
    policy = TokenPolicy(make_model(name, **ROPES[name]), eos_token_id=[])
    assert policy.max_positions == 24
    ids = torch.randint(2, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(24) < torch.tensor([[12], [24]])
    together = policy.log_probs(ids, mask)
    alone = policy.log_probs(ids[:1, :12], mask[:1, :12])
    torch.testing.assert_close(together[:1, :12], alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(DefinitionError, match=r"24 positions \(beyond them, its \w+ rotary embedding"):
        policy.log_probs(torch.zeros(1, 25, dtype=torch.int64), torch.ones(1, 25, dtype=torch.bool))
    (completion,) = policy.generate_groups([ids[0, :12].tolist()], seed=0, max_new_tokens=40)
    assert len(completion.token_ids) == 12
    scored = policy.log_probs(
        torch.tensor([[*ids[0, :12].tolist(), *completion.token_ids]]), torch.ones(1, 24, dtype=torch.bool)
    )
    torch.testing.assert_close(scored[0, 12:], torch.as_tensor(completion.log_probs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "limit"), [("deepseek_v32", 12), ("deepseek_v4", 24)])
def test_rows_in_which_attention_chooses_tokens_are_refused(make_model: Make, name: str, limit: int) -> None:
    """An indexer breaks ties by the length of a batch: rows beyond its choice would depend on their neighbours."""
    sizes: dict[str, Any] = {"q_lora_rank": 16, "index_head_dim": 8, "index_n_heads": 2, "moe_intermediate_size": 16}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2}
    if name == "deepseek_v32":
        sizes |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 12}
        sizes |= {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
    else:  # it chooses six blocks of four tokens
        kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
        rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
        sizes |= {"o_lora_rank": 16, "o_groups": 2, "head_dim": 16, "num_key_value_heads": 1, "num_hidden_layers": 3}
        sizes |= {"layer_types": kinds, "mlp_layer_types": ["moe"] * 3, "compress_rates": rates, "index_topk": 6}
    policy = TokenPolicy(make_model(name, attention="eager", **sizes))
    ids = torch.randint(2, 97, (2, limit), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(limit) < torch.tensor([[7], [limit]])
    alone = policy.log_probs(ids[:1, :7], mask[:1, :7])
    torch.testing.assert_close(policy.log_probs(ids, mask)[:1, :7], alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        DefinitionError, match=rf"A row has {limit + 1} tokens; the model has {limit} positions .index_topk"
    ):
        policy.log_probs(torch.zeros(1, limit + 1, dtype=torch.int64), torch.ones(1, limit + 1, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["adapter on the head", "virtual tokens"])
def test_adapters_that_do_not_fit_are_named_with_what_to_do(make_model: Make, kind: str) -> None:
    """An adapter on the head, and one that puts virtual tokens before the prompt."""
    peft = pytest.importorskip("peft")
    if kind == "virtual tokens":
        config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
        message = r"its adapter 'default' \(PromptTuningConfig\) adds virtual tokens"
    else:
        config = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
        message = r"its head has an adapter \(peft\..*merge_and_unload"
    model = peft.get_peft_model(make_model(), config)
    with pytest.raises(DefinitionError, match=message):
        TokenPolicy(model)
