"""Commands in processes of their own, forked from one that has imported everything: a start costs no import.

What imports, standard streams and a shell do is tested with the command as it is typed, in test_printed_commands.py.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *(
            "rlhf_pipeline.cli",
            "rlhf_pipeline.run.start",
            "rlhf_pipeline.run.processes.collect",
            "rlhf_pipeline.interop",
        ),
        *("rlhf_pipeline.run.processes.learn", "rlhf_pipeline.learner.distributed", "rlhf_pipeline.policies.new_model"),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command's exit code and what it wrote to both streams."""

    code: int | None
    out: str


def forked(act: Callable[..., Any], *arguments: Any, out: Path, env: dict[str, str] | None = None) -> BaseProcess:
    """Start a function of a module in a process of its own, in this folder, with its output in a file."""
    environment = dict(os.environ) | (env or {})
    process = FORKED.Process(target=_act, args=(act, arguments, str(out), os.getcwd(), environment))
    process.start()
    return process


def begun(*words: object, out: Path, env: dict[str, str] | None = None) -> BaseProcess:
    """Start `rlhf-pipeline WORDS`."""
    return forked(_command, [str(word) for word in words], out=out, env=env)


def ended(process: BaseProcess, out: Path, timeout: float = 280.0) -> Ended:
    """Wait for the end of a process; one that has none is killed."""
    process.join(timeout)
    process.kill()
    process.join()
    return Ended(code=process.exitcode, out=out.read_text())


def typed(*words: object, out: Path, env: dict[str, str] | None = None) -> Ended:
    """Run `rlhf-pipeline WORDS` to its end."""
    return ended(begun(*words, out=out, env=env), out)


def _command(words: Sequence[str]) -> None:
    from rlhf_pipeline.cli import main

    sys.exit(main(list(words)))


def _act(act: Callable[..., Any], arguments: Sequence[Any], out: str, folder: str, environment: dict[str, str]) -> None:
    to = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(to, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        act(*arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
