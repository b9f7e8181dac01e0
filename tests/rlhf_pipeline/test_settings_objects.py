"""The loss, the advantage and the groups take settings objects: each setting has one declaration and no copies."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path

import pytest

import rlhf_pipeline
from rlhf_pipeline import GRPO, GRPOLoss, MCAdvantage, WritePath
from rlhf_pipeline.settings import settings_of
from rlhf_pipeline.transforms.groups import GroupQueue

PACKAGE = Path(rlhf_pipeline.__file__).parent
KL = {"kl_coef", "kl_target", "kl_horizon"}
"""Settings of the KL penalty, which is another transform; `kl_coef` is also a column."""

SETTINGS = [item.name for kind in (GRPO, WritePath) for item in settings_of(kind) if item.name not in KL]


def name_of(node: ast.AST) -> str | None:
    """Return the setting that a node may name: an attribute, a keyword, a declaration or a text (`loss.clip_cov`)."""
    match node:
        case ast.Attribute(attr=name) | ast.keyword(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
        case ast.Constant(value=str(text)) if " " not in text:
            return text.rpartition(".")[2]
        case _:
            return None


@functools.cache
def names_by_file() -> dict[str, frozenset[str | None]]:
    """Return what each file of the package names."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {str(file): frozenset(map(name_of, ast.walk(ast.parse(file.read_text("utf-8"))))) for file in files}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_named_in_few_files(name: str):
    """In four at most: where it is declared, where it acts, and two others."""
    files = [file for file, names in names_by_file().items() if name in names]
    assert str(PACKAGE / "config.py") in files
    assert len(files) <= 4, files


@pytest.mark.parametrize(("kind", "most"), [(GRPOLoss, 3), (MCAdvantage, 7), (GroupQueue, 2)])
def test_a_constructor_takes_an_object(kind: type, most: int):
    """And no settings one by one; the first six arguments of MCAdvantage are TorchRL's."""
    (tree,) = (
        node
        for node in ast.walk(ast.parse(Path(inspect.getfile(kind)).read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    (constructor,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    arguments = constructor.args
    names = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)} - {"self"}
    assert len(names) <= most
    assert not names & set(SETTINGS)
    copied = [
        node.attr
        for node in ast.walk(constructor)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in SETTINGS
    ]
    assert copied == []
