"""Which field of a row holds what: found by the names that tools use, or named by the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError, did_you_mean

ALIASES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "query", "problem", "instruction", "prompts", "input", "input_prompt"),
    "completion": (
        *("completion", "completions", "response", "responses", "output", "outputs", "generation", "generations"),
        *("solution", "solutions", "output_response"),
    ),
    "reward": ("reward", "rewards", "score", "scores", "task_reward", "is_correct", "correct"),
    "prompt_ids": ("prompt_ids", "prompt_token_ids", "prompt_tokens"),
    "completion_ids": (
        *("completion_ids", "completion_token_ids", "completion_tokens", "response_ids", "response_token_ids"),
        *("response_tokens", "sampled_tokens"),
    ),
    "completion_mask": ("completion_mask", "response_mask", "tool_mask", "loss_mask", "loss_masks"),
    "log_probs": (
        *("log_probs", "logprobs", "completion_log_probs", "completion_logprobs", "response_logprobs"),
        *("sampling_logprobs", "sampling_per_token_logps", "old_log_probs", "rollout_logprobs"),
    ),
    "ref_log_probs": ("ref_log_probs", "ref_logprobs", "ref_per_token_logps"),
    "advantage": ("advantage", "advantages"),
    "group": ("group_id", "group", "prompt_id", "prompt_idx", "question_id", "uid", "example_id"),
    "policy_version": ("policy_version", "model_version", "weight_version", "step"),
    "finish_reason": ("finish_reason", "finish_reasons", "stop_reason", "stop_reasons"),
    "answer": ("answer", "ground_truth", "reference_answer", "gts", "target"),
    "created_at": ("created_at", "timestamp"),
}
"""Each property of a rollout and the field names it is looked for under, in this order."""

TARGETS = tuple(ALIASES)


NONE = "none"
"""What the user writes to leave out a target that the rows have."""


class Fields:
    """The fields of one file: target name to the names in its rows, settled by the first row.

    Args:
        row: the first row.
        given: what the user said: target to field name, or `none`. Wins over every alias. `reward` is not among them.
        preset: what the format says: target to field names in order of preference; none for a target that the format
            does not have.

    Raises:
        DefinitionError: the user names a target that does not exist, or a field that the row does not have.

    >>> fields = Fields({"question": "1+1", "response": "2", "score": 1.0})
    >>> fields.of["prompt"], fields.of["completion"], fields.of["reward"]
    ('question', 'response', 'score')
    """

    def __init__(
        self,
        row: Mapping[str, Any],
        given: Mapping[str, str] | None = None,
        preset: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.of: dict[str, str] = {}
        given, preset = dict(given or {}), dict(preset or {})
        for target, name in given.items():
            if target not in ALIASES:
                raise DefinitionError(
                    f"--field {target}={name}: there is no target '{target}'." + did_you_mean(target, TARGETS)
                )
            if name not in row and name != NONE:
                raise DefinitionError(
                    f"--field {target}={name}: the rows have no field '{name}'." + did_you_mean(name, map(str, row))
                )
        taken = set(given.values())
        for target, aliases in ALIASES.items():
            names = (given[target],) if target in given else preset.get(target, aliases)
            found = [name for name in names if name in row and (name not in taken or target in given)]
            if found:
                self.of[target] = found[0]
                taken.add(found[0])
            if target == "reward":
                self.rivals = tuple(found)

    def get(self, row: Mapping[str, Any], target: str) -> Any:
        """Return a value, or None where the file has no such field.

        Raises:
            DataError: the first row had the field and this one lacks it.
        """
        name = self.of.get(target)
        if name is None:
            return None
        if name not in row:
            raise DataError(f"there is no field '{name}', which the first row has." + did_you_mean(name, map(str, row)))
        return row[name]

    def rest(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the other fields; they are kept in `meta`."""
        used = set(self.of.values())
        return {str(name): value for name, value in row.items() if name not in used}

    def require(self, *options: tuple[str, ...], row: Mapping[str, Any]) -> None:
        """Check that for one of the options all targets were found.

        Raises:
            DefinitionError: none is complete; the message says which names are looked for.
        """
        if any(all(target in self.of for target in option) for option in options):
            return
        first = options[0]
        lacking = [target for target in first if target not in self.of]
        looked = "; ".join(f"{target}: {', '.join(ALIASES[target])}" for target in lacking)
        raise DefinitionError(
            f"no field for {' and '.join(lacking)} (looked for {looked}). The rows have: {', '.join(sorted(row))}. "
            f"Name it: --field {lacking[0]}=NAME"
        )
