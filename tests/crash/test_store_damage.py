"""A sample of the damages of `tests/crash/damage.py`, and of the copies of `tests/crash/copies.py`."""

from __future__ import annotations

import pytest

from tests.crash import copies
from tests.crash.damage import WRITERS, sweep

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_one_bad_byte_costs_what_it_touches_and_is_named(backend, writer):
    """No undamaged row is hidden, old or wrong, every loss is named, and the right file put back restores all."""
    assert not sweep(backend, writer, count=40, seed=1)


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_copy_in_any_order_serves_what_it_holds(backend):
    """The files of a live store, copied one after another: no row that the copy holds is hidden, lost or another."""
    assert not copies.sweep(backend, count=8, seed=1)
