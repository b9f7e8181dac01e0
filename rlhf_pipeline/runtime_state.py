"""What a run keeps in its folder beside the store: checkpoints and the log; and errors that say what is safe."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_pipeline.checkpoint import list_checkpoints
from rlhf_pipeline.errors import RunStorageError
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


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Write what the package logs to a file as well."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("rlhf_pipeline")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        handler.close()


@contextmanager
def named_disk_errors(run_dir: Path) -> Iterator[None]:
    """Turn a bare OSError of the run folder's own files into one that says what is safe and what to do."""
    try:
        yield
    except OSError as error:
        if type(error).__module__ != "builtins":
            raise  # an error of ours or of the store says it already
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            advice = "Choose a folder that can be written: --out OTHER_FOLDER."
        else:
            advice = (
                "Every stored trajectory and every finished checkpoint is whole. "
                "Free some space, then type the same command with --resume."
            )
        raise RunStorageError(f"the run folder {run_dir} cannot be written: {error}. {advice}") from error
