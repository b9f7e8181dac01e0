"""A server that answers as vLLM's does, with a real tiny model behind it.

`vllm_shapes.json` holds the shapes of the real server's replies; a test compares these replies with it, and another one
records it again wherever vLLM is installed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.policies.engines.protocol import Request, WeightRefresh
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.policies.token_policy import TokenPolicy

PREFIX = "generate-tokens-"
ASKED = {"top_p": 1.0, "top_k": -1, "ignore_eos": True, "logprobs": 0, "detokenize": False}
"""What every request must say: where one is silent, vLLM takes the model's generation config or its own defaults."""


class FakeVLLM:
    """One server; each request is sampled on slots of its own, all of them with the same weights.

    Attributes:
        log: method and path of every request.
        requests: request ids of `/inference/v1/generate`, and the token ids of their prompts.
        broken: what the next requests for completions meet: "drop" hangs up after sampling, "refuse" before it, a
            number is the status of an error.
        nan_every: every n-th log-prob is null, as vLLM writes one that is no number.
    """

    def __init__(self, model: Path, *, max_num_seqs: int = 32, delay_s: float = 0.0) -> None:
        self.policy = TokenPolicy.from_pretrained(model, dtype=torch.float32)
        # As in vLLM a head that is tied is a tensor of its own once weights are loaded again.
        head = self.policy.model.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self.max_num_seqs = max_num_seqs
        self.delay_s = delay_s
        self.mode = "processed_logprobs"
        self.log: list[tuple[str, str]] = []
        self.requests: list[tuple[str, list[int]]] = []
        self.broken: list[str | int] = []
        self.nan_every = 0
        self.labels = ["default"]
        self.stale = False
        self.paused = False
        self.engines: dict[str, SlotEngine] = {}
        self.lock = threading.RLock()
        outer = self

        class Handler(_Handler):
            fake = outer

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.http.server_port}"

    @contextmanager
    def serving(self) -> Iterator[FakeVLLM]:
        """Serve until the end of the block."""
        thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.set_paused(False)
            self.http.shutdown()
            self.http.server_close()
            thread.join()

    def set_paused(self, paused: bool) -> None:
        with self.lock:
            self.paused = paused
            for engine in self.engines.values():
                engine.pause() if paused else engine.resume()

    def load(self, folder: Path) -> None:
        with self.lock:
            engines = [*self.engines.values(), SlotEngine(self.policy._parts, num_slots=1, model=self.policy.model)]
            tensors = dict(self.policy.model.state_dict())
            for file in folder.glob("*.safetensors"):
                tensors |= load_file(file)
            for engine in engines:
                engine.load_weights(tensors, len(self.labels) - 1)

    def label(self, name: str) -> None:
        with self.lock:
            self.labels.append(name)
            for engine in self.engines.values():
                engine.version = len(self.labels) - 1

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one request for completions."""
        name, sampling = PREFIX + body["request_id"], body["sampling_params"]
        engine = SlotEngine(self.policy._parts, num_slots=sampling["n"], model=self.policy.model)
        with self.lock:
            engine.version = len(self.labels) - 1
            self.engines[name] = engine
            if self.paused:
                engine.pause()

        def wait() -> int:
            time.sleep(self.delay_s)
            return engine.version or 0

        request = Request(
            prompts=[body["token_ids"]] * sampling["n"],
            max_new_tokens=sampling["max_tokens"],
            temperature=sampling["temperature"],
            end_token_ids=sampling["stop_token_ids"],
            stream_ids=[sampling["seed"] + i for i in range(sampling["n"])],
        )
        try:
            completions = engine.generate(request, WeightRefresh(wait, 1, engine.version) if self.delay_s else None)
        finally:
            with self.lock:
                del self.engines[name]
        assert completions.spans is not None
        choices = []
        for i, (completion, spans) in enumerate(zip(completions, completions.spans.lists(), strict=True)):
            ends = [start for start, _ in [*spans, (len(completion.token_ids), 0)][1:]]
            content = []
            for t, value in zip(completion.token_ids, completion.log_probs.tolist(), strict=True):
                number = None if self.nan_every and t % self.nan_every == 0 else value
                entry = {"token_id": t, "logprob": number, "rank": 1}
                content.append({**entry, "top_logprobs": [entry]})
            stop = completion.finish_reason == "stop"
            choices.append(
                {
                    "index": i,
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.token_ids[-1] if stop else None,
                    "token_ids": completion.token_ids,
                    "routed_experts": None,
                    "sampling_mask": None,
                    "weight_versions": [
                        {"version": self.labels[version], "start": start, "end": end}
                        for (start, version), end in zip(spans, ends, strict=True)
                    ],
                    "logprobs": {"content": content},
                }
            )
        usage = {"prompt_tokens": 1, "total_tokens": 1, "completion_tokens": 1}
        nothing = ["prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics"]
        return {
            "request_id": name,
            "model": "fake",
            "created": int(time.time()),
            "usage": {**usage, "prompt_tokens_details": None, "completion_tokens_details": None},
            **dict.fromkeys([*nothing, "kv_transfer_params", "ec_transfer_params"]),
            "output_mode": "tokens",
            "choices": choices,
        }

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and reply of everything but completions."""
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        match method, url.path:
            case "GET", "/health":
                return 200, None
            case "GET", "/server_info":
                most = self.policy.max_positions
                model = {"logprobs_mode": self.mode, "max_model_len": most}
                scheduler = {"max_num_seqs": self.max_num_seqs}
                return 200, {"vllm_config": {"model_config": model, "scheduler_config": scheduler}}
            case "GET", "/weight_info":
                return 200, {"weight_version": self.labels[-1]}
            case "GET", "/is_paused":
                return 200, {"is_paused": self.paused}
            case "POST", "/pause" if query.get("mode") == "keep":
                self.set_paused(True)
                return 200, {"status": "paused"}
            case "POST", "/resume" if self.stale:  # vLLM would go on with caches of the old weights
                return 500, _error("resumed after a reload without /reset_prefix_cache", "InternalServerError", 500)
            case "POST", "/resume":
                self.set_paused(False)
                return 200, {"status": "resumed"}
            case "POST", "/collective_rpc" if body["method"] == "reload_weights":
                folder = Path(body["kwargs"]["weights_path"])
                if not folder.is_dir():
                    return 500, _error(f"Call to collective_rpc method failed: {folder}", "InternalServerError", 500)
                self.load(folder)
                self.stale = True
                return 200, {"results": [None]}
            case "POST", "/reset_prefix_cache" if query.get("reset_running_requests") == "true":
                self.stale = False
                return 200, {"success": True}
            case "POST", "/update_weight_version":
                self.label(body["new_version"])
                return 200, {"success": True, "new_version": body["new_version"]}
            case "POST", "/abort_requests":
                with self.lock:
                    engines = [self.engines[name] for name in body["request_ids"] if name in self.engines]
                for engine in engines:
                    engine.abort()
                return 200, {"status": "aborted", "aborted": len(body["request_ids"])}
        return 404, {"detail": "Not Found"}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeVLLM
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.fake.log.append(("GET", self.path))
        self._send(*self.fake.answer("GET", self.path, self._body()))

    def do_POST(self) -> None:
        body = self._body()
        self.fake.log.append(("POST", self.path))
        if self.path != "/inference/v1/generate":
            self._send(*self.fake.answer("POST", self.path, body))
            return
        with self.fake.lock:
            self.fake.requests.append((body["request_id"], body["token_ids"]))
            fault = self.fake.broken.pop(0) if self.fake.broken else None
        if isinstance(fault, int):
            self._send(fault, _error("EngineCore encountered an issue.", "InternalServerError", fault))
            return
        if fault == "refuse":
            self.close_connection = True
            return
        sampling, most = body["sampling_params"], self.fake.max_num_seqs
        if wrong := {name: sampling.get(name) for name, value in ASKED.items() if sampling.get(name) != value}:
            self._send(400, _error(f"{wrong}: vLLM would sample from another distribution", "BadRequestError", 400))
            return
        if sampling["n"] > most or (sampling["n"] > 1 and sampling["temperature"] == 0):
            self._send(400, _error(f"n must be at most {most}, and 1 when greedy", "BadRequestError", 400))
            return
        try:
            reply = self.fake.sample(body)
        except DataError as error:
            self._send(400, _error(str(error), "BadRequestError", 400))
            return
        if fault == "drop":
            self.close_connection = True
            return
        self._send(200, reply)

    def _body(self) -> dict[str, Any]:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        return json.loads(raw) if raw else {}

    def _send(self, status: int, reply: Any) -> None:
        raw = b"" if reply is None else json.dumps(reply).encode()
        try:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)
        except OSError:
            pass  # who asked has hung up


def _error(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
