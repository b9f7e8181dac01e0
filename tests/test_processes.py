"""The harness that starts and kills processes: what it starts can be watched, and none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import Children, count_call

GRANDCHILD = [sys.executable, "-c", "import time; time.sleep(600)"]


def count_slowly(last: int) -> None:
    """Write a number per line."""
    for number in range(last):
        print(number, flush=True)  # noqa: T201
        time.sleep(0.001)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("options", [{}, {"process_group": 0}, {"start_new_session": True}])
def test_no_process_survives(tmp_path, options):
    """A stopped child, a child of a child in any group or session, and one whose parent was killed before."""
    pids = tmp_path / "pids"

    def parent() -> None:
        pids.write_text(f"{subprocess.Popen(GRANDCHILD, **options).pid}")
        time.sleep(600)

    with Children(tmp_path / "out") as children:
        stopped = children.fork(lambda: time.sleep(600))
        stopped.send_signal(signal.SIGSTOP)
        outer = children.fork(parent)
        outer.until(lambda: pids.exists() and pids.read_text())
        if "start_new_session" not in options:
            assert outer.killed()
        grandchild = int(pids.read_text())
        assert is_alive(grandchild)
    assert [is_alive(pid) for pid in (stopped.pid, outer.pid, grandchild)] == [False] * 3


def test_a_child_is_watched_killed_and_started_again(children):
    """By a line of its output; its second life is killed at a call, and its exit code and output are kept."""
    slow = children.call(count_slowly, 100_000)
    slow.until(lambda: "\n20\n" in slow.output())
    assert slow.killed()
    assert not slow.killed()  # it was gone before
    assert slow.restart().pid
    slow.until(lambda: slow.output().count("\n20\n") == 2)
    counting = children.fork(lambda: [count_call() or os.write(1, b"x") for _ in range(9)], kill_at=5)
    assert counting.wait() == -signal.SIGKILL
    assert counting.output() == "xxxx"


def test_a_child_that_fails_is_reported_with_its_output(children):
    """Where it ends too early, with another code, or never."""
    failing = children.program("sh", "-c", "echo broken >&2; exit 3")
    with pytest.raises(AssertionError, match=r"sh ended with code 3 before.*\nbroken"):
        failing.until(lambda: False)
    with pytest.raises(AssertionError, match=r"sh ended with code 3:\nbroken"):
        failing.succeed()
    endless = children.fork(lambda: time.sleep(600), name="endless")
    with pytest.raises(AssertionError, match=r"endless has not ended after 0.05 s"):
        endless.wait(0.05)
    assert children.run("config", "nothing").wait() == 2
