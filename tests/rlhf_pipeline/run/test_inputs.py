from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from rlhf_pipeline import CopyDigits, JsonlPrompts, Pipeline, PretrainedPolicy, TinyPolicy, token_match
from rlhf_pipeline.errors import RunMismatchError
from rlhf_pipeline.run.events import Event, Notice
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.inputs import check_inputs, describe_inputs
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import tiny


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
        prompts=JsonlPrompts(path=str(prompts)),
        reward=token_match,
    )


def recorded(pipeline: Pipeline, run_dir: Path) -> Path:
    run_dir.mkdir(exist_ok=True)
    RunFolder(run_dir).record(pipeline, definition="x", overrides=(), seed=0, device="cpu")
    return run_dir


def test_unchanged_files_pass(pipeline, tmp_path):
    """The same files pass; so does a run that was recorded before files were, and one without any."""
    run_dir = recorded(pipeline, tmp_path / "run")
    RunFolder(run_dir).check_unchanged(pipeline, 0)
    check_inputs(run_dir, {}, pipeline)
    scratch = dataclasses.replace(pipeline, policy=TinyPolicy(), prompts=CopyDigits())
    assert describe_inputs(scratch) == {}


def test_an_edited_prompt_file_is_refused(pipeline, tmp_path):
    """Another length and the same length with other content are both noticed, with the path and what to do."""
    run_dir = recorded(pipeline, tmp_path / "run")
    file = Path(pipeline.prompts.path)  # pyright: ignore[reportAttributeAccessIssue]
    whole = file.read_text()
    file.write_text(whole.replace('"2"', '"3"'))
    with pytest.raises(RunMismatchError, match=r"prompts\.jsonl \(prompts\.path\) has changed .*68 bytes as before"):
        RunFolder(run_dir).check_unchanged(pipeline, 0)
    file.write_text(whole + "\n")
    with pytest.raises(RunMismatchError, match=r"it had 68 bytes, it has 69\. Put the old one back"):
        RunFolder(run_dir).check_unchanged(pipeline, 0)
    RunFolder(run_dir).check_unchanged(pipeline, 0, inputs=False)
    file.write_text(whole)
    RunFolder(run_dir).check_unchanged(pipeline, 0)


@pytest.mark.parametrize("where", [0, -1])
def test_an_overwritten_model_is_refused(pipeline, tmp_path, where):
    """A byte at the start or the end of the weights, or another config."""
    run_dir = recorded(pipeline, tmp_path / "run")
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[where] ^= 1
    weights.write_bytes(content)
    with pytest.raises(RunMismatchError, match=r"model \(policy\.path\) has changed .*its model\.safetensors differ"):
        RunFolder(run_dir).check_unchanged(pipeline, 0)
    content[where] ^= 1
    weights.write_bytes(content)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(RunMismatchError, match=r"its config\.json differ"):
        RunFolder(run_dir).check_unchanged(pipeline, 0)


def test_a_field_that_is_younger_than_the_run_is_not_a_difference(pipeline, tmp_path):
    """A run that was recorded before a field existed ran as the field's default says."""
    run_dir = recorded(pipeline, tmp_path / "run")
    record = json.loads((run_dir / "config.json").read_text())
    del record["pipeline"]["learn"]["layout"]
    (run_dir / "config.json").write_text(json.dumps(record))
    RunFolder(run_dir).check_unchanged(pipeline, 0)
    record["pipeline"]["learn"]["lr"] = 0.5
    (run_dir / "config.json").write_text(json.dumps(record))
    with pytest.raises(RunMismatchError, match=r"learn\.lr was 0\.5"):
        RunFolder(run_dir).check_unchanged(pipeline, 0)


def test_an_edited_reward_function_is_said(tmp_path):
    """A run goes on with a reward that was repaired, and says that those before keep theirs; else it says nothing."""
    file, said = tmp_path / "graded.py", []
    for start, body in enumerate(("return 0.25", "return 0.25", "return 0.5")):
        file.write_text(f"def grade(prompt, completion, answer, meta):\n    {body}\n")
        spec = importlib.util.spec_from_file_location("graded", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        events: list[Event] = []
        pipeline = tiny(reward=module.grade, learn__steps=str(2 + 2 * start))
        run(pipeline, run_dir=tmp_path / "run", resume=start > 0, on_event=events.append)
        notices = [event.message for event in events if isinstance(event, Notice)]
        said.append(any("grade has been edited since the run was last started" in notice for notice in notices))
    assert said == [False, False, True]
