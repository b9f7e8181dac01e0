"""Print the packages that a GPU machine lacks, with versions, from the metadata of this project and of what it needs.

`gpu_wheels.sh` downloads them. Run it where the project is installed: requirements and versions are those of this
environment. What the machine has (torch, transformers, peft, pytest and all that they need) is left out.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
THERE = ("torch", "transformers", "peft", "pytest")
"""What the machine has."""
OF_TESTS = ("pytest-timeout", "hypothesis")
"""What the tests marked `gpu` import beside the project."""
EXTRAS = {"pyproject.toml": ("gguf",), "storage/pyproject.toml": ("zarr",)}
"""Optional requirements that the sections of `gpu_check.py` use, by project file."""
Needs = Callable[[str], Sequence[str]]


def requirements(root: Path = ROOT) -> list[str]:
    """Return the requirements of both distributions, without one on the other."""
    found: list[str] = []
    own: set[str] = set()
    for file, extras in EXTRAS.items():
        project = tomllib.loads((root / file).read_text(encoding="utf-8"))["project"]
        own.add(canonicalize_name(project["name"]))
        found += project["dependencies"]
        for extra in extras:
            found += project["optional-dependencies"][extra]
    return [*(one for one in found if canonicalize_name(Requirement(one).name) not in own), *OF_TESTS]


def needed(names: Iterable[str], needs: Needs) -> set[str]:
    """Return these packages and all that they need, by their metadata."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in needs(name):
            one = Requirement(line)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(one.name))
    return found


def installed(name: str) -> Sequence[str]:
    """Return what an installed package needs; nothing if it is not installed, as what only another platform needs."""
    try:
        return importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def lacking(needs: Needs = installed) -> list[str]:
    """Return the packages that the project needs and the machine lacks."""
    names = needed((Requirement(line).name for line in requirements()), needs)
    return sorted(names - needed(THERE, needs))


if __name__ == "__main__":
    print("\n".join(f"{name}=={importlib.metadata.version(name)}" for name in lacking()))
