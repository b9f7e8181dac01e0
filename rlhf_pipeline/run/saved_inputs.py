"""Reading back what a run has kept of its inputs, and whether its code may be executed. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_pipeline import definitions
from rlhf_pipeline.config_text import CODE
from rlhf_pipeline.data.files import field_of
from rlhf_pipeline.errors import DefinitionError, MissingPathError, typed
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.inputs import copied_prompts, place

Overrides = tuple[tuple[str, str], ...]


def definition_of(
    run: RunFolder,
    definition: str | None = None,
    *,
    trust: bool,
    moved: str = "specify its new path: --definition FILE.py[:function]",
) -> definitions.Definition:
    """Return the definition that is named, or else that a run was started with: its file, or the copy in its folder."""
    if definition:
        return definitions.find(definition)
    spec = run.config.definition
    source, _, function = spec.rpartition(":")
    foreign = not trust and run.config.place != place(run.address)
    more = [text for _, text in run.config.overrides if CODE.search(text)]
    if foreign and more:
        raise DefinitionError(
            f"{run.address} was not started here, and its settings refer to custom code: {more[0]}. Read this "
            "code, then add --trust to execute it."
        )
    if not source.endswith(".py"):
        return definitions.find(spec)
    copy = run.bring(run.path / filenames.SOURCE / Path(source).name)
    source_file = next((file for file in (Path(source), copy) if file.is_file()), None)
    if source_file is None:
        raise MissingPathError(
            f"the definition of {run.address} no longer exists: there is no file {source}, and no copy at {copy}. "
            f"If the file has moved, {moved}"
        )
    if foreign:
        raise DefinitionError(
            f"{run.address} was not started here, and its definition is custom code: {typed(source_file)}. Read this "
            "file, then add --trust to execute it. Or specify your own definition on the command line."
        )
    return definitions.find(f"{source_file}:{function}")


def with_copied_inputs(run: RunFolder, overrides: Overrides) -> Overrides:
    """Return overrides that read from the run folder what is not where it was when the run was started.

    The prompts come from the run's copies. The model's folder is replaced by the newest checkpoint, which has its
    architecture and its tokenizer, where nothing else needs the first weights: without a reference model and LoRA.
    """
    settings = dict(overrides)
    policy = run.config.pipeline.get("policy")
    for field in run.record.inputs:
        path = field_of(run.config.pipeline, field) if field.endswith("prompts.path") or ".sources." in field else ""
        if path and not Path(path).exists():
            copy = run.bring(copied_prompts(run.path, field, path))
            if copy.is_file():
                settings[field] = str(copy)
    path = policy.get("path") if isinstance(policy, dict) else None
    if isinstance(path, str) and "policy.path" in run.record.inputs and not Path(path).expanduser().exists():
        saved = run.saved()
        if (
            saved
            and isinstance(policy, dict)
            and not policy.get("lora_rank")
            and not _needs_the_first_weights(run.config.pipeline)
        ):
            settings["policy.path"] = str(run.bring(saved[-1]))
    return tuple(settings.items())


def _needs_the_first_weights(pipeline: Mapping[str, Any]) -> bool:
    """Return whether a recorded definition has a reference model."""
    write, loss = pipeline.get("write", {}), pipeline.get("loss", {})
    return bool(write.get("kl_coef") or write.get("kl_target") or loss.get("kl_to_ref_coeff"))
