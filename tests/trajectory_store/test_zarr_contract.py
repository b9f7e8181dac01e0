"""The contract on the zarr backend: a folder, and an object store in memory."""

from __future__ import annotations

import pytest

from trajectory_store import TrajectoryStore

from .contract import StoreContract

storage = pytest.importorskip("zarr.storage")


class TestZarrFolder(StoreContract):
    """One immutable Zarr group per commit, in a folder."""

    def create(self, path, schema, **options):
        """Make a store."""
        return TrajectoryStore.create(path, schema, backend="zarr", **options)

    def open(self, path, mode="r"):
        """Open a store."""
        return TrajectoryStore.open(path, mode)


class TestZarrMemory(StoreContract):
    """The same through a zarr store object, uncompressed and with a cache that holds next to nothing."""

    def create(self, path, schema, **options):
        """Make a store."""
        store = self.stores().setdefault(path, storage.MemoryStore())
        return TrajectoryStore.create(store, schema, backend="zarr", compress=False, cache_bytes=500, **options)

    def open(self, path, mode="r"):
        """Open a store."""
        store = self.stores().setdefault(path, storage.MemoryStore())
        return TrajectoryStore.open(store, mode, cache_bytes=500)

    def stores(self):
        """The stores of this test, by the path that the contract gives."""
        return self.__dict__.setdefault("_stores", {})
