"""How requests and weights are put to vLLM, in process or over HTTP."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_pipeline.policies.engines.completions import Int64Array
from rlhf_pipeline.policies.engines.protocol import Request
from rlhf_pipeline.policies.engines.uniforms import stream_keys


@dataclass(frozen=True, slots=True)
class Job:
    """Members of one group with one limit: vLLM's requests are one prompt with several completions."""

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


@contextmanager
def with_head(folder: Path) -> Iterator[Path]:
    """Give a checkpoint folder in which a head that is tied to the embedding stands as a tensor of its own.

    vLLM 0.32 leaves such a head as it was when it loads weights again from a folder that has the embedding alone, and
    says so in its log only. The folder that is given lies beside the other, with links to its files.

    Args:
        folder: as `save_pretrained` writes it.

    Yields:
        The folder itself where its head is not tied.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("*.safetensors"))
    embedding = _embedding(files) if config.get("tie_word_embeddings") else None
    if embedding is None:
        yield folder
        return
    with TemporaryDirectory(prefix=".engine-", dir=folder.parent) as made:
        for file in files:
            (Path(made) / file.name).symlink_to(file.resolve())
        (Path(made) / "config.json").symlink_to((folder / "config.json").resolve())
        save_file({_HEAD: embedding}, Path(made) / "head.safetensors")
        yield Path(made)


_HEAD = "lm_head.weight"
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$")


def _embedding(files: Sequence[Path]) -> Tensor | None:
    """Return the input embedding that stands for the head; None where there is a head, or none is found."""
    found: Tensor | None = None
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names: list[str] = list(tensors.keys())
            if _HEAD in names:
                return None
            for name in names:
                if found is None and _EMBEDDING.search(name):
                    found = tensors.get_tensor(name)
    return found
