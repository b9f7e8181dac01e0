"""A run that begins from another run's checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rlhf_pipeline.cli import main
from rlhf_pipeline.errors import MissingPathError
from rlhf_pipeline.run.branch import begin_from, checkpoint_named
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.record import Setup
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import newest, tiny, weights


def branched(path, source, **changes: str):
    pipeline = tiny(**changes)
    setup = Setup(pipeline=pipeline, definition="", overrides=(), seed=3, device="cpu")
    begin_from(*checkpoint_named(source), RunFolder(path), setup)
    return pipeline


@pytest.mark.parametrize("lora", [{}, {"policy__lora_rank": "4"}], ids=["whole", "lora"])
def test_a_new_run_begins_with_the_weights_of_a_checkpoint(tmp_path, lora):
    """Step 0 has the weights and moments of the first run's step 2; other settings may differ; it can be resumed."""
    run(tiny(learn__steps="2", learn__checkpoint_every="1", **lora), run_dir=tmp_path / "first")
    pipeline = branched(tmp_path / "second", f"{tmp_path / 'first'}@2", learn__steps="2", learn__lr="1e-3", **lora)
    for name in [path.name for path in newest(tmp_path / "first").glob("*.safetensors")]:
        if name.startswith(("uses", "proximal")):
            continue
        before = load_file(newest(tmp_path / "first") / name)
        now = load_file(newest(tmp_path / "second") / name)
        assert all(torch.equal(before[key], now[key]) for key in before)
    run(pipeline, run_dir=tmp_path / "second", seed=3, resume=True)
    assert [row["step"] for row in RunFolder(tmp_path / "second").metrics] == [1, 2]
    recorded = json.loads((tmp_path / "second" / "config.json").read_text())
    assert recorded["begun_from"] == {"run": str(tmp_path / "first"), "step": 2}


def test_a_branch_is_repeatable_and_its_source_untouched(tmp_path):
    """Two branches of one checkpoint end with the same weights, bit for bit; the first run's weights stay."""
    run(tiny(learn__steps="2"), run_dir=tmp_path / "first")
    before = weights(tmp_path / "first")
    for name in ("a", "b"):
        pipeline = branched(tmp_path / name, str(tmp_path / "first"), learn__steps="2")
        run(pipeline, run_dir=tmp_path / name, seed=3, resume=True)
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != before
    assert weights(tmp_path / "first") == before


def test_a_step_without_a_checkpoint_is_named(tmp_path):
    """The message lists the steps that are kept and a command that works."""
    run(tiny(learn__steps="2"), run_dir=tmp_path / "first")
    with pytest.raises(MissingPathError, match=r"no checkpoint of step 9; it has checkpoints of steps 0, 2 .*first@2"):
        checkpoint_named(f"{tmp_path / 'first'}@9")


def test_a_folder_whose_name_ends_like_a_step(tmp_path):
    """`x@3` is the run of that name if there is one."""
    run(tiny(learn__steps="1"), run_dir=tmp_path / "x@3")
    source, checkpoint = checkpoint_named(f"{tmp_path / 'x@3'}")
    assert (source.address, checkpoint.name) == (tmp_path / "x@3", "step-00000001")


def test_from_on_the_command_line(tmp_path, monkeypatch, capsys):
    """`run --from RUN --set ...` takes definition, overrides and seed from the run, and learns on."""
    monkeypatch.chdir(tmp_path)
    small = ["--set", "collect.prompts_per_rollout=2", "--set", "collect.group_size=4", "--steps", "1"]
    assert main(["run", "copy_digits", "--out", "first", *small]) == 0
    assert main(["run", "--from", "first", "--set", "learn.lr=1e-4", "--out", "second"]) == 0
    assert RunFolder.open(tmp_path / "second").config.pipeline["learn"]["lr"] == 1e-4
    assert len(RunFolder(tmp_path / "second").metrics) == 1
    assert main(["run", "--from", "first@7", "--out", "third"]) == 2
    assert "Choose one: --from first@1" in capsys.readouterr().err
