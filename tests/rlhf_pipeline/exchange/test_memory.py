"""Imports and exports stream: their memory does not grow with the file."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import re, sys
from pathlib import Path
from rlhf_pipeline.exchange import export_store, import_files
folder, kinds = Path(sys.argv[1]), sys.argv[2:]
def anonymous():  # what is not a mapped file, in MB
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
def steps():
    rows = folder / "rows.jsonl"
    yield lambda say: import_files([rows], folder / "store", on_commit=say)
    for kind in kinds:
        yield lambda say: export_store(folder / "store", folder / f"out.{kind}", on_batch=say)
        yield lambda say: import_files([folder / f"out.{kind}"], folder / kind, on_commit=say)
for step in steps():
    seen = []
    step(lambda *_: seen.append(anonymous()))
    half = len(seen) // 2
    print(max(seen[half:]) - max(seen[:half]))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path):
    """In the second half of 5,000 long rows, 32 MB of values, nothing has grown by more than 12 MB."""
    kinds = ["jsonl", "parquet"] if find_spec("pyarrow") else ["jsonl"]
    row = {"prompt_ids": [7] * 200, "completion_ids": [8] * 800, "log_probs": [-0.125] * 800, "reward": 1.0}
    with (tmp_path / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row | {"group": i // 8}) + "\n" for i in range(5000))
    path = f"{ROOT}:{ROOT / 'storage'}"
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), *kinds],
        env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    grown = [float(line) for line in done.stdout.split()]
    assert len(grown) == 1 + 2 * len(kinds)
    assert max(grown) < 12, grown
