"""What a package index shows of a distribution: it has no files beside the README."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trajectory_store import __version__

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://example.org/owner/repository"
LINK = re.compile(r"\]\(([^)\s]+)|^\[[^\]]+\]:\s*(\S+)|(?:src|href)=[\"']?([^\"'\s>]+)", re.M)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What builds the metadata of both distributions, with the address that a release fills in."""
    tree = tmp_path_factory.mktemp("released")
    (tree / "storage").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "index_readme.py"):
        for file in (Path(name), Path("storage", name)):
            if (ROOT / file).exists():
                shutil.copyfile(ROOT / file, tree / file)
    for name in ("pyproject.toml", "storage/pyproject.toml"):
        text = (tree / name).read_text(encoding="utf-8")
        if "\n[project.urls]\n" in text:
            text = re.sub(r"^Repository = .*$", f'Repository = "{REPOSITORY}"', text, flags=re.M)
        else:
            text += f'\n[project.urls]\nRepository = "{REPOSITORY}"\n'
        (tree / name).write_text(text, encoding="utf-8")
    return tree


def readme(folder: Path) -> str:
    """What the built metadata has as the description."""
    command = [sys.executable, "-m", "hatchling", "metadata"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(built.stdout)["readme"]["text"]


@pytest.mark.parametrize("folder", [".", "storage"])
def test_links_work_on_a_package_index(released: Path, folder: str):
    """Each link is an address; those into the repository lead to a file at the tag of the version."""
    text = readme(released / folder)
    links = ["".join(groups) for groups in LINK.findall(text)]
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    for link in links:
        if link.startswith(REPOSITORY):
            view, path = re.fullmatch(rf"{REPOSITORY}/(blob|raw)/v{__version__}/([^#]+)(?:#.+)?", link).groups()
            assert (ROOT / path).is_file(), link
            assert (view == "raw") == path.endswith(".png")
    source = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    assert re.sub(r"\([^)\s]+\)", "()", text) == re.sub(r"\([^)\s]+\)", "()", source)  # nothing else changes


@pytest.mark.parametrize("folder", [".", "storage"])
def test_without_an_address_the_readme_is_unchanged(released: Path, folder: str, tmp_path: Path):
    """Nobody has published this yet; an address that does not exist would be worse than none."""
    shutil.copytree(released, tmp_path / "clone")
    for file in (tmp_path / "clone").rglob("pyproject.toml"):
        file.write_text(
            re.sub(r"^Repository = .*$", "", file.read_text(encoding="utf-8"), flags=re.M), encoding="utf-8"
        )
    assert readme(tmp_path / "clone" / folder) == (ROOT / folder / "README.md").read_text(encoding="utf-8")
