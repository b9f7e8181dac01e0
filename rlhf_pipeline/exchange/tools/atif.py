"""ATIF, the agent trajectories that Harbor and others write: one document for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange.dump_files import trial_results
from rlhf_pipeline.exchange.fields import DerivedField, Fields, part_of
from rlhf_pipeline.exchange.tools.registry import RawRollouts, or_unknown, tool
from trajectory_store.recorder.raw_rollout import (
    RawRollout,
    Row,
    as_failure,
    as_ids,
    as_list,
    excerpt,
    message_text,
    text_of,
)

_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


@tool(
    *("atif", "agent trajectories in ATIF", "schema_version agent steps"),
    "token ids, log-probs and rewards, if the writer recorded none",
    also=lambda row: str(row["schema_version"]).startswith("ATIF-v1"),
    grows=True,
)
def atif(row: Fields) -> RawRollouts:
    """ATIF 1.8: a document per trajectory, `trajectory.json` of a Harbor trial (harbor 0.26), or one per line.

    Format: `Trajectory` of the package `atif` 1.8.0. Fields: `steps`, each with `source`, `message`, `tool_calls`,
    `observation` and, of the agent, `metrics` with `prompt_token_ids` (the whole prompt of the call),
    `completion_token_ids` and `logprobs`; `is_copied_context`; `llm_call_count`, 0 for a step that no model made;
    `subagent_trajectories`; `extra`. What was sampled follows from the prompts: as long as one continues where the step
    before it ended, the steps are one trajectory; where the context was rewritten, another one begins.

    Agents write the document again after each step. An episode is identified by its `session_id`, which several may
    share, or else its trial's name, and by its steps up to the first sampled one, with their times; without both by its
    content.

    The format knows no reward. It is `extra.reward`, as `rlhf-pipeline export` writes it beside `group`, `version`,
    `temperature` and `advantage`, or the verifier's reward in the trial's `result.json`, whose task is the group.
    """
    yield from _documents(row, row.row, _trial_of(row.path), {})


def _documents(row: Fields, document: Row, trial: Row, parent: Row, depth: int = 0) -> RawRollouts:
    extra = {**parent, **part_of(document, "extra"), **part_of(part_of(document, "extra"), "rl")}
    parts = _parts(as_list(document["steps"], "steps"))
    if parts and parts[-1]["one_turn"] and (after := as_ids(extra.get("token_ids_after") or [], "token_ids_after")):
        values = parts[-1]["made"]  # the last reply of an environment, which no prompt has
        for name, filling in (("completion_ids", after), ("completion_mask", [0] * len(after))):
            values[name] = DerivedField(values[name].how, [*values[name].value, *filling])
        for name in ("log_probs", "ref_log_probs"):
            if name in values:
                values[name] = DerivedField(values[name].how, [*values[name].value, *[None] * len(after)])
    for place, part in enumerate(parts):
        yield _record(row, document, part, extra, trial, (place, depth))
    for subagent in document.get("subagent_trajectories") or ():
        yield from _documents(row, subagent, trial, extra, depth + 1)


def _record(row: Fields, document: Row, part: Row, extra: Row, trial: Row, where: tuple[int, int]) -> RawRollout:
    agent, failed = part_of(document, "agent"), part_of(trial, "exception_info").get("exception_type")
    session = document.get("session_id")
    episode = trial.get("trial_name") if session is None else session
    task = extra.get("group", extra.get("group_id", trial.get("task_name")))
    place, depth = where
    stored_meta = part_of(extra, "stored_meta")
    compared = (task, agent.get("name"), *([depth] if depth else []))  # an agent that another called has another task
    if extra.get("created_at") is not None:
        part["made"]["created_at"] = DerivedField("extra.created_at", extra["created_at"])
    if extra.get("completion"):
        part["made"]["completion"] = DerivedField("extra.completion", extra["completion"])
    used_fields = {
        "reward",
        "group",
        "version",
        "temperature",
        "advantage",
        "answer",
        "finish_reason",
        "failure_reason",
    }
    used_fields |= {
        "log_prob_mode",
        "evaluation",
        "completion",
        "token_ids_after",
        "mask_known",
        "created_at",
        "stored_meta",
    }
    return row.of({**extra, "extra": extra, "trial": trial}).record(
        part["made"],
        reward=DerivedField("extra.reward", extra["reward"]) if "reward" in extra else _reward_of(row, trial),
        advantage=DerivedField("extra.advantage", extra.get("advantage")),
        answer=DerivedField("extra.answer", extra.get("answer")),
        temperature=DerivedField("extra.temperature", extra.get("temperature")),
        log_prob_mode=DerivedField("extra.log_prob_mode", extra.get("log_prob_mode")),
        policy_version=DerivedField("extra.version", or_unknown(extra.get("version", extra.get("policy_version")))),
        finish_reason=DerivedField("extra.finish_reason", extra.get("finish_reason")),
        failure=DerivedField("extra.failure_reason", as_failure(extra.get("failure_reason", failed), "failure_reason")),
        group=None if task is None else DerivedField("extra.group or the trial's task", compared),
        one_turn=part["one_turn"],
        meta=dict(part_of(stored_meta, "prompt"))
        | {name: stored_meta[name] for name in ("untrusted_reward", "encoded") if name in stored_meta}
        | {key: value for key, value in extra.items() if key not in used_fields}
        | {"agent": agent.get("name"), "session": session, "part": place},
        flags={
            "one_prompt": False,
            "across_files": task is not None,
            "evaluation": extra.get("evaluation") is True,
            "mask_known": extra.get("mask_known") is not False,
            "identity": None if episode is None else ("atif", episode, _first_steps(document), *where),
        },
    )


def _first_steps(document: Row) -> str:
    """Return the steps up to the first sampled one, without what the agent adds to a step later."""
    steps = document["steps"]
    end = next((place for place, step in enumerate(steps, start=1) if _is_sampled(step)), len(steps))
    sampled = [part_of(step, "metrics").get("completion_token_ids") for step in steps[:end]]
    return repr([[step.get(name) for name in ("source", "message", "timestamp")] for step in steps[:end]] + sampled)


def _parts(steps: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the trajectories of the steps, as what a record has: of token ids, or of messages without them."""
    for place, step in enumerate(steps):
        if part_of(step, "metrics").get("completion_token_ids") and step.get("source") != "agent":
            raise DataError(f"steps[{place}] has sampled tokens, but its source is {step.get('source')!r}.")
    agents = [place for place, step in enumerate(steps) if _is_sampled(step)]
    with_ids = [place for place in agents if part_of(steps[place], "metrics").get("completion_token_ids") is not None]
    if not agents:
        return []
    if not with_ids:
        talk = [message for step in steps for message in _messages(step)]
        first = sum(len(_messages(step)) for step in steps[: agents[0]])
        values = {"prompt": DerivedField("steps", talk[:first]), "completion": DerivedField("steps", talk[first:])}
        return [{"made": values, "one_turn": len(talk) == first + 1}]
    if lacking := [place for place in agents if place not in with_ids]:
        raise DataError(f"steps[{lacking[0]}] was sampled but lacks completion_token_ids, which other steps have.")
    parts: list[dict[str, Any]] = []
    before = 0
    for place in with_ids:
        metrics = part_of(steps[place], "metrics")
        if (steps[place].get("llm_call_count") or 1) > 1:
            raise DataError(f"steps[{place}] contains several model calls, whose tokens cannot be separated.")
        prompt = metrics.get("prompt_token_ids")
        if prompt is None:
            raise DataError(
                f"steps[{place}] has completion_token_ids but no prompt_token_ids, so its prompt is unknown."
            )
        prompt = as_ids(prompt, f"steps[{place}].metrics.prompt_token_ids")
        ids = as_ids(metrics["completion_token_ids"], f"steps[{place}].metrics.completion_token_ids")
        more = part_of(metrics, "extra")
        scores, reference = metrics.get("logprobs", more.get("logprobs")), more.get("ref_log_probs")
        if scores is not None and len(as_list(scores, "logprobs")) != len(ids):
            raise DataError(f"steps[{place}] has {len(ids)} completion_token_ids but {len(scores)} logprobs.")
        if reference is not None and len(as_list(reference, "ref_log_probs")) != len(ids):
            raise DataError(f"steps[{place}] has {len(ids)} completion_token_ids but {len(reference)} ref_log_probs.")
        whole = parts[-1] if parts else None
        if whole is None or prompt[: len(whole["tokens"])] != whole["tokens"]:
            whole = {"start": len(prompt), "tokens": [], "mask": [], "scores": [], "reference": [], "texts": []}
            whole["prompt"] = [message for step in steps[before:place] for message in _messages(step)]
            parts.append(whole)
        else:
            whole["texts"] += [message_text(message) for step in steps[before:place] for message in _messages(step)]
        num_replies = len(prompt) - len(whole["tokens"])
        whole["tokens"] = [*prompt, *ids]
        whole["mask"] += [0] * num_replies + [1] * len(ids)
        for name, log_probs in (("scores", scores), ("reference", reference)):
            whole[name] += [None] * num_replies + (list(log_probs) if log_probs is not None else [None] * len(ids))
        whole["timestamp"] = steps[place].get("timestamp")
        whole["texts"].append(message_text(_messages(steps[place])[0]))
        before = place + 1
    return [{"made": _derived(whole), "one_turn": True} for whole in parts]


def _derived(whole: Row) -> dict[str, DerivedField]:
    start = whole["start"]
    values = {
        "prompt_ids": DerivedField("metrics.prompt_token_ids", whole["tokens"][:start]),
        "completion_ids": DerivedField("metrics.completion_token_ids", whole["tokens"][start:]),
        "completion_mask": DerivedField("prompt_token_ids of later steps", whole["mask"][start:]),
        "prompt": DerivedField("steps", text_of(whole["prompt"])),
        "completion": DerivedField("steps", "\n\n".join(text for text in whole["texts"] if text)),
    }
    if any(score is not None for score in whole["scores"]):
        values["log_probs"] = DerivedField("metrics.logprobs", whole["scores"][start:])
    if any(score is not None for score in whole["reference"]):
        values["ref_log_probs"] = DerivedField("metrics.extra.ref_log_probs", whole["reference"][start:])
    if whole["timestamp"] is not None:
        values["created_at"] = DerivedField("timestamp of the last sampled step", _seconds(whole["timestamp"]))
    return values


def _seconds(timestamp: Any) -> float:
    """Return the seconds since 1970 of an ISO 8601 time, in UTC where it names no zone."""
    try:
        moment = datetime.fromisoformat(str(timestamp))
    except ValueError:
        raise DataError(f"field 'timestamp' must be an ISO 8601 time, got {excerpt(timestamp)}.") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _is_sampled(step: Row) -> bool:
    copied, calls = step.get("is_copied_context"), step.get("llm_call_count")
    return step.get("source") == "agent" and not copied and calls != 0


def _messages(step: Row) -> list[dict[str, Any]]:
    """Return the chat messages of a step: its text, and the replies of tools."""
    message: dict[str, Any] = {"role": _ROLES.get(str(step.get("source")), "user"), "content": step.get("message")}
    message |= {name: step[name] for name in ("tool_calls", "reasoning_content") if step.get(name)}
    replies = part_of(step, "observation").get("results") or ()
    return [message, *({"role": "tool", "content": r.get("content")} for r in replies)]


def _trial_of(path: Path) -> Mapping[str, Any]:
    """Return the `result.json` of the Harbor trial that contains a trajectory; nothing where there is none."""
    for file in trial_results(path):
        if file.is_file():
            try:
                document = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{file} cannot be read as JSON: {error}.") from error
            if isinstance(document, dict) and {"trial_name", "task_name"} <= document.keys():
                return document
    return {}


def _reward_of(row: Fields, trial: Row) -> DerivedField | None:
    """Return the verifier's reward of a trial: the only one, or the one called reward."""
    rewards = part_of(part_of(trial, "verifier_result"), "rewards")
    if len(rewards) > 1 and "reward" not in rewards and "reward" not in row.field_paths and not row.for_display:
        name = next(iter(rewards))
        raise DefinitionError(
            f"the verifier has several rewards: {', '.join(rewards)}. Choose one of them, or a sum of several: "
            f"--field reward=trial.verifier_result.rewards.{name}"
        )
    reward = rewards.get("reward", next(iter(rewards.values()), None))
    return None if reward is None else DerivedField("verifier_result.rewards of result.json", reward)
