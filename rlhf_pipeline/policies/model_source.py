"""Checks whether a path can be a model checkpoint. Imports no torch, so that commands answer at once."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, typed

# "organisation/name" may also be a model on the hub. A bare name is a folder: the few hub models that still have a bare
# name have the long form too ("openai-community/gpt2").
_HUB_NAME = re.compile(r"[A-Za-z0-9_-][\w.-]*/[A-Za-z0-9_-][\w.-]*")
GGUF = ".gguf"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


def is_model_folder(path: Path) -> bool:
    """Return whether a folder has the config and the weights of a model; whole or not."""
    return (path / "config.json").is_file() and any(True for pattern in _WEIGHTS for _ in path.glob(pattern))


def is_gguf(source: str | os.PathLike[str]) -> bool:
    """Return whether a path names a GGUF file: weights, config and tokenizer in one file."""
    return Path(source).suffix.lower() == GGUF


def is_model(path: Path) -> bool:
    """Return whether a path is a model: a folder with config and weights, or a GGUF file."""
    return is_model_folder(path) or (is_gguf(path) and path.is_file())


def template_file(template: str | None) -> Path | None:
    """Return the file that a definition's chat template names; None for a text, which has a brace or lines.

    >>> template_file("{{ messages[0].content }}") is None, template_file("chatml.jinja")
    (True, PosixPath('chatml.jinja'))
    """
    return None if template is None or "{" in template or "\n" in template else Path(template).expanduser()


def template_text(template: str) -> str:
    """Return a definition's chat template: a text, or what the file of that name holds."""
    file = template_file(template)
    if file is None:
        return template
    if not file.is_file():
        raise MissingPathError(
            f"there is no chat template at {template}. Specify a Jinja file, such as the chat_template.jinja that "
            "save_pretrained writes (--set policy.chat_template=FILE), or omit policy.chat_template to use the "
            "tokenizer's template."
        )
    return file.read_text(encoding="utf-8")


def resolve_source(source: str | os.PathLike[str]) -> tuple[str, bool]:
    """Return (folder, GGUF file or hub name, whether it is here)."""
    name = os.fspath(source)
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return str(path), True
    if is_gguf(path):
        _check_gguf(path)
        return str(path), True
    if path.exists():
        raise DataError(
            f"{path} is a file. Specify the folder with config.json and the weights, or a file that ends in {GGUF}."
        )
    # A relative name with one slash may be a folder or a hub name; if its parent folder exists, it is a folder.
    if not _HUB_NAME.fullmatch(name) or path.parent.is_dir():
        near = f" Its parent folder contains: {_listing(path.parent)}." if path.parent.is_dir() else ""
        raise MissingPathError(
            f"there is no model folder at {name}. Create one: rlhf-pipeline new-model {typed(name)} --text FILE. Or "
            "specify a folder that save_pretrained wrote (--set policy.path=FOLDER); specify a model on the hub as "
            f"owner/name.{near}"
        )
    return name, False


def empty_folder(path: str | os.PathLike[str]) -> Path:
    """Return where a new model may be written; reject a place that holds anything."""
    target = Path(path).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DefinitionError(
            f"{target} already exists and is not an empty folder. Choose another folder, or remove {target} if "
            f"you do not need its files: rm -r {target}"
        )
    return target


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"


def _check_folder(path: Path) -> None:
    weights = [file for pattern in _WEIGHTS for file in path.glob(pattern)]
    if (path / "adapter_config.json").is_file() and all(file.name.startswith("adapter_model") for file in weights):
        step = re.fullmatch(r"step-0*(\d+)", path.name)
        run = f"{typed(path.parent.parent)}@{step[1]}" if step and path.parent.name == "checkpoints" else "RUN@STEP"
        raise DataError(
            f"{path} contains the adapters of a LoRA run, not a complete model. To continue with them: rlhf-pipeline "
            f"run DEFINITION --from {run}. To start from the adapted model, merge the adapters into their base model "
            'with peft (merge_and_unload; see "LoRA" in docs/use_the_model.md) and specify the merged folder.'
        )
    if not (path / "config.json").is_file():
        raise DataError(
            f"{path} has no config.json, so it is not a folder that save_pretrained wrote (its files: "
            f"{_listing(path)})."
        )
    if not weights:
        raise DataError(
            f"{path} has no weights ({', '.join(_WEIGHTS)}); its files: {_listing(path)}. Is the download incomplete?"
        )


def _check_gguf(path: Path) -> None:
    if not path.is_file():
        raise MissingPathError(f"there is no GGUF file at {path}.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise DataError(f"{path} begins with {magic!r} instead of b'GGUF', so it is not a GGUF file. Copy it again.")
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise DefinitionError(
            f"{path} is a GGUF file; reading it requires {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
