"""The short form of `histories.py`: random histories with kills, on each medium.

Set `STORE_HISTORIES=60` and `STORE_KILLS=600` for the long one, `STORE_SEED` for others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ._s3 import missing

ROOT = Path(__file__).resolve().parents[2]
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
    played = subprocess.run(
        [
            *(sys.executable, str(ROOT / "tests" / "crash" / "histories.py"), "--medium", medium),
            *("--histories", str(max(1, HISTORIES // share)), "--kills", str(KILLS // share), "--seed", str(SEED)),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT / "storage"), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(played.stdout.splitlines()[-1:])  # noqa: T201
    assert played.returncode == 0, played.stdout[-6000:] + played.stderr[-3000:]
