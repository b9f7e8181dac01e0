"""Exceptions at the lines of every write: `interrupts.py` over a share of the lines, each exception in turn.

Set `STORE_LINES=1` for every line. A merge after power cuts has the most lines: it runs at night.
"""

from __future__ import annotations

import itertools
import os

import pytest

from tests.crash.interrupts import BACKENDS, CALLS, DURABILITIES, EXCEPTIONS, lines_of, sweep

STEP = int(os.environ.get("STORE_LINES", "31"))


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("backend", "durability", "call"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly] if case[1:] == ("power", "compact") else [])
        for case in itertools.product(BACKENDS, DURABILITIES, CALLS)
    ],
)
def test_no_line_of_a_write_is_one_where_an_exception_costs_anything(backend, durability, call):
    """No id changes its row, no acknowledged row is lost, no intact store raises, nothing hangs."""
    points = [(at, EXCEPTIONS[i % 3]) for i, at in enumerate(lines_of(backend, durability, call)[::STEP])]
    done, failures = sweep(backend, durability, call, points)
    assert done
    assert not failures, "\n".join(failures)
