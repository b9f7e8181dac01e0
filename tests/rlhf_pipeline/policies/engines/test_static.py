"""Decoding with steps of one shape: the same completions as by live rows alone."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.policies.engines import slot_columns
from rlhf_pipeline.policies.engines import static as static_module
from rlhf_pipeline.policies.engines.protocol import Request, WeightRefresh
from rlhf_pipeline.policies.engines.sampling import device_uniforms, stream_keys, uniforms
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.policies.engines.static import LOOK_EVERY, StaticSlots, mask_form
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.prologue import sampling_notices
from tests.benchmarks import bench_generate
from tests.rlhf_pipeline.fake_device import to_device
from tests.rlhf_pipeline.policies.engines.contract import Bench, EngineContract
from tests.rlhf_pipeline.policies.engines.recorded_steps import RecordedSteps
from tests.rlhf_pipeline.small import tiny

Make = Callable[..., PreTrainedModel]

PROMPTS = [[2 + i] + [3 + (7 * i + j) % 90 for j in range(5 * i)] for i in range(6)]
RAGGED = [2 + 2 * i for i in range(12)]
ARCHITECTURES = [
    *("qwen2", "qwen2-tied", "qwen2-sliding", "llama", "mistral", "gemma3_text", "gemma2", "granite"),
    *("phi", "gpt2", "gpt_neox", "opt"),
]


def engine(model: PreTrainedModel, decode: str, num_slots: int = 5) -> SlotEngine:
    return SlotEngine(TokenPolicy(model)._parts, num_slots=num_slots, model=model, decode=decode)  # type: ignore[arg-type]


@pytest.fixture
def shared_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to four slots share a row, however few there are, and are moved wherever that saves a few columns."""
    monkeypatch.setattr(slot_columns, "FEWEST_ROWS", 1)
    monkeypatch.setattr(static_module, "_FEWEST_COLUMNS", 8)


def members_of(slots: SlotEngine) -> int:
    assert slots.kept._state is not None
    return slots.kept._state.members


@pytest.mark.parametrize("num_slots", [5, 8])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_completions_are_those_of_live_rows_alone(name: str, num_slots: int, shared_rows: None, make_model: Make):
    """Ragged prompts and limits on few slots, which are filled again: the same ids, log-probs to 5e-6.

    Eight slots are two rows, where attention is PyTorch's own; Gemma 2's has a soft cap.
    """
    request = Request(
        prompts=PROMPTS, group_size=2, max_new_tokens=RAGGED, temperature=0.7, seed=1, end_token_ids=[1, 50, 60]
    )
    model = make_model(name)
    slots = engine(model, "static", num_slots)
    ragged, static = engine(model, "ragged").generate(request), slots.generate(request)
    assert members_of(slots) == (4 if num_slots == 8 and name != "gemma2" else 1)
    assert static.lengths.tolist() == ragged.lengths.tolist()
    assert static.token_ids.tolist() == ragged.token_ids.tolist()
    assert static.stopped.tolist() == ragged.stopped.tolist()
    assert ragged.stopped.any()
    assert float(np.abs(static.log_probs - ragged.log_probs).max()) < 5e-6


@pytest.mark.parametrize("name", ["qwen2", "qwen2-sliding"])
def test_slots_move_to_other_rows(name: str, shared_rows: None, make_model: Make, monkeypatch: pytest.MonkeyPatch):
    """While others wait, where slots are free, and to fewer rows: the same ids."""
    rng = np.random.default_rng(4)
    limits = np.clip(np.exp(rng.normal(3.2, 0.9, 60)), 1, 150).astype(int).tolist()
    request = Request(prompts=[[5 + i] for i in range(60)], max_new_tokens=limits, temperature=0.7, seed=1)
    moves: list[tuple[int, int, int]] = []
    move = StaticSlots.move

    def noted(state: StaticSlots, slots: torch.Tensor, cells: torch.Tensor, *, size: int) -> None:
        moves.append((slots.shape[1], state.size, size))
        move(state, slots, cells, size=size)

    monkeypatch.setattr(StaticSlots, "move", noted)
    model = make_model(name)
    ragged, static = (engine(model, decode, 16).generate(request) for decode in ("ragged", "static"))
    assert static.token_ids.tolist() == ragged.token_ids.tolist()
    assert float(np.abs(static.log_probs - ragged.log_probs).max()) < 5e-6
    kinds = {(live < before, size < before) for live, before, size in moves}
    assert kinds == {(False, False), (True, False), (True, True)}


def test_heads_that_share_keys_have_no_copies_of_them(make_model: Make):
    """No step makes a tensor as large as the keys that it reads, let alone one per head, as transformers 5.17 does."""
    largest = {"made": 0, "read": 0}

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in given:
                largest["made"] = max(largest["made"], found.numel())
            if "scaled_dot_product" in str(func):
                largest["read"] = max(largest["read"], args[1].numel())
            return found

    slots, request = engine(make_model("qwen2"), "static", 8), Request(prompts=[[5]], group_size=8, max_new_tokens=120)
    slots.generate(request)
    with Made():
        slots.generate(request)
    assert 0 < largest["made"] < largest["read"]


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
def test_newer_weights_in_the_middle(name: str, shared_rows: None, make_model: Make):
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


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedSteps:
    """Steps are captured and replayed, as graphs are."""
    steps = RecordedSteps()
    monkeypatch.setattr(static_module, "graphs_of", lambda device: steps)
    return steps


@pytest.mark.parametrize("num_slots", [5, 8])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_captured_steps_serve_all_rollouts(
    name: str, num_slots: int, shared_rows: None, recorded: RecordedSteps, make_model: Make
):
    """Three rollouts, with other prompts and weights that a step changed in place: each shape is captured once."""
    model = make_model(name)
    slots = engine(model, "static", num_slots)
    for rollout in range(3):
        request = Request(
            prompts=PROMPTS[rollout:],
            group_size=2,
            max_new_tokens=RAGGED[2 * rollout :],
            temperature=0.7,
            seed=rollout,
            end_token_ids=[1, 50 + rollout],
        )
        ragged, static = engine(model, "ragged").generate(request), slots.generate(request)
        assert static.token_ids.tolist() == ragged.token_ids.tolist()
        assert static.stopped.tolist() == ragged.stopped.tolist()
        assert float(np.abs(static.log_probs - ragged.log_probs).max()) < 5e-6
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
    assert slots.kept._state is not None
    assert recorded.captures == len(slots.kept._state.replays) > 0
    assert recorded.replays > 2 * recorded.captures


def _replaced(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.01


def _another_head(model: PreTrainedModel) -> None:
    head: Any = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * 1.01)


@pytest.mark.parametrize("change", [_replaced, _another_head])
@pytest.mark.parametrize("between", [True, False], ids=["between rollouts", "in the middle"])
def test_replaced_tensors_drop_captured_steps(
    change: Callable[[PreTrainedModel], None], between: bool, recorded: RecordedSteps, make_model: Make
):
    """New tensors instead of new values, as `model.to` makes them: the steps are captured again."""
    request = Request(prompts=PROMPTS, group_size=2, max_new_tokens=24, temperature=0.7, seed=2)
    found = []
    for decode in ("ragged", "static"):
        model = make_model()
        slots = engine(model, decode, num_slots=12)
        slots.generate(request)
        captured = recorded.captures

        done: list[int] = []

        def load(model: PreTrainedModel = model, done: list[int] = done) -> int:
            if not done:
                change(model)
                done.append(1)
            return 1

        if between:
            change(model)
        refresh = None if between else WeightRefresh(load, every=LOOK_EVERY, version=0)
        found.append(slots.generate(request, refresh))
    ragged, static = found
    assert recorded.captures > captured
    assert static.token_ids.tolist() == ragged.token_ids.tolist()
    assert float(np.abs(static.log_probs - ragged.log_probs).max()) < 5e-6


def test_a_state_grows_with_its_calls_and_its_graphs_stay_few(recorded: RecordedSteps, make_model: Make):
    """One state for small and large calls; no more graphs than sizes times columns, however many calls there are."""
    model = make_model()
    slots = engine(model, "static", num_slots=8)
    states: list[tuple[int, int]] = []
    for count in (3, 16, 1, 5):
        for longest in (20, 90, 40):
            limits = [longest, *[4] * (count - 1)]
            found = slots.generate(Request(prompts=[[5]] * count, max_new_tokens=limits, seed=count))
            assert found.lengths.tolist() == limits
            state = slots.kept._state
            assert state is not None
            states.append((state.num_slots, state.window))
    assert list(dict.fromkeys(states)) == [(4, 64), (4, 128), (8, 128)]
    # Of the last state: 1, 2, 4 or 8 slots, and 64 or 128 columns.
    assert 0 < len(state.replays) < recorded.captures
    assert set(state.replays) <= {(size, columns) for size in (1, 2, 4, 8) for columns in (64, 128)}


def test_the_temperature_is_a_number_in_captured_steps(recorded: RecordedSteps, make_model: Make):
    """At another one, they are captured again: a rollout, an evaluation at temperature 0, a rollout."""
    model = make_model()
    slots, captures = engine(model, "static"), []
    for temperature in (0.7, 0.7, 0.0, 0.7):
        request = Request(prompts=PROMPTS, max_new_tokens=12, temperature=temperature, seed=3)
        expected = engine(model, "ragged").generate(request)
        assert slots.generate(request).token_ids.tolist() == expected.token_ids.tolist()
        captures.append(recorded.captures)
    first = captures[0]
    assert captures == [first, first, 2 * first, 3 * first]


def test_what_diverged_weights_left_in_a_cache_is_not_kept(recorded: RecordedSteps, make_model: Make):
    """A masked NaN is a NaN, so the rollout after the weights are repaired begins on new buffers."""
    model = make_model()
    slots = engine(model, "static")
    request = Request(prompts=PROMPTS, max_new_tokens=12, seed=3)
    expected = slots.generate(request)
    weight = next(model.parameters())
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
        with pytest.raises(DataError, match="not finite"):
            slots.generate(request)
        assert slots.kept._state is None
        weight.copy_(good)
    assert slots.generate(request).token_ids.tolist() == expected.token_ids.tolist()


def test_what_an_aborted_rollout_left_live_is_not_sampled(recorded: RecordedSteps, make_model: Make):
    """The next rollout has fewer completions than there are slots, and all its tokens."""
    model = make_model()
    slots, plain = engine(model, "static"), engine(model, "ragged")

    def abort() -> int:
        slots.abort()
        return 0

    request = Request(prompts=PROMPTS, max_new_tokens=24, seed=3)
    cut = slots.generate(request, WeightRefresh(abort, every=LOOK_EVERY, version=0))
    assert cut.aborted is not None
    assert cut.aborted.all()
    few = Request(prompts=PROMPTS[:3], max_new_tokens=24, seed=3)  # on four slots
    assert slots.generate(few).token_ids.tolist() == plain.generate(few).token_ids.tolist()


def test_rollouts_at_once_have_a_state_each(recorded: RecordedSteps, make_model: Make):
    """A rollout that begins in the middle of another one, twice; one state is kept."""
    model = make_model()
    slots, plain = engine(model, "static"), engine(model, "ragged")
    request = Request(prompts=PROMPTS, max_new_tokens=24, seed=3)
    other = Request(prompts=PROMPTS[::-1], max_new_tokens=9, seed=4)
    inner: list[list[int]] = []

    def meanwhile() -> int:
        inner.append(slots.generate(other).token_ids.tolist())
        return 0

    for _ in range(2):
        outer = slots.generate(request, WeightRefresh(meanwhile, every=LOOK_EVERY, version=0))
        assert outer.token_ids.tolist() == plain.generate(request).token_ids.tolist()
    assert inner
    assert inner == [plain.generate(other).token_ids.tolist()] * len(inner)
    assert slots.kept._state is not None
    assert copy.deepcopy(slots).kept._state is None
    slots.close()
    assert slots.kept._state is None


def shapes_of_steps(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Slots and columns of each step of a call with one long completion among short ones."""
    shapes: list[tuple[int, int]] = []
    step = StaticSlots.step
    monkeypatch.setattr(StaticSlots, "step", lambda s: (shapes.append((s.size, s.columns)), step(s))[1])
    limits = [130, *[8] * 15]
    found = engine(model, "static", num_slots=8).generate(Request(prompts=[[5]] * 16, max_new_tokens=limits))
    assert found.lengths.tolist() == limits
    return shapes


FEW_SHAPES = [(8, 64), (2, 64), (1, 128), (1, 192)]


def test_steps_have_few_shapes(make_model: Make, monkeypatch: pytest.MonkeyPatch):
    """At most the window: about as many columns as the longest needs, as few slots as are live."""
    shapes = shapes_of_steps(make_model(), monkeypatch)
    assert list(dict.fromkeys(shapes)) == FEW_SHAPES
    assert shapes.count((8, 64)) < 64


@pytest.mark.slow
def test_attention_reads_less_than_one_and_a_half_times_what_it_needs():
    """Twice as many completions as 256 slots, at the end fewer; with few graphs, and few tokens moved."""
    found = bench_generate.columns_read(512, num_slots=256)
    assert 1 < found.read / found.needed < 1.5
    assert found.graphs <= 40
    assert 0 < found.moved < 0.02 * found.read


def test_columns_are_few_and_near_what_is_needed():
    """Four sizes between powers of two, never fewer than needed, and at most a quarter or 64 more."""
    found = [static_module._few_columns(n) for n in range(1, 4097)]
    assert all(n <= columns <= max(1.25 * n, n + 63) for n, columns in enumerate(found, 1))
    assert sorted({columns for columns in found if columns > 1024}) == [
        *range(1280, 2049, 256),
        *range(2560, 4097, 512),
    ]
    assert len(set(found)) == 20


def test_a_shape_that_follows_the_longest_row_is_found(make_model: Make, monkeypatch: pytest.MonkeyPatch):
    """Columns as many as are needed, and no more: a graph for each look, which the check above keeps away."""
    monkeypatch.setattr(static_module, "_few_columns", lambda n: n)
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


def without_ready_made_masks(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model build its own attention masks, whatever it is given."""
    trunk = model.base_model
    original = trunk.forward

    @functools.wraps(original)
    def forward(*args: object, attention_mask: object = None, **kwargs: object) -> object:
        ready = isinstance(attention_mask, dict) or getattr(attention_mask, "ndim", 0) == 4
        return original(*args, attention_mask=None if ready else attention_mask, **kwargs)

    trunk.forward = forward
    return model


def test_a_model_that_takes_no_ready_made_mask(make_model: Make):
    """It is refused where steps of one shape are asked for."""
    with pytest.raises(DefinitionError, match="takes no masks of static slots"):
        engine(without_ready_made_masks(make_model()), "static").generate(Request(prompts=PROMPTS, max_new_tokens=2))


@pytest.mark.parametrize("takes_masks", [True, False])
def test_a_run_says_that_a_model_decodes_row_by_row(takes_masks: bool, make_model: Make):
    """On CUDA alone, at its start, with the architecture and what to do."""
    model = make_model() if takes_masks else without_ready_made_masks(make_model())
    policy = TokenPolicy(model)
    assert list(sampling_notices(tiny(), policy)) == []
    mask_form(policy._parts)  # the engine looks at the model once
    to_device(model)
    said = list(sampling_notices(tiny(), policy))
    assert len(said) == (0 if takes_masks else 1)
    for notice in said:
        assert notice.startswith("Qwen2Model takes no ready-made attention masks")
        assert "--set collect.engine=vllm" in notice


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
