"""What the package promises: its names, its import, its layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import trajectory_store

STORAGE = Path(trajectory_store.__file__).resolve().parents[1]


def test_every_public_name_is_there_once():
    """`__all__` names what the module has, and every public class and function is in it."""
    names = trajectory_store.__all__
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(trajectory_store, name).__doc__
    public = {n for n, v in vars(trajectory_store).items() if not n.startswith("_") and isinstance(v, type)}
    assert public <= set(names)


def test_every_error_is_a_store_error_and_a_standard_one():
    """`except StoreError` catches all of them, and so does the standard class."""
    standard = (ValueError, OSError, LookupError, ImportError)
    for name in trajectory_store.__all__:
        value = getattr(trajectory_store, name)
        if isinstance(value, type) and issubclass(value, Exception) and value is not trajectory_store.StoreError:
            assert issubclass(value, trajectory_store.StoreError)
            assert issubclass(value, standard), name


def test_importing_the_store_loads_nothing_heavy():
    """Neither torch nor zarr nor asyncio is loaded by the import."""
    heavy = ("torch", "zarr", "numcodecs", "asyncio")
    code = f"import sys, trajectory_store; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(STORAGE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
