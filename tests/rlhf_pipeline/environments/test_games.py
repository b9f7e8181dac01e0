"""Games as text."""

from __future__ import annotations

import pytest

from rlhf_pipeline import FrozenLake, Prompt, Turn


@pytest.mark.parametrize(
    ("moves", "reached", "nearer"),
    [
        ("RRDD", 1.0, 1.0),  # all of the way
        ("RRL", 0.0, 0.25),  # one of four moves
        ("RL", 0.0, 0.0),  # and back
        ("RD", 0.0, 0.0),  # a hole: what was nearer is taken back
        ("LUx", 0.0, 0.0),  # over the edge twice, and no move
    ],
)
def test_a_walk_is_rewarded_for_where_it_ends(moves, reached, nearer):
    """`nearer` adds up to the share of the way that is behind the walker, and to nothing after a fall."""
    lake = FrozenLake()
    lake.reset(Prompt(text="a map", meta={"map": ["...", ".O.", "..G"], "start": [0, 0]}), seed=0)
    steps = [lake.step(Turn(text=move)) for move in moves]
    assert sum(step.rewards["reached"] for step in steps) == reached
    assert sum(step.rewards["nearer"] for step in steps) == pytest.approx(nearer)
    assert [step.done for step in steps] == [*[False] * (len(moves) - 1), moves in ("RRDD", "RD")]
