"""What it costs to start, to go on and to look does not grow with the run: the short form of `bench_long_runs`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.bench_long_runs import (
    GROWTH,
    MOST_MEMORY,
    Cost,
    flat_costs,
    linear_costs,
    made,
    prolonged,
    resumed,
    started,
)
from rlhf_pipeline.run.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHORT, LONG = 1_000, 30_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two runs that differ in their length only."""
    first = made("copy_digits", tmp_path_factory.mktemp("long") / "first")
    return {steps: prolonged(first, first.with_name(str(steps)), steps) for steps in (SHORT, LONG)}


def assert_flat(measure: Callable[[int], dict[str, Cost]]) -> dict[str, Cost]:
    """Compare short and long; once more where they differ, as a neighbour on the same core costs time, too."""
    for attempt in (1, 2):
        short, long = measure(SHORT), measure(LONG)
        grown = {
            what: (short[what], long[what])
            for what in short
            if long[what].seconds > GROWTH * short[what].seconds or long[what].memory > GROWTH * short[what].memory
        }
        if not grown:
            return long
        assert attempt == 1, grown
    raise AssertionError


def test_looking_at_the_newest_and_starting_cost_the_same(runs):
    """`tail`, `show` of a step and of the newest trajectories, and what a supervisor does before its first child."""
    long = assert_flat(lambda steps: dict(flat_costs(runs[steps], steps)))
    assert long["supervisor, start"].memory < 120e6


def test_reading_everything_streams(runs):
    """`verify` and `inspect` look at every row, in little memory."""
    for _, found in linear_costs(runs[LONG]):
        assert found.memory < MOST_MEMORY


def test_going_on_costs_the_same(runs):
    """A resume in one process: the checks, the checkpoint, and in the first a rollout and a step."""
    assert_flat(lambda steps: {"resume": resumed(runs[steps], steps)})
    assert RunFolder(runs[LONG]).metrics.last_step == LONG + 1


@pytest.mark.nightly
def test_processes_of_a_long_run_start_as_those_of_a_short_one(tmp_path):
    """A learner, which reads ledger and metrics, and a collector, which looks for the next rollout."""
    several = made("long_running", tmp_path / "several", "--collectors", "1")
    assert_flat(lambda steps: dict(started(several, tmp_path / str(steps), steps)))
