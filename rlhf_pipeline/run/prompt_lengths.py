"""Whether prompts have room in the model's context: checked before the first rollout, and remembered by digest.

A token is at least one byte, so only prompts that may be too long are encoded. Where that is many, the result is kept
in the user's cache folder (`$XDG_CACHE_HOME/rlhf-pipeline`, `~/.cache/rlhf-pipeline` without it) under the digest of
everything that decides it: the prompts, the tokenizer, the template's arguments and the limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Final, cast

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.data.prompts import (
    ChosenPrompts,
    Mix,
    Prompt,
    Prompts,
    PromptSource,
    prompt_at,
    template_options,
    through_template,
)
from rlhf_pipeline.environments.environment import tools_of
from rlhf_pipeline.environments.makers import maker_of
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.policies.chat import encode_any, encode_text
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.events import EventHandler, Notice, ignore_events
from rlhf_pipeline.run.template_check import template_notices
from trajectory_store.new_files import new_file

_CHARACTERS_A_TOKEN: Final = 16
"""A prompt with more characters per position of the context is first encoded in part: encoding is not linear."""
_TEMPLATE_BYTES: Final = 256
"""Bytes per message reserved for a chat template. A prompt below the limit by more than this is not encoded."""
_WORTH_REMEMBERING: Final = 1000
"""Encoding fewer prompts takes less than a second."""
_SECONDS_A_NOTICE: Final = 5.0

TooLong = dict[int, int]
"""The tokens of the prompts that are too long, by position; for a very long prompt, only those of its beginning."""


def check_prompts(pipeline: Pipeline, policy: TokenPolicy, seed: int, on_event: EventHandler = ignore_events) -> None:
    """Reject prompts that leave no room for a completion in the model's context, or that cannot be encoded.

    All prompts of a file are checked; of another source, those of the first rollout.
    """
    source, prefill = pipeline.prompts, pipeline.collect.prefill
    if pipeline.environment is not None and not tools_of(maker_of(pipeline.environment)):
        return  # what the policy sees first is the environment's
    first = [prompt_at(source, cursor, seed) for cursor in range(pipeline.collect.prompts_per_rollout)]
    if (
        policy.tokenizer is not None
    ):  # what the template rejects is reported first; a very long text is not read to its end
        _num_tokens(policy.tokenizer, first[0], source, enough=policy.max_positions or 1 << 12)
    for part in _parts(source):
        listed = isinstance(part, Prompts)
        if listed and "too_long" in part.skip:
            fitting(part, policy, on_event, prefill=prefill)
            continue
        prompts = part.all_prompts() if listed else first
        most = _most(part, policy, prefill)
        for position, num in _too_long(prompts, part, policy, most, on_event).items():
            raise DataError(_sentence(prompts[position], part, num, policy, most))


def fitting(
    source: PromptSource, policy: TokenPolicy, on_event: EventHandler = ignore_events, *, prefill: str = ""
) -> PromptSource:
    """Return a source without the prompts that its `skip="too_long"` excludes; another source unchanged.

    Args:
        source: the source, or a mixture.
        policy: its context and its tokenizer decide.
        on_event: hears how far a long check is.
        prefill: `collect.prefill`, which is between a prompt and its completion.
    """
    if isinstance(source, Mix):
        return source.with_sources([fitting(part, policy, on_event, prefill=prefill) for part in source.sources])
    if not isinstance(source, Prompts) or "too_long" not in source.skip:
        return source
    prompts = source.all_prompts()
    most = _most(source, policy, prefill)
    gone = _too_long(prompts, source, policy, most, on_event)
    positions = tuple(position for position in range(len(prompts)) if position not in gone)
    if not positions:
        raise DataError(
            f"every prompt{f' of {source.path}' if source.path else ''} is too long: the limit is {most:,} tokens. "
            "Raise prompts.max_prompt_tokens, or use a model with a longer context."
        )
    return ChosenPrompts(source=source, positions=positions)


def skipped_notices(source: PromptSource, policy: TokenPolicy, prefill: str = "") -> Iterator[str]:
    """Yield one notice per source that excludes rows by a named rule, with their number."""
    for part in _parts(source):
        if isinstance(part, Prompts) and part.skip:
            total, counts = len(part.all_prompts()), part.skipped()
            if "too_long" in part.skip:
                left = fitting(part, policy, prefill=prefill)
                counts["too_long"] = total - len(left) if isinstance(left, ChosenPrompts) else 0
            rules = ", ".join(f"{rule} {counts.get(rule, 0):,}" for rule in cast("tuple[str, ...]", part.skip))
            rows = total + sum(counts.values()) - counts.get("too_long", 0)
            yield f"{part.path or 'rows'}: of {rows:,} prompts were skipped: {rules}."


def sampling_notices(pipeline: Pipeline, policy: TokenPolicy) -> Iterator[str]:
    """Yield notices about prompts and tokenizer, before the first completion."""
    yield from skipped_notices(pipeline.prompts, policy, pipeline.collect.prefill)
    tokenizer = policy.tokenizer
    if tokenizer is None:
        return
    if getattr(tokenizer, "eos_token_id", None) is None:
        yield (
            "the tokenizer has no end token: every completion runs to collect.max_new_tokens="
            f"{pipeline.collect.max_new_tokens}. Set eos_token in the model folder's tokenizer_config.json."
        )
    has_template = getattr(tokenizer, "chat_template", None) is not None
    yield from template_notices(pipeline, policy)
    for part in _parts(pipeline.prompts):
        if getattr(part, "as_chat", False) and not has_template:  # other sources need no template
            advice = (
                "--set prompts.as_chat=false has the same effect without this notice."
                if part is pipeline.prompts and is_dataclass(part)
                else f"as_chat=False of {type(part).__name__} has the same effect without this notice."
            )
            yield (
                "the prompts are intended for a chat template (prompts.as_chat), but the tokenizer has none: the "
                f"model receives the plain text. {advice}"
            )
            break


def _parts(source: PromptSource) -> Iterator[PromptSource]:
    """Yield the sources of a mixture, or the source itself."""
    if isinstance(source, Mix):
        for part in source.sources:
            yield from _parts(part)
    else:
        yield source


def _most(source: PromptSource, policy: TokenPolicy, prefill: str) -> int | None:
    """Return the most tokens of a prompt; None for no limit."""
    room = policy.max_positions
    if room is not None:
        begins = len(encode_text(policy.tokenizer, prefill, add_special_tokens=False)) if prefill else 0
        room = max(room - 1 - begins, 1)
    limits = [getattr(source, "max_prompt_tokens", None), room]
    return min((limit for limit in limits if limit is not None), default=None)


def _too_long(
    prompts: Sequence[Prompt], source: PromptSource, policy: TokenPolicy, most: int | None, on_event: EventHandler
) -> TooLong:
    if most is None or policy.tokenizer is None:
        return {}
    doubtful = [position for position, prompt in enumerate(prompts) if _size(prompt) > most]
    file = None
    if len(doubtful) >= _WORTH_REMEMBERING:
        file = _remembered_in([prompts[position] for position in doubtful], source, policy, most)
    if file is not None and file.is_file():
        with suppress(OSError, ValueError):
            return {doubtful[at]: num for at, num in json.loads(file.read_text(encoding="utf-8"))}
    too_long, last_notice = TooLong(), time.monotonic()
    for done, position in enumerate(doubtful):
        num = _num_tokens(policy.tokenizer, prompts[position], source, enough=most + 1)
        if num > most:
            too_long[position] = num
        if time.monotonic() - last_notice > _SECONDS_A_NOTICE:
            last_notice = time.monotonic()
            what = f"checking the length of prompts: {done + 1:,} of {len(doubtful):,}"
            on_event(Notice(message=what, level="progress"))
    if file is not None:
        places = {position: at for at, position in enumerate(doubtful)}
        _remember(file, json.dumps([(places[position], num) for position, num in too_long.items()]))
    return too_long


def _size(prompt: Prompt) -> int:
    """Return the most tokens that a prompt can have."""
    if prompt.messages is None:
        return len(prompt.text.encode("utf-8", "replace")) + _TEMPLATE_BYTES
    return sum(len(json.dumps(message, ensure_ascii=False).encode()) + _TEMPLATE_BYTES for message in prompt.messages)


def _num_tokens(tokenizer: Any, prompt: Prompt, source: PromptSource, *, enough: int) -> int:
    """Count the tokens of a prompt, or return `enough` if its beginning alone has as many."""
    options: dict[str, Any] = {"as_chat": through_template(source), "template": template_options(source)}
    beginning = prompt.text[: _CHARACTERS_A_TOKEN * enough]
    cut = prompt.messages is None and len(beginning) < len(prompt.text)
    if cut and len(encode_any(tokenizer, Prompt(text=beginning), **options)) >= enough:
        return enough
    return len(encode_any(tokenizer, prompt, **options))


def _sentence(prompt: Prompt, source: PromptSource, num: int, policy: TokenPolicy, most: int | None) -> str:
    positions = policy.max_positions
    line, path = prompt.meta.get("source_line"), getattr(source, "path", "") or "rows"
    field = getattr(source, "prompt_field", "text")
    where = f"the prompt of line {line} of {path} (field '{field}')" if line is not None else "a prompt"
    count = f"{'at least ' if most is not None and num == most + 1 else ''}{num:,} tokens"
    if positions is not None and most != getattr(source, "max_prompt_tokens", None):
        why = f"and the model's context is {positions:,}: no completion fits"
    else:
        why = f"and prompts.max_prompt_tokens is {most:,}"
    return (
        f"{where} has {count}, {why} ({prompt.text[:40]!r}...). Skip and count such prompts: --set "
        "prompts.skip=too_long; or use a model with a longer context: --set policy.path=FOLDER"
    )


def _remembered_in(prompts: Sequence[Prompt], source: PromptSource, policy: TokenPolicy, most: int) -> Path | None:
    """Return the file of a check's result; None if the tokenizer cannot be identified."""
    codec: Any = policy.tokenizer
    backend = getattr(codec, "backend_tokenizer", None)
    if backend is None:
        return None
    digest = hashlib.sha256()
    facts = [1, backend.to_str(), str(codec.chat_template), through_template(source), template_options(source), most]
    digest.update(json.dumps(facts).encode())
    for prompt in prompts:
        digest.update(json.dumps(prompt.text if prompt.messages is None else prompt.messages).encode())
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rlhf-pipeline" / "prompt-lengths" / f"{digest.hexdigest()}.json"


def _remember(file: Path, text: str) -> None:
    """Write the file whole or not at all; where it cannot be written, the next start checks again."""
    with suppress(OSError), new_file(file, exclusive=False, parents=True) as part:
        part.write_text(text, encoding="utf-8")
