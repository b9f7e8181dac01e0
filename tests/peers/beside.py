"""Install the store beside a trainer in a fresh environment, record and read there, and print a row of the table.

    python tests/peers/beside.py trl==1.16.0
    python3.12 tests/peers/beside.py skyrl==0.4.0
    python tests/peers/beside.py openrlhf==0.11.2 --without flash-attn

The environment is of the Python that runs this; `--without` leaves out what has no wheel for this machine, and what
follows `--pip` is for pip, such as another build of torch. The table stands in docs/release.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

STORAGE = Path(__file__).resolve().parents[2] / "storage"
SHOWN = ("numpy", "torch", "transformers", "tensordict")
WORK = """
import importlib, importlib.metadata, sys
from trajectory_store.recorder import TrajectoryRecorder

folder, peer, *shown = sys.argv[1:]
assert not {"torch", "transformers", "zarr"} & sys.modules.keys()
with TrajectoryRecorder(folder, group_size=2) as recorder:
    for step in range(3):
        recorder.record(
            prompt_ids=[[1, 2]] * 2, completion_ids=[[3], [4, step]], completions=["", ""], rewards=[1.0, 0.0],
            log_probs=[[-0.5], [-1.0, -2.0]], policy_version=step, temperature=0.5,
        )
tops = (importlib.metadata.distribution(peer).read_text("top_level.txt") or peer).split()
importlib.import_module(tops[0].replace("-", "_"))
with TrajectoryRecorder(folder, group_size=2) as recorder:  # with the trainer beside it in the process
    assert recorder.store.read_scalars("temperature").tolist() == [0.5] * 6
versions = {name: importlib.metadata.version(name) for name in shown if importlib.util.find_spec(name)}
print(", ".join(f"{name} {version}" for name, version in versions.items()))
"""


def needs(folder: Path, pip: list[str], peer: str, without: str) -> list[str]:
    """Return the requirements that the metadata of a peer's wheel names, but for one."""
    subprocess.run([*pip, "download", "-q", "--no-deps", "-d", str(folder), peer], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = wheel.read(name).decode()
    requirements = [
        line.partition(":")[2].strip() for line in metadata.splitlines() if line.startswith("Requires-Dist:")
    ]
    return [
        requirement
        for requirement in requirements
        if "extra ==" not in requirement and re.split(r"[^\w.-]", requirement)[0].lower() != without
    ]


def main() -> None:
    """Install, record, verify, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer")
    parser.add_argument("--without")
    parser.add_argument("--pip", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        venv.create(folder / "env", with_pip=True)
        python, store = str(folder / "env" / "bin" / "python"), str(folder / "store")
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", "-U", "pip"], check=True)  # an old one resolves for half an hour
        if options.without is None:
            subprocess.run([*pip, "install", "-q", str(STORAGE), options.peer, *options.pip], check=True)
        else:
            needed = needs(folder, pip, options.peer, options.without.lower())
            subprocess.run([*pip, "install", "-q", str(STORAGE), *needed, *options.pip], check=True)
            subprocess.run([*pip, "install", "-q", "--no-deps", str(next(folder.glob("*.whl")))], check=True)
        work = [python, "-c", WORK, store, re.split(r"[=<>\[]", options.peer)[0], *SHOWN]
        output = subprocess.run(work, check=True, capture_output=True, text=True, cwd=folder).stdout.strip()
        verify = [str(folder / "env" / "bin" / "trajectory-store"), "verify", store]
        subprocess.run(verify, check=True, stdout=subprocess.DEVNULL)
        broken = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False).stdout.strip()
    version = sys.version.split()[0]
    sys.stdout.write(f"{options.peer} | Python {version} | {output.splitlines()[-1]} | recorded, verified | ")
    sys.stdout.write(f"{time.monotonic() - began:.0f} s\n    pip check: {broken}\n")


if __name__ == "__main__":
    main()
