"""`rlhf-pipeline copy`: to either backend and back, whole or in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from trajectory_store import TrajectoryStore

from .conftest import Cli


def test_there_and_back(cli: Cli, run_dir: Path):
    """A run's store is archived as zarr in fewer bytes, and brought back without a difference."""
    with TrajectoryStore.open(run_dir / "store", "a") as store:
        store.update(store.ids()[3:5], advantage=[7.0, 8.0])
        store.update(store.ids()[:2], priority=4)
    shown = cli("copy", run_dir, "--to", "an archive", "--backend", "zarr")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert lines[0].startswith("an archive: 48 trajectories, zarr, ")
    assert lines[2:] == [
        "compare:       rlhf-pipeline diff runs/demo 'an archive'",
        "look at them:  rlhf-pipeline inspect 'an archive'",
    ]
    assert cli("copy", "an archive", "--to", "made/here").code == 0
    for made in ("an archive", "made/here"):
        assert cli("diff", run_dir, made).code == 0
        assert cli("verify", made).code == 0
    with TrajectoryStore.open("made/here") as back:
        assert back.read_scalars("advantage")[3:5].tolist() == [7.0, 8.0]
        assert back.read_scalars("priority")[:3].tolist() == [4.0, 4.0, 0.0]


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_part(cli: Cli, run_dir: Path, backend: str):
    """A filter says how many it left out."""
    shown = cli("copy", run_dir, "--to", "some", "--backend", backend, "--filter", "group<2")
    assert shown.out.startswith(f"some: 8 trajectories, 40 excluded, {backend}, ")
    with TrajectoryStore.open("some") as store:
        assert store.read_scalars("group_id").tolist() == [0] * 4 + [1] * 4
