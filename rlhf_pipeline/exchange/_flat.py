"""Rows with one completion, or one prompt with its completions, read by the names of their fields."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange._completion import (
    ONE_ROW,
    Rollout,
    Row,
    as_answer,
    as_ids,
    as_int,
    as_mask,
    as_number,
    as_prompt,
    as_reward,
    as_scores,
    as_text,
    is_messages,
    shown,
)
from rlhf_pipeline.exchange._fields import NONE, Fields, Format
from rlhf_pipeline.exchange._reward_columns import RewardTerms, question

_AS: Mapping[str, Callable[[Any, str], Any]] = {
    "prompt_ids": as_ids,
    "completion_ids": as_ids,
    "completion_mask": as_mask,
    "log_probs": as_scores,
    "ref_log_probs": as_scores,
    "advantage": lambda value, name: math.nan if isinstance(value, list) else as_reward(value, name),
    "policy_version": as_int,
    "finish_reason": lambda value, name: as_text(str(value), name),
    "created_at": lambda value, name: as_number(value, name) if isinstance(value, (int, float)) else math.nan,
}
"""How the value of a field becomes what a rollout has under the name of its target."""


class FlatReader:
    """Reads rows by their field names.

    Args:
        row: the first row, which settles the names.
        given: the user's `--field` options.
        layout: what the format fixes.

    Raises:
        DefinitionError: no field is known for the prompt, the completion or the reward, or several for the reward.
    """

    def __init__(self, row: Row, given: Mapping[str, str], layout: Format) -> None:
        self.layout = layout
        others = {target: name for target, name in given.items() if target != "reward"}
        self.terms: RewardTerms | None = None
        self.no_reward = given.get("reward") == NONE and NONE not in row
        if "reward" in given and not self.no_reward:
            self.terms = RewardTerms.parse(given["reward"], row)
            if len(self.terms.weights) == 1:
                others["reward"] = next(iter(self.terms.weights))
        preset = layout.fields if len(others) == len(given) else {**layout.fields, "reward": ()}
        self.fields = Fields(row, others, preset)
        self.fields.require(("prompt", "completion"), ("prompt_ids", "completion_ids"), row=row)
        if self.terms is None and not self.no_reward:
            self.fields.require(("reward",), row=row)
            if len(self.fields.rivals) > 1 and "reward" not in layout.fields:
                raise question(self.fields.rivals)
            self.terms = RewardTerms({self.fields.of["reward"]: 1.0})

    def about(self) -> str:
        """Describe which field was read as what."""
        pairs = self.fields.of | {"reward": NONE if self.terms is None else str(self.terms)}
        return ", ".join(f"{target}={name}" for target, name in pairs.items())

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollouts of one row.

        Raises:
            DataError: a field is of a wrong kind.
        """
        get = self.fields.get
        rest = self.fields.rest(row)
        found = get(row, "completion")
        many = get(row, "completion_ids") if found is None else found
        if isinstance(many, list) and many and not is_messages(many) and not isinstance(many[0], int):
            return self._several(row, rest, len(many))
        reward = self._reward(functools.partial(self.fields.value, row))
        return [self._one(row, rest, reward, functools.partial(get, row))]

    def _reward(self, value_of: Callable[[str], Any]) -> float:
        if self.terms is None:
            return math.nan
        return self.terms.of(value_of, per_token=self.layout.per_token)

    def _several(self, row: Row, rest: dict[str, Any], num: int) -> list[Rollout]:
        """Return the completions of a row with lists: one group."""

        def pick(name: str, i: int) -> Any:
            values = self.fields.value(row, name)
            if len(values) != num:
                raise DataError(f"field '{name}' has {len(values)} items for {num} completions.")
            return values[i]

        def item(target: str, i: int) -> Any:
            value = self.fields.get(row, target)
            plain = target in ("prompt_ids", "completion_mask") and value and not isinstance(value[0], list)
            if not isinstance(value, list) or plain:
                return value  # one value for all of them, such as a policy version
            return pick(self.fields.of[target], i)

        for name in self.terms.weights if self.terms is not None else ():
            if not isinstance(self.fields.value(row, name), list):
                raise DataError(
                    f"field '{name}' must be a list of {num} rewards, one per completion, got {shown(row[name])}."
                )
        made: list[Rollout] = []
        for i in range(num):
            reward = self._reward(functools.partial(pick, i=i))
            made.append(self._one(row, rest, reward, functools.partial(item, i=i)))
        for one in made:
            one.group = ONE_ROW if one.group is None else one.group
        return made

    def _one(self, row: Row, rest: dict[str, Any], reward: float, get: Callable[[str], Any]) -> Rollout:
        """Return one completion of a row; `get` gives its value of a target."""
        name = self.fields.of
        made = Rollout(reward=reward, as_chat=self.layout.as_chat, meta=rest)
        if (prompt := self.fields.get(row, "prompt")) is not None:
            made.prompt = as_prompt(prompt, name["prompt"])
        if (completion := get("completion")) is not None:
            if is_messages(completion) and len(completion) > 1 and get("completion_ids") is None:
                roles = ", ".join(str(message.get("role")) for message in completion)
                raise DataError(
                    f"field '{name['completion']}' holds {len(completion)} messages ({roles}) and no token ids; "
                    "which of its tokens the policy produced cannot be told from the text. Export the token ids too."
                )
            made.completion = as_text(completion, name["completion"])
        for target, converted in _AS.items():
            if (value := get(target)) is not None:
                setattr(made, target, converted(value, name[target]))
        made.answer = as_answer(self.fields.get(row, "answer"))
        made.group = self._group(row, made)
        return made

    def _group(self, row: Row, made: Rollout) -> Any:
        if "group" in self.fields.of:
            group = self.fields.get(row, "group")
            if group is not None:
                return ("group", made.policy_version, str(group))
        if self.layout.group_of and all(name in row for name in self.layout.group_of):
            return tuple(str(row[name]) for name in self.layout.group_of)
        return None


class TRLReader(FlatReader):
    """The completions table of TRL's trainers, whose reward columns are called after the reward functions.

    Their names say nothing, and other columns of numbers stand beside them (`log_extra`), so where there are several
    the user names the reward. A column `reward` beside no advantages, as older versions wrote, is the total.

    Raises:
        DefinitionError: several columns may be rewards, or none.
    """

    def __init__(self, row: Row, given: Mapping[str, str], layout: Format) -> None:
        if "reward" not in given and ("advantage" in row or "reward" not in row):
            known = {*given.values(), *(name for names in layout.fields.values() for name in names)} - {"reward"}
            columns = [
                str(name)
                for name, value in row.items()
                if name not in known and (value is None or isinstance(value, (bool, int, float)))
            ]
            if not columns:
                raise DefinitionError(
                    f"no column of rewards. The table has: {', '.join(sorted(map(str, row)))}. Name it: "
                    "--field reward=NAME"
                )
            if len(columns) > 1:
                raise question(columns)
            given = {**given, "reward": columns[0]}
        super().__init__(row, given, layout)


class OpenInstructReader(FlatReader):
    """Rollout shards of open-instruct; a reference answer in token ids stays in `meta`."""

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollout of one record."""
        (made,) = super().read(row)
        truth = row.get("ground_truth")
        if isinstance(truth, list):
            made.answer, made.meta["ground_truth"] = None, truth
        return [made]


class SkyRLBatchReader(FlatReader):
    """Batches of SkyRL's generator: each field is a list with one item per trajectory.

    A group is what shares `instance_id` in trajectory_ids, else trajectories in turn with one prompt.
    """

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollouts of one batch."""
        made = super().read(row) if row["response_ids"] else []
        trajectories = row.get("trajectory_ids") or [None] * len(made)
        if len(trajectories) != len(made):
            raise DataError(f"field 'trajectory_ids' has {len(trajectories)} items for {len(made)} completions.")
        for one, trajectory in zip(made, trajectories, strict=True):
            instance = trajectory.get("instance_id") if isinstance(trajectory, Mapping) else None
            one.group = None if instance is None else ("instance", str(instance))
            one.meta = {}  # what is left is of the whole batch
        return made
