"""`rlhf-pipeline doctor`: check whether this machine and this folder meet the requirements for a run."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rlhf_pipeline.cli.output import echo
from rlhf_pipeline.errors import count
from rlhf_pipeline.report.formatting import duration

_NEEDED = ("torch", "torchrl", "tensordict", "transformers", "tokenizers", "safetensors", "numpy", "google-crc32c")
_FREE_GB = 2.0

HELP = "check whether this machine and this folder meet the requirements for a run"
DETAILS = """\
example:
  rlhf-pipeline doctor          run it in the folder that will contain your runs"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    del command


def execute(args: argparse.Namespace) -> int:
    """Print each check as it completes; return 1 if something is missing."""
    del args
    echo(f"python {platform.python_version()} ({sys.executable}), {platform.system()} {platform.release()}")
    bad = 0
    for heading, checks in (
        ("", _packages()),
        (f"folder {Path.cwd()}", _folder(Path.cwd())),
        ("devices (importing torch ...)", _devices()),
    ):
        if heading:
            echo(heading)
        for ok, text in checks:
            bad += not ok
            echo(f"  {'ok ' if ok else 'BAD'}  {text}")
    echo("No problem found. Try: rlhf-pipeline run copy_digits" if not bad else f"{count(bad, 'problem')}, see above.")
    return 1 if bad else 0


Check = tuple[bool, str]


def _packages() -> Iterator[Check]:
    import importlib.metadata  # a sixth of the time that help takes

    missing: list[str] = []
    for name in _NEEDED:
        try:
            yield True, f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        names = " ".join(missing)
        yield False, f"not installed: {names}. Install: {sys.executable} -m pip install {names}"


def _folder(folder: Path) -> Iterator[Check]:
    """Check a run that would begin in a folder, and write, read and verify a store there."""
    from rlhf_pipeline import definitions
    from rlhf_pipeline.run.run import Run
    from trajectory_store.file_access import file_system

    free = shutil.disk_usage(folder).free / 1e9
    more = "" if free >= _FREE_GB else "; free some space: a full disk stops a run (stored rows are not lost)"
    yield not more, f"{free:.1f} GB free{more}"
    kind = file_system(folder)
    more = ": in memory, so files are lost when the machine restarts" if kind == "tmpfs" else ""
    yield True, f"file system {kind or 'unknown'}{more}"
    problems = Run(pipeline=definitions.find("copy_digits").pipeline(), run_dir=folder / ".rlhf-doctor").check()
    if not problems:
        yield True, "a run can be created here"
        yield _store(folder)
    for problem in problems:
        yield False, str(problem)


def _store(folder: Path) -> Check:
    """Write trajectories to a store, read them back and verify every checksum."""
    from trajectory_store import Column, Schema, StoreError, TrajectoryStore

    schema = Schema([Column("input_ids", "int32", ragged=True), Column("text", "str")])
    batch = {"input_ids": [[row] * (row % 100 + 1) for row in range(64)], "text": [f"{row}" for row in range(64)]}
    try:
        with tempfile.TemporaryDirectory(prefix=".rlhf-doctor-", dir=folder) as scratch:
            with TrajectoryStore.create(f"{scratch}/store", schema) as store:
                ids = store.append(batch)
            with TrajectoryStore.open(f"{scratch}/store") as store:
                back, report = store.read(ids, ["input_ids", "text"]), store.verify()
    except (StoreError, OSError) as error:
        return False, f"store: {error}"
    same = back["text"] == batch["text"] and [list(row) for row in back["input_ids"]] == batch["input_ids"]
    if not (same and report.ok):
        return False, f"store: the data read back differ from the data written. {report}"
    return True, f"store: {len(ids)} trajectories written, read back and verified"


def _devices() -> Iterator[Check]:
    started = time.perf_counter()
    try:
        import torch
    except ImportError as error:
        yield False, f"torch cannot be imported: {error}"
        return
    took = duration(time.perf_counter() - started)
    yield (
        True,
        f"cpu: {count(os.cpu_count() or 1, 'core')}, {torch.get_num_threads()} torch threads (import took {took})",
    )
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 1e9
        yield True, f"cuda:{index}: {torch.cuda.get_device_name(index)}, {memory:.0f} GB"
    if torch.backends.mps.is_available():
        yield True, "mps: an Apple GPU"
    if not torch.cuda.is_available() and torch.version.cuda is None:
        yield True, "no CUDA: this torch is built for the CPU, which is enough for copy_digits"
