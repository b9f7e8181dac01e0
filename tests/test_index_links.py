"""What a package index shows of a distribution: it has no files beside the README."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_links_of_the_stores_readme_work_on_a_package_index():
    """Each link is an address, or a heading of the same page."""
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "storage" / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
