"""Say what is still to be filled in before a release is published, in a sentence each; see docs/release.md."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def open_points(root: Path) -> list[str]:
    """Return what a tree lacks: one version everywhere, a changelog of it, and where the repository is."""
    projects: dict[str, dict[str, Any]] = {}
    for name in ("pyproject.toml", "storage/pyproject.toml"):
        projects[name] = tomllib.loads((root / name).read_text(encoding="utf-8"))["project"]
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    versions = {name: project["version"] for name, project in projects.items()}
    versions["CITATION.cff"] = "".join(re.findall(r"^version: (.+)$", citation, re.M))
    found: list[str] = []
    if len(set(versions.values())) > 1:
        found.append(f"the versions differ: {', '.join(f'{name} says {said}' for name, said in versions.items())}.")
    dated = re.compile(rf"^## {re.escape(versions['pyproject.toml'])}, \d{{4}}-\d\d-\d\d$", re.M)
    if not dated.search((root / "CHANGELOG.md").read_text(encoding="utf-8")):
        found.append(f"CHANGELOG.md has no heading '## {versions['pyproject.toml']}, YEAR-MONTH-DAY'.")
    for name, project in projects.items():
        if "Repository" not in project.get("urls", {}):
            found.append(f"{name} does not say where the repository is: [project.urls] Repository = ...")
    if not re.search(r"^repository-code: ", citation, re.M):
        found.append("CITATION.cff does not say where the repository is: repository-code: ...")
    return found


if __name__ == "__main__":
    points = open_points(ROOT)
    if points:
        sys.exit("\n".join(["Not ready to be published:", *points]))
