"""Where a run is kept: a folder, or a place in an object store. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

BESIDE: Final = "RLHF_PIPELINE_BESIDE"
"""The environment variable with the folder in which a supervisor on this machine looks for locks and heartbeats."""

Address = Path | str
"""A folder, or a URL such as `s3://bucket/run`."""


def is_url(place: Address) -> bool:
    """Return whether this names a place in an object store."""
    return isinstance(place, str) and "://" in place and not place.startswith("file://")


def address_of(text: Address) -> Address:
    """Return a typed address as a URL, or as the path of a folder.

    >>> address_of("s3://bucket/run/"), address_of("runs/mine")
    ('s3://bucket/run', PosixPath('runs/mine'))
    """
    if isinstance(text, str) and is_url(text):
        return text.rstrip("/")
    return Path(str(text).removeprefix("file://")).expanduser()


def absolute(place: Address) -> Address:
    """Return a folder's absolute path, with its links; a URL is absolute."""
    return place.absolute() if isinstance(place, Path) else place


def resolved(place: Address) -> Address:
    """Return a folder's absolute path, without links; a URL has none."""
    return place.resolve() if isinstance(place, Path) else place


def below(place: Address, name: str) -> Address:
    """Return the address of something in a folder, or below a URL."""
    return place / name if isinstance(place, Path) else f"{place}/{name}"
