"""Processes that tests start, watch, signal, kill and start again. None outlives its `Children`.

There are three ways to start one:

- a fork of this process, for a function that closes over values (`fork`);
- a fork of a preloaded parent, for a function of a module or an `rlhf-pipeline` command (`call`, `run`): a start costs
  no import;
- a program, where its imports or its command line matter (`program`, `python`). What a shell does with a command is
  tested in `test_printed_commands.py`.

>>> with Children(Path("/tmp")) as children:  # doctest: +SKIP
...     run = children.run("run", "copy_digits", "--out", "runs/killed")
...     run.until(lambda: "step 3" in run.output())
...     run.kill()
...     assert run.restart().wait() == 0
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

KILL_AT_CALL: Final = "TEST_KILL_AT_CALL"
"""The environment variable with the number of the call of `count_call` that kills a process."""
ROOT: Final = Path(__file__).resolve().parents[1]
END_S: Final = 280.0
_TAIL: Final = 6000
_calls = 0
_is_child = False

FORK: Final = multiprocessing.get_context("fork")
PRELOADED: Final = multiprocessing.get_context("forkserver")
PRELOADED.set_forkserver_preload(
    [
        *("rlhf_pipeline.cli", "rlhf_pipeline.run.start", "rlhf_pipeline.run.processes.collect"),
        *("rlhf_pipeline.run.processes.learn", "rlhf_pipeline.learner.distributed", "rlhf_pipeline.policies.new_model"),
        *("rlhf_pipeline.interop", "rlhf_pipeline.exchange"),
    ]
)


def count_call() -> None:
    """Count a call, and kill this process with SIGKILL at the one for which it was started with `kill_at`."""
    global _calls
    _calls += 1
    if _calls >= int(os.environ.get(KILL_AT_CALL, sys.maxsize)):
        os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """A process: its exit code, its output, signals to it. It has the methods that a supervisor needs (`Process`)."""

    def __init__(self, name: str, out: Path, start: Callable[[Path], BaseProcess | subprocess.Popen[Any]]) -> None:
        self.name = name
        self.out = out
        self._start = start
        self._process = start(out)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, or minus the number of the signal that killed it; None while it is alive."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else self._process.exitcode

    def output(self) -> str:
        """Return what it and its earlier lives have written to both streams."""
        return self.out.read_text(errors="replace")

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kill it with SIGKILL, whether it runs or is stopped, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        self._join(END_S)

    def killed(self) -> bool:
        """Kill it; return whether this is what ended it."""
        was_alive = self.poll() is None
        self.kill()
        return was_alive and self.poll() == -signal.SIGKILL

    def wait(self, seconds: float = END_S) -> int:
        """Wait until it has ended by itself; return its exit code.

        Raises:
            AssertionError: it has not ended in time; the message has the end of its output.
        """
        self._join(seconds)
        code = self.poll()
        assert code is not None, self._report(f"has not ended after {seconds:g} s")
        return code

    def succeed(self, seconds: float = END_S) -> str:
        """Wait until it has ended, with exit code 0; return its output."""
        code = self.wait(seconds)
        assert code == 0, self._report(f"ended with code {code}")
        return self.output()

    def until(self, reached: Callable[[], T], *, seconds: float = END_S, every: float = 0.005) -> T:
        """Wait until a condition is true: a line of its output, a file, a count; return what the condition returned.

        Raises:
            AssertionError: the process ends before, or the time is over; the message has the end of its output.
        """
        late = time.monotonic() + seconds
        while True:
            code = self.poll()
            if state := reached():  # perhaps as its last act
                return state
            assert code is None, self._report(f"ended with code {code} before what was waited for")
            assert time.monotonic() < late, self._report(f"has not reached what was waited for after {seconds:g} s")
            time.sleep(every)

    def restart(self) -> Child:
        """Start it again as it was started, once it has ended; its output goes on in the same file."""
        assert self.poll() is not None, f"{self.name} is alive"
        self._process = self._start(self.out)
        return self

    def _join(self, seconds: float) -> None:
        if isinstance(self._process, subprocess.Popen):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        else:
            self._process.join(seconds)

    def _report(self, event: str) -> str:
        return f"{self.name} {event}:\n{self.output()[-_TAIL:]}"


class Children(AbstractContextManager["Children"]):
    """The processes of a test or a program; leaving the context kills what is left of them, with all they started.

    Args:
        folder: for their outputs, one file for each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []

    def fork(self, act: Callable[[], object], *, name: str = "fork", kill_at: int | None = None) -> Child:
        """Start a function in a fork of this process.

        Args:
            act: what it does; the exit code is 0 where it returns.
            name: of its output, and in messages.
            kill_at: the call of `count_call` that kills it.
        """
        more = {} if kill_at is None else {KILL_AT_CALL: str(kill_at)}
        return self._add(name, functools.partial(_start, FORK, act, (), more))

    def call(
        self, act: Callable[..., object], *arguments: Any, name: str = "", env: Mapping[str, str] | None = None
    ) -> Child:
        """Start a function of a module in a fork of the preloaded parent, in this folder and environment."""
        return self._add(name or act.__name__, functools.partial(_start, PRELOADED, act, arguments, env or {}))

    def run(self, *words: object, name: str = "", env: Mapping[str, str] | None = None) -> Child:
        """Start `rlhf-pipeline WORDS` in a fork of the preloaded parent."""
        return self.call(_command, [str(word) for word in words], name=name or str(words[0]), env=env)

    def program(self, *words: object, name: str = "", env: Mapping[str, str] | None = None, **options: Any) -> Child:
        """Start a program; the first word is its file, and `options` are those of `subprocess.Popen`."""
        command = [str(word) for word in words]

        def start(out: Path) -> subprocess.Popen[Any]:
            environment = os.environ | dict(env or {})
            group: dict[str, Any] = {"process_group": 0} if _is_child else {"start_new_session": True}
            with out.open("ab") as stream:
                return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, **group, **options)

        return self._add(name or Path(command[0]).name, start)

    def python(self, *words: object, name: str = "", env: Mapping[str, str] | None = None, **options: Any) -> Child:
        """Start a Python program of this project, as from its root: `-m MODULE`, `-c CODE` or a file."""
        path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'storage'}"} | dict(env or {})
        options = {"cwd": ROOT} | options
        return self.program(sys.executable, *words, name=name or Path(str(words[-1])).stem, env=path, **options)

    def _add(self, name: str, start: Callable[[Path], BaseProcess | subprocess.Popen[Any]]) -> Child:
        self.folder.mkdir(parents=True, exist_ok=True)
        out = self.folder / f"{name}-{len(self._children)}.out"
        out.write_bytes(b"")
        child = Child(name, out, start)
        self._children.append(child)
        return child

    def __exit__(self, *_: object) -> None:
        """Kill all that is left, whoever started it; a process that another supervises included."""
        late = time.monotonic() + 30
        while left := _descendants({child.pid for child in self._children}):
            assert time.monotonic() < late, f"processes outlive the test: {left}"
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        for child in self._children:
            child.wait(30)


def _descendants(leaders: set[int]) -> set[int]:
    """Return the live processes that these have started: in a group or session of theirs, or below one that is."""
    processes: dict[int, tuple[int, int, int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError):
                state, *numbers = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:4]
                if state not in "ZX":
                    parent, group, session = map(int, numbers)
                    processes[int(entry.name)] = parent, group, session
    below = {pid for pid, (_, group, session) in processes.items() if pid in leaders or {group, session} & leaders}
    while more := {pid for pid, (parent, *_) in processes.items() if parent in below} - below:
        below |= more
    return below - {os.getpid()}


def _start(
    context: Any, act: Callable[..., object], arguments: Iterable[Any], env: Mapping[str, str], out: Path
) -> BaseProcess:
    process = context.Process(
        target=_live, args=(act, tuple(arguments), str(out), os.getcwd(), dict(os.environ) | dict(env), _is_child)
    )
    process.start()
    return process


def _live(
    act: Callable[..., object], arguments: tuple[Any, ...], out: str, folder: str, env: dict[str, str], nested: bool
) -> None:
    """Do what a child does, in a session of its own; below another child, in a group of its own."""
    global _is_child, _calls
    _is_child, _calls = True, 0
    if nested:
        os.setpgid(0, 0)
    else:
        os.setsid()
    to = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(to, stream)
    os.close(to)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", closefd=False, buffering=1),
        os.fdopen(2, "w", closefd=False, buffering=1),
    )
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    try:
        act(*arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _command(words: list[str]) -> None:
    from rlhf_pipeline.cli import main

    sys.exit(main(words))
