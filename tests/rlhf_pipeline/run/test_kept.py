"""A run that travels: its folder continues elsewhere, and foreign code is not executed unasked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlhf_pipeline.cli import main
from rlhf_pipeline.run.folder import RunFolder
from tests.rlhf_pipeline.small import weights

TASK = """
from pathlib import Path
from rlhf_pipeline import Collect, Prompts, Learn, Pipeline, TinyPolicy, token_match

Path({touched!r}).touch()

def task() -> Pipeline:
    return Pipeline(
        name="task", policy=TinyPolicy(hidden_size=16, num_layers=1), reward=token_match,
        prompts=Prompts(path={prompts!r}, as_chat=False),
        collect=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=3), learn=Learn(steps=2),
    )
"""


@pytest.fixture
def travelled(tmp_path, monkeypatch):
    """A run of one's own, copied elsewhere; its definition and its prompts are gone from where they were."""
    home = tmp_path / "home"
    home.mkdir()
    lines = (f'{{"question": "{n}=", "answer": "{n}"}}' for n in range(12, 40))
    (home / "prompts.jsonl").write_text("\n".join(lines))
    (home / "task.py").write_text(TASK.format(touched=str(tmp_path / "executed"), prompts=str(home / "prompts.jsonl")))
    monkeypatch.chdir(tmp_path)
    assert main(["run", "home/task.py", "--out", "home/run"]) == 0
    shutil.copytree(home / "run", tmp_path / "elsewhere")
    shutil.copytree(home / "run", tmp_path / "straight")
    (home / "task.py").rename(tmp_path / "task.gone")
    (home / "prompts.jsonl").unlink()
    (tmp_path / "executed").unlink()
    return tmp_path / "elsewhere"


def test_a_copied_run_resumes_bit_for_bit_from_its_folder_alone(travelled, capsys):
    """Definition and prompts come from the folder; with --trust the weights equal those of the run that stayed."""
    assert main(["run", "--resume", "--out", "elsewhere", "--steps", "3", "--trust"]) == 0
    (travelled.parent / "task.gone").rename(travelled.parent / "home" / "task.py")
    shutil.copy(travelled / "inputs" / "prompts.jsonl", travelled.parent / "home" / "prompts.jsonl")
    assert main(["run", "--resume", "--out", "home/run", "--steps", "3"]) == 0
    assert weights(travelled) == weights(travelled.parent / "home" / "run")


@pytest.mark.parametrize(
    "command",
    ["run --resume --out elsewhere --steps 3", "run --from elsewhere --out new", "replay elsewhere --out new"],
)
def test_code_of_a_run_that_was_not_started_here_is_not_executed(travelled, capsys, command):
    """The sentence names the file to read and the option that executes it; nothing of it has run."""
    assert main(command.split()) == 2
    assert (
        "was not started here, and its definition is code of its own: elsewhere/definition/task.py"
        in capsys.readouterr().err
    )
    assert not (travelled.parent / "executed").exists()


def test_what_is_missing_is_named_once(travelled, capsys):
    """Without the copies too, the message names the one thing that is missing and where it was looked for."""
    shutil.rmtree(travelled / "definition")
    assert main(["run", "--resume", "--out", "elsewhere", "--steps", "3", "--trust"]) == 2
    said = capsys.readouterr().err
    assert f"there is no file {travelled.parent}/home/task.py, and no copy at elsewhere/definition/task.py" in said


def test_a_trusted_run_stays_trusted_where_it_was_resumed(travelled):
    """Once it was resumed here with --trust, later resumes need no option."""
    assert main(["run", "--resume", "--out", "elsewhere", "--steps", "3", "--trust"]) == 0
    assert main(["run", "--resume", "--out", "elsewhere", "--steps", "4"]) == 0
    assert len(RunFolder(Path("elsewhere")).metrics) == 4
