"""The names that code gives to values, and how many of them fit any value.

`python -m tests.binding_names rlhf_pipeline storage/trajectory_store` prints the counts and the places.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

FILLERS: Final = {
    "asked", "both", "called", "found", "given", "held", "kept", "known", "made", "meant", "named", "one", "other",
    "own", "said", "seen", "shown", "taken", "there", "told", "wanted",
}  # fmt: skip
"""Words that fit any value, so that a reader learns nothing of it: `found`, `given`."""
SYNONYMS: Final = {
    "another", "data", "elem", "element", "info", "item", "obj", "object", "others", "res", "result", "results", "ret",
    "stuff", "temp", "thing", "things", "tmp", "val", "value",
}  # fmt: skip
"""Words that could replace a filler without saying more."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One name that is given to a value, at a line of a file."""

    path: Path
    line: int
    name: str

    @property
    def word(self) -> str:
        """The name in the form that is compared: lower case, without leading underscores."""
        return self.name.lstrip("_").lower()


@cache
def bindings(package: Path) -> tuple[Binding, ...]:
    """Return the parameters, variables, functions, classes and attributes that a package's files name."""
    return tuple(
        Binding(path, line, name)
        for path in sorted(package.rglob("*.py"))
        for name, line in _names(ast.parse(path.read_text(encoding="utf-8")))
    )


def counts(package: Path) -> Counter[str]:
    """Return how often each word is given."""
    return Counter(binding.word for binding in bindings(package))


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, lineno=line):
                yield name, line
            case ast.Name(id=name, lineno=line, ctx=ast.Store()):
                yield name, line
            case ast.Attribute(attr=name, lineno=line, ctx=ast.Store()):
                yield name, line
            case ast.FunctionDef(name=name, lineno=line) | ast.AsyncFunctionDef(name=name, lineno=line):
                yield name, line
            case ast.ClassDef(name=name, lineno=line):
                yield name, line
            case ast.ExceptHandler(name=str() as name, lineno=line):
                yield name, line
            case _:
                pass


def main(packages: list[str]) -> None:
    """Print the fillers of packages, and the counts of fillers and synonyms."""
    write = sys.stdout.write
    for package in map(Path, packages):
        fillers = [binding for binding in bindings(package) if binding.word in FILLERS]
        total, by_word = len(bindings(package)), counts(package)
        write(f"{package}: {len(fillers)} of {total:,} bindings are fillers, {len(fillers) / total:.2%}\n")
        write("".join(f"  {binding.path}:{binding.line}: {binding.name}\n" for binding in fillers))
        write(
            "  synonyms: " + ", ".join(f"{word} {by_word[word]}" for word in sorted(SYNONYMS & by_word.keys())) + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
