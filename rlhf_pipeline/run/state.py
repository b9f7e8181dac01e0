"""What a run keeps in its folder beside the store: the checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rlhf_pipeline.files import sync_file
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.run.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from rlhf_pipeline.run.events import EventHandler
from rlhf_pipeline.run.loop import tell
from rlhf_pipeline.run.progress import Progress


class Saved(Protocol):
    """The live objects that a checkpoint is about; `Parts` of a run that collects, and of one that does not."""

    @property
    def buffer(self) -> TrajectoryReplayBuffer:
        """Where the trajectories are."""
        ...

    @property
    def learner(self) -> Learner:
        """What learns."""
        ...

    def write_path_state(self) -> dict[str, Any]:
        """JSON-ready state of the transforms."""
        ...

    def load_write_path_state(self, state: dict[str, Any]) -> None:
        """Put back what `write_path_state` returned."""
        ...


def save_run(run_dir: Path, parts: Saved, progress: Progress, *, keep: int) -> None:
    """Write a checkpoint; what it counts on reaches the disk before it."""
    parts.buffer.store.flush()
    for name in ("metrics.jsonl", "ledger.jsonl"):
        sync_file(run_dir / name)
    save_checkpoint(
        run_dir / "checkpoints",
        progress.step,
        parts.learner,
        state={"progress": vars(progress), "write_path": parts.write_path_state()},
        keep=keep,
    )


def restore(run_dir: Path, parts: Saved, on_event: EventHandler) -> Progress:
    """Load the newest checkpoint that is whole, if there is one, and return how far the run is.

    Raises:
        DataError: there are checkpoints, and none is whole.
    """
    progress = Progress()
    newest = newest_checkpoint(run_dir / "checkpoints", skip=lambda message: tell(on_event, message))
    if newest is not None:
        state = load_checkpoint(newest, parts.learner, checked=True)
        progress = Progress(**state["progress"])
        parts.load_write_path_state(state["write_path"])
    return progress
