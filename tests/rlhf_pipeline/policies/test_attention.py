"""The attention that is registered with transformers: one name for packed rows, decode steps and other rows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from rlhf_pipeline.policies.attention import grouped_queries, is_sdpa, packed_rows_running, steps_attended_by
from rlhf_pipeline.policies.attention_name import NAME
from rlhf_pipeline.policies.model_parts import find_parts

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


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_a_model_keeps_its_own_implementation_while_another_thread_packs(own: str, make_model: Make):
    """The parts of a model and the choice of its masks do not depend on what other threads run meanwhile."""
    model = make_model("qwen2", attention=own)
    alone = find_parts(model)
    with packed_rows_running(model.config):
        assert is_sdpa(model.config) == (own == "sdpa")
        assert find_parts(model).builds_own_mask == alone.builds_own_mask == (own == "eager")


def test_grouped_queries_equal_repeated_keys():
    """Each group of consecutive heads sees its own key head, with a mask per row and the model's scaling."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, heads, n, 8) for heads, n in ((6, 1), (2, 11), (2, 11)))
    mask = torch.rand(3, 1, 1, 11) < 0.5
    mask[..., 0] = True
    repeated = (x.repeat_interleave(3, 1) for x in (key, value))
    expected = scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(grouped_queries(query, key, value, mask, 0.3), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("argument", ["softcap", "s_aux", "position_bias", "anything"])
def test_a_step_rejects_arguments_that_its_attention_does_not_know(argument: str, make_model: Make):
    """A cap of the scores or a sink would be lost without an error; an argument of None is none."""
    model = make_model("qwen2").eval()
    ids = torch.arange(4)[None]
    with torch.no_grad(), steps_attended_by(model.config, lambda q, *_: q.transpose(1, 2)):
        model(ids, **{argument: None})
        with pytest.raises(TypeError, match=rf"passes unsupported arguments to its attention: {argument}"):
            model(ids, **{argument: 50.0})
