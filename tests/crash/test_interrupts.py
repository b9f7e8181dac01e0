"""Exceptions at the lines of every write: `interrupts.py` over a share of the lines, each exception in turn.

Set `STORE_LINES=1` for every line.
"""

from __future__ import annotations

import os

import pytest

from tests.crash.interrupts import BACKENDS, CALLS, DURABILITIES, EXCEPTIONS, lines_of, sweep

STEP = int(os.environ.get("STORE_LINES", "31"))


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_line_of_a_write_is_one_where_an_exception_costs_anything(backend, durability, call):
    """No id changes its row, no acknowledged row is lost, no intact store raises, nothing hangs."""
    points = [(at, EXCEPTIONS[i % 3]) for i, at in enumerate(lines_of(backend, durability, call)[::STEP])]
    done, failures = sweep(backend, durability, call, points)
    assert done
    assert not failures, "\n".join(failures)
