from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from safetensors.torch import load_file

from rlhf_pipeline import (
    GRPO,
    Pipeline,
    PretrainedPolicy,
    override,
    scratch_policy,
)
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.events import Event, Notice
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import newest, tiny

pipeline = functools.partial(tiny, policy__num_layers="2", loss__entropy_coeff="0", learn__steps="4")


def unexpected(events: list[Event]) -> list[str]:
    """Return the notices, but for the one that a model which never hits its target has groups without spread."""
    said = [event.message for event in events if isinstance(event, Notice)]
    return [
        message for message in said if "every advantage is 0, because no group has two different rewards" not in message
    ]


@pytest.fixture
def in_bfloat16(tmp_path) -> Pipeline:
    scratch_policy("0123456789=", hidden_size=16, num_layers=2, num_heads=2, seed=0).save_pretrained(tmp_path / "model")
    policy = PretrainedPolicy(path=str(tmp_path / "model"), dtype="bfloat16")
    return dataclasses.replace(pipeline(learn__lr="1e-4"), policy=policy)


def test_a_bfloat16_run_keeps_float32_masters_and_resumes_bit_for_bit(tmp_path, in_bfloat16):
    """Weights are saved in bfloat16, masters in float32, each weight is its master rounded, and a resume is exact."""
    events: list[Event] = []
    run(in_bfloat16, run_dir=tmp_path / "straight", on_event=events.append)
    assert unexpected(events) == []
    run(override(in_bfloat16, "learn.steps", "3"), run_dir=tmp_path / "run")
    run(in_bfloat16, run_dir=tmp_path / "run", resume=True)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest(tmp_path / "run") / name).read_bytes() == (newest(tmp_path / "straight") / name).read_bytes()
    weights = load_file(newest(tmp_path / "run") / "model.safetensors")
    saved = load_file(newest(tmp_path / "run") / "optimizer.safetensors")
    masters = {name.removesuffix("/master"): value for name, value in saved.items() if name.endswith("/master")}
    assert {value.dtype for value in masters.values()} == {torch.float32}
    moved = 0
    for name, master in masters.items():
        if name in weights:  # a tied head is saved once
            assert torch.equal(weights[name], master.bfloat16())
            moved += int((master != master.bfloat16().float()).sum())
    assert moved > 0  # what bfloat16 alone would have lost


def test_recomputed_activations_give_the_same_run(tmp_path):
    """With activation checkpointing the weights come out the same, bit for bit on a CPU."""
    run(pipeline(), run_dir=tmp_path / "kept")
    run(pipeline(learn__activation_checkpointing="true"), run_dir=tmp_path / "recomputed")
    files = [newest(tmp_path / name) / "model.safetensors" for name in ("kept", "recomputed")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_moving_reference_is_in_the_checkpoint(tmp_path):
    """A reference that follows the policy changes what is learned, and a stopped run goes on from where it was."""
    changes = {"write__kl_coef": "0.5", "learn__epochs": "1"}
    moving = changes | {"learn__reference_every": "1", "learn__reference_rate": "0.5"}
    run(pipeline(**changes), run_dir=tmp_path / "frozen")
    run(pipeline(**moving), run_dir=tmp_path / "straight")
    run(pipeline(**moving, learn__steps="3"), run_dir=tmp_path / "run")
    run(pipeline(**moving), run_dir=tmp_path / "run", resume=True)
    found = {
        name: (newest(tmp_path / name) / "model.safetensors").read_bytes() for name in ("frozen", "straight", "run")
    }
    assert found["run"] == found["straight"] != found["frozen"]
    kl = {
        name: [row["kl_k1"] for row in StepRows(tmp_path / name / "metrics.jsonl")] for name in ("frozen", "straight")
    }
    assert abs(kl["straight"][-1]) < abs(kl["frozen"][-1])


@pytest.mark.parametrize(
    "changes",
    [
        {"loss__objective": "cispo"},
        {"loss__objective": "gspo", "loss__clip_low": "3e-4", "loss__clip_high": "4e-4"},
        {
            "loss__dual_clip": "3",
            "loss__delta": "5",
            "loss__kl_to_ref_coeff": "0.01",
            "loss__kl_importance_weight": "true",
        },
        {"loss__tis_cap": "2", "loss__icepop": "sequence", "learn__layout": "prefix_shared"},
    ],
)
def test_every_loss_runs_from_a_definition(tmp_path, changes):
    """Objectives, bounds and corrections are fields of the definition; the sampler agrees with the policy."""
    events: list[Event] = []
    made = pipeline(**changes, loss__entropy_coeff="0.01", learn__steps="2")
    run(made, run_dir=tmp_path / "run", on_event=events.append)
    rows = list(StepRows(tmp_path / "run" / "metrics.jsonl"))
    assert all(row["grad_norm"] > 0 for row in rows)
    assert unexpected(events) == []


def test_losses_that_cannot_be_are_refused():
    """Bounds without their pair, or of an objective that has none."""
    for changes, message in (
        ({"loss__icepop_low": "6"}, "between 0 and icepop_high"),
        ({"loss__delta": "1.1"}, "above 1 \\+ clip_high"),
    ):
        with pytest.raises(DefinitionError, match=message):
            pipeline(**changes)
    with pytest.raises(DefinitionError, match="which objective=cispo does not use"):
        GRPO(objective="cispo", dual_clip=3.0)
