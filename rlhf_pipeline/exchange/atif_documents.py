"""Trajectories of a store as documents in ATIF 1.8."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store import TrajectoryStore

READ = (
    *("input_ids", "assistant_mask", "log_probs", "num_prompt_tokens", "prompt", "completion", "meta"),
    *("trajectory_id", "group_id", "policy_version", "task_reward", "advantage", "temperature", "log_prob_mode"),
    *("finish_reason", "failure_reason", "evaluation"),
)
"""The columns that a document is made of."""
_SOURCES = {"system": "system", "assistant": "agent"}


def atif_documents(store: TrajectoryStore, ids: npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
    """Yield a document for each row: a step for each message of its prompt, and one for each run of sampled tokens.

    `extra` has what ATIF does not know: reward, group, version, temperature, advantage and what else is known. What an
    environment said stands in the prompt of the step after it, as ATIF has it.
    """
    columns = store.read(ids, [name for name in READ if name in store.schema])
    for i, row in enumerate(ids.tolist()):
        yield _document(row, {name: values[i] for name, values in columns.items()})


def _document(row: int, values: Mapping[str, Any]) -> dict[str, Any]:
    tokens = values["input_ids"].tolist()
    start = int(values.get("num_prompt_tokens", 0))
    mask = np.asarray(values.get("assistant_mask", np.arange(len(tokens)) >= start), bool)
    scores = values.get("log_probs", np.full(len(tokens), np.nan, np.float32))
    meta = _meta(values.get("meta", ""))
    spans = _spans(mask) or [(start, len(tokens))]
    steps: list[dict[str, Any]] = []
    for message in meta.get("messages") or [{"role": "user", "content": values.get("prompt", "")}]:
        step = {"source": _SOURCES.get(str(message.get("role")), "user"), "message": _text(message.get("content"))}
        steps.append(step | ({"is_copied_context": True} if step["source"] == "agent" else {}))  # nothing to learn
    for first, end in spans:
        metrics = {"prompt_token_ids": tokens[:first], "completion_token_ids": tokens[first:end]}
        metrics |= {"prompt_tokens": first, "completion_tokens": end - first}
        if not np.isnan(scores[first:end]).any():
            metrics["logprobs"] = scores[first:end].tolist()
        message = values.get("completion", "") if len(spans) == 1 else ""
        steps.append({"source": "agent", "message": message, "llm_call_count": 1, "metrics": metrics})
    extra = {
        "reward": _number(values.get("task_reward")),
        "group": int(values.get("group_id", -1)),
        "version": int(values.get("policy_version", -1)),
        "temperature": _number(values.get("temperature")),
        "advantage": _number(values.get("advantage")),
        "log_prob_mode": values.get("log_prob_mode"),
        "finish_reason": values.get("finish_reason"),
        "failure_reason": values.get("failure_reason"),
        "answer": meta.get("answer"),
        "evaluation": bool(values.get("evaluation", False)) or None,
        "completion": values.get("completion") if len(spans) > 1 else None,
        "token_ids_after": tokens[spans[-1][1] :] or None,
        "mask_known": None if mask.any() else False,
    }
    return {
        "schema_version": "ATIF-v1.8",
        "trajectory_id": str(row),
        "agent": {"name": "rlhf-pipeline", "version": "1"},
        "steps": [{"step_id": place, **step} for place, step in enumerate(steps, start=1)],
        "final_metrics": {
            "total_completion_tokens": sum(end - first for first, end in spans),
            "total_steps": len(steps),
        },
        "extra": {name: value for name, value in extra.items() if value not in (None, "")},
    }


def _spans(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of sampled tokens, as first and end.

    >>> _spans(np.array([False, True, True, False, True]))
    [(1, 3), (4, 5)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def _number(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _meta(text: str) -> dict[str, Any]:
    try:
        meta = json.loads(text)
    except ValueError:
        return {}
    return meta if isinstance(meta, dict) else {}
