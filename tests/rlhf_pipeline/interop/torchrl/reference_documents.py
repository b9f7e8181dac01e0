"""Reads the reference documents: what they say of each class, as text extracted from web pages leaves it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[5] / "shared" / "reference"
REQUIRED = "<required>"
"""The default of an argument that has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Documented:
    """What a document says of one class."""

    file: str
    name: str
    arguments: dict[str, object]
    """Of the constructor, with their defaults; keyword-only ones begin with `*`."""
    methods: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])
    attributes: frozenset[str] = frozenset()
    """Fields, class attributes, properties, and what the constructor sets; without private ones."""
    buffers: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    """Keys of a TensorDict, besides those that are defaults of arguments."""


def documents() -> list[str]:
    """Return the names of the documents that are there."""
    return sorted(path.name for path in FOLDER.glob("*.txt"))


def classes(file: str) -> Iterator[Documented]:
    """Yield the public classes of a document."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    heads = list(re.finditer(r"class (?:torchrl\.data\.)?([A-Z]\w+)\(", text))
    heads = [head for head in heads if "module" not in text[head.start() - 6 : head.start()]]
    for head, end in zip(heads, [*(head_after.start() for head_after in heads[1:]), len(text)], strict=True):
        yield _documented(file, head[1], text[head.start() : end])


def _documented(file: str, name: str, text: str) -> Documented:
    body = re.sub(r'r?""".*?"""', " ", text, flags=re.DOTALL)
    # A page that kept its lines has comments to their ends; in one that did not, code follows them.
    body = re.sub(r"^([^#\n]{0,200})#[^\n]{0,300}$", r"\1", body, flags=re.MULTILINE)
    functions = {match[1]: _arguments(body, match.end()) for match in re.finditer(r"\bdef (\w+)\s*\(", body)}
    overloaded = re.search(r"@overload\s+def __init__\(", body)
    arguments = functions.get("__init__", {})
    if overloaded is not None:
        arguments = _arguments(body, overloaded.end())
    page = re.match(r"class torchrl\.data\.\w+\(", text)
    if page is not None:
        arguments = _arguments(text, page.end())
        functions = {
            match[1]: _arguments(text, match.end()) for match in re.finditer(r"(\w+)\((?=[^()]*\)\[source\])", text)
        }
        functions.pop(name, None)
    before = body.partition(" def ")[0].partition("\ndef ")[0]
    fields = set(
        re.findall(r"(?:^|[\s)])([A-Za-z_]\w*): (?:torch|str|bool|list|int|History|NestedKey|TensorDict)", before)
    )
    set_there = set(re.findall(r"self\.(\w+)(?:: \w+)? = ", body)) | set(re.findall(r'__dict__\["(\w+)"\] =', body))
    attributes = set[str]() if page is not None else fields | set_there | set(re.findall(r"\b([A-Z_]{4,}) = ", before))
    attributes |= set(re.findall(r"@property\s+def (\w+)", body))
    keys = set(re.findall(r"^\s*([a-z_]+): Tensor\(", text, flags=re.MULTILINE))
    return Documented(
        file=file,
        name=name,
        arguments=arguments,
        methods={key: arguments for key, arguments in functions.items() if not key.startswith("_")},
        attributes=frozenset(name for name in attributes if not name.startswith("_")),
        buffers=frozenset(re.findall(r'register_buffer\("(\w+)"', body)),
        keys=frozenset(keys),
    )


def _arguments(text: str, start: int) -> dict[str, object]:
    """Return the arguments of a signature whose opening bracket ends at `start`."""
    depth, at, parts, last = 1, start, list[str](), start
    while depth:
        letter = text[at]
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or not depth:
            parts.append(text[last:at].strip())
            last = at + 1
        at += 1
    arguments: dict[str, object] = {}
    keyword = ""
    for part in filter(None, parts):
        if part == "*":
            keyword = "*"
        elif part.startswith("*") or part in ("self", "cls"):
            continue
        else:
            declared, _, default = re.sub(r"\s*# type: ignore", "", part).partition("=")
            arguments[keyword + declared.partition(":")[0].strip()] = _value(default.strip())
    return arguments


def _value(text: str) -> object:
    if not text:
        return REQUIRED
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text
