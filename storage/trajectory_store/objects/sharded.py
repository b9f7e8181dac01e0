"""The arrays of a merged segment: sharded and compressed, so that any Zarr reader reads a few rows or all.

A shard holds the compressed inner chunks one after another, then their index: the offset and size of each chunk as two
u64 (all ones for a chunk that holds only fill values), and the CRC32C of these. The object `checks` of the segment has
the CRC32C of each compressed chunk, so that damaged bytes are never decompressed.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import extras
from trajectory_store.bucket import Bucket
from trajectory_store.errors import CorruptionError
from trajectory_store.format import ArraySpec, crc32c, from_hex, spec_json, to_hex
from trajectory_store.objects.archive import Codec, zstd
from trajectory_store.ragged import Int64Array, distinct

CHUNK_BYTES, SHUFFLED_BYTES, CHUNKS = 1 << 14, 1 << 13, 1 << 10
"""Bytes per inner chunk before compression, for non-floats and for floats, and maximum inner chunks per shard.

At 900 tokens per row, a batch of 64 random rows reads 2 to 3 bytes for each byte that it returns. For GSM8K, the chunks
use 1 % less disk space than chunks of 32,768 elements and level 3; text in chunks of 8 KiB uses 9 % more.
"""

PAGE = 256
"""Number of checksums in `checks` that share one checksum in the metadata."""

SEALED_LEVEL, SHUFFLED_LEVEL = 6, 3
"""zstd levels; the values are written once and read often."""

CHECKS = "checks"
_EMPTY = (1 << 64) - 1
_ENTRIES = 32
"""Number of entries of an index that are read together."""


class Layout(NamedTuple):
    """How an array is divided.

    Attributes:
        elements: per inner chunk.
        chunks: per shard.
        level: of zstd.
        shuffled: whether the bytes of like significance are stored together: floats take a twentieth less.
        sums: the CRC32C of the values of each chunk, in segments written before there was the object `checks`.
    """

    elements: int
    chunks: int
    shuffled: bool = False
    level: int = SEALED_LEVEL
    sums: Int64Array | None = None

    @property
    def index_size(self) -> int:
        """The bytes of the index at the end of a shard."""
        return 16 * self.chunks + 4

    def count(self, spec: ArraySpec) -> int:
        """The inner chunks of an array."""
        return -(-spec.capacity // self.elements)

    def shards(self, folder: str, spec: ArraySpec) -> list[str]:
        """The objects of an array."""
        return [shard_key(folder, spec, i) for i in range(-(-spec.capacity // (self.elements * self.chunks)))]

    def codec(self, spec: ArraySpec) -> Codec:
        """The codec of the inner chunks."""
        return _shuffling(self.elements * spec.itemsize) if self.shuffled else zstd(self.level)


def layout_of(spec: ArraySpec, sealed: Mapping[str, Any] | None = None) -> Layout:
    """Return how an array of a merged segment is divided, by default of a new one; raise ValueError if it is odd."""
    if sealed is not None and "crc" in sealed:
        old = Layout(1 << 15, 128, level=3)
        return old._replace(sums=from_hex(sealed["crc"][spec.name], old.count(spec)))
    shuffled = spec.dtype.kind == "f"
    elements = max(1, (SHUFFLED_BYTES if shuffled else CHUNK_BYTES) // spec.itemsize)
    return Layout(elements, min(CHUNKS, max(1, -(-spec.capacity // elements))), shuffled)


def pages(count: int) -> int:
    """Return how many checksums in the metadata `count` checksums have."""
    return -(-count // PAGE)


@functools.cache
def _shuffling(size: int) -> Codec:
    blosc = extras.load("numcodecs.blosc", "a store with backend='zarr'").Blosc
    # One block per chunk, which needs no thread.
    return cast("Codec", blosc(cname="zstd", clevel=SHUFFLED_LEVEL, shuffle=blosc.SHUFFLE, blocksize=size))


def sharded_json(spec: ArraySpec, layout: Layout) -> bytes:
    """The zarr.json of a sharded array."""
    doc: Any = json.loads(spec_json(spec))
    if layout.shuffled:
        size, item = layout.elements * spec.itemsize, spec.dtype.itemsize
        settings = {
            "cname": "zstd",
            "clevel": SHUFFLED_LEVEL,
            "shuffle": "shuffle",
            "typesize": item,
            "blocksize": size,
        }
        inner = [*doc["codecs"], {"name": "blosc", "configuration": settings}]
    else:
        inner = [*doc["codecs"], {"name": "zstd", "configuration": {"level": layout.level, "checksum": False}}]
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    doc["chunk_grid"]["configuration"]["chunk_shape"] = [layout.elements * layout.chunks, *spec.shape]
    doc["codecs"] = [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [layout.elements, *spec.shape],
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


class ShardWriter:
    """Writes one array in order."""

    def __init__(self, folder: str, spec: ArraySpec, put: Callable[[str, bytes], None]) -> None:
        self._folder = folder
        self._spec = spec
        self._put = put
        self._layout = layout_of(spec)
        self._width = spec.itemsize // spec.dtype.itemsize
        self._waiting: list[npt.NDArray[Any]] = []
        self._count = 0
        self._chunks: list[bytes] = []
        self._shards = 0
        self._total = 0
        self._crcs: list[int] = []

    @property
    def checks(self) -> bytes:
        """The CRC32C of each compressed chunk, four bytes each."""
        return np.array(self._crcs, "<u4").tobytes()

    @property
    def pages(self) -> str:
        """The CRC32C of each page of these, eight hexadecimal digits each."""
        raw = self.checks
        return to_hex(crc32c(raw[at : at + 4 * PAGE]) for at in range(0, len(raw), 4 * PAGE))

    def write(self, values: npt.NDArray[Any]) -> None:
        """Append values."""
        self._waiting.append(values)
        self._count += len(values)
        self._total += len(values)
        size = self._layout.elements * self._width
        if self._count >= size:
            whole = np.concatenate(self._waiting)
            for first in range(0, len(whole) - size + 1, size):
                self._add(whole[first : first + size])
            rest = whole[len(whole) - len(whole) % size :]
            self._waiting, self._count = [rest], len(rest)

    def _add(self, chunk: npt.NDArray[Any]) -> None:
        self._chunks.append(bytes(self._layout.codec(self._spec).encode(np.ascontiguousarray(chunk))))
        self._crcs.append(crc32c(self._chunks[-1]))
        if len(self._chunks) == self._layout.chunks:
            self._end_shard()

    def _end_shard(self) -> None:
        if not self._chunks:
            return
        index = np.full((self._layout.chunks, 2), _EMPTY, "<u8")
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
            last = np.full(self._layout.elements * self._width, self._spec.fill, self._spec.dtype)
            last[: len(rest)] = rest
            self._add(last)
        self._end_shard()
        spec = self._spec._replace(capacity=self._total // self._width)
        self._put(f"{self._folder}/{self._spec.name}/zarr.json", sharded_json(spec, self._layout))


def read_chunks(
    bucket: Bucket,
    objects: Mapping[str, bytes],
    folder: str,
    spec: ArraySpec,
    layout: Layout,
    chunks: Sequence[int],
    indexes: dict[str, Int64Array],
) -> Iterator[tuple[int, bytes]]:
    """Get some inner chunks of an array as stored; adjacent ones are requested together.

    `indexes` keeps where the chunks of each shard begin and end, as far as that is known.
    """
    chunks_by_shard = {
        shard: list(some) for shard, some in itertools.groupby(chunks, lambda chunk: chunk // layout.chunks)
    }
    keys = {shard: shard_key(folder, spec, shard) for shard in chunks_by_shard}
    new = [key for key in keys.values() if key not in indexes and key not in objects]
    for key, tail in zip(new, bucket.tails(new, [4] * len(new)), strict=True):
        if tail is None:
            raise FileNotFoundError(key)
        indexes[key] = np.full((layout.chunks + 1, 2), -1, np.int64)
        indexes[key][-1] = tail[1]  # the size of the object
    for shard, some in chunks_by_shard.items():
        key, whole = keys[shard], objects.get(keys[shard])
        inside = [chunk % layout.chunks for chunk in some]
        if whole is None:
            places = _places(bucket, key, layout, inside, indexes[key])
        else:
            all_places = np.zeros((layout.chunks, 2), np.int64)
            entries = _parsed(whole[-layout.index_size : -4], len(whole))
            all_places[: len(entries)] = entries
            places = all_places[inside]
        first = np.flatnonzero(np.append(True, places[1:, 0] != places[:-1, 1]))
        last = np.append(first[1:], len(some)) - 1
        spans = list(zip(places[first, 0].tolist(), places[last, 1].tolist(), strict=True))
        parts = bucket.ranges(key, spans) if whole is None else [whole[start:end] for start, end in spans]
        packed = dict(zip(first.tolist(), parts, strict=True))
        raw, begin = b"", 0
        for i, chunk in enumerate(some):
            start, end = places[i].tolist()
            if i in packed:
                raw, begin = packed[i], start
            yield chunk, raw[start - begin : end - begin]


def _places(bucket: Bucket, key: str, layout: Layout, chunks: Sequence[int], index: Int64Array) -> Int64Array:
    """Return where chunks of a shard begin and end; read the entries of its index that are not known."""
    parts = distinct(np.array([chunk for chunk in chunks if index[chunk, 0] < 0], np.int64) // _ENTRIES)
    size = int(index[-1, 0])
    begin = max(0, size - layout.index_size)
    spans = [(begin + 16 * _ENTRIES * part, begin + 16 * min(_ENTRIES * (part + 1), layout.chunks)) for part in parts]
    for part, raw in zip(parts, bucket.ranges(key, spans) if spans else (), strict=True):
        entries = _parsed(raw, size)
        index[part * _ENTRIES : part * _ENTRIES + len(entries)] = entries
    return np.maximum(index[chunks], 0)


def _parsed(raw: bytes, size: int) -> Int64Array:
    """Return where chunks begin and end by entries of an index, 0 and 0 for a missing one: `[N, 2]`."""
    index = np.frombuffer(raw[: len(raw) // 16 * 16], "<u8").reshape(-1, 2)
    exists = (index[:, 0] <= size) & (index[:, 1] <= size)
    return np.where(exists[:, None], np.stack([index[:, 0], index[:, 0] + index[:, 1]], axis=1), 0).astype(np.int64)


def has_index(bucket: Bucket, key: str, layout: Layout) -> bool:
    """Return whether the index of a shard matches its checksum."""
    tail = bucket.tails([key], [layout.index_size])[0]
    raw = b"" if tail is None else tail[0]
    return len(raw) == layout.index_size and crc32c(raw[:-4]) == int.from_bytes(raw[-4:], "little")


def unpacked(raw: bytes, spec: ArraySpec, layout: Layout, chunk: int, where: str) -> npt.NDArray[Any]:
    """Return the values of a chunk, without the fill after them."""
    values = np.empty(layout.elements * spec.itemsize // spec.dtype.itemsize, spec.dtype)
    try:
        layout.codec(spec).decode(raw, values)
    except (RuntimeError, ValueError) as error:
        raise CorruptionError(f"{where} is damaged: it cannot be decompressed ({error}).") from None
    width = spec.itemsize // spec.dtype.itemsize
    return values[: (spec.capacity - chunk * layout.elements) * width]
