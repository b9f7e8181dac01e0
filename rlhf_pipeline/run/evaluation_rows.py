"""The rows of evaluations: where a run keeps them, and the figures that are computed from them. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pipeline.buffer.checked_rows import check_rows
from rlhf_pipeline.buffer.trajectory_schema import reward_names
from rlhf_pipeline.config import Evaluate, Pipeline, PretrainedPolicy, passes_of
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.data.episodes import stored_last_rows, totals
from rlhf_pipeline.data.keys import reward_column
from rlhf_pipeline.functional.pass_at_k import mean_interval, pass_at_k
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import Address, below
from rlhf_pipeline.run.definition_identity import evaluation_identity
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.inputs import model_files, prompt_contents
from rlhf_pipeline.run.recorded_code import evaluated_code
from trajectory_store import TrajectoryStore

Figures = dict[str, float | int | None]


def evaluation_store(run: RunFolder, pipeline: Pipeline, evaluate: Evaluate, name: str = "") -> Address:
    """Return where the evaluations of a run are stored: a name for all that decides their completions and rewards.

    The name of a set of prompts, if there is one, is before it.

    The weights of a run are named by their step; those of a model folder, outside a run, are part of the name.
    """
    if run.record.is_by_text:
        identity = _identity_by_text(pipeline, evaluate)
    else:
        identity = evaluation_identity(pipeline, evaluate)
    if isinstance(pipeline.policy, PretrainedPolicy) and not run.record.exists:  # no step names the weights
        identity |= {"weights": model_files(Path(pipeline.policy.path).expanduser())}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return below(run.address, f"{filenames.EVALUATIONS}/{f'{name}-' if name else ''}{digest}")


def _identity_by_text(pipeline: Pipeline, evaluate: Evaluate) -> dict[str, Any]:
    """Return what names the evaluations of a run that was begun before there were identities."""
    collect, limits = evaluate.sampling(pipeline.collect), ("top_k", "top_p", "min_p", "stop", "max_turns")
    fields = {field: getattr(evaluate, field) for field in ("num_prompts", "group_size", "temperature")}
    fields |= {field: getattr(collect, field) for field in (*limits, "max_new_tokens")}
    fields |= {"reward": pipeline.reward, "environment": pipeline.environment}
    files = prompt_contents(evaluate.prompts, "evaluate.prompts")
    fields |= {"inputs": files | evaluated_code(pipeline, evaluate, by_text=True)}
    fields |= {"prompts": _by_content(to_json(evaluate.prompts), files, "evaluate.prompts")}
    return {field: to_json(value) for field, value in fields.items()}


def _by_content(value: Any, inputs: Mapping[str, Any], field: str) -> Any:
    """Return plain data without the paths of files whose content is known, so that a copied run has the same name."""
    if isinstance(value, dict):
        fields = {name: (f"{field}.{name}", part) for name, part in value.items()}
        return {name: _by_content(part, inputs, at) for name, (at, part) in fields.items() if at not in inputs}
    if isinstance(value, list):
        return [_by_content(part, inputs, f"{field}.{place}") for place, part in enumerate(value)]
    return value


def evaluation_figures(store: TrajectoryStore, rows: np.ndarray, evaluate: Evaluate | Mapping[str, Any]) -> Figures:
    """Return the figures of one evaluation, without the name of its set.

    Args:
        store: where its rows are.
        rows: int64 [n], their ids; figures count episodes.
        evaluate: defines what counts as right: `success` and `success_at`, of the definition or as a run recorded it.

    Raises:
        CorruptionError: some of the rows do not match their checksums.
    """
    check_rows(store, rows)
    last, every = stored_last_rows(store, rows), rows
    rows = rows[last]
    rewards = store.read_scalars("task_reward", rows).astype(np.float64)
    _, prompt = np.unique(store.read_scalars("group_id", rows), return_inverse=True)
    graded = np.isfinite(rewards)
    by_reward = {name: store.read_scalars(reward_column(name), rows).astype(np.float64) for name in names_in(store)}
    success, success_at = _field(evaluate, "success", None), float(_field(evaluate, "success_at", 1.0))
    # What does not apply to a completion, such as a component of an answer that cannot be read, is not right.
    values = rewards if success is None else by_reward.get(success, np.full(len(rows), np.nan))
    counts = np.bincount(prompt[graded], minlength=int(prompt.max()) + 1)
    right = np.bincount(prompt[graded], values[graded] >= success_at, minlength=len(counts)).astype(np.int64)
    lengths = np.asarray(store.lengths("input_ids", every)) - store.read_scalars("num_prompt_tokens", every)
    reasons = store.read(rows, ["finish_reason"])["finish_reason"]
    most = int(np.bincount(prompt).max())
    means = _means(rewards, prompt)
    mean, low, high = mean_interval(means) if len(means) else (None, None, None)
    has_success = success is None or success in by_reward
    best = passes_of(_field(evaluate, "best", None)) or 1
    sizes = sorted({*(2**i for i in range(most.bit_length())), most, min(best, most)})
    passes = {k: pass_at_k(counts, right, k) if has_success else None for k in sizes}
    return {
        "evaluation/reward": mean,
        "evaluation/reward_low": low,
        "evaluation/reward_high": high,
        **{f"evaluation/pass@{k}": value for k, value in passes.items()},
        **{
            f"evaluation/reward/{name}": float(means.mean())
            for name, of_one in by_reward.items()
            if len(means := _means(np.where(graded, of_one, np.nan), prompt))
        },
        "evaluation/completion_length": float(totals(lengths, last).mean()),
        "evaluation/cut_off": sum(reason == "length" for reason in reasons) / len(reasons),
        "evaluation/failed": int((~graded).sum()),
    }


def _means(values: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Return the mean value of each prompt's completions, without those that have none, float64 [k]."""
    finite = np.isfinite(values)
    counts = np.bincount(prompt[finite])
    sums = np.bincount(prompt[finite], values[finite])
    return sums[counts > 0] / counts[counts > 0]


def names_in(store: TrajectoryStore) -> list[str]:
    """Return the names of the rewards and components that a store has, sorted."""
    return sorted(reward_names(store.schema))


def _field(evaluate: Evaluate | Mapping[str, Any], name: str, default: Any) -> Any:
    return evaluate.get(name, default) if isinstance(evaluate, Mapping) else getattr(evaluate, name)


def figure_for_best(figures: Mapping[str, float | int | None], best: str | None) -> float | None:
    """Return the figure by which the best weights are chosen; None if this evaluation has none.

    >>> figures = {"evaluation/reward": 0.5, "evaluation/pass@4": 0.75, "evaluation/reward/format": 1.0}
    >>> [figure_for_best(figures, best) for best in (None, "pass@4", "format", "other")]
    [0.5, 0.75, 1.0, None]
    """
    name = best or "reward"
    return figures.get(f"evaluation/{name}", figures.get(f"evaluation/reward/{name}"))


def of_set(name: str, figures: Mapping[str, float | int | None]) -> Figures:
    """Return figures as the line of a step has them: with the name of the set, if it has one.

    >>> of_set("hard", {"evaluation/pass@4": 0.75}), of_set("", {"evaluation/reward": 1.0})
    ({'evaluation/hard/pass@4': 0.75}, {'evaluation/reward': 1.0})
    """
    prefix = f"evaluation/{name}/" if name else "evaluation/"
    return {prefix + key.removeprefix("evaluation/"): value for key, value in figures.items()}


def recorded_sets(pipeline: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the evaluations of a recorded definition by the name of their set, as `Pipeline.evaluations` does."""
    evaluate = pipeline.get("evaluate") or {}
    return {"": evaluate} if isinstance(evaluate.get("type"), str) else evaluate


def set_of_store(name: str) -> str:
    """Return the name of the set of prompts whose evaluations a store has; empty if it has none.

    >>> set_of_store("hard-1a2b3c4d"), set_of_store("1a2b3c4d")
    ('hard', '')
    """
    return name.rpartition("-")[0]


def evaluation_stores(run: RunFolder) -> dict[str, Address]:
    """Return the stores of a run's evaluations by name."""
    names = run.inside(run.path / filenames.EVALUATIONS)
    return {name: below(run.address, f"{filenames.EVALUATIONS}/{name}") for name in names}


def stored_evaluations(
    store: TrajectoryStore, evaluate: Evaluate | Mapping[str, Any], *, size: int = 1, besides: Container[int] = ()
) -> list[dict[str, Any]]:
    """Return the step and the figures of each evaluation in a store, by step."""
    ids = store.ids()  # of one moment: a read that follows a merge also finds newer rows
    steps = store.read_scalars("policy_version", ids)
    stored_steps = zip(*(values.tolist() for values in np.unique(steps, return_counts=True)), strict=True)
    return [
        {"step": step, **evaluation_figures(store, ids[steps == step], evaluate)}
        for step, count in stored_steps
        if count >= size and step not in besides
    ]
