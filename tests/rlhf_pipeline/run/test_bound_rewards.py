"""One binding of rewards for the check, the run, its evaluation and grading again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline import Evaluate, Prompts
from rlhf_pipeline.cli import main as cli
from rlhf_pipeline.config_text import override
from rlhf_pipeline.definitions import find
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.bound_rewards import bound_rewards
from rlhf_pipeline.run.preflight import check_evaluation, check_prompts_and_reward
from trajectory_store import TrajectoryStore

DEFINITION = """\
import json
from rlhf_pipeline import Collect, Evaluate, Learn, LeftOut, Pipeline, Prompts, Reward, TinyPolicy

TEMPLATE = "{% for m in messages %}{{ m['content'] }}={% endfor %}t"


def rows(first, last):
    ask = lambda n: [{"role": "user", "content": str(n)}]
    return [{"prompt": ask(n), "gold": str(n % 3), "difficulty": n, "answer": str(n)} for n in range(first, last)]


def seen(name, **kinds):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps([name, {key: type(value).__name__ for key, value in kinds.items()}]) + "\\n")


def batched(prompts, completions, gold, difficulty, answer, **kwargs):
    seen("batched", completions=completions, completion=completions[0], gold=gold, rest=kwargs["source_line"])
    assert prompts[0][0]["content"] == answer[0] == str(difficulty[0])
    return [len(one[0]["content"]) + int(right) for one, right in zip(completions, gold)]


def four(prompt_text, completion, gold, difficulty):
    seen("four", completion=completion, gold=gold)
    assert prompt_text == f"{difficulty}=t", prompt_text
    return {"score": int(gold) + len(completion) / 8, "ends": float(prompt_text.endswith("t"))}


def cut(finish_reason):
    if finish_reason == "length":
        raise LeftOut("truncated")  # out of baseline and loss, and graded by the others in an evaluation


def main():
    data = lambda first, last: Prompts(rows=rows(first, last), prompt_field="prompt", answer_field=None)
    return Pipeline(
        name="four", policy=TinyPolicy(alphabet="0123456789=t", hidden_size=8, num_heads=1, chat_template=TEMPLATE),
        prompts=data(0, 4), reward=(batched, Reward(four), cut), evaluate=Evaluate(prompts=data(4, 6), every=1),
        collect=Collect(prompts_per_rollout=2, group_size=2, max_new_tokens=4), learn=Learn(steps=1),
    )
"""


def test_check_run_evaluation_and_grading_again_call_a_function_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two functions with four required arguments, columns among them, on prompts that are messages."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(DEFINITION, encoding="utf-8")
    assert cli(["run", "mine.py:main", "--out", "run"]) == 0, capsys.readouterr().err
    during = set(Path("calls.jsonl").read_text(encoding="utf-8").splitlines())
    Path("calls.jsonl").unlink()
    assert cli(["inspect", "run", "--grade"]) == 0, capsys.readouterr().out
    (held_out,) = Path("run/evaluations").iterdir()
    assert cli(["inspect", str(held_out), "--grade", "--definition", "mine.py:main"]) == 0, capsys.readouterr().out
    assert set(Path("calls.jsonl").read_text(encoding="utf-8").splitlines()) == during
    assert sorted(map(json.loads, during)) == [
        ["batched", {"completions": "list", "completion": "list", "gold": "list", "rest": "list"}],
        ["four", {"completion": "str", "gold": "str"}],
    ]
    for place in (Path("run/store"), held_out):
        with TrajectoryStore.open(place) as store:
            found = store.read(store.ids(), ["completion", "meta", "reward_batched", "reward_four"])
        for number, meta in enumerate(map(json.loads, found["meta"])):
            gold, length = int(meta["prompt"]["gold"]), len(found["completion"][number])
            assert meta["prompt_text"] == f"{meta['prompt']['difficulty']}=t"
            assert found["reward_batched"][number] == length + gold
            assert found["reward_four"][number] == gold + length / 8


def test_what_a_definition_asks_for_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    """A misspelt column, and held-out prompts that lack one."""
    file = tmp_path / "wrong.py"
    file.write_text(DEFINITION.replace("completion, gold, difficulty)", "completion, gold, dificulty)"), "utf-8")
    with pytest.raises(DefinitionError, match=r"there is no 'dificulty'\. Did you mean 'difficulty'"):
        check_prompts_and_reward(find(f"{file}:main").pipeline(), 0)
    (tmp_path / "mine.py").write_text(DEFINITION, "utf-8")
    pipeline = override(find(f"{tmp_path}/mine.py:main").pipeline(), "collect.group_size", "2")
    assert [form.batched for form in bound_rewards(pipeline).forms] == [True, False, False]
    other = Evaluate(prompts=Prompts(rows=[{"prompt": "9", "gold": "0"}], prompt_field="prompt", answer_field=None))
    with pytest.raises(DefinitionError, match=r"batched takes the argument 'difficulty'.* evaluate\.hard\.prompts"):
        check_evaluation(replace(pipeline, evaluate={"hard": other}), "hard")
