"""`rlhf-pipeline doctor`: check whether this machine and this folder have what a run needs."""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf_pipeline.cli.output import say
from rlhf_pipeline.report.words import count, duration

_NEEDED = ("torch", "torchrl", "tensordict", "transformers", "tokenizers", "safetensors", "numpy", "zarr")
_SELF_TEST_SECONDS = 2.0
_FREE_GB = 2.0

HELP = "check whether this machine and this folder have what a run needs"
DETAILS = """\
example:
  rlhf-pipeline doctor          in the folder where your runs go"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    del command


def execute(args: argparse.Namespace) -> int:
    """Print each check as it completes; return 1 if something is missing."""
    del args
    say(f"python {platform.python_version()} ({sys.executable}), {platform.system()} {platform.release()}")
    bad = _report(_packages())
    here = Path.cwd()
    say(f"folder {here}")
    bad += _report(_disk(here))
    bad += _report(_file_system(here))
    bad += _report([_store(here)])
    say("devices (importing torch ...)")
    bad += _report(_devices())
    say("All is well. Try: rlhf-pipeline run copy_digits" if not bad else f"{count(bad, 'problem')}, see above.")
    return 1 if bad else 0


Check = tuple[bool, str]


def _report(checks: Iterator[Check] | list[Check]) -> int:
    bad = 0
    for ok, text in checks:
        bad += not ok
        say(f"  {'ok ' if ok else 'BAD'}  {text}")
    return bad


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


def _disk(folder: Path) -> Iterator[Check]:
    from trajectory_store.maps import choose, file_system

    free = shutil.disk_usage(folder).free / 1e9
    enough = free >= _FREE_GB
    yield (
        enough,
        f"{free:.1f} GB free" + ("" if enough else "; free some: a full disk stops a run (nothing stored is lost)"),
    )
    kind = file_system(folder)
    if kind == "tmpfs":
        yield True, "file system tmpfs: in memory, so nothing here survives a restart of the machine"
    elif kind and choose(folder) == "pread":
        text = "a network file system; memory maps and locks may not work. Put runs on a local disk."
        yield False, f"file system {kind}: {text}"
    elif kind:
        yield True, f"file system {kind}"


def _file_system(folder: Path) -> Iterator[Check]:
    """Test the file system features that the store relies on, in this folder."""
    try:
        with tempfile.TemporaryDirectory(prefix=".rlhf-doctor-", dir=folder) as scratch:
            for name, trial in _TRIALS.items():
                try:
                    yield True, f"{name}{trial(Path(scratch) / name.split()[0])}"
                except (OSError, ValueError) as error:
                    yield False, f"{name}: {error}. The store needs it; put runs on a local disk (--out)."
    except OSError as error:
        yield False, f"cannot write here: {error}. Change to a folder of yours, or use --out."


def _sparse(path: Path) -> str:
    with path.open("wb") as file:
        file.truncate(64 << 20)
    used = path.stat().st_blocks * 512
    return (
        ""
        if used < 1 << 20
        else f": no, an empty 64 MB file takes {used / 1e6:.0f} MB; stores will be larger than they need"
    )


def _map_sees_writes(path: Path) -> str:
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192, access=mmap.ACCESS_READ) as view:
        os.pwrite(file.fileno(), b"seen", 4096)
        if view[4096:4100] != b"seen":
            raise ValueError("a memory map does not show data written to its file")
    return ""


def _lock(path: Path) -> str:
    path.touch()
    with path.open("rb") as first, path.open("rb") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
    raise ValueError("a second holder got the lock")


def _sync(path: Path) -> str:
    path.write_bytes(b"x" * 4096)
    started = time.perf_counter()
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"y", 0)
        os.fdatasync(file.fileno()) if hasattr(os, "fdatasync") else os.fsync(file.fileno())
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    took = (time.perf_counter() - started) * 1e3
    return f" ({took:.1f} ms)" + ("; so fast that the disk may not wait for it" if took < 0.05 else "")


_TRIALS: dict[str, Callable[[Path], str]] = {
    "sparse files": _sparse,
    "pwrite shows in maps": _map_sees_writes,
    "flock keeps others out": _lock,
    "fsync of files and folders": _sync,
}


def _store(folder: Path) -> Check:
    """Write trajectories to a store for up to two seconds, read them back and verify every checksum."""
    import numpy as np

    from trajectory_store import Column, RaggedArray, Schema, StoreError, TrajectoryStore

    schema = Schema(
        [Column("input_ids", "int32", ragged=True), Column("task_reward", "float32"), Column("text", "str")]
    )
    lengths = np.arange(64) % 100 + 1
    values = np.arange(lengths.sum(), dtype=np.int32)
    batch = {
        "input_ids": RaggedArray(values, lengths),
        "task_reward": np.linspace(0, 1, 64, dtype=np.float32),
        "text": [f"trajectory {row}" for row in range(64)],
    }
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix=".rlhf-doctor-", dir=folder) as scratch:
            with TrajectoryStore.create(f"{scratch}/store", schema) as store:
                ids = store.append(batch)
                while time.perf_counter() - started < _SELF_TEST_SECONDS / 2 and len(store) < 1 << 16:
                    ids = store.append(batch)
                appended, seconds = len(store), time.perf_counter() - started
            with TrajectoryStore.open(f"{scratch}/store") as store:
                back = store.read(ids, ["input_ids", "text"])
                same = back["text"] == batch["text"] and bool((np.concatenate(back["input_ids"]) == values).all())
                report = store.verify()
    except (StoreError, OSError) as error:
        return False, f"store: {error}"
    if not same or not report.ok or report.rows != appended:
        return False, f"store: the data read back differ from the data written. {report}"
    rate = appended / seconds
    return True, f"store: {appended:,} trajectories written ({rate:,.0f} per s), read back and verified"


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
