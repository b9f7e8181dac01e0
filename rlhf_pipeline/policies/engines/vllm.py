"""vLLM in this process, stepped token by token, so that weights change between two tokens and never within one.

Needs the extra `vllm`. vLLM keeps its own copy of the model, in the layout of its kernels; `load_weights` fills it from
a folder, or directly from the learner's state dict.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DefinitionError, EngineError
from rlhf_pipeline.policies.engines.jobs import Job, Row, collected, jobs_of, with_head
from rlhf_pipeline.policies.engines.protocol import (
    Ended,
    Int64Array,
    RaggedCompletions,
    Request,
    WeightRefresh,
    Weights,
)
from rlhf_pipeline.policies.engines.rollout import Gate
from rlhf_pipeline.policies.engines.turn_requests import LOOK_S, TurnRequests
from rlhf_pipeline.policies.engines.turn_rows import Partner, TurnRow

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
        self.gate = Gate()
        self.aborts = 0
        self._exclusive = threading.Lock()
        self._num_requests = 0
        with _in_this_process():
            try:
                from vllm import LLM  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
            except ImportError as error:
                raise DefinitionError(
                    f"collect.engine=vllm needs vLLM, which cannot be imported ({error}). Install it "
                    "(pip install 'rlhf-pipeline[vllm]'), or sample with --set collect.engine=slots."
                ) from error
            self.llm: Any = LLM(
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
        self._positions = int(self.llm.llm_engine.model_config.max_model_len)

    def generate(
        self, request: Request, refresh: WeightRefresh | None = None, ended: Ended | None = None
    ) -> RaggedCompletions:
        """See `Engine.generate`; seeds as in `HTTPEngine.generate`."""
        jobs = jobs_of(request, self._limits(request), most=None)
        rows = [Row() for _ in range(request.count)]
        with self._exclusive, self.gate, self._call(request.deadline_s) as call:
            for job in jobs:
                call.add(job, rows[job.first : job.first + job.members], job.first)
            while call.has_requests and not call.must_end():
                for place in call.step(refresh):
                    if ended is not None:
                        ended(place, rows[place].tokens)
        return collected(request, rows, versioned=self._is_versioned(rows))

    def converse(
        self, request: Request, partner: Partner, *, row_tokens: int, refresh: WeightRefresh | None = None
    ) -> list[TurnRow]:
        """See `TurnEngine.converse`: a turn is a request, which is added between two steps once its reply is there."""
        self._limits(request)
        turns = TurnRequests(request, partner, row_tokens=min(row_tokens, self._positions))
        arrived = threading.Event()
        partner.listen(arrived.set)
        sampled: dict[int, tuple[Request, Row]] = {}
        with self._exclusive, self.gate, self._call(request.deadline_s) as call:
            while not call.must_end():
                for place, turn in turns.take():
                    (job,) = jobs_of(turn, self._limits(turn), most=None)
                    sampled[place] = turn, Row()
                    call.add(job, [sampled[place][1]], place)
                if not call.has_requests and not turns.waiting:
                    break
                if not call.has_requests:
                    with self.gate.sampling_interrupted():
                        arrived.wait(LOOK_S)
                for place in call.step(refresh) if call.has_requests else ():
                    request_of_turn, row = sampled.pop(place)
                    with self.gate.sampling_interrupted():  # others need not wait for an environment
                        turns.ended(place, collected(request_of_turn, [row], versioned=self._is_versioned([row])))
                arrived.clear()
                turns.take_arrived()
        return turns.result()

    def next_name(self) -> str:
        """Return a name for a request that no other has had."""
        self._num_requests += 1
        return f"request-{self._num_requests}"

    def _limits(self, request: Request) -> Int64Array:
        """Check a request and return the most new tokens of each completion, int64 `[count]`."""
        return request.limits(vocab=self._vocab, positions=self._positions, positions_by="max_model_len of vLLM")

    def _is_versioned(self, rows: Sequence[Row]) -> bool:
        return self.version is not None and all(len(row.versions) == len(row.tokens) for row in rows)

    @contextmanager
    def _call(self, deadline_s: float | None) -> Iterator[_EngineCall]:
        """Begin a call; also after an error, no request of it continues in the next one."""
        call = _EngineCall(self, deadline_s)
        try:
            yield call
        finally:
            call.drop()

    def pause(self) -> None:
        """Stop between two tokens; see `Engine.pause`."""
        self.gate.close()

    def resume(self) -> None:
        """Resume after `pause`."""
        self.gate.open()

    def load_weights(self, weights: Weights, version: int) -> None:
        """Load weights; completions in progress are recomputed with them up to their current token."""
        with self.gate.still():
            try:
                if isinstance(weights, Mapping):
                    self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
                else:
                    with with_head(weights) as folder:
                        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                dropped = self.llm.reset_prefix_cache(reset_running_requests=True)
            except Exception as error:
                self.version = None
                raise EngineError(f"vLLM could not load the weights of version {version}: {error}") from error
            if not dropped:
                self.version = None
                raise EngineError("vLLM did not clear its caches of the previous weights.")
            self.version = version

    def abort(self) -> None:
        """End the completions in progress; see `Engine.abort`."""
        self.aborts += 1

    def close(self) -> None:
        """Stop vLLM and release its memory."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None


class _EngineCall:
    """The requests of one call, which take their steps together."""

    def __init__(self, owner: VLLMEngine, deadline_s: float | None) -> None:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        self._owner, self._engine, self._aborts = owner, owner.llm.llm_engine, owner.aborts
        self._end = math.inf if deadline_s is None else time.monotonic() + deadline_s
        self._params = functools.partial(SamplingParams, output_kind=RequestOutputKind.DELTA)
        self._rows: dict[str, tuple[int, Sequence[Row]]] = {}
        """By request in progress: the index of its first completion in the call, and its completions."""
        self._steps = 0

    @property
    def has_requests(self) -> bool:
        """Whether a request is in progress."""
        return bool(self._rows)

    def add(self, job: Job, rows: Sequence[Row], first: int) -> None:
        """Add a request between two steps; its tokens go to these rows."""
        name = self._owner.next_name()
        self._rows[name] = first, rows
        self._engine.add_request(name, {"prompt_token_ids": job.tokens}, self._params(**job.sampling))

    def step(self, refresh: WeightRefresh | None) -> list[int]:
        """Sample one token of each live completion with the weights in use; return the positions of those that end."""
        ended: list[int] = []
        for output in self._engine.step():
            first, rows = self._rows[output.request_id]
            for part in output.outputs:
                row, tokens = rows[part.index], list(part.token_ids)
                row.tokens += tokens
                row.log_probs += [
                    by_token[token].logprob for token, by_token in zip(tokens, part.logprobs, strict=True)
                ]
                row.versions += [] if self._owner.version is None else [self._owner.version] * len(tokens)
                if part.finish_reason is not None:
                    row.reason = part.finish_reason
                if part.finish_reason in ("stop", "length"):
                    ended.append(first + part.index)
            if output.finished:
                del self._rows[output.request_id]
        self._steps += 1
        with self._owner.gate.sampling_interrupted():
            if refresh is not None:
                refresh.due(self._steps, since=self._steps - 1)
        return ended

    def must_end(self) -> bool:
        """Return whether to end the call early: it is past its deadline, or was aborted."""
        return time.monotonic() > self._end or self._aborts != self._owner.aborts

    def drop(self) -> None:
        """End the requests that are in progress."""
        if self._rows:
            self._engine.abort_request(list(self._rows))
            self._rows.clear()


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
