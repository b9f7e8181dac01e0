"""What the documents show is run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import rlhf_pipeline
import trajectory_store

ROOT = Path(__file__).resolve().parents[1]

MODULES = sorted(
    info.name
    for package in (rlhf_pipeline, trajectory_store)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not info.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    """Every `>>>` example of the module gives what it says."""
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert failed == 0


def test_python_blocks_of_the_readme():
    """Every Python block of the README runs, in order, in one namespace each."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
