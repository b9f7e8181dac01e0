"""A run's log file, and disk errors that say what is safe. Imports no torch."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_pipeline.errors import RunStorageError


@contextmanager
def log_file(path: Path, level: int = logging.WARNING) -> Iterator[None]:
    """Write what the package logs, from a level on, to a file as well."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("rlhf_pipeline")
    before = package.level
    if not package.isEnabledFor(level):
        package.setLevel(level)
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(before)
        handler.close()


@contextmanager
def named_disk_errors(run_dir: Path) -> Iterator[None]:
    """Turn a bare OSError of the run folder's own files into one that says what is safe and what to do."""
    try:
        yield
    except OSError as error:
        if type(error).__module__ != "builtins":
            raise  # an error of ours or of the store says it already
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT):
            advice = "Choose a folder that can be written: --out OTHER_FOLDER."
        else:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = (
                "Every stored trajectory and every finished checkpoint is whole. "
                f"{'Free some space' if full else 'Mend that'}, then type the same command with --resume."
            )
        raise RunStorageError(f"the run folder {run_dir} cannot be written: {error}. {advice}") from error
