"""Shared fixtures."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Children

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command does: no spinning threads beside other tests

# A shell that starts pytest in the background, as .ci/run does, has it ignore Ctrl-C, and nohup a hang-up. Commands
# under test inherit that: those that a test interrupts would never end.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The folder with the GSM8K files; skips where it is not beside the checkout."""
    folder = ROOT.parent / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"the GSM8K files are not at {folder}")
    return folder


@pytest.fixture
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """The processes that a test starts; none outlives it."""
    with Children(tmp_path_factory.mktemp("children")) as started:
        yield started


def pytest_collection_finish() -> None:
    """Hide what imports and the collection of tests have made, for good, from the garbage collector's full passes."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-sweep", action="store_true", help="the long form of tests that kill processes")
