"""Output of commands: lines that are safe for a terminal, and progress every few seconds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rlhf_pipeline.errors import PipelineError, count, plain, typed
from rlhf_pipeline.report.formatting import duration

_EVERY_S = 5.0
_COMMAND = re.compile(r"(?<![\w/-])rlhf-pipeline( [a-z])")


class OutputError(PipelineError, OSError):
    """Standard output cannot be written."""


def pasted(text: str) -> str:
    """Return a text in which each `rlhf-pipeline COMMAND` works as pasted, also where it is not on `PATH`.

    There it names the script that was typed, or else the interpreter: `.venv/bin/rlhf-pipeline show runs/a`,
    `/opt/env/bin/python -m rlhf_pipeline show runs/a`.
    """
    if "rlhf-pipeline " not in text or shutil.which("rlhf-pipeline") is not None:
        return text
    script = Path(sys.argv[0])
    command = typed(script if script.name == "rlhf-pipeline" else sys.executable)
    command += "" if script.name == "rlhf-pipeline" else " -m rlhf_pipeline"
    return _COMMAND.sub(lambda match: command + match[1], text)


def echo(text: str = "", end: str = "\n") -> None:
    """Print to standard output; commands in the text are `pasted`."""
    echo_raw(pasted(text), end)


def echo_raw(text: str, end: str = "\n") -> None:
    """Print a document to standard output: commands in it are for the reader, on any machine."""
    try:
        print(plain(text), end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"writing to standard output failed: {error.strerror}.") from error


def echo_json(data: object) -> None:
    """Print data as JSON, indented."""
    echo_raw(json.dumps(data, indent=2, allow_nan=False))


def warn(text: str) -> None:
    """Print to standard error, and ignore an error there."""
    with contextlib.suppress(OSError):
        print(plain(pasted(text)), file=sys.stderr, flush=True)


def can_draw(out: TextIO) -> bool:
    """Return whether a stream is a terminal that can be drawn on: not `TERM=dumb`, and with Unicode."""
    return out.isatty() and os.environ.get("TERM") != "dumb" and "utf" in (out.encoding or "").lower()


class Ticker:
    """Prints a command's progress every few seconds; pass it as a progress callback."""

    def __init__(self, what: str = "") -> None:
        self._what = f" {what}" if what else ""
        self._next = time.perf_counter() + _EVERY_S

    def __call__(self, done: int, total: int | None = None) -> None:
        """Print the progress if it is due."""
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + _EVERY_S
        of = f"{count(done, 'trajectory')} so far" if total is None else f"{done:,} of {count(total, 'trajectory')}"
        warn(f"  {of}{self._what}")


@contextmanager
def progress_lines(text: str) -> Iterator[None]:
    """Print a line every few seconds while work without a progress callback runs: `  {text} for 12 s; ...`."""
    done, started = threading.Event(), time.perf_counter()

    def tick() -> None:
        while not done.wait(_EVERY_S):
            warn(f"  {text.format(duration(time.perf_counter() - started))}")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def open_standard_streams() -> None:
    """Reopen standard streams that the caller closed (`>&-`), or the next file opened would receive the output."""
    if sys.stdout is not None and sys.stderr is not None and sys.stdin is not None:
        return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    closed = sys.stdout is None
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for the process
    if closed:
        warn("rlhf-pipeline: standard output is closed, so nothing is printed")


def leave_standard_output() -> None:
    """Redirect standard output to the null device, so that Python does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
