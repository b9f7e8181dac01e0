"""Sources of prompts: a source is a pure function from a cursor to a prompt.

A collector asks for prompt 0, 1, 2, ... The order is shuffled by the seed, epoch by epoch, and depends on nothing but
`(seed, cursor)`. So after a crash the number of consumed prompts determines which come next: none is lost and none is
repeated.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, did_you_mean, typed
from rlhf_pipeline.settings import Settings, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt and the inputs of its reward function."""

    text: str
    """The policy's input. With a chat template it becomes the user's message."""
    answer: str | None = None
    """The reference answer, passed to the reward function."""
    meta: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further JSON data, stored with every trajectory."""


class PromptSource(Protocol):
    """A source of prompts: `prompt(cursor, seed)` must depend on nothing else."""

    @property
    def as_chat(self) -> bool:
        """True if the text goes through the tokenizer's chat template, where it has one."""
        ...

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return prompt number `cursor` (0, 1, 2, ...) of the order that `seed` gives."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NoPrompts:
    """No prompts: for definitions that learn from stores only."""

    as_chat: bool = False
    """Unused."""

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Refuse.

        Raises:
            DefinitionError: always.
        """
        raise DefinitionError(f"there is no prompt {cursor} (seed {seed}): the definition learns from stores alone.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyDigits(Settings):
    """Random digits followed by `=`; the answer is the same digits.

    >>> source = CopyDigits(num_digits=3)
    >>> source.prompt(0, seed=0) == source.prompt(0, seed=0)
    True
    >>> source.prompt(0, seed=0).text.endswith("=")
    True
    """

    num_digits: int = setting(4, min=1, help="How many digits to copy.")
    as_chat: bool = setting(False, help="Always false: the prompt is raw text.")

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return prompt number `cursor`: `num_digits` digits, then `=`."""
        # Seeding by a string hashes it with SHA-512, so neighbouring cursors are independent.
        rng = random.Random(f"copy_digits {seed} {cursor}")
        digits = "".join(rng.choices("0123456789", k=self.num_digits))
        return Prompt(text=f"{digits}=", answer=digits)


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlPrompts(Settings):
    """Prompts from a JSONL file: one object per line, a question and its reference answer.

    The defaults read GSM8K's `train.jsonl`. The file is read once and checked completely before the first rollout, so a
    broken line stops the run at the start, not after a day.
    """

    path: str = setting(help="The file. Relative paths are taken from the working directory.")
    prompt_field: str = setting("question", help="The field that holds the prompt.")
    answer_field: str | None = setting(
        "answer", help="The field that holds the reference answer; none if there is none."
    )
    as_chat: bool = setting(True, help="Put the prompt through the tokenizer's chat template, where it has one.")
    limit: int | None = setting(None, min=1, help="Use only the first `limit` lines.")

    def all_prompts(self) -> tuple[Prompt, ...]:
        """Return every prompt of the file in order, or of its first `limit` lines if that is set.

        Raises:
            MissingPathError: the file is not there.
            DataError: a line is not JSON, not an object, or lacks a field.
        """
        return _read_jsonl_prompts(self.path, self.prompt_field, self.answer_field, self.limit)

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return prompt number `cursor`; every epoch is a new shuffle of the whole file.

        Raises:
            MissingPathError: the file is not there.
            DataError: a line is not JSON, not an object, or lacks a field.
        """
        rows = self.all_prompts()
        epoch, position = divmod(cursor, len(rows))
        return rows[_epoch_order(len(rows), seed, epoch)[position]]


@functools.lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"epoch {seed} {epoch}").shuffle(order)
    return order


@functools.lru_cache(maxsize=4)
def _read_jsonl_prompts(
    path: str, prompt_field: str, answer_field: str | None, limit: int | None
) -> tuple[Prompt, ...]:
    file = Path(path)
    if not file.is_file():
        raise MissingPathError(
            f"there is no prompt file at {file}. "
            "Point the definition at one, for example: --set prompts.path=FOLDER/train.jsonl"
        )
    rows: list[Prompt] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(rows) >= limit:
                break
            if line.strip():
                rows.append(_parse_line(line, file, number, prompt_field, answer_field))
    if not rows:
        raise DataError(f"{file} holds no prompts. It needs one JSON object per line with '{prompt_field}'.")
    return tuple(rows)


def _parse_line(line: bytes, file: Path, number: int, prompt_field: str, answer_field: str | None) -> Prompt:
    where = f"{file}:{number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        shown = line.strip()[:60].decode("utf-8", "replace")
        raise DataError(
            f"{where}: this line is not JSON ({error}): {shown!r}. "
            f"Fix or delete it; `sed -n {number}p {typed(file)}` shows it whole."
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object with '{prompt_field}', got {type(row).__name__}.")
    fields: dict[str, object] = row  # pyright: ignore[reportUnknownVariableType] - JSON has no static type
    values: list[str | None] = []
    for name in (prompt_field, answer_field):
        if name is None:
            values.append(None)
            continue
        if name not in fields:
            raise DataError(f"{where}: there is no field '{name}'.{did_you_mean(name, fields)}")
        value = fields[name]
        if not isinstance(value, str):
            raise DataError(f"{where}: field '{name}' must be text, got {type(value).__name__}.")
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise DataError(f"{where}: field '{name}' holds half of a surrogate pair, which is not text.")
        if name == prompt_field and not value:
            raise DataError(f"{where}: field '{name}' is empty.")
        values.append(value)
    text, answer = values
    return Prompt(text=text or "", answer=answer, meta={"source_line": number})
