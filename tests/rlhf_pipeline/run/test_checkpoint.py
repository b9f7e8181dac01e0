from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.run.checkpoint import list_checkpoints, load_checkpoint, newest_checkpoint, save_checkpoint
from tests.damage import flip


class Counter:
    """What a checkpoint is about: a number."""

    shards = None

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def write(self, folder: Path) -> None:
        (folder / "value").write_text(str(self.value))
        (folder / "value").chmod(0o600)  # as safetensors writes its files

    def read(self, folder: Path) -> None:
        self.value = int((folder / "value").read_text())


def saved(folder: Path, *steps: int, keep: int = 9) -> list[Path]:
    return [save_checkpoint(folder, step, Counter(step), state={"note": step}, keep=keep) for step in steps]


def test_what_was_saved_comes_back_with_its_state(tmp_path):
    """The newest checkpoint holds the values and the state that were saved last."""
    saved(tmp_path, 2, 4)
    newest, counter = newest_checkpoint(tmp_path), Counter()
    assert newest == tmp_path / "step-00000004"
    assert load_checkpoint(newest, counter) == {"step": 4, "note": 4}
    assert counter.value == 4


def test_only_the_newest_are_kept_and_half_written_ones_are_swept(tmp_path):
    """Old checkpoints go, and what a killed save or removal left behind goes with them."""
    for name in (".step-00000001.tmp", ".step-00000001.gone"):
        (tmp_path / name).mkdir()
    saved(tmp_path, 2, 4, 6, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]


def test_a_replacement_that_was_killed_is_undone(tmp_path):
    """Between the two renames of a replacement the former checkpoint is found again."""
    (path,) = saved(tmp_path, 3)
    path.rename(tmp_path / ".step-00000003.former")
    assert newest_checkpoint(tmp_path) == path


def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path):
    """If the state cannot be written, the temporary folder goes and the last checkpoint stays."""
    saved(tmp_path, 1)
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 2, Counter(2), state={"bad": object()}, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip(path / "value"), "bytes of value differ"),
        (lambda path: flip(path / "state.json"), "bytes of state.json differ"),
        (lambda path: (path / "value").write_text(""), "value has 0 bytes instead of 1"),
        (lambda path: (path / "value").unlink(), "it has no value"),
        (lambda path: (path / "files.json").unlink(), "never completed"),
        (lambda path: (path / "files.json").write_text('{"files": 3}'), "files.json is damaged"),
        (lambda path: [file.unlink() for file in path.iterdir()], "never completed"),
    ],
    ids=["flip", "flip-state", "cut", "missing", "unsealed", "manifest", "empty"],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path, damage, said):
    """One flipped bit is enough: the one before it is used, and the message says what was seen where."""
    good, bad = saved(tmp_path, 3, 5)
    damage(bad)
    messages: list[str] = []
    assert newest_checkpoint(tmp_path, skip=messages.append) == good
    (message,) = messages
    assert "step-00000005" in message
    assert said in message
    assert "continues from step-00000003" in message
    with pytest.raises(DataError, match=r"is damaged.* The previous one is step-00000003;"):
        load_checkpoint(bad, Counter())


def test_what_was_passed_over_is_removed_by_the_next_save(tmp_path):
    """A damaged checkpoint takes no place among those that are kept."""
    saved(tmp_path, 3, 7)
    flip(tmp_path / "step-00000007" / "value")
    saved(tmp_path, 6, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000006"]


def test_without_a_whole_checkpoint_nothing_is_begun_again(tmp_path):
    """Where all are damaged the run does not start over in silence; where none was saved there is nothing to say."""
    assert newest_checkpoint(tmp_path / "absent") is None
    assert newest_checkpoint(tmp_path) is None
    for path in saved(tmp_path, 1, 2):
        flip(path / "value")
    with pytest.raises(DataError, match=r"no checkpoint in .* is intact: step-00000002 .*step-00000001 .*--out"):
        newest_checkpoint(tmp_path)
    for path in list_checkpoints(tmp_path):
        shutil.rmtree(path)
    assert newest_checkpoint(tmp_path) is None


def test_all_files_have_one_mode(tmp_path):
    """A file that a library wrote for its owner only is as readable as its neighbours."""
    (path,) = saved(tmp_path, 1)
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o666 & ~umask}
