"""How often code asks whether a run is in a folder or at a URL: few times, because the place object does what differs.

python -m tests.test_place_branches    # lists the conditions
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = {"LocalPlace", "Mirror"}
MOST = 7


def asks_for_the_place(condition: ast.AST) -> bool:
    """Return whether a condition calls `is_url`, reads `is_remote`, or looks whether there is a mirror."""
    for node in ast.walk(condition):
        match node:
            case ast.Call(func=ast.Name(id="is_url") | ast.Attribute(attr="is_url")) | ast.Attribute(attr="is_remote"):
                return True
            case ast.Compare(left=ast.Attribute(attr="mirror"), ops=[ast.Is() | ast.IsNot()]):
                return True
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                if PLACES & {part.id for part in ast.walk(kinds) if isinstance(part, ast.Name)}:
                    return True
            case _:
                pass
    return False


def branches_in(text: str) -> Iterator[int]:
    """Yield the lines of the conditions in a file that ask for the place."""
    lines = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            conditions = [node.test]
        elif isinstance(node, ast.comprehension):
            conditions = node.ifs
        elif isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            conditions = [node]
        else:
            conditions = []
        lines |= {condition.lineno for condition in conditions if asks_for_the_place(condition)}
    yield from sorted(lines)


def branches() -> Iterator[str]:
    """Yield the conditions of both packages, with their places."""
    for package in (ROOT / "rlhf_pipeline", ROOT / "storage" / "trajectory_store"):
        for file in sorted(package.rglob("*.py")):
            text = file.read_text("utf-8")
            lines = text.splitlines()
            yield from (
                f"{file.relative_to(ROOT)}:{number}: {lines[number - 1].strip()}" for number in branches_in(text)
            )


def test_few_conditions_ask_for_the_place():
    """What differs between a folder and a URL is a method of `LocalPlace` and `Mirror`."""
    conditions = [*branches()]
    assert len(conditions) <= MOST, "\n".join(conditions)


def test_every_form_of_the_question_is_counted():
    """An `if`, a conditional expression, a comprehension, an operand; nothing else."""
    text = "\n".join(
        [
            "if not is_url(out): pass",
            "x = 'zarr' if run.place.is_remote else backend",
            "y = [run for run in runs if isinstance(run.place, LocalPlace)]",
            "z = ready and not address.is_url(out)",
            "w = None if run.mirror is None else run.mirror.traffic()",
            "if isinstance(path, Path) and run.place: pass",
        ]
    )
    assert [*branches_in(text)] == [1, 2, 3, 4, 5]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{condition}\n" for condition in branches()))
