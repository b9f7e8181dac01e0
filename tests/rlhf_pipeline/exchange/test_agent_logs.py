"""Logs that hold messages alone: rLLM's episodes, ART's trajectories, tables of W&B. Each call's words are sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.exchange import import_files
from trajectory_store import TrajectoryStore

USER = {"role": "user", "content": "1+1"}
TOOL = {"role": "user", "content": "wrong"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def rows(store: Path, *names: str) -> list[tuple[Any, ...]]:
    with TrajectoryStore.open(store, mode="r") as opened:
        values = opened.read(opened.ids(), names)
    return list(zip(*(v.tolist() if isinstance(v, np.ndarray) else v for v in values.values()), strict=True))


def episode(number: int, reward: float | None, reason: str) -> dict[str, Any]:
    """Return an episode as `EpisodeLogger.log_episode` writes it (rLLM, commit 0de8298): two calls of one agent."""
    talks = [[USER, said("3")], [USER, said("3"), TOOL, said(f"2{number}")]]
    about = {"observation": None, "thought": "", "action": None, "done": False, "timing": {}}
    steps = [about | {"reward": 0.0, "model_response": "", "chat_completions": talk} for talk in talks]
    return {
        **{"training_step": 4, "epoch": 0, "episode_id": f"task:{number}", "session_id": None, "task": {"q": "1+1"}},
        **{"task_hash": "abc", "is_correct": reward == 1.0, "termination_reason": reason, "metrics": {}},
        **{"metadata": {}, "timing": {}},
        "trajectories": [
            {"name": "solver", "uid": f"u{number}", "reward": reward, "num_steps": 2, "timing": {}, "steps": steps}
        ],
    }


def test_episodes_of_rllm(tmp_path: Path, chat_tokenizer: Any):
    """A document per episode; each call is a row with the episode's reward, and `val` is an evaluation."""
    for folder, number, reward, reason in (
        ("train_step_4_epoch_0", 0, 1.0, "env_done"),
        ("train_step_4_epoch_0", 1, 0.0, "max_response_length_exceeded"),
        ("train_step_4_epoch_0", 2, 0.0, "timeout"),
        ("val_step_4_epoch_0", 3, 1.0, "env_done"),
    ):
        (tmp_path / "logs/episodes" / folder).mkdir(parents=True, exist_ok=True)
        file = tmp_path / "logs/episodes" / folder / f"episode_hashabc_idtask_{number}.json"
        file.write_text(json.dumps(episode(number, reward, reason), indent=2) + "\n")
        (file.parent / "batch_summary.json").write_text(json.dumps({"training_step": 4, "num_episodes": 3}, indent=2))
    report = import_files([tmp_path / "logs"], tmp_path / "store", tokenizer=chat_tokenizer)
    assert ({file.format for file in report.files}, report.num_imported, report.num_groups) == ({"rllm"}, 8, 1)
    names = ("completion", "task_reward", "finish_reason", "failure_reason", "evaluation", "group_id")
    found = [(*row[:5], row[5] == 0) for row in rows(tmp_path / "store", *names)]
    assert [str(row) for row in found] == [
        "('3', 1.0, '', '', False, True)",
        "('20', 1.0, 'stop', '', False, True)",
        "('3', 0.0, '', '', False, True)",
        "('21', 0.0, 'length', '', False, True)",
        "('3', nan, '', 'timeout', False, True)",
        "('22', nan, '', 'timeout', False, True)",
        "('3', 1.0, '', '', True, False)",
        "('23', 1.0, 'stop', '', True, False)",
    ]
    changed = tmp_path / "logs/episodes/train_step_4_epoch_0/episode_hashabc_idtask_1.json"
    again = episode(1, 1.0, "env_done")
    again["trajectories"][0]["uid"] = "another"  # a trainer that was started again samples the episode again
    changed.write_text(json.dumps(again, indent=2))
    report = import_files([tmp_path / "logs"], tmp_path / "store", tokenizer=chat_tokenizer)
    assert (report.num_imported, sum(file.num_superseded for file in report.files)) == (2, 2)


def choice(text: str, end: str = "stop") -> dict[str, Any]:
    return {"finish_reason": end, "index": 0, "message": said(text)}


def test_trajectories_of_art(tmp_path: Path, chat_tokenizer: Any):
    """Groups a line (commit 08216f5) and tables (commit 319f6d7): only choices are sampled; `val` is an evaluation."""
    groups = [
        {
            "trajectories": [
                {"reward": reward, "metrics": {"m": 1}, "metadata": {"id": 7}, "tools": None, "logs": []}
                | {"messages_and_choices": [USER, said("example"), TOOL, choice(f"{g}{reward:g}", "length")]}
                | {"additional_histories": [{"messages_and_choices": [USER, choice("sub")], "tools": None}]}
                for reward in (0.0, 1.0)
            ]
        }
        for g in range(2)
    ]
    place = tmp_path / ".art/p/models/m/trajectories"
    (place / "train").mkdir(parents=True)
    (place / "val").mkdir()
    (place / "train/0003.jsonl").write_text("\n".join(map(json.dumps, groups)))
    pandas = pytest.importorskip("pandas")
    talk = [{"role": m["role"], "content": m["content"], "tool_calls": None, "trainable": m != USER} for m in
            (USER, said("2"))]  # fmt: skip
    table = {"group_index": [0, 0], "reward": [1.0, 0.0], "metrics": ["{}"] * 2, "metadata": ['{"id": 7}'] * 2}
    table |= {"tools": [None] * 2, "logs": [[]] * 2, "additional_histories": [None] * 2}
    table["messages"] = [talk, [talk[0], talk[1] | {"content": "3"}]]
    pandas.DataFrame(table).to_parquet(place / "val/0003.parquet")
    report = import_files([place], tmp_path / "store", tokenizer=chat_tokenizer)
    assert [file.format for file in report.files] == ["art", "art"]
    names = ("completion", "task_reward", "finish_reason", "policy_version", "evaluation", "group_id")
    found = rows(tmp_path / "store", *names)
    assert [row[:5] for row in found] == [
        *[("00", 0.0, "length", 3, False), ("sub", 0.0, "stop", 3, False)],
        *[("01", 1.0, "length", 3, False), ("sub", 1.0, "stop", 3, False)],
        *[("10", 0.0, "length", 3, False), ("sub", 0.0, "stop", 3, False)],
        *[("11", 1.0, "length", 3, False), ("sub", 1.0, "stop", 3, False)],
        *[("2", 1.0, "", 3, True), ("3", 0.0, "", 3, True)],
    ]
    assert [row[5] for row in found] == [0] * 4 + [1] * 4 + [2] * 2
    assert "example" in rows(tmp_path / "store", "prompt")[0][0]


def test_tables_of_wandb(tmp_path: Path, chat_tokenizer: Any):
    """A table of TRL is read as TRL's, verl's wide table as evaluations; one logged again with more rows adds those."""
    place = tmp_path / "wandb/run-1/files/media/table"
    place.mkdir(parents=True)
    (place.parents[1] / "wandb-metadata.json").write_text("{}")
    names = ["step", "prompt", "completion", "accuracy", "advantage"]
    data = [[1, "1+1=", "2", 1.0, 0.5], [1, "1+1=", "3", 0.0, -0.5]]
    head = {"ncols": 5, "nrows": 2, "column_types": {}}
    (place / "completions_1_ab.table.json").write_text(json.dumps({"columns": names, "data": data} | head))
    options: dict[str, Any] = {"tokenizer": chat_tokenizer, "one_turn": True}
    report = import_files([tmp_path / "wandb"], tmp_path / "store", **options)
    assert (report.num_imported, report.num_groups, report.mean_reward) == (2, 1, 0.5)
    assert [round(row[0], 3) for row in rows(tmp_path / "store", "advantage")] == [0.5, -0.5]
    more = [*data, [2, "2+2=", "4", 1.0, 0.5], [2, "2+2=", "5", 0.0, -0.5]]
    (place / "completions_2_cd.table.json").write_text(json.dumps({"columns": names, "data": more} | head))
    report = import_files([tmp_path / "wandb"], tmp_path / "store", **options)
    assert (report.num_imported, report.num_skipped) == (2, 4)
    names = ["step", "input_1", "output_1", "score_1", "input_2", "output_2", "score_2"]
    wide = {"columns": names, "data": [[5, "1+1=", "2", 1.0, "2+2=", "5", 0.0]], "ncols": 7, "nrows": 1}
    (place / "generations_5_ef.table.json").write_text(json.dumps(wide))
    report = import_files([place / "generations_5_ef.table.json"], tmp_path / "evals", **options)
    found = rows(tmp_path / "evals", "prompt", "completion", "task_reward", "evaluation", "policy_version")
    assert found == [("1+1=", "2", 1.0, True, 5), ("2+2=", "5", 0.0, True, 5)]
