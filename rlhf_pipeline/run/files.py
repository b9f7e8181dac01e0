"""Folders that are complete or absent: replaced by rename, synced, checksummed. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import google_crc32c

from trajectory_store.new_files import sync_path

MANIFEST: Final = "files.json"
"""The file in a sealed folder with the length and the CRC32C of every other file."""

_CHUNK: Final = 1 << 22


@contextmanager
def new_folder(final: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield an empty folder to fill; at the end seal it and rename it to `final`, which it replaces.

    A kill at any moment leaves the former folder or the new one: `tidy` completes the replacement. Only one process may
    do this in one parent folder at a time.
    """
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    tidy(parent)
    temporary = parent / f".{final.name}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        _seal(temporary, sync=sync)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():
        former = parent / f".{final.name}.former"
        final.rename(former)
        temporary.rename(final)
        shutil.rmtree(former)
    else:
        temporary.rename(final)
    if sync:
        sync_path(parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder; a kill midway leaves nothing under its name."""
    shutil.rmtree(unname_folder(folder))


def unname_folder(folder: Path) -> Path:
    """Rename a folder that is to be removed, and return its new path; after a kill, `tidy` removes it."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    return folder.rename(gone)


def tidy(parent: Path) -> None:
    """Complete what a killed `new_folder` or `remove_folder` began."""
    for former in parent.glob(".*.former"):
        final = parent / former.name[1:].removesuffix(".former")
        if not final.exists():
            former.rename(final)
    for left_over in [*parent.glob(".*.tmp"), *parent.glob(".*.former"), *parent.glob(".*.gone")]:
        if left_over.is_dir():
            shutil.rmtree(left_over)


def folder_problem(folder: Path, *, checksums: bool = True) -> str | None:
    """Return what is wrong with a sealed folder, or None."""
    try:
        listed: Any = json.loads((folder / MANIFEST).read_bytes())
        files = {str(name): (int(entry["bytes"]), str(entry["crc32c"])) for name, entry in listed["files"].items()}
    except (FileNotFoundError, NotADirectoryError):
        return f"it has no {MANIFEST}, so it was never completed"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"its {MANIFEST} is damaged"
    for name, (size, checksum) in sorted(files.items()):
        file = folder / name
        try:
            current = file.stat().st_size
            if current != size:
                return f"{name} has {current:,} bytes instead of {size:,}"
            if checksums and _crc32c(file) != checksum:
                return f"the bytes of {name} differ from those that were written (its CRC32C differs)"
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return f"it has no {name}"
    return None


def folder_digest(folder: Path) -> int:
    """Return a digest of a folder's files, from 1 to 2^63 - 1."""
    digest = hashlib.blake2b((folder / MANIFEST).read_bytes(), digest_size=8).digest()
    return max(int.from_bytes(digest) >> 1, 1)


def _seal(folder: Path, *, sync: bool) -> None:
    """List the files with their checksums, give them the mode of the umask, and sync them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32c": _crc32c(path)} for path in files}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "files": entries}, indent=1), encoding="utf-8")
    mode = manifest.stat().st_mode & 0o777
    for path in files:
        path.chmod(mode)  # some libraries write files that only the owner may read
    if sync:
        for path in [*folder.rglob("*"), folder]:
            sync_path(path)


def _crc32c(file: Path) -> str:
    checksum = google_crc32c.Checksum()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            checksum.update(chunk)
    return checksum.hexdigest().decode()
