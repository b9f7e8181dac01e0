"""Log-probs equal a naive loop over prefixes to 1e-6 in float32, in every form that a batch may come in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from rlhf_pipeline import CausalLMPolicy, GRPOLoss, Masks, RetrieveLogProb, Tokens
from rlhf_pipeline.data.padding import pad_rows

REF = ("next", "ref_log_probs", "full")
END = 1
# Two turns with a reply between them, a prompt that holds the end token, completions of one token, of an end alone,
# and one that ends in two end tokens.
TURNS = [
    ([5, 6, 7, 8, END, 9, 10, 11, END], [0, 0, 1, 1, 1, 0, 0, 1, 1]),
    ([END, 4, END, 3], [0, 0, 0, 1]),
    ([12, END], [0, 1]),
    ([13, 14, 15, 16, 17, 18, END, END], [0, 0, 0, 0, 1, 1, 1, 1]),
    ([20, 21, 22], [0, 1, 1]),
]


@pytest.fixture(params=["own padding token", "padding is the end token"])
def policy(request: pytest.FixtureRequest, make_model: Any) -> CausalLMPolicy:
    """A policy whose padding token may be its end token."""
    model = make_model("qwen2")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    return CausalLMPolicy(
        model, temperature=0.8, eos_token_id=END, pad_token_id=END if "is the" in request.param else 0
    )


@torch.no_grad()
def loop(policy: CausalLMPolicy, ids: list[int]) -> torch.Tensor:
    """Float32 log-probs [T] of one row, each from a forward pass over its prefix alone; 0 at the first."""
    model: Any = policy.model
    out = [torch.zeros(())]
    for t in range(1, len(ids)):
        logits = model(input_ids=torch.tensor([ids[:t]])).logits[0, -1] / policy.temperature
        out.append(logits.float().log_softmax(-1)[ids[t]])
    return torch.stack(out)


def batch(form: str, pad: int) -> Any:
    """The rows padded on the left or right, as a ragged stack, or with jagged leaves."""
    rows = [torch.tensor(ids) for ids, _ in TURNS]
    said = [torch.tensor(mask, dtype=torch.bool) for _, mask in TURNS]
    real = [torch.ones_like(mask) for mask in said]
    if form == "ragged":
        return lazy_stack(
            [
                TensorDict({"tokens": Tokens(full=r), "masks": Masks(all_attention_mask=m, all_assistant_mask=s)})
                for r, m, s in zip(rows, real, said, strict=True)
            ]  # pyright: ignore[reportArgumentType]
        )
    td = TensorDict(batch_size=[len(rows)])
    if form == "jagged":
        for key, leaves in ((("tokens", "full"), rows), (("masks", "all_assistant_mask"), said)):
            td[key] = torch.nested.nested_tensor(leaves, layout=torch.jagged)
        return td
    side: Any = form
    td["tokens", "full"] = pad_rows(rows, pad_value=pad, side=side)[0]
    td["masks", "all_attention_mask"] = pad_rows(real, side=side)[0].bool()
    td["masks", "all_assistant_mask"] = pad_rows(said, side=side)[0].bool()
    return td


def rows_of(td: Any, key: Any, form: str) -> list[torch.Tensor]:
    """A leaf, row by row, without padding."""
    if form == "ragged":
        return [row[key] for row in td.unbind(0)]
    if form == "jagged":
        return list(td[key].unbind())
    return [row[real] for row, real in zip(td[key], td["masks", "all_attention_mask"], strict=True)]


@pytest.mark.parametrize("form", ["left", "right", "ragged", "jagged"])
def test_every_form_equals_the_loop(policy, form):
    """Scoring a batch, and the write path's transform, give each row what it has alone."""
    td = batch(form, policy.pad_token_id)
    with torch.no_grad():
        scored = [] if form == "jagged" else rows_of(policy(td.clone()), ("log_probs", "full"), form)
    written = rows_of(RetrieveLogProb(policy).inv(td), REF, form)
    for i, (ids, said) in enumerate(TURNS):
        want = loop(policy, ids)
        mask = torch.tensor(said, dtype=torch.bool)
        if scored:
            torch.testing.assert_close(scored[i], want, rtol=0, atol=1e-6)
        torch.testing.assert_close(written[i][mask], want[mask], rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["left", "right", "ragged"])
def test_the_loss_reads_the_same_log_probs(policy, form):
    """With the loop's log-probs as the behaviour policy's, the ratio is 1 at every sampled token of every turn."""
    td = batch(form, policy.pad_token_id)
    found = [loop(policy, ids) for ids, _ in TURNS]
    advantage = [torch.full((len(ids),), 1.0) for ids, _ in TURNS]
    if form == "ragged":
        for row, lp, a in zip(td.unbind(0), found, advantage, strict=True):
            row["log_probs"], row["advantage"] = TensorDict({"full": lp}), a
    else:
        td["log_probs", "full"] = pad_rows(found, side=form)[0]
        td["advantage"] = pad_rows(advantage, side=form)[0]
    out: Any = GRPOLoss(policy, entropy_bonus=False)(td)
    assert float(out.num_tokens) == sum(sum(said) for _, said in TURNS)
    assert abs(float(out.kl_approx)) < 1e-6
    assert out.loss_objective.item() == pytest.approx(-1.0, abs=1e-5)
