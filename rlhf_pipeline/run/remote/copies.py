"""A process's local copy of the parts of a run that it needs: a folder that is removed with the process."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

from trajectory_store.locks import try_lock

CACHE: Final = "RLHF_PIPELINE_CACHE"
"""The environment variable with the folder for copies; by default the system's temporary folder."""
_PREFIX: Final = "rlhf-pipeline-"
_LOCK: Final = ".in-use"


def new_copy(owner: object, url: str = "") -> Path:
    """Make an empty folder that is removed with its owner; also remove the folders of killed processes.

    Args:
        owner: the folder lives as long as this object.
        url: of the run that is copied, by which other processes on this machine find the folder.
    """
    parent = _parent()
    parent.mkdir(parents=True, exist_ok=True)
    for sibling in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), (sibling / _LOCK).open("rb") as file:
            if try_lock(file):
                shutil.rmtree(sibling, ignore_errors=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        if try_lock(lock) and (folder / _LOCK).exists():
            os.write(lock, url.encode())
            weakref.finalize(owner, _remove, folder, lock)
            return folder
        os.close(lock)  # another starting process locked the folder first, and took it for a dead process's


def copies_of(url: str) -> list[Path]:
    """Return the copies that processes on this machine have of a run; those of killed processes are among them."""
    copies = []
    for folder in _parent().glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if (folder / _LOCK).read_bytes() == url.encode():
                copies.append(folder)
    return copies


def _parent() -> Path:
    return Path(os.environ.get(CACHE) or tempfile.gettempdir())


def _remove(folder: Path, lock: int) -> None:
    os.close(lock)
    shutil.rmtree(folder, ignore_errors=True)
