"""What a start costs: `run copy_digits --steps 1` against importing the libraries that it uses; and a command's help.

    python benchmarks/bench_start.py [--repeats 7]

One run of the command shows which modules of other packages it imports, and in which order. Then, in turns: the
command, a process that imports those modules and does nothing else, and `run --help`. Processor time of whole
processes, medians. What the libraries take cannot be saved by a package that is built on them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _stores import Table

OURS = ("rlhf_pipeline", "trajectory_store", "pipelines")
RUN = ["run", "copy_digits", "--steps", "1"]
COMMAND = "import sys; from rlhf_pipeline.cli import main; sys.exit(main(sys.argv[1:]))"
RECORD = f"""
import sys
from rlhf_pipeline.cli import main
assert main(sys.argv[2:]) == 0
names = [name for name in sys.modules if name.split(".")[0] not in {OURS} and name != "__main__"]
open(sys.argv[1], "w").write("\\n".join(names))
"""
IMPORT = """
import contextlib, importlib, sys
for name in open(sys.argv[1]).read().split():
    with contextlib.suppress(ImportError):  # a library puts objects of other kinds among the modules
        importlib.import_module(name)
"""
MOST_OVER_THE_LIBRARIES, MOST_OF_HELP = 1.2, 0.1
"""The goals: our start in imports of the libraries, and the help in starts."""


def seconds(code: str, *arguments: str) -> float:
    """Processor time of a Python process."""
    before = os.times()
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    table = Table()
    found: dict[str, list[float]] = {"start": [], "libraries": [], "help": []}
    with tempfile.TemporaryDirectory() as folder:
        modules = str(Path(folder, "modules"))
        seconds(RECORD, modules, *RUN, "--out", f"{folder}/first")
        for turn in range(args.repeats):
            found["start"].append(seconds(COMMAND, *RUN, "--out", f"{folder}/{turn}"))
            found["libraries"].append(seconds(IMPORT, modules))
            found["help"].append(seconds(COMMAND, "run", "--help"))
    start, libraries, shown = (statistics.median(found[name]) for name in ("start", "libraries", "help"))
    table.line(f"rlhf-pipeline {' '.join(RUN)}: processor time", start, "s")
    table.line("importing the libraries that it uses", libraries, "s")
    table.line("the start, in imports of the libraries", start / libraries, "x", MOST_OVER_THE_LIBRARIES)
    table.line("rlhf-pipeline run --help, in starts", shown / start, "x", MOST_OF_HELP)
    return 0 if table.good else 1


if __name__ == "__main__":
    sys.exit(main())
