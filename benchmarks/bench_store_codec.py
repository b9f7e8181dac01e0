"""Which codec, chunk and shard: GSM8K as the zarr backend writes it, measured per choice.

    python benchmarks/bench_store_codec.py [--quick] [--check]

The data is that of `_gsm8k.py`: the text, ids of a tokenizer trained on it, the mask, and two float32 log-probs whose
last bits are noise, as a model's are. Every figure is over all columns together. Write and read are MB of values per
second of processor time of one thread, the best of three. "shuffle" groups the bytes of equal rank before zstd (the
blosc codec of Zarr); "bitshuffle" the bits.

First the codec, in chunks of a commit of 64 trajectories and in chunks of a compacted segment. Then the chunk inside
a shard: a smaller one lets other programs read less for one row, a larger one packs better. Then the shard, which is
one object: a smaller one is more requests, a larger one is more memory at a time for its writer.
"""

from __future__ import annotations

import importlib
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _gsm8k import DATA, trajectories
from _stores import Table, disk_bytes, parser

from trajectory_store import RaggedArray

COMMIT, SEALED, SHARD = 64, 1 << 15, 1 << 22
GOAL = 0.48


def codecs() -> dict[str, Any]:
    """The choices by name."""
    zstd: Any = importlib.import_module("numcodecs.zstd").Zstd
    blosc: Any = importlib.import_module("numcodecs.blosc")
    blosc.set_nthreads(1)
    found = {f"zstd {level}": zstd(level=level) for level in (1, 3, 6, 9)}
    found |= {f"shuffle, zstd {level}": blosc.Blosc("zstd", level, blosc.SHUFFLE) for level in (1, 3, 6)}
    found["bitshuffle, zstd 3"] = blosc.Blosc("zstd", 3, blosc.BITSHUFFLE)
    return found


def columns(data: dict[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Per ragged or text column its values and where rows begin and end."""
    out = {}
    for name, values in data.items():
        if isinstance(values, RaggedArray):
            out[name] = (values.values, values.offsets)
        elif isinstance(values, list):
            parts = [text.encode() for text in values]
            edges = np.concatenate([[0], np.cumsum([len(p) for p in parts])])
            out[name] = (np.frombuffer(b"".join(parts), np.uint8), edges)
    return out


def best(function: Callable[[], object], rounds: int = 3) -> float:
    """Seconds of processor time."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return min(found)


def chunks_of(values: np.ndarray, edges: np.ndarray, how: str) -> list[np.ndarray]:
    """A column cut as commits, or as the chunks of a shard."""
    if how == "commits":
        cuts = [*edges[:-1:COMMIT].tolist(), int(edges[-1])]
    else:
        cuts = [*range(0, len(values), SEALED), len(values)]
    return [np.ascontiguousarray(values[a:b]) for a, b in itertools.pairwise(cuts) if a < b]


def codec_table(data: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Ratio and speed per codec."""
    for how in ("commits", "sealed"):
        chunks = [c for values, edges in data.values() for c in chunks_of(values, edges, how)]
        total = sum(c.nbytes for c in chunks)
        print(f"\nchunks of {'64 trajectories' if how == 'commits' else f'{SEALED} values'}, {total / 1e6:.0f} MB")
        print(f"{'codec':24}{'size / raw':>12}{'write MB/s':>12}{'read MB/s':>12}")
        for name, codec in codecs().items():
            packed = [codec.encode(c) for c in chunks]
            ratio = sum(len(p) for p in packed) / total
            write = total / best(lambda codec=codec, chunks=chunks: [codec.encode(c) for c in chunks], 1) / 1e6
            read = total / best(lambda codec=codec, packed=packed: [codec.decode(p) for p in packed]) / 1e6
            print(f"{name:24}{ratio:>12.3f}{write:>12.0f}{read:>12.0f}", flush=True)


def shard_table(data: dict[str, tuple[np.ndarray, np.ndarray]], repeat: int) -> float:
    """Size and speed per chunk and shard, as zarr writes and reads them; returns the ratio of the choice."""
    import zarr

    chosen = 1.0
    print(f"\n{'chunk':>10}{'shard':>10}{'size / raw':>12}{'write MB/s':>12}{'read MB/s':>12}{'objects':>9}")
    choices = [(c, SHARD) for c in (1 << 12, 1 << 13, 1 << 15, 1 << 17, 1 << 19)]
    choices += [(SEALED, s) for s in (1 << 18, 1 << 20, 1 << 24)]
    for chunk, shard in choices:
        with tempfile.TemporaryDirectory() as folder:
            total, write, read = 0, 0.0, 0.0
            for name, (values, _) in data.items():
                values = np.tile(values, repeat)
                cut = min(chunk, len(values))
                whole = -(-min(shard, len(values)) // cut) * cut

                def put(values: np.ndarray = values, name: str = name, cut: int = cut, whole: int = whole) -> None:
                    array = zarr.create_array(
                        folder,
                        name=name,
                        shape=values.shape,
                        dtype=values.dtype,
                        chunks=(cut,),
                        shards=(whole,),
                        compressors=[{"name": "zstd", "configuration": {"level": 3, "checksum": False}}],
                        fill_value=0,
                        overwrite=True,
                    )
                    array[:] = values

                total += values.nbytes
                write += best(put, 1)
                read += best(lambda folder=folder, name=name: zarr.open_array(folder, path=name, mode="r")[:])
            size = disk_bytes(Path(folder))
            objects = sum(1 for f in Path(folder).rglob("c/*") if f.is_file())
        ratio = size / total
        chosen = ratio if (chunk, shard) == (SEALED, SHARD) else chosen
        rates = f"{total / write / 1e6:>12.0f}{total / read / 1e6:>12.0f}"
        print(f"{chunk:>10}{shard:>10}{ratio:>12.3f}{rates}{objects:>9}", flush=True)
    return chosen


def main() -> int:
    """Print the tables; exit 1 with --check where the goal is missed."""
    options = parser(__doc__, "1500 trajectories").parse_args()
    if not DATA.is_dir():
        print(f"skipped: the GSM8K files are not at {DATA.resolve()}")
        return 0
    data = columns(trajectories(1500 if options.quick else None))
    codec_table(data)
    ratio = shard_table(data, 1 if options.quick else 4)
    print()
    table = Table()
    table.line("zstd 3, chunks of 32 Ki, shards of 4 Mi: size / raw", ratio, "x", GOAL)
    return int(options.check and not table.good)


if __name__ == "__main__":
    raise SystemExit(main())
