"""Decode steps of the sizes of a bucket, as CUDA replays them: the same rows as by live rows alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf_pipeline.errors import DataError, DefinitionError, EngineError
from rlhf_pipeline.policies.engines import device_steps
from rlhf_pipeline.policies.engines.bucket_cache import BucketCache, bucket_columns
from rlhf_pipeline.policies.engines.device_steps import DeviceSteps
from rlhf_pipeline.policies.engines.protocol import RaggedCompletions, Request, WeightRefresh
from rlhf_pipeline.policies.engines.sampling import Truncation
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.policies.engines.turn_rows import EndedTurn
from rlhf_pipeline.policies.token_policy import TokenPolicy
from tests.moments import Call, at_call
from tests.rlhf_pipeline.policies.engines.contract import Bench, EngineContract
from tests.rlhf_pipeline.policies.engines.recorded_steps import RecordedSteps, signature

Make = Callable[..., PreTrainedModel]

PROMPTS = [[2 + i] + [3 + (7 * i + j) % 90 for j in range(5 * i)] for i in range(6)]
RAGGED = [2 + 2 * i for i in range(12)]
ARCHITECTURES = [
    *("qwen2", "qwen2-tied", "qwen2-sliding", "llama", "mistral", "gemma3_text", "gemma3_text-capped", "gemma2"),
    *("granite", "phi", "gpt2", "gpt_neox", "opt"),
]
CLOSE = 5e-6


def engine(model: PreTrainedModel, sync_every: int, num_slots: int = 5) -> SlotEngine:
    return SlotEngine(TokenPolicy(model)._parts, num_slots=num_slots, model=model, sync_every=sync_every)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedSteps:
    """Steps are captured and replayed, as graphs are."""
    steps = RecordedSteps()
    monkeypatch.setattr(device_steps, "graphs_of", lambda device: steps)  # which asks the driver of a GPU
    return steps


def check_equal(buckets: RaggedCompletions, exact: RaggedCompletions) -> None:
    """The same tokens and ends, and log-probs but for the last bits."""
    assert buckets.lengths.tolist() == exact.lengths.tolist()
    assert buckets.token_ids.tolist() == exact.token_ids.tolist()
    assert buckets.stopped.tolist() == exact.stopped.tolist()
    assert float(np.abs(buckets.log_probs - exact.log_probs).max()) < CLOSE


@pytest.mark.parametrize(
    ("name", "sync_every"), [*((name, 16) for name in ARCHITECTURES), ("qwen2", 3), ("mistral", 5)]
)
def test_the_completions_are_those_of_live_rows_alone(
    name: str, sync_every: int, recorded: RecordedSteps, make_model: Make
):
    """Ragged prompts and limits on few slots, which are filled again; a second rollout replays what is retained."""
    model = make_model(name)
    exact, buckets = engine(model, 1), engine(model, sync_every)
    for rollout in range(2):
        request = Request(
            prompts=PROMPTS[rollout:],
            group_size=2,
            max_new_tokens=RAGGED[2 * rollout :],
            temperature=0.7,
            seed=rollout,
            end_token_ids=range(0, 97, 16),
        )
        expected = exact.generate(request)
        assert expected.stopped.any()
        check_equal(buckets.generate(request), expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
    assert buckets.take_notices() == []
    assert buckets.retained.state is not None
    assert recorded.captures == len(buckets.retained.state.replays) > 0
    assert recorded.replays > 2 * recorded.captures


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_windows_move_and_grow(name: str, recorded: RecordedSteps, make_model: Make):
    """Long completions among short ones: the live window moves to the front, and steps read other buckets."""
    model = make_model(name)
    limits = [150, 7, 60, 3, 30, 9, 20, 40, 50, 70, 5, 20]
    request = Request(prompts=[[2], [3, 4], [9] * 20], group_size=4, max_new_tokens=limits, temperature=0.7, seed=2)
    buckets = engine(model, 16, num_slots=3)
    check_equal(buckets.generate(request), engine(model, 1, num_slots=3).generate(request))
    assert buckets.retained.state is not None
    assert {bucket.columns for bucket in buckets.retained.state.replays} >= {64, 128, 192}


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "truncated": {"truncation": Truncation(top_k=20, top_p=0.8), "temperature": 0.7},
    "hot": {"temperature": 1.3},
}


@pytest.mark.parametrize(("option", "vocab_size"), [("greedy", 97), ("truncated", 1500), ("hot", 1500)])
def test_options_of_sampling(option: str, vocab_size: int, recorded: RecordedSteps, make_model: Make):
    """Both ways of inverting the cumulative probability; a graph contains the temperature, so each has its own."""
    model = make_model(vocab_size=vocab_size)
    exact, buckets = engine(model, 1), engine(model, 16)
    plain = Request(prompts=PROMPTS, max_new_tokens=12, seed=3)
    changed = Request(prompts=PROMPTS, max_new_tokens=12, seed=3, **OPTIONS[option])
    captures = []
    for request in (plain, changed, plain, changed):
        expected, sampled = exact.generate(request), buckets.generate(request)
        check_equal(sampled, expected)
        if expected.support_log_mass is not None:
            np.testing.assert_allclose(sampled.support_log_mass, expected.support_log_mass, atol=CLOSE)
        captures.append(recorded.captures)
    assert captures == [captures[0], 2 * captures[0], 2 * captures[0], 2 * captures[0]]


@pytest.mark.parametrize("name", ["qwen2", "qwen2-sliding", "gpt2"])
def test_attention_that_adds_its_mask(name: str, recorded: RecordedSteps, make_model: Make):
    """The masks of the model's own attention have the model's dtype."""
    model = make_model(name, attention="eager").double()
    request = Request(prompts=PROMPTS, group_size=2, max_new_tokens=RAGGED, temperature=0.7, seed=1)
    check_equal(engine(model, 16).generate(request), engine(model, 1).generate(request))


def test_half_precision(recorded: RecordedSteps, make_model: Make):
    """On a CPU a graph refers to a copy of the head in float32, which new weights are copied into."""
    model = make_model("qwen2").bfloat16()
    exact, buckets = engine(model, 1), engine(model, 16)
    for seed in (1, 2):
        request = Request(prompts=PROMPTS, max_new_tokens=4, seed=seed)
        first, second = exact.generate(request), buckets.generate(request)
        same = first.token_ids == second.token_ids
        assert same.mean() > 0.8
        assert float(np.abs(first.log_probs - second.log_probs)[same].max()) < 0.2
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1)


def test_attention_with_sinks(recorded: RecordedSteps, oracle: Callable[..., torch.Tensor]):
    """A sink takes part of each row's attention, and layers alternate between windows and whole rows."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    few = {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5}
    config = AutoConfig.for_model("gpt_oss", vocab_size=97, **sizes, **few, eos_token_id=1, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 1.0 if "sinks" in name else 0.2)
    request = Request(prompts=PROMPTS, max_new_tokens=20, seed=1)
    sampled = engine(model, 16).generate(request)
    check_equal(sampled, engine(model, 1).generate(request))
    for c in sampled:
        exact = oracle(model, PROMPTS[c.prompt_index] + c.token_ids)[-len(c.token_ids) :]
        assert float((exact - c.log_probs).abs().max()) < 2e-5


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters(recorded: RecordedSteps, make_model: Make):
    """LoRA's weights are part of the steps; switching the adapter off captures them again."""
    model: Any = get_peft_model(
        make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    model.eval()
    request = Request(prompts=PROMPTS, max_new_tokens=12, seed=1)
    exact, buckets = engine(model, 1), engine(model, 16)
    adapted = buckets.generate(request)
    check_equal(adapted, exact.generate(request))
    captured = recorded.captures
    with model.disable_adapter():
        plain = buckets.generate(request)
        check_equal(plain, exact.generate(request))
    assert recorded.captures > captured
    assert plain.token_ids.tolist() != adapted.token_ids.tolist()


def test_grouped_queries_in_steps(recorded: RecordedSteps, make_model: Make, monkeypatch: pytest.MonkeyPatch):
    """Where transformers copies keys per head, heads are query positions: the same tokens."""
    monkeypatch.setattr(device_steps, "repeats_keys", lambda: True)  # the version of transformers decides it
    for name in ("qwen2", "qwen2-sliding", "llama"):
        model = make_model(name)
        buckets = engine(model, 16)
        request = Request(prompts=PROMPTS, group_size=2, max_new_tokens=RAGGED, temperature=0.7, seed=1)
        check_equal(buckets.generate(request), engine(model, 1).generate(request))
        assert buckets.retained.state is not None
        assert buckets.retained.state.masking.grouped
        assert model.config._attn_implementation == "sdpa"


def test_each_step_of_a_bucket_is_the_same(make_model: Make):
    """Kernels, shapes, strides, numbers and addresses, in two rollouts, with slots that are filled again."""
    for name in ("qwen2", "mistral", "gpt2", "gemma2"):
        check_one_signature(make_model(name))


def check_one_signature(model: PreTrainedModel, fault: Callable[[DeviceSteps], Any] = lambda state: None) -> None:
    """Fail where two steps of a bucket differ in what a graph contains, or where a step reads a value."""
    signatures: dict[tuple[int, int], set[str]] = {}
    counts: dict[tuple[int, int], int] = {}
    original = DeviceSteps.step

    def step(state: DeviceSteps) -> None:
        fault(state)
        original(state)

    def noted(state: DeviceSteps) -> None:
        bucket = (state.cache.rows, state.cache.high)
        counts[bucket] = counts.get(bucket, 0) + 1
        if counts[bucket] not in (1, 2, 6, 20):
            step(state)
        else:
            signatures.setdefault(bucket, set()).add("\n".join(signature(lambda: step(state))))

    buckets = engine(model, 4, num_slots=5)
    buckets.generate(Request(prompts=[[5]], max_new_tokens=1))  # the trial of the masks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceSteps, "step", noted)  # a step is repeated inside a recorder of kernels
        for seed in range(2):
            limits = [20, 7, 10, 66, 12, 15]
            buckets.generate(Request(prompts=PROMPTS, max_new_tokens=limits, temperature=0.7, seed=seed))
    assert len(signatures) > 2
    assert min(counts.values()) > 2
    assert {bucket: len(kinds) for bucket, kinds in signatures.items()} == dict.fromkeys(signatures, 1)


FAULTS: dict[str, Callable[[DeviceSteps], Any]] = {
    "a number of the host": lambda state: state.hidden + state.cache.column,
    "a shape that follows the rows": lambda state: state.cache.columns[: state.cache.column],
    "live rows alone": lambda state: state.hidden[state.live],
    "a token read": lambda state: state.tokens[0, 0].item(),
    "is anything live": lambda state: bool(state.live.any()),
    "a list of lengths": lambda state: state.length.tolist(),
    "a new buffer": lambda state: setattr(state, "log_mass", state.log_mass.clone()) or state.log_mass.add_(1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_cannot_be_replayed_is_detected(fault: str, make_model: Make):
    """What the check above keeps away, put into a step."""
    with pytest.raises((AssertionError, RuntimeError)):
        check_one_signature(make_model(), FAULTS[fault])


def test_no_copy_of_the_keys(make_model: Make):
    """A step makes no tensor as large as the keys that it reads, also where transformers would repeat them per head."""
    sizes: list[tuple[int, int]] = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in inputs:
                sizes.append((out.numel(), 0))
            if "scaled_dot_product" in str(func):
                sizes.append((0, args[1].numel()))
            return out

    model = make_model()
    buckets = engine(model, 16, num_slots=8)
    request = Request(prompts=[[5]], group_size=8, max_new_tokens=200)
    buckets.generate(request)
    watching = ExitStack()

    def watch(call: Call) -> None:
        if call.arguments["self"].cache.high > 192 and not sizes:
            watching.enter_context(Allocations())

    with at_call(DeviceSteps.step, before=watch, after=lambda _: watching.close()):
        buckets.generate(request)
    largest, read = max(allocated for allocated, _ in sizes), max(keys for _, keys in sizes)
    assert 0 < largest < read


@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_newer_weights_act_at_host_syncs(name: str, recorded: RecordedSteps, make_model: Make):
    """At the sync after they are due, with spans that say so; there the tokens are those of live rows alone."""
    newer = make_model(name, seed=5).state_dict()
    request = Request(prompts=PROMPTS, group_size=2, max_new_tokens=24, temperature=0.7, seed=2)

    def sampled(sync_every: int, refresh_every: int) -> RaggedCompletions:
        slots = engine(make_model(name), sync_every, num_slots=12)

        def load() -> int:
            if slots.version == 0:
                slots.load_weights(newer, 1)
            return 1

        return slots.generate(request, WeightRefresh(load, every=refresh_every, version=0))

    exact, buckets, late = sampled(1, 16), sampled(16, 16), sampled(16, 9)
    for completions in (exact, buckets, late):
        assert completions.spans is not None
        assert completions.spans.lists() == [[(0, 0), (16, 1)]] * 12
        check_equal(completions, exact)


def replace_tensors(model: PreTrainedModel) -> None:
    """As `model.to` does."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.01


def replace_head(model: PreTrainedModel) -> None:
    """Another parameter in the place of the head's."""
    head: Any = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * 1.01)


@pytest.mark.parametrize(("change", "between"), [(replace_tensors, False), (replace_head, True)])
def test_replaced_tensors_are_captured_again(
    change: Callable[[PreTrainedModel], None], between: bool, recorded: RecordedSteps, make_model: Make
):
    """New tensors instead of new values: a graph would read the weights of before."""
    request = Request(prompts=PROMPTS, group_size=2, max_new_tokens=24, temperature=0.7, seed=2)
    completions = []
    for sync_every in (1, 16):
        model = make_model()
        slots = engine(model, sync_every, num_slots=12)
        slots.generate(request)
        captured, done = recorded.captures, list[int]()

        def load(model: PreTrainedModel = model, done: list[int] = done) -> int:
            if not done:
                change(model)
                done.append(1)
            return 1

        if between:
            change(model)
        completions.append(slots.generate(request, None if between else WeightRefresh(load, every=16, version=0)))
    assert recorded.captures > captured
    check_equal(completions[1], completions[0])


def test_nan_in_a_retained_cache_does_not_return(recorded: RecordedSteps, make_model: Make):
    """Diverged weights are reported with their prompt; a masked NaN is a NaN, so the next call begins on zeros."""
    model = make_model()
    buckets = engine(model, 16)
    request = Request(prompts=PROMPTS, max_new_tokens=12, seed=3)
    expected = buckets.generate(request)
    state = buckets.retained.state
    assert state is not None
    weight = next(model.parameters())
    good = weight.detach().clone()
    with torch.no_grad():
        weight[7] = float("nan")
        with pytest.raises(DataError, match="not finite at token 0 of a completion of prompt 1"):
            buckets.generate(Request(prompts=[[5], [7]], max_new_tokens=2))
        weight.copy_(good)
    with torch.inference_mode():
        for layer in state.cache.slot_layers:
            assert layer.keys is not None
            layer.keys.fill_(float("nan"))
    buckets.retained.give(state)
    check_equal(buckets.generate(request), expected)


def test_finished_rows_run_on_at_their_last_position(recorded: RecordedSteps, make_model: Make):
    """Rows that fill the model's positions stop there, and stay in range until the others have caught up."""
    model = make_model("gpt2")  # learned positions: one beyond the table fails
    lengths: list[int] = []

    def note(call: Call) -> None:
        lengths.append(int(call.arguments["self"].length[: call.arguments["count"]].max()))

    with at_call(DeviceSteps.read, before=note):
        request = Request(prompts=[[5] * 250, [6] * 240, [7]], max_new_tokens=99, seed=1)
        buckets = engine(model, 16).generate(request)
    assert buckets.lengths.tolist() == [6, 16, 99]
    assert max(lengths) == 255
    check_equal(buckets, engine(model, 1).generate(request))


def test_text_that_stops_a_completion_cuts_what_ran_on(recorded: RecordedSteps, make_model: Make):
    """The host alone knows such texts: tokens after one are not in the completion, nor passed on."""

    class Stops:
        def ends(self, tokens: Sequence[int]) -> bool:
            return len(tokens) > 1 and sum(tokens[-2:]) % 11 == 0

    model, completions = make_model(), []
    for sync_every in (1, 16):
        ended: list[tuple[int, list[int]]] = []
        request = Request(prompts=PROMPTS, group_size=3, max_new_tokens=30, seed=1, stops=Stops())  # type: ignore[arg-type]
        slots = engine(model, sync_every)
        completions.append(slots.generate(request, None, lambda i, ids, ended=ended: ended.append((i, list(ids)))))
        assert sorted(ended) == [(i, c.token_ids) for i, c in enumerate(completions[-1])]
    assert completions[0].stopped.any()
    check_equal(completions[1], completions[0])


class Replier:
    """Answers each turn with a reply that depends on the conversation and its turn alone: at once, or later."""

    def __init__(self, late: float, reply_after: int) -> None:
        self.late, self.reply_after = late, reply_after
        self.turns: dict[int, int] = {}
        self.replies: dict[int, Sequence[int] | None] = {}

    def answer(self, ended: Sequence[EndedTurn]) -> Mapping[int, Sequence[int] | None]:
        """Answer a part of them."""
        answers: dict[int, Sequence[int] | None] = {}
        for turn in ended:
            count = self.turns[turn.place] = self.turns.get(turn.place, 0) + 1
            draw = random.Random(turn.place * 100 + count)
            reply = [draw.randrange(2, 97) for _ in range(draw.choice((0, 1, 3, 16, 25, 60)))]
            over = count > 4 or len(reply) > turn.row.tokens_left
            target = self.replies if draw.random() < self.late else answers
            target[turn.place] = None if over else reply
        return answers

    def fetch(self, places: Sequence[int], go_on: Callable[[], bool]) -> Mapping[int, Sequence[int] | None]:
        """Return exactly these."""
        return {place: self.replies.pop(place) for place in places}


@pytest.mark.parametrize(
    ("name", "replier", "stops"),
    [
        ("qwen2", Replier(0.0, 0), False),
        ("mistral", Replier(0.0, 0), True),
        ("qwen2", Replier(0.5, 0), False),
        ("qwen2", Replier(0.5, 30), True),
        ("mistral", Replier(1.0, 7), True),
    ],
)
def test_conversations(
    name: str,
    replier: Replier,
    stops: bool,
    recorded: RecordedSteps,
    make_model: Make,
    oracle: Callable[..., torch.Tensor],
):
    """Replies arrive at host syncs: the same rows, whether a turn ends at a limit, an end token or a text."""

    class Stops:
        def ends(self, tokens: Sequence[int]) -> bool:
            return sum(tokens[-2:]) % 7 == 0

    model, rows = make_model(name), []
    for sync_every in (1, 16):
        slots = engine(model, sync_every, num_slots=4)
        request = Request(
            prompts=PROMPTS[:5],
            group_size=3,
            max_new_tokens=20,
            seed=5,
            end_token_ids=(7, 30, 64),
            stops=Stops() if stops else None,  # type: ignore[arg-type]
        )
        rows.append(slots.converse(request, copy.deepcopy(replier), row_tokens=150))
        assert slots.take_notices() == []
    assert max(len(row.ids) for row in rows[1]) > 90
    for exact, row in zip(*rows, strict=True):
        assert row.ids == exact.ids
        assert row.turn_spans == exact.turn_spans
        assert row.over
        np.testing.assert_allclose(row.log_probs, exact.log_probs, atol=CLOSE)
    for row in rows[1][::4]:
        log_probs = torch.tensor(row.log_probs, dtype=torch.float64)
        assert float((oracle(model, row.ids) - log_probs)[~log_probs.isnan()].abs().max()) < 2e-5


def test_a_state_depends_on_its_call_alone(recorded: RecordedSteps, make_model: Make):
    """A call of other sizes gets buffers of its own, and never runs on larger ones of an earlier call."""
    slots = engine(make_model(), 16, num_slots=8)
    sizes: list[tuple[int, int]] = []
    states: list[int] = []
    for count, longest in ((16, 90), (3, 20), (3, 30), (16, 90)):
        limits = [longest, *[4] * (count - 1)]
        completions = slots.generate(Request(prompts=[[5]] * count, max_new_tokens=limits, seed=count))
        assert completions.lengths.tolist() == limits
        state = slots.retained.state
        assert state is not None
        sizes.append((state.cache.num_slots, state.cache.num_columns))
        states.append(id(state))
    assert sizes == [(8, bucket_columns(128 + 16)), (4, 128), (4, 128), (8, bucket_columns(128 + 16))]
    assert states[1] == states[2]


def test_rollouts_at_the_same_time_have_a_state_each(recorded: RecordedSteps, make_model: Make):
    """A rollout that begins in the middle of another one; copies of an engine and closed ones retain nothing."""
    model = make_model()
    slots, exact = engine(model, 16), engine(model, 1)
    request = Request(prompts=PROMPTS, max_new_tokens=24, seed=3)
    other = Request(prompts=PROMPTS[::-1], max_new_tokens=9, seed=4)
    inner: list[RaggedCompletions] = []

    def meanwhile() -> int:
        inner.append(slots.generate(other))
        return 0

    outer = slots.generate(request, WeightRefresh(meanwhile, every=16, version=0))
    check_equal(outer, exact.generate(request))
    assert inner
    for completions in inner:
        check_equal(completions, exact.generate(other))
    assert slots.retained.state is not None
    assert copy.deepcopy(slots).retained.state is None
    slots.close()
    assert slots.retained.state is None


@pytest.mark.parametrize("name", ["jetmoe", "qwen3_5_text"])
def test_a_model_that_cannot_be_captured_is_noticed_once(name: str, recorded: RecordedSteps, make_model: Make):
    """It samples the same completions, and one notice names the model, the reason and what to do."""
    model = make_model(name)
    slots = engine(model, 16)
    request = Request(prompts=PROMPTS, max_new_tokens=12, seed=1)
    for _ in range(2):
        check_equal(slots.generate(request), engine(model, 1).generate(request))
    (notice,) = slots.take_notices()
    reason = {"jetmoe": "its step was not captured", "qwen3_5_text": "keeps recurrent states"}[name]
    assert reason in notice
    assert "--set collect.engine=vllm" in notice
    assert slots.take_notices() == []
    assert recorded.captures == 0


def test_a_graph_that_differs_stops_the_run(recorded: RecordedSteps, make_model: Make):
    """With the values; last bits pass, and so does one number on the edge between two tokens."""
    model = make_model()
    request = Request(prompts=PROMPTS, max_new_tokens=5, seed=1)
    recorded.after_replay = lambda state: state.hidden.mul_(1 + 1e-6)
    engine(model, 16).generate(request)
    recorded.after_replay = lambda state: state.hidden.mul_(1 + 0.05)
    with pytest.raises(
        EngineError, match=r"replayed as a graph \(5 rows, 64 columns\) differs .* in hidden states by up to 5"
    ):
        engine(model, 16).generate(request)


def test_rows_behind_the_shared_column_are_moved_up():
    """Row 2 is three columns behind: its tokens end before the shared column again, in order; row 0 stays."""
    cache = BucketCache(1, num_slots=3, longest=20, ahead=4, device=torch.device("cpu"))
    layer = cache.slot_layers[0]
    keys, values = layer.storage(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 3, cache.num_columns)
    keys[:, 0, :, 0] = values[:, 0, :, 0] = torch.arange(float(cache.num_columns))
    cache.column = 12
    cache.close_gaps(torch.tensor([2]), torch.tensor([3]), 5, 3)
    assert keys[0, 0, 4:12, 0].tolist() == list(range(4, 12))
    assert keys[2, 0, 7:12, 0].tolist() == values[2, 0, 7:12, 0].tolist() == list(range(4, 9))


def test_the_number_of_tokens_between_syncs_is_checked(make_model: Make):
    """It is at least one."""
    with pytest.raises(DefinitionError, match="sync_every is 0; it must be at least 1"):
        engine(make_model(), 0)


class TestBuckets(EngineContract):
    """The contract of engines with steps as on CUDA, and three slots."""

    @pytest.fixture
    def bench(self, folders: dict[int, Path]) -> Iterator[Bench]:
        """The weights of version 1, in the place of those of version 2."""
        policy = TokenPolicy.from_pretrained(folders[2], dtype=torch.float32)
        slots = SlotEngine(policy._parts, num_slots=3, model=policy.model, sync_every=16)
        slots.load_weights(folders[1], 1)
        yield Bench(slots, folders)
        slots.close()
