"""One process per run folder: a lock that the kernel drops when its holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_pipeline.errors import RunExistsError


def _holder(run_dir: Path, written: str) -> str:
    beating = sorted(path.stem for path in (run_dir / "processes").glob("*.json"))
    return f"process {written}" if written else f"its own processes ({', '.join(beating) or 'unknown'})"


@contextmanager
def run_lock(
    run_dir: Path, *, shared: bool = False, advice: str = "Stop that first, or choose another folder with --out."
) -> Iterator[None]:
    """Hold the run folder's lock; the folder is made if it is not there.

    Args:
        run_dir: the run folder.
        shared: be one of several processes of one run, as collectors and learner are; they exclude only a process that
            wants the run for itself.
        advice: what to do where it is taken.

    Raises:
        RunExistsError: another live process holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunExistsError(
                f"the run {run_dir} is in use by {_holder(run_dir, file.read().strip())}. {advice}"
            ) from error
        if not shared:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield
