"""Definitions as text: the contents of `config.json`, and `--set path=value`. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import rlhf_pipeline
from rlhf_pipeline.errors import DefinitionError, did_you_mean, no_such_field
from rlhf_pipeline.settings import paths_of

T = TypeVar("T")


def to_json(config: object) -> Any:
    """Return a definition as JSON-ready data: dataclasses become objects with a `type`, functions their names.

    Any other object also becomes an object with its attributes, except those that begin with an underscore. A value
    that JSON cannot represent is recorded by its type, and by its digest if it is bytes or long.

    >>> class Sums:
    ...     def __init__(self, largest):
    ...         self.largest, self._known = largest, {}
    >>> to_json(Sums(9))
    {'type': 'Sums', 'largest': 9}
    """
    return _json(config, ())


def _json(config: object, within: tuple[int, ...]) -> Any:
    """Return `to_json` of a value; `within` are the objects that contain it, which ends a cycle."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        recorded = [item.name for item in dataclasses.fields(config) if item.metadata.get("recorded", True)]
        values = {name: _json(getattr(config, name), within) for name in recorded}
        return {"type": type(config).__name__, **values}
    if isinstance(config, functools.partial):
        bound = cast("functools.partial[object]", config)
        parts = {"function": bound.func, "args": bound.args, "keywords": bound.keywords}
        return {"type": "partial", **{name: _json(part, within) for name, part in parts.items()}}
    if callable(config):
        return name_of(config)
    if isinstance(config, Path):
        return str(config)
    if isinstance(config, dict):
        return {str(key): _json(value, within) for key, value in cast("dict[object, object]", config).items()}
    if isinstance(config, (list, tuple)):
        return [_json(value, within) for value in cast("list[object]", config)]
    if isinstance(config, (set, frozenset)):
        return sorted((_json(value, within) for value in cast("set[object]", config)), key=repr)
    if config is None or isinstance(config, (str, bool, int, float)):
        return config
    return _object_json(config, within)


_LONGEST_ATTRIBUTE: Final = 4096
"""Characters of an object's attribute that are recorded unchanged."""


def _object_json(config: object, within: tuple[int, ...]) -> dict[str, Any]:
    """Return the record of an object of any class; its values must not depend on the process."""
    recorded_fields: dict[str, Any] = {"type": type(config).__name__}
    with contextlib.suppress(TypeError, ValueError, BufferError):
        return recorded_fields | {"sha256": hashlib.sha256(memoryview(cast(Any, config)).cast("B")).hexdigest()}
    attributes: dict[str, object] = {} if id(config) in within else getattr(config, "__dict__", {})
    for name, value in sorted(attributes.items()):
        if not name.startswith("_"):
            recorded = _json(value, (*within, id(config)))
            text = json.dumps(recorded)
            digest = {"type": type(value).__name__, "sha256": hashlib.sha256(text.encode()).hexdigest()}
            recorded_fields[name] = recorded if len(text) <= _LONGEST_ATTRIBUTE else digest
    return recorded_fields


def name_of(function: object) -> str:
    """Return `module:name` of a function; public functions of this package get their public name.

    >>> from rlhf_pipeline import token_match
    >>> name_of(token_match)
    'rlhf_pipeline:token_match'
    """
    # An object with `__call__` has no name, and its repr contains an address that differs between processes.
    definition: Any = function if hasattr(function, "__qualname__") else type(function)
    public = definition.__module__.startswith("rlhf_pipeline.") and definition.__qualname__ in rlhf_pipeline.__all__
    return f"{'rlhf_pipeline' if public else definition.__module__}:{definition.__qualname__}"


def flat_fields(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested objects, each with its dotted path.

    >>> list(flat_fields({"learn": {"lr": 0.1}, "seed": 0}))
    [('learn.lr', 0.1), ('seed', 0)]
    """
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from flat_fields(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, data


Code = Callable[[str], Any]
"""Returns the function that `FILE.py:NAME` refers to."""

CODE: Final = re.compile(r".+\.py:\w+")
"""Text that refers to a custom function."""


def _no_code(text: str) -> Any:
    raise DefinitionError(f"{text} refers to code, which only a command may execute; pass the function instead.")


def override(config: T, path: str, text: str, code: Code = _no_code) -> T:
    """Return a copy of a definition with one field replaced, like `--set path=text`.

    Args:
        config: a definition, for example a `Pipeline`.
        path: the field's dotted path, for example `learn.lr`.
        text: the new value as typed on the command line; parsed by the field's type.
        code: finds the function that a text refers to, for a field that accepts functions.

    Raises:
        DefinitionError: there is no such field (the message suggests the nearest one), or the text does not match its
            type.
    """
    return override_all(config, [(path, text)], code)


def override_all(config: T, pairs: Sequence[tuple[str, str]], code: Code = _no_code) -> T:
    """Return a copy with several fields replaced together, checking rules across fields only once."""
    if isinstance(config, tuple):  # several groups of fields, each by its place
        within = [
            [(path.partition(".")[2], text) for path, text in pairs if path.partition(".")[0] == str(place)]
            for place in range(len(config))
        ]
        if sum(map(len, within)) < len(pairs):
            raise DefinitionError(
                f"there is no '{pairs[0][0]}': the list has length {len(config)}, and its items are numbered from 0."
            )
        return cast(T, tuple(override_all(part, some, code) for part, some in zip(config, within, strict=True)))
    if isinstance(config, dict):  # several groups of fields, each by its name
        configs = cast("dict[str, Any]", config)
        for path, _ in pairs:
            if path.partition(".")[0] not in configs:
                raise DefinitionError(f"there is no '{path.partition('.')[0]}'.{did_you_mean(path, configs)}")
        inner_of = {
            name: [(path.partition(".")[2], text) for path, text in pairs if path.partition(".")[0] == name]
            for name in configs
        }
        return cast(T, {name: override_all(part, inner_of[name], code) for name, part in configs.items()})
    names = [item.name for item in dataclasses.fields(cast(Any, config))]
    new: dict[str, Any] = {}
    inner: dict[str, list[tuple[str, str]]] = {}
    for path, text in pairs:
        head, _, rest = path.partition(".")
        if head not in names:
            raise DefinitionError(f"{type(config).__name__} has no field '{head}'.{_near(config, path, names)}")
        value = getattr(config, head)
        if rest and value is None:
            value = _default_of(typing.get_type_hints(type(config))[head])
        if rest:
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
            several = len(parts) > 0 and all(map(dataclasses.is_dataclass, parts))
            if not several and not dataclasses.is_dataclass(value):
                raise DefinitionError(f"'{head}' has no fields, so there is no '{path}'.")
            inner.setdefault(head, []).append((rest, text))
            new[head] = value
        elif dataclasses.is_dataclass(value) and _is_none(text, typing.get_type_hints(type(config))[head]):
            new[head] = None
        elif dataclasses.is_dataclass(value):
            fields = ", ".join(f"{head}.{item.name}" for item in dataclasses.fields(value))
            raise DefinitionError(f"'{head}' consists of several fields. Set one of them: {fields}.")
        else:
            new[head] = _parse(text, typing.get_type_hints(type(config))[head], code)
    new |= {head: override_all(new[head], within, code) for head, within in inner.items()}
    return dataclasses.replace(cast(Any, config), **new)


def _near(config: object, typed: str, names: list[str]) -> str:
    """Return a hint: the field of that name in another group, or the nearest field of this group."""
    paths = [path for path, item in paths_of(type(config)) if "." in path and item.name == typed]
    if paths:
        return f" Did you mean {' or '.join(repr(path) for path in paths)}?"
    return no_such_field(typed, names)


def _default_of(hint: Any) -> Any:
    """Return the default of a group of fields that a definition omits; None if the hint is not a group."""
    kinds = [option for option in typing.get_args(hint) if dataclasses.is_dataclass(option)]
    return cast(Any, kinds[0])() if kinds else None


def _is_none(text: str, hint: Any) -> bool:
    """Return whether a text is None, in a field that may be None."""
    return type(None) in typing.get_args(hint) and text.lower() in ("none", "null")


def _parse(text: str, hint: Any, code: Code) -> Any:
    """Parse `text` as `hint`: bool, int, float, str, a Literal, a function, an optional of these, or several."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        kind = typing.get_args(hint)[0]
        return tuple(_parse(part.strip(), kind, code) for part in text.split(",") if part.strip())
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if _is_none(text, hint):
            return None
        if CODE.fullmatch(text) and any(typing.get_origin(option) is Callable for option in options):
            return code(text)
        return _parse(text, next(option for option in options if option is not type(None)), code)
    if origin is Callable and CODE.fullmatch(text):
        return code(text)
    if origin is Literal or hint is str:
        return text
    if origin is dict:
        try:
            parsed: Any = json.loads(text)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            return cast("dict[str, Any]", parsed)
    if hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return hint(text.replace("_", ""))
        except ValueError:
            pass
    if hint not in (int, float, bool, dict) and origin is not dict:
        raise DefinitionError(
            f"{json.dumps(text)} is text, but the field needs a Python object. Set it in your own definition, "
            "FILE.py, and run that file."
        )
    raise DefinitionError(f"{json.dumps(text)} is not a valid {getattr(hint, '__name__', hint)}.")
