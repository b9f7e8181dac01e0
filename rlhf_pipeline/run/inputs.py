"""The inputs of a run from outside its folder: records of prompt files and model folders, and copies of them.

    definition/FILE.py    the definition's source, unless it is built in
    inputs/FIELD/FILE     each prompt file, of evaluations and mixtures too, up to `LARGEST_PROMPTS`; a larger one is
                          named by its digest only

The tokenizer and the weights are in every checkpoint. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlhf_pipeline.config import Pipeline, PretrainedPolicy
from rlhf_pipeline.data.files import field_of, find_sources
from rlhf_pipeline.errors import PipelineError, RunMismatchError
from rlhf_pipeline.policies.model_source import template_file
from rlhf_pipeline.run import filenames
from trajectory_store.new_files import write_atomically

_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")
_TEXT_FILES: Final = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_ENDS: Final = 1 << 20
"""The number of bytes read at each end of a weight file, so that a model of 100 GB is checked in milliseconds."""

APART: Final = "they are stored separately, and the best checkpoint is selected only from them"
"""The consequence for evaluations with other prompts, sizes or rewards: their means are not comparable."""

LARGEST_PROMPTS: Final = 64 << 20
"""The maximum size, in bytes, of a prompt file that is copied into the run folder."""

Inputs = dict[str, dict[str, Any]]


def keep_inputs(root: Path, definition: str, pipeline: Pipeline) -> list[Path]:
    """Copy the definition's source and the prompt files into a run's folder; return the copies that are new."""
    source, _, _ = definition.rpartition(":")
    copies = [(Path(source), root / filenames.SOURCE / Path(source).name)] if source.endswith(".py") else []
    for field, path in _all_prompt_paths(pipeline):
        if Path(path).is_file() and Path(path).stat().st_size <= LARGEST_PROMPTS:
            copies.append((Path(path), copied_prompts(root, field, path)))
    if (template := template_file(pipeline.policy.chat_template)) is not None:
        copies.append((template, root / filenames.INPUTS / "policy.chat_template" / template.name))
    targets = []
    for file, target in copies:
        if file.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, file.read_bytes())
            targets.append(target)
    return targets


def copied_prompts(root: Path, field: str, path: str) -> Path:
    """Return where a run's folder has the copy of the prompt file at `path` that a field names."""
    return root / filenames.INPUTS / field / Path(path).name


def place(run: Path | str) -> dict[str, str]:
    """Return what distinguishes a run that was started here from one that was copied here: machine, user and path."""
    identity_file = next((path for path in map(Path, ("/etc/machine-id", "/etc/hostname")) if path.is_file()), None)
    name = identity_file.read_text(encoding="utf-8", errors="replace").strip() if identity_file else ""
    machine = hashlib.sha256(f"rlhf-pipeline {name} {os.getuid()}".encode()).hexdigest()[:16]
    return {"machine": machine, "path": os.path.abspath(run) if isinstance(run, Path) else run}


def describe_inputs(pipeline: Pipeline) -> Inputs:
    """Return the record in `config.json` of the files that a definition names, without files that do not exist.

    A prompt file is hashed whole. In a model folder, the configs (that of generation names the end tokens) and the
    tokenizer are hashed whole, and each weight file's size, first and last MiB: that detects a model that was trained
    further, but not a single changed number. Code is recorded by `run.recorded_code`.

    >>> from rlhf_pipeline import CopyDigits, Pipeline, TinyPolicy, token_match
    >>> describe_inputs(Pipeline(name="a", policy=TinyPolicy(), prompts=CopyDigits(), reward=token_match))
    {}
    """
    inputs = _contents([*_all_prompt_paths(pipeline), *_template_path(pipeline)])
    if isinstance(pipeline.policy, PretrainedPolicy):
        model = Path(pipeline.policy.path).expanduser()
        if model.exists():
            inputs["policy.path"] = model_files(model)
    if pipeline.replay is not None:
        # Where the stores were. The choice from them is in `gather.json`; they may grow or disappear afterwards.
        inputs["replay.stores"] = {path: str(Path(path).expanduser().resolve()) for path in pipeline.replay.stores}
    return inputs


def prompt_contents(source: Any, field: str) -> Inputs:
    """Return size and hash of the prompt files of a source, by the fields that name them."""
    return _contents(_prompt_paths(source, field))


def template_content(pipeline: Pipeline) -> Inputs:
    """Return size and hash of the chat template, if it is a file."""
    return _contents(_template_path(pipeline))


def changed_prompts(recorded: Mapping[str, Mapping[str, Any]], pipeline: Pipeline) -> Iterator[str]:
    """Yield notices about files of evaluation prompts that have changed since the last start, which is allowed."""
    held_out = tuple(_held_out_paths(pipeline))
    now = _contents(held_out)
    for field, path in held_out:
        before = recorded.get(field)
        if before is not None and field in now and now[field] != before:
            yield (
                f"{path} ({field}) has changed since the run was last started: {_sizes(before, now[field])}. "
                f"New evaluations use the new prompts; {APART}."
            )


def check_inputs(
    run_dir: Path | str,
    recorded: Mapping[str, Mapping[str, Any]],
    pipeline: Pipeline,
    *,
    definition: Mapping[str, Any] | None = None,
    otherwise: str | None = None,
) -> None:
    """Raise an error if prompts or the starting model differ from those of the run.

    A missing file is reported elsewhere, and a run without a record of its files is not checked.

    Args:
        run_dir: the run.
        recorded: what `describe_inputs` returned when it was started.
        pipeline: the definition now.
        definition: as recorded, to distinguish another path from other content.
        otherwise: how to begin a run with the weights of this one and other prompts, for the message.
    """
    now = describe_inputs(pipeline)
    input_paths = [*_prompt_paths(pipeline.prompts, "prompts"), *_template_path(pipeline)]
    paths = {"policy.path": getattr(pipeline.policy, "path", ""), **dict(input_paths)}
    for field, before in recorded.items():
        if not before or field not in paths or field not in now or now[field] == before:
            continue
        changed = sorted(name for name in before.keys() | now[field].keys() if before.get(name) != now[field].get(name))
        if field == "policy.path":
            what = f"{', '.join(changed)} {'differs' if len(changed) == 1 else 'differ'}"
        else:
            what = _sizes(before, now[field])
        instead = None if field == "policy.path" else otherwise
        was = _recorded_path(definition or {}, field)
        if was not in (None, paths[field]):
            problem = (
                f"{field} was {was} and is now {paths[field]}, whose content differs: {what}. Use the recorded path"
            )
        else:
            problem = (
                f"{paths[field]} ({field}) has changed since {run_dir} was started: {what}. Restore the old content"
            )
        raise RunMismatchError(
            f"{problem} to continue this run, or {instead or 'start a new run with --out OTHER_FOLDER.'}"
        )


def _recorded_path(definition: Mapping[str, Any], field: str) -> str | None:
    """Return the path that a recorded definition has in a field, or None."""
    try:
        recorded = field_of(definition, field)
    except KeyError:
        return None
    return recorded if isinstance(recorded, str) else None


def _prompt_paths(source: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yield the path of a source of prompts, or those of a mixture's sources, with the field that names it."""
    path = getattr(source, "path", None)
    if isinstance(path, str) and path:
        yield f"{field}.path", path
    for number, part in enumerate(getattr(source, "sources", ())):
        yield from _prompt_paths(part, f"{field}.sources.{number}")


def _template_path(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Yield the path of the chat template, if it is a file."""
    if (file := template_file(pipeline.policy.chat_template)) is not None:
        yield "policy.chat_template", str(file)


def _all_prompt_paths(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Yield the paths of prompts and of held-out prompts, with the fields that name them."""
    yield from _prompt_paths(pipeline.prompts, "prompts")
    yield from _held_out_paths(pipeline)


def _held_out_paths(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    for name, evaluation in pipeline.evaluations.items():
        yield from _prompt_paths(evaluation.prompts, f"evaluate.{name}.prompts" if name else "evaluate.prompts")


def _contents(paths: Iterable[tuple[str, str]]) -> Inputs:
    """Return size and hash of the prompt files that fields name; without those that do not exist."""
    return {
        field: {"size": sum(file.stat().st_size for file in files), "sha256": _together(files)}
        for field, path in paths
        if (files := _prompt_files(path))
    }


def _prompt_files(path: str) -> list[Path]:
    """Return the files of a path of prompts; none if it cannot be read, which is reported elsewhere."""
    if Path(path).is_file():
        return [Path(path)]
    try:
        return [file for source in find_sources([path]) for file in source.files()]
    except PipelineError:
        return []


def _together(files: Sequence[Path]) -> str:
    whole = [_digest_of(file) for file in files]
    return whole[0] if len(whole) == 1 else hashlib.sha256("".join(whole).encode()).hexdigest()


def _sizes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if before["size"] != now["size"]:
        return f"its size was {before['size']:,} bytes and is now {now['size']:,}"
    return f"its size is still {now['size']:,} bytes, but its content differs"


def model_files(folder: Path) -> dict[str, Any]:
    """Return the record of a model folder or GGUF file; see `describe_inputs`."""
    if folder.is_file():
        return {folder.name: f"{folder.stat().st_size}:{_ends(folder)}"}
    digests = {name: _digest_of(folder / name) for name in _TEXT_FILES if (folder / name).is_file()}
    for pattern in _WEIGHTS:
        digests |= {file.name: f"{file.stat().st_size}:{_ends(file)}" for file in sorted(folder.glob(pattern))}
    return digests


def _digest_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _ends(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        digest.update(stream.read(_ENDS))
        stream.seek(max(file.stat().st_size - _ENDS, 0))
        digest.update(stream.read(_ENDS))
    return digest.hexdigest()
