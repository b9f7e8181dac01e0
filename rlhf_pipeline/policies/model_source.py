"""Checks whether a path can be a model checkpoint. Imports no torch, so that commands answer at once."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlhf_pipeline.errors import DataError, MissingPathError, typed

# "organisation/name" may also be a model on the hub. A bare name is a folder: the few hub models that still have a bare
# name have the long form too ("openai-community/gpt2").
_HUB_NAME = re.compile(r"[A-Za-z0-9_-][\w.-]*/[A-Za-z0-9_-][\w.-]*")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


def is_model_folder(path: Path) -> bool:
    """Return whether a folder has the config and the weights of a model; whole or not."""
    return (path / "config.json").is_file() and any(True for pattern in _WEIGHTS for _ in path.glob(pattern))


def resolve_source(source: str | os.PathLike[str]) -> tuple[str, bool]:
    """Return (folder or hub name, whether it is a local folder)."""
    name = os.fspath(source)
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return str(path), True
    if path.exists():
        raise DataError(f"{path} is a file. Name the folder that holds config.json and the weights.")
    # A relative name with one slash may be a folder or a hub name; if its parent folder exists, it is a folder.
    if not _HUB_NAME.fullmatch(name) or path.parent.is_dir():
        near = f" Its parent folder holds: {_listing(path.parent)}." if path.parent.is_dir() else ""
        raise MissingPathError(
            f"there is no model folder at {name}. Make one: rlhf-pipeline new-model {typed(name)} --text FILE. "
            "Or name one you have, as save_pretrained wrote it (--set policy.path=FOLDER); a model on the hub has the "
            f"form owner/name.{near}"
        )
    return name, False


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"


def _check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise DataError(
            f"{path} holds no config.json, so it is not a model folder as save_pretrained writes it (it holds: "
            f"{_listing(path)})."
        )
    if not any(True for pattern in _WEIGHTS for _ in path.glob(pattern)):
        raise DataError(
            f"{path} holds no weights ({', '.join(_WEIGHTS)}); it holds: {_listing(path)}. Is a download incomplete?"
        )
