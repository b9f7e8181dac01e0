"""A run in each layout: the same numbers."""

from __future__ import annotations

import pytest

from rlhf_pipeline import GRPO, Collect, CopyDigits, Learn, Pipeline, TinyPolicy, WritePath, token_match
from rlhf_pipeline.run.build import build_models
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.start import run


def pipeline(layout):
    """Three steps with a KL term, prompts of 13 tokens."""
    return Pipeline(
        name="layouts",
        policy=TinyPolicy(hidden_size=16, num_layers=1, num_heads=2),
        prompts=CopyDigits(num_digits=12),
        reward=token_match,
        collect=Collect(prompts_per_rollout=3, group_size=4, max_new_tokens=6),
        write=WritePath(kl_coef=0.05, estimator="dr_grpo"),
        loss=GRPO(entropy_coeff=0.01, kl_to_ref_coeff=0.1),
        learn=Learn(steps=3, lr=1e-2, layout=layout, token_budget=64),
    )


def test_the_reference_is_scored_in_the_layout_of_the_update():
    """Both models of a run go through the same code path."""
    models = build_models(pipeline("packed"), seed=0, device="cpu")
    assert models.reference.scoring_layout == "packed"


@pytest.mark.parametrize("layout", ["packed", "prefix_shared"])
def test_a_run_gives_the_same_metrics_in_every_layout(tmp_path, layout):
    """Loss, KL, entropy and gradient norm of every step agree with those of padded rows; no fallback.

    To 1e-2, because Adam turns the rounding of a gradient near 0 into a whole step.
    """
    rows = {}
    for name in ("padded", layout):
        notices = []
        run(pipeline(name), run_dir=tmp_path / name, on_event=lambda e, kept=notices: kept.append(str(e)))
        rows[name] = list(StepRows(tmp_path / name / "metrics.jsonl"))
        assert not any("does not fit" in text for text in notices)
    assert len(rows[layout]) == 3
    for one, other in zip(rows["padded"], rows[layout], strict=True):
        for key in ("loss", "kl_to_ref", "entropy", "grad_norm", "ess"):
            assert one[key] == pytest.approx(other[key], rel=1e-2, abs=1e-5)
    if layout == "prefix_shared":
        assert all(row["padding_efficiency"] > 1.2 for row in rows[layout])
