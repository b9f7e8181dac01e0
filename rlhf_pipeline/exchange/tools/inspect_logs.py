"""Logs of Inspect's evaluations."""

from __future__ import annotations

from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange.fields import NONE, DerivedField, Fields, part_of
from rlhf_pipeline.exchange.tools.registry import NO_SCORES, NO_TOKENS, RawRollouts, tool
from trajectory_store.recorder.raw_rollout import CUT, Row, excerpt, is_messages

_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}


@tool("inspect", "logs of Inspect's evaluations", "eval samples", NO_TOKENS, NO_SCORES)
def inspect_log(row: Fields) -> RawRollouts:
    """Inspect 0.3.285: `.eval` and `.json` logs of evaluations.

    Writer: `EvalSample` of `inspect_ai/log/_log.py`. Fields of a sample: `id` and `epoch`, of which those of one id are
    a group; `uuid`, of the sample's run; `input`, text or messages; `messages`, the whole conversation; `output`, with
    `choices[0].stop_reason`; `target`; `scores`, by scorer, of each a `value`: a number, or C, I, P and N for 1, 0, 0.5
    and 0; `error`; `limit`, of time, tokens or messages. The conversation up to the first answer is the prompt.
    """
    for sample in row.row["samples"] or ():
        yield from _sample(row.of({**sample, "eval": row.row["eval"], "plan": row.row.get("plan")}), row)


def _sample(row: Fields, log: Fields) -> RawRollouts:
    sample = row.row
    talk = sample.get("messages") or []
    first = next((place for place, message in enumerate(talk) if message.get("role") == "assistant"), None)
    limit = part_of(sample, "limit").get("type")
    error = part_of(sample, "error").get("message")  # of an exception: its class and its text
    late = limit in ("time", "working") or str(error).startswith("TimeoutError")
    failure = "timeout" if late else "tool_error" if error is not None else ""
    # The scorers of a failed sample may not have run, and its reward would not be trusted: `meta` keeps its scores.
    row.field_paths = {**row.field_paths, **({"reward": NONE} if failure else _reward_of(row))}
    if first is None:
        yield None  # it failed before anything was sampled
        return
    if not is_messages(talk):
        raise DataError(f"field 'messages' must be a list of chat messages, got {excerpt(talk)}.")
    choices = part_of(sample, "output").get("choices") or [{}]
    end = CUT if limit in ("token", "context") else choices[0].get("stop_reason")
    task = part_of(sample, "eval").get("task")
    yield row.record(
        prompt=DerivedField("messages", talk[:first]),
        completion=DerivedField("messages", talk[first:]),
        reward=DerivedField("none", None) if "reward" not in row.field_paths else None,
        answer=DerivedField("target", sample.get("target")),
        finish_reason=DerivedField("stop_reason, limit", end),
        failure=DerivedField("error, limit", failure),
        temperature=DerivedField("plan.config.temperature", _temperature(sample)),
        group=DerivedField("id", str(sample["id"])),
        one_turn=len(talk) == first + 1,
        meta={"epoch": sample.get("epoch"), "scores": sample.get("scores"), "task": task},
        flags={} if sample.get("uuid") is None else {"identity": ("inspect", str(sample["uuid"]))},
    )


def _temperature(sample: Row) -> float | None:
    """Return the temperature of an evaluation: of its plan, which has the settings in force, or of its model."""
    places = part_of(part_of(sample, "plan"), "config"), part_of(part_of(sample, "eval"), "model_generate_config")
    return next((config["temperature"] for config in places if config.get("temperature") is not None), None)


def _reward_of(row: Fields) -> dict[str, str]:
    """Return where the reward is: the value of the one scorer; grades in letters become numbers."""
    scores = dict(part_of(row.row, "scores"))
    for name, score in scores.items():
        value = score.get("value")
        scores[name] = {**score, "value": _GRADES.get(value, value) if isinstance(value, str) else value}
    row.row = {**row.row, "scores": scores}
    if "reward" in row.field_paths or not scores:
        return {}
    paths = [path for name, score in scores.items() for path in _paths(name, score.get("value"))]
    if len(paths) > 1 and not row.for_display:
        raise DefinitionError(
            f"the log has several scores: {', '.join(paths)}. Choose one of them, or a sum of several: --field "
            f"reward={paths[0]}"
        )
    return {"reward": "+".join(paths)}


def _paths(name: str, value: Any) -> list[str]:
    path = f"scores.{name}.value"
    return [f"{path}.{key}" for key in value] if isinstance(value, dict) else [path]


def is_sample(row: Row) -> bool:
    """Return True for a sample as an `.eval` archive holds it, each in a separate file."""
    return {"id", "epoch", "input", "target", "messages"} <= row.keys()
