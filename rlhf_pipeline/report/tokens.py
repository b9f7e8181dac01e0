"""Token ids as text, without torch and without transformers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import MissingPathError
from rlhf_pipeline.run.folder import RunFolder


class TokenTexts:
    """Maps each token id to its piece of text.

    The tokenizer is the one that is named, else that of the run's newest checkpoint, or of the definition's model
    folder, else the one that an import encoded the trajectory with, where it is there. Without one, a text with as
    many characters as tokens is split into characters; any other text is shown as ids.
    """

    def __init__(self, run: RunFolder | None, tokenizer: str | Path | None = None) -> None:
        self._file = _tokenizer_file(run) if tokenizer is None and run is not None else None
        if tokenizer is not None:
            self._file = _file_in(Path(tokenizer))
            if self._file is None:
                raise MissingPathError(f"there is no tokenizer.json in {tokenizer}. Pass the folder of the model.")
        self._loaded: dict[Path, Any] = {}

    def _tokenizer(self, encoded_by: str) -> Any:
        file = self._file or (_file_in(Path(encoded_by)) if encoded_by else None)
        if file is not None and file not in self._loaded:
            try:
                from tokenizers import Tokenizer
            except ImportError:
                return None
            self._loaded[file] = Tokenizer.from_file(str(file))
        return self._loaded[file] if file is not None else None

    def pieces(
        self, ids: Sequence[int], num_prompt_tokens: int, prompt: str, completion: str, *, encoded_by: str = ""
    ) -> list[str]:
        """Return one text per token.

        Args:
            ids: token ids, prompt first, [T].
            num_prompt_tokens: how many of them belong to the prompt.
            prompt: the prompt's text.
            completion: the completion's text.
            encoded_by: the tokenizer that an import encoded the text with, by its recorded name.
        """
        if encoded_by == Characters.name_or_path:
            return [chr(token) for token in ids]
        if (tokenizer := self._tokenizer(encoded_by)) is not None:
            return [_piece(tokenizer, token) for token in ids]
        head = _by_character(prompt, num_prompt_tokens, at_end=True)
        tail = _by_character(completion, len(ids) - num_prompt_tokens, at_end=False)
        texts = [*head, *tail]
        return [f"[{token}]" if text is None else text for token, text in zip(ids, texts, strict=True)]


def _piece(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    if text and "\ufffd" not in text:
        return text
    name: str | None = tokenizer.id_to_token(token)
    if name is None:
        return f"[{token}]"
    table = _bytes_by_character()
    if all(character in table for character in name):  # a part of a character: its bytes
        return bytes(table[character] for character in name).decode("utf-8", "backslashreplace")
    return name


@functools.cache
def _bytes_by_character() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable Latin-1 maps to itself, other bytes to U+0100 and above."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprinted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(unprinted)}


def _by_character(text: str, num: int, *, at_end: bool) -> list[str | None]:
    """Return `num` characters, or Nones; one special token may come before (prompt) or after (completion)."""
    characters: list[str | None] = list(text)
    if num == len(text):
        return characters
    if num == len(text) + 1:
        return [None, *characters] if at_end else [*characters, None]
    return [None] * num


def _tokenizer_file(run: RunFolder) -> Path | None:
    folders = run.saved()[::-1]
    policy = run.config.pipeline.get("policy", {})
    if "path" in policy:
        folders.append(Path(policy["path"]).expanduser())
    for folder in folders:
        if folder.is_relative_to(run.checkpoints):
            run.bring(folder)
        if (file := _file_in(folder)) is not None:
            return file
    return None


def _file_in(folder: Path) -> Path | None:
    file = folder.expanduser() / "tokenizer.json"
    return file if file.is_file() else None


class Characters:
    """Represents a tokenizer where a text has no token ids: each character is shown as one token, its code point."""

    name_or_path = "characters"
    chat_template = "of messages only"
    eos_token_id = None

    def apply_chat_template(self, messages: Sequence[dict[str, object]], **_options: object) -> list[int]:
        """Return the code points of messages, of each its role and its text."""
        return self.encode("\n\n".join(f"[{message.get('role')}]\n{message.get('content')}" for message in messages))

    def encode(self, text: str, **_options: object) -> list[int]:
        """Return the code points."""
        return list(map(ord, text))

    def decode(self, ids: Sequence[int], **_options: object) -> str:
        """Return the text of code points."""
        return "".join(map(chr, ids))
