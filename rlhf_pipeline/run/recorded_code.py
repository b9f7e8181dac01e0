"""The code that a definition names: its record in `config.json`, and what of it has changed since. Imports no torch.

A record has the identity of each function, class or object; see `user_code.identity`. A run that was begun before there
were identities has the hash of the source text alone, and is compared by that to its end.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, cast

from rlhf_pipeline.config import Evaluate, Pipeline
from rlhf_pipeline.config_text import name_of
from rlhf_pipeline.data.rewards import rewards_of
from rlhf_pipeline.environments.makers import code_of
from rlhf_pipeline.run.inputs import APART, Inputs
from rlhf_pipeline.user_code.identity import changed_parts, identity_of

_FIELDS: Final = {
    "reward": (
        "reward function",
        "new trajectories are graded by the edited version; earlier trajectories keep their rewards",
    ),
    "prompts": ("prompt source", "new rollouts use prompts of the edited version"),
    "environment": ("environment", "new conversations use the edited version"),
    "evaluate.prompts": ("source of evaluation prompts", f"new evaluations use the new prompts; {APART}"),
    "loss.objective": ("objective", "the next steps minimise the edited version"),
    "sample.strategy": ("sampling strategy", "the edited version selects the rows of the next steps"),
    "write.estimator": (
        "advantage estimator",
        "the edited version computes new advantages; stored advantages do not change",
    ),
}
"""Fields of a definition that may hold code, each with its description and the consequence of an edit."""

GRADERS: Final = ("reward", "environment")
"""The fields whose code determines rewards."""
_EVALUATED: Final = (*GRADERS, "evaluate.prompts")
"""The fields whose code determines the rows of evaluations."""
_OF_STEPS: Final = ("loss.objective", "sample.strategy")
"""The fields that steps on stored trajectories depend on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeChange:
    """Code that is not what it was when the run was last started."""

    field: str
    """With a number, if the field has several: `reward.1`."""
    name: str
    """`module:name` of the function, class or object."""
    was: str
    now: str
    """Digests."""
    parts: tuple[str, ...]
    """The changes as text; empty in a run without identities."""
    consequence: str

    def __str__(self) -> str:
        what, _ = _FIELDS[_without_number(self.field)]
        parts = f" ({'; '.join(self.parts)})" if self.parts else ""
        return f"the {what} {self.name} has been edited since the run was last started{parts}: {self.consequence}."

    def to_json(self) -> dict[str, Any]:
        """Return the change for `config.json`."""
        parts = {"parts": list(self.parts)} if self.parts else {}
        return {"field": self.field, "name": self.name, "was": self.was, "is": self.now, **parts}


def describe_code(pipeline: Pipeline, *, by_text: bool = False) -> Inputs:
    """Return the record in `config.json` of the code that a definition names.

    Args:
        pipeline: the definition.
        by_text: as a run that was begun before there were identities has it.
    """
    sources = [evaluate.prompts for evaluate in pipeline.evaluations.values()]
    return {field: record for field, _, record in _records(pipeline, sources, by_text=by_text)}


def evaluated_code(pipeline: Pipeline, evaluate: Evaluate, *, by_text: bool = False) -> Inputs:
    """Return the part of `describe_code` that decides the rows of one set of evaluations."""
    records = _records(pipeline, [evaluate.prompts], by_text=by_text)
    return {field: record for field, _, record in records if _without_number(field) in _EVALUATED}


def changed_code(
    recorded: Mapping[str, Mapping[str, Any]], pipeline: Pipeline, *, by_text: bool = False
) -> Iterator[CodeChange]:
    """Yield the code that has changed since the last start, as far as the run still uses it; a change is allowed."""
    sources = [evaluate.prompts for evaluate in pipeline.evaluations.values()]
    for name, part, now in _records(pipeline, sources, by_text=by_text):
        before, field = recorded.get(name, None if by_text else {"parts": {}}), _without_number(name)
        evaluates = pipeline.evaluate is not None and field in _EVALUATED
        if before is None or before == now:
            continue
        if pipeline.replay is not None and not evaluates and field not in _OF_STEPS:
            continue  # nothing is sampled or graded
        _, consequence = _FIELDS[field]
        if field in GRADERS and evaluates:
            consequence = f"new evaluations use the edited version; {APART}" + (
                "" if pipeline.replay is not None else f"; {consequence}"
            )
        yield CodeChange(
            field=name,
            name=name_of(part),
            was=_short(before),
            now=_short(now),
            parts=tuple(changed_parts(before.get("parts", {}), now.get("parts", {}))),
            consequence=consequence,
        )


def graders(history: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Return the graders of a run: the first step that each applied to, and what changed with it.

    Args:
        history: `changes` of `config.json`, oldest first.

    >>> change = {"field": "reward", "name": "mine:Score", "parts": ["attribute w was 1 and is now 2"]}
    >>> graders([{"from_step": 5, "fields": [change]}])
    [(1, 'original version'), (5, 'reward mine:Score: attribute w was 1 and is now 2')]
    """
    applied = [(1, "original version")]
    for change in history:
        code = [field for field in change["fields"] if _without_number(field["field"]) in GRADERS and "name" in field]
        edits = [f"{field['field']} {field['name']}: {'; '.join(field.get('parts', ())) or 'edited'}" for field in code]
        if edits and change["from_step"] > 1:
            if change["from_step"] == applied[-1][0]:  # no step is left of the one before
                edits = [applied.pop()[1], *edits]
            applied.append((change["from_step"], "; ".join(edits)))
    return applied


def _short(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:8]


def _without_number(field: str) -> str:
    """Return the field of a record's name.

    >>> _without_number("reward.1"), _without_number("evaluate.prompts")
    ('reward', 'evaluate.prompts')
    """
    return re.sub(r"\.\d+$", "", field)


def _records(
    pipeline: Pipeline, evaluated: Sequence[Any], *, by_text: bool
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield a definition's code: the field, numbered where it has several, the code and its record.

    Args:
        pipeline: the definition.
        evaluated: sources of evaluation prompts.
        by_text: see `describe_code`.
    """
    rewards = rewards_of(pipeline.reward)
    versions = {place: reward.version for place, reward in enumerate(rewards) if reward.version is not None}
    sources = (lambda source: [source]) if by_text else (lambda source: [*_sources_of(source)])
    code: dict[str, list[Any]] = {
        "reward": [reward.function for reward in rewards],
        "prompts": sources(pipeline.prompts),
        "environment": [*code_of(pipeline.environment)],
        "evaluate.prompts": [part for source in evaluated for part in sources(source)],
    }
    code |= {field: [attrgetter(field)(pipeline)] for field in _FIELDS if field not in code}
    for field, parts in code.items():
        for place, part in enumerate(parts):
            record = (
                _text_record(part) if by_text else _record(part, versions.get(place) if field == "reward" else None)
            )
            if record is not None:
                yield f"{field}.{place}" if len(parts) > 1 else field, part, record


def _sources_of(source: Any) -> Iterator[Any]:
    """Yield a source of prompts, or those of a mixture."""
    parts = getattr(source, "sources", None)
    for part in (source,) if parts is None else parts:
        yield from (part,) if part is source else _sources_of(part)


def _record(part: Any, version: str | None) -> dict[str, Any] | None:
    """Return the identity of code; None for what has no part that could change, such as a built-in reward."""
    parts = {} if part is None or isinstance(part, str) else {**identity_of(part)}
    parts |= {} if version is None else {"version": version}
    return {"parts": parts} if parts else None


def _text_record(part: Any) -> dict[str, Any] | None:
    """Return the hash of code's source text; None for code of this package, or without text."""
    while isinstance(part, functools.partial):
        part = cast("functools.partial[object]", part).func
    definition: Any = part if hasattr(part, "__qualname__") else type(part)
    if definition.__module__.split(".")[0] == __name__.split(".")[0]:
        return None
    try:
        text = inspect.getsource(definition) + "".join(_texts_named_by(definition))
    except (OSError, TypeError, KeyError):
        return None
    return {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def _texts_named_by(definition: Any) -> Iterator[str]:
    """Yield the code of the module's functions, classes and values that a function or class names, recursively."""
    parts: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(sys.modules[definition.__module__])).body:
        bound = [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
        for name in [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else bound:
            parts[name] = parts.get(name, "") + ast.unparse(node)
    parts.pop(definition.__qualname__, None)
    words = inspect.getsource(definition)
    while texts := {name: parts.pop(name) for name in sorted(parts.keys() & set(re.findall(r"\w+", words)))}:
        words = "\n".join(texts.values())
        yield words
