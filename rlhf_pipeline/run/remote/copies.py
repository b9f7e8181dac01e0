"""A process's local copy of the parts of a run that it needs: a folder that is removed with the process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

CACHE: Final = "RLHF_PIPELINE_CACHE"
"""The environment variable with the folder for copies; by default the system's temporary folder."""
_PREFIX: Final = "rlhf-pipeline-"
_LOCK: Final = ".in-use"


def new_copy(owner: object) -> Path:
    """Make an empty folder that is removed with its owner; also remove the folders of killed processes."""
    parent = Path(os.environ.get(CACHE) or tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    for sibling in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), (sibling / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(sibling, ignore_errors=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            weakref.finalize(owner, _remove, folder, lock)
            return folder
        os.close(lock)  # another starting process locked the folder first, and took it for a dead process's


def _remove(folder: Path, lock: int) -> None:
    os.close(lock)
    shutil.rmtree(folder, ignore_errors=True)
