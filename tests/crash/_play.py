"""How a test plays one of the programs beside it: in a process of its own, as a person who types the command."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.processes import Children

FOLDER = Path(__file__).resolve().parent


def play(name: str, *arguments: str) -> str:
    """Run a program of this folder and return what it printed; it must end with 0.

    Those that fork need it: whoever has run other tests has threads, and a lock that one of them holds stays held in
    the fork for ever.
    """
    with tempfile.TemporaryDirectory() as folder, Children(Path(folder)) as children:
        program = children.python(FOLDER / f"{name}.py", *arguments, name=name, env={"OPENBLAS_NUM_THREADS": "1"})
        return program.succeed(3600)
