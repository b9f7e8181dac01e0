"""The short form of `cloud.py`: a run in an object store whose processes are killed and replaced."""

from __future__ import annotations

import pytest

from tests.crash._play import play
from tests.crash._s3 import missing

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(300),
]


def test_a_run_at_a_url_ends_as_if_left_alone():
    """Every prompt and every step once, nothing acknowledged lost, and the weights of an undisturbed run."""
    play("cloud", "--steps", "4", "--seed", "1")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_network_that_is_gone_for_20_s_ends_no_process():
    """All three wait for it, and the weights are those of an undisturbed run."""
    play("cloud", "--steps", "4", "--cut", "20")
