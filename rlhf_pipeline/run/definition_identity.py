"""The fields that determine the rows of an evaluation: all except those that are excluded here, with reasons.

A new field counts until it is excluded: a field that was forgotten begins a new store of evaluations, and never answers
with the rows of another definition. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlhf_pipeline.config import Evaluate, Pipeline
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.run.inputs import prompt_contents, template_content
from rlhf_pipeline.run.recorded_code import evaluated_code

_TEXT: Final = "text for people"
_LEARNING: Final = "determines what the learner does with rows; weights are identified by their step or content"
_FIGURES: Final = "determines which figures are computed from the rows, and when"
_CALLS: Final = "determines when a call is made and when it is cancelled, but not its return value"
_LAST_BITS: Final = "determines which rows share a batch, and thus the last bits of log-probs"

NOT_OF_AN_EVALUATION: Final[Mapping[str, str]] = {
    **dict.fromkeys(("name", "description", "needs"), _TEXT),
    **dict.fromkeys(("write", "buffer", "sample", "loss", "learn", "replay"), _LEARNING),
    "prompts": "training prompts; only evaluation prompts matter",
    "policy.path": "weights are identified by their step or content",
    **dict.fromkeys(("collect.prompts_per_rollout", "collect.temperature"), "evaluations have a separate setting"),
    "collect.engine": "draws different completions from the same distribution",
    "collect.engine_memory": "determines how much memory is used",
    "collect.refresh_weights_every": "an evaluation uses the weights of one step",
    **dict.fromkeys(("collect.num_slots", "collect.reply_after", "collect.live_conversations"), _LAST_BITS),
    **dict.fromkeys(("collect.reward_concurrency", "collect.reward_timeout_s", "collect.step_timeout_s"), _CALLS),
    **dict.fromkeys(("collect.retries", "collect.alarm_failed", "collect.call_threads"), _CALLS),
    **dict.fromkeys(("evaluate.every", "evaluate.at_start", "evaluate.keep_best", "evaluate.best"), _FIGURES),
    **dict.fromkeys(("evaluate.success", "evaluate.success_at"), _FIGURES),
}
"""Fields, or groups of fields, that do not determine the rows of an evaluation, each with the reason."""


def evaluation_identity(pipeline: Pipeline, evaluate: Evaluate) -> dict[str, Any]:
    """Return what decides the rows of a set of evaluations, by field: settings, code by identity, files by content."""
    files = template_content(pipeline) | prompt_contents(evaluate.prompts, "evaluate.prompts")
    code = evaluated_code(pipeline, evaluate)
    settings = dict(_settings(pipeline, evaluate))
    return {
        **{path: value for path, value in settings.items() if _counts(path) and path not in files},
        **{f"content of {field}": content for field, content in files.items()},
        **{f"code of {field}": record for field, record in code.items()},
    }


def _counts(path: str) -> bool:
    """Return whether a field is none of those that are excluded.

    >>> _counts("collect.prefill"), _counts("collect.num_slots"), _counts("learn.lr")
    (True, False, False)
    """
    names = path.split(".")
    return not any(".".join(names[:end]) in NOT_OF_AN_EVALUATION for end in range(1, len(names) + 1))


def _settings(pipeline: Pipeline, evaluate: Evaluate) -> Iterator[tuple[str, Any]]:
    """Yield every field of a definition with its value, and `evaluate` of one set."""
    evaluation_settings = {"collect": evaluate.sampling(pipeline.collect), "evaluate": evaluate}
    for item in dataclasses.fields(pipeline):
        yield from _leaves(to_json(evaluation_settings.get(item.name, getattr(pipeline, item.name))), item.name)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in objects and lists, each with its path; an empty one is a value."""
    parts = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
    for name, part in parts.items():
        yield from _leaves(part, f"{path}.{name}")
    if not parts:
        yield path, value
