"""How a test plays one of the programs beside it: in a process of its own, as a person who types the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def play(name: str, *arguments: str) -> str:
    """Run a program of this folder and return what it printed; it must end with 0.

    Those that fork need it: whoever has run other tests has threads, and a lock that one of them holds stays held in
    the fork for ever.
    """
    played = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'storage'}", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert played.returncode == 0, f"{played.stdout[-6000:]}\n{played.stderr[-3000:]}"
    return played.stdout
