"""A data set and a script as TRL's users have them, in a run."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline import Collect, Learn, Pipeline, PretrainedPolicy, Prompts
from rlhf_pipeline.cli import main as cli
from rlhf_pipeline.policies.new_model import new_model
from rlhf_pipeline.report.stored import Stored
from rlhf_pipeline.run.start import run
from trajectory_store import TrajectoryStore

SYSTEM = {"role": "system", "content": "Answer in digits."}


def by_level(prompt: str, completion: str, answer: Any, meta: Mapping[str, object]) -> float:
    """Pay what the row's own column says, if the prompt is the user's question."""
    return float(len(str(meta["level"]))) if prompt.endswith("?") and len(answer) == 1 else 0.0


def test_a_data_set_of_messages_is_learned_from_as_it_is(tmp_path: Path) -> None:
    """The template's text of each row's messages is sampled from; answer and columns reach the reward and the store."""
    datasets = pytest.importorskip("datasets")
    rows = [
        {
            "prompt": [SYSTEM, {"role": "user", "content": f"{n} + {n}?"}],
            "solution": [str(2 * n)],
            "level": "x" * (n + 1),
        }
        for n in range(3)
    ]
    (tmp_path / "text.txt").write_text("Answer in digits. 0 + 1 + 2 = 3?\n" * 20, encoding="utf-8")
    new_model(
        tmp_path / "m", text_file=tmp_path / "text.txt", vocab_size=300, hidden_size=16, num_layers=1, num_heads=2
    )
    asked = Pipeline(
        name="port",
        policy=PretrainedPolicy(path=str(tmp_path / "m")),
        prompts=Prompts(rows=datasets.Dataset.from_list(rows), prompt_field="prompt", answer_field="solution"),
        reward=by_level,
        collect=Collect(prompts_per_rollout=3, group_size=2, max_new_tokens=4, stop=("7",), top_p=0.9),
        learn=Learn(steps=1),
    )
    run(asked, run_dir=tmp_path / "run")
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        found = store.read(store.ids(), ["prompt", "meta", "task_reward"])
    with Stored(tmp_path / "run" / "store") as stored:
        contexts = stored.contexts(stored.store.ids())
    assert [context.answer for context in contexts] == [json.loads(meta)["answer"] for meta in found["meta"]]
    assert sorted(found["task_reward"].tolist()) == [1, 1, 2, 2, 3, 3]
    for text, meta in zip(found["prompt"], map(json.loads, found["meta"]), strict=True):
        n = int(text[0])
        assert meta["answer"] == [str(2 * n)]
        assert meta["messages"] == rows[n]["prompt"]
        assert meta["prompt"] == {"source_line": n, "level": "x" * (n + 1)}


TRL_SCRIPT = """\
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def rows(first, last):
    return Dataset.from_list(
        [
            {
                "prompt": [
                    {"role": "system", "content": "Answer in digits."},
                    {"role": "user", "content": f"{n} + {n}?"},
                ],
                "answer": str(2 * n),
            }
            for n in range(first, last)
        ]
    )


def digits(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(any(digit in text for digit in right)) for text, right in zip(texts, answer)]


def brief(completions, **kwargs):
    return [-len(completion[0]["content"]) / 10 for completion in completions]


args = GRPOConfig(
    output_dir="runs/sums", reward_weights=[1.0, 0.5], num_generations=4, generation_batch_size=12,
    max_completion_length=6, temperature=0.9, top_p=0.95, beta=0.01, learning_rate=1e-3, max_steps=2,
    eval_strategy="steps", eval_steps=1,
)
trainer = GRPOTrainer(
    model="model", reward_funcs=[digits, brief], args=args, train_dataset=rows(0, 6), eval_dataset=rows(6, 9),
)
trainer.train()
"""

PORT = """\
from datasets import Dataset
from rlhf_pipeline import GRPO, Collect, Evaluate, Learn, Pipeline, PretrainedPolicy, Prompts, Reward


def rows(first, last):
    return Dataset.from_list(
        [
            {
                "prompt": [
                    {"role": "system", "content": "Answer in digits."},
                    {"role": "user", "content": f"{n} + {n}?"},
                ],
                "answer": str(2 * n),
            }
            for n in range(first, last)
        ]
    )


def digits(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(any(digit in text for digit in right)) for text, right in zip(texts, answer)]


def brief(completions, **kwargs):
    return [-len(completion[0]["content"]) / 10 for completion in completions]


def main():
    return Pipeline(
        name="sums",
        policy=PretrainedPolicy(path="model"),
        reward=(Reward(digits), Reward(brief, weight=0.5)),
        collect=Collect(prompts_per_rollout=3, group_size=4, max_new_tokens=6, temperature=0.9, top_p=0.95),
        loss=GRPO(kl_to_ref_coeff=0.01),
        learn=Learn(lr=1e-3, steps=2),
        prompts=Prompts(rows=rows(0, 6), prompt_field="prompt", answer_field=None),
        evaluate=Evaluate(
            prompts=Prompts(rows=rows(6, 9), prompt_field="prompt", answer_field=None), every=1, group_size=4
        ),
    )
"""


def changed(before: str, after: str) -> int:
    """Return how many lines are replaced, added or removed."""
    changes = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal")


def test_a_script_of_trl_is_ported_in_fifteen_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both data sets, both rewards and their weights stay as TRL has them; the port's figures are the rewards'."""
    pytest.importorskip("datasets")
    compile(TRL_SCRIPT, "trl_script.py", "exec")
    assert changed(TRL_SCRIPT, PORT) <= 15
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Answer in digits. 0 + 1 + 2 = 3?\n" * 20, encoding="utf-8")
    new_model("model", text_file="text.txt", vocab_size=300, hidden_size=16, num_layers=1, num_heads=2)
    Path("port.py").write_text(PORT, encoding="utf-8")
    assert cli(["run", "port.py:main", "--out", "runs/sums"]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in Path("runs/sums/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    with TrajectoryStore.open("runs/sums/store") as store:
        found = store.read(
            store.ids(), ["completion", "meta", "task_reward", "reward_digits", "reward_brief", "group_id"]
        )
    assert sorted(found["group_id"].tolist()) == [group for group in range(6) for _ in range(4)]
    for number in range(24):
        text, meta = found["completion"][number], json.loads(found["meta"][number])
        right = float(any(digit in text for digit in meta["prompt"]["answer"]))
        assert found["reward_digits"][number] == right
        assert found["reward_brief"][number] == pytest.approx(-len(text) / 10)
        assert found["task_reward"][number] == pytest.approx(right - len(text) / 20)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    for name in ("digits", "brief"):
        means = [line[f"reward/{name}"] for line in lines if f"reward/{name}" in line]
        assert sum(means) / 2 == pytest.approx(float(found[f"reward_{name}"].mean()), abs=1e-6)
    (held_out,) = Path("runs/sums/evaluations").iterdir()
    with TrajectoryStore.open(held_out) as store:
        names = ["policy_version", "completion", "meta", "task_reward", "reward_digits", "reward_brief"]
        rows = store.read(store.ids(), names)
    assert rows["policy_version"].tolist() == [step for step in range(3) for _ in range(12)]
    for number in range(36):
        text, solution = rows["completion"][number], json.loads(rows["meta"][number])["prompt"]["answer"]
        assert solution in ("12", "14", "16")
        right = float(any(digit in text for digit in solution))
        assert rows["task_reward"][number] == pytest.approx(right - len(text) / 20)
    for line in lines:
        mean = rows["task_reward"][rows["policy_version"] == line["step"]].mean()
        assert line["evaluation/reward"] == pytest.approx(float(mean), abs=1e-6)


VERL_ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{n} + {n}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        "extra_info": {"split": "train", "index": n},
    }
    for n in range(4)
]
"""As verl's preprocessing scripts write it."""

VERL_CONFIG = """\
data.train_files=data/train.parquet data.prompt_key=prompt data.train_batch_size=2 data.max_response_length=5
actor_rollout_ref.model.path=model actor_rollout_ref.rollout.n=3 actor_rollout_ref.actor.optim.lr=1e-3
custom_reward_function.path=score.py custom_reward_function.name=compute_score trainer.total_training_steps=2
"""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """Score as a user of verl does; what it gets is checked, too."""
    assert (data_source, extra_info["split"]) == ("sums", "train")
    assert ground_truth == str(2 * extra_info["index"])
    digits = sum(map(str.isdigit, solution_str))
    return {"score": float(any(one in solution_str for one in ground_truth)) + digits / 10, "digits": digits}


def test_a_configuration_of_verl_learns_from_the_same_rewards(tmp_path: Path) -> None:
    """Each line of it by the page's table: scores of what verl would have decoded, components as columns."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    from transformers import AutoTokenizer

    asked = dict(pair.split("=") for pair in VERL_CONFIG.split())
    parquet.write_table(pyarrow.Table.from_pylist(VERL_ROWS), tmp_path / "train.parquet")
    (tmp_path / "text.txt").write_text("0 + 1 + 2 = 3? 4 5 6 7 8 9\n" * 20, encoding="utf-8")
    new_model(
        tmp_path / "m", text_file=tmp_path / "text.txt", vocab_size=300, hidden_size=16, num_layers=1, num_heads=2
    )
    port = Pipeline(
        name="verl",
        policy=PretrainedPolicy(path=str(tmp_path / "m")),
        prompts=Prompts(
            str(tmp_path / "*.parquet"),
            prompt_field=asked["data.prompt_key"],
            answer_field="reward_model.ground_truth",
        ),
        reward=compute_score,
        collect=Collect(
            prompts_per_rollout=int(asked["data.train_batch_size"]),
            group_size=int(asked["actor_rollout_ref.rollout.n"]),
            max_new_tokens=int(asked["data.max_response_length"]),
            skip_special_tokens=True,
        ),
        learn=Learn(
            steps=int(asked["trainer.total_training_steps"]), lr=float(asked["actor_rollout_ref.actor.optim.lr"])
        ),
    )
    run(port, run_dir=tmp_path / "run")
    codec = AutoTokenizer.from_pretrained(tmp_path / "m")
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        found = store.read(store.ids())
    assert len(found["task_reward"]) == 2 * 2 * 3
    for number, meta in enumerate(map(json.loads, found["meta"])):
        row = VERL_ROWS[meta["prompt"]["extra_info"]["index"]]
        response = found["input_ids"][number][int(found["num_prompt_tokens"][number]) :]
        text = codec.decode(response.tolist(), skip_special_tokens=True)  # as verl's reward manager `naive` does
        score = compute_score(row["data_source"], text, row["reward_model"]["ground_truth"], row["extra_info"])
        assert found["task_reward"][number] == pytest.approx(score["score"])
        assert found["reward_digits"][number] == score["digits"]
