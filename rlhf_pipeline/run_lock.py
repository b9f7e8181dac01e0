"""One process per run folder: a lock that the kernel drops when its holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_pipeline.errors import RunExistsError


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run folder's lock; the folder is made if it is not there.

    Raises:
        RunExistsError: another live process holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunExistsError(
                f"the run {run_dir} is in use by process {file.read().strip() or 'unknown'}. "
                "Stop that process first, or choose another folder with --out."
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
