"""How much of this project one optimizer step passes through: what a reader has to know to follow a trajectory.

A comprehension belongs to the function that it is written in: from Python 3.12 on it has no frame of its own.
`python -m tests.rlhf_pipeline.test_one_step [FIELD=VALUE...]` prints the files and functions.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import rlhf_pipeline
import trajectory_store
from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.definitions import find
from rlhf_pipeline.run.build import build_models, build_parts
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.loop import Loop
from rlhf_pipeline.run.record import Setup
from rlhf_pipeline.run.signals import StopRequest
from rlhf_pipeline.run.sources import LocalRollouts
from trajectory_store.file_access import choose

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (rlhf_pipeline, trajectory_store))


@contextmanager
def calls_of_the_project() -> Iterator[Counter[CodeType]]:
    """Count the calls of each function of the project while the block runs."""
    parts = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
    found: Counter[CodeType] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES) and code.co_name not in parts:
            found[code] += 1

    before = sys.getprofile()
    gc.collect()  # what earlier work left behind is not finalised within the step
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)


def one_step(pipeline: Pipeline, folder: Path) -> Counter[CodeType]:
    """Run a pipeline for two steps, and for a third one count what it calls from the rollout to the line of metrics."""
    run = RunFolder(folder)
    run.path.mkdir()
    setup = Setup(pipeline=pipeline)
    run.record.write(setup)
    models = build_models(pipeline, seed=0, device="cpu")
    with build_parts(pipeline, models, run=run, seed=0) as parts:
        source = LocalRollouts(pipeline, parts, lambda event: None)
        loop = Loop(setup, run, parts.learner, source, stop=StopRequest(), on_event=lambda event: None)
        loop.run()
        with calls_of_the_project() as found:
            batch = source.next(pipeline.learn.steps + 1, loop.stop)
            assert batch is not None
            loop._step(batch)
    return found


def figures(found: Counter[CodeType]) -> tuple[int, int]:
    """Return how many files and how many functions were entered."""
    return len({code.co_filename for code in found}), len(found)


@pytest.mark.parametrize(
    ("changes", "files", "functions"),
    [
        pytest.param({}, 80, 558, id="default"),
        pytest.param({"write.kl_coef": "0.05"}, 85, 588, id="kl_in_the_reward"),
    ],
)
def test_a_step_stays_within_its_bounds(changes: dict[str, str], files: int, functions: int, tmp_path: Path):
    """One rollout and one optimizer step of copy_digits enter at most so many files and functions of this project.

    One file and three functions of these only where a reward call has to be waited for. Where a store's files are read
    instead of mapped, as in memory, one file and up to 15 functions more do that.
    """
    more = (1, 15) if choose(tmp_path) == "pread" else (0, 0)
    found = figures(one_step(_copy_digits(changes), tmp_path / "run"))
    assert found[0] <= files + more[0]
    assert found[1] <= functions + more[1]


def _copy_digits(changes: dict[str, str]) -> Pipeline:
    return find("copy_digits").pipeline([("learn.steps", "2"), *changes.items()])


def listed(found: Counter[CodeType]) -> str:
    """Return the functions by file, each with the number of its calls."""
    by_file: dict[str, list[tuple[int, CodeType]]] = {}
    for code, times in found.items():
        by_file.setdefault(code.co_filename, []).append((times, code))
    lines: list[str] = []
    for name, functions in sorted(by_file.items()):
        lines.append(f"{name.removeprefix(f'{ROOT}/')}: {len(functions)}")
        in_order = sorted(functions, key=lambda each: each[1].co_firstlineno)
        lines += [f"    {times:6} {code.co_qualname}:{code.co_firstlineno}" for times, code in in_order]
    files, functions = figures(found)
    return "\n".join([*lines, f"{files} files, {functions} functions", ""])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        changed = dict(each.split("=", 1) for each in sys.argv[1:])
        sys.stdout.write(listed(one_step(_copy_digits(changed), Path(made) / "run")))
