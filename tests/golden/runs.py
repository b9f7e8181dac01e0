"""Small runs, one function each, and what is kept of them: figures that any rewrite of the data path must repeat.

A run's digest holds nothing of how the store lays rows out: columns are hashed in the order of the trajectories' ids,
and a step of the ledger is named by those ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs.transforms import Compose

from rlhf_pipeline import (
    GRPOLoss,
    KLRewardTransform,
    Learn,
    Learner,
    MCAdvantage,
    Pipeline,
    Replay,
    RetrieveLogProb,
    Sample,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    override,
)
from rlhf_pipeline.buffer.trajectory_schema import TURNS
from rlhf_pipeline.run.rerun import plan_rerun, rerun
from rlhf_pipeline.run.start import run
from tests.processes import Children
from tests.rlhf_pipeline import small
from tests.rlhf_pipeline.small import collect, learn, sums_collector, talker
from trajectory_store import TrajectoryStore

Digest = dict[str, Any]

LEFT_OUT = frozenset({"created_at", "slot", "source_row", "pending_id", "priority"})
"""Columns that hold the time, row ids or bookkeeping. Of the rest, a column that was not recorded is not compared."""

FIGURES = ("loss", "task_reward", "grad_norm", "kl_k1", "kl_coef", "kl_approx", "entropy", "ess", "clip_fraction")
"""Of each step's metrics, as hexadecimal floats: all bits."""


def machine() -> dict[str, str]:
    """Return what decides the last bits of a result on this machine."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        first = cpuinfo.read_text().split("\n\n")[0]
        facts = re.findall(r"^(?:vendor_id|cpu family|model|model name|stepping|cache size)\s*:\s*(.*)$", first, re.M)
        # A virtual machine may hide instructions of its processor.
        flags = re.findall(r"^flags\s*:\s*(.*)$", first, re.M)
        model = " ".join([*facts, *map(digest_of, flags)])
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "architecture": platform.machine(),
        "processor": model,
    }


# ------------------------------------------------------------------------------------------------- what is kept


def digest_of(value: Any) -> str:
    """Return a short hash of an array, of bytes, or of anything JSON-ready."""
    hashed = hashlib.sha256()
    if isinstance(value, np.ndarray):
        hashed.update(f"{value.dtype.str} {value.shape} ".encode())
        value = np.ascontiguousarray(value).tobytes()
    elif not isinstance(value, bytes):
        value = json.dumps(value, sort_keys=True).encode()
    hashed.update(value)
    return hashed.hexdigest()[:16]


def stored_columns(store: TrajectoryStore) -> dict[str, str]:
    """Return a hash per column, over the rows in the order of their trajectory ids."""
    ids = store.ids()
    order = np.argsort(store.read_scalars("trajectory_id", ids), kind="stable")
    rows = store.read(ids[order])
    columns = {}
    for name, values in sorted(rows.items()):
        if name in LEFT_OUT:
            continue
        plain_values = [_plain(value) for value in values]
        columns[name] = digest_of("\n".join(f"{v}" for v in plain_values).encode())
    return columns


def _plain(value: Any) -> str:
    """Return a stored value, scalar, array or text, as text that tells every bit."""
    if isinstance(value, str):
        return json.dumps(value)
    array = np.asarray(value)
    # One NaN is like another: which of them a computation leaves depends on the instruction.
    data = np.where(np.isnan(array), np.float64("nan").astype(array.dtype), array) if array.dtype.kind == "f" else array
    return f"{array.dtype.str}{array.shape}{data.tobytes().hex()}"


def hexadecimal(value: float | None) -> str | None:
    """Return a figure with all its bits, or None."""
    return None if value is None else float(value).hex()


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def digest_of_run(run_dir: Path) -> Digest:
    """Return what is kept of a run folder: columns, trajectory ids by step, figures by step, the last weights."""
    with TrajectoryStore.open(run_dir / "store") as store:
        columns, num_rows = stored_columns(store), len(store)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    weights = next(path for name in WEIGHTS if (path := newest / name).exists())
    return {
        "num_rows": num_rows,
        "columns": columns,
        "steps": [digest_of(row["trajectory_ids"]) for row in rows_of(run_dir / "ledger.jsonl")],
        "metrics": [
            {name: hexadecimal(row.get(name)) for name in FIGURES if name in row}
            for row in rows_of(run_dir / "metrics.jsonl")
        ],
        "weights": digest_of(weights.read_bytes()),
    }


WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


# ---------------------------------------------------------------------------------------------- the definitions


def tiny(**changes: str) -> Pipeline:
    """Return the pipeline of most runs here; fields by path, with two underscores for the dot."""
    base = {
        "collect__prompts_per_rollout": "4",
        "buffer__max_staleness": "0",
        "learn__epochs": "1",
        "learn__checkpoint_every": "3",
        "learn__layout": "padded",
    }
    return small.tiny(**base | changes)


def straight(pipeline: Pipeline, folder: Path) -> Digest:
    """Run a pipeline in `folder` and keep its digest."""
    run(pipeline, run_dir=folder / "run")
    return digest_of_run(folder / "run")


def copy_digits(folder: Path) -> Digest:
    """The default pipeline's settings at a smaller size."""
    return straight(tiny(), folder)


def kl_adaptive(folder: Path) -> Digest:
    """KL in the reward with the adaptive controller, and KL in the loss; stopped and resumed half-way."""
    pipeline = tiny(write__kl_coef="0.1", write__kl_target="0.01", write__kl_horizon="20", loss__kl_to_ref_coeff="0.05")
    run(override(pipeline, "learn.steps", "3"), run_dir=folder / "run")
    run(pipeline, run_dir=folder / "run", resume=True)
    return digest_of_run(folder / "run")


def several_updates(folder: Path) -> Digest:
    """Three updates per rollout, drawn by priority from what is up to eight steps old, with a limit of uses."""
    return straight(
        tiny(
            write__estimator="grpo",
            buffer__max_staleness="8",
            sample__strategy="priority",
            sample__batch_size="12",
            sample__tau="4",
            sample__max_uses="3",
            learn__epochs="3",
            learn__steps="9",
            learn__token_budget="64",
            loss__aggregation="sequence_mean",
            loss__tis_cap="2.0",
        ),
        folder,
    )


def dropped_groups(folder: Path) -> Digest:
    """Groups without spread are dropped, the ring keeps 32 trajectories, and batches are mixed of new and old."""
    return straight(
        tiny(
            write__zero_variance="drop",
            write__estimator="rloo",
            buffer__max_trajectories="32",
            buffer__max_staleness="4",
            sample__strategy="mix",
            sample__tau="4",
            sample__batch_size="12",
        ),
        folder,
    )


def lora(folder: Path) -> Digest:
    """LoRA adapters, with the model without them as the reference."""
    pipeline = tiny(write__kl_coef="0.1", learn__lr="5e-2", learn__steps="4")
    pipeline = dataclasses.replace(pipeline, policy=dataclasses.replace(pipeline.policy, lora_rank=4))
    return straight(pipeline, folder)


def packed(folder: Path) -> Digest:
    """Without padding, the prompt of a group computed once."""
    return straight(tiny(learn__layout="prefix_shared", loss__objective="gspo", learn__steps="4"), folder)


def offline(folder: Path) -> Digest:
    """Two epochs over the store of another run; advantages are kept, reference log-probs are added."""
    run(tiny(), run_dir=folder / "before")
    pipeline = dataclasses.replace(tiny(), replay=Replay(stores=(str(folder / "before"),), epochs=2.0))
    pipeline = dataclasses.replace(pipeline, sample=Sample(batch_size=24))
    return straight(override(pipeline, "write.kl_coef", "0.1"), folder)


def multi_turn(folder: Path) -> Digest:
    """Conversations with a tool through the whole write path, and three optimizer steps on them."""
    policy, reference = talker(0), talker(1)
    buffer = TrajectoryReplayBuffer(
        storage=TrajectoryStorage(folder / "store", extra=[TURNS]),
        transform=Compose(MCAdvantage(8), KLRewardTransform(coef=0.1), RetrieveLogProb(reference)),
    )
    learner = Learner(
        policy=policy,
        loss=GRPOLoss(policy),
        buffer=buffer,
        config=Learn(lr=1e-2, layout="padded"),
        max_staleness=0,
        max_completion_tokens=24,
        ledger=None,
        seed=0,
    )
    collector = sums_collector(policy, buffer, group_size=8)
    metrics = []
    for step in range(1, 4):
        collector.collect(step, policy_version=step - 1)
        found = learner.step(step)
        metrics.append({name: hexadecimal(found[name]) for name in FIGURES if name in found})
    columns = stored_columns(buffer.store)
    num_rows = len(buffer.store)
    buffer.trajectories.close()
    weights = b"".join(p.detach().numpy().tobytes() for p in policy.parameters())
    return {"num_rows": num_rows, "columns": columns, "metrics": metrics, "weights": digest_of(weights)}


def _ragged(num: int, group_size: int, *, seed: int, failed: Sequence[int] = ()) -> list[TensorDict]:
    """Return trajectories of random lengths, one TensorDict each, with all log-probs."""
    rng = torch.Generator().manual_seed(seed)
    batches = []
    for i, length in enumerate(torch.randint(4, 12, (num,), generator=rng).tolist()):
        mask = torch.arange(length) >= 2
        scores = torch.where(mask, -torch.rand(length, generator=rng), torch.nan)
        row: dict[str, Any] = {
            "tokens": {"full": torch.randint(0, 50, (length,), generator=rng)},
            "masks": {"all_assistant_mask": mask},
            "log_probs": {"full": scores},
            "next": {"ref_log_probs": {"full": scores - 0.25 * mask}, "done": torch.tensor(True)},
            "task_reward": torch.tensor(math.nan if i in failed else float(i * 7 % 5)),
            "group_id": torch.tensor(i // group_size),
            "trajectory_id": torch.tensor(i),
            "policy_version": torch.tensor(i // 16),
            "num_prompt_tokens": torch.tensor(2),
            "finish_reason": "stop" if i % 3 else "length",
            "prompt": f"prompt {i // group_size}",
            "completion": f"completion é {i}",
            "meta": "{}",
        }
        batches.append(TensorDict(row, batch_size=[]))
    return batches


def waiting_groups(folder: Path) -> Digest:
    """Groups whose members arrive shuffled, three at a time, into four estimators; some have no reward; reopened once.

    The advantages are those of the whole groups, whatever arrived when.
    """
    digests: dict[str, Any] = {}
    order = np.random.default_rng(5).permutation(48).tolist()
    for estimator in ("grpo", "rloo", "opo", "reinforce_pp"):
        rows, path = _ragged(48, 6, seed=1, failed=(3, 17, 18)), folder / estimator
        half = TrajectoryReplayBuffer(storage=str(path), transform=_write_path(estimator))
        for at in range(0, 24, 3):
            half.extend(lazy_stack([rows[i] for i in order[at : at + 3]]))
        half.trajectories.close()
        rest = TrajectoryReplayBuffer(storage=TrajectoryStorage(path), transform=_write_path(estimator))
        for at in range(24, 48, 3):
            rest.extend(lazy_stack([rows[i] for i in order[at : at + 3]]))
        digests |= {f"{estimator}/{name}": value for name, value in stored_columns(rest.store).items()}
        digests[f"{estimator}/num_rows"] = str(len(rest.store))
        rest.trajectories.close()
    return {"columns": digests}


def _write_path(estimator: str) -> Compose:
    batch_groups = 8 if estimator == "reinforce_pp" else None
    return Compose(MCAdvantage(6, estimator=estimator, batch_groups=batch_groups), KLRewardTransform(coef=0.1))


def _collect_in_a_process(pipeline: Pipeline, run_dir: Path) -> None:
    torch.set_num_threads(1)
    collect(pipeline, run_dir=run_dir)


def two_collectors(folder: Path) -> Digest:
    """Two collectors and a learner, each a process. Who comes first is not fixed, so what the weights decide differs.

    The steps are taken again as the ledger says, and must give the same bits; what the weights do not decide is kept.
    """
    pipeline, run_dir = tiny(buffer__max_staleness="2", learn__keep_checkpoints="9"), folder / "run"
    with Children(folder / "processes") as children:
        collectors = [children.call(_collect_in_a_process, pipeline, run_dir) for _ in range(2)]
        learn(pipeline, run_dir=run_dir)
        exit_codes = [process.wait(120) for process in collectors]
    steps = list(rerun(pipeline, plan_rerun(run_dir, from_step=1), seed=0, device="cpu"))
    names = {"prompt", "group_id", "num_prompt_tokens", "trajectory_id"}
    learned = {i for row in rows_of(run_dir / "ledger.jsonl") for i in row["trajectory_ids"]}
    with TrajectoryStore.open(run_dir / "store") as store:
        first = sorted(store.read_scalars("trajectory_id").tolist())[: pipeline.collect.rollout_size * 6]
    return {
        "exit_codes": exit_codes,
        "replayed": [step.same_bits and step.ok for step in steps],
        "learned_from": len(learned),
        "first_trajectories": digest_of(first),
        "prompts": digest_of(_prompts(run_dir, names, first)),
    }


def _prompts(run_dir: Path, names: Iterable[str], trajectories: list[int]) -> list[str]:
    with TrajectoryStore.open(run_dir / "store") as store:
        ids = store.ids()
        trajectory_ids = store.read_scalars("trajectory_id", ids)
        chosen = ids[np.isin(trajectory_ids, trajectories)]
        chosen = chosen[np.argsort(store.read_scalars("trajectory_id", chosen))]
        rows = store.read(chosen, sorted(names))
        return [f"{name} {_plain(value)}" for name, values in sorted(rows.items()) for value in values]


RUNS: dict[str, Callable[[Path], Digest]] = {
    made.__name__: made
    for made in (
        copy_digits,
        kl_adaptive,
        several_updates,
        dropped_groups,
        lora,
        packed,
        offline,
        multi_turn,
        waiting_groups,
        two_collectors,
    )
}
"""Every run by its name."""


@contextmanager
def _one_thread() -> Any:
    """Sums over one thread are in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def digest_of_definition(name: str) -> Digest:
    """Run a definition in a folder of its own and return its digest."""
    with tempfile.TemporaryDirectory() as folder, _one_thread():
        return RUNS[name](Path(folder))
