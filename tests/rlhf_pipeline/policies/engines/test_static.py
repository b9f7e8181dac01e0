"""Decoding with steps of one shape: the same completions as by live rows alone."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.policies.engines import static as static_module
from rlhf_pipeline.policies.engines.protocol import Request, WeightRefresh
from rlhf_pipeline.policies.engines.sampling import device_uniforms, stream_keys, uniforms
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.policies.engines.static import LOOK_EVERY, StaticSlots
from rlhf_pipeline.policies.token_policy import TokenPolicy
from tests.rlhf_pipeline.policies.engines.contract import Bench, EngineContract

Make = Callable[..., PreTrainedModel]

PROMPTS = [[2 + i] + [3 + (7 * i + j) % 90 for j in range(5 * i)] for i in range(6)]
RAGGED = [2 + 2 * i for i in range(12)]
ARCHITECTURES = [
    *("qwen2", "qwen2-tied", "qwen2-sliding", "llama", "mistral", "gemma3_text", "gemma2", "granite"),
    *("phi", "gpt2", "gpt_neox", "opt"),
]


def engine(model: PreTrainedModel, decode: str, num_slots: int = 5) -> SlotEngine:
    return SlotEngine(TokenPolicy(model)._parts, num_slots=num_slots, model=model, decode=decode)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_completions_are_those_of_live_rows_alone(name: str, make_model: Make):
    """Ragged prompts and limits on few slots, which are filled again: the same ids, log-probs to 5e-6."""
    request = Request(
        prompts=PROMPTS, group_size=2, max_new_tokens=RAGGED, temperature=0.7, seed=1, end_token_ids=[1, 50, 60]
    )
    model = make_model(name)
    ragged, static = (engine(model, decode).generate(request) for decode in ("ragged", "static"))
    assert static.lengths.tolist() == ragged.lengths.tolist()
    assert static.token_ids.tolist() == ragged.token_ids.tolist()
    assert static.stopped.tolist() == ragged.stopped.tolist()
    assert ragged.stopped.any()
    assert float(np.abs(static.log_probs - ragged.log_probs).max()) < 5e-6


def test_eager_attention_in_float64(make_model: Make):
    """The masks that eager attention adds to its scores have the model's dtype."""
    request = Request(prompts=PROMPTS, group_size=2, max_new_tokens=RAGGED, temperature=0.7, seed=1)
    model = make_model("qwen2-sliding", attention="eager").double()
    ragged, static = (engine(model, decode).generate(request) for decode in ("ragged", "static"))
    assert static.token_ids.tolist() == ragged.token_ids.tolist()
    assert float(np.abs(static.log_probs - ragged.log_probs).max()) < 5e-6


@pytest.mark.parametrize("decode", ["ragged", "static"])
def test_the_buffers_of_a_call_go_with_it(decode: str, make_model: Make):
    """Without the garbage collector: on a GPU each call's keys and values would stay until it looks at old objects."""
    slots = engine(make_model(), decode)
    request = Request(prompts=PROMPTS, group_size=2, max_new_tokens=RAGGED, seed=1)
    slots.generate(request)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(3):
            slots.generate(request)
            counts.append(sum(type(item) is torch.Tensor for item in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[1:] == counts[:1] * 2


@pytest.mark.parametrize("vocab_size", [97, 1500])
def test_greedy_and_a_larger_vocabulary(vocab_size: int, make_model: Make):
    """Both ways of inverting the cumulative probability, and temperature 0."""
    model = make_model(vocab_size=vocab_size)
    for temperature in (0.0, 1.0):
        request = Request(prompts=PROMPTS, max_new_tokens=12, temperature=temperature, seed=3)
        ragged, static = (engine(model, decode).generate(request) for decode in ("ragged", "static"))
        assert static.token_ids.tolist() == ragged.token_ids.tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_newer_weights_in_the_middle(name: str, make_model: Make):
    """Replaced after the same token, both ways go on with the same ids."""
    request = Request(prompts=PROMPTS, group_size=2, max_new_tokens=24, temperature=0.7, seed=2)
    newer = make_model(name, seed=5).state_dict()
    found = []
    for decode in ("ragged", "static"):
        slots = engine(make_model(name), decode, num_slots=12)

        def load(slots: SlotEngine = slots) -> int:
            if slots.version == 0:
                slots.load_weights(newer, 1)
            return 1

        found.append(slots.generate(request, WeightRefresh(load, every=LOOK_EVERY, version=0)))
    ragged, static = found
    assert ragged.spans is not None
    assert static.spans is not None
    assert static.spans.lists() == ragged.spans.lists() == [[(0, 0), (LOOK_EVERY, 1)]] * 12
    assert static.token_ids.tolist() == ragged.token_ids.tolist()
    assert float(np.abs(static.log_probs - ragged.log_probs).max()) < 5e-6


def shapes_of_steps(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Slots and columns of each step of a call with one long completion among short ones."""
    shapes: list[tuple[int, int]] = []
    step = StaticSlots.step
    monkeypatch.setattr(StaticSlots, "step", lambda s: (shapes.append((s.size, s.columns)), step(s))[1])
    limits = [130, *[8] * 15]
    found = engine(model, "static", num_slots=8).generate(Request(prompts=[[5]] * 16, max_new_tokens=limits))
    assert found.lengths.tolist() == limits
    return shapes


FEW_SHAPES = [(8, 64), (1, 128), (1, 192)]


def test_steps_have_few_shapes(make_model: Make, monkeypatch: pytest.MonkeyPatch):
    """Powers of two, and at most the window: as many columns as the longest needs, as few slots as are live."""
    shapes = shapes_of_steps(make_model(), monkeypatch)
    assert list(dict.fromkeys(shapes)) == FEW_SHAPES
    assert shapes.count((8, 64)) < 64


def test_a_shape_that_follows_the_longest_row_is_found(make_model: Make, monkeypatch: pytest.MonkeyPatch):
    """Columns as many as are needed, and no more: a graph for each look, which the check above keeps away."""
    monkeypatch.setattr(static_module, "_power_of_two", lambda n: n)
    assert len(set(shapes_of_steps(make_model(), monkeypatch))) > len(FEW_SHAPES)


@pytest.mark.parametrize(
    "fault",
    [
        lambda keys, index: device_uniforms(keys, torch.full_like(index, int(index.max()))),
        lambda keys, index: device_uniforms(keys, index + 1),
        lambda keys, index: device_uniforms(keys.roll(1), index),
    ],
    ids=["one counter for all slots", "the next counter", "another slot's key"],
)
def test_a_number_of_another_counter_is_found(
    fault: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    make_model: Make,
    monkeypatch: pytest.MonkeyPatch,
):
    """The ids are then not those of live rows alone, where slots are filled again."""
    request = Request(prompts=PROMPTS, group_size=2, max_new_tokens=RAGGED, seed=1)
    model = make_model()
    ragged = engine(model, "ragged").generate(request)
    monkeypatch.setattr(static_module, "device_uniforms", fault)
    assert engine(model, "static").generate(request).token_ids.tolist() != ragged.token_ids.tolist()


def test_numbers_made_on_the_device():
    """Bit for bit those of the host, at the edges of 64 bits too."""
    rng = np.random.default_rng(0)
    keys = np.concatenate((stream_keys(3, range(5_000), [1] * 5_000), rng.integers(0, 2**64, 5_000, np.uint64)))
    keys[:4] = [0, 2**64 - 1, 2**63, 2**63 - 1]
    index = rng.integers(0, 10_000, len(keys))
    there = device_uniforms(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(index))
    assert (there.numpy() == uniforms(keys, index)).all()


def test_diverged_weights_are_named(make_model: Make):
    """At the next look, with the prompt; as they diverge while completions are being sampled."""
    model = make_model()
    slots = engine(model, "static")
    slots.generate(Request(prompts=[[5]], max_new_tokens=2))
    with torch.no_grad():
        next(model.parameters())[7] = float("nan")
    with pytest.raises(DataError, match="not finite at token 0 of a completion of prompt 1"):
        slots.generate(Request(prompts=[[5], [7]], max_new_tokens=2))


def test_a_model_that_takes_no_ready_made_mask(make_model: Make):
    """It is refused where steps of one shape are asked for."""
    model = make_model()
    trunk = model.base_model
    original = trunk.forward

    @functools.wraps(original)
    def forward(*args: object, attention_mask: object = None, **kwargs: object) -> object:
        ready = isinstance(attention_mask, dict) or getattr(attention_mask, "ndim", 0) == 4
        return original(*args, attention_mask=None if ready else attention_mask, **kwargs)

    trunk.forward = forward
    with pytest.raises(DefinitionError, match="takes no masks of static slots"):
        engine(model, "static").generate(Request(prompts=PROMPTS, max_new_tokens=2))


class TestStaticSlots(EngineContract):
    """The contract of engines, with three slots."""

    @pytest.fixture
    def bench(self, folders: dict[int, Path]) -> Iterator[Bench]:
        """The weights of version 1, in the place of those of version 2."""
        policy = TokenPolicy.from_pretrained(folders[2], dtype=torch.float32)
        slots = SlotEngine(policy._parts, num_slots=3, model=policy.model, decode="static")
        slots.load_weights(folders[1], 1)
        yield Bench(slots, folders)
        slots.close()
