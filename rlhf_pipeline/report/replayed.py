"""Runs that learned from stores: what they gathered, and whether they reproduced the run that filled the store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline.run.checkpoint import list_checkpoints
from rlhf_pipeline.run.folder import RunFolder

_COMPARED = ("loss", "task_reward", "grad_norm")


def sources_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return a run's record of each store that it learned from; empty for a run that collected.

    Each has `path`, `num_stored`, `num_chosen` and `num_ungraded`.
    """
    file = RunFolder(run_dir).choice_file
    return json.loads(file.read_text(encoding="utf-8"))["sources"] if file.is_file() else []


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A replay in recorded order against the run that filled the store.

    Attributes:
        num_steps: steps that both have.
        num_missing: steps of the run that the replay has not taken.
        different: the first step in which loss, reward or gradient norm differ, and which of them; None if none does.
        num_different: steps that differ.
        largest: the largest difference of a loss, relative to the larger of the two.
        weights_step: the newest step of which both have a checkpoint; None without one.
        same_weights: whether its weights are equal, byte for byte; None without one.
    """

    num_steps: int
    num_missing: int
    different: tuple[int, str] | None
    num_different: int
    largest: float
    weights_step: int | None
    same_weights: bool | None

    @property
    def same(self) -> bool:
        """Whether nothing differs that both have."""
        return self.num_different == 0 and self.same_weights is not False


def compare(run: RunFolder, replay: RunFolder) -> Comparison:
    """Compare the lines of `metrics.jsonl`, and the weights of the newest checkpoint that both have.

    Where the run dropped groups without spread, its store does not tell the mean reward, which is then not compared.
    """
    dropped = run.config.pipeline.get("write", {}).get("zero_variance") == "drop"
    compared = [name for name in _COMPARED if not (dropped and name == "task_reward")]
    num, missing, largest = 0, 0, 0.0
    different: list[tuple[int, str]] = []
    again = iter(replay.metrics)
    other = next(again, None)
    for row in run.metrics:
        while other is not None and other["step"] < row["step"]:
            other = next(again, None)
        if other is None or other["step"] != row["step"]:
            missing += 1
            continue
        num += 1
        different += [(row["step"], name) for name in compared if row.get(name) != other.get(name)][:1]
        old, new = row.get("loss"), other.get("loss")
        if old is not None and new is not None and old != new:
            largest = max(largest, abs(old - new) / max(abs(old), abs(new)))
    step, same = _compare_weights(run.checkpoints, replay.checkpoints)
    return Comparison(
        num_steps=num,
        num_missing=missing,
        different=different[0] if different else None,
        num_different=len(different),
        largest=largest,
        weights_step=step,
        same_weights=same,
    )


def _compare_weights(left: Path, right: Path) -> tuple[int | None, bool | None]:
    names = {path.name for path in list_checkpoints(left)} & {path.name for path in list_checkpoints(right)}
    for name in sorted(names, reverse=True):
        for file in ("model.safetensors", "adapter_model.safetensors"):
            a, b = left / name / file, right / name / file
            if a.is_file() and b.is_file():
                return int(name.rpartition("-")[2]), _same_bytes(a, b)
    return None, None


def _same_bytes(left: Path, right: Path) -> bool:
    if left.stat().st_size != right.stat().st_size:
        return False
    with left.open("rb") as a, right.open("rb") as b:
        while True:
            block = a.read(1 << 22)
            if block != b.read(1 << 22):
                return False
            if not block:
                return True
