"""Models made here: a small checkpoint folder or a tiny model from scratch, and a folder from a GGUF file.

Those from scratch have random weights, so nothing is downloaded. Their checkpoint has a byte-level BPE tokenizer that
encodes any text (unknown characters fall back to bytes) and a chat template that marks the assistant's tokens.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError
from rlhf_pipeline.policies.loading import load_model, load_tokenizer, quiet_progress
from rlhf_pipeline.policies.model_source import empty_folder, resolve_source
from trajectory_store.new_files import new_file

# The special tokens of Qwen2's chat models.
PAD, EOS, START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"

logger = logging.getLogger(__name__)

_LONGEST_WORD = 1_000
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD}}}(?=\S)")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML with generation markers: the assistant's content and the token that ends it are the assistant's tokens."""

# Both kinds of tokenizer number their special tokens first, in this order.
_PAD_ID, _EOS_ID = 0, 1
_BYTES_AND_SPECIALS = 256 + 3


@dataclass(frozen=True, slots=True)
class NewModel:
    """The model that `new_model` created."""

    folder: Path
    vocab_size: int
    num_parameters: int
    num_texts: int


def new_model(
    folder: str | os.PathLike[str],
    *,
    text_file: str | os.PathLike[str],
    vocab_size: int = 4096,
    hidden_size: int = 256,
    num_layers: int = 4,
    num_heads: int = 4,
    max_positions: int = 2048,
    seed: int = 0,
) -> NewModel:
    """Make a small Qwen2 checkpoint with random weights and a tokenizer trained on a file.

    The folder appears whole or not at all: it is built under another name and renamed.
    """
    target = empty_folder(folder)
    if vocab_size < _BYTES_AND_SPECIALS:
        raise DefinitionError(
            f"vocab_size is {vocab_size}; it must be at least {_BYTES_AND_SPECIALS}: 256 bytes and 3 special tokens."
        )
    sizes = _sizes(hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads)
    tokenizer, num_texts = _train_tokenizer(Path(text_file).expanduser(), vocab_size, max_positions)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=max_positions,
        bos_token_id=None,
        eos_token_id=_EOS_ID,
        pad_token_id=_PAD_ID,
        tie_word_embeddings=True,
        **sizes,
    )
    model = _random_model(Qwen2ForCausalLM, config, seed)
    _write(target, model, tokenizer)
    return NewModel(
        folder=target,
        vocab_size=len(tokenizer),
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_texts=num_texts,
    )


def model_from_gguf(folder: str | os.PathLike[str], *, gguf: str | os.PathLike[str]) -> NewModel:
    """Write the model of a GGUF file as a checkpoint folder of safetensors, dequantized to float32.

    transformers and vLLM load the folder. It appears whole or not at all.
    """
    target = empty_folder(folder)
    name, _ = resolve_source(gguf)
    model: Any = load_model(name, local=True, dtype=None)
    tokenizer: Any = load_tokenizer(name, local=True)
    _write(target, model, tokenizer)
    return NewModel(
        folder=target,
        vocab_size=len(tokenizer),
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_texts=0,
    )


def _write(target: Path, model: Any, tokenizer: Any) -> None:
    """Build the folder under another name, and rename it."""
    with new_file(target, exclusive=False, parents=True) as part:
        with quiet_progress():
            model.save_pretrained(part)
        tokenizer.save_pretrained(part)


def scratch_model(
    alphabet: str,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    seed: int = 0,
    max_positions: int = 512,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make a tiny model in memory, with a tokenizer of one token per character; random weights.

    >>> model, tokenizer = scratch_model("01=", hidden_size=16, num_layers=1, num_heads=2)
    >>> tokenizer.encode("10="), model.config.vocab_size
    ([3, 2, 4], 5)
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise DefinitionError(f"alphabet {alphabet!r} is empty or repeats a character; list every character once.")
    tokenizer = _character_tokenizer(alphabet, max_positions)
    # A Llama: AutoTokenizer reads tokenizer.json unchanged for this type, so a saved policy loads anywhere.
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=max_positions,
        bos_token_id=None,
        eos_token_id=_EOS_ID,
        pad_token_id=_PAD_ID,
        **_sizes(hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads),
    )
    return _random_model(LlamaForCausalLM, config, seed), tokenizer


def _sizes(*, hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    if num_layers < 1 or num_heads < 1:
        raise DefinitionError(f"num_layers is {num_layers} and num_heads is {num_heads}; both must be at least 1.")
    if hidden_size < 1 or hidden_size % (2 * num_heads):
        raise DefinitionError(
            f"hidden_size is {hidden_size}; it must be a multiple of {2 * num_heads}, twice the number of heads, "
            "because a head's size must be even."
        )
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
    }


def _random_model(kind: type[Any], config: Any, seed: int) -> Any:
    """Return a model whose weights depend on the seed alone; the global generator is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).eval()


def _character_tokenizer(alphabet: str, max_positions: int) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate((PAD, EOS, *alphabet))}
    backend = Tokenizer(models.WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def _train_tokenizer(text_file: Path, vocab_size: int, max_positions: int) -> tuple[Qwen2Tokenizer, int]:
    texts = [_cut(text) for text in _texts(text_file)]
    if not texts:
        raise DataError(f"{text_file} contains no text from which to train a tokenizer. Choose another file.")
    # Qwen2Tokenizer's own normalizer and pre-tokenizer (one token per digit): AutoTokenizer makes a Qwen2Tokenizer for
    # every Qwen2 model and installs these, so any other tokenizer would encode the same text differently after loading.
    backend = Qwen2Tokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    learned = json.loads(trained.to_str())["model"]
    merges: Any = [tuple(pair) for pair in learned["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[START],
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer, len(texts)


def _texts(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, or every string in the objects of a JSONL file."""
    if not path.is_file():
        raise MissingPathError(
            f"There is no text file at {path}. Specify a .txt or .jsonl file from which to train the tokenizer."
        )
    is_json = path.suffix in (".jsonl", ".json", ".ndjson")
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                if not is_json:
                    yield line
                    continue
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"line {number} of {path} is not JSON ({error.msg}). Write one object per line, or rename the "
                        "file to .txt."
                    ) from error
                yield from _strings(value)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}). Convert it first.") from error


def _cut(text: str) -> str:
    """Cut stretches of more than `_LONGEST_WORD` characters without a space: training on one is not linear."""
    if len(text) <= _LONGEST_WORD or not _LONG_WORD.search(text):
        return text
    logger.warning(
        "a line of %d characters has more than %d characters without a space; it is split to train the tokenizer",
        len(text),
        _LONGEST_WORD,
    )
    return _LONG_WORD.sub(lambda match: match[0] + " ", text)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
