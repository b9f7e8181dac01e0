"""Files and folders that appear complete: written under another name, then renamed. Imports no NumPy.

No other module of the store or of the pipeline replaces a file this way (`tests/test_files_and_locks.py`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(target: Path, *, sync: bool = False, exclusive: bool = True, parents: bool = False) -> Generator[Path]:
    """Yield a path to write a file or a folder at; at the end it replaces `target`, after an error it is removed.

    A reader, or a restart after a kill, sees the old content or the new. A folder replaces an empty folder only.

    Args:
        target: the file or folder.
        sync: sync the file, or the entries of the folder, and the rename, so that they survive a power loss.
        exclusive: only this process writes `target`; its next write replaces what a kill left. Otherwise the path has
            the process's id, and each of several processes writes a complete file.
        parents: create the folders above `target`; otherwise they exist, and one that was removed is not made again.
    """
    if parents:
        target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.tmp" if exclusive else f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(part, ignore_errors=True)
    try:
        yield part
        if sync:
            sync_path(part)
        part.replace(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(target.parent)


def write_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file so that a reader, or a restart after a crash, sees the old content or the new."""
    with new_file(path, sync=sync) as part:
        part.write_bytes(content)


def sync_path(path: Path) -> None:
    """Sync a file, or the entries of a folder, so that they survive a power loss; a missing path is ignored."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
