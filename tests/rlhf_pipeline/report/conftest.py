"""A small run folder, written with the real store and the real configuration code, without torch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import definitions
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.run.files import new_folder
from rlhf_pipeline.run.rows import StepRows
from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore

ALPHABET = "0123456789="
COLUMNS = (
    Column("input_ids", "int32", ragged=True),
    Column("assistant_mask", "bool", ragged=True),
    Column("log_probs", "float32", ragged=True),
    Column("advantage", "float32", mutable=True, fill=float("nan")),
    Column("task_reward", "float32"),
    Column("group_id", "int64"),
    Column("trajectory_id", "int64"),
    Column("policy_version", "int64"),
    Column("num_prompt_tokens", "int64"),
    Column("finish_reason", "str"),
    Column("prompt", "str"),
    Column("completion", "str"),
    Column("meta", "str"),
    Column("priority", "float32", mutable=True),
)


def write_run(
    folder: Path,
    *,
    num_rollouts: int = 6,
    prompts: int = 2,
    group_size: int = 4,
    definition: str = "copy_digits",
    overrides: tuple[tuple[str, str], ...] = (),
    failed: int = 0,
) -> Path:
    """Write a run that gets better from rollout to rollout; `failed` trajectories of rollout 0 have no reward."""
    sizes = (("collect.prompts_per_rollout", str(prompts)), ("collect.group_size", str(group_size)))
    two_updates = (("learn.epochs", "2"), ("buffer.max_staleness", "1"))
    settings = (*sizes, *two_updates, *overrides)
    pipeline = definitions.find(definition).pipeline(settings)
    folder.mkdir(parents=True)
    config = {
        "format": 1,
        "definition": definition,
        "overrides": [list(pair) for pair in settings],
        "seed": 0,
        "device": "cpu",
        "pipeline": to_json(pipeline),
        "versions": {"python": "3.11.7"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    store = TrajectoryStore.create(folder / "store", Schema(COLUMNS))
    updates = pipeline.learn.epochs
    for rollout in range(num_rollouts):
        batch = _rollout(pipeline, rollout, num_rollouts, prompts, group_size, failed if rollout == 0 else 0)
        ids = store.append(batch)
        for update in range(updates):
            step = rollout * updates + update + 1
            StepRows(folder / "metrics.jsonl").append(_metrics(step, rollout, update, batch, store.watermark))
            idle = np.asarray(ids)[batch["advantage"] == 0].tolist()
            row = {"step": step, "row_ids": ids.tolist(), "watermark": store.watermark, "ages": [update] * len(ids)}
            row |= {"no_gradient": idle, "left_out": {"failed": failed if rollout == 0 else 0}}
            StepRows(folder / "ledger.jsonl").append(row)
    store.close()
    with new_folder(folder / "checkpoints" / "step-00000000") as checkpoint:
        (checkpoint / "state.json").write_text('{"step": 0}')
    return folder


def _rollout(
    pipeline: Any, rollout: int, num_rollouts: int, prompts: int, group_size: int, failed: int
) -> dict[str, Any]:
    rng = random.Random(rollout)
    skill = rollout / max(num_rollouts - 1, 1)
    rows: list[dict[str, Any]] = []
    for cursor in range(rollout * prompts, (rollout + 1) * prompts):
        prompt = pipeline.prompts.prompt(cursor, 0)
        for member in range(group_size):
            text = "".join(c if rng.random() < skill else rng.choice("0123456789") for c in prompt.answer)
            meta: dict[str, Any] = {"answer": prompt.answer, "prompt": dict(prompt.meta)}
            broken = len(rows) < failed
            if broken:
                meta["error"] = "ValueError: no reward today (task.py:3)"
            rows.append(
                {
                    "group_id": cursor,
                    "trajectory_id": cursor * group_size + member,
                    "policy_version": rollout * pipeline.learn.epochs,
                    "num_prompt_tokens": len(prompt.text),
                    "prompt": prompt.text,
                    "completion": text,
                    "finish_reason": "failed" if broken else "length",
                    "task_reward": np.nan if broken else pipeline.reward(prompt.text, text, prompt.answer, {}),
                    "meta": json.dumps(meta),
                    "ids": [ALPHABET.index(c) for c in prompt.text + text],
                }
            )
    batch: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0] if name != "ids"}
    lengths = np.array([len(row["ids"]) for row in rows])
    flat = np.concatenate([row["ids"] for row in rows]).astype(np.int32)
    place = np.concatenate([np.arange(n) for n in lengths])
    mask = place >= np.repeat(batch["num_prompt_tokens"], lengths)
    log_probs = np.where(mask, np.random.default_rng(rollout).uniform(-3, 0, len(flat)), np.nan).astype(np.float32)
    rewards = np.array(batch["task_reward"])
    batch["input_ids"] = RaggedArray(flat, lengths)
    batch["assistant_mask"] = RaggedArray(mask, lengths)
    batch["log_probs"] = RaggedArray(log_probs, lengths)
    batch["advantage"] = np.nan_to_num(rewards - np.nanmean(rewards)).astype(np.float32)
    return batch


def _metrics(step: int, rollout: int, update: int, batch: dict[str, Any], watermark: int) -> dict[str, Any]:
    return {
        "step": step,
        "rollout": rollout,
        "task_reward": float(np.nanmean(batch["task_reward"])) if update == 0 else None,
        "num_failed": int(np.isnan(batch["task_reward"]).sum()) if update == 0 else None,
        "tokens_per_s": 21_000.0 + step if update == 0 else None,
        "policy_version": step - 1 - update,
        "watermark": watermark,
        "loss": 0.1 / step,
        "kl_k1": None,
        "clip_fraction": 0.01 * update,
        "ess": 0.99,
        "entropy": 2.0 / step,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "staleness": float(update),
        "padding_efficiency": 1.0,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of six rollouts, two prompts times four completions each."""
    return write_run(tmp_path / "runs" / "demo")
