from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_pipeline import CopyDigits, Pipeline, PretrainedPolicy, Prompts, TinyPolicy, token_match
from rlhf_pipeline.config_text import flat_fields
from rlhf_pipeline.errors import RunMismatchError
from rlhf_pipeline.run.config_diff import is_allowed
from rlhf_pipeline.run.continuation import check_unchanged, continuation_notices
from rlhf_pipeline.run.events import Event, EventHandler, Notice
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.inputs import check_inputs, describe_inputs
from rlhf_pipeline.run.processes.run_files import shared_run
from rlhf_pipeline.run.record import Setup
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import changed, tiny


@pytest.fixture
def pipeline(tmp_path) -> Pipeline:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "1=", "answer": "1"}\n{"question": "2=", "answer": "2"}\n')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 16_384)
    return Pipeline(
        name="inputs",
        policy=PretrainedPolicy(path=str(model)),
        prompts=Prompts(path=str(prompts)),
        reward=token_match,
    )


def recorded(pipeline: Pipeline, run_dir: Path) -> Path:
    run_dir.mkdir(exist_ok=True)
    RunFolder(run_dir).record.write(Setup(pipeline=pipeline, definition="x", overrides=(), seed=0, device="cpu"))
    return run_dir


def test_unchanged_files_pass(pipeline, tmp_path):
    """The same files pass; so does a run that was recorded before files were, and one without any."""
    run_dir = recorded(pipeline, tmp_path / "run")
    check_unchanged(RunFolder(run_dir), pipeline, 0)
    check_inputs(run_dir, {}, pipeline)
    scratch = dataclasses.replace(pipeline, policy=TinyPolicy(), prompts=CopyDigits())
    assert describe_inputs(scratch) == {}


def test_an_edited_prompt_file_is_refused(pipeline, tmp_path):
    """Another length and the same length with other content are both noticed, with the path and what to do."""
    run_dir = recorded(pipeline, tmp_path / "run")
    file = Path(pipeline.prompts.path)  # pyright: ignore[reportAttributeAccessIssue]
    whole = file.read_text()
    file.write_text(whole.replace('"2"', '"3"'))
    with pytest.raises(RunMismatchError, match=r"prompts\.jsonl \(prompts\.path\) has changed .*still 68 bytes"):
        check_unchanged(RunFolder(run_dir), pipeline, 0)
    file.write_text(whole + "\n")
    with pytest.raises(RunMismatchError, match=r"its size was 68 bytes and is now 69\. Restore the old content"):
        check_unchanged(RunFolder(run_dir), pipeline, 0)
    check_unchanged(RunFolder(run_dir), pipeline, 0, inputs=False)
    file.write_text(whole)
    check_unchanged(RunFolder(run_dir), pipeline, 0)


def test_another_path_is_another_path_and_no_change_of_the_old_file(pipeline, tmp_path):
    """The message names both; the same content at another path is the same."""
    run_dir = recorded(pipeline, tmp_path / "run")
    file, other = Path(pipeline.prompts.path), tmp_path / "other.jsonl"  # pyright: ignore[reportAttributeAccessIssue]
    moved = dataclasses.replace(pipeline, prompts=dataclasses.replace(pipeline.prompts, path=str(other)))
    other.write_text(file.read_text())
    check_unchanged(RunFolder(run_dir), moved, 0)
    other.write_text(file.read_text() + "\n")
    said = (
        rf"prompts\.path was {file} and is now {other}, whose content differs: "
        r"its size was 68 bytes and is now 69\. Use"
    )
    with pytest.raises(RunMismatchError, match=said):
        check_unchanged(RunFolder(run_dir), moved, 0)


def test_other_end_tokens_are_refused(pipeline, tmp_path):
    """They are in the model's generation config, and say where completions end."""
    file = tmp_path / "model" / "generation_config.json"
    file.write_text('{"eos_token_id": 1}')
    run_dir = recorded(pipeline, tmp_path / "run")
    file.write_text('{"eos_token_id": [1, 5]}')
    with pytest.raises(RunMismatchError, match=r"policy\.path\) has changed .*: generation_config\.json differs\."):
        check_unchanged(RunFolder(run_dir), pipeline, 0)


@pytest.mark.parametrize("where", [0, -1])
def test_an_overwritten_model_is_refused(pipeline, tmp_path, where):
    """A byte at the start or the end of the weights, or another config."""
    run_dir = recorded(pipeline, tmp_path / "run")
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[where] ^= 1
    weights.write_bytes(content)
    with pytest.raises(RunMismatchError, match=r"model \(policy\.path\) has changed .*: model\.safetensors differs\."):
        check_unchanged(RunFolder(run_dir), pipeline, 0)
    content[where] ^= 1
    weights.write_bytes(content)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(RunMismatchError, match=r": config\.json differs\."):
        check_unchanged(RunFolder(run_dir), pipeline, 0)


def edited(run_dir: Path, record: dict[str, Any]) -> None:
    """Write the record of a run as a person may: without its checksum."""
    record.pop("crc32c", None)
    (run_dir / "config.json").write_text(json.dumps(record))


def test_a_field_that_is_younger_than_the_run_is_not_a_difference(pipeline, tmp_path):
    """A run that was recorded before a field existed ran as the field's default says."""
    run_dir = recorded(pipeline, tmp_path / "run")
    record = json.loads((run_dir / "config.json").read_text())
    del record["pipeline"]["learn"]["layout"]
    edited(run_dir, record)
    check_unchanged(RunFolder(run_dir), pipeline, 0)
    slower = dataclasses.replace(pipeline, learn=dataclasses.replace(pipeline.learn, beta1=0.5))
    del record["pipeline"]["learn"]["beta1"]
    edited(run_dir, record)
    with pytest.raises(RunMismatchError, match=r"learn\.beta1 was 0\.9 and is now 0\.5"):
        check_unchanged(RunFolder(run_dir), slower, 0)
    record["pipeline"]["learn"]["beta2"] = 0.5
    edited(run_dir, record)
    with pytest.raises(RunMismatchError, match=r"learn\.beta2 was 0\.5"):
        check_unchanged(RunFolder(run_dir), pipeline, 0)


GRADED = """\
from dataclasses import dataclass
from rlhf_pipeline.data.prompts import Prompt

@dataclass(frozen=True)
class Sums:
    as_chat: bool = False
    def prompt(self, cursor, seed):
        return Prompt(text=f"{{(cursor + {first}) % 10}}=", answer="1")

def unused():
    return {unused}

def share():
    return HALF

def grade(prompt, completion, answer, meta):
    return {reward} * share()

HALF = {half}

def centred(returns, groups, lengths):
    return {factor} * (returns - returns.mean())
"""


def loaded(folder: Path, **code: float) -> Pipeline:
    """Return a definition whose reward and prompts come from a file that is written now."""
    file = folder / "graded.py"
    file.write_text(GRADED.format(**{"first": 0, "reward": 0.25, "half": 0.5, "unused": 1, "factor": 1} | code))
    linecache.checkcache()
    spec = importlib.util.spec_from_file_location("graded", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["graded"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    write = dataclasses.replace((pipeline := tiny(learn__steps="1")).write, estimator=module.centred)
    return dataclasses.replace(pipeline, reward=module.grade, prompts=module.Sums(), write=write)


def of_one_process(pipeline: Pipeline, run_dir: Path, on_event: EventHandler) -> None:
    """Start a run, or go on with it."""
    taken = len(RunFolder(run_dir).metrics)
    run(changed(pipeline, learn__steps=str(taken + 1)), run_dir=run_dir, resume=taken > 0, on_event=on_event)


def of_a_supervisor(pipeline: Pipeline, run_dir: Path, on_event: EventHandler) -> None:
    """Begin as a supervisor and a learner do."""
    setup = Setup(pipeline=pipeline, definition="", overrides=(), seed=0, device="cpu")
    with shared_run(RunFolder(run_dir), setup, on_event=on_event, leads=True, make_stores=False):
        RunFolder(run_dir).record.write(setup, first_step=1)  # as the learner does after its first step


def of_a_collector(pipeline: Pipeline, run_dir: Path, on_event: EventHandler) -> None:
    """Begin as a collector does, which leaves the record of the run as it is."""
    setup = Setup(pipeline=pipeline, definition="", overrides=(), seed=0, device="cuda")
    with shared_run(RunFolder(run_dir), setup, on_event=on_event):
        pass


@pytest.mark.parametrize("start", [of_one_process, of_a_supervisor, of_a_collector])
def test_edited_code_is_reported_by_every_start(tmp_path, start):
    """A run goes on with a reward, prompts or an estimator that were repaired, or what they name; else it is silent."""
    said = []
    changes = {"reward": 0.5}, {"first": 3, "reward": 0.5}, {"first": 3, "reward": 0.5, "half": 0.6}
    estimator = {**changes[-1], "factor": 2}
    for code in ({}, {"unused": 2}, *changes, estimator):
        events: list[Event] = []
        start(loaded(tmp_path, **code), tmp_path / "run", events.append)
        notices = " ".join(event.message for event in events if isinstance(event, Notice))
        said.append(
            [
                name
                for name in ("grade", "Sums", "centred")
                if f"{name} has been edited since the run was last" in notices
            ]
        )
        assert "device" not in notices
    once = start is not of_a_collector
    one_by_one, together = [["Sums"], ["grade"], ["centred"]], [["grade", "Sums"]] * 2 + [["grade", "Sums", "centred"]]
    assert said == [[], [], ["grade"], *(one_by_one if once else together)]


def test_every_changed_setting_is_refused_or_said_or_without_effect(tmp_path):
    """Of each setting in turn the record says something else: a resume refuses, but for those that may change."""
    pipeline = dataclasses.replace(tiny(learn__lr_schedule="linear"), policy=PretrainedPolicy(path="model"))
    run_dir = recorded(pipeline, tmp_path / "run")
    whole = json.loads((run_dir / "config.json").read_text())
    silent = set()
    valid = {
        "learn.warmup_ratio": 0.5,
        "learn.lr": 5e-4,
        "learn.lr_schedule": "cosine",
        "learn.steps": 77,
        "learn.lr_decay_steps": 55,
    }
    valid |= {"learn.warmup_steps": 3, "learn.min_lr": 1e-5}
    for path, _ in flat_fields(whole["pipeline"]):
        record = json.loads(json.dumps(whole))
        *groups, last = path.split(".")
        functools.reduce(dict.__getitem__, groups, record["pipeline"])[last] = valid.get(path, "another")
        edited(run_dir, record)
        run, notices = RunFolder(run_dir), []
        if is_allowed(path):
            check_unchanged(run, pipeline, 0)
            notices = list(continuation_notices(run, pipeline, device="cpu"))
            assert all(f"{path} was" in notice for notice in notices)
            silent |= set() if notices else {path}
        else:
            with pytest.raises(RunMismatchError, match=f"{path} was 'another'"):
                check_unchanged(run, pipeline, 0)
    assert silent == {
        *(
            "description",
            "needs",
            "buffer.max_bytes",
            "collect.engine_memory",
            "collect.reward_concurrency",
            "collect.alarm_failed",
            "collect.call_threads",
            "learn.stop_at_reward",
            "learn.stop_window",
        ),
        *("learn.checkpoint_every", "learn.keep_checkpoints", "learn.activation_checkpointing"),
        *("learn.peak_flops", "learn.logger", "learn.metrics", "learn.keep_token_figures"),
        *("learn.logger_project", "learn.logger_name", "learn.logger_tags", "learn.logger_samples"),
    }


def test_another_device_and_other_versions_are_said(tmp_path):
    """They move the last bits. A collector's device is its own affair, and more steps at a constant rate are, too."""
    pipeline = tiny()
    run_dir = recorded(pipeline, tmp_path / "run")
    run, longer = RunFolder(run_dir), dataclasses.replace(pipeline, learn=dataclasses.replace(pipeline.learn, steps=99))
    assert list(continuation_notices(run, longer, device="cpu")) == []
    assert list(continuation_notices(run, pipeline)) == []
    assert [notice.split(":")[0] for notice in continuation_notices(run, pipeline, device="cuda")] == [
        "device was cpu and is now cuda"
    ]
    record = json.loads((run_dir / "config.json").read_text())
    record["versions"]["torch"] = "0.9"
    edited(run_dir, record)
    assert [
        notice.split(" and ")[0] for notice in continuation_notices(RunFolder(run_dir), pipeline, device="cpu")
    ] == ["torch was 0.9"]


def test_another_number_of_threads_is_reported(tmp_path):
    """Sums of several threads have other last bits: a resume with another number names both, and how to keep it."""
    pipeline = tiny()
    run_dir = recorded(pipeline, tmp_path / "run")
    record = json.loads((run_dir / "config.json").read_text())
    assert record["machine"]["threads"] == torch.get_num_threads()
    record["machine"]["threads"] += 3
    edited(run_dir, record)
    (notice,) = continuation_notices(RunFolder(run_dir), pipeline, device="cpu")
    before, now = torch.get_num_threads() + 3, torch.get_num_threads()
    assert notice.startswith(
        f"threads was {before} and is now {now} (to keep it: OMP_NUM_THREADS={before}): from now on"
    )
