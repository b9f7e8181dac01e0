"""The commit object of the zarr backend: what is put last, and says that the arrays beside it count."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajectory_store.errors import CorruptionError, StoreError
from trajectory_store.format import read_attributes
from trajectory_store.record import crc32c
from trajectory_store.writer import segment_name

_SOME = Path("zarr.json")
_CANONICAL = json.JSONEncoder(sort_keys=True)


@dataclass(frozen=True)
class Commit:
    """One commit of a segment.

    Attributes:
        seq: its number, from 0.
        time_ns: when.
        rows_end: rows of the segment after it.
        n_rows: its rows; 0 marks the end of the segment.
        ends: elements per axis after it.
        crc: CRC32C of the values of each array, before compression.
    """

    seq: int
    time_ns: int
    rows_end: int
    n_rows: int
    ends: dict[str, int]
    crc: dict[str, int]

    @classmethod
    def from_json(cls, raw: bytes, key: str) -> Commit:
        """Parse the zarr.json of a commit's group."""
        try:
            attributes = read_attributes(raw, _SOME, "commit")
        except StoreError:
            read_attributes(raw, Path(key), "commit")  # says the same with its name
            raise
        try:
            sealed = int(attributes.pop("self_crc"))
            if sealed != attributes_crc(attributes):
                raise CorruptionError(f"{key} is damaged: its own checksum does not hold.")
            return cls(
                int(attributes["seq"]),
                int(attributes["time_ns"]),
                int(attributes["rows_end"]),
                int(attributes["n_rows"]),
                {str(k): int(v) for k, v in attributes["ends"].items()},
                {str(k): int(v) for k, v in attributes["crc"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptionError(f"{key}: the attribute {error} is missing or damaged.") from None


def attributes_crc(attributes: dict[str, Any]) -> int:
    """CRC32C of JSON attributes in their canonical form."""
    return crc32c(_CANONICAL.encode(attributes).encode())


def commit_key(ordinal: int, seq: int) -> str:
    """The group of a commit."""
    return f"{segment_name(ordinal)}/{seq:08d}"
