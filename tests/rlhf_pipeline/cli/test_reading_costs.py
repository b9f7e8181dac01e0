"""Commands that look at a run read what they show, not an id per row; and what each takes at 10^6 rows."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from benchmarks.bench_long_runs import Cost, made, prolonged, rlhf
from rlhf_pipeline.cli import main
from tests.moments import at_call
from trajectory_store import TrajectoryStore

READING: Final = {
    "tail": ("tail", "RUN", "-n", "3"),
    "tail of some": ("tail", "RUN", "-n", "3", "--filter", "reward>=0"),
    "show": ("show", "RUN", "--last", "2"),
    "show of a step": ("show", "RUN", "--step", "5"),
    "show of a trajectory": ("show", "RUN", "--id", "1"),
    "group": ("group", "RUN"),
    "group of a number": ("group", "RUN", "5"),
    "ledger": ("ledger", "RUN"),
    "ls": ("ls", "RUN"),
    "status": ("status", "RUN"),
    "stats": ("stats", "RUN"),
    "report": ("report", "RUN", "--out", "report.html"),
    "inspect": ("inspect", "RUN"),
    "verify": ("verify", "RUN"),
}
"""Every reading command."""

ENDS: Final = {"tail", "show", "show of a step", "ledger", "ls", "status"}
"""Those that show an end of a run, or a row by its id."""


@pytest.mark.parametrize("command", READING)
def test_no_reading_command_makes_an_id_per_row(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
):
    """None of them calls `ids()` or `positions()` of a store, whose memory grows with its rows."""
    monkeypatch.chdir(tmp_path)
    with at_call(TrajectoryStore.ids) as ids, at_call(TrajectoryStore.positions) as positions:
        code = main([str(run_dir) if word == "RUN" else word for word in READING[command]])
    assert code in (0, 1), capsys.readouterr().err
    assert not [*ids, *positions], "an id per row"


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Cost]]:
    """What each command takes of runs of 10^3 and 10^6 rows."""
    folder = tmp_path_factory.mktemp("runs")
    first = made("copy_digits", folder / "first")
    measured: dict[str, dict[int, Cost]] = {name: {} for name in READING}
    for rows in (1_000, 1_000_000):
        run = prolonged(first, folder / str(rows), rows // 2)
        for name, words in READING.items():
            words = [run if word == "RUN" else folder / word if word.endswith(".html") else word for word in words]
            measured[name][rows] = rlhf(*words, tries=2 if name in ENDS else 1)
    return measured


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_memory_of_each_reading_command_at_a_million_rows(costs: dict[str, dict[int, Cost]]):
    """What shows an end needs at most 1.5 times the memory of 10^3 rows, a pass over all rows 150 MB."""
    lines = [f"{name:22} {cost[1_000]!s:>16} {cost[1_000_000]!s:>16}" for name, cost in costs.items()]
    table = "\n" + "\n".join(lines)
    for name, cost in costs.items():
        if name in ENDS:
            assert cost[1_000_000].memory <= 1.5 * cost[1_000].memory, name + table
        limit = {"report": 260e6, "verify": 200e6}.get(name, 150e6)
        assert cost[1_000_000].memory <= limit, name + table
