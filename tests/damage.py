"""What can become of a file on a disk: the one definition for every test and every sweep of damage."""

from __future__ import annotations

import random
import shutil
import zipfile
from pathlib import Path
from typing import Final

import numpy as np

from trajectory_store import TrajectoryStore

KINDS: Final = ("flip", "cut", "zero", "missing", "foreign")
BLOCK: Final = 512
"""Bytes that are zeroed at once."""


def flip(file: Path, byte: int | None = None, bit: int = 0) -> bytes:
    """Flip a bit of a file in place, of the byte in its middle if none is named; return what was there."""
    before = file.read_bytes()
    at = len(before) // 2 if byte is None else byte
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([before[at] ^ (1 << bit)]))
    return before


def flip_value(store: Path, column: str, row: int) -> None:
    """Flip a bit of a row's value in the only segment of a store, or of its last one if it has several."""
    with TrajectoryStore.open(store) as opened:
        spec = opened.schema[column]
        at = int(opened.lengths(column, opened.ids()[: row + 1]).sum()) - 1 if spec.ragged else row
    (file,) = store.glob(f"seg-*/{column}/c/0")
    flip(file, at * np.dtype(spec.dtype).itemsize)


def flip_first(segment: Path, column: str, *, is_archived: bool, number: int = 0) -> tuple[Path, bytes]:
    """Flip a bit of the first value of a column in a segment; return the file, and what was there.

    Args:
        segment: the folder of the segment.
        column: the name.
        is_archived: each commit is a zip archive, as in a segment of `zarr` that is not merged.
        number: of the commit, if they are archives.
    """
    if not is_archived:
        file = segment / column / "c" / "0"
        return file, flip(file, 2)
    file = segment / f"{number:08d}.zip"
    with zipfile.ZipFile(file) as archive:
        header = archive.getinfo(f"{column}/c/0").header_offset
    raw = file.read_bytes()
    begin = header + 30 + sum(int.from_bytes(raw[header + at : header + at + 2], "little") for at in (26, 28))
    return file, flip(file, begin + 2)


def used(file: Path) -> int:
    """How many bytes of a file hold anything: sparse files end in zeros."""
    content = file.read_bytes()
    return len(content.rstrip(b"\0")) or len(content)


def damage(file: Path, kind: str, rng: random.Random, other: Path, *, within: int | None = None) -> bool:
    """Damage a file in one of `KINDS`; return False if that changed nothing.

    Args:
        file: the file.
        kind: of the damage; `foreign` puts the file of another store or run in its place.
        rng: draws where.
        other: the file that a foreign one is copied from.
        within: so many bytes of it, from the first; by default all.
    """
    before = file.read_bytes()
    if kind == "missing":
        file.unlink()
        return True
    if kind == "foreign":
        if not other.is_file() or other.read_bytes() == before:
            return False
        shutil.copyfile(other, file)
        return True
    if not before:
        return False
    after, end = bytearray(before), len(before) if within is None else within
    at = rng.randrange(end)
    if kind == "flip":
        after[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del after[at:]
    else:
        after[at : at + BLOCK] = bytes(len(after[at : at + BLOCK]))
    file.write_bytes(after)
    return bytes(after) != before
