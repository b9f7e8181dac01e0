"""From prompts to token ids and from token ids to text, by a tokenizer of transformers."""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trajectory_store import extras
from trajectory_store.errors import BatchError, SchemaError, TokenizerNotFoundError, did_you_mean

Message = Mapping[str, Any]

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def need_tokenizer(tokenizer: Any | None) -> Any:
    """Raise an error for encoding or decoding without a tokenizer."""
    if tokenizer is None:
        raise SchemaError(
            "The policy has no tokenizer, so text cannot be encoded or decoded. Pass token ids, or add tokenizer.json "
            "and tokenizer_config.json to the checkpoint folder."
        )
    return tokenizer


def messages_of(prompt: str | Sequence[Message]) -> list[dict[str, Any]]:
    """Return a prompt as chat messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def encode_prompt(
    tokenizer: Any | None,
    prompt: str | Sequence[Message],
    *,
    as_chat: bool = True,
    tools: Sequence[Any] | None = None,
    template: Mapping[str, Any] | None = None,
    whole: bool = False,
) -> list[int]:
    """Return the token ids that a completion continues.

    Raises:
        SchemaError: there is no tokenizer, or no chat template for messages, or it rejects these.
        BatchError: the prompt gives no tokens, or has a character without one.
    """
    codec = need_tokenizer(tokenizer)
    chat_template = getattr(codec, "chat_template", None)
    if not isinstance(prompt, str) and chat_template is None:
        raise SchemaError(
            "The prompt is a list of messages, but the tokenizer has no chat template. "
            "Set tokenizer.chat_template, or pass the prompt as text."
        )
    if chat_template is not None and (as_chat or not isinstance(prompt, str)):
        try:
            ids = codec.apply_chat_template(
                messages_of(prompt),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                tools=tools,
                **(template or {}),
            )
        except _template_errors() as error:
            roles = [message["role"] for message in messages_of(prompt)]
            raise SchemaError(
                f"the chat template rejects a prompt with the message roles {roles}: {error}. Change the messages (the "
                "template may not accept a system message), or the tokenizer's chat template."
            ) from error
    else:
        ids = encode_text(codec, str(prompt))
        bos = getattr(codec, "bos_token", None)
        if bos and str(prompt).startswith(bos) and ids[:2] == [codec.bos_token_id] * 2:
            ids = ids[1:]
        end = [getattr(codec, "eos_token_id", None)]
        if not whole and ids[-1:] == end != encode_text(codec, str(prompt), add_special_tokens=False)[-1:]:
            ids = ids[:-1]
    if not ids:
        raise BatchError(f"The prompt {prompt!r} has no tokens. Check the prompt field of the data.")
    return [int(i) for i in ids]


def _template_errors() -> tuple[type[Exception], ...]:
    """Return what templates raise by hand, and by what they lack; a template that ran has loaded jinja2."""
    jinja2 = sys.modules.get("jinja2")
    return (TypeError,) if jinja2 is None else (TypeError, jinja2.TemplateError)


def encode_text(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the token ids of a text without special tokens added.

    Raises:
        BatchError: the tokenizer knows no token for a character.
    """
    try:
        return list(map(int, tokenizer.encode(text, **options)))
    except Exception as error:
        # The tokenizers package raises a bare Exception for a character without a token.
        if "Missing [UNK] token" not in str(error):
            raise
        alphabet = "".join(sorted(t for t in tokenizer.get_vocab() if len(t) == 1))
        raise BatchError(
            f"The text {text!r} contains a character that is unknown to the tokenizer. Its alphabet is {alphabet!r}; "
            "add the missing characters to it."
        ) from error


def decode(
    tokenizer: Any | None, token_ids: Sequence[int], *, keep_special: bool = False, end_token_ids: Collection[int] = ()
) -> str:
    """Return the text of a completion."""
    codec, ids = need_tokenizer(tokenizer), list(token_ids)
    if keep_special:
        silent = {*end_token_ids, getattr(codec, "eos_token_id", None), getattr(codec, "pad_token_id", None)}
        ids = [token for token in ids if token not in silent]
    return codec.decode(ids, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False)


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of transformers in a folder, or of this name on a hub.

    Raises:
        TokenizerNotFoundError: there is no such folder.
        BatchError: it has no tokenizer, or one that cannot be loaded.
    """
    folder = Path(name).expanduser()
    if not folder.exists() and (name.count("/") != 1 or folder.parent.is_dir()):
        beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        near = did_you_mean(folder.name, beside) if beside else ""
        raise TokenizerNotFoundError(
            f"there is no tokenizer folder at {folder}.{near} Specify the checkpoint folder of your model."
        )
    tokenizer = tokenizer_at(str(folder) if folder.exists() else name, local=folder.exists())
    if tokenizer is None:
        raise BatchError(f"{folder} has no tokenizer: it contains neither tokenizer.json nor tokenizer_config.json.")
    return tokenizer


def tokenizer_at(source: str, *, local: bool) -> Any | None:
    """Load the tokenizer beside a model, or return None when the folder has none."""
    if local and Path(source).is_dir() and not any((Path(source) / name).is_file() for name in _FILES):
        return None
    transformers = extras.load("transformers", "a tokenizer's name")
    if local and (path := Path(source)).suffix.lower() == ".gguf":  # weights, config and tokenizer in one file
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    # AutoTokenizer picks a class by the model's type even where the folder declares the generic one, and some of
    # those classes rebuild the pre-tokenizer, which gives other ids for the same text. The folder's own file is right.
    generic = local and _declares_generic(Path(source))
    loader = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
    try:
        return loader.from_pretrained(source, local_files_only=local)
    except (OSError, ValueError, KeyError, TypeError) as error:
        lines = str(error).strip().splitlines()
        raise BatchError(
            f"The tokenizer of {source} cannot be loaded: {lines[0].rstrip('.') if lines else type(error).__name__}. "
            "Check tokenizer.json and tokenizer_config.json."
        ) from error


def _declares_generic(folder: Path) -> bool:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    class_name = config.get("tokenizer_class") if isinstance(config, dict) else None
    return class_name in ("TokenizersBackend", "PreTrainedTokenizerFast") and (folder / "tokenizer.json").is_file()
