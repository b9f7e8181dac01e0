"""The page about other tools' data says what is so."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_pipeline.exchange.atif_documents import markdown_table
from rlhf_pipeline.exchange.tools import NAMES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "exchange.md"


def test_every_format_is_in_the_table_and_in_the_help(capsys):
    """The page and `import --help` name all formats."""
    from rlhf_pipeline.cli.parser import build_parser

    named = set(re.findall(r"`([a-z0-9-]+)`", PAGE.read_text(encoding="utf-8")))
    shown = build_parser()[1]["import"].format_help().replace("\n", " ")
    for name in NAMES:
        assert name in named | {"auto"}, name
        assert name in shown, name


def test_the_table_of_atif_is_the_codes():
    """The page lists where a document has each column; the table is `markdown_table()`."""
    assert markdown_table() in PAGE.read_text(encoding="utf-8")
