"""What the benchmarks of the loss and the step share: a small Qwen2, and a measurement in a fork of its own."""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

HIDDEN, INTERMEDIATE = 256, 1024


def qwen2(vocab: int, *, layers: int, seed: int = 0, **options: Any) -> Any:
    """A Qwen2 with random weights, grouped queries and a tied head."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **options,
    )
    return Qwen2ForCausalLM(config).eval()


def forked(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a fork; what it imports is imported already, and its memory is its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, function, *args))
    process.start()
    there.close()
    try:
        failed, result = here.recv()
    except EOFError:
        failed, result = True, "the process was killed; is there enough memory?"
    process.join()
    if failed:
        raise SystemExit(result)
    return result


def _send(pipe: Connection, function: Callable[..., Any], *args: Any) -> None:
    warnings.simplefilter("ignore")
    try:
        pipe.send((False, function(*args)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
        raise


def resident_from_now() -> int:
    """Forget the peak of this process's resident size, and return that size in bytes."""
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    return memory("VmRSS")


def memory(field: str) -> int:
    """Bytes of a line of /proc/self/status: `VmRSS` what is resident, `VmHWM` the most that was."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
