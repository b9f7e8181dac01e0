"""A run that travels: its folder continues elsewhere, and foreign code is not executed unasked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf_pipeline import scratch_policy
from rlhf_pipeline.cli import main
from rlhf_pipeline.run.folder import RunFolder
from tests.rlhf_pipeline.small import weights

TASK = """
from pathlib import Path
from rlhf_pipeline import Collect, Evaluate, Learn, Mix, Pipeline, PretrainedPolicy, Prompts, token_match

home = Path({home!r})
(home.parent / "executed").touch()

def task() -> Pipeline:
    return Pipeline(
        name="task", policy=PretrainedPolicy(path=str(home / "model")), reward=token_match,
        prompts=Mix(tuple(Prompts(path=str(home / f"{{name}}.jsonl"), as_chat=False) for name in ("prompts", "more"))),
        evaluate=Evaluate(prompts=Prompts(path=str(home / "held_out.jsonl"), as_chat=False), every=3, num_prompts=2),
        collect=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=3), learn=Learn(steps=2),
    )
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of one's own and the same of a step more; definition, model and prompts are gone from where they were."""
    root = tmp_path_factory.mktemp("ran")
    home = root / "home"
    home.mkdir()
    lines = [f'{{"question": "{n}=", "answer": "{n}"}}' for n in range(12, 40)]
    for name, some in (("prompts", lines[8:]), ("more", lines[4:8]), ("held_out", lines[:4])):
        (home / f"{name}.jsonl").write_text("\n".join(some))
    scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0).save_pretrained(home / "model")
    (home / "task.py").write_text(TASK.format(home=str(home)))
    assert main(["run", str(home / "task.py"), "--out", str(home / "run")]) == 0
    assert main(["run", str(home / "task.py"), "--out", str(root / "straight"), "--steps", "3"]) == 0
    (home / "run").rename(root / "run")
    shutil.rmtree(home)
    return root


@pytest.fixture
def travelled(ran, tmp_path, monkeypatch):
    """The run, copied elsewhere."""
    monkeypatch.chdir(tmp_path)
    (ran / "executed").unlink(missing_ok=True)
    return shutil.copytree(ran / "run", tmp_path / "elsewhere")


@pytest.mark.slow
@pytest.mark.parametrize("others", [False, True])
def test_a_copied_run_resumes_bit_for_bit_from_its_folder_alone(ran, travelled, tmp_path, others):
    """In a fresh process, folder and home, without its files: the weights of the run that was never stopped.

    Another number of threads is said, with what keeps it.
    """
    threads, home = torch.get_num_threads(), tmp_path / "new"
    now = (threads - 1 or 2) if others else threads
    home.mkdir()
    kept = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG")
    env = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(home)}
    command = ["run", "--resume", "--out", str(travelled), "--steps", "3", "--trust", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_pipeline", *command],
        env=env | {"OMP_NUM_THREADS": str(now)},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warning = f"threads was {threads} and is now {now} (to keep it: OMP_NUM_THREADS={threads})"
    assert (warning in done.stderr + done.stdout) == others
    assert "differ from earlier ones" not in done.stderr + done.stdout
    if not others:
        assert weights(travelled) == weights(ran / "straight")
        assert len(list((travelled / "evaluations").iterdir())) == 1


@pytest.mark.parametrize(
    "command",
    ["run --resume --out elsewhere --steps 3", "run --from elsewhere --out new", "replay elsewhere --out new"],
)
def test_code_of_a_run_that_was_not_started_here_is_not_executed(ran, travelled, capsys, command):
    """The sentence names the file to read and the option that executes it; nothing of it has run."""
    assert main(command.split()) == 2
    assert (
        "was not started here, and its definition is custom code: elsewhere/definition/task.py"
        in capsys.readouterr().err
    )
    assert not (ran / "executed").exists()


def test_what_is_missing_is_named_once(ran, travelled, capsys):
    """Without the copies too, the message names the one thing that is missing and where it was looked for."""
    shutil.rmtree(travelled / "definition")
    assert main(["run", "--resume", "--out", "elsewhere", "--steps", "3", "--trust"]) == 2
    said = capsys.readouterr().err
    assert f"there is no file {ran}/home/task.py, and no copy at elsewhere/definition/task.py" in said


def test_a_trusted_run_stays_trusted_where_it_was_resumed(ran, travelled):
    """Once it was resumed here with --trust, later resumes need no option."""
    assert main(["run", "--resume", "--out", "elsewhere", "--steps", "3", "--trust"]) == 0
    assert weights(travelled) == weights(ran / "straight")
    assert main(["run", "--resume", "--out", "elsewhere", "--steps", "4"]) == 0
    assert len(RunFolder(Path("elsewhere")).metrics) == 4
