"""The arrays of a merged segment: sharded and compressed, so that any Zarr reader reads them in large pieces.

A shard is the compressed inner chunks, one after the other, and then their index: per chunk its offset and its size as
two u64 (all ones for a chunk that holds only fill values), and the CRC32C of those.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import CorruptionError
from trajectory_store.format import ArraySpec, crc32c, spec_json
from trajectory_store.objects.archive import zstd

CHUNK = 1 << 15
CHUNKS = 128
"""Elements per inner chunk, and inner chunks per shard."""

SEALED_LEVEL = 3
"""zstd level; the values are written once and read often."""

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
    values = spec.capacity * (spec.itemsize // spec.dtype.itemsize)
    per_shard = CHUNK * CHUNKS * (spec.itemsize // spec.dtype.itemsize)
    return [shard_key(folder, spec, i) for i in range(-(-values // per_shard))]


class ShardWriter:
    """Writes one array in order.

    Args:
        folder: of the segment.
        spec: the array; its capacity is not known yet.
        put: puts an object.
    """

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
        self.crc = 0

    def write(self, values: npt.NDArray[Any]) -> None:
        """Write values behind those before."""
        self.crc = crc32c(values.view(np.uint8), self.crc)
        self._waiting.append(values)
        self._count += len(values)
        self._total += len(values)
        size = CHUNK * self._width
        if self._count >= size:
            whole = np.concatenate(self._waiting)
            for first in range(0, len(whole) - size + 1, size):
                self._add(whole[first : first + size])
            rest = whole[len(whole) - len(whole) % size :]
            self._waiting, self._count = [rest], len(rest)

    def _add(self, chunk: npt.NDArray[Any]) -> None:
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
        """Write what is left, and the metadata."""
        rest = np.concatenate(self._waiting) if self._waiting else np.empty(0, self._spec.dtype)
        if len(rest):
            last = np.full(CHUNK * self._width, self._spec.fill, self._spec.dtype)
            last[: len(rest)] = rest
            self._add(last)
        self._end_shard()
        spec = self._spec._replace(capacity=self._total // self._width)
        self._put(f"{self._folder}/{self._spec.name}/zarr.json", sharded_json(spec))


def read_sharded(folder: str, spec: ArraySpec, get: Callable[[list[str]], list[bytes | None]]) -> npt.NDArray[Any]:
    """Read a whole array.

    Raises:
        CorruptionError: a shard is missing or damaged.
    """
    width = spec.itemsize // spec.dtype.itemsize
    out = np.empty(spec.capacity * width, spec.dtype)
    per_shard = CHUNK * CHUNKS * width
    keys = shards(folder, spec)
    for i, (key, raw) in enumerate(zip(keys, get(keys), strict=True)):
        if raw is None:
            raise FileNotFoundError(key)
        try:
            _unpack(memoryview(raw), out[i * per_shard : (i + 1) * per_shard], CHUNK * width)
        except (ValueError, RuntimeError) as error:
            raise CorruptionError(f"object {key} is damaged: {error}.") from error
    return out


def _unpack(shard: memoryview, out: npt.NDArray[Any], size: int) -> None:
    tail = shard[max(0, len(shard) - 16 * CHUNKS - 4) :]
    if len(tail) != 16 * CHUNKS + 4 or crc32c(bytes(tail[:-4])) != int.from_bytes(tail[-4:], "little"):
        raise ValueError("the checksum of its index does not hold")
    index = np.frombuffer(tail[:-4], "<u8").reshape(-1, 2).tolist()
    scratch = np.empty(size * out.itemsize, np.uint8)
    for i, (offset, length) in enumerate(index[: -(-len(out) // size)]):
        if offset == _EMPTY or offset + length > len(shard):
            raise ValueError("a chunk is missing")
        packed, target = shard[offset : offset + length], out[i * size : (i + 1) * size]
        if len(target) == size:
            zstd().decode(packed, target.view(np.uint8))
        else:  # the last chunk is filled up
            zstd().decode(packed, scratch)
            target[:] = scratch.view(out.dtype)[: len(target)]
