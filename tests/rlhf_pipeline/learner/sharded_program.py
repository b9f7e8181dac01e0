"""A program for torchrun: a few steps of a sharded learner over a store that is there.

STORE, CHECKPOINTS, first step, last step, dtype, a checkpoint to start from or "-", and the loss: "plain", or
"corrected" for one with a proximal policy and no entropy bonus. Four processes are as if on machines of their own, of
which the first one sees the folder of checkpoints. Every process prints as JSON which rows it read in each step, the
first one also what each step gave. Without torchrun it is the same learner in one process.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_pipeline import GRPOLoss, Learn, TrajectoryReplayBuffer, scratch_policy
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.learner.distributed import shard_policy
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.run.checkpoint import load_checkpoint, save_checkpoint
from rlhf_pipeline.run.ledger import Ledger
from trajectory_store import TrajectoryStore


def counted(reads: list[int]) -> None:
    """Note the rows of which the store hands out tokens, or anything else that a trajectory has many of."""

    def noting(read: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(read)

        def call(store: TrajectoryStore, *args: Any, **options: Any) -> Any:
            arguments = signature.bind(store, *args, **options).arguments
            ids, names = arguments.get("ids"), arguments.get("columns", store.schema.names)
            if any(store.schema[name].axis is not None for name in ([names] if isinstance(names, str) else names)):
                reads.extend((store.ids() if ids is None else np.asarray(ids)).tolist())
            return read(store, *args, **options)

        return call

    for name in ("read", "read_batch", "read_ragged", "read_padded"):
        setattr(TrajectoryStore, name, noting(getattr(TrajectoryStore, name)))


def main() -> None:
    reads: list[int] = []
    counted(reads)
    store, checkpoints, first, last, dtype, start, kind = sys.argv[1:8]
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    policy = scratch_policy("0123456789", hidden_size=16, num_layers=2, num_heads=2, seed=0)
    model = policy.model
    model.lm_head.weight = (
        model.model.embed_tokens.weight
    )  # tied, as in most small models: one parameter in two modules
    model.config.tie_word_embeddings = True
    policy.to(getattr(torch, dtype))
    shards = shard_policy(policy) if several else None
    is_first = shards is None or shards.is_first
    storage = TrajectoryStorage(store, mode="a" if is_first else "r")
    corrected = GRPOLoss(policy, entropy_bonus=False, decoupled=True, tis_cap=2.0)
    learner = Learner(
        policy=policy,
        loss=GRPOLoss(policy, entropy_bonus=True) if kind == "plain" else corrected,
        buffer=TrajectoryReplayBuffer(storage=storage),
        config=Learn(lr=1e-2, token_budget=9),
        max_staleness=100,
        max_completion_tokens=8,
        ledger=Ledger(Path(store).with_name("ledger.jsonl")) if is_first else None,
        seed=0,
        shards=shards,
    )
    if start != "-":
        state = load_checkpoint(Path(start), learner)
        assert state["note"] == "kept"
    lines, read_by_step = [], []
    path = Path(checkpoints)
    if not is_first and dist.get_world_size() == 4:
        checkpoints = "/nowhere"
    for step in range(int(first), int(last) + 1):
        reads.clear()
        lines.append(learner.step(step))
        read_by_step.append([*reads])
        path = save_checkpoint(Path(checkpoints), step, learner, state={"note": "kept"}, keep=2)
    report: dict[str, Any] = {"reads": read_by_step}
    if is_first:
        names = ("loss", "grad_norm", "entropy", "ess", "ess_sequence", "kl_approx", "clip_fraction", "num_tokens")
        steps = [{name: line[name] for name in names} for line in lines]
        whole = (path / "model.safetensors").is_file()
        weights = (
            {name: float(w.double().sum()) for name, w in load_file(path / "model.safetensors").items()}
            if whole
            else {}
        )
        report |= {"steps": steps, "path": str(path), "weights": weights}
    sys.stdout.write(json.dumps(report) + "\n")
    storage.close()
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
