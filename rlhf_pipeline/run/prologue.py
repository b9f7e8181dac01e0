"""The start of every run: checks of what a definition names; in one process, then the lock and the record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.policies.chat import encode_prompt
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.build import Models, build_models
from rlhf_pipeline.run.events import EventHandler
from rlhf_pipeline.run.folder import RunFolder, Setup, tell
from rlhf_pipeline.run.loggers import check_logger

_CHARACTERS_A_TOKEN = 16
"""A prompt with more characters per position of the context is first encoded in part: encoding is not linear."""
_TEMPLATE_BYTES = 256
"""Bytes allowed for a chat template: a prompt that is shorter than the context by more than this is not encoded."""


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
        folder.medium.flush()


def checked_models(pipeline: Pipeline, *, run: RunFolder, seed: int, device: str) -> Models:
    """Build the models of a run that samples; before its first rollout, check that they have room for its prompts.

    Raises:
        MissingPathError: the model's folder does not exist.
        DataError: a prompt is too long for the model.
    """
    models = build_models(pipeline, seed=seed, device=device)
    if run.is_free:  # later, the prompts are those of its record
        check_prompts(pipeline, models.policy, seed)
    return models


def check_prompts(pipeline: Pipeline, policy: TokenPolicy, seed: int) -> None:
    """Refuse prompts that leave no room for a completion in the model's context.

    All prompts of a file are checked, but only those that may be too long are encoded: a token is at least one byte.
    For another source, the prompts of the first rollout are checked.

    Raises:
        DataError: a prompt is too long; the message names it, its tokens and the limit.
    """
    most = policy.max_positions
    if most is None:
        return
    for prompt in _prompts(pipeline, seed):
        if len(prompt.text.encode("utf-8", "replace")) + _TEMPLATE_BYTES < most:
            continue
        num = _num_tokens(policy, prompt.text, as_chat=pipeline.prompts.as_chat, enough=most)
        if num >= most:
            line = prompt.meta.get("source_line")
            where = (
                f"the prompt of line {line} of {getattr(pipeline.prompts, 'path', 'the file')}" if line else "a prompt"
            )
            raise DataError(
                f"{where} has {'at least ' if num == most else ''}{num:,} tokens, and the model's context is {most:,}: "
                f"nothing can follow it ({prompt.text[:40]!r}...). Leave the prompt out, or take a model with a longer "
                "context: --set policy.path=FOLDER"
            )


def sampling_notices(pipeline: Pipeline, policy: TokenPolicy) -> Iterator[str]:
    """Return notices about the engine and the tokenizer, before the first completion."""
    engine = policy.engine
    if isinstance(engine, SlotEngine) and (notice := engine.notice()) is not None:
        yield notice
    tokenizer = policy.tokenizer
    if tokenizer is None:
        return
    if getattr(tokenizer, "eos_token_id", None) is None:
        yield (
            "the tokenizer has no end token: every completion runs to collect.max_new_tokens="
            f"{pipeline.collect.max_new_tokens}. Set eos_token in the model folder's tokenizer_config.json."
        )
    if pipeline.prompts.as_chat and getattr(tokenizer, "chat_template", None) is None:
        yield (
            "the prompts are meant for a chat template (prompts.as_chat), and the tokenizer has none: the model gets "
            "the plain text. --set prompts.as_chat=false says the same without this notice."
        )


def _prompts(pipeline: Pipeline, seed: int) -> Iterator[Prompt]:
    source = pipeline.prompts
    rows = getattr(source, "all_prompts", None)
    if callable(rows):
        yield from rows()  # pyright: ignore[reportGeneralTypeIssues, reportReturnType] - the file's own source
        return
    for cursor in range(pipeline.collect.prompts_per_rollout):
        yield source.prompt(cursor, seed)


def _num_tokens(policy: TokenPolicy, text: str, *, as_chat: bool, enough: int) -> int:
    """Count the tokens of a prompt, or return `enough` if its beginning alone has as many."""
    beginning = text[: _CHARACTERS_A_TOKEN * enough]
    num = len(encode_prompt(policy.tokenizer, beginning, as_chat=as_chat))
    if len(beginning) == len(text):
        return num
    return enough if num >= enough else len(encode_prompt(policy.tokenizer, text, as_chat=as_chat))
