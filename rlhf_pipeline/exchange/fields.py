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
    shown,
    state_of,
    values_of,
)

MESSAGES = "messages"
"""A target of its own: chat messages that are a prompt and a completion in one."""
NONE = "none"
"""What the user writes to leave out a target that the rows have."""

# -- the fields of a row -----------------------------------------------------------------------------------------------

_TERM = re.compile(r"\s*(?:(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*\*\s*)?(.+?)\s*\Z")


class Made(NamedTuple):
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
        given: Mapping[str, str] | None = None,
        *,
        path: Path = Path(),
        number: int = 0,
        one_turn: bool = False,
        shown: bool = False,
        beside: dict[Any, Any] | None = None,
    ) -> None:
        self.row, self.given, self.one_turn = row, given or {}, one_turn
        self.shown = shown
        """The rows are only looked at: what cannot be learned from is let through, and out of the loss."""
        self.path, self.number = path, number
        """The file, and the row's place in it."""
        self.beside = beside or {}
        """What rows of other files said of these."""
        self.used: set[str] = set()
        """The fields that were taken; the others are kept in `meta`."""
        self.about: dict[str, str] = {}
        """How each target was made of the row."""

    def of(self, row: Row) -> Fields:
        """Return the fields of another row in the place of this one."""
        made = Fields(row, self.given, path=self.path, number=self.number, one_turn=self.one_turn, beside=self.beside)
        made.shown = self.shown
        made.about = self.about
        return made

    def number_in(self, pattern: str) -> int | None:
        """Return the number that the path of the file tells by an expression with one group; None if it does not."""
        found = re.findall(pattern, self.path.as_posix())
        return int(found[-1]) if found else None

    def value(self, path: str) -> Any:
        """Return the value at a dotted path, which must be there."""
        self.used |= {path, path.partition(".")[0] if path not in self.row else path}
        try:
            return field_of(self.row, path)
        except KeyError:
            raise DataError(
                f"there is no field '{path}'.{did_you_mean(path, map(str, self.row))} {self.there()}"
            ) from None

    def there(self) -> str:
        return f"The row has: {', '.join(sorted(map(str, self.row)))}."

    @as_ours()
    def take(self, **wanted: str | Made) -> dict[str, Any]:
        """Return values by target, checked; those that the user names, too, and none that the user leaves out."""
        wanted |= {target: path for target, path in self.given.items() if target in VALUES}
        wanted = {target: path for target, path in wanted.items() if path != NONE}
        names = {target: path if isinstance(path, str) else target for target, path in wanted.items()}
        self.about |= {target: path if isinstance(path, str) else path.how for target, path in wanted.items()}
        named = wanted.get("reward")
        reward = self.reward(named) if isinstance(named, str) else None
        if reward is not None:
            del wanted["reward"]
        made = values_of(
            {target: self.value(path) if isinstance(path, str) else path.value for target, path in wanted.items()},
            names,
            shown=self.shown,
        )
        return made if reward is None else made | {"reward": reward}

    def record(
        self,
        made: Mapping[str, str | Made | None] | None = None,
        /,
        *,
        group: Made | None = None,
        one_turn: bool = True,
        meta: Sequence[str] | Mapping[str, Any] | None = None,
        flags: Mapping[str, Any] | None = None,
        **wanted: str | Made | None,
    ) -> RawRollout:
        """Return the record that these fields make, of those in `made` and of those by name."""
        asked = {target: how for target, how in {**(made or {}), **wanted}.items() if how is not None}
        if "failure" not in asked:
            field, reason, failure = state_of(self.row)
            asked |= {"failure": Made(field, failure)} if failure else {}
            asked |= {"finish_reason": Made(field, reason)} if reason else {}
        found = self.take(**asked)
        reason, failure = ended(found.get("finish_reason", ""), found.get("failure", ""))
        found |= {"finish_reason": reason, "failure": failure}
        known = one_turn or not found.get("completion") or "completion_ids" in found
        if not (known or self.one_turn or self.shown):
            raise DefinitionError(
                "the completions are text, and whether they hold words of an environment is not in the file. Say that "
                "they are of one turn: --one-turn. Else export token ids with a mask of what was sampled"
            )
        self.about["group"] = "rows in turn with one prompt" if group is None else group.how
        kept = meta if isinstance(meta, Mapping) else self.meta(*(meta or ()))
        named = None if group is None else group.value
        about = {"one_turn": known, "mask_known": known or not self.shown, **(flags or {})}
        about = {name: flag for name, flag in about.items() if self.given.get(name) != NONE}
        return RawRollout(**{**about, **found}, group=named, meta=kept)

    def reward(self, text: str) -> float:
        """Return the reward that a field, or a sum such as `A+0.5*B`, holds; NaN where no part has a value."""
        if text in self.row:
            return as_reward(self.value(text), text)
        terms = [_TERM.match(part) for part in text.split("+")]
        values = [float(term[1] or 1) * as_reward(self.value(term[2]), term[2]) for term in terms if term is not None]
        known = [value for value in values if value == value]
        return as_reward(sum(known), text) if known else math.nan

    def meta(self, *names: str) -> dict[str, Any]:
        """Return the named fields that are there; without names, those that were not taken."""
        kept = names or [name for name in self.row if name not in self.used]
        return {str(name): self.row[name] for name in kept if name in self.row}


def part_of(row: Any, name: str) -> Mapping[str, Any]:
    """Return a field that holds fields itself; empty if it is not there."""
    found = row.get(name) if isinstance(row, Mapping) else row
    if not isinstance(found, Mapping | None):
        raise DataError(f"field '{name}' must hold fields by name, got {shown(found)}.")
    return found or {}


def check_targets(given: Mapping[str, str]) -> None:
    """Refuse a `--field` whose target does not exist."""
    for target, name in given.items():
        if target not in (*VALUES, MESSAGES):
            raise DefinitionError(
                f"--field {target}={name}: there is no target '{target}'." + did_you_mean(target, [*VALUES, MESSAGES])
            )


def cut(whole: Mapping[str, Made], *, length: int | None = None) -> dict[str, Made]:
    """Return the targets of a sequence of tokens: the completion begins with the first token that was sampled."""
    sizes = {name: len(as_list(made.value, name)) for name, made in whole.items()}
    length = sizes["tokens"] if length is None else length
    if len({*sizes.values()}) > 1 or not 0 <= length <= sizes["tokens"]:
        counted = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise DataError(f"values per token are not one per token: {counted}, length {length}.")
    mask = as_mask(whole["completion_mask"].value, "completion_mask")[:length]
    start = mask.index(True) if any(mask) else length
    beside = {name: Made(made.how, made.value[start:length]) for name, made in whole.items() if name != "tokens"}
    tokens = whole["tokens"]
    return {
        "prompt_ids": Made(tokens.how, as_ids(tokens.value, "tokens")[:start]),
        "completion_ids": Made(tokens.how, tokens.value[start:length]),
        **beside,
    }
