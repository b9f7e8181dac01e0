"""Settings are declared once, as dataclass fields with type, bounds and meaning, for both checks and documentation.

>>> @dataclasses.dataclass(frozen=True, kw_only=True)
... class Oven(Settings):
...     degrees: float = setting(180, min=50, max=250, help="How hot.")
...     fan: bool = setting(False, help="Whether the air moves.")
>>> Oven(degrees=200).degrees
200.0
>>> Oven(degrees=300)
Traceback (most recent call last):
    ...
rlhf_pipeline.errors.DefinitionError: Oven.degrees is 300; it must be between 50 and 250.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from rlhf_pipeline.errors import DefinitionError, did_you_mean

_KEY = "setting"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The bounds of a number; a float must be finite unless `finite` is False."""

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    finite: bool = True

    def hold(self, value: float) -> bool:
        """Return True if `value` is within the bounds."""
        return (
            (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def words(self) -> str:
        """Return the bounds as text, such as `above 0 and at most 1`; empty if there are none."""
        if self.min is not None and self.max is not None:
            return f"between {self.min:g} and {self.max:g}"
        bounds = (("at least", self.min), ("above", self.above), ("at most", self.max), ("below", self.below))
        return " and ".join(f"{word} {value:g}" for word, value in bounds if value is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Declared:
    help: str
    bounds: Bounds


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    finite: bool = True,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """Declare a field of a `Settings` dataclass.

    Args:
        default: the default; a field without one is required.
        help: the meaning, in sentences; lines are joined.
        min: the smallest value; for a tuple, of each item.
        max: the largest value.
        above: an exclusive lower bound.
        below: an exclusive upper bound.
        finite: False accepts infinite numbers.
        factory: makes the default if it is a group of settings.
    """
    declared = _Declared(
        help=" ".join(help.split()), bounds=Bounds(min=min, max=max, above=above, below=below, finite=finite)
    )
    defaults: dict[str, Any] = {"default_factory": factory} if factory is not None else {"default": default}
    return dataclasses.field(metadata={_KEY: declared}, **defaults)


class Settings:
    """The base of groups of settings: checks every field by its type and bounds, then the rules of the class."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in settings_of(type(self)):
            value = getattr(self, item.name)
            fitting = item.fit(value)
            if fitting is not value:
                object.__setattr__(self, item.name, fitting)
        for holds, rule in self._rules():
            if not holds:
                raise DefinitionError(f"{type(self).__name__}: {rule}")

    def _rules(self) -> list[tuple[bool, str]]:
        """Return rules across fields: whether each holds, and the message if it does not."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The declaration of one field."""

    owner: str
    """The class."""
    name: str
    hint: Any
    """Its type."""
    default: Any
    """`dataclasses.MISSING` for a required field."""
    help: str
    bounds: Bounds

    @property
    def groups(self) -> tuple[type[Settings], ...]:
        """The groups of settings that the field may hold; empty for a plain value."""
        return tuple(kind for kind in _options(self.hint) if isinstance(kind, type) and issubclass(kind, Settings))

    def kind(self, *, quote: str = "") -> str:
        """Return the valid values as text: `a whole number, at least 1, or none`; `quote` encloses each choice."""
        options = [option for option in _options(self.hint) if option is not type(None)]
        words = _alternatives(_kinds(options, quote))
        each = "each " if typing.get_origin(options[0]) is tuple else ""
        bounds = f", {each}{self.bounds.words()}" if self.bounds.words() else ""
        or_none = ", or none" if type(None) in _options(self.hint) else ""
        return f"{words}{bounds}{or_none}"

    def fit(self, value: Any) -> Any:
        """Return `value` in the field's type: a whole number becomes a float in a float field."""
        for option in _options(self.hint):
            fitting = self._as(option, value)
            if fitting is not _UNFIT:
                return fitting
        choices = [str(choice) for option in _options(self.hint) for choice in _choices(option)]
        hint = did_you_mean(str(value), choices) if choices and isinstance(value, str) else ""
        must = "." if hint else f"; it must be {self._requirement(value)}."
        raise DefinitionError(f"{self.owner}.{self.name} is {_shortened(value)}{must}{hint}")

    def _requirement(self, value: Any) -> str:
        """Return the requirement as text; only the bounds for a value of the right type."""
        of_type = dataclasses.replace(self, bounds=Bounds())
        options = _options(self.hint)
        is_number = not isinstance(value, bool) and isinstance(value, numbers.Real)
        if is_number and float in options and not math.isfinite(float(cast(Any, value))):
            return f"{self.bounds.words()} and finite" if self.bounds.words() else "finite"
        if is_number and any(of_type._as(option, value) is not _UNFIT for option in options):
            return self.bounds.words() + (" and finite" if float in options and self.bounds.max is None else "")
        return self.kind()

    def _as(self, option: Any, value: Any) -> Any:
        """Return `value` converted to this type, or `_UNFIT`."""
        is_bool = isinstance(value, bool)
        if option is type(None):
            return value if value is None else _UNFIT
        if typing.get_origin(option) is tuple:
            if not isinstance(value, (tuple, list)):
                return _UNFIT
            kinds = _options(typing.get_args(option)[0])
            items = [
                next((fit for kind in kinds if (fit := self._as(kind, item)) is not _UNFIT), _UNFIT)
                for item in cast("list[Any]", value)
            ]
            return _UNFIT if any(item is _UNFIT for item in items) else tuple(items)
        if typing.get_origin(option) is dict:
            if not isinstance(value, dict):
                return _UNFIT
            kind, items = typing.get_args(option)[1], cast("dict[str, Any]", value)
            converted = dict(items) if kind is Any else {name: self._as(kind, item) for name, item in items.items()}
            return _UNFIT if any(item is _UNFIT for item in converted.values()) else converted
        if typing.get_origin(option) is Literal:
            return value if isinstance(value, str) and value in typing.get_args(option) else _UNFIT
        if option is int:
            fits = not is_bool and isinstance(value, numbers.Integral) and self.bounds.hold(int(value))
            return int(value) if fits else _UNFIT
        if option is float:
            if is_bool or not isinstance(value, numbers.Real):
                return _UNFIT
            number = float(value)
            is_valid = math.isfinite(number) or not (self.bounds.finite or math.isnan(number))
            return number if is_valid and self.bounds.hold(number) else _UNFIT
        if not isinstance(option, type):
            return value if callable(value) else _UNFIT
        if getattr(option, "_is_protocol", False):
            # Its methods are tried before a run starts, where a better error can be raised.
            return _UNFIT if value is None or isinstance(value, (type, *_PLAIN)) else value
        return value if isinstance(value, option) else _UNFIT


_UNFIT = object()
_PLAIN = (str, bytes, bool, int, float, list, tuple, dict, set)


@functools.cache
def settings_of(kind: type) -> tuple[Setting, ...]:
    """Return the declarations of the fields of a group, in order."""
    hints = typing.get_type_hints(kind)
    return tuple(_setting(kind, item, hints[item.name]) for item in dataclasses.fields(kind))


S = TypeVar("S", bound=Settings)
Constructor = TypeVar("Constructor", bound=Callable[..., None])


def extended(settings: Settings, kind: type[S], **changes: Any) -> S:
    """Return settings as a `kind`, a class that may add fields to theirs, with changes.

    None is the default of a setting that cannot be None, as in TorchRL's signatures.
    """
    values = {item.name: getattr(settings, item.name) for item in settings_of(type(settings))} | changes
    unset = [item for item in settings_of(kind) if values.get(item.name, item) is None]
    return kind(**values | {item.name: item.default for item in unset if type(None) not in _options(item.hint)})


def lists_settings(
    kind: type[Settings], defaults: Mapping[str, Any] | None = None, *, without: Collection[str] = ()
) -> Callable[[Constructor], Constructor]:
    """Give a constructor that accepts settings by keyword a signature that lists them, for `help` and `inspect`.

    Args:
        kind: the settings.
        defaults: further keywords, and defaults that differ from the defaults of the settings.
        without: settings that the constructor does not accept by keyword.
    """

    def with_signature(constructor: Constructor) -> Constructor:
        signature = inspect.signature(constructor)
        listed = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        keywords = {item.name: item.default for item in settings_of(kind)} | dict(defaults or {})
        listed += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in keywords.items()
            if name not in {*signature.parameters, *without}
        ]
        cast(Any, constructor).__signature__ = signature.replace(parameters=listed)
        return constructor

    return with_signature


def _setting(kind: type, item: dataclasses.Field[Any], hint: Any) -> Setting:
    declared = item.metadata.get(_KEY, _Declared(help="", bounds=Bounds()))
    default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    return Setting(
        owner=kind.__name__,
        name=item.name,
        hint=hint,
        default=default,
        help=declared.help,
        bounds=declared.bounds,
    )


def paths_of(kind: type, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """Yield every setting that `--set` reaches, with its path, each group before its fields."""
    for item in settings_of(kind):
        yield f"{prefix}{item.name}", item
        listed: set[str] = set()
        for group in item.groups:
            for path, inner in paths_of(group, f"{prefix}{item.name}."):
                if path not in listed:  # alternative groups share some of their settings
                    yield path, inner
                listed.add(path)


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the types that a union allows; one type for any other hint."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _choices(option: Any) -> tuple[Any, ...]:
    return typing.get_args(option) if typing.get_origin(option) is Literal else ()


def _kind(option: Any, quote: str = "") -> str:
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    if option in plain:
        return plain[option]
    if typing.get_origin(option) is tuple:
        return f"a tuple of {_alternatives([_plural(kind) for kind in _options(typing.get_args(option)[0])])}"
    if typing.get_origin(option) is dict:
        kind = typing.get_args(option)[1]
        return "an object (JSON on the command line)" if kind is Any else f"a dict with {_kind(kind)} per name"
    if choices := _choices(option):
        return f"one of {', '.join(f'{quote}{choice}{quote}' for choice in choices)}"
    if typing.get_origin(option) is not None:
        origin = typing.get_origin(option)
        return "a function" if origin is Callable else _with_article(getattr(origin, "__name__", str(origin)).lower())
    if getattr(option, "_is_protocol", False):
        members = _members(option)
        methods = " and ".join(f"`{name}`" for name in members)
        return f"an object with {methods} methods" if len(members) > 1 else f"an object with a {methods} method"
    return _with_article(getattr(option, "__name__", str(option)))


def _kinds(options: Sequence[Any], quote: str) -> list[str]:
    """Return the kinds of the members of a union, which lists choices only once: `one of a, b, or a tuple of them`."""
    choices = [option for option in options if _choices(option)]
    tuples = [option for option in options if typing.get_args(option)[0:1] and typing.get_args(option)[0] in choices]
    return [_kind(option, quote) for option in options if option not in tuples] + ["a tuple of them"] * len(tuples)


def _plural(option: Any) -> str:
    """Return the kind of the items of a tuple: `a function` becomes `functions`."""
    if option is int:
        return "whole numbers"
    return re.sub(r"^an? (\w+)", r"\1s", _kind(option)).replace("one of ", "any of ", 1)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def _alternatives(words: Sequence[str]) -> str:
    """Join alternatives with `or`, and with commas where two are not enough to read them."""
    comma = "," if len(words) > 2 or any("," in word for word in words[:-1]) else ""
    return f"{', '.join(words[:-1])}{comma} or {words[-1]}" if len(words) > 1 else words[0]


def _members(protocol: type) -> list[str]:
    return sorted(name for name in vars(protocol) if not name.startswith("_"))


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
