"""`rlhf-pipeline compact`: what it merges, and whom it refuses to disturb."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlhf_pipeline.exchange import TrajectoryRecorder
from rlhf_pipeline.run.folder import RunFolder
from trajectory_store import TrajectoryStore, copy_rows

from .conftest import Cli
from .test_tail_command import ENV

HOLDER = """
import sys
from trajectory_store import TrajectoryStore
store = TrajectoryStore.open(sys.argv[1], "a")
store.append_batch(store.read_batch(store.ids()[:1]))
print("ready", flush=True)
sys.stdin.read()
"""


def in_pieces(run: Path, folder: Path) -> Path:
    """Write the run again, its store in five segments and two updates."""
    folder.mkdir()
    for file in run.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    with TrajectoryStore.open(run / "store") as source:
        with TrajectoryStore.create(folder / "store", source.schema, segment_rows=10) as target:
            ids = copy_rows(source, target, batch_rows=5)
            target.update(ids[:9], advantage=np.arange(9))
        with TrajectoryStore.open(folder / "store", "a") as again:
            again.update(ids[40:], priority=np.full(8, 7))
    return folder


@pytest.fixture
def pieces(run_dir: Path) -> Path:
    """The run in pieces."""
    return in_pieces(run_dir, Path("runs/pieces"))


def test_compact(cli: Cli, run_dir: Path, pieces: Path):
    """Segments become one, updates of the same columns too, and nothing that can be read changes."""
    before = in_pieces(run_dir, Path("runs/before"))
    shown = cli("compact", pieces)
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert lines[0].startswith("runs/pieces/store: 48 trajectories, ")
    assert lines[1].startswith("  segments  7 -> ")
    assert lines[1].endswith("  (48 trajectories moved; ids and order are unchanged)")
    assert lines[2].startswith("  on disk   ")
    assert lines[3] == "check it:  rlhf-pipeline verify runs/pieces"
    assert cli("verify", pieces / "store").code == 0
    assert cli("diff", before, pieces).code == 0
    with TrajectoryStore.open(before / "store") as old, TrajectoryStore.open(pieces / "store") as new:
        assert old.ids().tolist() == new.ids().tolist()
        assert new.read(new.ids()[-1:])["priority"].tolist() == [7.0]


def test_nothing_to_merge(cli: Cli, run_dir: Path):
    """A second time there is nothing to do, and that is no error."""
    assert cli("compact", run_dir).code == 0
    shown = cli("compact", run_dir / "store")
    assert (shown.code, "nothing to merge: 1 segment, " in shown.out) == (0, True)


def test_compact_zarr(cli: Cli, run_dir: Path):
    """A zarr store is sealed: fewer bytes on disk, the same values."""
    with TrajectoryStore.open(run_dir / "store") as source:
        with TrajectoryStore.create("z", source.schema, backend="zarr") as target:
            copy_rows(source, target, batch_rows=4)
        before = sum(file.stat().st_size for file in Path("z").rglob("*") if file.is_file())
        assert cli("compact", "z").code == 0
        assert sum(file.stat().st_size for file in Path("z").rglob("*") if file.is_file()) < before
        assert cli("diff", "z", run_dir / "store").code == 0


def test_a_live_writer_is_not_disturbed(cli: Cli, pieces: Path):
    """A store that another process appends to is refused, and goes when that process has gone, even by a kill."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(pieces / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENV,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        shown = cli("compact", pieces)
        assert (shown.code, shown.out) == (2, "")
        assert "a process is writing to runs/pieces/store" in shown.err
        writer.kill()
    shown = cli("compact", pieces)
    assert (shown.code, shown.out.splitlines()[0][:35]) == (0, "runs/pieces/store: 49 trajectories,")


def test_a_run_or_a_recorder_is_not_disturbed(cli: Cli, pieces: Path):
    """A run whose lock is held, by one process or several, and a recorder that has not written yet are refused."""
    for shared in (False, True):
        with RunFolder(pieces).lock(shared=shared):
            for path in (pieces, pieces / "store"):
                shown = cli("compact", path)
                assert (shown.code, shown.out) == (2, "")
                assert "runs/pieces is in use by " in shown.err
                assert "--out" not in shown.err
    with TrajectoryRecorder("recorded"):
        shown = cli("compact", "recorded")
        assert shown.code == 2
        assert "an import or a recorder is writing to recorded" in shown.err


@pytest.mark.skipif(
    shutil.which("setpriv") is None, reason="root may write everywhere, unless util-linux takes that away"
)
def test_a_run_that_can_only_be_read(pieces: Path):
    """It is one sentence, with the command that makes a compacted copy; that command works."""
    for folder in [pieces, *(path for path in pieces.rglob("*") if path.is_dir())]:
        folder.chmod(0o500)
    command = ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []
    command += [sys.executable, "-m", "rlhf_pipeline.cli"]

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words], env=ENV, capture_output=True, text=True, check=False)

    try:
        refused, copied = typed("compact", str(pieces)), typed("copy", str(pieces), "--to", "copied")
    finally:
        for folder in [pieces, *(path for path in pieces.rglob("*") if path.is_dir())]:
            folder.chmod(0o700)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"rlhf-pipeline: {pieces}/store is read-only, so it cannot be compacted. Make a compacted copy: "
        f"{sys.executable} -m rlhf_pipeline copy {pieces} --to NEW_STORE\n"  # it is not on the PATH of ENV
    )
    assert copied.returncode == 0, copied.stderr
