"""The identity of a user's function: digests of everything that determines its results and can be observed.

Observed are the source of the function and of what it names in its file, the files of a user's other modules that these
import, and the values that it holds: defaults, captured variables, attributes of its object, arguments of a partial.
A file that a module reads, an environment variable or a server cannot be observed: `Reward(f, version="3")` declares
their version.

>>> before, now = (functools.partial(round, ndigits=digits) for digits in (1, 2))
>>> changed_parts(identity_of(before), identity_of(now))
['argument ndigits was 1 and is now 2']
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import re
import sys
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final, cast

from rlhf_pipeline.user_code.source_text import (
    THIS_PROJECT,
    SourceText,
    imported_modules,
    is_users,
    module_file,
    source_of,
)

Identity = dict[str, str]
"""The parts of a callable, by name: `source`, `source of NAME`, `imports`, `module NAME`, `default NAME`,
`captured NAME`, `attribute NAME`, `argument NAME`, `global NAME`. Each value is a digest, or an unchanged number."""

NOT_OBSERVED: Final = "not observed"
MOST_OBJECTS: Final = 100_000
"""The maximum number of objects that are observed in the values of one callable; this takes about a second."""
MOST_BYTES: Final = 64 << 20
"""The maximum size of an array or a text that is observed completely; of a larger one, only the first and last MiB."""
_ENDS: Final = 1 << 20
_MOST_PARTS: Final = 500
_DEEPEST: Final = 100

_PLAIN: Final = (bool, int, float, complex, str, bytes, range, slice, types.NoneType, types.EllipsisType)
_BASES: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (str, str.__str__),
    (bytes, bytes.__bytes__),
    (int, int.__int__),
    (float, float.__float__),
    (complex, complex.__complex__),
)
"""The conversion of a subclass instance to each of these types."""
_WRITTEN: Final = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID),
)
"""Immutable types whose `repr` is their value."""


def identity_of(part: Any) -> Identity:
    """Return the parts of a callable at the time of the first request, because calls may change them.

    Args:
        part: a function, method, class, partial or object with `__call__`. Of any other object only the code counts,
            because its fields are part of the definition's record.
    """
    holder = part.__self__ if isinstance(part, types.MethodType) else part
    key = id(holder), "" if holder is part else part.__qualname__
    earlier = _IDENTITIES.get(key)
    if earlier is not None and earlier[0]() is holder:
        return earlier[1]
    try:
        alive: Callable[[], Any] = weakref.ref(holder, lambda _: _IDENTITIES.pop(key, None))
    except TypeError:  # it has no weak references
        alive = functools.partial(_itself, holder)
    identity = _Observation().of(part)
    _IDENTITIES[key] = alive, identity
    return identity


_IDENTITIES: Final[dict[tuple[int, str], tuple[Callable[[], Any], Identity]]] = {}
"""The identities of callables that are alive, each from before its first call."""


def _itself(holder: Any) -> Any:
    return holder


def changed_parts(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the differences between two identities as text.

    >>> changed_parts({"source": "00a1b2c3d4e5f607", "default w": "1"}, {"source": "10a1b2c3d4e5f607"})
    ['default w is gone', 'source has changed']
    """
    words: list[str] = []
    for name in sorted({**before, **now}):
        was, now_is = before.get(name), now.get(name)
        if was == now_is:
            continue
        if was is None or now_is is None:
            words.append(f"{name} is {'new' if was is None else 'gone'}")
        elif any(re.fullmatch(r"[0-9a-f]{16}", text) for text in (was, now_is)):
            words.append(f"{name} has changed")
        else:
            words.append(f"{name} was {was} and is now {now_is}")
    return words


def _digest(*parts: bytes | memoryview | str) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        whole.update(len(encoded).to_bytes(8, "big"))
        whole.update(encoded)
    return whole.digest()


class _Observation:
    """Collects the parts of one callable."""

    def __init__(self) -> None:
        self._parts: Identity = {}
        self._imports: set[str] = set()
        self._observed: set[tuple[str, str]] = set()
        """The file and name of each piece of code that has been observed."""
        self._main = ""
        """The file of the callable."""
        self._digests: dict[int, bytes] = {}
        self._alive: list[Any] = []
        """The objects with a digest, kept alive so that no temporary object gets the same id."""
        self._within: dict[int, int] = {}
        """The depth of each object that contains the observed object, to detect cycles."""

    def of(self, part: Any) -> Identity:
        """Return the parts of a callable by name."""
        self._callable(part)
        if self._imports:
            self._note("imports", _digest(*sorted(self._imports)))
        return dict(sorted(self._parts.items()))

    def _note(self, name: str, digest: bytes) -> None:
        if len(self._parts) >= _MOST_PARTS and name not in self._parts:
            name = "further parts"
        before = self._parts.get(name)
        self._parts[name] = (digest if before is None else _digest(before, digest)).hex()[:16]

    # What is held

    def _callable(self, part: Any) -> None:
        """Observe a callable, each value that it holds by name."""
        if isinstance(part, functools.partial):
            partial = cast("functools.partial[Any]", part)
            for name, value in (*enumerate(partial.args), *partial.keywords.items()):
                self._value(f"argument {name}", value)
            self._callable(partial.func)
        elif isinstance(part, types.FunctionType):
            self._function(part)
        elif isinstance(part, types.MethodType):
            self._function(cast("types.FunctionType", part.__func__))
            if not isinstance(part.__self__, type):
                self._attributes(part.__self__)
        elif isinstance(part, type):
            self._class(part, is_root=True)
        elif _is_wrapper(part):
            self._callable(part.__wrapped__)
        else:
            self._class(type(part), is_root=True)
            if callable(part):
                self._attributes(part)

    def _function(self, function: types.FunctionType) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if callable(wrapped):
            self._callable(wrapped)
        self._code(function, is_root=True)
        if not _is_of_this_project(function.__module__):
            for name, value in _parts_of_function(function):
                self._value(name, value)

    def _attributes(self, owner: Any) -> None:
        for name, value in _attributes_of(owner):
            self._value(f"attribute {name}", value)

    def _value(self, name: str, value: Any) -> None:
        """Note a value: a number unchanged, anything else by its digest."""
        text = repr(value) if type(value) in (bool, int, float, types.NoneType) else ""
        if 0 < len(text) < 16 and len(self._parts) < _MOST_PARTS:
            self._parts[name] = text
        else:
            self._note(name, self._of(value, name))

    def _of(self, value: Any, place: str) -> bytes:
        """Return the digest of a value; what cannot be observed in it is noted by its place."""
        if type(value) in _PLAIN:
            return self._plain(value)
        if id(value) in self._digests:
            return self._digests[id(value)]
        if id(value) in self._within:
            return _digest("circle", str(len(self._within) - self._within[id(value)]))
        if len(self._digests) >= MOST_OBJECTS or len(self._within) >= _DEEPEST:
            return self._unknown(
                place, f"beyond the limit of {MOST_OBJECTS:,} objects, or nested more than {_DEEPEST} levels deep"
            )
        self._within[id(value)] = len(self._within)
        self._alive.append(value)
        digest = self._digests[id(value)] = self._container_digest(value, place)
        del self._within[id(value)]
        return digest

    def _plain(self, value: Any) -> bytes:
        if isinstance(value, str):
            return _digest("str", *_ends_of(memoryview(self._relative(value).encode("utf-8", "surrogatepass"))))
        if isinstance(value, bytes):
            return _digest("bytes", *_ends_of(memoryview(value)))
        return _digest(type(value).__name__, repr(value))

    def _relative(self, text: str) -> str:
        """Return a path in the folder of the callable's file without that folder, so that a copy of both is equal."""
        folder = f"{Path(self._main).parent}/" if self._main else ""
        return f"./{text[len(folder) :]}" if folder and text.startswith(folder) else text

    def _container_digest(self, value: Any, place: str) -> bytes:
        """Return the digest of a value that may hold others."""
        kind = type(value).__qualname__
        if isinstance(value, enum.Enum):
            return _digest("enum", kind, value.name)
        if isinstance(value, _WRITTEN):
            return _digest(kind, repr(value))
        if isinstance(value, PurePath):
            return _digest("path", self._relative(str(value)))
        if isinstance(value, re.Pattern):
            return _digest("pattern", self._plain(value.pattern), str(value.flags))
        for base, plain in _BASES:
            if isinstance(value, base):
                return _digest(kind, self._plain(cast("Any", plain)(value)))
        if isinstance(value, (list, tuple, collections.deque)):
            items = cast("list[Any]", value)
            return _digest(kind, *(self._of(child, f"{place}[{at}]") for at, child in enumerate(items)))
        if isinstance(value, (dict, types.MappingProxyType)):
            pairs = cast("Mapping[Any, Any]", value).items()
            digests = [_digest(self._of(key, place), self._of(child, f"{place}[{key!r:.40}]")) for key, child in pairs]
            return _digest(kind, *sorted(digests), self._of(getattr(value, "default_factory", None), place))
        if isinstance(value, (set, frozenset)):
            return _digest(kind, *sorted(self._of(child, place) for child in cast("set[Any]", value)))
        if isinstance(value, types.ModuleType):
            self._module(value.__name__)
            return _digest("module", value.__name__)
        if isinstance(value, type):
            self._class(value)
            return _digest("class", value.__module__, value.__qualname__)
        if isinstance(value, types.FunctionType):
            self._code(value)
            digests = [_digest(name, self._of(child, f"{place}, {name}")) for name, child in _parts_of_function(value)]
            within = self._of(getattr(value, "__wrapped__", None), place)
            return _digest("function", str(value.__module__), value.__qualname__, *digests, within)
        if isinstance(value, types.MethodType):
            return _digest("method", self._of(value.__func__, place), self._of(value.__self__, place))
        if isinstance(value, functools.partial):
            partial = cast("functools.partial[Any]", value)
            return _digest("partial", self._of((partial.func, partial.args, partial.keywords), place))
        if _is_wrapper(value):
            return _digest("wrapper", self._of(value.__wrapped__, place))
        if isinstance(value, types.BuiltinFunctionType):
            return _digest("builtin", str(value.__module__), value.__qualname__)
        if (content := _array_of(value)) is not None:
            shape, numbers = content
            return (
                _digest(kind, shape, *_ends_of(numbers))
                if isinstance(numbers, memoryview)
                else self._of(numbers, place)
            )
        if _is_open(value):
            self._class(type(value))
            digests = [_digest(name, self._of(child, f"{place}.{name}")) for name, child in _attributes_of(value)]
            return _digest("object", type(value).__module__, kind, *digests)
        return self._unknown(place, f"{type(value).__module__}.{kind}")

    def _unknown(self, place: str, what: str) -> bytes:
        """Note that a value is not observed: two of one type are equal."""
        if len(self._parts) < _MOST_PARTS:
            self._parts[f"{place} ({what})"] = NOT_OBSERVED
        return _digest("unknown", what)

    # Source

    def _code(self, function: types.FunctionType, *, is_root: bool = False) -> None:
        """Observe the source of a function, and what it names in its module."""
        code, module = function.__code__, str(function.__module__)
        key = code.co_filename, f"function {id(code) if code.co_name == '<lambda>' else function.__qualname__}"
        if key in self._observed or not _counts(module, code.co_filename, is_root=is_root):
            return
        self._observed.add(key)
        self._main = self._main or code.co_filename
        text = source_of(code.co_filename)
        node = None if text is None else text.of_code(code)
        if text is None or node is None:
            source, names = _compiled(code), {*_names_in(code)}
        else:
            source, names = text.text_of(node), text.names_in(node)
            self._imported(text, node, module)
        self._source(module, code.co_filename, function.__qualname__, source)
        self._follow(names, text, code.co_filename, module, function.__globals__)

    def _class(self, kind: type, *, is_root: bool = False) -> None:
        """Observe the source of a class and of its bases, and the values that it has."""
        module = kind.__module__
        functions = [
            function
            for value in vars(kind).values()
            for function in _functions_in(value)
            if function.__module__ == module
        ]
        loaded = sys.modules.get(module)
        file = functions[0].__code__.co_filename if functions else str(getattr(loaded, "__file__", None) or "")
        if (file, f"class {kind.__qualname__}") in self._observed or not _counts(module, file, is_root=is_root):
            return
        self._observed.add((file, f"class {kind.__qualname__}"))
        self._main = self._main or file
        text = source_of(file)
        node = None if text is None else text.of_class(kind.__qualname__)
        if text is not None and node is not None:
            self._source(module, file, kind.__qualname__, text.text_of(node))
            self._imported(text, node, module)
            self._follow(text.names_in(node), text, file, module, {} if loaded is None else vars(loaded))
        for name, value in sorted(vars(kind).items()):
            inside = [*_functions_in(value)]
            for function in inside:
                if node is None or not function.__qualname__.startswith(f"{kind.__qualname__}."):
                    self._code(function)
            plain = not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
            if plain and not inside and not name.startswith(("__", "_abc_")):
                self._value(f"attribute {kind.__qualname__}.{name}", value)
        for base in kind.__bases__:
            self._class(base)

    def _follow(
        self, names: set[str], text: SourceText | None, file: str, module: str, namespace: Mapping[str, Any]
    ) -> None:
        """Observe what code names in its module, what that names, and so on."""
        waiting = sorted(names)
        while waiting:
            name = waiting.pop()
            if (file, name) in self._observed:
                continue
            self._observed.add((file, name))
            statements = text.bindings.get(name, []) if text is not None else []
            for statement in statements:
                assert text is not None
                self._imported(text, statement, module, only=name)
                if not text.is_import(statement):
                    self._source(module, file, name, text.text_of(statement))
                waiting += sorted(text.names_in(statement))
            if not statements and name in namespace and not name.startswith("__"):
                self._unbound(name, namespace[name])

    def _unbound(self, name: str, value: Any) -> None:
        """Observe the value of a module's name that no statement of its text binds, as in a notebook."""
        if isinstance(value, (types.FunctionType, type, types.ModuleType)):
            self._of(value, f"global {name}")
        else:
            self._value(f"global {name}", value)

    def _source(self, module: str, file: str, name: str, text: str) -> None:
        if (file, text) in self._observed:  # named by other code as well
            return
        self._observed.add((file, text))
        if "source" not in self._parts:
            self._note("source", _digest(text))
        else:
            self._note(f"source of {name if file == self._main else f'{module}.{name}'}", _digest(text))

    def _imported(self, text: SourceText, node: Any, module: str, only: str = "") -> None:
        """Observe the modules that the imports in a node load."""
        loaded = sys.modules.get(module)
        package = str(getattr(loaded, "__package__", None) or module.rpartition(".")[0])
        imports = [*text.imports_in(node, only)]
        if text.is_import(node):
            self._imports |= {*map(str, imports)}
        for name in imported_modules(imports, package):
            self._module(name)

    def _module(self, name: str) -> None:
        """Observe the file of a user's module, and the modules that it imports."""
        if ("", name) in self._observed:
            return
        self._observed.add(("", name))
        file = module_file(name)
        if file is None or not is_users(name, file) or str(file) == self._main:
            return
        self._note(f"module {name}", _digest(file.read_bytes()))
        text = source_of(str(file)) if file.suffix == ".py" else None
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for inner in () if text is None else imported_modules(text.imports_in(), package):
            self._module(inner)


def _counts(module: str, file: str, *, is_root: bool) -> bool:
    """Return whether source is observed: a user's, and that of a callable which a definition names itself."""
    if not file or _is_of_this_project(module) or module == "builtins":
        return False
    return is_root or is_users(module, file)


def _is_of_this_project(module: str | None) -> bool:
    return str(module).partition(".")[0] in THIS_PROJECT


def _is_wrapper(value: Any) -> bool:
    """Return whether a value represents a function that it wraps, as that of `functools.cache` does."""
    return type(value).__module__ == "functools" and callable(getattr(value, "__wrapped__", None))


def _is_open(value: Any) -> bool:
    """Return whether an object is what its attributes are: of a user's class, or a dataclass."""
    kind = type(value)
    if dataclasses.is_dataclass(kind) or kind is types.SimpleNamespace:
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (isinstance(file, str) and is_users(kind.__module__, file))


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the defaults, captured variables and attributes of a function, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    for name, value in zip(
        code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True
    ):
        yield f"default {name}", value
    for name, value in sorted((function.__kwdefaults__ or {}).items()):
        yield f"default {name}", value
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            if name != "__class__":
                yield f"captured {name}", cell.cell_contents
    for name, value in sorted(vars(function).items()):
        if name != "__wrapped__":
            yield f"attribute {name}", value


def _attributes_of(owner: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes by name, those in slots as well, without calling its code."""
    attributes: dict[str, Any] = dict(getattr(owner, "__dict__", {}))
    for kind in type(owner).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it has no value yet
                    attributes.setdefault(name, member.__get__(owner))
    return sorted(attributes.items())


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of an attribute of a class: a method, or a property's."""
    if isinstance(value, (staticmethod, classmethod)):
        value = cast("Any", value).__func__
    inner: tuple[Any, ...] = (value,)
    if isinstance(value, property):
        inner = value.fget, value.fset, value.fdel
    elif isinstance(value, functools.cached_property):
        inner = (value.func,)
    elif _is_wrapper(value):
        inner = (value.__wrapped__,)
    yield from (function for function in inner if isinstance(function, types.FunctionType))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _compiled(code: types.CodeType) -> str:
    """Return a text for code without source: it differs between versions of Python."""
    consts = [
        _compiled(constant) if isinstance(constant, types.CodeType) else repr(constant) for constant in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, consts))


def _ends_of(content: memoryview) -> tuple[str, memoryview, memoryview]:
    """Return the size of an array's bytes and all of them, or the first and last of many."""
    size = len(content)
    return (str(size), content, content[:0]) if size <= MOST_BYTES else (str(size), content[:_ENDS], content[-_ENDS:])


def _array_of(value: Any) -> tuple[str, memoryview | list[Any]] | None:
    """Return the shape and the bytes of an array or tensor, its items if they are objects; None for anything else."""
    kind = type(value).__module__.partition(".")[0]
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):  # of an array that has no bytes, nothing is observed
        if torch is not None and isinstance(value, torch.Tensor):
            numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return f"{value.dtype} {tuple(value.shape)}", memoryview(numbers)
        if kind != "numpy" and hasattr(value, "__array__") and "numpy" in sys.modules:
            value = sys.modules["numpy"].asarray(value)
        if type(value).__module__ == "numpy" and value.dtype.hasobject:
            return "", value.tolist()
        if type(value).__module__ == "numpy":
            return f"{value.dtype.str} {value.shape}", memoryview(value.tobytes())
        if isinstance(value, (bytearray, memoryview, array.array)):
            return "", memoryview(bytes(value))
    return None
