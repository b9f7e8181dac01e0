"""Reading the sharded arrays of a compacted segment without zarr's own array objects.

A shard is the compressed inner chunks, one after the other in any order, and then their index: per chunk its offset
and its size as two u64 (all ones for a chunk that holds only fill values), and the CRC32C of those.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store._remote import Remote, zarr_module, zstd
from trajectory_store.errors import CorruptionError
from trajectory_store.record import crc32c

_EMPTY = (1 << 64) - 1
_INDEX = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


def read_sharded(remote: Remote, path: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Read a whole 1-D array: one request for its metadata, one wave for its shards.

    An array that some other program wrote with other codecs is read by zarr.

    Raises:
        CorruptionError: a shard is damaged.
    """
    layout = _layout(remote.get(f"{path}/zarr.json"), dtype)
    if layout is None:
        array = zarr_module().open_array(remote.store, path=path, mode="r")
        return np.ascontiguousarray(array[:])
    count, shard, chunk, fill = layout
    out = np.empty(count, dtype)
    keys = [f"{path}/c/{i}" for i in range(-(-count // shard))]
    for i, raw in enumerate(remote.stream(keys)):
        if raw is None:  # only fill values, or lost: the checksum of the whole array tells
            out[i * shard : (i + 1) * shard] = fill
            continue
        try:
            _unpack(memoryview(raw), out[i * shard : (i + 1) * shard], shard // chunk, chunk, fill)
        except (ValueError, RuntimeError) as error:
            raise CorruptionError(f"object {keys[i]} is damaged: {error}.") from error
    return out


def _layout(raw: bytes | None, dtype: np.dtype[Any]) -> tuple[int, int, int, Any] | None:
    """Values, values per shard and per chunk, and the fill value, where the codecs are those that compaction writes."""
    try:
        doc: Any = json.loads(raw or b"null")
        (count,), (shard,) = doc["shape"], doc["chunk_grid"]["configuration"]["chunk_shape"]
        (codec,) = doc["codecs"]
        options = codec["configuration"]
        (chunk,) = options["chunk_shape"]
        inner = [c["name"] for c in options["codecs"]]
        index = [{k: v for k, v in c.items() if v} for c in options["index_codecs"]]
        known = codec["name"] == "sharding_indexed" and inner == ["bytes", "zstd"] and index == _INDEX
        known &= options.get("index_location", "end") == "end" and np.dtype(doc["data_type"]) == dtype
        known &= doc["chunk_key_encoding"] == {"name": "default", "configuration": {"separator": "/"}}
        fill = np.array(float(doc["fill_value"]) if dtype.kind == "f" else doc["fill_value"]).astype(dtype)
        known &= dtype.newbyteorder("<") == dtype
    except (KeyError, TypeError, ValueError):
        return None
    return (int(count), int(shard), int(chunk), fill) if known else None


def _unpack(shard: memoryview, out: npt.NDArray[Any], chunks: int, size: int, fill: Any) -> None:
    tail = shard[len(shard) - 16 * chunks - 4 :]
    if len(tail) != 16 * chunks + 4 or crc32c(bytes(tail[:-4])) != int.from_bytes(tail[-4:], "little"):
        raise ValueError("the checksum of its index does not hold")
    index = np.frombuffer(tail[:-4], "<u8").reshape(-1, 2).tolist()
    scratch = np.empty(size * out.itemsize, np.uint8)
    for i, (offset, length) in enumerate(index[: -(-len(out) // size)]):
        target = out[i * size : (i + 1) * size]
        if offset == _EMPTY:
            target[:] = fill
            continue
        packed = shard[offset : offset + length]
        if len(target) == size:
            zstd().decode(packed, target.view(np.uint8))
        else:  # the last chunk is filled up
            zstd().decode(packed, scratch)
            target[:] = scratch.view(out.dtype)[: len(target)]
