"""The contract on the memory-mapped backend."""

from __future__ import annotations

from trajectory_store import TrajectoryStore

from .contract import StoreContract


class TestMemmap(StoreContract):
    """Raw segments on a local disk."""

    def create(self, path, schema, **options):
        """Make a store."""
        return TrajectoryStore.create(path, schema, **options)

    def open(self, path, mode="r"):
        """Open a store."""
        return TrajectoryStore.open(path, mode)


class TestPreallocated(TestMemmap):
    """Raw segments whose blocks are reserved when they are made."""

    def create(self, path, schema, **options):
        """Make a store."""
        options = {"segment_rows": 64, "segment_elements": 4096, **options}
        return TrajectoryStore.create(path, schema, preallocate=True, **options)


class TestPowerDurable(TestMemmap):
    """Raw segments that are synced at every commit."""

    def create(self, path, schema, **options):
        """Make a store."""
        return TrajectoryStore.create(path, schema, durability="power", **options)


class TestPread(TestMemmap):
    """The same files, read by position instead of through maps."""

    def open(self, path, mode="r"):
        """Open a store."""
        return TrajectoryStore.open(path, mode, io="pread")

    def create(self, path, schema, **options):
        """Make a store."""
        TrajectoryStore.create(path, schema, **options).close()
        return TrajectoryStore.open(path, "a", io="pread")
