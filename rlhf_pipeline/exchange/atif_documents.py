"""Trajectories of a store as documents in ATIF 1.8."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.exchange._values import to_json
from trajectory_store import TrajectoryStore
from trajectory_store.recorder.standard import INTERNAL

PLACES: Mapping[str, str] = {
    "input_ids": "`steps[].metrics.prompt_token_ids`, `completion_token_ids`",
    "assistant_mask": "the tokens in `completion_token_ids`",
    "num_prompt_tokens": "`prompt_token_ids` of the first sampled step",
    "log_probs": "`steps[].metrics.logprobs`",
    "prompt": "`steps[].message`",
    "completion": "`steps[].message`",
    "created_at": "`timestamp` of the last step",
}
"""The columns that ATIF can express, and their fields."""
EXTRA: Mapping[str, str] = {
    "ref_log_probs": "`steps[].metrics.extra.ref_log_probs`",
    "task_reward": "`extra.reward`",
    "advantage": "`extra.advantage`",
    "group_id": "`extra.group`",
    "policy_version": "`extra.version`",
    "temperature": "`extra.temperature`",
    "log_prob_mode": "`extra.log_prob_mode`",
    "finish_reason": "`extra.finish_reason`",
    "failure_reason": "`extra.failure_reason`",
    "evaluation": "`extra.evaluation`",
    "meta": "`extra.answer`, `extra.stored_meta`",
}
"""The columns that ATIF cannot express, and their fields in `extra`; `extra.columns` contains all others by name."""
_SOURCES = {"system": "system", "assistant": "agent"}


def markdown_table() -> str:
    """Return the table of docs/exchange.md: which columns ATIF expresses, and where `extra` has the others."""
    rows = [("column", "in ATIF 1.8", "in `extra`"), ("---", "---", "---")]
    rows += [(f"`{name}`", place, "") for name, place in PLACES.items()]
    rows += [(f"`{name}`", "no", place) for name, place in EXTRA.items()]
    rows += [("any other column", "no", "`extra.columns`, by name")]
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)


def atif_documents(store: TrajectoryStore, ids: npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
    """Yield a document for each row: a step for each message of its prompt, and one for each run of sampled tokens.

    `extra` has what ATIF cannot express (`EXTRA`), and every other column that the row has a value for. What an
    environment replied is in the prompt of the step after it, as ATIF has it.
    """
    columns = store.read(ids, [name for name in store.schema.names if name not in INTERNAL])
    present = {name: store.present(name, ids) for name in columns if store.schema[name].optional}
    for i, row in enumerate(ids.tolist()):
        values = {name: column[i] for name, column in columns.items()}
        others = {
            name: to_json(store.schema[name], value)
            for name, value in values.items()
            if name not in PLACES and name not in EXTRA and (name not in present or present[name][i])
        }
        yield _document(row, values, others)


def _document(row: int, values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    tokens = values["input_ids"].tolist()
    start = int(values.get("num_prompt_tokens", 0))
    mask = np.asarray(values.get("assistant_mask", np.arange(len(tokens)) >= start), bool)
    scores = values.get("log_probs", np.full(len(tokens), np.nan, np.float32))
    reference = values.get("ref_log_probs")
    meta = _meta(values.get("meta", ""))
    spans = _spans(mask) or [(start, len(tokens))]
    steps: list[dict[str, Any]] = []
    for message in meta.get("messages") or [{"role": "user", "content": values.get("prompt", "")}]:
        step = {"source": _SOURCES.get(str(message.get("role")), "user"), "message": _text(message.get("content"))}
        steps.append(step | ({"is_copied_context": True} if step["source"] == "agent" else {}))  # nothing to learn
    for first, end in spans:
        metrics = {"prompt_token_ids": tokens[:first], "completion_token_ids": tokens[first:end]}
        metrics |= {"prompt_tokens": first, "completion_tokens": end - first}
        more: dict[str, Any] = {}
        if not np.isnan(scores[first:end]).any():
            metrics["logprobs"] = scores[first:end].tolist()
        elif not np.isnan(scores[first:end]).all():
            more["logprobs"] = [_number(score) for score in scores[first:end]]  # ATIF's list has no null
        if reference is not None and not np.isnan(reference[first:end]).all():
            more["ref_log_probs"] = [_number(score) for score in reference[first:end]]
        metrics |= {"extra": more} if more else {}
        message = values.get("completion", "") if len(spans) == 1 else ""
        steps.append({"source": "agent", "message": message, "llm_call_count": 1, "metrics": metrics})
    created_at = _number(values.get("created_at"))
    if created_at is not None:
        steps[-1]["timestamp"] = datetime.fromtimestamp(created_at, UTC).isoformat()
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
        "created_at": created_at,  # the timestamp has microseconds
        "stored_meta": {name: value for name, value in meta.items() if name not in ("answer", "messages")} or None,
        "columns": dict(others) or None,
    }
    return {
        "schema_version": "ATIF-v1.8",
        "trajectory_id": str(row),
        "agent": {"name": "rlhf-pipeline", "version": "1"},
        "steps": [{"step_id": place, **step} for place, step in enumerate(steps, start=1)],
        "final_metrics": {
            "total_prompt_tokens": sum(first for first, _ in spans),
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
