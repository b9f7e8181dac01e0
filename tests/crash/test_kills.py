"""The short form of `kills.py`: each way to run killed a few times, and each way to start and go on at a few calls."""

from __future__ import annotations

import shutil

import pytest

from tests.crash.kills import main

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler to count calls with"),
]


def test_a_killed_run_ends_like_the_straight_one(capfd):
    """Weights, moments, random numbers, metrics, ledger, rows and `diff` are equal, whatever the settings."""
    assert main(["resume", "--kills", "3"]) == 0, capfd.readouterr()


def test_a_kill_at_any_call_is_continued_from(capfd):
    """A run, a learner, one with two collectors, and their supervisor, some killed twice: nothing is lost."""
    assert main(["sweep", "--points", "4"]) == 0, capfd.readouterr()
