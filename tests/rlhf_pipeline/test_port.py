"""A data set as TRL's users have it, in a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline import Collect, Learn, Pipeline, PretrainedPolicy, Prompts
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
        contexts = stored.contexts(stored.ids())
    assert [context.answer for context in contexts] == [json.loads(meta)["answer"] for meta in found["meta"]]
    assert sorted(found["task_reward"].tolist()) == [1, 1, 2, 2, 3, 3]
    for text, meta in zip(found["prompt"], map(json.loads, found["meta"]), strict=True):
        n = int(text[0])
        assert meta["answer"] == [str(2 * n)]
        assert meta["messages"] == rows[n]["prompt"]
        assert meta["prompt"] == {"source_line": n, "level": "x" * (n + 1)}
