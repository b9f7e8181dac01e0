"""The rows of evaluations: where a run keeps them, and the figures that are computed from them. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pipeline.buffer.checked_rows import check_rows
from rlhf_pipeline.config import Evaluate, Pipeline, PretrainedPolicy
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.functional.pass_at_k import mean_interval, pass_at_k
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import Address, below
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.inputs import evaluation_inputs, model_files
from trajectory_store import TrajectoryStore

Figures = dict[str, float | int | None]


def evaluation_store(run: RunFolder, pipeline: Pipeline, evaluate: Evaluate) -> Address:
    """Return where the evaluations of a run are stored: a name for all that decides their completions and rewards.

    The weights of a run are named by their step; those of a model folder, outside a run, are part of the name.
    """
    what = {name: getattr(evaluate, name) for name in ("num_prompts", "group_size", "temperature")}
    what |= {name: getattr(pipeline.collect, name) for name in ("top_k", "top_p", "min_p", "stop", "max_turns")}
    what |= {"max_new_tokens": evaluate.max_new_tokens or pipeline.collect.max_new_tokens}
    what |= {"reward": pipeline.reward, "environment": pipeline.environment}
    what |= {"inputs": (inputs := evaluation_inputs(pipeline, evaluate))}
    what |= {"prompts": _by_content(to_json(evaluate.prompts), inputs, "evaluate.prompts")}
    if isinstance(pipeline.policy, PretrainedPolicy) and not run.is_recorded:  # no step names the weights
        what |= {"policy": pipeline.policy, "weights": model_files(Path(pipeline.policy.path).expanduser())}
    text = json.dumps({name: to_json(value) for name, value in what.items()}, sort_keys=True, default=str)
    return below(run.address, f"{filenames.EVALUATIONS}/{hashlib.sha256(text.encode()).hexdigest()[:8]}")


def _by_content(value: Any, inputs: Mapping[str, Any], field: str) -> Any:
    """Return plain data without the paths of files whose content is known, so that a copied run has the same name."""
    if isinstance(value, dict):
        fields = {name: (f"{field}.{name}", part) for name, part in value.items()}
        return {name: _by_content(part, inputs, at) for name, (at, part) in fields.items() if at not in inputs}
    if isinstance(value, list):
        return [_by_content(part, inputs, f"{field}.{place}") for place, part in enumerate(value)]
    return value


def evaluation_figures(store: TrajectoryStore, rows: np.ndarray, success_at: float) -> Figures:
    """Return the figures of one evaluation.

    Args:
        store: where its rows are.
        rows: int64 [n], their ids.
        success_at: the reward from which on a completion counts as right.

    Raises:
        CorruptionError: some of the rows do not match their checksums.
    """
    check_rows(store, rows)
    rewards = store.read_scalars("task_reward", rows).astype(np.float64)
    _, prompt = np.unique(store.read_scalars("group_id", rows), return_inverse=True)
    graded = np.isfinite(rewards)
    counts = np.bincount(prompt[graded], minlength=int(prompt.max()) + 1)
    sums = np.bincount(prompt[graded], rewards[graded], minlength=len(counts))
    right = np.bincount(prompt[graded], rewards[graded] >= success_at, minlength=len(counts)).astype(np.int64)
    means = sums[counts > 0] / counts[counts > 0]
    mean, low, high = mean_interval(means) if len(means) else (None, None, None)
    lengths = np.asarray(store.lengths("input_ids", rows)) - store.read_scalars("num_prompt_tokens", rows)
    reasons = store.read(rows, ["finish_reason"])["finish_reason"]
    most = int(np.bincount(prompt).max())
    return {
        "evaluation/reward": mean,
        "evaluation/reward_low": low,
        "evaluation/reward_high": high,
        **{f"evaluation/pass@{2**i}": pass_at_k(counts, right, 2**i) for i in range(most.bit_length())},
        "evaluation/completion_length": float(lengths.mean()),
        "evaluation/cut_off": sum(reason == "length" for reason in reasons) / len(reasons),
        "evaluation/failed": int((~graded).sum()),
    }


def evaluation_stores(run: RunFolder) -> dict[str, Address]:
    """Return the stores of a run's evaluations by name."""
    names = run.inside(run.path / filenames.EVALUATIONS)
    return {name: below(run.address, f"{filenames.EVALUATIONS}/{name}") for name in names}


def stored_evaluations(
    store: TrajectoryStore, success_at: float, *, size: int = 1, besides: Container[int] = ()
) -> list[dict[str, Any]]:
    """Return the step and the figures of each evaluation in a store, by step."""
    ids, steps = store.ids(), store.read_scalars("policy_version")
    found = zip(*(values.tolist() for values in np.unique(steps, return_counts=True)), strict=True)
    return [
        {"step": step, **evaluation_figures(store, ids[steps == step], success_at)}
        for step, count in found
        if count >= size and step not in besides
    ]
