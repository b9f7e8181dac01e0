"""`rlhf-pipeline evaluate`: of a checkpoint of a finished run, and of a model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.cli import main
from trajectory_store import TrajectoryStore

from .conftest import Cli

MINE = """\
from rlhf_pipeline import Collect, CopyDigits, Evaluate, Learn, Pipeline, TinyPolicy, token_match


def mine() -> Pipeline:
    return Pipeline(
        name="mine",
        policy=TinyPolicy(hidden_size=16, num_layers=1, num_heads=2),
        prompts=CopyDigits(num_digits=2),
        reward=token_match,
        collect=Collect(prompts_per_rollout=3, group_size=4, max_new_tokens=3),
        learn=Learn(steps=4, lr=1e-2, checkpoint_every=2),
        evaluate=Evaluate(prompts=CopyDigits(num_digits=3), every=2, num_prompts=5, group_size=4, success_at=0.5),
    )


def without() -> Pipeline:
    return dataclasses.replace(mine(), evaluate=None)
"""
QUESTIONS = [{"question": f"{n}=", "answer": str(n)} for n in (123, 456, 789)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a definition of one's own, with a file of other prompts."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mine.py").write_text("import dataclasses\n" + MINE)
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["run", "mine.py:mine", "--out", "runs/mine"]) == 0
    return folder


@pytest.fixture
def here(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with that run as if it had been started here."""
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    config = json.loads(Path("runs/mine/config.json").read_text())
    config["place"]["path"] = str(Path("runs/mine").absolute())
    del config["crc32c"]  # as who edits it is told to do
    Path("runs/mine/config.json").write_text(json.dumps(config))
    return tmp_path / "copy"


def figures(cli: Cli, *args: str) -> dict[str, Any]:
    """The figures of an evaluation, without its time."""
    shown = cli("evaluate", *args, "--json")
    assert shown.code == 0, shown.err
    found = json.loads(shown.out)
    found.pop("evaluation/seconds")
    return found


def rows_of(path: str) -> dict[str, Any]:
    """All rows of a store of evaluations."""
    with TrajectoryStore.open(path, mode="r") as store:
        names = ["policy_version", "group_id", "task_reward", "completion", "prompt", "evaluation"]
        return {name: np.asarray(values) for name, values in store.read(store.ids(), names).items()}


def test_a_checkpoint_is_evaluated_as_the_run_evaluated_it(cli: Cli, here: Path):
    """What is stored is read; without the rows, each checkpoint's figures are again those in metrics.jsonl."""
    lines = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    stored = figures(cli, "runs/mine")
    before = rows_of(stored["store"])
    assert stored["step"] == 4
    assert len(before["completion"]) == 3 * 5 * 4  # steps 0, 2 and 4, and nothing more
    shutil.rmtree("runs/mine/evaluations")
    for step in (2, 4):
        again = figures(cli, "runs/mine", "--step", str(step))
        for name, value in again.items():
            assert name in ("step", "store") or value == lines[step - 1][name], name
        assert again["store"] == stored["store"]
    after = rows_of(stored["store"])
    kept = before["policy_version"] > 0
    assert {name: values[kept].tolist() for name, values in before.items()} == {
        name: values.tolist() for name, values in after.items()
    }
    means = {step: lines[step - 1]["evaluation/reward"] for step in (2, 4)}
    assert figures(cli, "runs/mine", "--best")["step"] == max(means, key=lambda step: (means[step], -step))


def test_other_prompts_are_stored_apart_and_their_figures_are_those_of_the_rows(cli: Cli, here: Path):
    """Mean, interval and pass@k of a file's prompts, by NumPy from the store; the text tells them, and what is next."""
    asked = ("runs/mine", "--prompts", "test.jsonl", "--group-size", "2", "--set", "evaluate.success_at=0.3")
    found, own = figures(cli, *asked), figures(cli, "runs/mine")
    assert found["store"] != own["store"]
    rows = rows_of(found["store"])
    assert sorted(set(rows["prompt"])) == [row["question"] for row in QUESTIONS]
    assert rows["evaluation"].all()
    rewards = rows["task_reward"].astype(np.float64).reshape(3, 2)
    means = rewards.mean(1)
    half = 1.959964 * means.std(ddof=1) / 3**0.5
    assert found["evaluation/reward"] == pytest.approx(means.mean())
    assert found["evaluation/reward_low"] == pytest.approx(means.mean() - half, abs=1e-6)
    assert found["evaluation/pass@1"] == pytest.approx((rewards >= 0.3).mean())
    assert found["evaluation/pass@2"] == pytest.approx((rewards >= 0.3).any(1).mean())
    shown = cli("evaluate", *asked)
    assert f"runs/mine, step 4: reward {found['evaluation/reward']:.2f} (" in shown.out
    assert f"rlhf-pipeline view {found['store']}\n" in shown.out
    assert "rlhf-pipeline evaluate runs/mine --step 2\n" in shown.out
    assert len(rows_of(found["store"])["prompt"]) == 6  # read, not sampled again
    Path("test.jsonl").write_text(json.dumps({"question": "321=", "answer": "321"}))
    assert figures(cli, *asked)["store"] != found["store"]  # the same path, other prompts


def test_a_model_folder_needs_a_definition(cli: Cli, here: Path):
    """With the most probable tokens it has the figures of the checkpoint that it is; other weights are stored apart."""
    folders = [f"runs/mine/checkpoints/step-0000000{step}" for step in (2, 4)]
    asked = ("--definition", "mine.py:mine", "--temperature", "0", "--out", "out")
    found = [figures(cli, folder, *asked) for folder in folders]
    assert found[0]["store"] != found[1]["store"]
    for step, one in zip(("2", "4"), found, strict=True):
        of_run = figures(cli, "runs/mine", "--temperature", "0", "--step", step)
        assert {**of_run, "step": 0, "store": one["store"]} == one
    shown = cli("evaluate", folders[0])
    assert shown.code == 2
    assert "which has no reward function. Specify a definition that has one" in shown.err


TEMPLATED = """\
from rlhf_pipeline import Collect, Evaluate, Pipeline, PretrainedPolicy, Prompts


def ends_as_rendered(prompt_text: str) -> float:
    return float(prompt_text.endswith("77="))


def templated() -> Pipeline:
    return Pipeline(
        name="templated",
        policy=PretrainedPolicy(
            path="elsewhere", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}77=", lora_rank=4
        ),
        prompts=Prompts(rows=[{"question": "1=", "answer": "1"}]),
        reward=ends_as_rendered,
        collect=Collect(max_new_tokens=3),
        evaluate=Evaluate(prompts=Prompts(rows=[{"question": "2=", "answer": "2"}]), group_size=4, best="pass@4"),
    )
"""


def test_a_model_is_evaluated_with_the_policy_of_the_definition(cli: Cli, here: Path):
    """Its chat template is the definition's, not the folder's; and a smaller group needs no figure `best`."""
    Path("templated.py").write_text(TEMPLATED)
    model = "runs/mine/checkpoints/step-00000002"
    asked = (model, "--definition", "templated.py", "--out", "out", "--group-size", "2")
    assert figures(cli, *asked)["evaluation/reward"] == 1.0
    Path("templated.py").write_text(TEMPLATED.replace("{% endfor %}77=", "{% endfor %}"))
    assert figures(cli, *asked)["evaluation/reward"] == 0.0


def test_what_cannot_be_evaluated_is_one_sentence(cli: Cli, here: Path):
    """A step that is not kept, no prompts, a model of another kind, nothing there, and code of elsewhere."""
    for args, sentence in (
        (["runs/mine", "--step", "1"], "no checkpoint of step 1; it has checkpoints of steps 2, 4"),
        (["runs/mine", "--definition", "mine.py:without"], "so prompts are required: --prompts FILE"),
        (["runs/mine", "--set", "policy.num_layers=2"], "was started with another model: policy.num_layers was 1"),
        (["nothing"], "there is no run or model folder at nothing"),
        (["runs/mine", "--out", "x"], "the evaluation rows of a run are stored in the run folder"),
    ):
        shown = cli("evaluate", *args)
        assert (shown.code, sentence in shown.err) == (2, True), shown.err
    shutil.copytree("runs/mine", "elsewhere")
    Path("mine.py").rename("moved.py")
    refused = cli("evaluate", "elsewhere")
    assert refused.code == 2
    assert "add --trust to execute it" in refused.err
    assert figures(cli, "elsewhere", "--trust")["step"] == 4
