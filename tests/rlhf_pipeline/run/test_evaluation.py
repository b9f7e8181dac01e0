"""Evaluations of a run: they change nothing that is learned, are resumed exactly, and name the best checkpoint."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import linecache
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import CopyDigits, Evaluate, Pipeline, Prompts, Reward, exact_match, token_match
from rlhf_pipeline.cli import main
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.report.query import View
from rlhf_pipeline.run.evaluation_rows import evaluation_figures, evaluation_store, stored_evaluations
from rlhf_pipeline.run.events import EvaluationDone, Event, Notice
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.recorded_code import describe_code
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import changed, count_kills, make_store, offline, tiny, weights
from trajectory_store import TrajectoryStore

HELD_OUT = Evaluate(prompts=CopyDigits(num_digits=3), every=2, num_prompts=5, group_size=4, success_at=0.5)


def evaluated(evaluate: Evaluate = HELD_OUT, **changes: str) -> Pipeline:
    return dataclasses.replace(changed(tiny(), **changes), evaluate=evaluate)


def rows_of(pipeline: Pipeline, run_dir: Path) -> dict[str, Any]:
    """The rows of its evaluations, without times."""
    assert pipeline.evaluate is not None
    path = evaluation_store(RunFolder(run_dir), pipeline, pipeline.evaluate)
    with TrajectoryStore.open(path, mode="r") as store:
        names = ["policy_version", "group_id", "task_reward", "completion", "input_ids", "evaluation", "log_probs"]
        found = store.read(store.ids(), names)
    return {name: [np.asarray(one).tolist() for one in values] for name, values in found.items()}


def figures_of(run_dir: Path) -> list[dict[str, Any]]:
    """The figures of evaluations in metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name.startswith("evaluation/") and "seconds" not in name}
        for line in lines
    ]


def test_an_evaluation_changes_nothing_that_is_learned(tmp_path):
    """Weights, rows and lines are those of a run without; the figures are in every second line, the start is told."""
    events: list[Event] = []
    pipeline = evaluated()
    run(tiny(), run_dir=tmp_path / "without")
    run(pipeline, run_dir=tmp_path / "with", on_event=events.append)
    assert weights(tmp_path / "with") == weights(tmp_path / "without")
    stored = []
    for name in ("with", "without"):
        with TrajectoryStore.open(tmp_path / name / "store", mode="r") as store:
            stored.append((store.ids().tolist(), store.read(store.ids(), ["completion", "task_reward"])["completion"]))
    assert stored[0] == stored[1]
    assert not (tmp_path / "without" / "evaluations").exists()
    told = [event for event in events if isinstance(event, EvaluationDone)]
    assert [event.step for event in told] == [0, 2, 4, 6]
    assert [bool(line) for line in figures_of(tmp_path / "with")] == [False, True] * 3
    rows = rows_of(pipeline, tmp_path / "with")
    assert set(rows["evaluation"]) == {True}
    assert len(rows["completion"]) == 4 * 5 * 4
    first = np.array(rows["task_reward"][20:40]).reshape(5, 4)
    line = figures_of(tmp_path / "with")[1]
    assert line["evaluation/reward"] == pytest.approx(first.mean())
    half = 1.959964 * first.mean(1).std(ddof=1) / 5**0.5
    assert line["evaluation/reward_high"] - line["evaluation/reward"] == pytest.approx(half, rel=1e-5)
    assert line["evaluation/pass@4"] == pytest.approx((first >= 0.5).any(1).mean())
    assert line["evaluation/pass@1"] == pytest.approx((first >= 0.5).mean())


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    """The one with the highest mean, the earliest of equal ones, though newer ones are kept; none without the rule."""
    events: list[Event] = []
    pipeline = evaluated(learn__keep_checkpoints="1", learn__checkpoint_every="1", learn__lr="1e-9")
    run(pipeline, run_dir=tmp_path / "run", on_event=events.append)
    means = {one.step: one.figures["evaluation/reward"] for one in events if isinstance(one, EvaluationDone)}
    best = min(means, key=lambda step: (-float(means[step] or 0), step))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == sorted({f"step-{best:08d}", "step-00000006"})
    assert [one.step for one in events if isinstance(one, EvaluationDone) and one.best][-1] == best
    other = dataclasses.replace(pipeline, evaluate=dataclasses.replace(HELD_OUT, keep_best=False))
    run(other, run_dir=tmp_path / "other")
    assert [path.name for path in (tmp_path / "other" / "checkpoints").iterdir()] == ["step-00000006"]


def test_a_run_of_stores_is_evaluated_with_the_most_probable_tokens(tmp_path):
    """Offline learning samples nothing else; at temperature 0 the members of a group are one completion."""
    evaluate = dataclasses.replace(HELD_OUT, temperature=0.0)
    pipeline = dataclasses.replace(offline(make_store(tmp_path / "store", groups=(4,) * 6)), evaluate=evaluate)
    run(pipeline, run_dir=tmp_path / "run")
    said = np.array(rows_of(pipeline, tmp_path / "run")["completion"]).reshape(-1, 4)
    assert (said == said[:, :1]).all()
    assert [bool(line) for line in figures_of(tmp_path / "run")] == [False, True, False, True]


def test_rows_of_evaluations_are_not_learned_from(tmp_path):
    """A replay of their store finds nothing to choose."""
    pipeline = evaluated()
    run(pipeline, run_dir=tmp_path / "run")
    assert pipeline.evaluate is not None
    path = evaluation_store(RunFolder(tmp_path / "run"), pipeline, pipeline.evaluate)
    with pytest.raises(Exception, match="nothing to learn from"):
        run(offline(Path(str(path))), run_dir=tmp_path / "again")


def test_prompts_that_are_learned_from_are_refused(tmp_path):
    """Two files that share a question, and a reward that cannot grade the held-out prompts."""
    for name, first in (("train", 0), ("test", 2)):
        lines = [json.dumps({"question": f"{first + i}=", "answer": "1"}) for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    train, test = (Prompts(path=str(tmp_path / f"{name}.jsonl")) for name in ("train", "test"))
    shared = dataclasses.replace(tiny(), prompts=train, evaluate=dataclasses.replace(HELD_OUT, prompts=test))
    with pytest.raises(DefinitionError, match=r"are also training prompts, for example '2=' \(1 in total\)"):
        Run(pipeline=shared, run_dir=tmp_path / "run").checked()
    with pytest.raises(DefinitionError, match=r"evaluate\.prompts to prompts that the run does not learn from"):
        dataclasses.replace(tiny(), evaluate=Evaluate())


def test_a_resume_says_that_evaluations_are_others(tmp_path):
    """Changed prompts of a file, and a changed size: each one sentence, a store of their own, and no comparison."""
    file = tmp_path / "test.jsonl"

    def of(questions: range, steps: int, **changes: Any) -> Pipeline:
        file.write_text("\n".join(json.dumps({"question": f"{n}=", "answer": str(n)}) for n in questions))
        prompts = dataclasses.replace(HELD_OUT, prompts=Prompts(path=str(file)), num_prompts=3, **changes)
        return evaluated(prompts, learn__steps=str(steps))

    def resumed(pipeline: Pipeline) -> tuple[str, list[EvaluationDone]]:
        events: list[Event] = []
        run(pipeline, run_dir=tmp_path / "run", resume=True, on_event=events.append)
        said = [event.message for event in events if isinstance(event, Notice) and "evaluat" in event.message]
        return " ".join(said), [event for event in events if isinstance(event, EvaluationDone)]

    run(of(range(100, 103), 2), run_dir=tmp_path / "run")
    said, _ = resumed(of(range(100, 103), 4))
    assert not said
    said, done = resumed(of(range(200, 203), 6))
    assert f"{file} (evaluate.prompts.path) has changed since the run was last started: its size is " in said
    assert "they are stored separately, and the best checkpoint is selected only from them." in said
    assert [(event.step, event.best) for event in done] == [(6, True)]
    said, done = resumed(of(range(200, 203), 8, group_size=2))
    change = (
        "evaluate.group_size was 4 and is now 2: evaluations from step 7 on differ from earlier ones; they are stored"
    )
    assert change in said
    assert [(event.step, event.best) for event in done] == [(8, True)]
    assert len(list((tmp_path / "run" / "evaluations").iterdir())) == 3


def test_a_held_out_prompt_that_is_too_long_is_refused_before_anything_is_sampled(tmp_path):
    """Of a run with evaluation all held-out prompts are checked as its own are; the sentence names the row."""
    rows = [{"question": "12=", "answer": "12"}, {"question": "7" * 5000, "answer": ""}]
    pipeline = evaluated(dataclasses.replace(HELD_OUT, prompts=Prompts(rows=rows)))
    with pytest.raises(DataError, match="tokens"):
        run(pipeline, run_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "evaluations").exists()
    some = dataclasses.replace(HELD_OUT, prompts=Prompts(rows=rows, skip="too_long"))
    run(evaluated(some, learn__steps="2"), run_dir=tmp_path / "skipped")
    assert set(rows_of(evaluated(some, learn__steps="2"), tmp_path / "skipped")["group_id"]) == {0, 2}


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_kills_during_rollouts_and_evaluations_change_nothing(tmp_path, children):
    """Killed ten times by a reward: the rows, figures and weights of two weighted rewards are the straight run's."""
    calls = tmp_path / "calls"

    def deadly(prompt, completion, answer):
        count = int(calls.read_text()) + 1 if calls.exists() else 1
        calls.write_text(str(count))
        if count % 14 == 0 and count <= 140:
            os.kill(os.getpid(), signal.SIGKILL)
        return token_match(prompt, completion, answer, {})

    def gentle(prompt, completion, answer):
        return token_match(prompt, completion, answer, {})

    def of(function: Any) -> Pipeline:
        rewards = (Reward(function, weight=2.0, name="digits"), Reward(exact_match, weight=0.5))
        pipeline = changed(evaluated(), collect__reward_concurrency="1")
        return dataclasses.replace(pipeline, reward=rewards)

    run(of(gentle), run_dir=tmp_path / "straight")
    assert count_kills(children, of(deadly), tmp_path / "killed") == 10
    assert weights(tmp_path / "killed") == weights(tmp_path / "straight")
    assert figures_of(tmp_path / "killed") == figures_of(tmp_path / "straight")
    killed, straight = rows_of(of(deadly), tmp_path / "killed"), rows_of(of(gentle), tmp_path / "straight")
    assert repr(killed) == repr(straight)
    found = []
    for name in ("killed", "straight"):
        with TrajectoryStore.open(tmp_path / name / "store", mode="r") as store:
            found.append(store.read(store.ids(), ["completion", "reward_digits", "reward_exact_match", "advantage"]))
    for column in ("completion", "reward_digits", "advantage"):
        assert np.asarray(found[0][column]).tolist() == np.asarray(found[1][column]).tolist()


def test_figures_of_a_store_are_those_of_the_run(tmp_path):
    """What `rlhf-pipeline evaluate` reads from the store is what the lines said; failed calls are left out."""
    pipeline = dataclasses.replace(
        evaluated(), reward=lambda completion, answer: 1.0 if completion[:1] < "5" else 1 / 0
    )
    run(pipeline, run_dir=tmp_path / "run")
    assert pipeline.evaluate is not None
    path = evaluation_store(RunFolder(tmp_path / "run"), pipeline, pipeline.evaluate)
    with TrajectoryStore.open(path, mode="r") as store:
        found = stored_evaluations(store, {"success_at": 0.5})
        last = evaluation_figures(store, store.ids()[-20:], {"success_at": 0.5})
    assert [one["step"] for one in found] == [0, 2, 4, 6]
    assert {**last, "step": 6} == found[-1]
    lines = figures_of(tmp_path / "run")
    assert [one["evaluation/failed"] for one in found[1:]] == [line["evaluation/failed"] for line in lines[1::2]]
    assert found[0]["evaluation/failed"] > 0
    assert found[0]["evaluation/reward"] == 1.0
    with TrajectoryStore.open(path, mode="r") as store, TrajectoryStore.open(path, mode="a") as writer:
        ids = store.ids()
        writer.append(writer.read(ids))
        writer.compact()  # a reader whose rows were merged follows the catalog to the newer rows
        assert stored_evaluations(store, {"success_at": 0.5}) == found


class Score:
    """A grader of digits with a weight, which counts its calls."""

    def __init__(self, weight: float) -> None:
        self.weight, self.calls = weight, 0

    def __call__(self, completion: str) -> float:
        self.calls += 1
        return self.weight * len(completion)


def test_a_changed_grader_is_reported_and_the_best_checkpoint_selected_from_there(tmp_path, capsys):
    """One warning states what changed; evaluations are apart; `status`, `ledger` and `view` show from which step."""

    def go_on(weight: float, steps: int) -> tuple[list[str], list[EvaluationDone]]:
        events: list[Event] = []
        pipeline = evaluated(learn__steps=str(steps), learn__keep_checkpoints="9")
        pipeline = dataclasses.replace(pipeline, reward=Score(weight))
        run(pipeline, run_dir=tmp_path / "run", resume=steps > 2, on_event=events.append)
        notices = [
            event.message for event in events if isinstance(event, Notice) and "reward function" in event.message
        ]
        return notices, [event for event in events if isinstance(event, EvaluationDone)]

    go_on(2.0, 2)
    notices, _ = go_on(2.0, 4)  # its calls are no change
    assert notices == []
    (notice,), done = go_on(-1.0, 6)
    assert "Score has been edited since the run was last started (attribute weight was 2.0 and is now -1.0)" in notice
    assert "new evaluations use the edited version; they are stored separately" in notice
    assert [(event.step, event.best) for event in done] == [(6, True)]  # though every earlier mean is higher
    assert len(list((tmp_path / "run" / "evaluations").iterdir())) == 2
    notices, done = go_on(-1.0, 8)
    assert notices == []
    assert len(list((tmp_path / "run" / "evaluations").iterdir())) == 2
    what = "reward tests.rlhf_pipeline.run.test_evaluation:Score: attribute weight was 2.0 and is now -1.0"
    with closing(View(tmp_path / "run")) as view:
        assert [grader["from_step"] for grader in view.graders()] == [1, 5]
        assert view.definition()["grader from step 5"] == what
        assert [row["grader"] for row in view.ledger()] == [1] * 4 + [2] * 4
    assert main(["ledger", str(tmp_path / "run")]) == 0
    assert f"grader 2, from step 5: {what}" in capsys.readouterr().out
    main(["status", str(tmp_path / "run")])
    assert f"from step 5: {what}" in " ".join(capsys.readouterr().out.split())


def test_a_run_recorded_by_text_is_compared_by_text(tmp_path):
    """A run that was begun before there were identities keeps its store of evaluations, and sees edits of the text."""
    file = tmp_path / "score.py"

    def scored(factor: str, steps: int) -> Pipeline:
        file.write_text(f"FACTOR = {factor}\n\ndef score(completion):\n    return FACTOR * len(completion)\n")
        linecache.checkcache()
        spec = importlib.util.spec_from_file_location("definition_score", file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["definition_score"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return dataclasses.replace(evaluated(learn__steps=str(steps)), reward=module.score)

    pipeline = scored("2", 2)
    run_dir = tmp_path / "run"
    run(pipeline, run_dir=run_dir)
    record = json.loads((run_dir / "config.json").read_text())
    del record["crc32c"], record["identity"]
    record["inputs"] = describe_code(pipeline, by_text=True)
    (run_dir / "config.json").write_text(json.dumps(record))
    (store,) = (run_dir / "evaluations").iterdir()
    assert pipeline.evaluate is not None
    by_text = evaluation_store(RunFolder(run_dir), pipeline, pipeline.evaluate)
    store.rename(by_text)
    for factor, steps, expected in (("2", 4, []), ("3", 6, ["edited since the run was last started: "])):
        events: list[Event] = []
        run(scored(factor, steps), run_dir=run_dir, resume=True, on_event=events.append)
        notices = [event.message for event in events if isinstance(event, Notice) and "edited" in event.message]
        assert len(notices) == len(expected)
        assert all(text in notice for text, notice in zip(expected, notices, strict=True))
    assert {path.name for path in (run_dir / "evaluations").iterdir()} > {Path(str(by_text)).name}
    assert "identity" not in json.loads((run_dir / "config.json").read_text())


def test_the_figure_for_the_best_weights_must_exist(tmp_path):
    """pass@k of more completions than a group has, and a misspelt name: refused at once or by the first evaluation."""
    with pytest.raises(DefinitionError, match=r"best is 'pass@8', but group_size is 4.*best='pass@4'"):
        Evaluate(prompts=CopyDigits(num_digits=3), group_size=4, best="pass@8")
    with pytest.raises(DefinitionError, match="best is 'pass@0'"):
        Evaluate(prompts=CopyDigits(num_digits=3), best="pass@0")

    for field in ("best", "success"):
        misspelt = dataclasses.replace(HELD_OUT, **{field: "acuracy"})
        with pytest.raises(DefinitionError, match=f"evaluate.{field} is 'acuracy', but the rewards are: accuracy"):
            dataclasses.replace(evaluated(), evaluate=misspelt, reward=Reward(exact_match, name="accuracy"))
        unknown = dataclasses.replace(evaluated(), evaluate=misspelt, reward=lambda completion: 1.0)
        with pytest.raises(DefinitionError, match=rf"evaluate\.{field} is 'acuracy', .* --set evaluate\.{field}=none"):
            run(unknown, run_dir=tmp_path / field)
        fixed = changed(unknown, **{f"evaluate__{field}": "none"})
        run(fixed, run_dir=tmp_path / field, resume=True)  # what the message advises


def test_pass_at_any_k_chooses_the_best_weights(tmp_path):
    """Of groups of 6, pass@6 and pass@3, which are no powers of two, have figures and a best checkpoint."""
    for best in ("pass@6", "pass@3"):
        events: list[Event] = []
        held_out = dataclasses.replace(HELD_OUT, group_size=6, best=best)
        run(evaluated(held_out, learn__steps="2"), run_dir=tmp_path / best, on_event=events.append)
        done = [event for event in events if isinstance(event, EvaluationDone)]
        assert {"evaluation/pass@1", "evaluation/pass@6", f"evaluation/{best}"} <= done[0].figures.keys()
        assert done[0].best
