from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pipeline.cli.output import pasted

from .conftest import Cli


def test_commands_name_their_own_script_or_interpreter(monkeypatch: pytest.MonkeyPatch):
    """On PATH they are as they are; elsewhere each names what runs now, quoted; names that only look alike stay."""
    text = "next: rlhf-pipeline show a, `rlhf-pipeline ls`, my-rlhf-pipeline run, rlhf-pipeline: gone"
    assert pasted(text) == text
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["my env/bin/rlhf-pipeline", "ls"])
    own = "'my env/bin/rlhf-pipeline'"
    assert pasted(text) == f"next: {own} show a, `{own} ls`, my-rlhf-pipeline run, rlhf-pipeline: gone"
    monkeypatch.setattr(sys, "argv", ["/x/rlhf_pipeline/__main__.py", "ls"])
    assert pasted("rlhf-pipeline ls") == f"{shlex.quote(sys.executable)} -m rlhf_pipeline ls"


def test_the_printed_command_runs_as_pasted(cli: Cli, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without the command on PATH, in a folder with a space: what the table prints is typed into a shell, and works."""
    (tmp_path / "runs").rename(tmp_path / "my runs")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    shown = cli("show", "my runs/demo", "--last", 3).out
    command = shown.splitlines()[-1].removeprefix("to show one token by token: ")
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "trajectory 47: group 11" in done.stdout
