"""Other trainers load our adapters by their own functions, each in an environment of its own.

`PEER_ENVIRONMENTS` names a folder of environments `peer-NAME` to use; without it they are made, which takes minutes and
needs a package index. The programs are in `loaders`. What has no environment here is read: slime and miles (commit
624b824 of slime; not on the index), prime-rl and NeMo-RL (their files are imported).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.peer, pytest.mark.nightly, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What is installed of a peer, and what its modules import beside what its metadata name."""

    python: str
    requirements: tuple[str, ...]
    unpacked: str = ""
    """A wheel that is put on the path, where its pins or its Python prevent an installation."""


_VERL = ("verl==0.9.1", "TransferQueue==0.1.11", "cachetools", "uvicorn", "fastapi", "aiohttp", "prometheus_client")
ENVIRONMENTS = {
    "verl": Environment(python="python3.11", requirements=_VERL),
    "skyrl": Environment(
        python="python3.12",
        requirements=(
            *("skyrl==0.4.0", "skyrl-gym", "jaxtyping", "loguru", "ray", "omegaconf", "torchdata", "aiohttp", "orjson"),
            "pybase64",
        ),
    ),
    "areal": Environment(
        python="python3.11",
        requirements=(
            *_VERL,
            *("colorlog", "tenacity", "flask", "lark", "uvloop", "numba", "einops", "aiofiles", "openai"),
        ),
        unpacked="areal==1.0.4",
    ),
}


def python_of(name: str, folder: Path) -> str:
    """Return the interpreter of a peer's environment, which is made in `folder` unless there is one."""
    peer, existing = ENVIRONMENTS[name], os.environ.get("PEER_ENVIRONMENTS")
    if existing:
        known = Path(existing) / f"peer-{name}" / "bin" / "python"
        return str(known) if known.exists() else pytest.skip(f"there is no environment {known}")
    base = sys.executable if peer.python == f"python3.{sys.version_info.minor}" else shutil.which(peer.python)
    if base is None or subprocess.run([base, "--version"], capture_output=True).returncode:
        pytest.skip(f"there is no {peer.python} for {name}")
    subprocess.run([base, "-m", "venv", str(folder / "env")], check=True)
    python = str(folder / "env" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "-U", "pip"], check=True)
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", *peer.requirements, "google-crc32c"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"{name} cannot be installed: {done.stderr.strip()[-300:]}")
    return python


def path_of(name: str, python: str, folder: Path) -> Iterator[str]:
    """Yield what is on the path of a peer's process beside its environment."""
    yield str(ROOT / "storage")
    wheel = ENVIRONMENTS[name].unpacked
    if wheel:
        command = [python, "-m", "pip", "download", "-q", "--no-deps", "--ignore-requires-python", "-d", str(folder)]
        done = subprocess.run([*command, wheel], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the wheel of {wheel} cannot be fetched: {done.stderr.strip()[-300:]}")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
            archive.extractall(folder / "unpacked")
        yield str(folder / "unpacked")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_peer_accepts_the_adapter(tmp_path: Path, name: str):
    """It builds, resolves and calls what docs/beside.md tells to add, and trains as it does without it."""
    python = python_of(name, tmp_path)
    path = os.pathsep.join(path_of(name, python, tmp_path))
    (tmp_path / "work").mkdir()
    program = ROOT / "tests" / "peers" / "loaders" / f"in_{name}.py"
    command = [python, "-u", "-W", "ignore", str(program), str(tmp_path / "work")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip().endswith("all accepted")
