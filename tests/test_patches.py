"""How often tests replace a part of the packages: few times, each with its reason.

    python -m tests.test_patches    # lists them

What another process does at a moment, an error at a call and the number of calls need no patch: see `moments.py`. Nor
does a clock (`time` is not ours), a file system that fails (`os` is not), or a process that has just begun
(`processes.py`).
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rlhf_pipeline", "trajectory_store")
MOST = 19
LOADED = re.compile(r"\b(importorskip|load_module|import_module)\((?!.(rlhf_pipeline|trajectory_store)\b)")
"""Calls that return a module of another package, or of a file that is in none."""
MAY_PATCH = re.compile(r"\b(setattr|setitem|delattr|delitem|mock)\b|^ *\w+(\.\w+)+[^=\n(]*=", re.M)


def patches_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the code of each statement that replaces an attribute or an item of the packages.

    Counted are `setattr`, `setitem`, `delattr` and `delitem` of pytest, `mock.patch` and assignments, unless the target
    is seen to belong to another package or to the file itself.
    """
    tree = ast.parse(text)
    ours, others = set[str](), {*dir(builtins), "self"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = ours if (node.module or "").partition(".")[0] in PACKAGES else others
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                names = ours if alias.name.partition(".")[0] in PACKAGES else others
                names.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ClassDef):
            others.add(node.name)
        elif isinstance(node, ast.Assign) and LOADED.search(ast.unparse(node.value)):
            names = [part for target in node.targets for part in ast.walk(target)]
            others |= {part.id for part in names if isinstance(part, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            called = ast.unparse(node.func)
            is_patch = node.func.attr in ("setattr", "setitem", "delattr", "delitem")
            if (is_patch or re.search(r"\bmock\.patch\b", called)) and _is_ours(node.args[0], others):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Attribute) and _root(part) in ours:
                        yield node.lineno, ast.unparse(node)


def _is_ours(target: ast.expr, others: set[str]) -> bool:
    """Return whether the first argument of a patch belongs to the packages; what is not known does."""
    if isinstance(target, ast.JoinedStr):
        target = target.values[0]
    if isinstance(target, ast.FormattedValue):
        target = target.value
    if isinstance(target, ast.Constant):
        return str(target.value).partition(".")[0] in PACKAGES
    return _root(target) not in others


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def patches() -> list[str]:
    """Return the file, line and code of each; with NO REASON where no comment is beside it or above it."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text("utf-8")
        if not MAY_PATCH.search(text):
            continue  # a tree costs more than a search
        lines = text.splitlines()
        for line, code in patches_in(text):
            reason = any("# " in lines[at] for at in (line - 1, line - 2))
            found.append(f"{path.relative_to(ROOT)}:{line}: {code[:90]}{'' if reason else ' NO REASON'}")
    return found


def test_few_parts_of_the_packages_are_replaced_each_with_its_reason():
    """A patch hides what it replaces, and fails when that is renamed."""
    found = patches()
    assert len(found) <= MOST, "\n".join(found)
    assert not [line for line in found if line.endswith("NO REASON")]


def test_what_is_counted():
    """Attributes, items and names of the packages, also behind a local variable; nothing of others."""
    text = """
import os, time
from unittest import mock
from trajectory_store import fs
class Local: pass
def test(monkeypatch, thing):
    monkeypatch.setattr(fs, "link", None)
    monkeypatch.setattr("rlhf_pipeline.run.loop.LOOKS", 1)
    thing.patch.setattr(thing.store, "append", None)
    monkeypatch.setitem(fs.TABLE, "a", 1)
    mock.patch.object(fs, "link")
    fs.LIMIT = fs.MORE.LIMIT = 3
    monkeypatch.setattr(os, "link", None)
    monkeypatch.setattr(time, "time", None)
    monkeypatch.setattr(Local, "x", 1)
    monkeypatch.setenv("A", "1")
    mock.patch(f"torch.{thing}", 1)
    thing.limit = 3
"""
    assert sorted(line for line, _ in patches_in(text)) == [7, 8, 9, 10, 11, 12, 12]


if __name__ == "__main__":
    for line in patches():
        sys.stdout.write(f"{line}\n")
