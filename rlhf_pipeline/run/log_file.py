"""The log files of a run. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_pipeline.errors import plain
from rlhf_pipeline.run.folder import RunFolder


@contextmanager
def write_log(run: RunFolder, file: Path | None = None, level: int = logging.WARNING) -> Iterator[None]:
    """Also write the package's log, from a level on, to a file; `log.txt` by default."""
    handler = _QuietHandler(run.log_file if file is None else file, encoding="utf-8")
    handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
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
        run.place.keep_log(run.log_file if file is None else file)


class _QuietHandler(logging.FileHandler):
    """Writes a log that may be cut short: a full disk ends the run elsewhere, in a sentence."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing about a line that could not be written."""


class _PlainFormatter(logging.Formatter):
    """Formats lines that are safe to print to a terminal, whatever names and exceptions they contain."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))
