"""Top-k, top-p, min-p and stop strings: the exact distribution, its log-probs, and where completions end."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_pipeline import Collect, Pipeline, Prompts, TinyPolicy, scratch_policy, token_match
from rlhf_pipeline.config import GRPO, Learn
from rlhf_pipeline.errors import DefinitionError, UnsupportedError
from rlhf_pipeline.policies.engines.jobs import jobs_of
from rlhf_pipeline.policies.engines.protocol import Request
from rlhf_pipeline.policies.engines.sampling import Truncation, sample_truncated
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.policies.stop_strings import StopStrings
from rlhf_pipeline.run.start import run
from trajectory_store import TrajectoryStore

ALPHABET = string.ascii_letters + string.digits + "=+"
CUT = Truncation(top_k=20, top_p=0.8)
HEAT = 0.7


def peaked(seed: int = 0) -> Any:
    """A policy whose distributions are far from uniform."""
    policy = scratch_policy(ALPHABET, hidden_size=32, num_layers=2, num_heads=2, seed=seed)
    with torch.no_grad():
        policy.head_weight.mul_(8)
    return policy


def processed(logits: torch.Tensor, cut: Truncation, temperature: float) -> torch.Tensor:
    """The exact processed distribution in float64, token by token, `[V]`."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = probs.argsort(descending=True).tolist()
    kept = order[: cut.top_k or len(order)]
    total, before, support = float(probs[kept].sum()), 0.0, []
    for token in kept:
        if before < cut.top_p * total and probs[token] >= cut.min_p * probs[order[0]]:
            support.append(token)
        before += float(probs[token])
    out = torch.zeros_like(probs)
    out[support] = probs[support] / probs[support].sum()
    return out


@pytest.mark.parametrize(
    "cut", [CUT, Truncation(top_k=5), Truncation(top_p=0.5), Truncation(min_p=0.2), Truncation(top_p=1e-9)]
)
def test_log_probs_and_mass_are_those_of_the_processed_distribution(cut: Truncation) -> None:
    """Against float64, for uniform numbers over the whole range: support, log-probs, and the mass beside them."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2
    exact = processed(logits, cut, HEAT)
    uniform = torch.linspace(0, 1, 2001, dtype=torch.float64)
    tokens, log_probs, log_mass = sample_truncated(logits.repeat(2001, 1), uniform, HEAT, cut)
    assert {*tokens.tolist()} == {*exact.nonzero().flatten().tolist()}
    torch.testing.assert_close(log_probs.double(), exact.log()[tokens], atol=2e-6, rtol=0)
    whole = torch.log_softmax(logits.double() / HEAT, -1)[tokens]
    torch.testing.assert_close((log_probs + log_mass).double(), whole, atol=2e-6, rtol=0)
    shares = torch.bincount(tokens, minlength=50) / 2001
    torch.testing.assert_close(shares.double(), exact, atol=1e-3, rtol=0)


def test_the_engine_draws_from_the_exact_processed_distribution() -> None:
    """Chi-square of the first token over 20 seeds, pooled and seed by seed, at top-p 0.8, top-k 20, temperature 0.7."""
    policy, prompt = peaked(), [1, 2, 3]
    model: Any = policy.model
    logits = model(torch.tensor([prompt])).logits[0, -1].detach()
    exact = processed(logits, CUT, HEAT).numpy()
    support = exact > 0
    assert 3 < support.sum() <= 20
    engine = SlotEngine(policy._parts, num_slots=500)
    counts = np.zeros((20, len(exact)))
    for seed in range(20):
        request = Request(
            prompts=[prompt], group_size=500, max_new_tokens=1, temperature=HEAT, seed=seed, truncation=CUT
        )
        counts[seed] = np.bincount(engine.generate(request).token_ids, minlength=len(exact))
    assert not counts[:, ~support].any()
    expected = 500 * exact[support]
    by_seed = ((counts[:, support] - expected) ** 2 / expected).sum(1)
    pooled = ((counts.sum(0)[support] - 20 * expected) ** 2 / (20 * expected)).sum()
    df = int(support.sum()) - 1
    assert _p_value(pooled, df) > 0.01
    assert _p_value(by_seed.sum(), 20 * df) > 0.01


def _p_value(chi_square: float, degrees: int) -> float:
    """Return the probability of a larger chi-square."""
    half = torch.tensor([degrees / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_ratios_of_unchanged_weights_are_one() -> None:
    """Scores against what the engine tells: mean 1 within 1e-5, where the processed log-probs alone are far from it."""
    policy = peaked()
    policy.engine = SlotEngine(policy._parts, num_slots=16)
    found = policy.generate_ragged(
        [[1, 2, 3], [4, 5]], group_size=16, max_new_tokens=12, temperature=HEAT, seed=0, truncation=CUT
    )
    rows = [[*([1, 2, 3], [4, 5])[item.prompt_index], *item.token_ids] for item in found]
    starts = [3 if item.prompt_index == 0 else 2 for item in found]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
    said = torch.tensor(
        [[start <= i < len(row) for i in range(width)] for row, start in zip(rows, starts, strict=True)]
    )
    scores = policy.log_probs(ids, mask, said, temperature=HEAT)[said].detach().numpy()
    ratios = np.exp(scores - (found.log_probs + found.support_log_mass))
    assert abs(ratios.mean() - 1) < 1e-5
    assert np.abs(ratios - 1).max() < 1e-4
    assert np.exp(scores - found.log_probs).mean() < 0.95


def test_a_run_stores_the_mass_and_its_first_step_has_ratio_one(tmp_path: Path) -> None:
    """The store keeps the mass of every sampled token, and the learner sees unchanged weights as unchanged."""
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
    asked = Pipeline(
        name="cut",
        policy=TinyPolicy(alphabet=ALPHABET, hidden_size=16, num_layers=1, num_heads=2),
        prompts=Prompts(rows=rows, as_chat=False),
        reward=token_match,
        collect=Collect(
            prompts_per_rollout=4, group_size=4, max_new_tokens=6, temperature=HEAT, top_p=0.8, top_k=20, min_p=0.01
        ),
        loss=GRPO(kl_to_ref_coeff=0.0),
        learn=Learn(steps=1),
    )
    notices: list[Any] = []
    run(asked, run_dir=tmp_path / "run", on_event=notices.append)
    assert not [event for event in notices if "log-probs" in getattr(event, "message", "")]
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        found = store.read(store.ids(), ["log_probs", "support_log_mass", "assistant_mask"])
    for log_probs, mass, said in zip(*found.values(), strict=True):
        said = np.asarray(said, bool)
        assert (mass[said] < -0.1).all()
        assert (mass[~said] == 0).all()
        assert (log_probs[said] <= mass[said] + 1e-6).all()


def test_truncation_where_its_mass_is_unknown_is_refused() -> None:
    """In a definition, and by what makes requests of vLLM."""
    with pytest.raises(DefinitionError, match="top_k, top_p and min_p need engine=slots, but engine is vllm"):
        Collect(engine="vllm", top_p=0.9)
    with pytest.raises(UnsupportedError, match=r"Use collect\.engine=slots"):
        jobs_of(Request(prompts=[[1]], truncation=CUT), np.array([1]), most=None)
    with pytest.raises(DefinitionError, match=r"top_p is 1\.5"):
        Truncation(top_p=1.5)


def test_a_stop_string_ends_a_completion_at_the_token_that_completes_it() -> None:
    """Tokens, log-probs and their number are those of the uncut completion up to there; `ended` gets the same."""
    policy = peaked()
    policy.engine = SlotEngine(policy._parts, num_slots=8)
    how: dict[str, Any] = {"group_size": 16, "max_new_tokens": 40, "temperature": 1.5, "seed": 5}
    whole = list(policy.generate_ragged([[1, 2], [3]], **how))
    texts = [policy.tokenizer.decode(item.token_ids) for item in whole]
    stop = [texts[0][2:4], texts[3][5]]
    told: dict[int, list[int]] = {}
    cut = list(policy.generate_ragged([[1, 2], [3]], stop=stop, ended=lambda i, ids: told.update({i: [*ids]}), **how))
    num_cut = 0
    for index, (before, after) in enumerate(zip(whole, cut, strict=True)):
        so_far = [policy.tokenizer.decode(before.token_ids[: n + 1]) for n in range(len(before.token_ids))]
        ends = [n + 1 for n, text in enumerate(so_far) if any(one in text for one in stop)]
        wanted = ends[0] if ends else len(before.token_ids)
        assert after.token_ids == before.token_ids[:wanted] == told[index]
        torch.testing.assert_close(after.log_probs, before.log_probs[:wanted], atol=1e-5, rtol=0)
        assert after.finish_reason == ("stop" if ends else before.finish_reason)
        num_cut += bool(ends)
    assert num_cut >= 2


def test_stop_strings_over_several_tokens_and_bytes() -> None:
    """The token that completes the text is the last one; the shown text ends before it."""
    tokenizer = scratch_policy("ab=").tokenizer
    stops = StopStrings(tokenizer, ["=b", "bb"])
    ids = tokenizer.encode("aa=bbb")
    assert (stops.length(ids), stops.length(tokenizer.encode("ab=a"))) == (4, 4)
    lengths, ended = stops.cuts(np.array([*ids, *ids[:2], *ids[2:4]]), np.array([6, 2, 2]))
    assert (lengths.tolist(), ended.tolist()) == ([4, 2, 2], [True, False, True])
    assert (stops.without("aa=b"), stops.without("aab")) == ("aa", "aab")
    with pytest.raises(DefinitionError, match="none may be empty"):
        StopStrings(tokenizer, [""])
