"""How a request is put to vLLM, in process or over HTTP: its requests are one prompt with several completions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_pipeline.policies.engines.completions import Int64Array
from rlhf_pipeline.policies.engines.protocol import Request
from rlhf_pipeline.policies.engines.uniforms import stream_keys


@dataclass(frozen=True, slots=True)
class Job:
    """Members of one group with one limit."""

    prompt: int
    """Which prompt of the request."""
    tokens: list[int]
    first: int
    """Number of its first completion, of all of the request."""
    members: int
    sampling: dict[str, Any]
    """vLLM's `SamplingParams`."""


def jobs_of(request: Request, limits: Int64Array, *, most: int | None) -> list[Job]:
    """Cut a request into one job per prompt, or more where its members' limits differ or are too many.

    Args:
        request: what to sample.
        limits: of each completion, int64 `[request.count]`.
        most: members of a job at most; None takes any number.
    """
    jobs: list[Job] = []
    size = request.group_size
    # vLLM refuses several completions that would all be the same.
    most = 1 if request.temperature == 0 else most or size
    for prompt, stream in enumerate(request.streams()):
        # 62 bits: vLLM takes a signed seed, and counts up from it, one for each member.
        base = int(stream_keys(request.seed, [stream], [0])[0] >> np.uint64(2))
        own = limits[prompt * size : (prompt + 1) * size]
        cuts = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), size]
        for begin, end in itertools.pairwise(cuts):
            for first in range(begin, end, most):
                members = min(most, end - first)
                sampling = {
                    "n": members,
                    "temperature": request.temperature,
                    "top_p": 1.0,
                    "top_k": -1,
                    "max_tokens": int(own[first]),
                    "stop_token_ids": [int(token) for token in request.end_token_ids],
                    "ignore_eos": True,
                    "logprobs": 0,
                    "detokenize": False,
                    "seed": base + first,
                }
                tokens = [int(token) for token in request.prompts[prompt]]
                jobs.append(Job(prompt, tokens, prompt * size + first, members, sampling))
    return jobs
