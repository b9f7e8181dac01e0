"""Leases: objects that a live process renews. Clocks of two machines are never compared."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from rlhf_pipeline.errors import LeaseLostError, RunExistsError
from rlhf_pipeline.run import filenames
from trajectory_store import StoreError
from trajectory_store.bucket import number_from
from trajectory_store.objects.remote import ObstoreBucket

logger = logging.getLogger(__name__)

LEASE_S: Final = "RLHF_PIPELINE_LEASE_S"
"""The environment variable with the seconds after which a silent process is considered dead; one value per run."""
_DEFAULT_S: Final = 30.0
_RENEWALS: Final = 4
"""The number of renewals within the length of a lease."""
_LOOKS: Final = 4


def replaced(what: str) -> LeaseLostError:
    """Return the error of a process whose place another process has taken."""
    return LeaseLostError(
        f"{what} was written by another process, which replaced this process because this process was stalled for too "
        "long. No data is lost; restart this process if the other one ends."
    )


class Leases:
    """The leases of a run.

    An observer judges by its own clock: a process is alive when its lease is first seen, and dead once the lease has
    not changed for its length. After a late check, because the network or the observer was stalled, the wait restarts.
    """

    def __init__(self, bucket: ObstoreBucket) -> None:
        self._bucket = bucket
        self.seconds = number_from(LEASE_S, _DEFAULT_S)
        self._tags: dict[str, tuple[str, float]] = {}
        """The tag of each lease by name, and the time since which it has been unchanged."""
        self._looked = -math.inf

    @contextmanager
    def hold(self, name: str, life: str, *, wait_s: float, report: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Hold the lease of a name until the end of the block; a thread renews it.

        Args:
            name: of the process.
            life: identifies this process, and no other.
            wait_s: how long to wait for another live process that has it, in seconds. Finding out whether it is alive
                always takes until it renews its lease, or fails to for the length of one.
            report: returns what the lease reports of the process.
        """
        tag = self._take(name, life, wait_s, report)
        leave = threading.Event()

        def renew() -> None:
            nonlocal tag
            for beat in range(1, 1 << 62):
                if leave.wait(self.seconds / _RENEWALS):
                    return
                try:
                    swapped = self._bucket.swap(self._key(name), self._content(life, beat, report()), tag)
                except StoreError as error:
                    logger.warning("%s: its lease could not be renewed: %s", name, error)
                    continue
                if swapped is None:  # everything that this process puts from now on is rejected
                    logger.error("%s: another process has replaced it", name)
                    return
                tag = swapped

        thread = threading.Thread(target=renew, name=f"lease of {name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            leave.set()
            thread.join()
            self._release(name, tag, {**report(), "life": life})

    def _take(self, name: str, life: str, wait_s: float, report: Callable[[], Mapping[str, Any]]) -> str:
        last_tag, since = None, time.monotonic()
        deadline, lives = since + wait_s, False
        while True:
            current = self._bucket.tagged(self._key(name))
            now = time.monotonic()
            if current is not None and current.tag != last_tag:
                last_tag, since, lives = current.tag, now, last_tag is not None
            if current is None or now - since >= self.seconds:
                tag = self._bucket.swap(self._key(name), self._content(life, 0, report()), current and current.tag)
                if tag is not None:
                    return tag
            elif lives and now >= deadline:
                raise RunExistsError(
                    f"{self._bucket.where} already has a process {name}: {_who(current.data)}. Stop that process first."
                )
            time.sleep(min(1.0, self.seconds / 8))

    def _release(self, name: str, tag: str, last: Mapping[str, Any]) -> None:
        with contextlib.suppress(StoreError):
            current = self._bucket.tagged(self._key(name))
            if current is not None and current.tag == tag:
                self._bucket.put(f"{filenames.PROCESSES}/{name}.json", json.dumps(last).encode())
                self._bucket.delete([self._key(name)])

    def living(self) -> set[str]:
        """Return the names of the processes that are alive, as far as this one can see."""
        now = time.monotonic()
        if now - self._looked >= self.seconds / _LOOKS:
            late = now - self._looked > self.seconds / 2
            folder = f"{filenames.PROCESSES}/"
            tags = self._bucket.tags(folder)
            leases = {key: tag for key, tag in tags.items() if key.endswith(".lease")}
            names = {key.removeprefix(folder).removesuffix(".lease"): tag for key, tag in leases.items()}
            before, self._tags = self._tags, {}
            for name, tag in names.items():
                previous = before.get(name)
                self._tags[name] = (tag, now) if previous is None or previous[0] != tag or late else previous
            self._looked = now
        return {name for name, (_, since) in self._tags.items() if now - since < self.seconds}

    @staticmethod
    def _key(name: str) -> str:
        return f"{filenames.PROCESSES}/{name}.lease"

    @staticmethod
    def _content(life: str, beat: int, report: Mapping[str, Any]) -> bytes:
        fields = {"life": life, "beat": beat, "host": socket.gethostname(), "pid": os.getpid()}
        return json.dumps({**report, **fields}).encode()


def _who(raw: bytes) -> str:
    try:
        holder = json.loads(raw)
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "an unknown process"
