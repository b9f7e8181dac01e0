"""The page about TorchRL's collectors is run."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from rlhf_pipeline.policies.new_model import new_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "torchrl_collectors.md"


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:The env passed to LLMCollector is missing transforms:FutureWarning")
def test_python_blocks_of_the_page(tmp_path, monkeypatch):
    """In order, in one namespace, in a folder with a small model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the import itself
        import torchrl.collectors.llm  # noqa: F401
    (tmp_path / "text.txt").write_text("what is 1? it is one.\nwhat is 42? it is six times seven.\n" * 20)
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_layers": 1, "num_heads": 2}
    new_model(tmp_path / "model", text_file=tmp_path / "text.txt", **sizes)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    space: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), space)
    assert len(space["buffer"]) >= 4  # pyright: ignore[reportArgumentType]


@pytest.mark.peer
def test_the_recipe_on_the_page_is_the_one_that_runs():
    """Every line that `test_recipe.py` changes is in the table, in its order, and no other."""
    from .test_recipe import CHANGES

    page = PAGE.with_name("torchrl.md").read_text(encoding="utf-8")
    table = re.search(r"## The recipe, line by line.*?\n((?:\|[^\n]*\n)+)", page, flags=re.DOTALL)
    assert table is not None
    rows = table.group(1).strip().splitlines()[2:]
    assert len(rows) == len(CHANGES)
    for row, (old, new) in zip(rows, CHANGES.items(), strict=True):
        before, after = (re.findall(r"\w+", cell) for cell in row.strip("| ").split(" | ")[:2])
        known = set(re.findall(r"\w+", old)) | {
            "of",
            "the",
            "reference",
            "s",
            "GRPOLoss",
            "TransformersWrapper",
            "size",
            "n",
        }
        assert set(before) <= known, row
        assert set(after) <= set(re.findall(r"\w+", new or "removed")) | {"added", "n", "tokenizer"}, row
