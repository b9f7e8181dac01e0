"""An S3-speaking server on loopback, and before it a network that fails in every way a network does.

`serve` starts moto's server and, as a process of its own, a proxy that adds 20 ms to each request and now and then

- answers 503 (before the request was done, or after), cuts the connection before it,
- does the request and loses the reply, or
- loses the connection and does the request half a second later.

It counts what passes, and cuts all connections for a while when it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import random
import re
import socket
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.processes import Children

BUCKET = "bucket"
DELAY_S = 0.02
LATE_S = 0.5
FAULTS = {"503": 0.015, "cut": 0.015, "lost": 0.02, "late": 0.01, "503 after": 0.01}
TOLD = b"/-/"
"""How a path begins that is meant for the proxy itself."""
BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def missing() -> str | None:
    """Why the rig cannot run here, or None."""
    absent = [name for name in ("moto", "flask", "obstore") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed: pip install 'moto[server]' obstore" if absent else None


@dataclass(frozen=True)
class Rig:
    """A bucket behind the bad network; `calm` and `rough` choose by the environment how this process reaches it."""

    url: str
    server: int
    proxy: int

    def rough(self) -> None:
        """This process, and those it starts, go through the proxy."""
        self._use(self.proxy)

    def calm(self) -> None:
        """This process, and those it starts, go to the server itself."""
        self._use(self.server)

    def cut(self, seconds: float) -> None:
        """Let nothing through for a while, requests that are on their way included."""
        self._tell(f"cut/{seconds}")

    def counts(self) -> dict[str, int]:
        """What came to the proxy so far, named as in `Traffic`; and of requests, for what: `puts claims.json`."""
        return json.loads(self._tell("counts"))

    def _tell(self, what: str) -> bytes:
        with _urlopen(f"http://127.0.0.1:{self.proxy}{TOLD.decode()}{what}") as reply:
            return reply.read()

    def _use(self, port: int) -> None:
        os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT"] = f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def serve(folder: Path, *, seed: int = 0, faults: dict[str, float] | None = None) -> Generator[Rig]:
    """Start both, with an empty bucket and the credentials in the environment; `faults` in shares of the requests."""
    server, proxy = _free_port(), _free_port()
    shares = [str((FAULTS if faults is None else faults).get(name, 0.0)) for name in FAULTS]
    moto = ("-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", server)
    front = (Path(__file__).resolve(), proxy, server, seed, *shares)
    before = dict(os.environ)
    no_proxies = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    with Children(folder / "servers") as children:
        for name, port, words in (("moto", server, moto), ("proxy", proxy, front)):
            child = children.python(*words, name=name, env=no_proxies)
            child.until(functools.partial(_listens, port), seconds=60, every=0.05)
        _urlopen(urllib.request.Request(f"http://127.0.0.1:{server}/{BUCKET}", method="PUT", data=b"")).close()
        rig = Rig(f"s3://{BUCKET}/run-{seed}", server, proxy)
        os.environ.update(
            AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_REGION="us-east-1", AWS_ALLOW_HTTP="true"
        )
        rig.rough()
        try:
            yield rig
        finally:
            os.environ.clear()
            os.environ.update(before)


def _urlopen(request: str | urllib.request.Request) -> Any:
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    return False


class Proxy:
    """Passes requests on, one per connection to the server, and lets some of them go wrong."""

    def __init__(self, server: int, seed: int, shares: list[float]) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.shares = shares
        self.late: set[asyncio.Task[bytes]] = set()
        self.counts: Counter[str] = Counter()
        self.cut_until = 0.0

    @property
    def is_cut(self) -> bool:
        """Whether nothing passes at this moment."""
        return time.monotonic() < self.cut_until

    def told(self, what: str) -> bytes:
        """Do what the tests ask for."""
        name, _, seconds = what.partition("/")
        if name == "cut":
            self.cut_until = time.monotonic() + float(seconds)
        body = json.dumps(self.counts).encode()
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def count(self, head: bytes, body: bytes, reply: bytes) -> None:
        """Count a request, whatever comes of it."""
        method, path, *_ = head.decode().split()
        lists = method == "GET" and "list-type=" in path
        name = "lists" if lists else {"PUT": "puts", "GET": "gets"}.get(method, "deletes")
        key = path.partition("prefix=")[2].partition("&")[0] if lists else path.removeprefix(f"/{BUCKET}/")
        what = re.sub(r"[0-9a-f]{16,}|\d+", "#", unquote(key).partition("/")[2])
        self.counts[name] += 1
        self.counts[f"{name} {what}"] += 1
        if method == "PUT":
            self.counts["sent"] += len(body)
        elif method == "GET" and not lists and reply[9:11] == b"20":
            self.counts["received"] += len(reply.partition(b"\r\n\r\n")[2])

    def fault(self) -> str | None:
        """What happens to the next request."""
        drawn = self.rng.random()
        for name, share in zip(FAULTS, self.shares, strict=True):
            if drawn < share:
                return name
            drawn -= share
        return None

    async def ask(self, head: bytes, body: bytes, delay: float = 0.0) -> bytes:
        """Do the request and return the whole reply."""
        await asyncio.sleep(delay)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server)
        lines = [
            line for line in head.split(b"\r\n") if line and not line.lower().startswith((b"connection:", b"expect:"))
        ]
        writer.write(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body)
        await writer.drain()
        reply = await reader.read(-1)
        writer.close()
        return reply

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, which ends after each reply."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            head = await reader.readuntil(b"\r\n\r\n")
            sizes = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
            if b"expect: 100-continue" in head.lower():
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await reader.readexactly(int(sizes[0].split(b":")[1])) if sizes else b""
            path = head.split(b" ", 2)[1]
            fault = None if path.startswith(TOLD) else "cut" if self.is_cut else self.fault()
            await asyncio.sleep(DELAY_S)
            reply = b""
            if path.startswith(TOLD):
                reply = self.told(path.removeprefix(TOLD).decode())
            elif fault == "503":
                reply = BUSY
            elif fault == "late":
                task = asyncio.create_task(self.ask(head, body, LATE_S))
                self.late.add(task)
                task.add_done_callback(self.late.discard)
            elif fault != "cut":
                reply = await self.ask(head, body)
                reply = b"" if self.is_cut else {"lost": b"", "503 after": BUSY}.get(fault or "", reply)
            if not path.startswith(TOLD):
                self.count(head, body, reply)
            head_end = reply.find(b"\r\n\r\n")
            if head_end > 0 and b"connection: close" not in reply[:head_end].lower():
                reply = reply[:head_end] + b"\r\nConnection: close" + reply[head_end:]
            writer.write(reply)
            await writer.drain()
        writer.close()


async def _main() -> None:
    port, server, seed, *shares = sys.argv[1:]
    proxy = Proxy(int(server), int(seed), [float(share) for share in shares])
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", int(port), limit=1 << 20):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
