"""A sample of the damages of `tests/crash/run_damage.py`."""

from __future__ import annotations

import pytest

from tests.crash._play import play
from tests.crash.run_damage import RUNS

pytestmark = pytest.mark.crash
SHORT = ("lake", "several")
"""A run in one process with an environment, and one of several processes: the rest runs at night."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.nightly]) for name in RUNS]
)
def test_a_run_with_a_damaged_file_continues_correctly_or_reports_the_damage(name):
    """The weights of the whole run, or an error that is a sentence; nothing differs in silence."""
    play("run_damage", name, "--count", "6", "--seed", "1")
