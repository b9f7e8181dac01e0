"""Which field of a row holds what: fixed by the format, found by the names that tools use, or named by the user."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhf_pipeline.errors import DataError, DefinitionError, did_you_mean
from rlhf_pipeline.exchange._completion import Rollout, Row

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


class Reader(Protocol):
    """Turns rows of one file into rollouts."""

    def about(self) -> str:
        """Describe which field was read as what."""
        ...

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollouts of one row."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format: where a tool puts what, from the tool's own source."""

    name: str
    summary: str
    """What it is, in a few words."""
    source: str
    """Where the tool writes it."""
    needs: tuple[str, ...] = ()
    """A row that has all these fields is of this format."""
    also: Callable[[Row], bool] = lambda row: True
    """And this condition holds."""
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Which field holds what is known of a rollout. A target that is not named is looked for under the names
    that tools use (`ALIASES`); one with no names is not in the file."""
    group_of: tuple[str, ...] = ()
    """Fields that name a group within a file, if all are there; else rows in turn with one prompt are a group."""
    as_chat: bool = True
    """Text prompts go through the chat template; False where the text is the whole prompt already."""
    per_token: bool = False
    """A list of rewards is one per token, to be summed."""
    version_in_path: tuple[str, int] | None = None
    """Where the path of the file holds the policy version: an expression with one group, and what is added."""
    make: Callable[[Row, Mapping[str, str], Format], Reader]
    """Makes a reader from the first row, the user's `--field` options and this."""

    def matches(self, row: Row) -> bool:
        """Return True if a row looks like it."""
        return all(name in row for name in self.needs) and self.also(row)

    def version_of(self, path: Path) -> int | None:
        """Return the policy version that the path of a file tells, or None."""
        if self.version_in_path is None:
            return None
        expression, offset = self.version_in_path
        found = re.findall(expression, path.as_posix())
        return int(found[-1]) + offset if found else None


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
        row: Row,
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

    def get(self, row: Row, target: str) -> Any:
        """Return the value of a target, or None where the file has no field for it.

        Raises:
            DataError: the first row had the field and this one lacks it.
        """
        name = self.of.get(target)
        return None if name is None else self.value(row, name)

    @staticmethod
    def value(row: Row, name: str) -> Any:
        """Return the value of a field that the first row has.

        Raises:
            DataError: this row lacks it.
        """
        if name not in row:
            raise DataError(f"there is no field '{name}', which the first row has." + did_you_mean(name, map(str, row)))
        return row[name]

    def rest(self, row: Row) -> dict[str, Any]:
        """Return the other fields; they are kept in `meta`."""
        used = set(self.of.values())
        return {str(name): value for name, value in row.items() if name not in used}

    def require(self, *options: tuple[str, ...], row: Row) -> None:
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
