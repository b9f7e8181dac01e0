"""The store and the pipeline have one helper for files that appear complete, and one for locks."""

from __future__ import annotations

import ast
import errno
import fcntl
import functools
import os
import threading
from pathlib import Path

import pytest

from rlhf_pipeline.run.processes.heartbeat import is_alive
from trajectory_store.locks import locked, try_lock, unlock
from trajectory_store.new_files import new_file, write_atomically

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [ROOT / "rlhf_pipeline", ROOT / "storage" / "trajectory_store"]
RENAMES = {
    "trajectory_store/new_files.py": "the helper",
    "trajectory_store/fs.py": "the store's own files, recorded by the tests of power losses",
    "trajectory_store/local_backend.py": "calls fs.rename: a segment gets its name",
    "trajectory_store/bucket.py": "calls fs.rename: a new store gets its name",
    "rlhf_pipeline/run/files.py": "sealed folders, which replace full folders",
    "rlhf_pipeline/run/processes/weights.py": "a sealed folder gets the name with its digest",
    "rlhf_pipeline/run/processes/children.py": "a long log gets a second name",
}
"""The files that rename, with what they rename."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the parsed files of both packages, by name."""
    return {
        file.relative_to(package.parent).as_posix(): ast.parse(file.read_text("utf-8"))
        for package in PACKAGES
        for file in sorted(package.rglob("*.py"))
    }


def is_rename(node: ast.AST) -> bool:
    """Return whether a node calls `rename`, `os.replace` or `Path.replace`, which has one argument."""
    match node:
        case ast.Call(func=ast.Attribute(attr="rename")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="replace")):
            return True
        case ast.Call(func=ast.Attribute(attr="replace"), args=[argument], keywords=[]):
            return not isinstance(argument, ast.Starred)
        case _:
            return False


def test_one_module_locks_files():
    """Only `locks` imports `fcntl`."""
    importers = [
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and any(alias.name == "fcntl" for alias in node.names)
    ]
    assert importers == ["trajectory_store/locks.py"]


def test_few_modules_rename_files():
    """Each has its reason; a file that appears complete is written with `new_file`."""
    assert {name for name, tree in trees().items() if any(map(is_rename, ast.walk(tree)))} == set(RENAMES)


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path, sync: bool):
    """The new content is there, and no temporary file; the next write replaces what a kill left."""
    (tmp_path / ".a.json.tmp").write_bytes(b"left by a kill")
    for content in (b"first", b"second"):
        write_atomically(tmp_path / "a.json", content, sync=sync)
        assert (tmp_path / "a.json").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def put(target: Path, name: str | None, error: Exception | None = None) -> None:
    """Write a folder with one file, or a file if the name is None; then raise the error."""
    with new_file(target, sync=True) as part:
        if name is None:
            part.touch()
        else:
            part.mkdir()
            (part / name).touch()
        if error is not None:
            raise error


@pytest.mark.parametrize("name", [None, "inner"])
def test_an_error_leaves_the_old_content(tmp_path: Path, name: str | None):
    """And nothing of the new file or folder."""
    (tmp_path / "old").write_bytes(b"content")
    with pytest.raises(ZeroDivisionError):
        put(tmp_path / "old", name, ZeroDivisionError())
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("old", b"content")]


def test_a_folder_replaces_an_empty_folder_only(tmp_path: Path):
    """A full folder is kept; what a killed copy left is not in the new folder."""
    (tmp_path / "copy").mkdir()
    (tmp_path / ".copy.tmp").mkdir()
    (tmp_path / ".copy.tmp" / "left").touch()
    put(tmp_path / "copy", "first")
    with pytest.raises(OSError, match="not empty"):
        put(tmp_path / "copy", "second")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path):
    """Where several processes write a file, the path has the process's id."""
    with new_file(tmp_path / "cache", exclusive=False) as part:
        assert part.name == f".cache.{os.getpid()}.tmp"
        part.write_bytes(b"complete")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_lock_excludes_threads_and_other_open_files(tmp_path: Path):
    """The file is created; shared holders exclude an exclusive one; the lock ends with its block."""
    entered = threading.Event()

    def wait() -> None:
        with locked(tmp_path / "lock"):
            entered.set()

    with (tmp_path / "open").open("w") as first, (tmp_path / "open").open() as second:
        assert try_lock(first, shared=True)
        assert try_lock(second, shared=True)
        assert not try_lock(first)
        unlock(second)
        assert try_lock(first)
        assert not try_lock(second, shared=True)
    with locked(tmp_path / "lock"):
        thread = threading.Thread(target=wait)
        thread.start()
        assert not entered.wait(0.1)
    thread.join(10)
    assert entered.is_set()


def test_a_lock_that_is_not_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the file system has no locks, it is skipped, and no process counts as alive; other errors are raised."""
    number = errno.ENOLCK

    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path, required=False):
        pass
    (tmp_path / "learner.lock").touch()
    assert not is_alive(tmp_path, "learner")
    with pytest.raises(OSError, match="No locks"), locked(tmp_path):
        pass
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"), locked(tmp_path, required=False):
        pass
