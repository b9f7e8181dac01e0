"""TorchRL's own tests, run as they are on these classes; `README.md` says what must come out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = (HERE / "README.md").read_text(encoding="utf-8")
CHECKOUT = os.environ.get("TORCHRL_CHECKOUT", "")
SUITES = re.findall(r"^## .*`(test/\S+)::(\w+)`$", PAGE, flags=re.MULTILINE)

pytestmark = [pytest.mark.peer, pytest.mark.slow]


def section(suite: str) -> tuple[dict[str, int], dict[str, str]]:
    """What the page says of a suite: how many of each result, and the tests that do not pass."""
    text = re.split(r"^## ", PAGE.split(f"::{suite}`\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    numbers = re.findall(r"(\d+) (pass|should not|skipped|left out)\b", text.strip().splitlines()[0])
    rows = re.findall(r"^\| `([^`]+)` \| (should not|skipped|left out) \| \S", text, flags=re.MULTILINE)
    return {name: int(count) for count, name in numbers}, dict(rows)


def outcomes(report: Path) -> dict[str, str]:
    """The result of each test of a run."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        found[case.attrib["name"]] = (
            "should not" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "pass"
        )
    return found


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not CHECKOUT,
    reason="set TORCHRL_CHECKOUT to a checkout of https://github.com/pytorch/rl at commit ae9719f17",
)
@pytest.mark.parametrize(("path", "suite"), SUITES, ids=[name for _, name in SUITES])
def test_the_page_is_true_to_the_letter(path, suite, tmp_path):
    """Every test passes but those that the page lists, with a reason each, and the counts are the page's."""
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "swap", "-c", "pytest.ini", "-p", "no:cacheprovider", "-q"]
    counts, listed = section(suite)
    left_out = [name for name, result in listed.items() if result == "left out"]
    command += [f"--deselect={path}::{suite}::{name}" for name in left_out]
    command += ["-W", "ignore", f"--junitxml={report}", f"{path}::{suite}"]
    root = HERE.parents[1]
    search = os.pathsep.join([str(HERE), str(root), str(root / "storage"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        command, cwd=CHECKOUT, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True, check=False
    )
    assert report.exists(), run.stdout[-2000:] + run.stderr[-2000:]
    found = {**outcomes(report), **dict.fromkeys(left_out, "left out")}
    assert {name: result for name, result in found.items() if result != "pass"} == listed, run.stdout[-3000:]
    assert Counter(found.values()) == counts


def test_the_page_lists_the_suites():
    """All that stand beside this page's classes are there."""
    known = ["TestMCAdvantage", "TestKLTransforms", "TestLosses", "TestSFT", "TestRollout"]
    assert [name for _, name in SUITES] == known


def test_the_tests_of_ours_that_the_page_names_are_there():
    """A reason that names a test names one that exists."""
    sources = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    listed = {name.partition("[")[0] for _, suite in SUITES for name in section(suite)[1]}
    for name in set(re.findall(r"`(test_\w+)`", PAGE)) - listed:
        assert f"def {name}(" in sources, name
