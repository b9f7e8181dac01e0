"""What a run keeps in its folder beside the store: the checkpoints."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.checkpoint import list_checkpoints
from rlhf_pipeline.jsonl import sync_file
from rlhf_pipeline.run_progress import Progress
from rlhf_pipeline.runtime_build import Parts


def save_run(run_dir: Path, parts: Parts, progress: Progress, *, keep: int) -> None:
    """Write a checkpoint; what it counts on reaches the disk before it."""
    parts.buffer.store.flush()
    for name in ("metrics.jsonl", "ledger.jsonl"):
        sync_file(run_dir / name)
    parts.learner.save(
        run_dir / "checkpoints",
        progress.step,
        state={"progress": vars(progress), "write_path": parts.write_path_state()},
        keep=keep,
    )


def restore(run_dir: Path, parts: Parts) -> Progress:
    """Load the newest checkpoint, if there is one, and return how far the run is."""
    progress = Progress()
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    if checkpoints:
        state = parts.learner.load(checkpoints[-1])
        progress = Progress(**state["progress"])
        parts.load_write_path_state(state["write_path"])
    return progress
