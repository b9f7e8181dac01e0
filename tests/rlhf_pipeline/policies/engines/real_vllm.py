"""A vLLM server on this CPU, in an interpreter of its own; docs/engines.md says how to install it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf_pipeline.errors import EngineError
from rlhf_pipeline.policies.engines.http import HTTPEngine
from rlhf_pipeline.policies.engines.protocol import Request

CPU = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""What vLLM needs in its environment."""


@contextmanager
def serving(model: Path, log: Path, *, max_model_len: int) -> Iterator[str]:
    """Yield the address of a server that has answered; skips where `VLLM_PYTHON` names no interpreter with vLLM."""
    python = os.environ.get("VLLM_PYTHON")
    if python is None:
        pytest.skip("VLLM_PYTHON names no interpreter that has vLLM")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(python).with_name("vllm")), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", str(max_model_len)]
    command += ["--max-num-seqs", "32", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    command += ["--no-enable-chunked-prefill"]  # which fails on a CPU, see docs/engines.md
    environment = {**os.environ, **CPU, "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + 280
            while True:
                engine = HTTPEngine(address, owner="warm-up", patience_s=1.0)
                try:
                    engine._server()
                    break
                except EngineError:
                    assert server.poll() is None, log.read_text()[-3000:]
                    assert time.monotonic() < end, log.read_text()[-3000:]
            # The first request warms the kernels up.
            HTTPEngine(address, owner="warm-up", patience_s=120.0).generate(Request(prompts=[[5]], max_new_tokens=2))
            yield address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, 15)
            server.wait(60)
