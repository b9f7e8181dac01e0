"""Formats with one completion, or one prompt with its completions, per row: any such file, TRL, verl, open-instruct."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange._fields import Fields
from rlhf_pipeline.exchange._rollout import (
    ONE_ROW,
    Rollout,
    as_answer,
    as_ids,
    as_int,
    as_list,
    as_number,
    as_prompt,
    as_scores,
    as_text,
    is_messages,
    shown,
)

Row = Mapping[str, Any]
Preset = Mapping[str, str | None]


class FlatReader:
    """Reads rows by their field names.

    Args:
        row: the first row, which settles the names.
        given: the user's `--field` options.
        preset: field names that the format fixes.
        group_of: fields that name the instance of a prompt within a file, if all are there.
        as_chat: text prompts go through the chat template; False where the text is the whole prompt already.
        needs_reward: the file must have a field of rewards.

    Raises:
        DefinitionError: no field is known for the prompt, the completion or the reward.
    """

    def __init__(
        self,
        row: Row,
        given: Mapping[str, str],
        *,
        preset: Preset | None = None,
        group_of: tuple[str, ...] = (),
        as_chat: bool = True,
        needs_reward: bool = True,
    ) -> None:
        self.fields = Fields(row, given, preset)
        self.fields.require(("prompt", "completion"), ("prompt_ids", "completion_ids"), row=row)
        if needs_reward:
            self.fields.require(("reward",), row=row)
        self.sum_of: tuple[str, ...] = ()
        self.group_of = group_of
        self.as_chat = as_chat

    def about(self) -> str:
        """Return which field was taken for what, in words."""
        pairs = [f"{target}={name}" for target, name in self.fields.of.items()]
        if self.sum_of:
            pairs.append(f"reward={'+'.join(self.sum_of)}" + (" (summed)" if len(self.sum_of) > 1 else ""))
        return ", ".join(pairs)

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollouts of one row.

        Raises:
            DataError: a field is of a wrong kind.
        """
        fields, get = self.fields, self.fields.get
        rest = fields.rest(row)
        found = get(row, "completion")
        many = get(row, "completion_ids") if found is None else found
        if isinstance(many, list) and many and not is_messages(many) and not isinstance(many[0], int):
            return self._several(row, rest, len(many))
        reward = self._reward(row, rest)
        return [self._one(row, rest, found, get(row, "completion_ids"), reward, lambda target: get(row, target))]

    def _several(self, row: Row, rest: dict[str, Any], num: int) -> list[Rollout]:
        """Return the completions of a row with lists: one group."""

        def item(target: str, i: int) -> Any:
            value = self.fields.get(row, target)
            if not isinstance(value, list) or (value and target.endswith("_mask") and not isinstance(value[0], list)):
                return value  # one value for all of them, such as a policy version
            if len(value) != num:
                name = self.fields.of[target]
                raise DataError(f"field '{name}' has {len(value)} items for {num} completions.")
            return value[i]

        rewards = self.fields.get(row, "reward")
        if rewards is not None and not isinstance(rewards, list):
            raise DataError(
                f"field '{self.fields.of['reward']}' must be a list of {num} rewards, one per completion, "
                f"got {shown(rewards)}."
            )
        made: list[Rollout] = []
        for i in range(num):
            reward = as_number(item("reward", i), self.fields.of.get("reward", "reward"))
            ids, pick = item("completion_ids", i), functools.partial(item, i=i)
            made.append(self._one(row, rest, item("completion", i), ids, reward, pick))
        for one in made:
            one.group = ONE_ROW if one.group is None else one.group
        return made

    def _one(self, row: Row, rest: dict[str, Any], completion: Any, ids: Any, reward: float, get: Any) -> Rollout:
        name = self.fields.of.get
        prompt, prompt_ids = self.fields.get(row, "prompt"), self.fields.get(row, "prompt_ids")
        made = Rollout(reward=reward, as_chat=self.as_chat, meta=rest)
        if prompt is not None:
            made.prompt = as_prompt(prompt, name("prompt", ""))
        if prompt_ids is not None:
            made.prompt_ids = as_ids(prompt_ids, name("prompt_ids", ""))
        if completion is not None:
            made.completion = as_text(completion, name("completion", ""))
        if ids is not None:
            made.completion_ids = as_ids(ids, name("completion_ids", ""))
        for target in ("log_probs", "ref_log_probs"):
            if (scores := get(target)) is not None:
                setattr(made, target, as_scores(scores, name(target, "")))
        if (mask := get("completion_mask")) is not None:
            made.completion_mask = [bool(item) for item in as_list(mask, name("completion_mask", ""))]
        if (advantage := get("advantage")) is not None and not isinstance(advantage, list):
            made.advantage = as_number(advantage, name("advantage", ""))
        if (version := get("policy_version")) is not None:
            made.policy_version = as_int(version, name("policy_version", ""))
        if (reason := get("finish_reason")) is not None:
            made.finish_reason = str(reason)
        if isinstance(created := get("created_at"), (int, float)):
            made.created_at = float(created)
        made.answer = as_answer(self.fields.get(row, "answer"))
        made.group = self._group(row, made)
        return made

    def _group(self, row: Row, made: Rollout) -> Any:
        if "group" in self.fields.of:
            group = self.fields.get(row, "group")
            if group is not None:
                return ("group", made.policy_version, str(group))
        if self.group_of and all(name in row for name in self.group_of):
            return tuple(str(row[name]) for name in self.group_of)
        return None

    def _reward(self, row: Row, rest: dict[str, Any]) -> float:
        return as_number(self.fields.get(row, "reward"), self.fields.of.get("reward", "reward"))


class TRLReader(FlatReader):
    """The completions table of TRL's trainers: `step, prompt, completion, <one column per reward function>, advantage`.

    Source: `GRPOTrainer.log` of TRL 1.16, which writes `completions/completions_{step:05d}.parquet` when
    `log_completions=True`. The reward columns are named after the reward functions. Their sum is the task reward, as
    with TRL's own default weights; a function that returned None (NaN in the file) does not count.
    """

    def __init__(self, row: Row, given: Mapping[str, str]) -> None:
        fixed = {"prompt": "prompt", "completion": "completion", "advantage": "advantage", "policy_version": "step"}
        preset: dict[str, str | None] = fixed | {"reward": None, "group": None, "answer": None}
        # A step's instances of one prompt cannot be told apart by name, so the place in the table does.
        super().__init__(row, given, preset=preset, as_chat=False, needs_reward=False)
        if "reward" not in self.fields.of:
            rest = self.fields.rest(row)
            self.sum_of = tuple(name for name, value in rest.items() if _may_be_reward(value))
            if not self.sum_of:
                raise DefinitionError(
                    f"no column of rewards. The table has: {', '.join(sorted(row))}. Name it: --field reward=NAME"
                )

    def _reward(self, row: Row, rest: dict[str, Any]) -> float:
        if not self.sum_of:
            return super()._reward(row, rest)
        values = [as_number(row.get(name), name) for name in self.sum_of]
        known = [value for value in values if value == value]
        return sum(known) if known else float("nan")


class OpenInstructReader(FlatReader):
    """Rollout shards of open-instruct's `grpo_fast.py --save_traces`.

    Source: `RolloutRecord` in `open_instruct/rl_utils.py` (e6c3044): step, sample_idx, prompt_idx, prompt_tokens,
    response_tokens, reward, advantage, finish_reason, dataset, ground_truth, request_info, logprobs. A group is
    `(step, prompt_idx)`. The mask of tool output is not in the file, so all response tokens count as the policy's.
    """

    def __init__(self, row: Row, given: Mapping[str, str]) -> None:
        preset: dict[str, str | None] = {
            "prompt_ids": "prompt_tokens",
            "completion_ids": "response_tokens",
            "reward": "reward",
            "log_probs": "logprobs",
            "policy_version": "step",
            "answer": "ground_truth",
            "group": None,
        }
        super().__init__(row, given, preset=preset, group_of=("step", "prompt_idx"))

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollout of one record; a reference answer in token ids is decoded at import."""
        (made,) = super().read(row)
        truth = row.get("ground_truth")
        if isinstance(truth, list):
            made.answer, made.meta["ground_truth"] = None, truth
        return [made]


def verl_reader(row: Row, given: Mapping[str, str]) -> FlatReader:
    """Return a reader of verl's rollout dumps, `trainer.rollout_data_dir/{step}.jsonl`.

    Source: `RayPPOTrainer._dump_generations` (1dda039): input, output, gts, score, step, and the extra values of the
    reward function. `input` is the whole prompt as text, template included and special tokens left out, so it does not
    go through the chat template again. verl reorders a step's rows to balance its workers, so a group is what shares
    `(step, input)`.
    """
    preset: dict[str, str | None] = {
        "prompt": "input",
        "completion": "output",
        "reward": "score",
        "answer": "gts",
        "policy_version": "step",
        "group": "uid" if "uid" in row else None,
    }
    return FlatReader(row, given, preset=preset, group_of=("step", "input"), as_chat=False)


def _may_be_reward(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))
