"""A sample of the damages of `tests/crash/damage.py`."""

from __future__ import annotations

import pytest

from tests.crash.damage import WRITERS, sweep

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_one_bad_byte_costs_what_it_touches_and_is_named(backend, writer):
    """No undamaged row is hidden, old or wrong, every loss is named, and the right file put back restores all."""
    assert not sweep(backend, writer, count=40, seed=1)
