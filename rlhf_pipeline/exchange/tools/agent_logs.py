"""Logs of agent trainers that hold messages and no tokens: rLLM's episodes and ART's trajectories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.exchange.fields import DerivedField, Fields, part_of
from rlhf_pipeline.exchange.tools.registry import NO_SCORES, NO_TOKENS, RawRollouts, or_unknown, tool
from trajectory_store.recorder.raw_rollout import CUT, Row, as_list, excerpt, is_messages

_LIMITS = {
    "max_prompt_length_exceeded": CUT,
    "max_response_length_exceeded": CUT,
    "max_turns_exceeded": "turns",
    "env_done": "stop",
}
_FAILURES = {"timeout": "timeout", "error": "tool_error"}
"""For each `termination_reason` of rLLM, why the last call ended, and the kind of failure. `unknown` means unknown."""


def _unit_of_episode(row: Fields) -> str:
    return f"{row.path.parent.name}, step {row.row['training_step']}, episode {row.row['episode_id']}"


@tool(
    *("rllm", "episodes of rLLM's episode logger", "training_step epoch episode_id task task_hash is_correct "
    "termination_reason trajectories"),
    *(NO_TOKENS, NO_SCORES, "the policy's version, the temperature"),
    unit=_unit_of_episode,
)  # fmt: skip
def rllm(row: Fields) -> RawRollouts:
    """RLLM (commit 0de8298): `episodes/MODE_step_N_epoch_E/episode_hashHASH_idID.json`, a document per episode.

    Writer: `EpisodeLogger.log_episode` in `rllm/utils/episode_logger.py`. Fields: `training_step`, `epoch`;
    `episode_id`, `TASK:ROLLOUT`; `task`, `task_hash`; `termination_reason`, of `TerminationReason`: `env_done`,
    `max_prompt_length_exceeded`, `max_response_length_exceeded`, `max_turns_exceeded`, `timeout`, `unknown`, `error`;
    `trajectories`, each with `name`, `uid`, `reward` and `steps`, of which `chat_completions` are the messages up to
    and with the model's. MODE is `train` or `val`.

    Each step is a separate trajectory, as its messages show what its call read, with the reward of the whole. A group
    is a task of a step, of each agent (`name`) by itself.
    """
    values = row.row
    evaluation = row.path.parent.name.startswith("val_step_")
    reason = str(values["termination_reason"])
    for trajectory in as_list(values["trajectories"], "trajectories"):
        steps = as_list(trajectory["steps"], "steps")
        if not steps:
            yield None
        for place, step in enumerate(steps):
            talk = step.get("chat_completions")
            if not is_messages(talk) or len(talk) < 2 or talk[-1].get("role") != "assistant":
                raise DataError(
                    "field 'chat_completions' must be a list of messages that ends with one from the assistant, got "
                    f"{excerpt(talk)}."
                )
            yield row.of({**values, **trajectory}).record(
                prompt=DerivedField("chat_completions", talk[:-1]),
                completion=DerivedField("the last of chat_completions", talk[-1:]),
                reward=DerivedField("trajectories[].reward", trajectory.get("reward")),
                finish_reason=DerivedField(
                    "termination_reason", _LIMITS.get(reason, "") if place == len(steps) - 1 else ""
                ),
                failure=DerivedField("termination_reason", _FAILURES.get(reason, "")),
                group=DerivedField(
                    "training_step, task_hash and name",
                    (values["training_step"], values["epoch"], values["task_hash"], trajectory.get("name")),
                ),
                meta={name: values[name] for name in ("training_step", "epoch", "episode_id", "is_correct")}
                | {"agent": trajectory.get("name"), "step": place, "step_reward": step.get("reward")},
                flags={
                    "identity": ("rllm", str(trajectory["uid"]), place, evaluation),
                    "one_prompt": False,
                    "across_files": True,
                    "evaluation": evaluation,
                },
            )


def _split_and_step(row: Fields) -> tuple[str, int | None]:
    """Return the split and the step of `trajectories/SPLIT/STEP.jsonl` or `.parquet` of ART."""
    match = re.search(r"trajectories/([^/]+)/(\d+)\.(?:jsonl|parquet)", row.path.as_posix())
    return ("", None) if match is None else (match[1], int(match[2]))


def _unit_of_art(row: Fields) -> str:
    split, step = _split_and_step(row)
    return "" if step is None else f"{split}, step {step}"


@tool(
    *("art", "trajectory groups of ART", "trajectories", NO_TOKENS, NO_SCORES, "the temperature"),
    also=lambda row: _is_art_group(row["trajectories"]),
    unit=_unit_of_art,
)
def art_groups(row: Fields) -> RawRollouts:
    """ART (commit 08216f5): `.art/PROJECT/models/NAME/trajectories/SPLIT/STEP.jsonl`, a group a line.

    Writer: `serialize_trajectory_groups` in `src/art/utils/trajectory_logging.py`. Each of `trajectories` has `reward`,
    `metrics`, `metadata`, `messages_and_choices`, `tools`, `additional_histories` and `logs`. What the policy sampled
    is a choice (`message`, `finish_reason`); all else are messages. Exceptions are not written. Each choice is a
    separate trajectory, whose prompt is the messages before it. Splits other than `train` are evaluations.
    """
    for trajectory in row.row["trajectories"]:
        histories = [trajectory, *(trajectory.get("additional_histories") or ())]
        yield from _choices(row.of(trajectory), [_messages_of(part) for part in histories], ("line", row.number))


@tool(
    *("art", "trajectory tables of ART", "group_index reward metrics metadata messages", NO_TOKENS, NO_SCORES),
    *("the temperature", "why a completion ended"),
    unit=_unit_of_art,
)
def art_table(row: Fields) -> RawRollouts:
    """ART (commit 319f6d7): `trajectories/SPLIT/STEP.parquet`, a trajectory a row.

    Writer: `migrate_jsonl_to_parquet` in `src/art/utils/trajectory_migration.py`, whose columns `art` writes since:
    `group_index`; `reward`; `metrics`, `metadata`, `tools` and `additional_histories` as JSON; `logs`; `messages`, each
    with `role`, `content`, `tool_calls`, `tool_call_id` and `trainable`, true for what the policy sampled.
    """
    talk = [{name: value for name, value in message.items() if value is not None} for message in row.row["messages"]]
    marked = [({name: m[name] for name in m if name != "trainable"}, bool(m.get("trainable")), None) for m in talk]
    more = row.row.get("additional_histories")
    histories = [marked, *(_messages_of(part) for part in (json.loads(more) if more else ()))]
    yield from _choices(row, histories, ("group_index", row.row["group_index"]))


Marked = list[tuple[dict[str, Any], bool, Any]]
"""Messages, each with whether the policy sampled it, and why it ended."""


def _messages_of(history: Row) -> Marked:
    """Return the messages of a history of ART's JSON."""
    items = as_list(history["messages_and_choices"], "messages_and_choices")
    return [
        (dict(part_of(item, "message")), True, item.get("finish_reason")) if "message" in item else (item, False, None)
        for item in items
    ]


def _choices(row: Fields, histories: Sequence[Marked], group: tuple[str, Any]) -> Iterator[Any]:
    split, step = _split_and_step(row)
    metadata = row.row.get("metadata")
    num_sampled = 0
    for history in histories:
        for place, (message, is_sampled, end) in enumerate(history):
            if not is_sampled:
                continue
            num_sampled += 1
            yield row.record(
                prompt=DerivedField("messages before the choice", [before for before, _, _ in history[:place]]),
                completion=DerivedField("the choice", [message]),
                reward="reward",
                finish_reason=None if end is None else DerivedField("finish_reason", end),
                failure=DerivedField("", ""),
                policy_version=DerivedField("STEP of the file's name", or_unknown(step)),
                group=DerivedField("the group", (split, step, *group)),
                meta={"metadata": json.loads(metadata) if isinstance(metadata, str) else metadata}
                | {name: row.row.get(name) for name in ("metrics", "logs")},
                flags={"one_prompt": False, "evaluation": split not in ("", "train")},
            )
    if not num_sampled:
        yield None


def _is_art_group(trajectories: Any) -> bool:
    are_rows = isinstance(trajectories, list) and all(isinstance(item, dict) for item in trajectories)
    return are_rows and all("messages_and_choices" in item for item in trajectories)
