"""Our own stores."""

from __future__ import annotations

from _stores import TOKEN_COLUMNS

from _peers.base import Peer
from trajectory_store import Column, Schema, TrajectoryStore


class Ours(Peer):
    """`append`, and `read_padded`."""

    name = "trajectory_store"
    needs = "numpy"
    backend = "memmap"

    def create(self, path, rows):
        schema = Schema([Column(name, dtype, ragged=True) for name, dtype in TOKEN_COLUMNS.items()])
        self.store = TrajectoryStore.create(path, schema, backend=self.backend)

    def append(self, commit):
        self.store.append(commit)

    def close(self):
        self.store.close()

    def open(self, path, rows):
        self.store = TrajectoryStore.open(path)
        self.ids, self.names = self.store.ids(), list(TOKEN_COLUMNS)

    def count(self):
        return len(self.ids)

    def sample(self, rows):
        return self.store.read_padded(self.ids[rows], self.names)

    def row(self, number):
        return {name: rows[0] for name, rows in self.store.read(self.ids[number : number + 1], self.names).items()}

    def place(self, number):
        return self.store[number]


class OursZarr(Ours):
    """The same calls on the backend for object stores, here on local files."""

    name = "trajectory_store, zarr backend"
    needs = "zarr"
    backend = "zarr"
