"""What the documents show is run."""

from __future__ import annotations

import ast
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
PAGES = [*READMES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


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


def test_the_house_is_as_drawn():
    """Every package of `rlhf_pipeline` is in the drawing of docs/architecture.md, and everything drawn is there."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (drawing,) = re.findall(r"## The house\n\n```\n(.*?)```", text, flags=re.DOTALL)
    drawn = {name for line in drawing.splitlines() for name in re.findall(r"^  (\w+/)", line)}
    there = {f"{path.parent.name}/" for path in (ROOT / "rlhf_pipeline").glob("*/__init__.py")}
    assert drawn == there


@pytest.mark.parametrize("page", ["README.md", "docs/coming_from.md"])
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


@pytest.mark.parametrize(("page", "least"), [("README.md", 3), ("storage/README.md", 1)])
def test_python_blocks_of_the_readmes(page, least):
    """Every Python block of a README runs, in order, in one namespace each."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= least
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": "readme"})


def test_python_on_the_pages(tmp_path, monkeypatch):
    """What the pages for users define is taken as it stands; the prompts come from files as the pages name them."""
    pyarrow = pytest.importorskip("pyarrow", reason="the pages read Parquet files")
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("train", "test", "maths"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    rows = [{"prompt": "1 + 1?", "answer": "2", "reward_model": {"ground_truth": "2"}}]
    for name in ("code", "data/part-0"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), f"{name}.parquet")
    match = rlhf_pipeline.token_match
    given = {"dataset": [{"prompt": "1 + 1?", "messages": [{"role": "user", "content": "1 + 1?"}]}]}
    shown, made = {}, []
    for page in ("prompts", "rewards", "evaluation", "environments", "coming_from"):
        shown[page] = space = {"__name__": page, "my_reward": match, "brief": match, "made": made, **given}
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            for statement in ast.parse(block).body:
                code = ast.unparse(statement)
                exec(f"made.append({code})" if isinstance(statement, ast.Expr) else code, space)
    assert ["1 + 1?" in str(prompts.prompt(0, 0)) for prompts in made] == [True] * 4
    assert shown["coming_from"]["main"]().collect.group_size == 8
