"""Members of zip archives, including those that a writer compressed with zstd."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Final

from rlhf_pipeline.data.optional_packages import need
from rlhf_pipeline.errors import DataError

_ZSTD_METHOD: Final = 93
"""The method of APPNOTE 6.3.8; the zipfile module reads it from Python 3.14 on."""
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
"""The lengths of the name and of the extra field in a member's local header, which precede its data."""


def open_archive(path: Path) -> zipfile.ZipFile:
    """Open a zip archive.

    Raises:
        DataError: the file is not a complete zip archive.
    """
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise DataError(f"{path} is not a complete zip archive: {error}. Download or write it again.") from error


def open_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    """Open a member for reading, decompressed.

    Raises:
        DataError: the member is encrypted, its compression method is unknown, or its data is corrupted.
        DefinitionError: it is compressed with zstd, and `zstandard` is not installed.
    """
    where = f"{archive.filename}/{member.filename}"
    try:
        if member.compress_type != _ZSTD_METHOD:
            return archive.open(member)
        data = _unpacked(archive, member)
    except (RuntimeError, zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise DataError(f"{where} cannot be unpacked: {error}.") from error
    if zlib.crc32(data) != member.CRC:
        raise DataError(f"{where} does not match its checksum: the archive is corrupted. Download or write it again.")
    return io.BytesIO(data)


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    zstandard = need("zstandard")
    with Path(str(archive.filename)).open("rb") as file:
        file.seek(member.header_offset)
        name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        file.seek(name + extra, 1)
        packed = file.read(member.compress_size)
    try:
        return zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(packed)
    except zstandard.ZstdError as error:
        raise zipfile.BadZipFile(str(error)) from error
