"""The short form of `soak.py`: a supervised run in trouble, with commands that look at it."""

from __future__ import annotations

import pytest

from tests.crash._play import play


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("effects", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_forty_seconds_of_trouble(tmp_path, effects):
    """No prompt lost or repeated, every step once, nothing acknowledged lost, and every command beside it succeeds.

    Of conversations with effects outside, on frozen lakes, none that was stored is begun again.
    """
    quick = ["--minutes", "0.9", "--seed", "7", "--quiet-steps", "0", "--no-goal", "--out", str(tmp_path / "run")]
    assert "all met" in play("soak", *quick, *(["--effects"] if effects else []))
