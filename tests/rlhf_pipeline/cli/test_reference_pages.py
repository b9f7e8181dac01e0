"""The reference pages are what the command and the errors themselves say."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import rlhf_pipeline.errors
import trajectory_store.errors
from rlhf_pipeline.cli.parser import COMMANDS, build_parser, options_of
from rlhf_pipeline.cli.reference_pages import commands_page, errors_page

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("name", "page"), [("commands", commands_page), ("errors", errors_page)])
def test_the_page_is_as_printed(name: str, page):
    """docs/NAME.md is what `rlhf-pipeline config NAME --markdown` prints; if not, print it again."""
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == "\n".join(page()) + "\n"


def test_every_command_and_option_is_on_the_page():
    """Nothing that can be typed is missing, whatever kind of option it is."""
    text = "\n".join(commands_page())
    for name in COMMANDS:
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        options = {option for action in options_of(build_parser(name)[1][name]) for option in action.option_strings}
        missing = [option for option in options - {"-h", "--help", "--debug"} if f"`{option}" not in section]
        assert missing == [], name


@pytest.mark.parametrize("module", [rlhf_pipeline.errors, trajectory_store.errors])
def test_every_error_is_on_the_page(module):
    """Each class of both trees has a line."""
    text = "\n".join(errors_page())
    kinds = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Exception)]
    assert [kind.__name__ for kind in kinds if f"`{kind.__name__}`" not in text] == []
