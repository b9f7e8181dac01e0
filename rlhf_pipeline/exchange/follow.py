"""Importing what a running trainer writes, while it writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import MissingPathError
from rlhf_pipeline.exchange.dump_files import rollout_files
from rlhf_pipeline.exchange.importer import FileReport, ImportReport, import_files

_POLL_S = 1.0


def follow_folder(
    folder: str | Path,
    into: str | Path,
    *,
    stop: Callable[[], bool],
    until_quiet_s: float | None = None,
    on_round: Callable[[ImportReport], None] | None = None,
    wait: Callable[[float], None] = time.sleep,
    **options: Any,
) -> int:
    """Import the rollouts that a tool writes into a folder, until `stop` says so; return how many.

    A file is read when it has changed, and its rows that are in the store are passed over: by their places, and where
    the tool names them, by their names, so that an episode that it writes into two files is one. A last line that is
    not whole yet waits.

    Args:
        folder: what the trainer writes into; its folders, too.
        into: folder of the store.
        stop: called between rounds.
        until_quiet_s: end when no file has changed for so many seconds; None goes on.
        on_round: called with the report of each round that imported something.
        wait: called between rounds with seconds.
        options: those of `import_files`.

    Raises:
        MissingPathError: the folder is not there.
        DefinitionError, DataError, RunExistsError, StoreError: see `import_files`.
    """
    source = Path(folder).expanduser()
    if not source.is_dir():
        raise MissingPathError(f"there is no folder at {source} to follow.")
    on_file = options.pop("on_file", None)
    reported: set[Path] = set()

    def tell(file: FileReport) -> None:
        if on_file is not None and file.path not in reported:
            on_file(file)
        reported.add(file.path)

    read: dict[Path, tuple[int, int]] = {}
    total, changed_at = 0, time.monotonic()
    while True:
        files = rollout_files(source)
        states = {file: state for file in files if (state := _state_of(file)) is not None}
        new = {file for file, state in states.items() if read.get(file) != state}
        if new:
            changed_at = time.monotonic()
            # A tool may write the rows of one file again into the next, so each is read with the one before it.
            pairs = zip([None, *files], files, strict=False)
            changed = [path for before, file in pairs if file in new for path in (before, file) if path is not None]
            report = import_files(list(dict.fromkeys(changed)), into, growing=True, on_file=tell, **options)
            read |= {file: states[file] for file in new}
            total += report.num_imported
            if on_round is not None and report.num_imported:
                on_round(report)
        if stop() or (until_quiet_s is not None and time.monotonic() - changed_at >= until_quiet_s):
            return total
        wait(_POLL_S)


def _state_of(file: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written to; None for one that is gone."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns
