"""The text of user code: where functions and classes are defined, which names they use, which modules they import.

Everything here only reads files: no module is imported for inspection.
"""

from __future__ import annotations

import ast
import functools
import linecache
import site
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple, cast

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
THIS_PROJECT: Final = ("rlhf_pipeline", "trajectory_store")


class Import(NamedTuple):
    """One imported name."""

    module: str
    name: str
    """The name imported from the module; empty for the module itself."""
    level: int
    """The number of leading dots in a relative import."""

    def __str__(self) -> str:
        return f"{'.' * self.level}{self.module}:{self.name}"


class SourceText:
    """The text of one file or notebook cell, parsed.

    Attributes:
        tree: of its syntax.
        bindings: the top-level statements that bind or change a name, by the name.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.bindings: dict[str, list[ast.stmt]] = {}
        for statement in self.tree.body:
            if not _is_main_block(statement):
                for name in dict.fromkeys(_bound_by(statement)):
                    self.bindings.setdefault(name, []).append(statement)
        self._tables: dict[int, list[symtable.SymbolTable]] = {}
        for table in _nested(symtable.symtable(text, "<source>", "exec")):
            self._tables.setdefault(table.get_lineno(), []).append(table)

    def of_code(self, code: CodeType) -> Definition | None:
        """Return the definition of which a code object was compiled; None if this is not its text."""
        nodes = [
            node for node in ast.walk(self.tree) if isinstance(node, _SCOPES) and code.co_firstlineno == _top(node)
        ]
        if code.co_name != "<lambda>":
            return next((node for node in nodes if getattr(node, "name", "") == code.co_name), None)
        lambdas = [node for node in nodes if isinstance(node, ast.Lambda)]
        spans = {*code.co_positions()}
        exact = [node for node in lambdas if _span(node.body) in spans]  # several may share a line
        return next(iter(exact or lambdas), None)

    def of_class(self, qualname: str) -> Definition | None:
        """Return the last definition of a class with this qualified name."""
        return dict(_classes(self.tree, "")).get(qualname)

    def text_of(self, node: ast.AST) -> str:
        """Return the text of a node; whole lines, with the decorators, of anything but an expression."""
        if isinstance(node, ast.expr):
            return ast.get_source_segment(self.text, node) or ""
        lines = self.text.splitlines(keepends=True)[_top(node) - 1 : getattr(node, "end_lineno", 0)]
        return textwrap.dedent("".join(lines)).rstrip()

    @staticmethod
    def is_import(node: ast.AST) -> bool:
        """Return whether a node is an import statement."""
        return isinstance(node, (ast.Import, ast.ImportFrom))

    def names_in(self, node: ast.AST) -> set[str]:
        """Return the names of the module that a node uses; of a function or class, not those of its own scope."""
        if not isinstance(node, _SCOPES):
            return _loads(node)
        outside: list[ast.AST] = []
        if isinstance(node, ast.ClassDef):
            outside = [*node.bases, *node.keywords, *node.decorator_list]
        else:
            outside = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            outside += [] if isinstance(node, ast.Lambda) else node.decorator_list
        kind = "lambda" if isinstance(node, ast.Lambda) else node.name
        tables = [table for table in self._tables.get(node.lineno, []) if table.get_name() == kind]
        names = {name for part in outside for name in _loads(part)}
        for table in tables:
            for scope in (table, *_nested(table)):
                symbols = [symbol for symbol in scope.get_symbols() if symbol.is_global() and symbol.is_referenced()]
                names |= {symbol.get_name() for symbol in symbols}
        return names

    def imports_in(self, node: ast.AST | None = None, only: str = "") -> Iterator[Import]:
        """Yield the imports in a node, or in the whole text; of an import statement those that bind `only`."""
        for statement in ast.walk(node or self.tree):
            if not isinstance(statement, (ast.Import, ast.ImportFrom)):
                continue
            for alias in statement.names:
                binds = alias.asname or alias.name.partition(".")[0], alias.name
                if only and statement is node and only not in binds:
                    continue
                if isinstance(statement, ast.Import):
                    yield Import(alias.name, "", 0)
                else:
                    yield Import(statement.module or "", alias.name, statement.level)


def source_of(file: str) -> SourceText | None:
    """Return the text of a file, or of a notebook's cell, as Python loaded it; None if there is none that parses."""
    linecache.checkcache(file)
    return _parsed("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=128)
def _parsed(text: str) -> SourceText | None:
    try:
        return SourceText(text) if text.strip() else None
    except (SyntaxError, ValueError, RecursionError):
        return None


def imported_modules(imports: Iterable[Import], package: str) -> Iterator[str]:
    """Yield the full names of modules that imports may load: packages, their modules, and names that may be modules.

    >>> list(imported_modules([Import("grader.words", "count", 0), Import("", "near", 1)], "mine"))
    ['grader', 'grader.words', 'grader.words.count', 'mine', 'mine.near']
    """
    for module, name, level in imports:
        if level:
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - level + 1])
            module = f"{base}.{module}" if module and base else module or base
        parts = [*filter(None, module.split(".")), *([name] if name not in ("", "*") else [])]
        yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def module_file(name: str) -> Path | None:
    """Return the file of a module, loaded or not; None if there is none, or it is a package without a file."""
    loaded = sys.modules.get(name)
    spec = getattr(loaded, "__spec__", None)
    origin = getattr(loaded, "__file__", None) or getattr(spec, "origin", None)
    if loaded is None:
        spec = _spec_of(name)
        origin = None if spec is None else spec.origin
    path = Path(origin) if isinstance(origin, str) else None
    return path.resolve() if path is not None and path.is_file() else None


def _spec_of(name: str) -> ModuleSpec | None:
    """Find a module without importing it or its packages."""
    parent, _, _ = name.rpartition(".")
    places: Any = None
    if parent:
        spec = getattr(sys.modules.get(parent), "__spec__", None) or _spec_of(parent)
        places = None if spec is None else spec.submodule_search_locations
        if places is None:
            return None
    try:
        return PathFinder.find_spec(name, places)
    except (ImportError, ValueError, AttributeError):
        return None


def is_users(module: str, file: str | Path) -> bool:
    """Return whether code is a user's: not of Python, of an installed package, or of this project.

    Args:
        module: its name.
        file: where it is; a name that is not a file belongs to a notebook or to text that was executed.
    """
    path = Path(file)
    if module.partition(".")[0] in THIS_PROJECT or {"site-packages", "dist-packages"} & {*path.parts}:
        return False
    return not str(file).startswith("<frozen") and not any(path.is_relative_to(folder) for folder in _installed())


@functools.cache
def _installed() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")} | {site.getusersitepackages()}
    return tuple(Path(folder).resolve() for folder in folders)


def _top(node: Any) -> int:
    """Return the first line of a node, its decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _span(node: ast.expr) -> tuple[int | None, int | None, int | None, int | None]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _nested(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _nested(child)


def _classes(node: ast.AST, within: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield within + child.name, child
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            local = "" if isinstance(child, ast.ClassDef) else "<locals>."
            yield from _classes(child, f"{within}{child.name}.{local}")
        else:
            yield from _classes(child, within)


def _loads(node: ast.AST) -> set[str]:
    names = (part for part in ast.walk(node) if isinstance(part, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}


def _bound_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds, or whose objects it changes: `x = 1`, `x[k] = 1`, `x.add(1)`."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        yield from _root(node)
    else:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _root(node.value.func)
        if not isinstance(node, (ast.Lambda, *_COMPREHENSIONS)):
            for child in ast.iter_child_nodes(node):
                yield from _bound_by(child)


def _root(node: ast.AST) -> Iterator[str]:
    """Yield the name of the object that an attribute or item belongs to."""
    part: Any = node
    while isinstance(part, (ast.Attribute, ast.Subscript)):
        part = part.value
    if isinstance(part, ast.Name) and part is not node:
        yield part.id


def _is_main_block(node: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == "__main__":`, which a definition does not execute."""
    test = cast("Any", node).test if isinstance(node, ast.If) else None
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"
