"""Decompression of other tools' files: gzip and zstd, recognised by their first bytes."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, cast

from rlhf_pipeline.data.optional_packages import need
from rlhf_pipeline.errors import DataError

GZIP: Final = b"\x1f\x8b"
ZSTD: Final = b"\x28\xb5\x2f\xfd"
SUFFIXES: Final = (".gz", ".zst")
"""Suffixes of compressed files, which follow the suffix of the format."""
_CHUNK_BYTES: Final = 1 << 20


def is_compressed(path: Path) -> bool:
    """Return whether a file starts like a gzip or zstd file."""
    with path.open("rb") as file:
        head = file.read(4)
    return head.startswith((GZIP, ZSTD))


@contextmanager
def decompressed(path: Path, *, growing: bool = False) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if it is a gzip or zstd file.

    Args:
        path: the file.
        growing: the writer may still append: an incomplete last frame ends the file silently.

    Raises:
        DataError: the compressed data is corrupted, or incomplete and not growing.
        DefinitionError: the file is a zstd file and `zstandard` is not installed.
    """
    kind = "gzip"
    try:
        with path.open("rb") as packed:
            head = packed.read(4)
            packed.seek(0)
            if head.startswith(ZSTD):
                kind = "zstd"
                yield cast("IO[bytes]", io.BufferedReader(_ZstdFrames(packed), _CHUNK_BYTES))
            elif head.startswith(GZIP):
                with gzip.GzipFile(fileobj=packed) as file:
                    yield cast("IO[bytes]", file)
            else:
                yield packed
    except EOFError as error:
        if not growing:
            raise DataError(f"{path} is an incomplete {kind} file: {error}. Download or write it again.") from error
    except (gzip.BadGzipFile, zlib.error, ZstdDataError) as error:
        raise DataError(f"{path} is a corrupted {kind} file: {error}. Download or write it again.") from error


class ZstdDataError(ValueError):
    """Compressed data is not valid zstd."""


class _ZstdFrames(io.RawIOBase):
    """The decompressed bytes of consecutive zstd frames, including skippable ones such as a seek table.

    A reader of the library ends silently where the last frame is incomplete; this one raises EOFError.
    """

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed, self._zstd = packed, need("zstandard")
        self._frame: Any = None
        self._rest, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - any writable buffer
        while not self._output:
            packed = self._rest or self._packed.read(_CHUNK_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("its last frame is incomplete")
                return 0
            if self._frame is None:
                self._frame = self._zstd.ZstdDecompressor().decompressobj()
            try:
                self._output = memoryview(self._frame.decompress(packed))
            except self._zstd.ZstdError as error:
                raise ZstdDataError(str(error)) from error
            self._rest = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
