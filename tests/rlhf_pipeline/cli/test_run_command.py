"""The run command up to the import of torch, and after the run."""

from __future__ import annotations

import argparse
import io
import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline import Replay
from rlhf_pipeline.cli import replay, summary
from rlhf_pipeline.cli.parser import parse
from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.cli.request import requested_run
from rlhf_pipeline.run.events import RunFinished
from rlhf_pipeline.run.run import Run

from ..report.conftest import write_run
from .conftest import Cli

TASK = """
from rlhf_pipeline import {imports}, CopyDigits, Prompts, Pipeline, PretrainedPolicy, TinyPolicy, token_match

def task() -> Pipeline:
    return Pipeline(name="task", **(dict(policy=TinyPolicy(), prompts=CopyDigits(), reward=token_match) | {fields}))
"""


def plan(*argv: object) -> Run:
    """Return the plan of `rlhf-pipeline run ARGV`."""
    return requested_run(parse(["run", *map(str, argv)]))


def task_file(folder: Path, fields: str, imports: str = "Collect") -> Path:
    """Write a definition with some fields changed."""
    file = folder / "task.py"
    file.write_text(TASK.format(imports=imports, fields=fields))
    return file


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_plan_of_a_new_run():
    """Defaults: runs/NAME, seed 0, cpu; --steps is an override."""
    made = plan("copy_digits", "--steps", 7, "--set", "learn.lr=3e-4")
    assert (made.run_dir, made.seed, made.device, made.resume) == (Path("runs/copy_digits"), 0, "cpu", False)
    assert made.overrides == (("learn.lr", "3e-4"), ("learn.steps", "7"))
    assert (made.pipeline.learn.steps, made.pipeline.learn.lr) == (7, 3e-4)
    assert made.command == "rlhf-pipeline run copy_digits"


def test_an_empty_folder_is_fine(tmp_path: Path):
    """A folder with nothing in it may become the run folder."""
    (tmp_path / "empty").mkdir()
    assert plan("copy_digits", "--out", "empty").run_dir == Path("empty")


def test_run_folder_is_taken(cli: Cli):
    """A run that is there is kept: go on with it, or take the next free name."""
    write_run(Path("runs/copy_digits"))
    Path("runs/copy_digits-2").mkdir()
    shown = cli("run", "copy_digits")
    assert shown.code == 2
    assert "already contains a run (12 steps, last reward 1.00)" in shown.err
    assert "rlhf-pipeline run copy_digits --resume" in shown.err
    assert "--out runs/copy_digits-3" in shown.err


def test_other_folder_is_taken(cli: Cli):
    """A folder or file of something else is not touched."""
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("x")
    assert "is not a run, so it was not changed" in cli("run", "copy_digits", "--out", "mine").err
    assert "is a file" in cli("run", "copy_digits", "--out", "mine/thesis.tex").err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["copy_digit"], "Did you mean 'copy_digits'? `rlhf-pipeline list`"),
        (["copy_digits", "--set", "learn.lrr=1"], "--set learn.lrr=1: Learn has no field 'lrr'. Did you mean 'lr'?"),
        (["copy_digits", "--set", "learn.lr=abc"], 'rlhf-pipeline: --set learn.lr=abc: "abc" is not a valid float.'),
        (["copy_digits", "--device", "cudda"], "there is no such device. Did you mean 'cuda'?"),
        (["gsm8k"], "there is no model folder at model. Create one: rlhf-pipeline new-model model --text FILE"),
        (["gsm8k", "--set", "policy.path=./nowhere/model"], "there is no model folder at ./nowhere/model"),
        (
            ["gsm8k", "--set", "policy.path=owner/name"],
            "the prompts cannot be read: there is no file or folder at train.jsonl",
        ),
        (["copy_digits", "--resume"], "there is no run at runs/copy_digits"),
        (["--resume"], "specify the run to continue"),
        ([], "a definition is required, for example: rlhf-pipeline run copy_digits"),
    ],
)
def test_mistakes_cost_no_torch(cli: Cli, argv: list[str], message: str):
    """Each mistake ends with exit code 2 and what to do, before anything heavy is imported or written."""
    shown = cli("run", *argv)
    assert shown.code == 2
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert list(Path.cwd().iterdir()) == []


def test_all_that_is_wrong_is_reported_at_once(cli: Cli):
    """The folder, the device, the model and the prompts, one line each; nothing is written."""
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("x")
    lines = cli("run", "gsm8k", "--out", "mine", "--device", "cudda").err.splitlines()
    said = (
        "mine exists, but is not a run",
        "no such device",
        "no model folder at model",
        "no file or folder at train.jsonl",
    )
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))
    assert [path.name for path in Path.cwd().iterdir()] == ["mine"]


def test_broken_model_folder(cli: Cli):
    """A folder without config or weights is not a model."""
    Path("model").mkdir()
    assert "has no config.json" in cli("run", "gsm8k").err
    Path("model/config.json").write_text("{}")
    assert "has no weights" in cli("run", "gsm8k").err
    Path("model/model.safetensors").write_bytes(b"")
    assert "the prompts cannot be read" in cli("run", "gsm8k").err


def test_broken_prompt_file(cli: Cli, tmp_path: Path):
    """A prompt file is read whole: its last broken line is named."""
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "1+1?", "answr": "2"}\n')
    shown = cli("run", "gsm8k", "--set", "policy.path=owner/name", "--set", f"prompts.path={file}")
    assert f"{file}:2: there is no field 'answer'. Did you mean 'answr'?" in shown.err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            "dict(prompts=CopyDigits(), policy=TinyPolicy(alphabet='0123'))",
            "characters that are not in the model's alphabet",
        ),
        ("dict(reward=lambda completion, truth: 1.0)", "there is no 'truth'"),
        ("dict(prompts=object())", "prompts: object.prompt(0, 0) raised AttributeError"),
        ("dict(prompts=type('P', (), {'prompt': lambda *a: 'x'})())", "returned str; it must return a"),
        ("dict(collect=Collect(group_sise=4))", "Collect has no field 'group_sise'. Did you mean 'group_size'?"),
    ],
)
def test_broken_definitions(cli: Cli, tmp_path: Path, fields: str, message: str):
    """What a definition names is checked before torch is imported."""
    shown = cli("run", task_file(tmp_path, fields))
    assert shown.code == 2
    assert message in shown.err


def test_debug_shows_the_traceback(tmp_path: Path):
    """With --debug the error keeps its traceback."""
    from rlhf_pipeline.cli import main
    from rlhf_pipeline.errors import DefinitionError

    with pytest.raises(DefinitionError):
        main(["run", "copy_digit", "--debug"])


def test_too_little_memory_is_one_sentence(cli: Cli, tmp_path: Path):
    """A model that does not fit is said in one line, however the library says it, and no folder is made."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 30), before[1]))
    try:
        shown = cli("run", "copy_digits", "--set", "policy.hidden_size=65536", "--set", "policy.num_layers=1")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert shown.code == 2
    assert "not enough memory" in shown.err
    assert len(shown.err.splitlines()) == 1
    assert not Path("runs").exists()


def test_resume_takes_what_was_recorded():
    """Definition, settings and seed come from the run; new settings come on top."""
    write_run(Path("runs/copy_digits"), overrides=(("learn.lr", "5e-4"),))
    made = plan("copy_digits", "--resume", "--steps", 800)
    assert made.resume
    assert (made.pipeline.learn.lr, made.pipeline.learn.steps, made.pipeline.collect.group_size) == (5e-4, 800, 4)
    assert dict(made.overrides)["learn.steps"] == "800"
    assert made.command == "rlhf-pipeline run copy_digits"


@pytest.mark.parametrize("argv", [["--resume", "--out", "runs/demo"], ["runs/demo", "--resume"]])
def test_resume_by_folder(argv: list[str]):
    """The run folder alone is enough."""
    write_run(Path("runs/demo"))
    made = plan(*argv)
    assert (made.run_dir, made.definition) == (Path("runs/demo"), "copy_digits")
    assert made.command == "rlhf-pipeline run --out runs/demo"


def test_a_run_in_the_place_of_a_definition(cli: Cli):
    """A run folder without --resume is answered with the command that goes on with it."""
    write_run(Path("runs/demo"))
    shown = cli("run", "runs/demo")
    assert shown.code == 2
    assert "Continue it: rlhf-pipeline run runs/demo --resume" in shown.err


def test_resume_with_another_seed(cli: Cli):
    """A resume under another seed is refused."""
    write_run(Path("runs/demo"))
    shown = cli("run", "--resume", "--out", "runs/demo", "--seed", 3)
    assert shown.code == 2
    assert "was started with seed 0, not 3" in shown.err


def test_resume_when_the_definition_has_moved(cli: Cli, tmp_path: Path):
    """A definition file that is gone can be named at its new place."""
    write_run(Path("runs/demo"))
    config = json.loads(Path("runs/demo/config.json").read_text())
    config["definition"] = str(tmp_path / "gone.py") + ":task"
    Path("runs/demo/config.json").write_text(json.dumps(config))
    shown = cli("run", "--resume", "--out", "runs/demo")
    assert "the definition of runs/demo no longer exists" in shown.err
    assert "FILE.py:function --resume --out runs/demo" in shown.err
    moved = tmp_path / "moved.py"
    moved.write_text((Path(__file__).parents[3] / "pipelines" / "copy_digits.py").read_text())
    assert plan(moved, "--resume", "--out", "runs/demo").definition == f"{moved}:copy_digits"


def test_replay_when_the_definition_has_moved(tmp_path: Path):
    """Named at its new place it is the run's own: overrides, seed and order are the recorded ones."""
    write_run(Path("runs/demo"), overrides=(("learn.lr", "0.5"),))
    typed = ["replay", "runs/demo", "--out", "again"]
    wanted = requested_run(parse(typed))
    moved, other = tmp_path / "moved.py", tmp_path / "other.py"
    text = (Path(__file__).parents[3] / "pipelines" / "copy_digits.py").read_text()
    moved.write_text(text)
    made = requested_run(parse([*typed, "--definition", str(moved)]))
    assert (made.overrides, made.pipeline, made.seed) == (wanted.overrides, wanted.pipeline, wanted.seed)
    recorded = Replay(stores=(str(tmp_path / "runs/demo"),), recorded_order=True)
    assert wanted.pipeline.replay == recorded
    other.write_text(text.replace("num_digits=4", "num_digits=5"))
    made = requested_run(parse([*typed, "--definition", str(other)]))
    assert (made.pipeline.learn.lr, made.pipeline.replay) == (
        2e-3,
        replace(wanted.pipeline.replay, recorded_order=False),
    )


@pytest.mark.parametrize(
    ("groups", "code", "said"),
    [
        ("keep", 1, "NOT the same as runs/demo: the reward differs from step 1 on"),
        ("drop", 0, "the same as runs/demo: loss and gradient norm of 12 steps are bitwise equal."),
    ],
)
def test_a_replay_reports_what_it_compared(groups: str, code: int, said: str):
    """The mean reward of a run that dropped groups is not compared, so it is not called equal."""
    overrides, out = (("write.zero_variance", groups),), io.StringIO()
    write_run(Path("runs/demo"), overrides=overrides)
    made = requested_run(parse(["replay", "runs/demo", "--out", "again"]))
    write_run(Path("again"), overrides=overrides, failed=1)
    assert replay.compare(made, RunView(out, live=False)) == code
    assert said in out.getvalue()


def test_resume_under_another_definition(cli: Cli, tmp_path: Path):
    """A definition that would learn something else is refused before torch is imported, naming the fields."""
    write_run(Path("runs/demo"))
    shown = cli("run", "copy_digits", "--resume", "--out", "runs/demo", "--set", "learn.beta2=0.5")
    assert "learn.beta2 was 0.95 and is now 0.5" in shown.err
    assert plan("copy_digits", "--resume", "--out", "runs/demo", "--steps", 9).pipeline.learn.steps == 9


FINISHED = RunFinished(
    run_dir=Path("runs/demo"),
    reason="steps",
    steps=180,
    seconds=21.4,
    first_reward=0.1,
    last_reward=0.98,
    num_trajectories=23_040,
)


def test_result_sentence():
    """The result is one sentence; it says when a target or a signal ended the run."""
    sentence = "reward 0.10 -> 0.98 in 180 steps (21 s), 23,040 trajectories stored"
    assert summary.result_sentence(FINISHED) == sentence
    assert summary.result_sentence(replace(FINISHED, reason="target")) == f"target reached: {sentence}"
    assert summary.result_sentence(replace(FINISHED, reason="interrupted")).startswith("stopped and saved: ")
    nothing = replace(FINISHED, first_reward=None, last_reward=None, steps=0, num_trajectories=0)
    assert "no rollout was finished" in summary.result_sentence(nothing)


def test_next_commands_are_accepted():
    """Every command that is suggested can be typed."""
    made = plan("copy_digits")
    for reason in ("steps", "target", "interrupted"):
        commands = summary.next_commands(replace(FINISHED, reason=reason), made)
        assert len(commands) == 4
        for command, _ in commands:
            assert isinstance(parse(command.split()[1:]), argparse.Namespace)
    assert "--resume --steps 360" in summary.next_commands(FINISHED, made)[-1][0]
    empty = summary.next_commands(replace(FINISHED, num_trajectories=0), made)
    assert not [command for command, _ in empty if "show" in command]  # which would find nothing


def test_finish_writes_the_report_and_prints_the_next_command(tmp_path: Path):
    """At the end: the sentence, before and after, the files, the next commands."""
    run_dir = write_run(tmp_path / "runs" / "demo")
    out = io.StringIO()
    summary.finish(replace(FINISHED, run_dir=run_dir), plan("copy_digits"), RunView(out, live=False))
    text = out.getvalue()
    assert "reward 0.10 -> 0.98 in 180 steps" in text
    assert "  before  " in text
    assert "  after   " in text
    assert f"rlhf-pipeline inspect {run_dir}" in text
    assert (run_dir / "report.html").is_file()
