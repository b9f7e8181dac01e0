"""What the project asks of itself, checked."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import rlhf_pipeline
import trajectory_store

ROOT = Path(__file__).resolve().parents[1]


def test_every_test_says_what_it_shows():
    """Each test function has a docstring."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not silent, silent


def test_public_names_are_complete_sorted_and_importable():
    """`__all__` is sorted, every name resolves, and the frozen names of the design can be imported."""
    for package in (rlhf_pipeline, trajectory_store):
        names = package.__all__
        assert sorted(names) == sorted(set(names))
        for name in names:
            assert getattr(package, name) is not None
    frozen = {
        "TrajectoryStorage", "TrajectoryReplayBuffer", "MCAdvantage", "RetrieveLogProb", "KLRewardTransform",
        "ConstantKLController", "AdaptiveKLController", "GRPOLoss", "GRPOLossOutput", "CausalLMPolicy", "Pipeline",
        "Collector", "Learner",
        "RolloutFromModel", "group_advantage", "kl_k1", "kl_k2", "kl_k3", "Tokens", "Masks", "ChatHistory",
        "LogProbs", "Text", "LogProbDistribution", "LLMWrapperBase",
    }  # fmt: skip
    assert frozen | set(rlhf_pipeline.__all__) <= set(dir(rlhf_pipeline))
    for name in dir(rlhf_pipeline):
        assert getattr(rlhf_pipeline, name) is not None
    assert {"TrajectoryStore", "Schema", "Column", "StoreError"} <= set(trajectory_store.__all__)


def test_modules_with_an_underscore_stay_in_their_package():
    """What another package imports has no leading underscore."""
    found: list[str] = []
    for path in (ROOT / "rlhf_pipeline").rglob("*.py"):
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_pipeline."):
                package, _, module = (node.module or "").rpartition(".")
                if module.startswith("_") and package != own:
                    found.append(f"{path.relative_to(ROOT)} imports {node.module}")
    assert not found, found


def test_ci_runs_the_readmes_test_command():
    """The README has one command for the main job and one for the tests, and CI takes the latter from it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python3 -m venv .*$", readme, flags=re.MULTILINE)
    assert [command.split("&&")[-1].split()[0] for command in commands] == [
        ".venv/bin/rlhf-pipeline",
        ".venv/bin/pytest",
    ]
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
