"""What stands between the tree and a release is said by one command, and is what docs/release.md says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rlhf_pipeline
import trajectory_store

ROOT = Path(__file__).resolve().parents[1]
FILES = ("pyproject.toml", "storage/pyproject.toml", "CITATION.cff", "CHANGELOG.md", ".ci/release_ready.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that a release fills in."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def points(tree: Path) -> list[str]:
    """What the command says, and that it fails if it says something."""
    done = subprocess.run([sys.executable, tree / FILES[-1]], capture_output=True, text=True, check=False)
    assert done.returncode == bool(done.stderr)
    return done.stderr.splitlines()[1:]


def fill_in(tree: Path) -> None:
    """Give the files an address and a date."""
    for name in FILES[:2]:
        with (tree / name).open("a") as file:
            file.write('\n[project.urls]\nRepository = "https://example.org/repository"\n')
    with (tree / "CITATION.cff").open("a") as file:
        file.write("repository-code: https://example.org/repository\n")
    changes = (tree / "CHANGELOG.md").read_text()
    (tree / "CHANGELOG.md").write_text(changes.replace("not released yet", "2027-01-31"))


def test_a_release_is_held_up_by_what_is_not_filled_in(tree: Path):
    """Today by the address, which nobody knows, and the date; filled in, by nothing; and by versions that differ."""
    said = points(tree)
    assert not any("versions differ" in line for line in said)
    if "\n[project.urls]\n" not in (ROOT / "pyproject.toml").read_text():
        assert [line.split(" does not")[0] for line in said if "repository is" in line] == list(FILES[:3])
        fill_in(tree)
    assert points(tree) == []
    citation = tree / "CITATION.cff"
    citation.write_text(citation.read_text().replace("version: 0.1.0", "version: 0.2.0"))
    assert points(tree) == [
        "the versions differ: pyproject.toml says 0.1.0, storage/pyproject.toml says 0.1.0, CITATION.cff says 0.2.0."
    ]


def test_the_packages_have_the_versions_of_their_distributions():
    """`__version__` of both."""
    for package, file in zip((rlhf_pipeline, trajectory_store), FILES, strict=False):
        assert f'\nversion = "{package.__version__}"\n' in (ROOT / file).read_text(encoding="utf-8")


def test_the_stores_sdist_has_what_its_tests_import():
    """The tests of the store are beside those of the pipeline: its distribution lists the helpers one by one."""
    build = tomllib.loads((ROOT / "storage" / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    included = [ROOT / "storage" / file for file in build["targets"]["sdist"]["force-include"]]
    files = [file for path in included for file in (path.rglob("*.py") if path.is_dir() else [path])]
    assert len(files) > 50
    imported = {
        ROOT / f"{name.replace('.', '/')}.py"
        for file in files
        for name in re.findall(r"^\s*from (tests\.[\w.]+) import", file.read_text(encoding="utf-8"), flags=re.M)
    }
    assert imported
    assert imported - {file.resolve() for file in files} == set()
