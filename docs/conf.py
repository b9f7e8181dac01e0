"""The documentation as a site: `sphinx-build -W docs site`, offline."""

from __future__ import annotations

from rlhf_pipeline import __version__

project = "rlhf-pipeline"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"rlhf-pipeline {release}"
myst_heading_anchors = 3
autodoc_typehints = "none"  # the signatures have them
autodoc_member_order = "bysource"
