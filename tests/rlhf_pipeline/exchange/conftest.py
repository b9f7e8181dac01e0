"""A small tokenizer, and files as other tools write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token per ASCII character, 1 for the end, 0 for what is unknown; no chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(code): code for code in range(32, 127)} | {"\n": 10, "<unk>": 0, "<eos>": 1}
    backend = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer: Any) -> Any:
    """The same with a chat template: `U:` and the message, then `A:`."""
    from copy import deepcopy

    copied = deepcopy(tokenizer)
    copied.chat_template = "{% for m in messages %}U:{{ m['content'] }}{% endfor %}A:"
    return copied


@pytest.fixture
def jsonl(tmp_path: Path) -> Write:
    """Return a function that writes rows as JSONL and returns the file."""

    def write(rows: Iterable[Any], name: str = "rollouts.jsonl") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write
