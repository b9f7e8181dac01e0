from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.envs.transforms import Compose

from rlhf_pipeline.data import keys
from rlhf_pipeline.data.tensordicts import steps_of
from rlhf_pipeline.data.trajectories import Flat, Text
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl.kl_transforms import KLRewardTransform
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage


def steps(group, rewards, key="group_id"):
    """A multi-step trajectory in TorchRL's form: reward and done `[T, 1]`."""
    n = len(rewards)
    return TensorDict(
        {
            key: torch.full((n,), group),
            ("next", "reward"): torch.tensor(rewards).reshape(n, 1),
            ("next", "done"): torch.tensor([False] * (n - 1) + [True]).reshape(n, 1),
        },
        batch_size=[n],
    )


def scalars(td, key):
    """One value per trajectory, in order."""
    column = steps_of(td)[key]
    assert isinstance(column, Flat)
    return column.values


def reference(returns):
    """`(R - mean) / std` in float64, std with n - 1."""
    values = torch.tensor(returns, dtype=torch.float64)
    return ((values - values.mean()) / values.std()).tolist()


def test_complete_groups_pass_in_every_form(make_rows, to_form, form):
    """Two groups of two with hand-computed advantages, whatever the form."""
    rows = make_rows([5, 7, 4, 6], rewards=[1.0, 0.0, 0.0, 3.0])
    out = MCAdvantage(2).inv(to_form(rows, form))
    half = 1 / math.sqrt(2)
    assert scalars(out, keys.ADVANTAGE).tolist() == pytest.approx([half, -half, -half, half], abs=1e-6)
    assert scalars(out, keys.RETURN).tolist() == [1.0, 0.0, 0.0, 3.0]
    assert scalars(out, keys.DEGENERATE).tolist() == [False] * 4
    assert steps_of(out)[keys.PROMPT].plain() == ["prompt 0", "prompt 0", "prompt 1", "prompt 1"]


def test_per_token_reward_is_summed_and_the_advantage_masked(make_rows, to_form, form):
    """R is the sum of the shaped rewards; the advantage is broadcast to assistant tokens, 0 elsewhere."""
    rows = make_rows([4, 5], rewards=[0.0, 0.0])
    rows[0]["next", "reward"] = torch.tensor([0.0, 0.0, -0.5, 1.0])
    rows[1]["next", "reward"] = torch.tensor([0.0, 0.0, -0.25, -0.25, 0.25])
    out = MCAdvantage(2).inv(to_form(rows, form))
    assert scalars(out, keys.RETURN).tolist() == pytest.approx([0.5, -0.25])
    adv = steps_of(out)[keys.ADVANTAGE]
    half = 1 / math.sqrt(2)
    assert adv.lengths.tolist() == [4, 5]
    assert adv.values.tolist() == pytest.approx([0, 0, half, half, 0, 0, -half, -half, -half], abs=1e-6)


def test_partial_groups_wait_and_come_out_in_order(make_rows, to_form, form):
    """Trajectories of an incomplete group stay behind and leave with the last one, in the order of arrival."""
    transform = MCAdvantage(3)
    rows = make_rows([4, 5, 6, 7, 8, 9], group_size=3, rewards=[0.0, 1.0, 2.0, 5.0, 5.0, 8.0])
    order = [0, 3, 1, 4, 5, 2]
    first = transform.inv(to_form([rows[i] for i in order[:4]], form))
    assert first is None
    assert (transform.queued_groups, transform.queued_trajectories) == (2, 4)
    out = transform.inv(to_form([rows[i] for i in order[4:]], form))
    assert scalars(out, keys.TRAJECTORY_ID).tolist() == [3, 4, 5, 0, 1, 2]
    expected = [*reference([5.0, 5.0, 8.0]), *reference([0.0, 1.0, 2.0])]
    assert scalars(out, keys.ADVANTAGE).tolist() == pytest.approx(expected, abs=1e-6)
    assert steps_of(out)[keys.TOKENS].lengths.tolist() == [7, 8, 9, 4, 5, 6]
    assert torch.equal(
        steps_of(out)[keys.TOKENS].values, torch.cat([rows[i]["tokens", "full"] for i in (3, 4, 5, 0, 1, 2)])
    )
    assert transform.queued_groups == 0


def test_the_input_is_not_changed(make_rows, to_form, form):
    """The caller's TensorDict gains no key."""
    td = to_form(make_rows([4, 5]), form)
    before = set(steps_of(td))
    assert MCAdvantage(2).inv(td) is not None
    assert set(steps_of(td)) == before


def test_forms_may_mix_between_calls(make_rows, to_form):
    """A group whose members came in three forms is whole."""
    rows = make_rows([4, 5, 6], group_size=3, rewards=[0.0, 1.0, 2.0])
    transform = MCAdvantage(3)
    assert transform.inv(to_form(rows[:1], "stack")) is None
    assert transform.inv(to_form(rows[1:2], "padded")) is None
    out = transform.inv(to_form(rows[2:], "jagged"))
    assert scalars(out, keys.ADVANTAGE).tolist() == pytest.approx([-1.0, 0.0, 1.0])
    assert steps_of(out)[keys.TOKENS].lengths.tolist() == [4, 5, 6]


def test_same_identity_completes_twice_in_one_batch(make_rows, to_form, form):
    """Four trajectories of one group id with groups of two are two groups, not one."""
    rows = make_rows([4] * 4, group_size=4, rewards=[0.0, 1.0, 10.0, 30.0])
    out = MCAdvantage(2).inv(to_form(rows, form))
    half = 1 / math.sqrt(2)
    assert scalars(out, keys.ADVANTAGE).tolist() == pytest.approx([-half, half, -half, half], abs=1e-6)


def test_a_member_counts_once(make_rows, to_form, form):
    """A trajectory that comes again, in the same call or a later one, does not stand in for the one that is to come."""
    first, last = make_rows([4, 5], group_size=2, rewards=[0.0, 1.0])
    transform = MCAdvantage(2)
    with pytest.raises(DataError, match="trajectory_id 0 arrived twice in group 0"):
        transform.inv(to_form([first, first], form))
    assert transform.inv(to_form([first], form)) is None
    saved = MCAdvantage(2)
    saved.load_state_dict(transform.state_dict())
    for again in (transform, saved):
        with pytest.raises(DataError, match="twice"):
            again.inv(to_form([first, last], form))
        assert again.queued_trajectories == again.completed_trajectories == 1
        assert scalars(again.inv(to_form([last], form)), keys.ADVANTAGE).tolist() == pytest.approx(
            [-(0.5**0.5), 0.5**0.5]
        )
    nameless = [row.exclude(keys.TRAJECTORY_ID) for row in (first, first)]
    assert scalars(transform.inv(to_form(nameless, form)), keys.DEGENERATE).all()


def test_none_and_empty_batches_pass():
    """None stays None, and no call ever returns an empty TensorDict."""
    transform = MCAdvantage(2)
    assert transform.inv(None) is None
    assert transform.inv(TensorDict(group_id=torch.zeros(0), task_reward=torch.zeros(0), batch_size=[0])) is None


def test_group_of_one_is_degenerate_not_nan(make_rows, to_form, form):
    """TorchRL gives NaN here."""
    out = MCAdvantage(1).inv(to_form(make_rows([4, 5], rewards=[1.0, 2.0]), form))
    assert scalars(out, keys.ADVANTAGE).tolist() == [0.0, 0.0]
    assert scalars(out, keys.DEGENERATE).tolist() == [True, True]


@pytest.mark.parametrize("policy", ["keep", "drop", "mark"])
def test_zero_variance(make_rows, to_form, form, policy):
    """A group without spread is kept, marked with priority 0, or left out; the other group is not touched."""
    rows = make_rows([4] * 4, rewards=[1.0, 1.0, 0.0, 1.0])
    transform = MCAdvantage(2, zero_variance=policy)
    out = transform.inv(to_form(rows, form))
    ids = scalars(out, keys.TRAJECTORY_ID).tolist()
    assert ids == ([2, 3] if policy == "drop" else [0, 1, 2, 3])
    assert scalars(out, keys.DEGENERATE).tolist() == ([False] * 2 if policy == "drop" else [True, True, False, False])
    if policy == "mark":
        assert scalars(out, keys.PRIORITY).tolist() == [0.0, 0.0, 1.0, 1.0]
    else:
        assert keys.PRIORITY not in steps_of(out)
    assert transform.get_stats()["degenerate_groups"] == 1


def test_only_degenerate_groups_dropped_gives_none(make_rows, to_form, form):
    """An empty result is None, because torchrl refuses an empty TensorDict."""
    assert MCAdvantage(2, zero_variance="drop").inv(to_form(make_rows([4, 4], rewards=[1.0, 1.0]), form)) is None


def test_torchrl_steps_and_trailing_incomplete_trajectory():
    """Multi-step trajectories of one batch are split at done; a trailing incomplete one is an error, not lost."""
    both = torch.cat([steps(0, [0.0, 0.0]), steps(0, [0.0, 0.0, 1.0])])
    out = MCAdvantage(2).inv(both)
    half = 1 / math.sqrt(2)
    assert out["advantage"].shape == (5, 1)
    assert out["advantage"].squeeze(-1).tolist() == pytest.approx([-half] * 2 + [half] * 3, abs=1e-6)
    broken = torch.cat([both, steps(0, [0.0, 0.0, 0.0])[:2]])
    with pytest.raises(DataError, match=r"steps 5 to 6 of 7"):
        MCAdvantage(2).inv(broken)


def test_torchrl_batch_by_time_form():
    """`[B, T]` with done flags: every row is a trajectory over time."""
    td = torch.stack([steps(0, [0.0, 0.0]), steps(0, [0.0, 1.0]), steps(1, [2.0, 0.0]), steps(1, [0.0, 0.0])])
    out = MCAdvantage(2).inv(td)
    half = 1 / math.sqrt(2)
    expected = [-half, -half, half, half, half, half, -half, -half]
    assert out.batch_size == (8,)
    assert out["advantage"].squeeze(-1).tolist() == pytest.approx(expected, abs=1e-6)


def test_token_level_batch_is_a_padded_batch(make_rows, to_form):
    """`[B, T]` whose second dimension is the token: padding is ignored."""
    td = to_form(make_rows([4, 6], rewards=[0.0, 0.0]), "padded").select(keys.TOKENS, keys.ATTENTION_MASK)
    reward = torch.zeros(2, 6)
    reward[0, 3] = 1.0
    reward[0, 4:] = 99.0  # padding
    td.set(keys.REWARD, reward)
    td.set(keys.GROUP_ID, torch.zeros(2, 6, dtype=torch.int64))
    td.batch_size = [2, 6]
    out = MCAdvantage(2).inv(td)
    assert scalars(out, keys.RETURN).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("mean", [-1.0, 1.0]), ("dr_grpo", [-1.0, 1.0]), ("rloo", [-2.0, 2.0]), ("opo", [-1.5, 0.5])],
)
def test_estimators(make_rows, to_form, form, estimator, expected):
    """Returns 0 and 2, completion lengths 1 and 3: the OPO baseline is 6/4."""
    out = MCAdvantage(2, estimator=estimator).inv(to_form(make_rows([3, 5], rewards=[0.0, 2.0]), form))
    assert scalars(out, keys.ADVANTAGE).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("identity", ["string", "int", "tensor", "ragged"])
def test_kinds_of_identity(identity):
    """Strings, integers, vectors and ragged prompts all name a group."""
    values = {
        "string": ["a", "b", "a", "b"],
        "int": [torch.tensor(v) for v in (4, 2, 4, 2)],
        "tensor": [torch.tensor(v) for v in ([1, 2], [1, 3], [1, 2], [1, 3])],
        "ragged": [torch.tensor(v) for v in ([1, 2, 3], [1, 2], [1, 2, 3], [1, 2])],
    }[identity]
    rows = [
        TensorDict({"who": v, "task_reward": torch.tensor(r)}, batch_size=[])
        for v, r in zip(values, [0.0, 0.0, 1.0, 2.0], strict=True)
    ]
    out = MCAdvantage(2, group_key="who").inv(lazy_stack(rows))
    assert out.get("task_reward").tolist() == [0.0, 1.0, 0.0, 2.0]


def test_group_id_wins_over_the_prompt(make_rows, to_form, form):
    """The same prompt text in two instances does not mix the groups."""
    rows = make_rows([4] * 4, rewards=[0.0, 1.0, 0.0, 1.0])
    for row in rows:
        row["prompt"] = "same"
    transform = MCAdvantage(2, prompt_key="prompt")
    assert transform.inv(to_form([rows[0], rows[2]], form)) is None
    assert transform.queued_groups == 2


def test_no_identity_and_no_reward_are_errors():
    """The messages name what was looked for."""
    with pytest.raises(DataError, match="group_id"):
        MCAdvantage(2).inv(TensorDict(task_reward=torch.zeros(2), batch_size=[2]))
    with pytest.raises(DataError, match="task_reward"):
        MCAdvantage(2).inv(TensorDict(group_id=torch.zeros(2), batch_size=[2]))


@pytest.mark.parametrize(
    "arguments",
    [
        {"grpo_size": 0},
        {"trajectory_return": "prod"},
        {"zero_variance": "hide"},
        {"keep_return_bounds": (0.1, 0.9), "trajectory_return": None},
        {"keep_return_bounds": (0.9, 0.1)},
    ],
)
def test_wrong_arguments(arguments):
    """Refused in the constructor, as a ValueError too."""
    with pytest.raises(DefinitionError):
        MCAdvantage(**{"grpo_size": 2, **arguments})


def test_pending_trajectories_survive_state_dict(make_rows, to_form, form):
    """A checkpoint taken with `torch.save` gives the same result as a straight run."""
    rows = make_rows([4, 5, 6], group_size=3, rewards=[0.0, 1.0, 5.0])
    straight, first, second = MCAdvantage(3), MCAdvantage(3), MCAdvantage(3)
    for transform in (straight, first):
        assert transform.inv(to_form(rows[:2], form)) is None
    file = io.BytesIO()
    torch.save(Compose(first).state_dict(), file)
    file.seek(0)
    Compose(second).load_state_dict(torch.load(file, weights_only=True))
    assert second.queued_trajectories == 2
    expected, got = (steps_of(t.inv(to_form(rows[2:], form))) for t in (straight, second))
    assert set(got) == set(expected)
    for key, column in expected.items():
        if isinstance(column, Text):
            assert got[key].plain() == column.plain()
        else:
            torch.testing.assert_close(got[key].values, column.values, equal_nan=True)


def test_pending_steps_survive_state_dict():
    """The same for multi-step trajectories, and for a copy."""
    first, second = MCAdvantage(2), MCAdvantage(2)
    assert first.inv(steps(0, [0.0, 0.0])) is None
    second.load_state_dict(first.state_dict())
    for transform in (second, copy.deepcopy(first)):
        out = transform.inv(steps(0, [1.0]))
        assert out["advantage"].squeeze(-1).tolist() == pytest.approx([-0.70710678] * 2 + [0.70710678], abs=1e-6)


def test_unsaveable_pending_value_is_named(make_rows):
    """A value that a checkpoint cannot carry is an error at the checkpoint, not a silent loss."""
    row = make_rows([4])[0]
    row.set_non_tensor("tool", object())
    transform = MCAdvantage(2)
    assert transform.inv(lazy_stack([row])) is None
    with pytest.raises(DataError, match="tool"):
        transform.state_dict()


def test_failed_members_and_early_close(make_rows, to_form, form):
    """A group that cannot complete closes with its own size."""
    transform = MCAdvantage(3)
    rows = make_rows([4] * 6, group_size=3, rewards=[0.0, 2.0, 9.0, 1.0, 4.0, 9.0])
    assert transform.report_failed(0) is None
    out = transform.inv(to_form(rows[:2], form))
    half = 1 / math.sqrt(2)
    assert scalars(out, keys.ADVANTAGE).tolist() == pytest.approx([-half, half], abs=1e-6)
    assert transform.inv(to_form(rows[3:5], form)) is None
    late = transform.report_failed(1)
    assert scalars(late, keys.TRAJECTORY_ID).tolist() == [3, 4]
    assert transform.inv(to_form(rows[5:], form)) is None
    assert transform.close(min_size=2) is None
    closed = transform.close()
    assert scalars(closed, keys.DEGENERATE).tolist() == [True]
    assert transform.close() is None


def test_failed_reward_leaves_the_rest_of_the_group_right(make_rows, to_form, form):
    """A NaN reward counts as arrived, gets advantage 0, and the others are normalised among themselves."""
    transform = MCAdvantage(3)
    out = transform.inv(to_form(make_rows([4, 5, 6], group_size=3, rewards=[0.0, math.nan, 2.0]), form))
    half = 1 / math.sqrt(2)
    assert scalars(out, keys.ADVANTAGE).tolist() == pytest.approx([-half, 0.0, half], abs=1e-6)
    assert scalars(out, keys.DEGENERATE).tolist() == [False, True, False]
    assert transform.failed_trajectories == 1


def test_forward_is_the_identity(make_rows, to_form, form):
    """As the reference document has it: advantages are those of whole groups, which only the write path sees."""
    transform, td = MCAdvantage(2), to_form(make_rows([4] * 4, rewards=[0.0, 0.0, 1.0, 3.0]), form)
    before = set(td.keys(True, True))
    assert transform(td) is td
    assert set(td.keys(True, True)) == before
    assert transform.queued_trajectories == 0


@pytest.mark.parametrize("prompt", [torch.tensor(3), torch.tensor([3, 4]), NonTensorData(3), NonTensorData(("a", 1))])
@pytest.mark.parametrize("key", ["prompt", "query", "text"])
def test_a_prompt_is_text(prompt, key):
    """Another kind is a TypeError, as in the reference document, and of this package; under another name it counts."""
    given = {key: prompt, "mine": prompt, "task_reward": torch.tensor(1.0), ("next", "done"): torch.tensor(True)}
    row = TensorDict(given)
    for transform in (MCAdvantage(1), MCAdvantage(1, prompt_key=key)):
        with pytest.raises(TypeError, match=f"the prompt under '{key}' is of type .* must be a string") as raised:
            transform.inv(lazy_stack([row]))
        assert isinstance(raised.value, DataError)
    assert MCAdvantage(1, prompt_key="mine").inv(lazy_stack([row])) is not None


def test_log_probs_keep_no_graph(make_rows, to_form, form):
    """A reward that carries a graph gives an advantage without one."""
    rows = make_rows([4, 5])
    weight = torch.ones((), requires_grad=True)
    for i, row in enumerate(rows):
        row["task_reward"] = i * weight
    out = MCAdvantage(2).inv(to_form(rows, form))
    assert not scalars(out, keys.ADVANTAGE).requires_grad


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline", "grpo_batch"])
def test_a_batch_is_the_same_however_its_trajectories_arrive(make_rows, to_form, form, estimator):
    """Three groups of two, one member of which failed: in one call, and one by one with a state in between."""
    rows = make_rows([3, 5, 4, 3, 3], first_group=6, rewards=[0.0, 2.0, 1.0, 5.0, 4.0])
    rows = [rows[i] for i in (0, 2, 1, 3, 4)]
    whole = MCAdvantage(2, estimator=estimator, batch_groups=3)
    assert whole.report_failed(8) is None
    want = whole.inv(to_form(rows, form))
    single = MCAdvantage(2, estimator=estimator, batch_groups=3)
    assert single.report_failed(8) is None
    for row in rows[:-1]:
        assert single.inv(to_form([row], form)) is None
    resumed = MCAdvantage(2, estimator=estimator, batch_groups=3)
    resumed.load_state_dict(single.state_dict())
    got = resumed.inv(to_form(rows[-1:], form))
    found = dict(zip(scalars(got, keys.TRAJECTORY_ID).tolist(), scalars(got, keys.ADVANTAGE).tolist(), strict=True))
    expected = zip(scalars(want, keys.TRAJECTORY_ID).tolist(), scalars(want, keys.ADVANTAGE).tolist(), strict=True)
    assert found == pytest.approx(dict(expected))
    assert len(found) == 5


def test_a_batch_does_not_wait_for_a_group_that_failed_whole(make_rows):
    """A group that no trajectory will come of closes with its batch; groups without a number are named."""
    transform = MCAdvantage(2, estimator="reinforce_pp", batch_groups=2)
    assert transform.inv(lazy_stack(make_rows([3, 4], rewards=[0.0, 1.0]))) is None
    out = transform.report_failed(1, 2)
    assert scalars(out, keys.ADVANTAGE).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert transform.queued_groups == 0
    with pytest.raises(DataError, match="requires integer group ids, but a trajectory has the group id"):
        transform.inv(TensorDict(query=["a", "a"], task_reward=torch.tensor([0.0, 1.0]), batch_size=[2]))


def test_rounding_of_a_penalty_is_no_spread(make_rows, to_form, form):
    """Equal rewards whose returns differ by the penalty's rounding only have no spread, whatever the form."""
    rows = make_rows([6, 6], rewards=[1.0, 1.0])
    for row, off in zip(rows, (0.0, 5e-7), strict=True):
        said = row["masks", "all_assistant_mask"]
        row["log_probs", "full"] = torch.where(said, -5.0 + off, torch.nan)
        row["next", "ref_log_probs", "full"] = torch.where(said, -5.0, torch.nan)
    shaped = KLRewardTransform(coef=0.5).inv(to_form(rows, form))
    out = MCAdvantage(2).inv(shaped)
    assert out is not None
    returns = scalars(out, keys.RETURN)
    assert returns[0] != returns[1]
    assert scalars(out, keys.DEGENERATE).tolist() == [True, True]


def test_what_waits_is_not_the_callers(make_rows, to_form, form):
    """A tensor that its owner writes to again, while its trajectory waits in memory, changes nothing that comes out."""
    first, second = (make_rows([4, 4])[i : i + 1] for i in range(2))
    transform, batch = MCAdvantage(2, group_key="group_id"), to_form(first, form)
    expected = first[0]["tokens", "full"].clone()
    assert transform.inv(batch) is None
    for row in batch.tensordicts if form == "stack" else [batch]:
        tokens = row["tokens", "full"]
        (tokens.values() if tokens.is_nested else tokens).fill_(7)
    out = transform.inv(to_form(second, form))
    assert steps_of(out)[keys.TOKENS].values[:4].tolist() == expected.tolist()
