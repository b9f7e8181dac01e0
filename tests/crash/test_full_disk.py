"""A disk that is really full: a small tmpfs, and a file-size limit."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pipeline.run.rows import StepRows
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

RUN = [sys.executable, "-m", "rlhf_pipeline", "run", "copy_digits", "--set", "learn.keep_checkpoints=1"]


def command(run_dir: Path, *extra: str, limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit_files() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        [*RUN, "--out", str(run_dir), *extra],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=limit_files,
        check=False,
    )


def assert_nothing_acknowledged_is_lost(run_dir: Path) -> None:
    used = {row_id for row in StepRows(run_dir / "ledger.jsonl") for row_id in row["row_ids"]}
    with TrajectoryStore.open(run_dir / "store") as store:
        assert store.verify().ok
        assert used <= set(store.ids().tolist())
    assert used


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 6 MB; skips where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_the_run_clearly_and_loses_nothing(small_disk):
    """The error names the cause and the next step; with more space the same run goes on to its end."""
    run_dir = small_disk / "run"
    full = command(run_dir, "--steps", "400", "--set", "learn.stop_at_reward=none")
    assert full.returncode == 2, full.stdout + full.stderr
    assert "Traceback" not in full.stderr
    assert "space" in full.stderr.lower()
    assert "--resume" in full.stderr
    assert_nothing_acknowledged_is_lost(run_dir)

    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    steps = StepRows(run_dir / "metrics.jsonl")[-1]["step"]
    resumed = command(run_dir, "--resume", "--steps", str(steps + 4), "--set", "learn.stop_at_reward=none")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert_nothing_acknowledged_is_lost(run_dir)
    assert StepRows(run_dir / "metrics.jsonl")[-1]["step"] == steps + 4


def test_a_file_size_limit_is_a_clear_error(tmp_path):
    """A limit on file sizes stops the run with a message and leaves it resumable without the limit."""
    run_dir = tmp_path / "run"
    limited = command(run_dir, "--steps", "40", limit_bytes=600_000)
    assert limited.returncode == 2, limited.stdout + limited.stderr
    assert "Traceback" not in limited.stderr
    resumed = command(run_dir, "--steps", "12", *(["--resume"] if (run_dir / "config.json").exists() else []))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert_nothing_acknowledged_is_lost(run_dir)
