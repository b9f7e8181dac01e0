"""The whole algorithm in one page: it is one page, it learns, and a kill at any point changes nothing."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlhf_pipeline
from rlhf_pipeline import TrajectoryReplayBuffer, definitions
from tests.moments import at_call, fails
from trajectory_store import TrajectoryStore

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "pipelines" / "grpo_in_one_page.py"


class Killed(BaseException):
    """Ends the program as a kill does: nothing of it catches this."""


def kept(out: Path) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """Return what a run left: its weights and its rows."""
    weights = torch.load(out / "checkpoint.pt", weights_only=True)["policy"]
    with TrajectoryStore.open(out / "store") as store:
        columns = ["input_ids", "log_probs", "ref_log_probs", "advantage", "task_reward", "group_id", "policy_version"]
        return weights, store.read(store.ids(), columns)


def same(one: Path, other: Path) -> None:
    """Compare two runs, bit for bit."""
    (weights, rows), (others, other_rows) = kept(one), kept(other)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    for name, values in rows.items():
        pairs = list(zip(values, other_rows[name], strict=True))
        assert pairs
        assert all(np.array_equal(mine, theirs, equal_nan=True) for mine, theirs in pairs), name


@pytest.fixture(scope="module")
def page() -> Any:
    """The page as a module, with little to do."""
    module = definitions.load_module(PAGE)
    module.PROMPTS, module.GROUP, module.ROWS = 2, 4, 8  # pyright: ignore[reportAttributeAccessIssue]
    return module


@pytest.fixture(scope="module")
def straight(page: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps without a kill."""
    out = tmp_path_factory.mktemp("straight")
    page.main(out, 4)
    return out


def test_it_is_one_page_of_public_parts():
    """At most 300 lines, and nothing of this project but its public names."""
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            package = str(module).partition(".")[0]
            assert package in {"rlhf_pipeline", "trajectory_store", "torch", "torchrl", "tensordict"} or (
                package in sys.stdlib_module_names
            )
            if package == "rlhf_pipeline":
                assert module == "rlhf_pipeline"
                assert {alias.name for alias in node.names} <= set(dir(rlhf_pipeline))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["extend", "step", "replace"])
def test_a_kill_anywhere_changes_nothing(page, straight, tmp_path, what, after):
    """Ended around a commit, an optimizer step or a checkpoint of step 3, it ends as the straight run did."""
    calls = {"extend": TrajectoryReplayBuffer.extend, "step": torch.optim.AdamW.step}
    if what == "replace":  # of the file that `save` has written
        calls, after = {"replace": page.save if after else torch.save}, True
    moment = {"after" if after else "before": fails(Killed(), number=3)}
    with at_call(calls[what], **moment), pytest.raises(Killed):
        page.main(tmp_path, 4)
    page.main(tmp_path, 4)
    same(tmp_path, straight)


def test_a_finished_run_is_left_as_it_is(page, straight, capsys):
    """Started again, it has nothing to do, and says where it is."""
    page.main(straight, 4)
    assert capsys.readouterr().out == "continuing after step 4\n"


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(900)
def test_it_learns_and_survives_a_kill(tmp_path):
    """As a user runs it: the reward rises from 0.1 to 0.9, and a run killed with SIGKILL on the way ends the same."""

    def start(out: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(PAGE), "--out", out]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    with start("straight") as straight:
        with start("killed") as killed:
            assert any("step  40 " in line for line in killed.stdout or ())
            killed.kill()
        assert killed.returncode == -signal.SIGKILL
        with start("killed") as again:
            resumed, _ = again.communicate()
        out, _ = straight.communicate()
    rewards = [float(number) for number in re.findall(r"reward (\S+)", out)]
    assert max(rewards[:3]) <= 0.15
    assert min(rewards[-3:]) >= 0.9
    assert re.match(r"continuing after step (39|4\d)\n", resumed)
    same(tmp_path / "straight", tmp_path / "killed")
