"""vLLM in this process, stepped token by token, so that weights change between two tokens and never within one.

Needs the extra `vllm`. vLLM keeps its own copy of the model, in the layout of its kernels; `load_weights` fills it from
a folder, or directly from the learner's state dict.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DefinitionError, EngineError
from rlhf_pipeline.policies.engines.jobs import Job, Row, collected, jobs_of, with_head
from rlhf_pipeline.policies.engines.protocol import Ended, RaggedCompletions, Request, WeightRefresh, Weights
from rlhf_pipeline.policies.engines.rollout import Gate

__all__ = ["VLLMEngine"]


class VLLMEngine:
    """Samples with vLLM in this process.

    Args:
        model: a checkpoint folder, read for its config: `load_weights` loads the weights.
        num_slots: the most live completions.
        vocab: the model's vocabulary size.
        max_positions: the longest sequence; None takes the config's.
        dtype: the model's compute dtype, for example `float32`.
        memory: share of a GPU's memory for weights and cache. On a CPU vLLM reads `VLLM_CPU_KVCACHE_SPACE`, in GiB.
        eager: do not compile or capture; for a CPU and for tests.
    """

    name = "vllm"

    def __init__(
        self,
        model: Path,
        *,
        num_slots: int,
        vocab: int,
        max_positions: int | None = None,
        dtype: str = "auto",
        memory: float = 0.5,
        eager: bool = False,
    ) -> None:
        self.version: int | None = None
        self._vocab = vocab
        self._gate = Gate()
        self._one = threading.Lock()
        self._aborts = self._requests = 0
        with _in_this_process():
            try:
                from vllm import LLM  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
            except ImportError as error:
                raise DefinitionError(
                    f"collect.engine=vllm needs vLLM, which cannot be imported ({error}). Install it: "
                    "pip install 'rlhf-pipeline[vllm]'; or sample with --set collect.engine=slots."
                ) from error
            self._llm: Any = LLM(
                model=str(model),
                skip_tokenizer_init=True,
                dtype=dtype,
                max_model_len=max_positions,
                max_num_seqs=num_slots,
                logprobs_mode="processed_logprobs",
                gpu_memory_utilization=memory,
                enforce_eager=eager,
                # Otherwise a step returns the previous step's tokens, which other weights may have sampled.
                async_scheduling=False,
                # On a CPU vLLM cannot cut the prefill of a seeded completion in two, as after new weights.
                enable_chunked_prefill=False if eager else None,
                seed=0,
            )
        self._positions = int(self._llm.llm_engine.model_config.max_model_len)

    def generate(
        self, request: Request, refresh: WeightRefresh | None = None, ended: Ended | None = None
    ) -> RaggedCompletions:
        """See `Engine.generate`; seeds as in `HTTPEngine.generate`."""
        limits = request.limits(vocab=self._vocab, positions=self._positions, positions_by="max_model_len of vLLM")
        jobs = jobs_of(request, limits, most=None)
        rows = [Row() for _ in range(request.count)]
        with self._one, self._gate:
            if rows:
                self._run(request, jobs, rows, refresh, ended)
        versioned = self.version is not None and all(len(row.versions) == len(row.tokens) for row in rows)
        return collected(request, rows, versioned=versioned)

    def _run(
        self,
        request: Request,
        jobs: list[Job],
        rows: list[Row],
        refresh: WeightRefresh | None,
        ended: Ended | None,
    ) -> None:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        engine, aborts = self._llm.llm_engine, self._aborts
        end = math.inf if request.deadline_s is None else time.monotonic() + request.deadline_s
        first_of: dict[str, int] = {}
        for job in jobs:
            self._requests += 1
            name = f"request-{self._requests}"
            first_of[name] = job.first
            params = SamplingParams(**job.sampling, output_kind=RequestOutputKind.DELTA)
            engine.add_request(name, {"prompt_token_ids": job.tokens}, params)
        steps = 0
        try:
            while engine.has_unfinished_requests():
                # One token of each live completion, all sampled with the weights in use.
                for output in engine.step():
                    for part in output.outputs:
                        place = first_of[output.request_id] + part.index
                        self._add(rows[place], part)
                        if ended is not None and part.finish_reason in ("stop", "length"):
                            ended(place, rows[place].tokens)
                steps += 1
                with self._gate.standing_aside():
                    if refresh is not None:
                        refresh.due(steps, since=steps - 1)
                if time.monotonic() > end or self._aborts != aborts:
                    break
        finally:
            # Also after an error: no request of this call continues in the next one.
            if engine.has_unfinished_requests():
                engine.abort_request(list(first_of))

    def _add(self, row: Row, part: Any) -> None:
        """Record the output of a step."""
        tokens = list(part.token_ids)
        row.tokens += tokens
        row.log_probs += [entry[token].logprob for token, entry in zip(tokens, part.logprobs, strict=True)]
        row.versions += [] if self.version is None else [self.version] * len(tokens)
        if part.finish_reason is not None:
            row.reason = part.finish_reason

    def pause(self) -> None:
        """Stop between two tokens; see `Engine.pause`."""
        self._gate.close()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._gate.open()

    def load_weights(self, weights: Weights, version: int) -> None:
        """Load weights; completions in progress are recomputed with them up to their current token."""
        with self._gate.still():
            try:
                if isinstance(weights, Mapping):
                    self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
                else:
                    with with_head(weights) as folder:
                        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                dropped = self._llm.reset_prefix_cache(reset_running_requests=True)
            except Exception as error:
                self.version = None
                raise EngineError(f"vLLM could not load the weights of version {version}: {error}") from error
            if not dropped:
                self.version = None
                raise EngineError("vLLM does not drop what it computed with the weights before.")
            self.version = version

    def abort(self) -> None:
        """End the completions in progress; see `Engine.abort`."""
        self._aborts += 1

    def close(self) -> None:
        """Stop vLLM and release its memory."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Make vLLM run its core in this process, not in one that continues between our steps."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
