"""The documentation as a site: `sphinx-build -W docs site`, offline."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from rlhf_pipeline import __version__

project = "rlhf-pipeline"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"rlhf-pipeline {release}"
myst_heading_anchors = 3
autodoc_typehints = "none"  # the signatures have them
autodoc_member_order = "bysource"

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "readme": "README.md",
    "store": "storage/README.md",
    "format": "storage/FORMAT.md",
    "security": "SECURITY.md",
}
"""Pages whose text stands outside this folder, where people look for it; here is a link to each."""


def _whole(app: Sphinx, page: str, source: list[str]) -> None:
    """Give such a page the text, with its links as they lead from here; what is no page stays a name."""
    if page not in ELSEWHERE:
        return
    file = ROOT / ELSEWHERE[page]
    pages = {(ROOT / path).resolve(): f"{name}.md" for name, path in ELSEWHERE.items()}

    def led(link: re.Match[str]) -> str:
        label, target, heading = link[1], link[2], link[3] or ""
        place = (file.parent / target).resolve()
        if place.parent == ROOT / "docs":
            return f"[{label}]({place.name}{heading})"
        return f"[{label}]({pages[place]}{heading})" if place in pages else f"`{label}`"

    text = file.read_text(encoding="utf-8")
    source[0] = re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", led, text)


def setup(app: Sphinx) -> None:
    """Connect the pages to their texts."""
    app.connect("source-read", _whole)
