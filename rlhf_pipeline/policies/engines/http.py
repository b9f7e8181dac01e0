"""vLLM behind an address: tokens in and tokens out over HTTP, weights by folder.

The server is a separate process, which the user starts like this, with the definition's model:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs

The engine calls (vLLM 0.32): `/inference/v1/generate`, `/abort_requests`, `/pause?mode=keep`, `/resume`,
`/collective_rpc` with `reload_weights`, `/reset_prefix_cache`, `/update_weight_version`, `/weight_info`, `/server_info`
and `/health`. Development mode lets any client run methods: keep the server on the loopback address or on a network of
its own.

After a connection error, the server is asked to cancel the request, which is retried under another id; only the reply
to the last one is read, so no completion arrives twice. Weights carry a label with this run's name, and tokens that
were sampled with any other label are rejected.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import save_file

from rlhf_pipeline.errors import DataError, EngineError
from rlhf_pipeline.policies.engines.jobs import Job, Row, collected, jobs_of, with_head
from rlhf_pipeline.policies.engines.protocol import (
    Ended,
    Int64Array,
    RaggedCompletions,
    Request,
    WeightRefresh,
    Weights,
)
from rlhf_pipeline.policies.engines.turn_requests import TurnRequests, run_turns
from rlhf_pipeline.policies.engines.turn_rows import Partner, TurnRow
from trajectory_store.locks import locked

__all__ = ["HTTPEngine"]

START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"
"""The command that starts a suitable server."""

PATIENCE_S = 300.0
"""Seconds that a server may be unreachable: enough to restart it."""

_CONNECTIONS = 64
_HEALTH_EVERY_S = 10.0
_LOADING = "loading"
"""Represents the version in the label of weights that are incomplete."""
_REPLY_S = 600.0
"""The longest wait for a reply that is not a completion; loading weights takes longest."""
_ID_PREFIX = "generate-tokens-"
"""The prefix that the server adds to the id of a request, and expects in an abort."""


class _Unreachable(Exception):
    """There was no connection, or it broke: worth another try."""


@dataclass(frozen=True, slots=True)
class _Server:
    """The properties that the server reports."""

    max_model_len: int | None
    max_num_seqs: int


class HTTPEngine:
    """Samples with a vLLM server."""

    def __init__(
        self,
        address: str,
        *,
        owner: str,
        vocab: int | None = None,
        max_positions: int | None = None,
        patience_s: float | None = None,
        look_s: float = 0.5,
    ) -> None:
        self.name = address.rstrip("/")
        self.version: int | None = None
        parts = urlsplit(self.name)
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        self._owner = re.sub(r"[^A-Za-z0-9_.-]", "-", owner)
        self._vocab = vocab
        self._max_positions = max_positions
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._look_s = look_s
        self._server_facts: _Server | None = None
        self._label: str | None = None
        self._sent_weights: tuple[Path, int] | None = None
        self._paused = False
        self._lock = threading.RLock()
        self._calls: set[_ServerCall] = set()

    def generate(
        self, request: Request, refresh: WeightRefresh | None = None, ended: Ended | None = None
    ) -> RaggedCompletions:
        """See `Engine.generate`.

        The seed of a completion follows from the request's seed, its stream id and its member. vLLM's results also
        depend on the rest of its batch: in the last bits of a log-prob, and occasionally in a token.
        """
        jobs = jobs_of(request, self.limits(request), most=self._server().max_num_seqs)
        with self._call(request, refresh) as call:
            return collected(request, call.run(jobs, ended), versioned=call.versioned)

    def converse(
        self, request: Request, partner: Partner, *, row_tokens: int, refresh: WeightRefresh | None = None
    ) -> list[TurnRow]:
        """See `TurnEngine.converse`: each turn is a request, which is sent as soon as its reply has arrived."""
        self.limits(request)
        turns = TurnRequests(request, partner, row_tokens=min(row_tokens, self._positions() or row_tokens))
        with self._call(request, refresh) as call:
            return run_turns(turns, call, look_s=self._look_s)

    def limits(self, request: Request) -> Int64Array:
        """Check a request and return the most new tokens of each completion, int64 `[count]`."""
        return request.limits(vocab=self._vocab, positions=self._positions(), positions_by=f"at {self.name}")

    def _positions(self) -> int | None:
        """Return the longest row that the model and the server take; None if neither has a limit."""
        limits = (self._max_positions, self._server().max_model_len)
        return min((limit for limit in limits if limit is not None), default=None)

    @contextlib.contextmanager
    def _call(self, request: Request, refresh: WeightRefresh | None) -> Iterator[_ServerCall]:
        """Begin a call, which `abort` ends; what it still waits for at the end of the block is dropped."""
        call = _ServerCall(self, request.deadline_s, refresh, versioned=self.version is not None)
        with self._lock:
            self._calls.add(call)
        try:
            yield call
        finally:
            call.drop()
            with self._lock:
                self._calls.discard(call)

    def pause(self) -> None:
        """Stop the server's sampling for all its clients; see `Engine.pause`."""
        self._paused = True
        self._ask("POST", "/pause?mode=keep", {})

    def resume(self) -> None:
        """Resume after `pause`."""
        self._paused = False
        self._ask("POST", "/resume", {})

    def load_weights(self, weights: Weights, version: int) -> None:
        """Make the server load weights from a folder, which it must see under the same path.

        See `Engine.load_weights`. Processes that share a run and a server take turns; weights that another process has
        loaded are not loaded again.
        """
        if isinstance(weights, Mapping):
            with tempfile.TemporaryDirectory(prefix="weights-") as folder:
                # Copies, because safetensors rejects tensors that share memory.
                save_file({name: t.detach().clone() for name, t in weights.items()}, f"{folder}/model.safetensors")
                (Path(folder) / "config.json").write_text("{}", encoding="utf-8")
                self._give(Path(folder), version, tag=uuid.uuid4().hex[:8])
            self._sent_weights = None
            return
        with _turn(weights):
            self._give(weights, version)
        self._sent_weights = (weights, version)

    def abort(self) -> None:
        """End the completions that this engine is waiting for; see `Engine.abort`."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cut()

    def close(self) -> None:
        """Drop what is in progress; the server is unchanged."""
        self.abort()

    # One request

    def _server(self) -> _Server:
        """Return what the server reports about itself, checked; asked again only after a connection broke."""
        server = self._server_facts
        if server is not None:
            return server
        status, info = self._ask_status("GET", "/server_info?config_format=json")
        if status != 200 or not isinstance(info, dict):
            raise EngineError(
                f"the server at {self.name} responds to /server_info with {status}: it was not started in development "
                f"mode. Start it with: {START}"
            )
        config: Any = info.get("vllm_config")
        model = config.get("model_config", {}) if isinstance(config, dict) else {}
        mode = model.get("logprobs_mode")
        if mode != "processed_logprobs":
            raise EngineError(
                f"the server at {self.name} reports {mode}, which are not the log-probs of the sampled "
                f"distribution. Start it with: {START}"
            )
        self._server_facts = _Server(
            max_model_len=model.get("max_model_len"),
            max_num_seqs=int(config.get("scheduler_config", {}).get("max_num_seqs") or 1),
        )
        return self._server_facts

    def _give(self, folder: Path, version: int, *, tag: str | None = None) -> None:
        label = f"{self._owner}:{version}:{_folder_tag(folder) if tag is None else tag}"
        self._server()
        if self._ask("GET", "/weight_info").get("weight_version") != label:
            self._ask("POST", "/pause?mode=keep", {})
            # Until the new weights are complete, the label is no version's: after a kill here, the next one loads them.
            self._ask("POST", "/update_weight_version", {"new_version": f"{self._owner}:{_LOADING}"})
            status, reply = self._reload(folder)
            if status == 200:
                # Caches, those of requests in progress included, were computed with other weights.
                status, reply = self._ask_status("POST", "/reset_prefix_cache?reset_running_requests=true", {})
            if status != 200 or (isinstance(reply, dict) and reply.get("success") is False):
                self.version = None
                if not folder.is_dir():
                    # A newer version may have replaced it. The server stays paused until it has whole weights.
                    raise DataError(f"the weights in {folder} no longer exist.")
                raise EngineError(
                    f"the server at {self.name} could not load the weights in {folder} ({status}: {_short(reply)}). "
                    "The server must be able to read the folder at this path. It is paused until it receives "
                    "complete weights: repeat the command with --resume."
                )
            self._ask("POST", "/update_weight_version", {"new_version": label})
        if not self._paused:  # the process that loaded these weights may have been killed before this call
            self._ask("POST", "/resume", {})
        self.version, self._label = version, label

    def _reload(self, folder: Path) -> tuple[int, Any]:
        with with_head(folder) as whole:
            order = {"method": "reload_weights", "kwargs": {"weights_path": str(whole.resolve())}}
            return self._ask_status("POST", "/collective_rpc", order)

    def _restore(self) -> None:
        """Give the server its weights again if it was restarted, or if the process that was loading them was killed."""
        self._server()
        if self._label is None or self._has_weights():
            return
        if self._sent_weights is not None:
            folder, version = self._sent_weights
            with _turn(folder):
                if self._has_weights():
                    return
                if folder.is_dir():
                    self._give(folder, version)
                    return
        raise EngineError(
            f"the server at {self.name} was restarted and lacks the weights of version {self.version}. Repeat the "
            "command with --resume, which loads them."
        )

    def _has_weights(self) -> bool:
        """Return whether the server has weights of this run, of any version."""
        return self._number(self._ask("GET", "/weight_info").get("weight_version", "")) is not None

    def _number(self, label: str) -> int | None:
        """Return the version in a label of this run's weights, or None if it is not one."""
        owner, _, rest = label.partition(":")
        number = rest.partition(":")[0]
        return int(number) if owner == self._owner and number.isdigit() else None

    def version_of(self, label: str) -> int:
        """Return the version in a label of this run's weights."""
        number = self._number(label)
        if number is None:
            raise EngineError(
                f"the server at {self.name} sampled with weights labelled {label!r}, which this run did not load. "
                "Is another run using the server, or was the server restarted? Use a separate server for each run."
            )
        return number

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make a call that must succeed, and return its reply."""
        status, reply = self._ask_status(method, path, body)
        if status != 200:
            raise EngineError(f"the server at {self.name} responds to {path} with {status}: {_short(reply)}")
        return reply if isinstance(reply, dict) else {}

    def _ask_status(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Return status and reply, retrying for up to `patience_s`: these calls may safely be repeated."""
        until, pause = time.monotonic() + self._patience_s, 0.05
        while True:
            try:
                return self._exchange(method, path, body, timeout=_REPLY_S)
            except _Unreachable as error:
                if time.monotonic() + pause > until:
                    raise self._unreachable(error) from error
                time.sleep(pause)
                pause = min(2 * pause, 5.0)

    def _unreachable(self, error: Exception) -> EngineError:
        return EngineError(
            f"the server at {self.name} has been unreachable for {self._patience_s:g} s ({error}). Stored "
            f"trajectories are safe. Start the server, then repeat the command with --resume. To start it: {START}"
        )

    def _exchange(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout: float | None,
        connections: list[http.client.HTTPConnection] | None = None,
    ) -> tuple[int, Any]:
        """Send one request and return the reply's status and its JSON, or its text if it is not JSON."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout)
        if connections is not None:
            connections.append(connection)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"})
            reply = connection.getresponse()
            raw = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise _Unreachable(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
            if connections is not None:
                connections.remove(connection)
        try:
            return reply.status, json.loads(raw) if raw else None
        except ValueError:
            return reply.status, raw.decode(errors="replace")


class _ServerCall:
    """One call of `generate` or `converse`: its requests are sent in parallel, each until its reply is complete.

    `versioned` is whether the server's weights had a version when the call began.
    """

    def __init__(
        self, engine: HTTPEngine, deadline_s: float | None, refresh: WeightRefresh | None, *, versioned: bool
    ) -> None:
        self._engine = engine
        self._refresh = refresh
        self.versioned = versioned
        self._deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        self._heard = self._looked = time.monotonic()
        """The times of the server's last response and of the last health request."""
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._connections: list[http.client.HTTPConnection] = []
        self._aborted = False
        self._over = threading.Event()
        """Set when replies are no longer needed."""

    def run(self, jobs: list[Job], ended: Ended | None) -> list[Row]:
        """Return the completions of `generate`, in the order of the request."""
        if not jobs:
            return []
        with ThreadPoolExecutor(min(len(jobs), _CONNECTIONS), thread_name_prefix="engine") as pool:
            futures = {pool.submit(self._job, job): job for job in jobs}
            pending = set(futures)
            try:
                while pending:
                    done, pending = wait(pending, timeout=self._engine._look_s, return_when=FIRST_EXCEPTION)
                    for future in done:
                        for place, row in enumerate(future.result(), futures[future].first):
                            if ended is not None and row.reason != "abort":
                                ended(place, row.tokens)
                    if pending:
                        self.look()
                        if self.must_end():
                            self.cut()  # repeated, to include requests sent meanwhile
                return [row for future in futures for row in future.result()]
            finally:
                self.drop()

    def sample(self, request: Request) -> RaggedCompletions:
        """Sample one turn; see `TurnSampler.sample`."""
        (job,) = jobs_of(request, self._engine.limits(request), most=None)
        return collected(request, self._job(job), versioned=self.versioned)

    def look(self) -> None:
        """Load newer weights, and check the health of a server that has been silent; see `TurnSampler.look`."""
        engine = self._engine
        if self._refresh is not None:
            self._refresh.look()
        with self._lock:
            now, is_waiting = time.monotonic(), bool(self._open)
            if not is_waiting:
                self._heard = now
        if now - max(self._heard, self._looked) > _HEALTH_EVERY_S:
            self._looked = now
            with contextlib.suppress(_Unreachable):
                if engine._exchange("GET", "/health", None, timeout=_HEALTH_EVERY_S)[0] == 200:
                    self._heard = time.monotonic()
                    with engine._lock:
                        engine._restore()
        if now - self._heard > engine._patience_s:
            raise engine._unreachable(TimeoutError("it does not respond to /health"))

    def must_end(self) -> bool:
        """See `TurnSampler.must_end`."""
        return self._aborted or time.monotonic() > self._deadline

    def cut(self) -> None:
        """Make the server cut open requests short; those not sent yet return empty completions."""
        self._aborted = True
        with self._lock:
            names = [_ID_PREFIX + name for name in self._open]
        if names:
            self._engine._ask("POST", "/abort_requests", {"request_ids": names})

    def drop(self) -> None:
        """Abort the open requests and close their connections: replies are no longer needed."""
        self._over.set()
        with self._lock:
            names = [_ID_PREFIX + name for name in self._open]
        if names:
            with contextlib.suppress(_Unreachable):
                self._engine._exchange("POST", "/abort_requests", {"request_ids": names}, timeout=5.0)
        for connection in list(self._connections):
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(2)

    def _job(self, job: Job) -> list[Row]:
        """Send a job, repeatedly if need be, until there is a reply."""
        engine, since, pause = self._engine, time.monotonic(), 0.05
        while not self._over.is_set():
            if self._aborted:
                return [Row() for _ in range(job.members)]
            name = f"{engine._owner}-{uuid.uuid4().hex}"
            try:
                with self._open_request(name):
                    status, reply = engine._exchange(
                        "POST",
                        "/inference/v1/generate",
                        {"request_id": name, "token_ids": job.tokens, "sampling_params": job.sampling},
                        timeout=None,
                        connections=self._connections,
                    )
                if status < 500:
                    self._heard = time.monotonic()
                    return self._read(job, status, reply)
                error: Exception = _Unreachable(f"{status}: {_short(reply)}")
            except _Unreachable as broken:
                error = broken
            if time.monotonic() + pause - since > engine._patience_s:
                raise engine._unreachable(error) from error
            # The server may still be working on it, and its reply would be lost.
            with contextlib.suppress(_Unreachable):
                engine._exchange("POST", "/abort_requests", {"request_ids": [_ID_PREFIX + name]}, timeout=5.0)
            self._over.wait(pause)
            pause = min(2 * pause, 5.0)
            with engine._lock:
                if not self._over.is_set():
                    engine._server_facts = None  # it may be another server by now
                    engine._restore()
        return [Row() for _ in range(job.members)]

    @contextlib.contextmanager
    def _open_request(self, name: str) -> Iterator[None]:
        with self._lock:
            self._open.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(name)

    def _read(self, job: Job, status: int, reply: Any) -> list[Row]:
        """Check every part of a reply and return its completions."""
        engine = self._engine
        if status != 200:
            raise EngineError(
                f"the server at {engine.name} rejects prompt {job.prompt} ({status}): {_short(reply)}. Check that it "
                f"was started with: {START}"
            )
        try:
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
            if [choice["index"] for choice in choices] != list(range(job.members)):
                raise ValueError(f"the number of completions is {len(choices)} instead of {job.members}")
            return [self._completion(choice, job.sampling["max_tokens"]) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"the server at {engine.name} returned a response that is not in vLLM's format "
                f"({type(error).__name__}: {error}): {_short(reply)}"
            ) from error

    def _completion(self, choice: dict[str, Any], limit: int) -> Row:
        tokens = [int(token) for token in choice["token_ids"]]
        content = choice["logprobs"]["content"] or []
        if [token["token_id"] for token in content] != tokens:
            raise ValueError("the log-probs do not match the tokens")
        reason = choice["finish_reason"]
        if reason not in ("stop", "length", "abort") or len(tokens) > limit or not (tokens or reason == "abort"):
            raise ValueError(
                f"a completion has {len(tokens)} tokens (the limit is {limit}) and the finish reason {reason!r}"
            )
        versions: list[int] = []
        if self.versioned and tokens:
            spans = choice["weight_versions"]
            starts = [int(span["start"]) for span in spans]
            if not starts or starts[0] != 0 or starts != sorted(set(starts)) or spans[-1]["end"] != len(tokens):
                raise ValueError(f"the weight_versions {spans} do not cover all {len(tokens)} tokens")
            for span, start, end in zip(spans, starts, [*starts[1:], len(tokens)], strict=True):
                versions += [self._engine.version_of(span["version"])] * (end - start)
        return Row(tokens, [token["logprob"] for token in content], versions, reason)


def _turn(weights: Path) -> contextlib.AbstractContextManager[None]:
    """Wait until no other process of this run gives the server weights, and hold the others back meanwhile."""
    return locked(weights.parent / ".engine.lock")


def _folder_tag(folder: Path) -> str:
    """Return a tag that changes when the weights in a folder are replaced."""
    files = sorted(file for file in folder.iterdir() if file.suffix == ".safetensors")
    facts = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    return f"{zlib.crc32(repr(facts).encode()):08x}"


def _short(reply: Any) -> str:
    text = reply if isinstance(reply, str) else json.dumps(reply)
    return text if len(text) <= 300 else f"{text[:297]}..."
