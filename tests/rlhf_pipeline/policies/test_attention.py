"""The attention that is registered with transformers: one name for packed rows, decode steps and other rows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from rlhf_pipeline.policies.attention import NAME, packed_rows_running, steps_attended_by

Make = Callable[..., PreTrainedModel]


def test_the_name_stays_until_no_context_needs_it(make_model: Make):
    """Contexts of several threads end in any order; then the model has its own attention again."""
    config = make_model("qwen2").config
    first, second = ExitStack(), ExitStack()
    first.enter_context(packed_rows_running(config))
    second.enter_context(packed_rows_running(config))
    first.close()
    assert config._attn_implementation == NAME
    second.close()
    assert config._attn_implementation == "sdpa"


def test_other_rows_get_the_attention_of_transformers(make_model: Make):
    """While another thread decodes or packs with the same model, padded rows have the same states, bit for bit."""
    model = make_model("qwen2").eval()
    ids = torch.arange(24).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        own = model(ids, attention_mask=mask).logits
        found: list[torch.Tensor] = []

        def other() -> None:
            with torch.no_grad():
                found.append(model(ids, attention_mask=mask).logits)

        for context in (packed_rows_running(model.config), steps_attended_by(model.config, _refused)):
            with context:
                pool.submit(other).result()
    assert all(torch.equal(logits, own) for logits in found)
    assert len(found) == 2


def _refused(*_: object) -> torch.Tensor:
    raise AssertionError("another thread's attention was called")
