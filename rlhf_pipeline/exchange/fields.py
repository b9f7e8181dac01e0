"""The fields of a file's row that a record is made of."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_pipeline.data.files import field_of
from rlhf_pipeline.data.store_errors import as_ours
from rlhf_pipeline.errors import DataError, DefinitionError, did_you_mean
from trajectory_store.recorder.raw_rollout import (
    VALUES,
    RawRollout,
    Row,
    as_ids,
    as_list,
    as_mask,
    as_reward,
    ended,
    excerpt,
    state_of,
    values_of,
)

MESSAGES = "messages"
"""A separate target: chat messages that contain both the prompt and the completion."""
NONE = "none"
"""The value with which the user omits a target that the rows have."""

# -- the fields of a row -----------------------------------------------------------------------------------------------

_TERM = re.compile(r"\s*(?:(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*\*\s*)?(.+?)\s*\Z")


class DerivedField(NamedTuple):
    """A value that a tool makes of a row, and how the summary names it."""

    how: str
    value: Any


class Fields:
    """The fields of one row, as a tool reads them: what the user names with `--field` wins.

    >>> row = {"output": "2", "score": {"right": "1", "brief": True}}
    >>> Fields(row, {"reward": "score.right+0.5*score.brief"}).take(completion="output", reward="score")
    {'completion': '2', 'reward': 1.5}
    """

    def __init__(
        self,
        row: Row,
        field_paths: Mapping[str, str] | None = None,
        *,
        path: Path = Path(),
        number: int = 0,
        one_turn: bool = False,
        for_display: bool = False,
        beside: dict[Any, Any] | None = None,
    ) -> None:
        self.row, self.field_paths, self.one_turn = row, field_paths or {}, one_turn
        self.for_display = for_display
        """Whether the rows are only displayed: rows that cannot be used for training are then accepted, and excluded
        from the loss.
        """
        self.path, self.number = path, number
        """The file, and the position of the row in it."""
        self.beside = beside or {}
        """The values for these in rows of other files."""
        self.used: set[str] = set()
        """The fields that were used; the others are kept in `meta`."""
        self.about: dict[str, str] = {}
        """How each target was derived from the row."""

    def of(self, row: Row) -> Fields:
        """Return the fields of another row in the place of this one."""
        fields = Fields(
            row, self.field_paths, path=self.path, number=self.number, one_turn=self.one_turn, beside=self.beside
        )
        fields.for_display = self.for_display
        fields.about = self.about
        return fields

    def number_in(self, pattern: str) -> int | None:
        """Return the number that an expression finds in the path of the file, with one group; None if it does not."""
        numbers = re.findall(pattern, self.path.as_posix())
        return int(numbers[-1]) if numbers else None

    def value(self, path: str) -> Any:
        """Return the value at a dotted path, which must be there."""
        self.used |= {path, path.partition(".")[0] if path not in self.row else path}
        try:
            return field_of(self.row, path)
        except KeyError:
            raise DataError(
                f"there is no field '{path}'.{did_you_mean(path, map(str, self.row))} {self.describe_row()}"
            ) from None

    def describe_row(self) -> str:
        return f"Fields of the row: {', '.join(sorted(map(str, self.row)))}."

    @as_ours()
    def take(self, **targets: str | DerivedField) -> dict[str, Any]:
        """Return values by target, checked; those that the user names, too, and none that the user omits."""
        targets |= {target: path for target, path in self.field_paths.items() if target in VALUES}
        targets = {target: path for target, path in targets.items() if path != NONE}
        names = {target: path if isinstance(path, str) else target for target, path in targets.items()}
        self.about |= {target: path if isinstance(path, str) else path.how for target, path in targets.items()}
        reward_path = targets.get("reward")
        reward = self.reward(reward_path) if isinstance(reward_path, str) else None
        if reward is not None:
            del targets["reward"]
        checked = values_of(
            {target: self.value(path) if isinstance(path, str) else path.value for target, path in targets.items()},
            names,
            for_display=self.for_display,
        )
        return checked if reward is None else checked | {"reward": reward}

    def record(
        self,
        values: Mapping[str, str | DerivedField | None] | None = None,
        /,
        *,
        group: DerivedField | None = None,
        one_turn: bool = True,
        meta: Sequence[str] | Mapping[str, Any] | None = None,
        flags: Mapping[str, Any] | None = None,
        **targets: str | DerivedField | None,
    ) -> RawRollout:
        """Return the record that these fields make, of those in `values` and of those by name."""
        sources = {target: how for target, how in {**(values or {}), **targets}.items() if how is not None}
        if "failure" not in sources:
            field, reason, failure = state_of(self.row)
            sources |= {"failure": DerivedField(field, failure)} if failure else {}
            sources |= {"finish_reason": DerivedField(field, reason)} if reason else {}
        record_values = self.take(**sources)
        reason, failure = ended(record_values.get("finish_reason", ""), record_values.get("failure", ""))
        record_values |= {"finish_reason": reason, "failure": failure}
        is_certain = one_turn or not record_values.get("completion") or "completion_ids" in record_values
        if not (is_certain or self.one_turn or self.for_display):
            raise DefinitionError(
                "the completions are text, and the file does not record whether they contain text from an "
                "environment. If each completion is a single turn, use --one-turn. Otherwise, export the token ids "
                "with a mask of the sampled tokens."
            )
        self.about["group"] = "consecutive rows with one prompt" if group is None else group.how
        meta_fields = meta if isinstance(meta, Mapping) else self.meta(*(meta or ()))
        group_key = None if group is None else group.value
        about = {"one_turn": is_certain, "mask_known": is_certain or not self.for_display, **(flags or {})}
        about = {name: flag for name, flag in about.items() if self.field_paths.get(name) != NONE}
        return RawRollout(**{**about, **record_values}, group=group_key, meta=meta_fields)

    def reward(self, text: str) -> float:
        """Return the reward that a field, or a sum such as `A+0.5*B`, holds; NaN where no part has a value."""
        if text in self.row:
            return as_reward(self.value(text), text)
        terms = [_TERM.match(part) for part in text.split("+")]
        values = [float(term[1] or 1) * as_reward(self.value(term[2]), term[2]) for term in terms if term is not None]
        finite_terms = [value for value in values if value == value]
        return as_reward(sum(finite_terms), text) if finite_terms else math.nan

    def meta(self, *names: str) -> dict[str, Any]:
        """Return the named fields that are there; without names, those that were not taken."""
        selected = names or [name for name in self.row if name not in self.used]
        return {str(name): self.row[name] for name in selected if name in self.row}


def part_of(row: Any, name: str) -> Mapping[str, Any]:
    """Return a field that holds fields itself; empty if it is not there."""
    nested = row.get(name) if isinstance(row, Mapping) else row
    if not isinstance(nested, Mapping | None):
        raise DataError(f"field '{name}' must be an object with fields, got {excerpt(nested)}.")
    return nested or {}


def check_targets(field_paths: Mapping[str, str]) -> None:
    """Reject a `--field` whose target does not exist."""
    for target, name in field_paths.items():
        if target not in (*VALUES, MESSAGES):
            raise DefinitionError(
                f"--field {target}={name}: there is no target '{target}'." + did_you_mean(target, [*VALUES, MESSAGES])
            )


def cut(whole: Mapping[str, DerivedField], *, length: int | None = None) -> dict[str, DerivedField]:
    """Return the targets of a sequence of tokens: the completion begins with the first token that was sampled."""
    sizes = {name: len(as_list(source.value, name)) for name, source in whole.items()}
    length = sizes["tokens"] if length is None else length
    if len({*sizes.values()}) > 1 or not 0 <= length <= sizes["tokens"]:
        counted = ", ".join(f"{size} ({name})" for name, size in sizes.items())
        raise DataError(
            "there must be one value per token, and the sequence length must be between 0 and the number of tokens; "
            f"got sequence length {length} and these numbers of values: {counted}."
        )
    mask = as_mask(whole["completion_mask"].value, "completion_mask")[:length]
    start = mask.index(True) if any(mask) else length
    beside = {
        name: DerivedField(source.how, source.value[start:length]) for name, source in whole.items() if name != "tokens"
    }
    tokens = whole["tokens"]
    return {
        "prompt_ids": DerivedField(tokens.how, as_ids(tokens.value, "tokens")[:start]),
        "completion_ids": DerivedField(tokens.how, tokens.value[start:length]),
        **beside,
    }
