from __future__ import annotations

import dataclasses
import functools
import json

import pytest

from rlhf_pipeline import (
    GRPO,
    Buffer,
    Collect,
    CopyDigits,
    Learn,
    Mix,
    Pipeline,
    Replay,
    TinyPolicy,
    WritePath,
    override,
    token_match,
)
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.definitions import apply_overrides
from rlhf_pipeline.errors import DefinitionError


@pytest.fixture
def pipeline():
    return Pipeline(name="demo", policy=TinyPolicy(), prompts=CopyDigits(), reward=token_match)


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("learn.lr", "3e-4", 3e-4),
        ("learn.steps", "1_000", 1000),
        ("learn.stop_at_reward", "none", None),
        ("learn.stop_at_reward", "0.9", 0.9),
        ("buffer.durability", "power", "power"),
        ("buffer.max_trajectories", "512", 512),
        ("prompts.num_digits", "5", 5),
        ("name", "other", "other"),
    ],
)
def test_override_reads_the_text_by_the_fields_type(pipeline, path, text, value):
    """`--set` gives a new definition with that one field changed."""
    changed = override(pipeline, path, text)
    found = changed
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)
    assert (to_json(pipeline) == to_json(changed)) == (value is None)  # None was there before


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("learn.lrr", "1", "Learn has no field 'lrr'. Did you mean 'lr'?"),
        ("lern.lr", "1", "Pipeline has no field 'lern'. Did you mean 'learn'?"),
        ("learn", "1", "consists of several fields"),
        ("name.x", "1", "has no fields"),
        ("learn.steps", "many", "not a valid int"),
        ("learn.lr", "-1", "lr is -1.0; it must be above 0"),
        ("buffer.durability", "powr", "Did you mean 'power'?"),
        ("write.estimator", "gpro", "Did you mean 'grpo'?"),
    ],
)
def test_override_explains_mistakes(pipeline, path, text, message):
    """A wrong name gets the nearest right one, a wrong value its rule."""
    with pytest.raises(DefinitionError) as caught:
        override(pipeline, path, text)
    assert message in str(caught.value)


def test_a_source_of_a_mixture_is_reached_by_its_place(pipeline):
    """`prompts.sources.1.num_digits` changes that one; a place beyond the last one is named."""
    mixed = dataclasses.replace(pipeline, prompts=Mix((CopyDigits(num_digits=2), CopyDigits(num_digits=3))))
    changed = override(mixed, "prompts.sources.1.num_digits", "4")
    assert [source.num_digits for source in changed.prompts.sources] == [2, 4]
    with pytest.raises(
        DefinitionError, match=r"there is no '2.num_digits': the list has length 2, and its items are numbered from 0"
    ):
        override(mixed, "prompts.sources.2.num_digits", "4")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Collect(group_size=0),
        lambda: Collect(temperature=0.0),
        lambda: WritePath(kl_coef=-0.1),
        lambda: WritePath(kl_target=1.0),
        lambda: Buffer(max_staleness=-1),
        lambda: Learn(checkpoint_every=0),
        lambda: Learn(warmup_steps=-5),
        lambda: Learn(max_grad_norm=float("nan")),
        lambda: Learn(lr=float("inf")),
        lambda: Learn(beta1=2.0),
        lambda: Learn(stop_at_reward=float("nan")),
        lambda: GRPO(entropy_coeff=-1.0),
        lambda: GRPO(kl_to_ref_coeff=-1.0),
        lambda: TinyPolicy(num_heads=0),
        lambda: TinyPolicy(hidden_size=10, num_heads=4),
        lambda: TinyPolicy(alphabet="aa"),
    ],
)
def test_contradictions_are_refused(make):
    """Values that cannot run are refused when the definition is made, not an hour later."""
    with pytest.raises(DefinitionError):
        make()


def test_steps_on_a_rollout_are_said_once(pipeline):
    """Passes and parts alone: age and size follow. What contradicts them is refused, with what to set."""
    parts = apply_overrides(pipeline, [("learn.epochs", "2"), ("learn.minibatches", "4")])
    assert (parts.learn.steps_per_rollout, parts.max_staleness, parts.step_size) == (8, 7, 64)
    assert override(parts, "buffer.max_staleness", "9").max_staleness == 9
    for pairs, message in (
        ([("sample.max_uses", "1")], r"Set sample\.max_uses to at least 2"),
        ([("sample.strategy", "uniform")], r"draws its batches independently\. Set sample\.batch_size"),
        ([("sample.batch_size", "8")], r"divides it into learn\.minibatches parts"),
        ([("learn.minibatches", "257")], r"a rollout has 256 trajectories\. Set it to at most 256"),
    ):
        with pytest.raises(DefinitionError, match=message):
            apply_overrides(parts, pairs)
    assert override(parts, "sample.max_uses", "2").sample.max_uses == 2


def test_groups_of_one_have_nothing_to_compare(pipeline):
    """Every advantage would be 0 and only an entropy bonus be learned; the batch as a baseline needs no groups."""
    with pytest.raises(DefinitionError, match=r"Set collect\.group_size to 2 or more"):
        override(pipeline, "collect.group_size", "1")
    pairs = [("collect.group_size", "1"), ("write.estimator", "reinforce_pp")]
    assert apply_overrides(pipeline, pairs).collect.group_size == 1


def test_a_buffer_must_hold_one_rollout(pipeline):
    """A rollout that evicts its own first trajectories could never be learned from."""
    with pytest.raises(DefinitionError, match="one rollout has 256 trajectories"):
        override(pipeline, "buffer.max_trajectories", "255")
    assert override(pipeline, "buffer.max_trajectories", "256").buffer.max_trajectories == 256


def test_settings_that_hold_only_together(pipeline):
    """Two changes of which neither holds alone are made at once; what does not hold together is refused."""
    replay = dataclasses.replace(pipeline, replay=Replay(stores=("a", "b"), weights=(3.0, 1.0)))
    both = [("replay.stores", "c"), ("replay.weights", "2")]
    for pairs in (both, both[::-1], [*both, ("learn.lr", "0.5")]):
        changed = apply_overrides(replay, pairs)
        assert changed.replay == Replay(stores=("c",), weights=(2.0,))
    with pytest.raises(DefinitionError, match=r"--set replay.stores=c: Replay: weights must .*: expected 1, got 2"):
        apply_overrides(replay, both[:1])


def test_functions_are_recorded_by_name_whatever_they_are(pipeline):
    """A partial and an object with `__call__` are written down without their address, so a resume recognises them."""

    class Grader:
        def __call__(self, prompt, completion, answer, meta):
            return 1.0

    partial = to_json(functools.partial(token_match, answer="1"))
    assert partial == {
        "type": "partial", "function": "rlhf_pipeline:token_match", "args": [], "keywords": {"answer": "1"}
    }  # fmt: skip
    assert to_json(Grader()) == to_json(Grader())
    assert "0x" not in to_json(Grader())


def test_a_definition_is_json_ready_and_frozen(pipeline):
    """It can be written to the run folder, and nobody can change it behind a run's back."""
    text = json.dumps(to_json(pipeline))
    assert json.loads(text)["reward"] == "rlhf_pipeline:token_match"
    with pytest.raises(dataclasses.FrozenInstanceError):
        pipeline.name = "other"


def test_a_definition_that_collects_can_be_set_to_learn_from_stores(pipeline):
    """Fields of a group that is left out can be set; the rest of it is as by default."""
    replay = override(override(pipeline, "replay.stores", "runs/a, runs/b"), "replay.weights", "2,1")
    assert replay.replay == Replay(stores=("runs/a", "runs/b"), weights=(2.0, 1.0))
    assert override(replay, "sample.batch_size", "8").sample.batch_size == 8
    with pytest.raises(DefinitionError, match="fresh uses the complete newest rollout"):
        override(pipeline, "sample.batch_size", "8")
    with pytest.raises(
        DefinitionError, match="weights must be empty or contain one value per store: expected 2, got 3"
    ):
        override(replay, "replay.weights", "1,2,3")
    with pytest.raises(DefinitionError, match="recorded_order needs exactly one store"):
        override(replay, "replay.recorded_order", "true")
    with pytest.raises(DefinitionError, match=r"until the next one, but learn\.epochs is 1\. Set it to 2"):
        override(pipeline, "sample.strategy", "anchored")
    with pytest.raises(DefinitionError, match=r"a store has no rollout order.*--set sample\.strategy=uniform"):
        override(override(replay, "learn.epochs", "2"), "sample.strategy", "anchored")


def test_the_rate_warms_up_by_a_share_and_falls_to_a_minimum():
    """A share of the steps of the schedule, rounded up; the step after the schedule's last has `min_lr`."""
    learn = Learn(lr=1.0, steps=10, warmup_ratio=0.15, lr_schedule="linear", min_lr=0.1)
    rates = [learn.learning_rate(step) for step in range(1, 13)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.1 + 0.9 / 8)
    assert rates[10] == rates[11] == 0.1
    longer = dataclasses.replace(learn, steps=90, lr_decay_steps=11)
    assert [longer.learning_rate(step) for step in range(1, 13)] == rates
    cosine = dataclasses.replace(learn, lr_schedule="cosine")
    assert cosine.learning_rate(7) == pytest.approx(0.55)
    for wrong, message in (
        ({"warmup_steps": 3}, "only one may be set"),
        ({"min_lr": 2.0}, r"min_lr is 2\.0; it must be at most lr"),
    ):
        with pytest.raises(DefinitionError, match=message):
            dataclasses.replace(learn, **wrong)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_what_no_engine_reports_is_refused_with_the_reason(pipeline, name):
    """A penalty, by `--set`; and top-p over HTTP, whose mass vLLM does not tell."""
    with pytest.raises(DefinitionError, match=f"no field '{name}'. No engine reports the distribution"):
        override(pipeline, f"collect.{name}", "1.1")
    with pytest.raises(DefinitionError, match="top_k, top_p and min_p need engine=slots"):
        Collect(top_p=0.9, engine="http://127.0.0.1:8000")
