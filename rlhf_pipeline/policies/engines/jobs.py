"""Shared by the vLLM engines, in process and over HTTP: the form of requests, replies and weights."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_pipeline.errors import EngineError, UnsupportedError
from rlhf_pipeline.policies.engines.protocol import Int64Array, RaggedCompletions, Request, VersionSpans
from rlhf_pipeline.policies.engines.sampling import stream_keys


@dataclass(frozen=True, slots=True)
class Job:
    """Members of one group with the same limit: a vLLM request is one prompt with several completions."""

    prompt: int
    """The index of the prompt in the request."""
    tokens: list[int]
    first: int
    """The index of its first completion in the request."""
    members: int
    sampling: dict[str, Any]
    """vLLM's `SamplingParams`."""


def jobs_of(request: Request, limits: Int64Array, *, most: int | None) -> list[Job]:
    """Cut a request into one job per prompt, or several where limits differ within a group or a group is too large.

    Args:
        request: what to sample.
        limits: of each completion, int64 `[request.count]`.
        most: the most members of a job; None sets no limit.
    """
    if request.truncation is not None:
        raise UnsupportedError(
            "vLLM reports log-probs renormalised over the support of top-k, top-p and min-p, but not the "
            "probability mass of the support, so exact learning is impossible. Use collect.engine=slots, or leave "
            "top_k, top_p and min_p at their defaults."
        )
    jobs: list[Job] = []
    size = request.group_size
    # vLLM rejects several identical completions.
    most = 1 if request.temperature == 0 else most or size
    for prompt, stream in enumerate(request.streams()):
        # 62 bits: vLLM takes a signed seed and increments it for each member.
        base = int(stream_keys(request.seed, [stream], [0])[0] >> np.uint64(2))
        prompt_limits = limits[prompt * size : (prompt + 1) * size]
        cuts = [0, *(np.flatnonzero(np.diff(prompt_limits)) + 1).tolist(), size]
        for begin, end in itertools.pairwise(cuts):
            for first in range(begin, end, most):
                members = min(most, end - first)
                sampling = {
                    "n": members,
                    "temperature": request.temperature,
                    "top_p": 1.0,
                    "top_k": -1,
                    "max_tokens": int(prompt_limits[first]),
                    "stop_token_ids": [int(token) for token in request.end_token_ids],
                    "ignore_eos": True,
                    "logprobs": 0,
                    "detokenize": False,
                    "seed": base + first,
                }
                tokens = [int(token) for token in request.prompts[prompt]]
                jobs.append(Job(prompt, tokens, prompt * size + first, members, sampling))
    return jobs


@dataclass(slots=True)
class Row:
    """One completion as it arrives, whole or token by token.

    Attributes:
        tokens: its token ids.
        log_probs: of each token; None where vLLM returned none.
        versions: of the weights that sampled each token; empty if unknown.
        reason: why it ended.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str | None = "abort"


def collected(request: Request, rows: Sequence[Row], *, versioned: bool) -> RaggedCompletions:
    """Return the completions of a request."""
    unknown = {row.reason for row in rows} - {"stop", "length", "abort"}
    if unknown:
        raise EngineError(
            f"vLLM ended completions with an unknown finish reason ({', '.join(sorted(map(str, unknown)))}); "
            "these completions were discarded."
        )
    lengths = np.array([len(row.tokens) for row in rows], np.int64)
    versions = np.array([version for row in rows for version in row.versions], np.int64)
    # None becomes NaN.
    log_probs = np.array([value for row in rows for value in row.log_probs], np.float32)
    aborted = np.array([row.reason == "abort" for row in rows], np.bool_)
    return RaggedCompletions(
        token_ids=np.array([token for row in rows for token in row.tokens], np.int64),
        log_probs=np.where(np.isfinite(log_probs), log_probs, np.float32(np.nan)),
        lengths=lengths,
        prompt_index=request.prompt_of,
        member=request.member_of,
        stopped=np.array([row.reason == "stop" for row in rows], np.bool_),
        spans=VersionSpans.of_tokens(versions, lengths) if versioned else None,
        aborted=aborted if aborted.any() else None,
    )


@contextmanager
def with_head(folder: Path) -> Iterator[Path]:
    """Yield a checkpoint folder in which a head that is tied to the embedding is a separate tensor.

    When vLLM 0.32 reloads weights from a folder with the embedding alone, it leaves a tied head unchanged, and reports
    that only in its log. The yielded folder is next to the original, with links to its files.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("*.safetensors"))
    embedding = _embedding(files) if config.get("tie_word_embeddings") else None
    if embedding is None:
        yield folder
        return
    with TemporaryDirectory(prefix=".engine-", dir=folder.parent) as copy:
        for file in files:
            (Path(copy) / file.name).symlink_to(file.resolve())
        (Path(copy) / "config.json").symlink_to((folder / "config.json").resolve())
        save_file({_HEAD: embedding}, Path(copy) / "head.safetensors")
        yield Path(copy)


_HEAD = "lm_head.weight"
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$")


def _embedding(files: Sequence[Path]) -> Tensor | None:
    """Return the input embedding that serves as the head; None if there is a head, or if no embedding is found."""
    embedding: Tensor | None = None
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names: list[str] = list(tensors.keys())
            if _HEAD in names:
                return None
            for name in names:
                if embedding is None and _EMBEDDING.search(name):
                    embedding = tensors.get_tensor(name)
    return embedding
