"""Plain Zarr arrays, and a key-value store."""

from __future__ import annotations

import itertools

import numpy as np
from _stores import TOKEN_COLUMNS

from _peers.base import Padder, Peer, edges_of, octets


class PlainZarr(Peer):
    """One flat array per column, chunks of 64 Ki, not compressed; where rows end is appended last."""

    name = "Zarr (zarr-python)"
    needs = "zarr"

    def create(self, path, rows):
        import zarr

        group = zarr.create_group(path)
        kinds = {**TOKEN_COLUMNS, "row_ends": "int64"}
        self.arrays = {
            name: group.create_array(name, shape=(0,), chunks=(1 << 16,), dtype=dtype, compressors=None)
            for name, dtype in kinds.items()
        }
        self.end = 0

    def append(self, commit):
        for name in TOKEN_COLUMNS:
            self.arrays[name].append(commit[name].values)
        ends = self.end + commit["input_ids"].offsets[1:]
        self.arrays["row_ends"].append(ends)
        self.end = int(ends[-1])

    def open(self, path, rows):
        import zarr

        self.group = zarr.open_group(path, mode="r")
        self.arrays = {name: self.group[name] for name in TOKEN_COLUMNS}
        self.edges = np.concatenate([[0], self.group["row_ends"][:]])
        self.pad = Padder()

    def count(self):
        return len(self.edges) - 1

    def sample(self, rows):
        first, last = self.edges[rows], self.edges[rows + 1]
        where = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        cuts = np.cumsum(last - first)[:-1]
        flat = {name: array.get_coordinate_selection(where) for name, array in self.arrays.items()}
        return self.pad({n: [octets(r) for r in np.split(v, cuts)] for n, v in flat.items()}, last - first)


class Lmdb(Peer):
    """One blob per trajectory under its number; one transaction per commit, not synced."""

    name = "LMDB"
    needs = "lmdb"
    sync = False

    def create(self, path, rows):
        import lmdb

        self.env, self.at = lmdb.open(str(path), map_size=1 << 33, writemap=True, sync=self.sync), 0

    def append(self, commit):
        edges, columns = edges_of(commit), [commit[name].values for name in TOKEN_COLUMNS]
        with self.env.begin(write=True) as txn:
            for a, b in itertools.pairwise(edges):
                head = (b - a).to_bytes(8, "little")
                txn.put(self.at.to_bytes(8, "big"), b"".join([head, *(c[a:b].tobytes() for c in columns)]), append=True)
                self.at += 1

    def close(self):
        self.env.close()

    def open(self, path, rows):
        import lmdb

        self.env = lmdb.open(str(path), readonly=True, readahead=False)
        self.pad = Padder()

    def count(self):
        return self.env.stat()["entries"]

    def sample(self, rows):
        with self.env.begin(buffers=True) as txn:
            blobs = [txn.get(i.to_bytes(8, "big")) for i in rows.tolist()]
            lengths = np.array([int.from_bytes(blob[:8], "little") for blob in blobs])
            views, skip = {}, np.full(len(rows), 8)
            for name, dtype in TOKEN_COLUMNS.items():
                after = skip + lengths * np.dtype(dtype).itemsize
                cuts = zip(blobs, skip.tolist(), after.tolist(), strict=True)
                views[name], skip = [blob[a:b] for blob, a, b in cuts], after
            return self.pad(views, lengths)

    def row(self, number):
        with self.env.begin(buffers=True) as txn:
            blob = txn.get(number.to_bytes(8, "big"))
            length, at, row = int.from_bytes(blob[:8], "little"), 8, {}
            for name, dtype in TOKEN_COLUMNS.items():
                row[name] = np.frombuffer(blob, dtype, length, at).copy()
                at += row[name].nbytes
            return row


class LmdbSynced(Lmdb):
    """The same with a sync of the disk per transaction."""

    name = "LMDB, synced"
    sync = True
