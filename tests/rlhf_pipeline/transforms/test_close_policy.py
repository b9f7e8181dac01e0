"""When a group closes whose members straggle or fail, and what the figures say about it."""

from __future__ import annotations

import math

import pytest
from tensordict import lazy_stack

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.config import WritePath
from rlhf_pipeline.data.tensordicts import steps_of
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.transforms.groups import MOST_LATE
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
from tests.rlhf_pipeline.small import Clock


@pytest.fixture
def clock():
    """A clock of the test's own."""
    return Clock()


def ids(td):
    """Which trajectories came out."""
    return [] if td is None else steps_of(td)["trajectory_id"].values.tolist()


def test_all_waits_for_ever(make_rows):
    """Without a timeout no amount of time closes a group."""
    clock = Clock()
    transform = MCAdvantage(3, clock=clock)
    assert transform.inv(lazy_stack(make_rows([4, 5], group_size=3))) is None
    clock.now += 1e9
    assert transform.close_overdue() is None
    assert transform.queued_trajectories == 2


def test_enough_members_after_the_timeout(make_rows, to_form, form, clock):
    """Two of four close at the first call after ten seconds, with the advantages of two."""
    rows = make_rows([4, 6, 5, 5], group_size=4, rewards=[0.0, 2.0, 9.0, 9.0])
    other = make_rows([4], group_size=4, first_group=5)
    transform = MCAdvantage(4, min_group_size=2, group_timeout_s=10.0, clock=clock)
    assert transform.inv(to_form(rows[:2], form)) is None
    clock.now += 9.9
    assert transform.inv(to_form(other, form)) is None
    clock.now += 0.2
    out = transform.inv(to_form(make_rows([4], group_size=4, first_group=6), form))
    assert ids(out) == [0, 1]
    half = 1 / math.sqrt(2)
    assert steps_of(out)["advantage"].values.reshape(-1).unique().tolist() == pytest.approx(
        sorted({-half, half} | ({0.0} if steps_of(out)["advantage"].lengths is not None else set()))
    )
    assert transform.queued_trajectories == 2


def test_an_overdue_group_closes_as_soon_as_it_has_enough(make_rows, clock):
    """One member is not enough after the timeout; the second closes the group at once."""
    rows = make_rows([4, 6, 5], group_size=3)
    transform = MCAdvantage(3, min_group_size=2, group_timeout_s=10.0, clock=clock)
    assert transform.inv(lazy_stack(rows[:1])) is None
    clock.now += 20
    assert transform.close_overdue() is None
    assert ids(transform.inv(lazy_stack(rows[1:2]))) == [0, 1]


def test_time_runs_from_the_first_member(make_rows, clock):
    """A member that comes late does not give the group more time."""
    rows = make_rows([4, 6, 5], group_size=3)
    transform = MCAdvantage(3, min_group_size=2, group_timeout_s=10.0, clock=clock)
    transform.inv(lazy_stack(rows[:1]))
    clock.now += 9
    transform.inv(lazy_stack(rows[1:2]))
    clock.now += 1
    assert ids(transform.close_overdue()) == [0, 1]


def test_failed_members_complete_a_group_without_waiting(make_rows, clock):
    """Three of four came and one failed: nothing to wait for, and not an early end."""
    rows = make_rows([4, 6, 5], group_size=4)
    transform = MCAdvantage(4, min_group_size=2, group_timeout_s=10.0, clock=clock)
    assert transform.report_failed(0) is None
    assert ids(transform.inv(lazy_stack(rows))) == [0, 1, 2]
    assert transform.early_closed_groups == 0


def test_stragglers_are_counted_and_left_out(make_rows, clock):
    """A straggler does not begin its group anew, be it a trajectory or a report of failure."""
    rows = make_rows([4, 6, 5, 5], group_size=4)
    transform = MCAdvantage(4, min_group_size=2, group_timeout_s=10.0, clock=clock)
    transform.inv(lazy_stack(rows[:2]))
    clock.now += 10
    assert ids(transform.close_overdue()) == [0, 1]
    assert transform.inv(lazy_stack(rows[2:3])) is None
    assert transform.report_failed(0) is None
    assert transform.queued_groups == 0
    assert transform.late_trajectories == 1
    assert transform.inv(lazy_stack(rows[3:])) is None
    assert transform.queued_groups == 1  # all four are accounted for: this one belongs to a new group of that name


def test_of_many_early_groups_the_newest_are_remembered(make_rows, clock):
    """Stragglers of the newest `MOST_LATE` groups are left out; the group that closed before them may begin again."""
    rows = make_rows([4] * (MOST_LATE + 1), group_size=1)
    transform = MCAdvantage(2, min_group_size=1, group_timeout_s=10.0, clock=clock)
    assert transform.inv(lazy_stack(rows)) is None
    clock.now += 10
    assert transform.close_overdue() is not None
    assert transform.inv(lazy_stack(rows[-1:])) is None
    assert (transform.queued_groups, transform.late_trajectories) == (0, 1)
    assert transform.inv(lazy_stack(rows[:1])) is None
    assert (transform.queued_groups, transform.late_trajectories) == (1, 1)


def test_prompts_as_identity_have_no_stragglers(make_rows, clock):
    """The same text may come again in another epoch, so what comes after an early end begins a new group."""
    rows = make_rows([4, 6, 5], group_size=3)
    for row in rows:
        del row["group_id"]
    transform = MCAdvantage(3, prompt_key="prompt", min_group_size=2, group_timeout_s=10.0, clock=clock)
    transform.inv(lazy_stack(rows[:2]))
    clock.now += 10
    assert ids(transform.close_overdue()) == [0, 1]
    transform.inv(lazy_stack(rows[2:]))
    assert (transform.queued_groups, transform.late_trajectories) == (1, 0)


def test_length_bias(make_rows, clock):
    """Completions of 2 and 4 tokens closed early, 8 and 4 in a full group: 3 against 6."""
    early = make_rows([4, 6], group_size=3)
    full = make_rows([10, 6, 8], group_size=3, first_group=1)
    transform = MCAdvantage(3, min_group_size=2, group_timeout_s=10.0, clock=clock)
    stats = transform.get_stats()
    assert math.isnan(stats["early_closed_length_bias"])
    transform.inv(lazy_stack(early))
    clock.now += 10
    assert ids(transform.inv(lazy_stack(full))) == [3, 4, 5, 0, 1]
    stats = transform.get_stats()
    assert stats["mean_length_full"] == 6.0
    assert stats["mean_length_early_closed"] == 3.0
    assert stats["early_closed_length_bias"] == 0.5
    assert (stats["early_closed_groups"], stats["early_closed_trajectories"]) == (1, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"min_group_size": 2},
        {"group_timeout_s": 1.0},
        {"min_group_size": 0, "group_timeout_s": 1.0},
        {"min_group_size": 5, "group_timeout_s": 1.0},
        {"min_group_size": 2, "group_timeout_s": -1.0},
    ],
)
def test_wrong_arguments(arguments):
    """Both or neither, and in range."""
    with pytest.raises(DefinitionError, match=r"group_timeout_s|min_group_size"):
        MCAdvantage(4, **arguments)


def test_a_definition_says_it():
    """The same two fields in a pipeline, with the same rule."""
    assert WritePath(min_group_size=2, group_timeout_s=60).group_timeout_s == 60
    with pytest.raises(DefinitionError, match="must be set together"):
        WritePath(min_group_size=2)
    with pytest.raises(DefinitionError, match="at least 0"):
        WritePath(min_group_size=2, group_timeout_s=-1.0)


def test_through_a_buffer(tmp_path, make_rows, clock):
    """`extend` closes what is overdue, `close_overdue` does it alone, `close_groups` does it whatever the time."""
    rows = [make_rows([4, 5, 6], group_size=3, first_group=g) for g in range(4)]
    transform = MCAdvantage(3, min_group_size=2, group_timeout_s=10.0, clock=clock)
    rb = TrajectoryReplayBuffer(storage=tmp_path / "store", transform=transform)
    rb.extend(lazy_stack(rows[0][:2]))
    clock.now += 10
    assert rb.extend(lazy_stack(rows[1][:2])).numel() == 2
    clock.now += 10
    assert rb.close_overdue().numel() == 2
    rb.extend(lazy_stack([rows[2][0], *rows[3][:2]]))
    assert rb.close_groups(min_size=2).numel() == 2
    assert rb.waiting() == [6]
    assert rb.read(rb.trajectories.row_ids())["group_id"].unique().tolist() == [0, 1, 3]
    rb.storage.close()


def test_groups_are_kept_by_the_mean_of_all_their_members(make_rows):
    """Strictly between the bounds; a member that failed has earned nothing, and counts."""
    for rewards, kept in (([0.0, 0.0], 0), ([0.0, 0.25], 1), ([1.0, 1.0], 0), ([math.nan, 0.75], 1), ([0.5, 1.5], 0)):
        transform = MCAdvantage(2, keep_return_bounds=(0.0, 0.5))
        transform.inv(lazy_stack(make_rows([4, 4], group_size=2, rewards=rewards)))
        assert transform.dropped_groups == 1 - kept, rewards
