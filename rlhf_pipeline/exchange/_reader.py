"""Reading rows by the names of their fields: fixed by the format, those that tools use, or named by the user."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError, did_you_mean
from rlhf_pipeline.exchange._completion import (
    Rollout,
    Row,
    as_ids,
    as_int,
    as_mask,
    as_number,
    as_reward,
    is_messages,
    shown,
    values_of,
)

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
    "tokens": (),
    "length": (),
    "counts": (),
    "texts": (),
}
"""Each target that a field may hold, and the names that it is looked for under, in this order.

The last ones are found where a format or the user names them. `tokens` is a whole sequence, up to `length`; then values
per token are per token of the sequence, and its completion begins with the first that `completion_mask` marks. `counts`
is 0 for a sequence that is not learned from; `texts` are the prompt's and last the completion's.
"""
_OF_THE_PROMPT = ("prompt", "answer")
"""Targets of which all completions in a row have the same."""
_PER_TOKEN = ("completion_mask", "log_probs", "ref_log_probs", "advantage")

NONE = "none"
"""What the user writes to leave out a target that the rows have."""
ONE_ROW = "one row"
"""The group of a rollout whose row holds its whole group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format: where a tool puts what, from the tool's own source."""

    name: str
    summary: str
    """What it is, in a few words."""
    needs: str = ""
    """A row that has all these fields is of this format."""
    also: Callable[[Row], bool] = lambda row: True
    """And this condition holds."""
    fields: str = ""
    """Which field holds what is known of a rollout: `target=field`, or `target=` for what is not in the file. A target
    that is not named is looked for under the names that tools use (`ALIASES`)."""
    own_rewards: bool = False
    """Columns of rewards have names of their own: any column of numbers may be one."""
    group_of: tuple[str, ...] = ()
    """Fields that name a group within a file, if all are there; else rows in turn with one prompt are a group."""
    alone: bool = False
    """Each row is a group, as nothing tells which belong together."""
    as_chat: bool = True
    """Text prompts go through the chat template; False where the text is the whole prompt already."""
    per_token: bool = False
    """A list of rewards is one per token, to be summed."""
    version_in_path: str = "$."
    """Where the path of the file holds the policy version: an expression with one group."""
    version_offset: int = 0
    """What is added to it, or to that in the rows: -1 where a step is counted before its completions are sampled."""
    meta: tuple[str, ...] | None = None
    """Fields that `meta` keeps; None for all that are no target's."""
    parts: Callable[[Row], Iterable[Row | None]] | None = None
    """Takes a row of nested objects apart into rows whose fields are called after their targets; None for each part
    that is no finished trajectory."""
    about: str = ""
    """Which field is read as what, where `parts` does it."""
    repeated_but: str = ""
    """The tool may write the rows of one file again into the next, and then only this field differs."""

    def matches(self, row: Row) -> bool:
        """Return True if a row looks like it."""
        return all(name in row for name in self.needs.split()) and self.also(row)

    def names_of(self, target: str) -> tuple[str, ...]:
        """Return the fields that may hold a target."""
        fixed = dict(pair.split("=") for pair in self.fields.split())
        return ALIASES[target] if target not in fixed else (fixed[target],) if fixed[target] else ()

    def version_of(self, path: Path) -> int | None:
        """Return the policy version that the path of a file tells, or None."""
        found = re.findall(self.version_in_path, path.as_posix())
        return int(found[-1]) if found else None


_TERM = re.compile(r"\s*(?:(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*\*\s*)?(.+?)\s*\Z")


def _terms(text: str, row: Row) -> dict[str, float]:
    """Return the fields that `NAME`, `A+B` or `A+0.5*B` says, each with its weight.

    A field whose name holds a sign is meant by its whole name.
    """
    if text in row:
        return {text: 1.0}
    weights: dict[str, float] = {}
    for part in text.split("+"):
        found = _TERM.match(part)
        weight, name = (1.0, part.strip()) if found is None else (float(found[1] or 1), found[2])
        if name not in row:
            raise DefinitionError(f"--field reward={text}: {_no_field(name, row)}")
        if not math.isfinite(weight):
            raise DefinitionError(f"--field reward={text}: the weight of '{name}' must be finite.")
        weights[name] = weights.get(name, 0.0) + weight
    return weights


class Reader:
    """Reads the rows of one file by a format, its first row, and the user's `--field` options, which win.

    Raises:
        DefinitionError: no field is known for the prompt, the completion or the reward, or several for the reward; or
            the user names a target that does not exist, or a field that the row does not have.

    >>> rows = [{"question": "1+1", "response": "2", "score": 1.0}]
    >>> reader = Reader(Format(name="", summary=""), rows[0])
    >>> reader.about()
    'prompt=question, completion=response, reward=score'
    >>> [(made.completion, made.reward) for made in reader.read(rows[0])]
    [('2', 1.0)]
    """

    def __init__(self, layout: Format, row: Row, given: Mapping[str, str] | None = None, path: Path = Path()) -> None:
        self.layout = layout
        self._given = dict(given or {})
        self._names: Any = None
        self.of: dict[str, str] = {}
        if layout.parts is not None:
            for target, name in self._given.items():
                raise DefinitionError(f"--field {target}={name}: this format knows its fields; leave out --field.")
            self.version, self.terms = None, {"reward": 1.0}
            self.of = {target: target for target in ALIASES}
            return
        for target, name in self._given.items():
            if target not in ALIASES:
                raise DefinitionError(
                    f"--field {target}={name}: there is no target '{target}'." + did_you_mean(target, ALIASES)
                )
            if target != "reward" and name not in row and name != NONE:
                raise DefinitionError(f"--field {target}={name}: {_no_field(name, row)}")
        self.version = None if "policy_version" in self._given else layout.version_of(path)
        self.terms = self._reward_terms(row)
        self._settle(row)
        options = (("prompt", "completion"), ("prompt_ids", "completion_ids"), ("tokens", "completion_mask"))
        if not any(all(target in self.of for target in option) for option in options):
            raise _lacking([target for target in options[0] if target not in self.of], row)

    def _reward_terms(self, row: Row) -> dict[str, float]:
        """Return the fields of the task reward, each with its weight."""
        given, layout = self._given.get("reward"), self.layout
        if given == NONE and NONE not in row:
            return {}
        if given is not None:
            return _terms(given, row)
        taken = {*self._given.values()}
        found = [name for name in layout.names_of("reward") if name in row and name not in taken]
        if layout.own_rewards:
            taken |= {pair.partition("=")[2] for pair in layout.fields.split() if not pair.startswith("reward=")}
            numbers = [name for name, value in row.items() if value is None or isinstance(value, (bool, int, float))]
            found = [name for name in numbers if name not in taken]
        if len(found) > 1:
            raise DefinitionError(
                f"which columns are the rewards? The columns of numbers are {', '.join(found)}. Name one or a sum, "
                f"with the training's weights: --field reward={found[0]} or --field reward={found[0]}+0.5*{found[1]}"
            )
        if not found and layout.own_rewards:
            have = ", ".join(sorted(map(str, row)))
            raise DefinitionError(f"no column of rewards. The rows have: {have}. Name it: --field reward=NAME")
        if not found and layout.names_of("reward"):
            raise _lacking(["reward"], row)
        return dict.fromkeys(found, 1.0)

    def _settle(self, row: Row) -> None:
        """Find the fields of the targets that no row before had a field of."""
        if self.layout.parts is not None or row.keys() == self._names:
            return
        self._names = row.keys()
        mine = {name for target, name in self._given.items() if target != "group"}  # which may be the prompt's own
        taken = {*self.of.values(), *mine, *self.terms}
        for target in ALIASES:
            if target in self.of or target == "reward" or (target == "policy_version" and self.version is not None):
                continue
            given = self._given.get(target)
            names = self.layout.names_of(target) if given is None else (given,)
            for name in names:
                if name in row and (given is not None or name not in taken):
                    self.of[target] = name
                    taken.add(name)
                    break

    def about(self) -> str:
        """Describe which field was read as what."""
        if self.layout.about:
            return self.layout.about
        terms = [name if weight == 1 else f"{weight:g}*{name}" for name, weight in self.terms.items()]
        pairs = {target: self.of.get(target) for target in ALIASES} | {"reward": "+".join(terms) or NONE}
        return ", ".join(f"{target}={name}" for target, name in pairs.items() if name is not None)

    def read(self, row: Row) -> Iterator[Rollout | None]:
        """Yield the rollouts of one row, and None for each part of it that is no finished trajectory."""
        for part in (row,) if self.layout.parts is None else self.layout.parts(row):
            if part is None:
                yield None
                continue
            self._settle(part)
            many = self._value(part, "completion")
            many = self._value(part, "completion_ids") if many is None else many
            if not isinstance(many, list) or is_messages(many) or (many and isinstance(many[0], int)):
                yield self._one(part)
            elif many:
                yield from (self._one(each, several=True) for each in self._each(part, len(many)))
            elif any(self._field(part, name) != [] for name in self.terms):  # else a row without completions
                yield self._one(part)

    @staticmethod
    def _field(row: Row, name: str) -> Any:
        if name not in row:
            near = did_you_mean(name, map(str, row))
            raise DataError(f"there is no field '{name}', which an earlier row has; write null for no value.{near}")
        return row[name]

    def _value(self, row: Row, target: str) -> Any:
        """Return the value of a target, or None where the file has no field for it."""
        name = self.of.get(target)
        return None if name is None else self._field(row, name)

    def _each(self, row: Row, num: int) -> Iterator[Row]:
        """Yield a row with lists as one row per completion."""
        columns: dict[str, list[Any]] = {}
        for target, name in self.of.items():
            value = self._field(row, name)
            shared = target in ("prompt_ids", "completion_mask") and value and not isinstance(value[0], list)
            if target not in _OF_THE_PROMPT and isinstance(value, list) and not shared:
                columns[name] = value  # else one value for all of them, such as a policy version
        for name in self.terms:
            value = self._field(row, name)
            if not isinstance(value, list):
                raise DataError(
                    f"field '{name}' must be a list of {num} rewards, one per completion, got {shown(value)}."
                )
            columns[name] = value
        for name, values in columns.items():
            if len(values) != num:
                raise DataError(f"field '{name}' has {len(values)} items for {num} completions.")
        for i in range(num):
            yield {**row, **{name: values[i] for name, values in columns.items()}}

    def _one(self, row: Row, *, several: bool = False) -> Rollout | None:
        """Return one completion; `several` where its row holds more of them."""
        name, layout = self.of, self.layout
        given = {target: value for target, of in name.items() if (value := self._field(row, of)) is not None}
        if "tokens" in given and not self._cut(given):
            return None
        used = {*name.values(), *self.terms}
        kept = row if layout.meta is None else [of for of in layout.meta if of in row]
        meta = {str(of): row[of] for of in kept if of not in used}
        made = Rollout(
            **values_of(given, name) | {"reward": self._reward(row), "as_chat": layout.as_chat, "meta": meta}
        )
        if self.version is not None:
            made.policy_version = self.version
        if layout.version_offset and "policy_version" not in self._given:
            made.policy_version = max(made.policy_version + layout.version_offset, 0)
        made.group = self._group(row, made, given.get("group"), several)
        return made

    def _reward(self, row: Row) -> float:
        """Return the weighted sum of the fields that have a value; NaN where none has."""
        values: list[float] = []
        for name, weight in self.terms.items():
            given = self._field(row, name)
            if isinstance(given, list) and len(given) != 1 and not self.layout.per_token:
                raise DataError(
                    f"field '{name}' must be one reward, got {len(given)} for one completion: {shown(given)}. Give the "
                    "row one completion per reward, or one reward."
                )
            parts = [as_reward(part, name) for part in (given if isinstance(given, list) else [given])]
            values.append(weight * sum(parts) if parts else math.nan)
        known = [value for value in values if value == value]
        return as_reward(sum(known), "+".join(self.terms)) if known else math.nan

    def _cut(self, given: dict[str, Any]) -> bool:
        """Turn the values of a whole sequence into a prompt's and a completion's; False where nothing is sampled."""
        name, whole = self.of, {"tokens": as_ids(given["tokens"], self.of["tokens"])}
        whole |= {target: given[target] for target in _PER_TOKEN if isinstance(given.get(target), list)}
        length = as_int(given.get("length", len(whole["tokens"])), "length")
        sizes = {target: len(values) for target, values in whole.items()}
        if not 0 <= length <= sizes["tokens"] or len({*sizes.values()}) > 1:
            raise DataError(
                f"{', '.join(f'{size} {name[target]}' for target, size in sizes.items())}, length {length}."
            )
        mask = as_mask(whole.get("completion_mask"), name.get("completion_mask", "completion_mask"))[:length]
        if not any(mask) or not as_number(given.get("counts", 1), "counts"):
            return False
        start = mask.index(True)
        given |= {target: values[start:length] for target, values in whole.items()}
        given |= {"prompt_ids": whole["tokens"][:start], "completion_ids": given["tokens"]}
        texts = [str(text) for text in given.get("texts") or ()]
        if texts:
            given |= {"prompt": "".join(texts[:-1]), "completion": texts[-1]}
        return True

    def _group(self, row: Row, made: Rollout, given: Any, several: bool) -> tuple[Any, ...] | None:
        if isinstance(given, Mapping):
            given = given.get("instance_id")  # SkyRL's names of trajectories
        if given == ONE_ROW:
            return (ONE_ROW,)
        if given is not None and given == given:  # NaN, as pandas writes a missing number, names no group
            return ("group", made.policy_version if self.layout.parts is None else "", str(given))
        if self.layout.group_of and all(name in row for name in self.layout.group_of):
            return tuple(str(row[name]) for name in self.layout.group_of)
        if several:
            return (ONE_ROW, made.prompt if made.prompt_ids is None else made.prompt_ids)
        return (ONE_ROW,) if self.layout.alone else None


def _no_field(name: str, row: Row) -> str:
    return f"the rows have no field '{name}'." + did_you_mean(name, map(str, row))


def _lacking(targets: Sequence[str], row: Row) -> DefinitionError:
    looked = "; ".join(f"{target}: {', '.join(ALIASES[target])}" for target in targets)
    return DefinitionError(
        f"no field for {' and '.join(targets)} (looked for {looked}). The rows have: "
        f"{', '.join(sorted(map(str, row)))}. Name it: --field {targets[0]}=NAME"
    )
