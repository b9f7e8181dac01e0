"""Whether a run over the store of another one has reproduced that one's steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.report.diff_steps import STEP_VALUES, joined
from rlhf_pipeline.run.folder import RunFolder


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
    compared = [name for name in STEP_VALUES if not (dropped and name == "task_reward")]
    num, missing, largest = 0, 0, 0.0
    different: list[tuple[int, str]] = []
    for step, row, other in joined(run.metrics, replay.metrics):
        if row is None or other is None:
            missing += other is None
            continue
        num += 1
        different += [(step, name) for name in compared if row.get(name) != other.get(name)][:1]
        old, new = row.get("loss"), other.get("loss")
        if old is not None and new is not None and old != new:
            largest = max(largest, abs(old - new) / max(abs(old), abs(new)))
    weights_step, same_weights = _compare_weights(run, replay)
    return Comparison(
        num_steps=num,
        num_missing=missing,
        different=different[0] if different else None,
        num_different=len(different),
        largest=largest,
        weights_step=weights_step,
        same_weights=same_weights,
    )


def _compare_weights(left: RunFolder, right: RunFolder) -> tuple[int | None, bool | None]:
    names = {path.name for path in left.saved()} & {path.name for path in right.saved()}
    for name in sorted(names, reverse=True):
        for file in ("model.safetensors", "adapter_model.safetensors"):
            a, b = (run.bring(run.checkpoints / name) / file for run in (left, right))
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
