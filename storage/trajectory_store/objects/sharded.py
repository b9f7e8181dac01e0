"""The arrays of a merged segment: sharded and compressed, so that any Zarr reader reads them in large pieces.

A shard holds the compressed inner chunks one after another, then their index: the offset and size of each chunk as two
u64 (all ones for a chunk that holds only fill values), and the CRC32C of these.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store.bucket import Bucket
from trajectory_store.errors import CorruptionError
from trajectory_store.format import ArraySpec, crc32c, spec_json
from trajectory_store.objects.archive import decode, zstd
from trajectory_store.ragged import Int64Array

CHUNK = 1 << 15
CHUNKS = 128
"""Elements per inner chunk, and inner chunks per shard."""

SEALED_LEVEL = 3
"""zstd level; the values are written once and read often."""

INDEX_SIZE = 16 * CHUNKS + 4
_EMPTY = (1 << 64) - 1


def sharded_json(spec: ArraySpec) -> bytes:
    """The zarr.json of a sharded array."""
    doc: Any = json.loads(spec_json(spec))
    inner = [*doc["codecs"], {"name": "zstd", "configuration": {"level": SEALED_LEVEL, "checksum": False}}]
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    doc["chunk_grid"]["configuration"]["chunk_shape"] = [CHUNK * CHUNKS, *spec.shape]
    doc["codecs"] = [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [CHUNK, *spec.shape],
                "codecs": inner,
                "index_codecs": index,
                "index_location": "end",
            },
        }
    ]
    return json.dumps(doc, indent=1).encode()


def shard_key(folder: str, spec: ArraySpec, number: int) -> str:
    """The object of a shard."""
    return f"{folder}/{spec.name}/c/{'/'.join(map(str, (number, *(0 for _ in spec.shape))))}"


def shards(folder: str, spec: ArraySpec) -> list[str]:
    """The objects of an array."""
    return [shard_key(folder, spec, i) for i in range(-(-spec.capacity // (CHUNK * CHUNKS)))]


class ShardWriter:
    """Writes one array in order."""

    def __init__(self, folder: str, spec: ArraySpec, put: Callable[[str, bytes], None]) -> None:
        self._folder = folder
        self._spec = spec
        self._put = put
        self._width = spec.itemsize // spec.dtype.itemsize
        self._waiting: list[npt.NDArray[Any]] = []
        self._count = 0
        self._chunks: list[bytes] = []
        self._shards = 0
        self._total = 0
        self.crc = ""
        """The CRC32C of the values of each chunk, eight hexadecimal digits each."""

    def write(self, values: npt.NDArray[Any]) -> None:
        """Append values."""
        self._waiting.append(values)
        self._count += len(values)
        self._total += len(values)
        size = CHUNK * self._width
        if self._count >= size:
            whole = np.concatenate(self._waiting)
            for first in range(0, len(whole) - size + 1, size):
                self._add(whole[first : first + size], size)
            rest = whole[len(whole) - len(whole) % size :]
            self._waiting, self._count = [rest], len(rest)

    def _add(self, chunk: npt.NDArray[Any], count: int) -> None:
        self.crc += f"{crc32c(chunk[:count].view(np.uint8)):08x}"
        self._chunks.append(bytes(zstd(SEALED_LEVEL).encode(np.ascontiguousarray(chunk))))
        if len(self._chunks) == CHUNKS:
            self._end_shard()

    def _end_shard(self) -> None:
        if not self._chunks:
            return
        index = np.full((CHUNKS, 2), _EMPTY, "<u8")
        sizes = np.array([len(c) for c in self._chunks], "<u8")
        index[: len(sizes), 0] = np.cumsum(sizes) - sizes
        index[: len(sizes), 1] = sizes
        raw = index.tobytes()
        data = b"".join([*self._chunks, raw, crc32c(raw).to_bytes(4, "little")])
        self._put(shard_key(self._folder, self._spec, self._shards), data)
        self._chunks = []
        self._shards += 1

    def finish(self) -> None:
        """Write the remaining values, and the metadata."""
        rest = np.concatenate(self._waiting) if self._waiting else np.empty(0, self._spec.dtype)
        if len(rest):
            last = np.full(CHUNK * self._width, self._spec.fill, self._spec.dtype)
            last[: len(rest)] = rest
            self._add(last, len(rest))
        self._end_shard()
        spec = self._spec._replace(capacity=self._total // self._width)
        self._put(f"{self._folder}/{self._spec.name}/zarr.json", sharded_json(spec))


def read_chunks(
    bucket: Bucket,
    objects: Mapping[str, bytes],
    folder: str,
    spec: ArraySpec,
    crc: str,
    chunks: Sequence[int],
    indexes: dict[str, Int64Array],
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Get some inner chunks of an array, each checked; adjacent ones are requested together."""
    asked = {shard: list(some) for shard, some in itertools.groupby(chunks, lambda chunk: chunk // CHUNKS)}
    keys = {shard: shard_key(folder, spec, shard) for shard in asked}
    unknown = [key for key in keys.values() if key not in indexes and key not in objects]
    ends = zip(unknown, bucket.tails(unknown, [INDEX_SIZE] * len(unknown)), strict=True)
    for key, found in [*((key, (raw[-INDEX_SIZE:], len(raw))) for key, raw in objects.items()), *ends]:
        if found is None:
            raise FileNotFoundError(key)
        indexes[key] = _index(key, *found)
    for shard, some in asked.items():
        places = indexes[keys[shard]][[chunk % CHUNKS for chunk in some]]
        first = np.flatnonzero(np.append(True, places[1:, 0] != places[:-1, 1]))
        last = np.append(first[1:], len(some)) - 1
        spans = list(zip(places[first, 0].tolist(), places[last, 1].tolist(), strict=True))
        whole = objects.get(keys[shard])
        parts = bucket.ranges(keys[shard], spans) if whole is None else [whole[start:end] for start, end in spans]
        packed = dict(zip(first.tolist(), parts, strict=True))
        raw, begin = b"", 0
        for i, chunk in enumerate(some):
            start, end = places[i].tolist()
            if i in packed:
                raw, begin = packed[i], start
            packed_values, used = raw[start - begin : end - begin], (spec.capacity - chunk * CHUNK) * spec.itemsize
            where, expected = f"object {keys[shard]}, chunk {chunk % CHUNKS},", int(crc[8 * chunk : 8 * chunk + 8], 16)
            yield chunk, decode(packed_values, CHUNK * spec.itemsize, expected, where, used).view(spec.dtype)


def _index(key: str, tail: bytes, size: int) -> Int64Array:
    """Return where each chunk of a shard begins and ends, 0 and 0 for a missing one: `[CHUNKS, 2]`."""
    if len(tail) != INDEX_SIZE or crc32c(tail[:-4]) != int.from_bytes(tail[-4:], "little"):
        raise CorruptionError(f"object {key} is damaged: its index does not match its checksum.")
    index = np.frombuffer(tail[:-4], "<u8").reshape(-1, 2)
    there = (index[:, 0] <= size) & (index[:, 1] <= size)
    return np.where(there[:, None], np.stack([index[:, 0], index[:, 0] + index[:, 1]], axis=1), 0).astype(np.int64)
