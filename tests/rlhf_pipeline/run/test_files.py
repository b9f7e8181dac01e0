from __future__ import annotations

import json

import pytest

from rlhf_pipeline.run.files import folder_problem, new_folder, remove_folder, tidy


def test_a_sealed_folder_lists_every_file_with_its_checksum(tmp_path):
    """Files in inner folders count too; CRC32C of `123456789` is e3069283, as its standard says."""
    with new_folder(tmp_path / "made") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "check").write_bytes(b"123456789")
        (folder / "empty").touch()
    listed = json.loads((tmp_path / "made" / "files.json").read_text())["files"]
    assert listed == {"empty": {"bytes": 0, "crc32c": "00000000"}, "inner/check": {"bytes": 9, "crc32c": "e3069283"}}
    assert folder_problem(tmp_path / "made") is None
    (tmp_path / "made" / "inner" / "check").write_bytes(b"123456780")
    assert folder_problem(tmp_path / "made", checksums=False) is None
    assert folder_problem(tmp_path / "made") == (
        "the bytes of inner/check differ from those that were written (its CRC32C differs)"
    )


def test_a_folder_that_fails_half_way_leaves_the_former_one(tmp_path):
    """An error while the new folder is filled changes nothing and leaves nothing behind."""
    with new_folder(tmp_path / "made") as folder:
        (folder / "a").write_text("first")

    def fail() -> None:
        with new_folder(tmp_path / "made") as folder:
            (folder / "a").write_text("second")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert (tmp_path / "made" / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_tidying_finishes_what_a_kill_cut_short(tmp_path):
    """A former folder whose successor is not there comes back; everything half made or half removed goes."""
    for name in ("a", ".a.former", ".b.former", ".c.tmp", ".d.gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "from").write_text(name)
    (tmp_path / ".pointer.tmp").write_text("a file is not touched")
    tidy(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", ".pointer.tmp"}
    assert (tmp_path / "a" / "from").read_text() == "a"
    assert (tmp_path / "b" / "from").read_text() == ".b.former"


def test_a_removed_folder_is_gone(tmp_path):
    """Also where an earlier removal was killed half-way."""
    for name in ("a", ".a.gone"):
        (tmp_path / name).mkdir()
    remove_folder(tmp_path / "a")
    assert not list(tmp_path.iterdir())
