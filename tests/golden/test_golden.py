"""Small runs give what they gave when they were recorded, bit for bit on a machine of the same kind."""

from __future__ import annotations

import pytest

from tests.golden.record import DIGESTS, differences, recorded
from tests.golden.runs import RUNS, digest_of_definition, machine

ADVICE = """
If the old figures were wrong, record the new ones and give the reason:
    python -m tests.golden.record {name}
and add a line (date, run, reason) to tests/golden/README.md. Otherwise this is a regression."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_what_it_gave(name: str):
    """Stored columns, the trajectories and figures of each step, and the last weights are the recorded ones.

    On a machine of another kind the run is repeated instead: twice the same bits, and close to the recorded figures.
    """
    known = recorded()
    now = digest_of_definition(name)
    if known["machine"] == machine():
        changed = differences(known["runs"][name], now, exact=True)
    else:
        again = digest_of_definition(name)
        changed = [f"between two runs here: {line}" for line in differences(now, again, exact=True)]
        changed += differences(known["runs"][name], now, exact=False)
    assert not changed, "\n".join([f"{name} is not what {DIGESTS.name} says:", *changed, ADVICE.format(name=name)])


def test_every_difference_is_found():
    """A changed bit, a missing column, other trajectories and a missing step are said; a new column is not one."""
    was = {
        "num_rows": 2,
        "columns": {"a": "1", "b": "2"},
        "steps": ["x", "y"],
        "metrics": [{"loss": (0.5).hex()}, {"loss": None}],
        "weights": "w",
    }
    assert differences(was, was | {"columns": {"a": "1", "b": "2", "new": "3"}}, exact=True) == []
    other = was | {
        "columns": {"a": "0"},
        "steps": ["x"],
        "metrics": [{"loss": (0.5 + 2**-53).hex()}, {"loss": None}],
        "weights": "v",
    }
    assert differences(was, other, exact=True) == [
        "column a: 1 became 0",
        "column b: is gone",
        "step 2 learns from other trajectories",
        "step 1 loss: 0.5 became 0.5000000000000001",
        "weights: w became v",
    ]
    assert differences(was, other, exact=False) == ["step 2 learns from other trajectories"]
    far = was | {"metrics": [{"loss": (0.51).hex()}, {"loss": (0.0).hex()}]}
    assert differences(was, far, exact=False) == ["step 1 loss: 0.5 became 0.51", "step 2 loss: None became 0.0"]
    assert differences(was, was | {"metrics": []}, exact=True) == ["metrics: 2 steps became 0"]
