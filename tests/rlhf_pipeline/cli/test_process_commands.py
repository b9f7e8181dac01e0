"""`collect`, `learn` and `run --collectors` up to the import of torch."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from pathlib import Path

import pytest

from rlhf_pipeline import definitions
from rlhf_pipeline.cli.parser import parse
from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.cli.request import requested_run
from rlhf_pipeline.cli.summary import finish
from rlhf_pipeline.cli.torchrun import import_torch
from rlhf_pipeline.run.events import RunFinished
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.children import SupervisorConfig
from rlhf_pipeline.run.processes.launch import PLACE
from rlhf_pipeline.run.record import Setup

from ..report.conftest import write_run
from .conftest import Cli


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_of_several(folder: str, *, collectors: int | None = None) -> Path:
    """Write a run whose collectors and learner are processes; say how many collectors its supervisor had."""
    run_dir = write_run(Path(folder), overrides=(("learn.lr", "0.5"),))
    (run_dir / "rollouts").mkdir()
    (run_dir / "processes").mkdir()
    if collectors is not None:
        said = {"name": "supervisor", "collectors": collectors}
        (run_dir / "processes" / "supervisor.json").write_text(json.dumps(said))
    return run_dir


@pytest.mark.parametrize("command", ["collect", "learn"])
def test_definition_and_seed_are_those_of_the_run(command: str):
    """A process joins a run that is there with nothing but its folder."""
    run_of_several("mine")
    made = requested_run(parse([command, "--run", "mine"]))
    assert (made.run_dir, made.definition, made.seed, made.device) == (Path("mine"), "copy_digits", 0, "cpu")
    assert made.pipeline.learn.lr == 0.5
    assert made.again == f"rlhf-pipeline {command} --run mine"


def test_a_learner_waits_for_the_collector_that_begins_the_run(cli: Cli, capsys: pytest.CaptureFixture[str]):
    """Typed first, it says what it waits for, and goes on with what the collector recorded."""
    pipeline = definitions.find("long_running").pipeline(())

    def begin() -> None:
        time.sleep(0.5)
        Path("new").mkdir()
        RunFolder("new").record.write(
            Setup(pipeline=pipeline, definition="long_running", overrides=(), seed=3, device="cpu")
        )

    collector = threading.Thread(target=begin)
    collector.start()
    made = requested_run(parse(["learn", "--run", "new"]))
    collector.join()
    assert (made.definition, made.seed, made.joins) == ("long_running", 3, "learn")
    assert "new is not a run yet; waiting for a collector to create it" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["collect", "learn"])
def test_what_to_run_must_be_named_once(cli: Cli, command: str):
    """The first collector of a run says what it is; the message has an example."""
    shown = cli("collect", "--run", "new")
    assert shown.code == 2
    assert "is not a run yet, so a definition is required" in shown.err
    assert "rlhf-pipeline collect long_running --run new" in shown.err
    made = requested_run(parse([command, "long_running", "--run", "new", "--set", "learn.lr=0.25"]))
    assert (made.definition, made.pipeline.learn.lr, made.overrides) == ("long_running", 0.25, (("learn.lr", "0.25"),))


def test_another_seed_or_folder_is_refused(cli: Cli):
    """A run has one seed; a folder of something else is not touched."""
    run_of_several("mine")
    assert "was started with seed 0, not 3" in cli("collect", "--run", "mine", "--seed", 3).err
    Path("thesis").mkdir()
    Path("thesis/text").touch()
    assert "Choose another folder: --run thesis-2" in cli("learn", "long_running", "--run", "thesis").err


def test_runs_in_one_and_in_several_processes_do_not_mix(cli: Cli):
    """They count rollouts differently; each message says how to go on."""
    write_run(Path("alone"))
    again = "is a run in one process. To continue it: rlhf-pipeline run --resume --out alone"
    assert again in cli("collect", "--run", "alone").err
    assert again in cli("run", "--out", "alone", "--resume", "--collectors", 2).err
    run_of_several("many")
    assert "is a run with several processes" in cli("run", "--out", "many", "--resume").err


@pytest.mark.parametrize("command", ["collect", "learn"])
def test_a_definition_that_has_moved_is_named_in_the_same_command(cli: Cli, command: str):
    """What the message says to type is accepted; `run --resume` refuses a run of several processes."""
    run_of_several("mine")
    config = json.loads(Path("mine/config.json").read_text())
    Path("mine/config.json").write_text(json.dumps(config | {"definition": "/gone.py:task"}))
    shown = cli(command, "--run", "mine")
    assert shown.err.rstrip().endswith(f"rlhf-pipeline {command} FILE.py:function --run mine")
    made = requested_run(parse([command, "copy_digits", "--run", "mine"]))
    assert made.definition == "copy_digits"


def test_resume_has_as_many_collectors_as_before():
    """The number need not be typed again; a typed one counts."""
    run_of_several("many", collectors=3)
    made = requested_run(parse(["run", "many", "--resume"]))
    assert made.supervised == SupervisorConfig(collectors=3)
    assert made.again == "rlhf-pipeline run --out many --resume"
    made = requested_run(parse(["run", "many", "--resume", "--collectors", "1"]))
    assert (made.supervised and made.supervised.collectors, made.again) == (
        1,
        "rlhf-pipeline run --out many --collectors 1 --resume",
    )


def test_definitions_that_cannot_be_collected_for(cli: Cli):
    """A moving reference is in one process only."""
    settings = ("--set", "learn.reference_every=2", "--set", "write.kl_coef=0.1")
    assert "Omit --collectors" in cli("run", "long_running", "--collectors", 2, *settings).err
    assert not Path("runs").exists()


def test_slips(cli: Cli):
    """A run folder is needed; a limit in seconds is above 0."""
    assert "--run" in cli("collect", "long_running").err
    assert (
        "expected a positive number of seconds, got 'soon'" in cli("run", "long_running", "--hang-timeout", "soon").err
    )


def test_a_run_that_was_stopped_before_its_store_was_made_says_how_to_go_on(cli: Cli):
    """Ctrl-C while the processes start: no store, no error, and the command that goes on."""
    pipeline = definitions.find("long_running").pipeline(())
    Path("new").mkdir()
    RunFolder("new").record.write(
        Setup(pipeline=pipeline, definition="long_running", overrides=(), seed=0, device="cpu")
    )
    plan = requested_run(parse(["run", "--resume", "--out", "new", "--collectors", "1"]))
    ended = RunFinished(
        run_dir=Path("new"),
        reason="interrupted",
        steps=0,
        seconds=1.0,
        first_reward=None,
        last_reward=None,
        num_trajectories=0,
    )
    out = io.StringIO()
    finish(ended, plan, RunView(out, live=False))
    assert "stopped and saved: no rollout was finished" in out.getvalue()
    assert plan.again in out.getvalue()


@pytest.mark.parametrize(
    ("gpus", "place", "named", "more", "taken"),
    [
        (2, "0", None, {}, "0"),
        (2, "3", None, {}, "1"),
        (3, "3", "4,7,9", {}, "4"),
        (1, "3", "5", {}, "5"),
        (2, None, None, {}, None),
        (2, "1", None, {"WORLD_SIZE": "2", "RANK": "1"}, None),
    ],
    ids=[
        "the learner",
        "a third collector",
        "some GPUs",
        "one GPU",
        "started by hand",
        "a learner of several processes",
    ],
)
def test_processes_of_a_supervisor_take_gpus_in_turn(
    gpus: int,
    place: str | None,
    named: str | None,
    more: dict[str, str],
    taken: str | None,
    monkeypatch: pytest.MonkeyPatch,
):
    """With `--device cuda`, each process sees one; learners that share a step see all, and take their rank's."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    for name, value in {PLACE: place, "CUDA_VISIBLE_DEVICES": named, **more}.items():
        monkeypatch.setenv(name, "" if value is None else value)  # so that it is restored whatever is set
        if value is None:
            monkeypatch.delenv(name)
    import_torch("cuda")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == taken
    import_torch("cpu")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == taken
