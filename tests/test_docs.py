"""What the documents show is run."""

from __future__ import annotations

import doctest
import importlib
import inspect
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


READMES = [ROOT / "README.md", ROOT / "storage" / "README.md"]
OTHER_PAGES = ["CHANGELOG.md", "SECURITY.md", ".github/CONTRIBUTING.md", "storage/FORMAT.md", "benchmarks/README.md"]
PAGES = [*READMES, *(ROOT / page for page in OTHER_PAGES), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Each link of a page names a file that is there, and a heading in it where it names one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE) if heading else []
        slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not heading or heading in slugs, target


def test_the_packages_are_as_drawn():
    """Every package of `rlhf_pipeline` is in the drawing of docs/architecture.md, and everything drawn is there."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (drawing,) = re.findall(r"## Packages\n\n```\n(.*?)```", text, flags=re.DOTALL)
    drawn = {name for line in drawing.splitlines() for name in re.findall(r"^  (\w+/)", line)}
    there = {f"{path.parent.name}/" for path in (ROOT / "rlhf_pipeline").glob("*/__init__.py")}
    assert drawn == there


@pytest.mark.parametrize("page", ["docs/tour.md", "docs/coming_from.md"])
def test_options_that_are_mapped_to_ours_exist(page):
    """What the last column of a table of other trainers' options names is in the definition, with a value it takes."""
    rows = re.findall(r"^\|(?!-).*\| ([^|\n]*) \|$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    ours = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    base = rlhf_pipeline.Pipeline(
        name="mapped",
        policy=rlhf_pipeline.TinyPolicy(),
        prompts=rlhf_pipeline.CopyDigits(),
        reward=rlhf_pipeline.token_match,
    )
    fields = [re.fullmatch(r"(collect|write|buffer|sample|loss|learn)\.(\w+)(?:=(\w+))?", text) for text in ours]
    for section, name, value in (found.groups() for found in fields if found):
        assert hasattr(getattr(base, section), name), f"{section}.{name}"
        if value:
            assert getattr(getattr(rlhf_pipeline.override(base, f"{section}.{name}", value), section), name) == value
    calls = [found for text in ours for found in re.findall(r"\b([A-Z]\w+)\(([^()]*)", text)]
    for name, arguments in calls:
        taken = inspect.signature(getattr(rlhf_pipeline, name)).parameters
        assert set(re.findall(r"(\w+)=", arguments)) <= set(taken), name
    assert len(calls) >= 4
