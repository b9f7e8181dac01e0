"""Steps as CUDA graphs: captured one at a time, and compared with the kernels that they replace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf_pipeline.errors import EngineError
from rlhf_pipeline.policies.model_parts import ModelParts, rounding

_capturing = threading.Lock()
"""A process captures one graph at a time."""


class Graphs(Protocol):
    """Captures steps on a device."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture a step that has run before, without running it; return a function that runs it.

        Raises:
            RuntimeError: the step waits for the device.
        """
        ...


class CudaGraphs:
    """Captures steps as CUDA graphs on a device, which need not be the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One pool for all graphs of a state: they run one at a time, and all that outlives a step is in the state.
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """See `Graphs.capture`."""
        graph = torch.cuda.CUDAGraph()
        with (
            _capturing,
            torch.cuda.device(self._device),
            # A capture that fails leaves its own stream as the current one; leaving this context sets the former.
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            # Other threads, such as one that loads data, may allocate memory and wait for the device meanwhile.
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            step()
        return graph.replay


def graphs_of(device: torch.device) -> Graphs | None:
    """Return what captures steps on a device; None where there are no graphs."""
    return CudaGraphs(device) if device.type == "cuda" else None


class StepOutputs(NamedTuple):
    """Tokens of a step, int64 `[rows]`, their log-probs, float32 `[rows]`, and the next hidden states, `[rows, H]`."""

    tokens: Tensor
    log_probs: Tensor
    hidden: Tensor


_STRAY = 16
"""One row in this many may draw a different token, because rounding moves a number across a boundary of tokens."""


def check_replay(parts: ModelParts, eager: StepOutputs, replayed: StepOutputs, *, bucket: object) -> None:
    """Compare the first replay of a step with the same step outside of its graph.

    Args:
        parts: of the model, for its name and precision.
        eager: of the live rows, as the kernels gave them one by one.
        replayed: of the same rows and the same state, as the graph gave them.
        bucket: of the step, for the message.

    Raises:
        EngineError: they differ by more than rounding.
    """
    if not bool(torch.isfinite(eager.log_probs).all()):
        return  # diverged weights: the host reports them when it reads the log-probs
    same = eager.tokens == replayed.tokens
    rows, stray = len(same), int((~same).sum())
    log_probs = _largest((eager.log_probs - replayed.log_probs).double()[same])
    size = _largest(eager.hidden.double())
    hidden = _largest((eager.hidden.double() - replayed.hidden.double())[same]) / max(size, 1e-6)
    most = rounding(parts.head.weight, fine=1e-4, coarse=0.1)
    if not (log_probs <= most and hidden <= most and stray <= -(-rows // _STRAY)):
        raise EngineError(
            f"A decode step of {type(parts.trunk).__name__} replayed as a graph ({bucket}) differs from the same "
            f"step run kernel by kernel: in {stray} of {rows} tokens, in log-probs by up to {log_probs:.2g}, and in "
            f"hidden states by up to {hidden:.2%} of their largest value (the tolerances are {most:g} and "
            f"{most:.2%}). The samples were discarded. Sample with vLLM: --set collect.engine=vllm"
        )


def _largest(values: Tensor) -> float:
    """Return the largest magnitude; 0 if there are no values. NaN stays NaN, which no limit allows."""
    return float(values.abs().max()) if values.numel() else 0.0
