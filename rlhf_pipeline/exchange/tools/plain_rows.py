"""Files of no tool's: rows whose fields have the names of a rollout's, or that `--field` names.

A row is one completion, or the completions of one prompt: then `completion` or `completion_ids` is a list of them,
and so is each field of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange.fields import NONE, VALUES, Fields, RawRollout, is_messages, shown
from rlhf_pipeline.exchange.tool import Tool

_OF_THE_PROMPT = ("prompt", "answer", "policy_version", "created_at")
_PAIRS = (("prompt_ids", "completion_ids"), ("prompt", "completion"))


def _names(fields: Fields) -> dict[str, str]:
    found = {target: target for target in VALUES if target in fields.row}
    found = {target: path for target, path in {**found, **fields.given}.items() if path != NONE}
    lacks = [] if "reward" in found or fields.given.get("reward") == NONE else ["reward"]
    if not any(a in found and b in found for a, b in (*_PAIRS, ("prompt", "completion_ids"))):
        lacks = [target for target in _PAIRS[1] if target not in found] + lacks
    if lacks:
        raise DefinitionError(
            f"no field for {' and '.join(lacks)}. {fields.there()} Name it: --field {lacks[0]}=NAME (a dotted path "
            "into nested fields is a name, too); none leaves a field out"
        )
    return found


def _read(fields: Fields) -> Iterator[RawRollout]:
    names = _names(fields)
    several = fields.value(names.get("completion_ids", names.get("completion", "")))
    group = fields.row.get("group")
    single = several == [] and not isinstance(fields.row.get(names.get("reward", "")), list)
    if (
        not isinstance(several, list)
        or is_messages(several)
        or single
        or any(isinstance(item, int) for item in several[:1])
    ):
        found = fields.take(**names)
        yield RawRollout(
            **found,
            group=None if _missing(group) else (found.get("policy_version", 0), str(group)),
            meta=fields.meta() | ({} if _missing(group) else {"group": group}),
        )
        return
    values = {target: fields.value(path) for target, path in names.items() if "+" not in path and "*" not in path}
    if "reward" in names and "reward" not in values:
        raise DataError("a sum of rewards cannot be read from lists of them. Name one: --field reward=NAME")
    meta = fields.meta()
    for place in range(len(several)):
        each = {target: _part(names[target], target, value, place, len(several)) for target, value in values.items()}
        found = fields.of(each)
        found.given = {}
        key = (fields.number, str(each.get("prompt_ids", each.get("prompt"))))
        yield RawRollout(
            **found.take(**{target: target for target in each if each[target] is not None}), group=key, meta=meta
        )


def _missing(group: Any) -> bool:
    """Return True for null and for NaN, as data frames write a missing number."""
    return group is None or group != group


def _part(name: str, target: str, value: Any, place: int, num: int) -> Any:
    """Return the value of one of a row's completions."""
    shared = target in ("prompt_ids", "completion_mask") and isinstance(value, list) and not isinstance(value[0], list)
    if target in _OF_THE_PROMPT or shared or value is None:
        return value
    if not isinstance(value, list):
        raise DataError(f"field '{name}' must be a list of {num} items, one per completion, got {shown(value)}.")
    if len(value) != num:
        raise DataError(f"field '{name}' has {len(value)} items for {num} completions.")
    return value[place]


TOOL = Tool(
    name="rows",
    summary="rows with a prompt, a completion and a reward",
    signature=frozenset(),
    about="each field by its name, or as --field says; group=group, else rows in turn with one prompt",
    read=_read,
)
