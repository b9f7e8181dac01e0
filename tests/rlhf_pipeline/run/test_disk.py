"""A run says a day ahead that it will have no room, and stops where its budget is used up."""

from __future__ import annotations

import pytest

from rlhf_pipeline.errors import RunStorageError
from rlhf_pipeline.run.disk import DiskSpace, DiskWatch, disk_usage
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from tests.moments import at_call
from tests.rlhf_pipeline.small import Clock, tiny, weights


def test_what_is_left_is_the_smaller_of_disk_and_budget():
    """A budget that is used up leaves nothing, and without one the disk is the limit."""
    left = [
        DiskSpace(free=900, used=used, allowed=allowed).left
        for used, allowed in ((300, 1000), (50, 1000), (1200, 1000))
    ]
    assert left == [700, 900, 0]
    assert DiskSpace(free=900, used=1200, allowed=None).left == 900


def test_it_says_once_that_a_day_is_left(tmp_path):
    """At a megabyte in two minutes, 30 MB an hour, a budget of 500 MB lasts less than a day; a slow run is silent."""
    for per_look, expected in ((1 << 20, 1), (1 << 12, 0)):
        folder, said, clock = tmp_path / str(per_look), [], Clock()
        folder.mkdir()
        watch = DiskWatch(folder, 500_000_000, said.append, clock=clock)
        for look in range(10):
            (folder / f"{look}").write_bytes(bytes(per_look))
            clock.now += 120
            watch.look()
        assert len(said) == expected


def test_the_first_checkpoints_of_a_large_model_are_no_rate(tmp_path):
    """Two checkpoints of 8 MB in the first minutes, of which a run keeps two: it takes no more a day later."""
    said, clock = [], Clock()
    watch = DiskWatch(tmp_path, 500_000_000, said.append, clock=clock)
    for look in range(10):
        if look < 2:
            (tmp_path / "checkpoints" / f"step-{look}").mkdir(parents=True)
            (tmp_path / "checkpoints" / f"step-{look}" / "model.safetensors").write_bytes(bytes(1 << 23))
        clock.now += 120
        watch.look()
    assert said == []


def test_a_budget_that_is_used_up_stops_the_run_saved_and_more_continues(tmp_path):
    """The message names both sizes and the setting with which it goes on, which gives the weights of a straight run."""
    small = tiny(buffer__max_bytes="1000")
    with pytest.raises(RunStorageError, match=r"buffer\.max_bytes is 1,000\..*--resume .* --set buffer\.max_bytes="):
        run(small, run_dir=tmp_path / "run")
    assert RunFolder(tmp_path / "run").saved()
    run(tiny(buffer__max_bytes="1000000000"), run_dir=tmp_path / "run", resume=True)
    run(tiny(), run_dir=tmp_path / "straight")
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")


def test_a_short_run_never_takes_more_than_its_budget(tmp_path):
    """Every commit counts, not one look a minute: 60 steps in a few seconds stop below the budget, saved."""
    limit = 600_000  # the 60 steps take 800 kB
    with pytest.raises(
        RunStorageError, match=r"one more step and its checkpoint need up to .* bytes, but buffer\.max_bytes is 600,000"
    ):
        run(tiny(buffer__max_bytes=str(limit), learn__steps="60"), run_dir=tmp_path / "run")
    assert 3 * limit // 4 < disk_usage(tmp_path / "run") <= limit
    assert len(RunFolder(tmp_path / "run").metrics) < 60


def test_a_look_between_two_measurements_touches_no_file(tmp_path):
    """Within a minute what was written is added; the folder is measured once."""
    written, empty = [0], disk_usage(tmp_path)
    with at_call(disk_usage) as measured:
        watch = DiskWatch(tmp_path, empty + 1000, lambda text: None, written=lambda: written[-1], clock=Clock())
        for _ in range(5):
            watch.look()
            written.append(written[-1] + 100)
    places = {call.arguments["place"] for call in measured}
    assert (watch.used, len(places)) == (empty + 500, 2)  # the folder, and its checkpoints
    for count in range(500, 1000, 100):  # at 900 the reserve of 100 reaches the budget exactly
        written.append(count)
        watch.look()
    written.append(950)
    with pytest.raises(RunStorageError, match=f"uses {empty + 950:,} bytes"):
        watch.look()
