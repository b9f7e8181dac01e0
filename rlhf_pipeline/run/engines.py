"""The engine that a definition names, and how it gets new weights from the learner."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_pipeline.config import Pipeline, PretrainedPolicy
from rlhf_pipeline.policies.engines.protocol import Engine, Weights
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.files import new_folder, remove_folder
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.weights import version_folder

HandOver = Callable[[int], Weights]
"""Returns the policy's weights, of the given version, in the form that an engine accepts."""

_KEEP = 2


@contextmanager
def chosen_engine(pipeline: Pipeline, policy: TokenPolicy, *, run: RunFolder, device: str) -> Iterator[HandOver | None]:
    """Let a policy sample with the engine of a definition until the end of the block."""
    name = pipeline.collect.engine
    if name == "slots":
        yield None
        return
    engine = _vllm(pipeline, policy, run, device) if name == "vllm" else _server(pipeline, policy, run)
    policy.engine = engine
    try:
        if name == "vllm":
            yield lambda version: policy.model.state_dict()
        else:
            yield lambda version: _written(policy, run.weights, version)
    finally:
        policy.engine = None
        engine.close()


@contextmanager
def own_slots(pipeline: Pipeline, policy: TokenPolicy) -> Iterator[bool]:
    """Let a policy sample in this process inside the block if its engine is a server, whose weights others change."""
    apart, engine = pipeline.collect.engine not in ("slots", "vllm"), policy.engine
    if apart:
        policy.engine = None
    try:
        yield apart
    finally:
        if apart:
            policy.engine = engine


def _server(pipeline: Pipeline, policy: TokenPolicy, run: RunFolder) -> Engine:
    from rlhf_pipeline.policies.engines.http import HTTPEngine

    path = run.path.resolve()
    owner = f"{path.name}-{zlib.crc32(str(path).encode()):08x}"
    return HTTPEngine(pipeline.collect.engine, owner=owner, vocab=policy.vocab_size, max_positions=policy.max_positions)


def _vllm(pipeline: Pipeline, policy: TokenPolicy, run: RunFolder, device: str) -> Engine:
    from rlhf_pipeline.policies.engines.vllm import VLLMEngine

    config = pipeline.policy
    model = Path(config.path) if isinstance(config, PretrainedPolicy) else run.weights / "engine"
    if not (model / "config.json").is_file():  # made from scratch, or a name on the hub
        model = run.weights / "engine"
        with new_folder(model, sync=False) as folder:
            policy.save_pretrained(folder)
    return VLLMEngine(
        model,
        num_slots=pipeline.collect.num_slots,
        vocab=policy.vocab_size,
        max_positions=policy.max_positions,
        dtype=str(policy.head_weight.dtype).removeprefix("torch."),
        memory=pipeline.collect.engine_memory,
        eager=device == "cpu",
    )


def _written(policy: TokenPolicy, folder: Path, version: int) -> Path:
    """Write the weights of a version where a server reads them; keep the last two."""
    target = version_folder(folder, version)
    with new_folder(target, sync=False) as temporary:
        policy.save_pretrained(temporary)
    for old in sorted(path for path in folder.glob("version-*") if path != target)[: 1 - _KEEP]:
        remove_folder(old)
    return target
