"""Several sets of held-out prompts, figures of each reward, and what one steers by, named."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import Collect, Evaluate, Learn, Pipeline, Prompts, Reward, TinyPolicy
from rlhf_pipeline.collectors.curriculum import FollowedMix
from rlhf_pipeline.config_text import override, to_json
from rlhf_pipeline.data.prompts import Curriculum, Mix
from rlhf_pipeline.data.rewards import exact_match
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.pass_at_k import pass_at_k
from rlhf_pipeline.report.figures import figure_of
from rlhf_pipeline.report.query import View
from rlhf_pipeline.run.checkpoint import step_of
from rlhf_pipeline.run.config_diff import changes, notice_of
from rlhf_pipeline.run.events import EvaluationDone, Notice
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from trajectory_store import TrajectoryStore


def questions(first: int, last: int) -> Prompts:
    return Prompts(rows=[{"question": f"{n}=", "answer": str(n)} for n in range(first, last)], as_chat=False)


def acc(completion: str) -> dict[str, float]:
    """Return whether it begins with an even digit, and a component."""
    return {"score": float(completion[:1] in tuple("02468")), "digits": float(sum(map(str.isdigit, completion)))}


def cost(completion: str) -> float:
    """Take a quarter."""
    return -0.25


def pipeline(**changes: Any) -> Pipeline:
    """Return three steps with two sets of held-out prompts."""
    asked = Pipeline(
        name="sets",
        policy=TinyPolicy(alphabet="0123456789=", hidden_size=16, num_layers=1, num_heads=1),
        prompts=questions(0, 4),
        reward=(acc, Reward(cost)),
        collect=Collect(prompts_per_rollout=2, group_size=2, max_new_tokens=2),
        learn=Learn(steps=3, lr=0.1, checkpoint_every=3, keep_checkpoints=1),
        evaluate={
            "easy": Evaluate(prompts=questions(10, 14), every=1, group_size=4, success="acc"),
            "hard": Evaluate(
                prompts=questions(20, 26),
                every=2,
                group_size=2,
                success="acc",
                best="pass@2",
                max_new_tokens=1,
                top_k=3,
                at_start=False,
            ),
        },
    )
    return replace(asked, **changes)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_each_set_has_figures_of_each_reward_and_one_names_the_best(tmp_path: Path) -> None:
    """Figures against the stored rows, sampling of its own, and the checkpoint that one set's named figure keeps."""
    events: list[Any] = []
    folder = tmp_path / "run"
    run(pipeline(), run_dir=folder, on_event=events.append)
    lines = lines_of(folder)
    found: dict[str, dict[int, float]] = {"easy": {}, "hard": {}}
    for place in (folder / "evaluations").iterdir():
        name = place.name.partition("-")[0]
        with TrajectoryStore.open(place) as store:
            rows = store.read(store.ids())
        for step in sorted({*rows["policy_version"].tolist()}):
            at = rows["policy_version"] == step
            right = rows["reward_acc"][at] >= 1.0
            _, prompt = np.unique(rows["group_id"][at], return_inverse=True)
            size = 4 if name == "easy" else 2
            want = pass_at_k(np.full(prompt.max() + 1, size), np.bincount(prompt, right), 2)
            found[name][step] = want
            if step == 0:
                continue
            line = {key: value for key, value in lines[step - 1].items() if key.startswith(f"evaluation/{name}/")}
            assert line[f"evaluation/{name}/pass@2"] == pytest.approx(want)
            assert line[f"evaluation/{name}/reward/acc"] == pytest.approx(rows["reward_acc"][at].mean())
            assert line[f"evaluation/{name}/reward/cost"] == -0.25
            assert line[f"evaluation/{name}/reward/acc_digits"] == pytest.approx(rows["reward_acc_digits"][at].mean())
            assert line[f"evaluation/{name}/reward"] == pytest.approx(rows["task_reward"][at].mean(), abs=1e-6)
        lengths = [len(ids) - num for ids, num in zip(rows["input_ids"], rows["num_prompt_tokens"], strict=True)]
        assert max(lengths) == (2 if name == "easy" else 1)
        firsts = {text[:1] for text, prompt in zip(rows["completion"], rows["prompt"], strict=True)}
        assert len(firsts) > 3 or name == "hard"
    assert (sorted(found["easy"]), sorted(found["hard"])) == ([0, 1, 2, 3], [2])
    saved = {step_of(one) for one in RunFolder(folder).saved()}
    assert saved == {2, 3}  # the newest, and the only one of the deciding set
    done = [(one.name, one.step, one.best) for one in events if isinstance(one, EvaluationDone)]
    assert done == [("easy", 0, False), ("easy", 1, False), ("easy", 2, False), ("hard", 2, True), ("easy", 3, False)]
    with closing(View(folder)) as view:
        steps = {one["name"]: one["step"] for one in view.evaluations()}
        assert steps == {"easy": [0, 1, 2, 3], "hard": [2]}
        easy = next(one for one in view.evaluations() if one["name"] == "easy")
        assert easy["values"]["evaluation/pass@2"] == pytest.approx([found["easy"][step] for step in range(4)])
        assert view.about()["evaluation"] == lines[-1]["evaluation/easy/reward"]
    assert figure_of("evaluation/hard/reward/acc") is not None


def test_all_right_at_a_cost_is_right_by_the_named_reward(tmp_path: Path) -> None:
    """pass@k and the best checkpoint go by accuracy, not by the weighted sum; a name that nobody has is said."""

    def right(completion: str) -> float:
        return 1.0

    events: list[Any] = []
    held_out = Evaluate(prompts=questions(4, 8), every=1, group_size=4, success="right", best="right", at_start=False)
    asked = pipeline(reward=(right, Reward(cost)), evaluate=held_out, learn=Learn(steps=1))
    run(asked, run_dir=tmp_path / "run", on_event=events.append)
    (line,) = lines_of(tmp_path / "run")
    assert (line["evaluation/pass@1"], line["evaluation/reward"], line["evaluation/reward/right"]) == (1.0, 0.75, 1.0)
    asked = replace(asked, evaluate=replace(held_out, success="rihgt", best=None))
    run(asked, run_dir=tmp_path / "other", on_event=events.append)
    assert lines_of(tmp_path / "other")[0].get("evaluation/pass@1") is None
    said = [one.message for one in events if isinstance(one, Notice)]
    assert any("evaluate.success is 'rihgt'" in one and "the names are: cost, right" in one for one in said)


def test_sets_are_checked_and_set_by_name() -> None:
    """What cannot be is one sentence; `--set` and resumes name a set's field."""
    asked = pipeline()
    assert override(asked, "evaluate.hard.every", "7").evaluations["hard"].every == 7
    with pytest.raises(DefinitionError, match="there is no 'hrad'"):
        override(asked, "evaluate.hrad.every", "7")
    changed = override(asked, "evaluate.hard.top_p", "0.5")
    (change,) = changes(to_json(asked), changed)
    assert "differ from earlier ones" in str(notice_of(change, to_json(asked), changed, 3))
    named = Evaluate(prompts=questions(4, 8), best="cost")
    for wrong, said in (
        ({"a/b": named}, "not a valid folder name"),
        ({"a": named, "b": replace(named, best="acc")}, "several evaluations specify `best`, but only one may select"),
        ({}, "empty dict"),
        ({"a": 3}, "it must be"),
    ):
        with pytest.raises(DefinitionError, match=said):
            replace(asked, evaluate=wrong)
    with pytest.raises(DefinitionError, match="dynamic is 1, which keeps every group"):
        Collect(dynamic_by="right")
    plain = (Reward(exact_match, name="right"),)
    for field, wrong in (
        ("collect", replace(asked.collect, dynamic=2, dynamic_by="rigth")),
        ("evaluate", replace(named, best="rigth")),
        ("evaluate", replace(named, best=None, success="rigth")),
    ):
        with pytest.raises(DefinitionError, match="is 'rigth', but the rewards are: right"):
            replace(asked, reward=plain, **{"evaluate": None, field: wrong})


def test_dynamic_sampling_by_a_named_reward_drops_groups_that_only_shaping_tells_apart(tmp_path: Path) -> None:
    """All wrong but shaped: with the sum such a group is kept, by accuracy it is not."""

    def right(prompt: str, completion: str) -> float:
        return float(prompt == "3=" and completion[:1] in tuple("01234"))

    def shaped(completion: str) -> float:
        return int(completion[:1] or 0) / 100

    steered = Collect(prompts_per_rollout=1, group_size=8, max_new_tokens=1, dynamic=8, dynamic_by="right")
    asked = pipeline(reward=(right, shaped), evaluate=None, collect=steered, learn=Learn(steps=2))
    for name, by in (("by", "right"), ("sum", None)):
        run(replace(asked, collect=replace(steered, dynamic_by=by)), run_dir=tmp_path / name)
    with TrajectoryStore.open(tmp_path / "by" / "store") as store:
        assert {*store.read(store.ids())["prompt"]} == {"3="}
    lines = {name: lines_of(tmp_path / name) for name in ("by", "sum")}
    assert max(line["rounds"] for line in lines["by"]) > 1
    assert [line["rounds"] for line in lines["sum"]] == [1, 1]


def test_a_curriculum_follows_a_named_reward(tmp_path: Path) -> None:
    """Success is the named reward's, not the sum's."""
    with TrajectoryStore.create(tmp_path / "s", _schema()) as store:
        rows = {"task_reward": [1.0, 1.0, 1.0, 1.0], "reward_right": [1.0, 0.0, 1.0, 1.0], "group_id": [0, 0, 1, 1]}
        typed = {
            name: np.array(values, np.int64 if name == "group_id" else np.float32) for name, values in rows.items()
        }
        store.append({"input_ids": [np.arange(2, dtype=np.int32)] * 4, **typed})
        mix = Mix((questions(0, 2), questions(2, 4)))
        sums, named = (
            FollowedMix(mix, Curriculum(every=1, least=0.2, by=by), store, 2).weights(1) for by in (None, "right")
        )
    assert sums == [0.2, 0.2]
    assert named == [1.0, 0.2]


def _schema() -> Any:
    from rlhf_pipeline.buffer.trajectory_schema import named_reward, trajectory_schema

    return trajectory_schema([named_reward("right")])
