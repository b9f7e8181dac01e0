"""Pages, docstrings and comments name files, modules and tests that exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("rlhf_pipeline", "storage", "trajectory_store", "tests", "benchmarks", "pipelines", "docs", "deploy", ".ci")
ROOTED = re.compile(rf"(?<![\w./:$-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*[\w/](?:::\w+)*")
QUOTED = re.compile(r"`([\w.-]+(?:/[\w.-]+)*\.py)((?:::\w+)*)(?:\[[^`]*\])?`")
MODULE = re.compile(r"`((?:rlhf_pipeline|trajectory_store|tests|benchmarks|pipelines)(?:\.\w+)+)(?:\(\))?`")
TEST = re.compile(r"`(?:\w+::)*(test_\w+)`")
OF_OTHERS = ("tests/peers/README.md",)
"""Names TorchRL's tests."""


def test_files_that_prose_names_exist():
    """A path from the root of the repository, with its test if it names one."""
    assert not [*_missing(ROOTED, _rooted_exists)]


def test_files_named_from_their_package_exist():
    """A quoted path whose first folder is one of ours, as `transforms/groups.py`, and a quoted file name in code."""
    assert not [*_missing(QUOTED, _quoted_exists)]


def test_modules_that_prose_names_exist():
    """A quoted module path, and the name in it."""
    assert not [*_missing(MODULE, lambda match, _: _module_has(match[1].split(".")))]


def test_tests_that_prose_names_exist():
    """A quoted name of a test, or of a file of tests without its suffix."""
    stems = {path.stem for path in _files() if path.name.startswith("test_")}
    assert not [*_missing(TEST, lambda match, page: page in OF_OTHERS or match[1] in stems | _test_names())]


@pytest.mark.parametrize(
    "sentence",
    [
        "as tests/test_missing.py shows",
        "`tests/test_named_paths.py::test_missing`",
        "see docs/missing.md.",
        "`transforms/missing.py`",
        "`rlhf_pipeline.run.missing`",
        "`rlhf_pipeline.run.folder.Missing`",
        "`test_that_was_renamed_since`",
    ],
)
def test_a_wrong_name_is_reported(sentence: str):
    """Each kind of name is checked; the other names in the sentence exist."""
    rest = (
        "See tests/test_docs.py, docs/prompts.md, `run/folder.py`, `rlhf_pipeline.run.folder.RunFolder`, `test_docs`."
    )
    page = "rlhf_pipeline/page.py"
    checks: list[tuple[re.Pattern[str], Callable[[re.Match[str], str], bool]]] = [
        (ROOTED, _rooted_exists),
        (QUOTED, _quoted_exists),
        (MODULE, lambda match, _: _module_has(match[1].split("."))),
        (TEST, lambda match, _: match[1] in _test_names() | {"test_docs"}),
    ]
    for text, expected in ((rest, 0), (f"{rest} {sentence}", 1)):
        missing = {
            match[0].strip("`") for names, exists in checks for match in names.finditer(text) if not exists(match, page)
        }
        assert len(missing) == expected, missing


def _missing(names: re.Pattern[str], exists: Callable[[re.Match[str], str], bool]) -> Iterator[str]:
    for page, text in _pages().items():
        for match in names.finditer(text):
            if not exists(match, page):
                yield f"{page}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"


def _rooted_exists(match: re.Match[str], page: str) -> bool:
    path, *names = match[0].split("::")
    files = [folder / path for folder in (ROOT, ROOT / "storage", ROOT / "tests") if (folder / path).exists()]
    return _is_placeholder(path) or any(all(_has_test(file, name) for name in names) for file in files)


def _quoted_exists(match: re.Match[str], page: str) -> bool:
    path, names = match[1], match[2].split("::")[1:]
    first = path.partition("/")[0]
    is_ours = first in _folder_names() if "/" in path else path.startswith("test_")
    if not is_ours or _is_placeholder(path) or page in OF_OTHERS:
        return True
    matching = (ROOT / file for file in _pages() if f"/{file}".endswith(f"/{path}"))
    return any(all(_has_test(file, name) for name in names) for file in matching)


def _module_has(parts: list[str]) -> bool:
    for length in range(len(parts), 0, -1):
        for start in (ROOT, ROOT / "storage"):
            module = start.joinpath(*parts[:length])
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.exists():
                    return length == len(parts) or _has_word(file, parts[length])
            if module.is_dir():
                return length == len(parts)
    return False


def _is_placeholder(path: str) -> bool:
    return any(part and part.isupper() for part in re.split(r"[/.]", path))


@cache
def _has_test(file: Path, name: str) -> bool:
    return re.search(rf"\b(?:def|class) {name}\b", file.read_text(encoding="utf-8")) is not None


@cache
def _has_word(file: Path, name: str) -> bool:
    return re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) is not None


@cache
def _pages() -> dict[str, str]:
    """Return the texts whose names are checked: pages of every folder, and the code of the packages and the tests."""
    paths = [path for path in _files() if path.suffix in (".md", ".py") and path.name != Path(__file__).name]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@cache
def _files() -> tuple[Path, ...]:
    folders = [ROOT / name for name in FOLDERS if (ROOT / name).is_dir()]
    inside = (
        path for folder in folders for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return (*ROOT.glob("*.md"), *inside)


@cache
def _folder_names() -> frozenset[str]:
    return frozenset(path.parent.name for path in _files() if path.suffix == ".py")


@cache
def _test_names() -> frozenset[str]:
    return frozenset(
        name
        for page, text in _pages().items()
        if page.startswith("tests/")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, flags=re.MULTILINE)
    )
