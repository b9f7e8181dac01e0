"""The start of every run: checks of what a definition names; in one process, then the lock and the record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.data.prompts import template_options
from rlhf_pipeline.policies.chat import rewrites_history
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.build import Models, build_models
from rlhf_pipeline.run.events import EventHandler
from rlhf_pipeline.run.folder import RunFolder, Setup, tell
from rlhf_pipeline.run.loggers import check_logger
from rlhf_pipeline.run.prompt_lengths import check_prompts, skipped_notices


def check_start(folder: RunFolder, setup: Setup, *, resume: bool) -> None:
    """Check everything that can be checked before a model is built and a folder is made.

    Raises:
        PipelineError: the run cannot start or continue; the message says why.
    """
    folder.check_free_or_recorded(resume=resume)
    if resume:
        folder.check_processes(several=False)
        folder.check_unchanged(setup.pipeline, setup.seed)
        folder.check_parts()
    check_logger(setup.pipeline.learn.logger)


@contextmanager
def begun(folder: RunFolder, setup: Setup, *, resume: bool, on_event: EventHandler) -> Iterator[None]:
    """Hold the folder for this process alone, with its record written; it is made if absent."""
    with folder.named_disk_errors(), folder.lock(), folder.log():
        folder.check_free_or_recorded(resume=resume)  # again under the lock: another process may have been faster
        if not resume:
            folder.clear()
        for notice in folder.notices(setup.pipeline, device=setup.device):
            tell(on_event, notice)
        folder.record(setup)
        yield
        folder.flush()


def checked_models(pipeline: Pipeline, *, run: RunFolder, seed: int, device: str, on_event: EventHandler) -> Models:
    """Build the models of a run that samples; before its first rollout, check that they have room for its prompts.

    Raises:
        MissingPathError: the model's folder does not exist.
        DataError: a prompt is too long for the model.
    """
    models = build_models(pipeline, seed=seed, device=device)
    if run.is_free:  # later, the prompts are those of its record
        check_prompts(pipeline, models.policy, seed, on_event)
    return models


def sampling_notices(pipeline: Pipeline, policy: TokenPolicy) -> Iterator[str]:
    """Return notices about prompts and tokenizer, before the first completion."""
    yield from skipped_notices(pipeline.prompts, policy)
    tokenizer = policy.tokenizer
    if tokenizer is None:
        return
    if getattr(tokenizer, "eos_token_id", None) is None:
        yield (
            "the tokenizer has no end token: every completion runs to collect.max_new_tokens="
            f"{pipeline.collect.max_new_tokens}. Set eos_token in the model folder's tokenizer_config.json."
        )
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if pipeline.environment is not None and pipeline.prompts.as_chat and has_template:
        notice = rewrites_history(tokenizer, template=template_options(pipeline.prompts))
        if notice is not None:
            yield notice
    if pipeline.prompts.as_chat and not has_template:
        yield (
            "the prompts are meant for a chat template (prompts.as_chat), and the tokenizer has none: the model gets "
            "the plain text. --set prompts.as_chat=false says the same without this notice."
        )
