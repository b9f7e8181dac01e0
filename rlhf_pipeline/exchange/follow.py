"""Importing what a running trainer writes, while it writes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rlhf_pipeline.data.compression import SUFFIXES
from rlhf_pipeline.errors import MissingPathError
from rlhf_pipeline.exchange.dump_files import rollout_files, trial_results
from rlhf_pipeline.exchange.importer import FileReport, ImportReport, import_files

_POLL_S = 1.0
_SETTLED_S = 10.0
"""A file that is written again is considered complete when it has not changed for this long."""


def follow_folder(
    folder: str | Path,
    into: str | Path,
    *,
    stop: Callable[[], bool],
    until_quiet_s: float | None = None,
    on_round: Callable[[ImportReport], None] | None = None,
    on_vanished: Callable[[Path], None] | None = None,
    on_unreadable: Callable[[str], None] | None = None,
    wait: Callable[[float], None] = time.sleep,
    **options: Any,
) -> int:
    """Import the rollouts that a tool writes into a folder, until `stop` returns True; return their number.

    A file is read when it has changed. Rows are identified by their content, so a file that was renamed, rotated or
    compressed adds no rows, and an episode that the tool writes into two files is imported once. An incomplete last
    line is read once it is complete. A file that the tool writes again replaces its rows when it is complete. A
    trajectory of Harbor is read again when its trial's `result.json` changes.

    Args:
        folder: the output folder of the trainer, searched recursively.
        into: folder of the store.
        stop: called between rounds.
        until_quiet_s: end when no file has changed for this many seconds; None continues.
        on_round: called with the report of each round that imported rows.
        on_vanished: called with each file that disappeared without a compressed replacement: rows that were written to
            it after it was last read are unknown.
        on_unreadable: called at the end with the reason for each existing file that could not be read, such as a
            table that was never completed.
        wait: called between rounds with the number of seconds to wait.
        options: the options of `import_files`.

    Raises:
        MissingPathError: the folder does not exist.
        DefinitionError, DataError, RunExistsError, StoreError: see `import_files`.
    """
    source = Path(folder).expanduser().resolve()  # reports name files by their resolved paths
    if not source.is_dir():
        raise MissingPathError(f"there is no folder at {source} to follow.")
    on_file = options.pop("on_file", None)
    reported: set[Path] = set()

    def report_once(file: FileReport) -> None:
        if on_file is not None and file.path not in reported:
            on_file(file)
        reported.add(file.path)

    read: dict[Path, _State] = {}
    unsettled: dict[Path, float] = {}
    unreadable: dict[Path, str] = {}
    total, changed_at = 0, time.monotonic()
    while True:
        ends = stop()
        files = rollout_files(source)
        states = {file: state for file in files if (state := _state_of(file)) is not None}
        for file in _vanished(read.keys() - states.keys(), states.keys()):
            if on_vanished is not None:
                on_vanished(file)
        read = {file: state for file, state in read.items() if file in states}
        new = {file for file, state in states.items() if read.get(file) != state}
        if new:
            changed_at = time.monotonic()
        quiet = until_quiet_s is not None and time.monotonic() - changed_at >= until_quiet_s
        now = time.monotonic()
        settled = {file for file, since in unsettled.items() if ends or quiet or now - since >= _SETTLED_S} - new
        # A tool may write the rows of one file again into the next, so each is read with the one before it.
        pairs = zip([None, *files], files, strict=False)
        changed = [path for before, file in pairs if file in new for path in (before, file) if path is not None]
        for paths, is_settled in ((changed, ends), (settled & states.keys(), True)):
            if not paths:
                continue
            report = import_files(
                list(dict.fromkeys(paths)), into, growing=True, settled=is_settled, on_file=report_once, **options
            )
            for file in report.files:
                if file.awaits_rest:
                    unsettled[file.path] = now
                else:
                    unsettled.pop(file.path, None)
            unreadable = {
                file: why for file, why in unreadable.items() if not {file, *file.parents}.intersection(paths)
            } | report.unreadable
            read |= {file: states[file] for file in paths if file in states and file not in report.vanished}
            total += report.num_imported
            if on_round is not None and report.num_imported:
                on_round(report)
        if ends or quiet:
            for file, why in unreadable.items():
                if on_unreadable is not None and {file, *file.parents}.intersection(states):
                    on_unreadable(why)
            return total
        wait(_POLL_S)


def _vanished(missing: Iterable[Path], present: Iterable[Path]) -> list[Path]:
    """Return the missing files that are not there in a compressed, or decompressed, form."""
    plain = {_without_compression(path) for path in present}
    return sorted(path for path in missing if _without_compression(path) not in plain)


def _without_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in SUFFIXES else path


_State = tuple[tuple[int, int] | None, ...]


def _state_of(file: Path) -> _State | None:
    """Return what changes when a file, or the result of its trial, is written to; None if it no longer exists."""
    size = _size_and_time(file)
    return None if size is None else (size, *map(_size_and_time, trial_results(file)))


def _size_and_time(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns
