"""The short form of `histories.py`: random histories with kills, on each medium.

Set `STORE_HISTORIES=60` and `STORE_KILLS=600` for the long one, `STORE_SEED` for others.
"""

from __future__ import annotations

import os

import pytest

from tests.crash._play import play
from tests.crash._s3 import missing

HISTORIES = int(os.environ.get("STORE_HISTORIES", "4"))
KILLS = int(os.environ.get("STORE_KILLS", "40"))
SEED = int(os.environ.get("STORE_SEED", "0"))


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("medium", ["memmap", "zarr", "s3"])
def test_nothing_acknowledged_is_lost_doubled_stale_or_torn(medium):
    """1 to 4 processes that do anything at any moment, killed and stopped, with clocks hours apart."""
    if medium == "s3" and (why := missing()):
        pytest.skip(why)
    share = 1 if medium != "s3" else 4  # each request takes 20 ms and more
    kills = str(KILLS // share)
    said = play(
        *("histories", "--medium", medium, "--histories", str(max(1, HISTORIES // share))),
        *("--kills", kills, "--seed", str(SEED)),
    )
    print(said.splitlines()[-1:])  # noqa: T201
