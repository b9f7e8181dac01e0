"""What a store takes: blocks on the disk, bytes read to open it, pages asked for ahead."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest

import trajectory_store
from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore

TOKENS = {"input_ids": "int32", "assistant_mask": "bool", "log_probs": "float32", "ref_log_probs": "float32"}


def schema():
    """The four token columns and a scalar."""
    return Schema([*(Column(n, d, ragged=True) for n, d in TOKENS.items()), Column("task_reward", "float32")])


def rows(lengths, seed=0):
    """Random trajectories of these lengths."""
    rng = np.random.default_rng(seed)
    data = {n: RaggedArray(rng.integers(0, 2, int(lengths.sum())).astype(d), lengths) for n, d in TOKENS.items()}
    return {**data, "task_reward": rng.random(len(lengths), dtype=np.float32)}


def disk_bytes(path):
    """Blocks of all files."""
    return sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file())


def test_a_raw_store_takes_one_percent_more_than_its_payload(tmp_path):
    """19 MB in sparse segments: blocks in use over the bytes of the values."""
    lengths = np.random.default_rng(0).integers(100, 1100, 100)
    with TrajectoryStore.create(tmp_path / "s", schema()) as store:
        for seed in range(24):
            store.append(rows(lengths, seed))
    payload = 24 * (13 * int(lengths.sum()) + 4 * len(lengths))
    assert payload <= disk_bytes(tmp_path / "s") <= 1.01 * payload


def test_gsm8k_sealed_takes_less_than_half(tmp_path, gsm8k_dir):
    """Text, ids, mask and log-probs of noise for 3000 answers: at most 0.6 of their bytes, after compact() 0.48."""
    pytest.importorskip("zarr")
    lines = (gsm8k_dir / "train.jsonl").read_text(encoding="utf-8").splitlines()[:3000]
    pairs = [json.loads(line) for line in lines]
    known: dict[str, int] = {}
    asked, answered = (
        [[known.setdefault(word, len(known)) for word in re.findall(r" ?\w+|\W", pair[key])] for pair in pairs]
        for key in ("question", "answer")
    )
    ids = [question + answer for question, answer in zip(asked, answered, strict=True)]
    lengths = np.array([len(row) for row in ids])
    mask = np.concatenate([np.arange(len(row)) >= len(question) for row, question in zip(ids, asked, strict=True)])
    noise = -np.random.default_rng(0).exponential(1.0, len(mask)).astype(np.float32)
    values = {
        "input_ids": RaggedArray(np.concatenate(ids).astype(np.int32), lengths),
        "assistant_mask": RaggedArray(mask, lengths),
        "log_probs": RaggedArray(np.where(mask, noise, np.float32("nan")), lengths),
        "prompt": [p["question"] for p in pairs],
        "completion": [p["answer"] for p in pairs],
    }
    columns = [Column(n, TOKENS[n], ragged=True) for n in ("input_ids", "assistant_mask", "log_probs")]
    columns += [Column("prompt", "str"), Column("completion", "str")]
    payload = 9 * int(lengths.sum()) + sum(len(t.encode()) for n in ("prompt", "completion") for t in values[n])
    store = TrajectoryStore.create(tmp_path / "s", Schema(columns), backend="zarr")
    for part in np.array_split(np.arange(3000), 10):
        taken = {n: v.take(part) if isinstance(v, RaggedArray) else [v[i] for i in part] for n, v in values.items()}
        store.append(taken)
    assert sum(file.stat().st_size for file in (tmp_path / "s").rglob("*.zip")) <= 0.6 * payload
    store.compact()
    assert store.read(store.ids()[[0, 2999]], "completion")["completion"] == [
        values["completion"][i] for i in (0, 2999)
    ]
    store.close()
    assert disk_bytes(tmp_path / "s") / payload <= 0.48


def test_opening_reads_the_same_bytes_for_more_rows(tmp_path, monkeypatch):
    """64 times the rows in the same commits, and 64 times the commits: only the search for the end takes some more."""
    read = []
    real = os.pread

    def spy(fd, count, offset):
        read.append(count)
        return real(fd, count, offset)

    monkeypatch.setattr(os, "pread", spy)
    found = {}
    for name, count, commits in (("few", 4, 4), ("rows", 256, 4), ("commits", 4, 256)):
        part = rows(np.full(count, 3))
        with TrajectoryStore.create(tmp_path / name, schema(), segment_rows=1024) as store:
            for _ in range(commits):
                store.append(part)
        read.clear()
        with TrajectoryStore.open(tmp_path / name, io="pread") as store:
            assert store.watermark == count * commits  # `len` reads the record of each commit once, as `ids` does
        found[name] = sum(read)
    assert found["rows"] == found["few"]
    assert found["commits"] - found["few"] <= 64 * 2 * 8  # two steps per doubling of the commits, 64 bytes each


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="this system does not count bytes read")
def test_a_cold_batch_reads_a_few_times_its_payload(tmp_path):
    """After the page cache of the files is dropped, a batch is not the whole store, whatever the disk reads ahead."""
    import subprocess
    import sys
    from pathlib import Path

    with TrajectoryStore.create(tmp_path / "s", schema()) as store:
        for seed in range(16):
            store.append(rows(np.full(128, 1500), seed))
    for file in (tmp_path / "s").rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    script = """
import sys
import numpy as np
from trajectory_store import TrajectoryStore
def read():
    return int(open("/proc/self/io").read().split("read_bytes: ")[1].split()[0])
store = TrajectoryStore.open(sys.argv[1])
ids = store.ids()
before = read()
store.read_padded(ids[np.random.default_rng(0).choice(len(ids), 64, replace=False)])
print(read() - before)
"""
    folder = Path(trajectory_store.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "s")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert int(done.stdout) <= 3 * 64 * 1500 * 13
