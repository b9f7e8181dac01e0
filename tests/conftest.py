"""Shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command does: no spinning threads beside other tests

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The folder with the GSM8K files; skips where it is not beside the checkout."""
    folder = ROOT.parent / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"the GSM8K files are not at {folder}")
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-sweep", action="store_true", help="kill at every file-system call, not at a few of them")
