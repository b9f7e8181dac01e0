"""A batch of trajectories from and to every form of a TensorDict."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from rlhf_pipeline.data import keys
from rlhf_pipeline.data.tensordicts import (
    ROWS,
    attach,
    in_form_of,
    is_stack,
    some_steps_of,
    steps_of,
    td_of,
    trajectories_of,
    unjagged,
    with_all_columns,
)
from rlhf_pipeline.data.trajectories import Flat, Text, concat, segment_sum
from rlhf_pipeline.errors import IncompleteError


def same(left, right):
    """Assert that two batches hold the same columns."""
    assert set(left) == set(right)
    for key, column in left.items():
        other = right[key]
        if isinstance(column, Text):
            assert column.plain() == other.plain()
        else:
            torch.testing.assert_close(column.values, other.values, equal_nan=True)
            assert (column.lengths is None) == (other.lengths is None)
            assert column.lengths is None or column.lengths.tolist() == other.lengths.tolist()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(3, 9), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_every_form_gives_the_same_columns_and_comes_back(make_rows, to_form, lengths, seed):
    """Lazy stack, jagged and padded: the same flat columns, and the same form again with the same columns."""
    rows = make_rows(lengths, seed=seed)
    expected = steps_of(lazy_stack(rows))
    for form in ("stack", "jagged", "padded"):
        td = to_form(rows, form)
        batch = steps_of(td)
        same(batch, expected)
        back = in_form_of(td, batch)
        assert is_stack(back) == (form == "stack")
        assert (back.get(keys.ATTENTION_MASK, None) is not None) == (form == "padded")
        same(steps_of(back), expected)


def test_new_columns_take_the_form_of_the_batch(make_rows, to_form, form):
    """A column per token and one per trajectory are set in a copy; the batch itself is not changed."""
    rows = make_rows([4, 6])
    td = to_form(rows, form)
    lengths = steps_of(td)[keys.TOKENS].lengths
    new = {("next", "score"): Flat(torch.arange(10.0), lengths), "mark": Flat(torch.tensor([1, 2]))}
    out = attach(td, new)
    assert "mark" not in set(steps_of(td))
    found = steps_of(out)
    assert found["next", "score"].values.tolist() == list(range(10))
    assert found["mark"].values.tolist() == [1, 2]


def test_rows_of_one_length_stay_plain_tensors():
    """A batch `[n, T]` without a mask gets columns `[n, T]`."""
    td = TensorDict({"tokens": {"full": torch.arange(6).view(2, 3)}}, batch_size=[2])
    lengths = steps_of(td)[keys.TOKENS].lengths
    out = attach(td, {"score": Flat(torch.arange(6.0), lengths)})
    assert out["score"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_narrowed_jagged_tensor_has_its_holes_closed():
    """Rows cut short inside a jagged tensor come out with what is left of them."""
    nested = torch.nested.narrow(
        torch.arange(8).view(2, 4), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged
    )
    found = unjagged(nested)
    assert found.values.tolist() == [0, 1, 5, 6, 7]
    assert found.lengths.tolist() == [2, 3]


def test_a_stack_is_taken_apart_only_where_asked(make_rows):
    """What was not asked for is in the rows, and comes out whole."""
    rows = make_rows([4, 5, 6])
    some = some_steps_of(lazy_stack(rows[:2]), [keys.GROUP_ID])
    assert set(some) == {ROWS, keys.GROUP_ID}
    same(with_all_columns(some), steps_of(lazy_stack(rows[:2])))
    same(concat([with_all_columns(some), steps_of(lazy_stack(rows[2:]))]), steps_of(lazy_stack(rows)))


def test_rows_of_steps_that_end_in_the_middle_are_refused():
    """In `[B, T]` steps a trajectory does not go on in the next row: one without an end is an error, not a merge."""
    done = torch.tensor([[[False], [True]], [[False], [False]]])
    td = TensorDict(
        {"group_id": torch.zeros(2, 2), "next": {"done": done, "reward": torch.ones(2, 2, 1)}}, batch_size=[2, 2]
    )
    with pytest.raises(IncompleteError, match="row 1 of 2"):
        steps_of(td)
    done[1, 1] = True
    assert steps_of(td).n == 4


def test_selecting_rows_keeps_what_they_hold(make_rows):
    """Any rows in any order, some twice, none at all."""
    batch = steps_of(lazy_stack(make_rows([4, 5, 6])))
    chosen = batch.select(torch.tensor([2, 0, 0]))
    assert chosen[keys.TOKENS].lengths.tolist() == [6, 4, 4]
    assert chosen["completion"].plain() == ["completion 2", "completion 0", "completion 0"]
    total = segment_sum(batch[keys.TOKENS].values, batch[keys.TOKENS].lengths)
    assert segment_sum(chosen[keys.TOKENS].values, chosen[keys.TOKENS].lengths).tolist() == total[[2, 0, 0]].tolist()
    assert steps_of(td_of(chosen)).n == 3
    assert batch.select(torch.tensor([], dtype=torch.int64))[keys.TOKENS].values.numel() == 0


def test_the_token_is_the_second_dimension_of_nested_keys_too():
    """A TensorDict [B, T] whose keys under `next` have its batch size: done and reward are read at each token."""
    td = TensorDict(
        {
            keys.TOKENS: torch.arange(6).reshape(2, 3),
            keys.REWARD: torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
            keys.DONE: torch.tensor([[False, False, True], [False, False, True]]),
        },
        batch_size=[2, 3],
    )
    columns = trajectories_of(td)
    assert columns[keys.DONE].values.tolist() == [True, True]
    assert columns[keys.REWARD].lengths.tolist() == [3, 3]
    assert td.batch_size == td["next"].batch_size == torch.Size([2, 3])
