"""A slip in any command is answered with what to type, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Cli

SLIPS = (
    ("compact runs/dmo", "Did you mean 'runs/demo'?"),
    ("compact runs", "there is no run or store at runs: the folder is not a run or store"),
    ("compcat runs/demo", "Did you mean 'compact'?"),
    ("config learn.lr buffer", "specify at most one definition and one field"),
    ("config learn --markdown", "--markdown prints a complete page"),
    ("copy runs/dmo --to x", "Did you mean 'runs/demo'?"),
    ("copy runs/demo --to runs/demo", "already exists. Remove it, or choose another path with --to"),
    ("copy runs/demo --to x --filter rewrad>1", "Did you mean 'reward'?"),
    ("copy runs/demo --to x --filter group<0", "none of the 48 trajectories in"),
    ("copy runs/demo --to x --backend zar", "Did you mean 'zarr'?"),
    ("copy runs/demo", "--to"),
    ("cpoy runs/demo", "Did you mean 'copy'?"),
    ("diff runs/demo runs/dmo", "Did you mean 'runs/demo'?"),
    ("diff runs/demo runs/demo --ignore priorty", "Did you mean 'priority'?"),
    ("diff runs/demo", "RIGHT"),
    ("export . --to x.jsonl", "run or store"),
    ("export runs/demo --to x.jsonl --filter rewrad>1", "Did you mean 'reward'?"),
    ("export runs/demo --to rollouts.jsonl", "already exists"),
    ("import rollouts.jsonl --into s --format verll", "Did you mean 'verl'?"),
    ("import rollouts.jsonl --into s --format trl", "Its format appears to be rows: use --format rows"),
    ("import rollouts.jsonl --into s --field reward", "For example: --field prompt=question"),
    ("import none.jsonl --into s", "there is no file or folder at"),
    ("import rollouts.jsonl --into s --tokenzier x", "Did you mean '--tokenizer'?"),
    ("import rollouts.jsonl --into runs/demo", "is a run; an import cannot write to its store. Choose a new folder"),
    (
        "import rollouts.jsonl --into runs/demo/store",
        "is a run; an import cannot write to its store. Choose a new folder",
    ),
    ("inspect runs/dmo", "Did you mean 'runs/demo'?"),
    ("report runs/dmo", "Did you mean 'runs/demo'?"),
    ("report runs/demo --out no/where.html", "for where.html does not exist"),
    ("show runs/dmo", "Did you mean 'runs/demo'?"),
    ("show runs/demo --id 99", "there is no trajectory 99"),
    ("show runs/demo --group 99", "there is no group 99 in demo; group ids range from 0 to 11"),
    ("show runs/demo --step 99", "there is no step 99 in demo: the latest step is 12"),
    ("tail runs/dmo", "Did you mean 'runs/demo'?"),
    ("tail runs/dmo -f", "Did you mean 'runs/demo'?"),  # where it would wait otherwise
    ("tail runs/demo --filter rewrad>1", "Did you mean 'reward'?"),
    ("tail runs/demo --folow", "Did you mean '--follow'?"),
    ("tail runs/demo -n -1", "expected a whole number of at least 0, got '-1'"),
    ("verify runs/dmo", "Did you mean 'runs/demo'?"),
)


@pytest.mark.parametrize(("line", "wanted"), SLIPS, ids=[line for line, _ in SLIPS])
def test_slips(cli: Cli, run_dir: Path, line: str, wanted: str):
    """Exit code 2, the word that was meant or what to type instead, nothing on standard output, no file made."""
    row = {"prompt_ids": [0], "completion_ids": [[1], [2, 3]], "rewards": [1, 0]}
    Path("rollouts.jsonl").write_text(json.dumps(row) + "\n")
    before = sorted(Path().iterdir())
    shown = cli(*line.split())
    assert (shown.code, shown.out) == (2, "")
    assert wanted in shown.err
    assert "Traceback" not in shown.err
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "abc"), ("RANK", "first")])
def test_an_environment_that_torchrun_did_not_make(name, value, cli: Cli, monkeypatch):
    """Something else than a number is named, and how to run in one process."""
    monkeypatch.setenv(name, value)
    shown = cli("run", "copy_digits")
    assert (shown.code, shown.out) == (2, "")
    assert "unset WORLD_SIZE RANK" in shown.err


OWN_SOURCE = """
from dataclasses import dataclass
from rlhf_pipeline import CopyDigits, Pipeline, TinyPolicy, token_match
from rlhf_pipeline.settings import setting

@dataclass(frozen=True, kw_only=True, slots=True)
class Riddles(CopyDigits):
    hard: bool = setting(False, help="Only the riddles that nobody has solved.")
    num_digits: int = setting(2, min=1, help="Lines of a riddle.")

def riddles() -> Pipeline:
    return Pipeline(name="riddles", policy=TinyPolicy(), prompts=Riddles(), reward=token_match)
"""


def test_fields_of_ones_own_source_have_their_own_help(cli: Cli, run_dir: Path, tmp_path: Path):
    """`config FILE.py` tells what the classes that the file uses say, and not those of the package."""
    (tmp_path / "riddles.py").write_text(OWN_SOURCE)
    table = cli("config", "riddles.py").out
    assert "Only the riddles" in table
    assert "Lines of a riddle." in cli("config", "riddles.py", "prompts.num_digits").out
    assert "Only the riddles that nobody has solved." in cli("config", "riddles.py", "prompts.hard").out
    assert "there is no setting 'prompts.soft'" in cli("config", "riddles.py", "prompts.soft").err


def test_slips_in_settings_are_named_for_what_they_are(cli: Cli, run_dir: Path):
    """Code cannot be typed; a field that does not exist is named before a folder that does."""
    shown = cli("run", "copy_digits", "--set", "reward=my_reward", "--out", run_dir)
    assert '--set reward=my_reward: "my_reward" is text, but the field needs a Python object' in shown.err
    shown = cli("run", "copy_digits", "--set", "learn.lrr=1", "--out", run_dir)
    assert "has no field 'lrr'" in shown.err


def test_a_store_inside_the_folder_is_named(cli: Cli, run_dir: Path):
    """A folder that has lost its record still has its store."""
    (run_dir / "config.json").unlink()
    shown = cli("show", run_dir)
    assert shown.code == 2
    assert f"{run_dir / 'store'}" in shown.err
    assert "Create one" not in shown.err


def test_help_breaks_between_words(cli: Cli, run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """At 80 columns no line is wider, and every word of the help is whole."""
    monkeypatch.setenv("COLUMNS", "120")
    wide = cli("run", "--help").out
    monkeypatch.setenv("COLUMNS", "80")
    narrow = cli("run", "--help").out
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    assert set(wide.partition("examples:")[2].split()) <= set(narrow.split())
