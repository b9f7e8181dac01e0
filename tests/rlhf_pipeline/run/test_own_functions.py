"""Estimators, objectives, sampling strategies and metrics of one's own: used, checked first, and recorded."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import definitions
from rlhf_pipeline.cli import main
from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.errors import DefinitionError, MissingPathError
from rlhf_pipeline.run.events import Event, Notice
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import tiny, weights
from trajectory_store import TrajectoryStore

OWN = """\
import torch
import numpy as np
from rlhf_pipeline.functional.policy_loss import clipped_loss


def median(returns, groups, lengths):
    out = torch.empty_like(returns)
    for group in groups.unique():
        out[groups == group] = returns[groups == group] - returns[groups == group].median()
    return out


def like_grpo(tokens):
    return clipped_loss(tokens.log_ratio, tokens.advantage, tokens.low, tokens.high)


def plain(tokens):
    return -(tokens.log_probs - tokens.proximal).exp() * tokens.advantage


def second_half(view, allowed, most, rng):
    return allowed[len(allowed) // 2 :][:most]


def drawn(view, allowed, most, rng):
    return rng.choice(allowed, min(most, len(allowed)), replace=False)


def longest(seen):
    return int(seen.store.lengths("input_ids", seen.row_ids).max())


def spread(seen):
    rewards = seen.store.read_scalars("task_reward", seen.row_ids)
    return {"reward_low": float(rewards.min()), "reward_high": float(rewards.max())}


def clash(seen):
    return {"loss": 0.0}


def broken(seen):
    return 1 / 0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of functions."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    return tmp_path


def made(**changes: str) -> Pipeline:
    """The small pipeline with settings as on a command line."""
    return definitions.apply_overrides(tiny(), [(name.replace("__", "."), text) for name, text in changes.items()])


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_an_objective_of_ones_own_is_the_built_in_one_where_it_computes_the_same(own: Path):
    """PPO's clip, written as a function: the same loss and clip fraction; the plain ratio clips nothing."""
    run(made(loss__objective="grpo", learn__lr="0.1"), run_dir=own / "named")
    run(made(loss__objective="own.py:like_grpo", learn__lr="0.1"), run_dir=own / "function")
    run(made(loss__objective="own.py:plain", learn__lr="0.1"), run_dir=own / "plain")
    named, function, plain = (lines_of(own / name) for name in ("named", "function", "plain"))
    for name in ("loss_objective", "clip_fraction", "grad_norm"):
        assert [line[name] for line in function] == pytest.approx([line[name] for line in named], rel=1e-4, abs=1e-6)
    assert any(line["clip_fraction"] for line in named)
    assert not any(line["clip_fraction"] for line in plain)


def test_steps_of_a_strategy_of_ones_own_are_drawn_again_on_a_resume(own: Path):
    """The ledger names the rows that the function chose, and a resumed run has the straight run's weights."""
    strategy = {"sample__strategy": "own.py:second_half", "learn__epochs": "1"}
    run(made(**strategy), run_dir=own / "half")
    rows = [json.loads(line)["row_ids"] for line in (own / "half" / "ledger.jsonl").read_text().splitlines()]
    assert rows[0] == list(range(6, 12))
    assert rows[1] == list(range(12, 24))  # of 24 young enough ones, the second half
    drawn = {"sample__strategy": "own.py:drawn", "sample__batch_size": "5"}
    run(made(**drawn), run_dir=own / "straight")
    run(made(**drawn, learn__steps="4"), run_dir=own / "resumed")
    run(made(**drawn), run_dir=own / "resumed", resume=True)
    assert weights(own / "resumed") == weights(own / "straight")


def test_metrics_of_ones_own_are_in_the_line(own: Path):
    """One figure under the function's name, several by theirs; a failure or a taken name is absent, with a notice."""
    heard: list[Event] = []
    names = ",".join(f"own.py:{name}" for name in ("longest", "spread", "broken", "clash"))
    run(made(learn__metrics=names), run_dir=own / "run", on_event=heard.append)
    lines = lines_of(own / "run")
    ledger = [json.loads(line)["row_ids"] for line in (own / "run" / "ledger.jsonl").read_text().splitlines()]
    with TrajectoryStore.open(own / "run" / "store", mode="r") as store:
        for line, row_ids in zip(lines, ledger, strict=True):
            rewards = store.read_scalars("task_reward", np.array(row_ids))
            assert line["longest"] == store.lengths("input_ids", np.array(row_ids)).max()
            assert (line["reward_low"], line["reward_high"]) == (rewards.min(), rewards.max())
    assert all("broken" not in line and line["loss"] for line in lines)
    said = " ".join(event.message for event in heard if isinstance(event, Notice))
    assert "step 1: the metric broken failed (ZeroDivisionError: division by zero); its figure is omitted." in said
    assert "the metric clash returns loss, which is already in the line; rename it." in said
    run(tiny(), run_dir=own / "without")
    assert weights(own / "without") == weights(own / "run")


@pytest.mark.parametrize(
    ("field", "function", "sentence"),
    [
        ("loss.objective", "lambda tokens: tokens.advantage", "returned a loss without a gradient with respect to"),
        (
            "loss.objective",
            "lambda tokens: tokens.log_probs[:2]",
            r"returned a tensor of shape \[2\]; it must return a tensor of shape \[6\]",
        ),
        ("loss.objective", "lambda tokens: tokens.colour", "raised AttributeError.*in a test on six tokens"),
        ("write.estimator", "lambda returns, groups: returns", "raised TypeError.*in a test on groups of 3 and 2"),
        (
            "sample.strategy",
            "lambda view, allowed, most, rng: allowed + 1",
            "of the 8 allowed positions, without repeats",
        ),
        ("sample.strategy", "lambda view, allowed, most, rng: allowed", "must return at most 4 of the 8"),
        ("sample.strategy", "lambda view, allowed: allowed", "raised TypeError.*in a test on 8 trajectories"),
        ("learn.metrics", "lambda: 1", "cannot be called with a step as its only argument"),
    ],
)
def test_a_wrong_function_is_refused_before_anything_is_sampled(own: Path, field: str, function: str, sentence: str):
    """One sentence that names the field and what is wrong; no trajectory is stored."""
    Path("wrong.py").write_text(f"wrong = {function}\n")
    pipeline = made(**{field.replace(".", "__"): "wrong.py:wrong"})
    with pytest.raises(DefinitionError, match=rf"(?s){field.split('.')[-1]}.*{sentence}"):
        run(pipeline, run_dir=own / "run")
    if (own / "run" / "store").exists():
        with TrajectoryStore.open(own / "run" / "store", mode="r") as store:
            assert not len(store)


def test_a_file_on_the_command_line_is_recorded_and_its_edit_is_reported(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The whole path is kept, so a resume from elsewhere finds it; foreign code needs --trust, which the text tells."""
    sizes = ("collect.prompts_per_rollout=6", "collect.group_size=5", "policy.hidden_size=16")
    settings = [word for text in (*sizes, "write.estimator=own.py:median") for word in ("--set", text)]
    asked = ["run", "copy_digits", "--steps", "1", *settings, "--out", "run"]
    assert main(asked) == 0
    with TrajectoryStore.open(own / "run" / "store", mode="r") as store:
        found = store.read(store.ids(), ["advantage", "task_reward"])
    rewards = np.asarray(found["task_reward"], np.float64).reshape(6, 5)
    expected = np.where(np.ptp(rewards, axis=1, keepdims=True) > 0, rewards - np.median(rewards, axis=1)[:, None], 0)
    assert expected.any()
    assert np.asarray(found["advantage"]).reshape(6, 5) == pytest.approx(expected, abs=1e-6)
    config = json.loads(Path("run/config.json").read_text())
    assert ["write.estimator", f"{own}/own.py:median"] in config["overrides"]
    recorded = config["pipeline"]["write"]["estimator"]
    assert recorded.endswith(":median")
    assert math.isfinite(lines_of(own / "run")[0]["loss"])
    (own / "sub").mkdir()
    monkeypatch.chdir(own / "sub")
    Path("../own.py").write_text(OWN.replace(".median()", ".mean()"))
    del definitions._LOADED[recorded.partition(":")[0]]  # as in a new process
    capsys.readouterr()
    assert main(["run", "--resume", "--out", "../run", "--steps", "2"]) == 0
    assert f"the advantage estimator {recorded} has been edited" in capsys.readouterr().out
    shutil.copytree("../run", "../copied")
    for command in (["run", "--resume", "--steps", "3", "--out"], ["evaluate"], ["inspect", "--grade"]):
        code = main([*command, "../copied"])
        said = "".join(capsys.readouterr())
        assert "its settings refer to custom code:" in said
        assert code == (0 if command == ["inspect"] else 2)


def test_what_names_no_function_is_one_sentence():
    """A file without it, a field that takes none, and a change in Python instead of on the command line."""
    with pytest.raises(MissingPathError, match=r"there is no file nothing\.py"):
        made(loss__objective="nothing.py:plain")
    with pytest.raises(DefinitionError, match="is not a valid"):
        made(learn__lr="own.py:plain")
    assert dataclasses.replace(tiny().loss, objective=max).objective is max
