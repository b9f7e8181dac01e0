from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rlhf_pipeline import Pipeline, PretrainedPolicy, scratch_policy
from rlhf_pipeline.data.prompts import CopyDigits, Prompts
from rlhf_pipeline.errors import DataError, DefinitionError, ProcessFailedError, RunExistsError, RunStorageError
from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.run.completeness import came_to_nothing, is_free
from rlhf_pipeline.run.disk import named_disk_errors
from rlhf_pipeline.run.events import Event, Notice, StepDone
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.supervise import SupervisorConfig, supervise
from rlhf_pipeline.run.prompt_lengths import check_prompts, sampling_notices
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import collect, learn, tiny

PIPELINE = tiny(
    collect__prompts_per_rollout="2",
    buffer__max_staleness="0",
    learn__epochs="1",
    learn__steps="4",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(PIPELINE, run_dir=folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def longer() -> Pipeline:
    return dataclasses.replace(PIPELINE, learn=dataclasses.replace(PIPELINE.learn, steps=5))


def without_line(file: Path, number: int) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: shutil.rmtree(run / "store"), "there is no store"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl ends with step 0"),
        (lambda run: (run / "ledger.jsonl").unlink(), "ledger.jsonl ends with step 0"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "there is no checkpoint, but 4 steps were taken"),
        (lambda run: [(run / n).write_bytes(b"") for n in ("metrics.jsonl", "ledger.jsonl")], "ends with step 0"),
        (lambda run: without_line(run / "ledger.jsonl", 1), "ledger.jsonl"),
        (lambda run: without_line(run / "metrics.jsonl", 0), "metrics.jsonl"),
    ],
    ids=["store", "metrics", "ledger", "checkpoints", "emptied", "ledger-line", "metrics-line"],
)
def test_a_run_of_which_a_part_is_gone_does_not_go_on(copied, damage, said):
    """The resume names what is missing and changes nothing; `verify` names it, too."""
    damage(copied)
    before = sorted(path for path in copied.rglob("*") if path.is_file())
    with pytest.raises(DataError, match=said):
        run(longer(), run_dir=copied, resume=True)
    assert sorted(path for path in copied.rglob("*") if path.is_file()) == before
    problems = [finding.text for finding in check_run(RunFolder.open(copied)) if not finding.ok]
    assert any(said in text for text in problems)


def test_another_store_in_its_place_is_noticed(copied, tmp_path):
    """A store that has seen fewer trajectories than the run had stored is not the run's."""
    short = dataclasses.replace(PIPELINE, learn=dataclasses.replace(PIPELINE.learn, steps=1))
    run(short, run_dir=tmp_path / "other")
    shutil.rmtree(copied / "store")
    (tmp_path / "other" / "store").rename(copied / "store")
    with pytest.raises(DataError, match="store contains only 8 of the 32 trajectories that the run stored"):
        run(longer(), run_dir=copied, resume=True)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(copied, finished):
    """One flipped bit in the weights: said, passed over, and the run ends with the weights that it has without it."""
    file = max((copied / "checkpoints").iterdir()) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))
    assert any("bytes of model.safetensors differ" in f.text for f in check_run(RunFolder.open(copied)) if not f.ok)
    events: list[Event] = []
    run(PIPELINE, run_dir=copied, resume=True, on_event=events.append)
    notices = [event.message for event in events if isinstance(event, Notice)]
    assert any("step-00000004 is damaged" in text and "continues from step-00000002" in text for text in notices)
    assert [event.step for event in events if isinstance(event, StepDone)] == [3, 4]
    for name in ("model.safetensors", "optimizer.safetensors"):
        found = copied / "checkpoints" / "step-00000004" / name
        assert found.read_bytes() == (finished / "checkpoints" / "step-00000004" / name).read_bytes()
    assert [f.text for f in check_run(RunFolder.open(copied)) if not f.ok] == []


def test_what_was_just_loaded_is_not_saved_again(copied):
    """A resume with nothing left to do leaves every file of the checkpoints as it is."""
    before = {path: path.stat().st_mtime_ns for path in (copied / "checkpoints").rglob("*")}
    run(PIPELINE, run_dir=copied, resume=True)
    assert {path: path.stat().st_mtime_ns for path in (copied / "checkpoints").rglob("*")} == before


def test_a_start_that_came_to_nothing_is_taken_over(tmp_path):
    """A reward that always fails leaves a folder without a trajectory: the next start needs no other name."""

    def broken(prompt: str, completion: str, answer: str | None, meta: object) -> float:
        raise ValueError("not yet written")

    with pytest.raises(RuntimeError, match="not yet written"):
        run(dataclasses.replace(PIPELINE, reward=broken), run_dir=tmp_path / "run")
    assert came_to_nothing(RunFolder(tmp_path / "run"))
    other = dataclasses.replace(PIPELINE, learn=dataclasses.replace(PIPELINE.learn, lr=2e-2))
    assert run(other, run_dir=tmp_path / "run", seed=3).steps == 4
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 3
    assert not came_to_nothing(RunFolder(tmp_path / "run"))
    with pytest.raises(RunExistsError):
        run(other, run_dir=tmp_path / "run", seed=3)


@pytest.mark.parametrize("fields", [{}, {"joins": "learn"}, {"supervised": SupervisorConfig()}])
def test_a_logger_that_is_not_installed_is_found_before_the_folder_is_made(tmp_path, monkeypatch, fields):
    """Nothing is made, so the command can be typed again once it is there."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    wanted = dataclasses.replace(PIPELINE, learn=dataclasses.replace(PIPELINE.learn, logger="mlflow"))
    with pytest.raises(DefinitionError, match="pip install mlflow"):
        Run(pipeline=wanted, run_dir=tmp_path / "run", **fields).checked()
    assert Run(pipeline=wanted, run_dir=tmp_path / "run", joins="collect").check() == []
    assert not (tmp_path / "run").exists()


def test_a_supervised_start_that_came_to_nothing_is_taken_over(tmp_path):
    """What its supervisor wrote is not in the way of the same command with another definition."""

    def fails(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with log.open("ab") as errors:
            return subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(2)"], stderr=errors)

    for pipeline in (PIPELINE, dataclasses.replace(PIPELINE, prompts=CopyDigits(num_digits=2))):
        with pytest.raises(ProcessFailedError, match="Nothing was stored: fix the problem, then repeat the command"):
            supervise(Run(pipeline=pipeline, run_dir=tmp_path / "run"), SupervisorConfig(), launch=fails)
        assert is_free(RunFolder(tmp_path / "run"))
    assert RunFolder(tmp_path / "run").config.pipeline["prompts"]["num_digits"] == 2


@pytest.mark.parametrize("start", [run, learn, collect])
def test_a_prompt_that_fills_the_context_is_found_before_anything_is_stored(tmp_path, start):
    """The line, its tokens and the limit are named, and no run is left; a very long line is not encoded to its end."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"question": "12", "answer": "12"}, {"question": "1" * 700, "answer": "1"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = dataclasses.replace(PIPELINE, prompts=Prompts(path=str(file), as_chat=False))
    with pytest.raises(
        DataError, match=r"the prompt of line 2 of .*prompts\.jsonl .* has 700 tokens, and .* context is 512"
    ):
        start(asked, run_dir=tmp_path / "run")
    assert is_free(RunFolder(tmp_path / "run"))
    assert not RunFolder(tmp_path / "run").record.exists
    assert start is not run or not (tmp_path / "run").exists()
    file.write_text(json.dumps({"question": "1" * 10_000_000, "answer": "1"}) + "\n")
    longest = dataclasses.replace(PIPELINE, prompts=Prompts(path=str(file), as_chat=False, limit=1))
    with pytest.raises(DataError, match="at least 512 tokens"):
        start(longest, run_dir=tmp_path / "run")


def test_a_tokenizer_without_an_end_or_a_template_is_reported_at_the_start():
    """Completions that cannot end, and chat prompts without a template, are a notice each; else there is none."""
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
    assert list(sampling_notices(PIPELINE, policy)) == []
    assert policy.tokenizer is not None
    policy.tokenizer.eos_token = None
    asked = dataclasses.replace(PIPELINE, prompts=Prompts(path="x"))
    first, second = sampling_notices(asked, policy)
    assert "no end token: every completion runs to collect.max_new_tokens=3" in first
    assert "prompts.as_chat" in second
    check_prompts(PIPELINE, policy, 0)


@pytest.mark.parametrize("start", [run, collect])
def test_whatever_samples_says_that_the_tokenizer_has_no_end(tmp_path, start):
    """A run in one process and a collector, at their start."""
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
    assert policy.tokenizer is not None
    policy.tokenizer.eos_token = None
    policy.save_pretrained(tmp_path / "model")
    endless = dataclasses.replace(PIPELINE, policy=PretrainedPolicy(path=str(tmp_path / "model")))
    said: list[str] = []

    def stop(event: Event) -> None:
        if isinstance(event, Notice) and "end token" in event.message:
            said.append(event.message)
            os.kill(os.getpid(), signal.SIGTERM)

    start(endless, run_dir=tmp_path / "run", on_event=stop)
    assert len(said) == 1


def test_a_folder_that_was_moved_is_not_called_unwritable(tmp_path):
    """The message says that the folder is gone and how to go on with it at its new place."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    gone = r"no longer exists: it was moved or removed .*--resume --out NEW_FOLDER"
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(RunStorageError, match=gone), named_disk_errors(run):
        run.metrics_file.write_text("{}")


def test_an_error_that_is_not_about_the_folder_stays_what_it_is(tmp_path):
    """An EINVAL of a sleep, or a missing file elsewhere, is not called an error of the run folder."""
    run = RunFolder(tmp_path / "run")
    for error in (OSError(errno.EINVAL, "Invalid argument"), FileNotFoundError(errno.ENOENT, "gone", "/nowhere/x")):
        with pytest.raises(OSError, match=r"Invalid|gone") as caught, named_disk_errors(run):
            raise error
        assert caught.value is error
