"""A run in an object store, and this process's copy of the parts that it needs.

A process works on files below `Mirror.root` as it would in a run folder, and `RunFolder` notifies the mirror what is
needed (`bring`), what was written (`keep`) and what is gone (`drop`). A run in a folder has no mirror.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import BESIDE
from rlhf_pipeline.run.files import remove_folder
from rlhf_pipeline.run.processes.claims import ClaimableWork, Claims
from rlhf_pipeline.run.processes.heartbeat import Pause, read_heartbeat
from rlhf_pipeline.run.remote.bundles import PACKS, SEALED, BundledFolders
from rlhf_pipeline.run.remote.copies import new_copy
from rlhf_pipeline.run.remote.leases import Leases, replaced
from rlhf_pipeline.run.remote.outbox import Outbox
from rlhf_pipeline.run.remote.rollouts import BucketRollouts, LeasedClaims
from rlhf_pipeline.run.remote.rows import LineLog, SharedRows
from trajectory_store import StoreError, TrajectoryStore
from trajectory_store.bucket import Traffic
from trajectory_store.objects.remote import ObstoreBucket, open_bucket

T = TypeVar("T")

_POINTER: Final = f"{filenames.WEIGHTS}/{filenames.NEWEST_WEIGHTS}"
_LOGS: Final = (filenames.LEDGER, filenames.METRICS)
_CHOSEN: Final = (filenames.CHOICE_TABLE, filenames.RECORDED_LEDGER)
"""The files that a run that learns from stores writes before its selection takes effect."""


class Mirror:
    """The objects are the run; this process has a copy of those that it needs, which is removed at its end.

    Args:
        url: of the run.

    Attributes:
        address: the run itself, for messages.
        patience_s: the longest pause between two checks while nothing happens, in seconds.

    Raises:
        StoreError: obstore is not installed.
    """

    patience_s = 2.0
    is_remote = True
    stores: Final = (filenames.STORE,)
    """The parts of a run that are stores of rows; a rollout is one object."""

    def __init__(self, url: str) -> None:
        self.address = url
        bucket = open_bucket(url, durable=False)
        if not isinstance(bucket, ObstoreBucket):
            raise TypeError(f"{url} is not an object store")
        self.bucket = bucket
        self.life = secrets.token_hex(8)
        """Identifies this process uniquely."""
        self.outbox = Outbox()
        self._tags: dict[str, str] = {}
        """The last known tags of the files in the bucket."""
        self._rows: dict[str, SharedRows] = {}
        self._counted = Traffic()
        self._sealing: threading.Event | None = None
        self._reading: Callable[[], object] | None = None

    @functools.cached_property
    def root(self) -> Path:
        """The folder of the copy."""
        folder = new_copy(self, self.address)
        for name in SEALED:
            (folder / name).mkdir()
        beside = os.environ.get(BESIDE)
        if beside:
            (folder / filenames.PROCESSES).symlink_to(beside, target_is_directory=True)
        else:
            (folder / filenames.PROCESSES).mkdir()
        return folder

    @functools.cached_property
    def leases(self) -> Leases:
        """The leases of the run's processes."""
        return Leases(self.bucket)

    @functools.cached_property
    def sealed(self) -> BundledFolders:
        """The checkpoints and weights."""
        return BundledFolders(self.bucket, self.root)

    def ahead(self, read: Callable[[], T]) -> Callable[[], T]:
        """Read in the background, repeatedly, until there is a result or it is asked for.

        Args:
            read: reads once; its result is false if there is nothing yet.

        Returns:
            A function that waits for the result.
        """
        is_needed, done = threading.Event(), Future[T]()

        def look() -> None:
            pause = Pause(self.patience_s)
            try:
                while not (content := read()) and not is_needed.is_set():
                    pause.sleep(is_needed)
                done.set_result(content)
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                done.set_exception(error)

        def finish() -> T:
            is_needed.set()
            return done.result()

        threading.Thread(target=look, name="reads of a run", daemon=True).start()
        self._reading = finish
        return finish

    def traffic(self, store: TrajectoryStore) -> dict[str, int]:
        """Return this process's requests and bytes since the last call, for a line of metrics.

        Args:
            store: of the run's trajectories, the same in each call.
        """
        now = self.bucket.traffic + store.traffic
        new, self._counted = now - self._counted, now
        return {"requests": new.requests, "bytes_sent": new.sent, "bytes_received": new.received}

    # Files and folders

    def bring(self, name: str) -> None:
        """Fetch the current state of a file or a sealed folder; remove the copy of a file that is gone."""
        if name.rpartition("/")[0] in SEALED and name != _POINTER:
            self.sealed.bring(name)
            return
        path = self.root / name
        tag = self._tags.get(name) if path.exists() else None
        current = self.bucket.tagged(name, tag)
        if current is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(current.data.partition(b"\n")[2] if name == _POINTER else current.data)
            self._tags[name] = current.tag
        elif tag is None:
            path.unlink(missing_ok=True)
            self._tags.pop(name, None)

    def keep(self, name: str) -> None:
        """Put a file or a sealed folder, after everything that was kept before.

        Raises:
            LeaseLostError: another process has taken over writing it.
        """
        if name.rpartition("/")[0] not in SEALED:
            content = (self.root / name).read_bytes()
            self.outbox.add(lambda: self.bucket.put(name, content))
        elif name == _POINTER:
            # Its first line makes its content unique, so that its tag is unique, too.
            content = secrets.token_hex(8).encode() + b"\n" + (self.root / name).read_bytes()
            self.outbox.add(lambda: self._swap(name, content))
        else:
            if self._sealing is not None:
                self._sealing.wait()  # one at a time, so that a folder is sent before it is removed here
            self._sealing = self.outbox.add(lambda: self.sealed.keep(name))

    def _swap(self, name: str, content: bytes) -> None:
        tag = self.bucket.swap(name, content, self._tags.get(name))
        if tag is None:
            raise replaced(f"{self.address}/{name}")
        self._tags[name] = tag

    def keep_first(self, name: str) -> bool:
        """Put a file unless it exists; otherwise fetch the existing one. Return whether it was put."""
        if self.bucket.put_once(name, (self.root / name).read_bytes()):
            return True
        (self.root / name).unlink()
        self.bring(name)
        return False

    def keep_log(self, path: Path) -> None:
        """Put a log, if that is possible; a name with this process's id keeps the logs of several processes apart."""
        with suppress(StoreError, OSError):
            log_key = (
                path.name if path.name == filenames.SUPERVISOR_LOG else f"{filenames.LOGS}/{self.life}-{path.name}"
            )
            self.bucket.put(log_key, path.read_bytes())

    def remove_copy(self, folder: Path) -> None:
        """Remove a folder of this process's copy."""
        remove_folder(folder)

    def drop(self, name: str) -> None:
        """Delete a sealed folder, after this process has removed its own."""
        self.outbox.add(lambda: self.sealed.drop(name))

    def outline(self, name: str) -> None:
        """Make an empty folder for each folder in a folder, unless it is here; `bring` fetches a sealed one."""
        for key in self.bucket.keys(f"{name}/"):
            (self.root / name / key.split("/")[1].removesuffix(".json")).mkdir(parents=True, exist_ok=True)

    def is_blank(self, ignored: Container[str]) -> bool:
        """Return whether there is no run; `bring` has fetched its record otherwise."""
        self.bring(filenames.CONFIG)
        return not (self.root / filenames.CONFIG).is_file()

    def backend(self, setting: Literal["memmap", "zarr"]) -> Literal["memmap", "zarr"]:
        """Return the medium of new stores: the one for object stores."""
        return "zarr"

    def has(self, name: str) -> bool:
        """Return whether there is an object of this name, or one below it."""
        return self.bucket.get(name) is not None if "." in name else bool(self.bucket.keys(f"{name}/"))

    def clear(self) -> None:
        """Delete all objects of a failed start, its record last, except those of live processes."""
        self.flush()
        for name in (filenames.STORE, filenames.EVALUATIONS, filenames.ROLLOUTS, PACKS, *SEALED, *_LOGS):
            self.bucket.delete(self.bucket.keys(f"{name}/"))
        self.bucket.delete([f"{filenames.CLAIMS}.json", *self.bucket.keys(f"{filenames.CLAIMS}/"), *_CHOSEN])
        self.bucket.delete([filenames.CONFIG])
        self._tags.clear()
        self._rows.clear()

    # Lines

    def rows(self, name: str) -> SharedRows:
        """Return the rows of a file; the same object each time, because a process has one copy."""
        shared = self._rows.get(name)
        if shared is None:
            log = LineLog(self.bucket, name, self.life, self.outbox)
            shared = self._rows[name] = SharedRows(self.root / name, log, self)
        else:
            shared.refresh()
        return shared

    def write_rows(self) -> None:
        """Take over as the only writer of lines; an earlier writer's next line is rejected."""
        for name in _LOGS:
            self.rows(name).begin()

    # Processes

    def make_rollouts(self, *, durability: Any) -> None:
        """Mark the run as one of several processes."""
        BucketRollouts.begin(self.bucket)

    def rollouts(self, *, adds: bool = False) -> BucketRollouts:
        """Return the stored rollouts of the run."""
        return BucketRollouts(self.bucket)

    def claims(self, name: str, work: ClaimableWork, store: TrajectoryStore) -> Claims:
        """Return a collector's claims on work."""
        return LeasedClaims(self, name, work, store)

    def lease(self, name: str, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """Hold a name as its only process on any machine; a lock does the same on this machine.

        Raises:
            RunExistsError: another live process has the name.
        """

        def report() -> Mapping[str, Any]:
            return {
                key: value
                for key, value in read_heartbeat(self.root / filenames.PROCESSES, name).items()
                if key != "pid"
            }

        return self.leases.hold(name, self.life, wait_s=wait_s, report=report)

    def is_alive(self, name: str) -> bool:
        """Return whether a name's lease is being renewed."""
        return name in self.living()

    def living(self) -> set[str]:
        """Return the names whose leases are being renewed."""
        return self.leases.living()

    def heartbeat_of(self, name: str) -> dict[str, Any]:
        """Return the last report in the lease of a process; empty if there is none."""
        for key in (f"{filenames.PROCESSES}/{name}.lease", f"{filenames.PROCESSES}/{name}.json"):
            raw = self.bucket.get(key)
            if raw is not None:
                return json.loads(raw)
        return {}

    def flush(self) -> None:
        """Wait until all puts are done, and a read in the background as well."""
        if self._reading is not None:
            with suppress(Exception):  # its result is not needed
                self._reading()
        self.outbox.flush()
