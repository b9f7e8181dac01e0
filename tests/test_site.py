"""The documentation as a site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_pipeline
import trajectory_store

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path):
    """No warning; all public names are on the API page, all documents are pages, nothing is fetched from elsewhere."""
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="the site needs the extra `docs`")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "trees")]
    site = tmp_path / "site"
    built = subprocess.run(
        [*command, str(ROOT / "docs"), str(site)], capture_output=True, text=True, check=False, timeout=280
    )
    assert built.returncode == 0, built.stderr
    said_there = {"readme": "Install and run", "store": "ragged store of RL trajectories", "format": "The catalog"}
    for page, said in said_there.items():
        assert said in (site / f"{page}.html").read_text(encoding="utf-8")
    assert 'href="security.html"' in (site / "readme.html").read_text(encoding="utf-8")
    api = (site / "api.html").read_text(encoding="utf-8")
    for package in (rlhf_pipeline, trajectory_store):
        missing = [name for name in package.__all__ if f"{package.__name__}.{name}" not in api]
        assert missing == []
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in site.glob("*.html")}
    for page in site.glob("*.html"):
        tags = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"([^\"]+)\"", page.read_text(encoding="utf-8"))
        assert not [target for target in tags if target.startswith(("http:", "https:", "//"))]
