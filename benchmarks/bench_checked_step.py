"""What it costs a step that nothing is learned from unchecked: processor time of the comparisons as a part of a step's.

    python -m benchmarks.bench_checked_step [--steps N]

Two runs as a person starts them: copy_digits, and the gsm8k definition with a model of `rlhf-pipeline new-model`. In
every step the rows that arrived are compared with their checksums before any is chosen, and batches are read checked.
The cost is the whole of the first, and of the second the difference to the same read without its checks, which is done
beside it, before and after in turns. Processor time of one thread, so a busy machine does not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pipeline import Pipeline, PretrainedPolicy, definitions
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.config_text import override_all
from rlhf_pipeline.policies.new_model import new_model
from rlhf_pipeline.run.events import Event, StepDone
from rlhf_pipeline.run.start import run
from trajectory_store.reads import StoreReads

GOAL = 0.03
WARM = 2
"""Steps that do not count: the first calls of everything."""


class Clock:
    """Processor time of steps, of their comparisons, and of what is done only to measure them."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self._checks = self._beside = 0.0
        self._reads = 0
        self._began = time.process_time()

    def checked(self, new: Callable[..., None]) -> Callable[..., None]:
        """Count a call as a comparison."""

        def timed(*args: Any, **options: Any) -> None:
            began = time.process_time()
            new(*args, **options)
            self._checks += time.process_time() - began

        return timed

    def paired(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Do a checked read without its checks, too."""

        def timed(*args: Any, checked: bool = False, **options: Any) -> Any:
            if not checked:
                return read(*args, checked=False, **options)
            self._reads += 1
            spent, found = {}, None
            for checks in (True, False) if self._reads % 2 else (False, True):
                began = time.process_time()
                batch = read(*args, checked=checks, **options)
                spent[checks] = time.process_time() - began
                found = batch if checks else found
            self._checks += spent[True] - spent[False]
            self._beside += spent[False]
            return found

        return timed

    def hear(self, event: Event) -> None:
        """End a step."""
        if isinstance(event, StepDone):
            now = time.process_time()
            self.steps.append((now - self._began - self._beside, self._checks))
            self._checks = self._beside = 0.0
            self._began = time.process_time()


def copy_digits(_: Path) -> Pipeline:
    """As it is."""
    return definitions.find("copy_digits").pipeline([])


def gsm8k(folder: Path) -> Pipeline:
    """Made-up questions, and a model of `new-model`; its tokenizer is trained on them."""
    rng, file = np.random.default_rng(0), folder / "train.jsonl"
    sums = [rng.integers(2, 90, 2).tolist() for _ in range(512)]
    words = "Tom has {} apples and buys {} more at the shop on the corner. How many apples has Tom now?"
    rows = [{"question": words.format(a, b), "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in sums]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    new_model(folder / "model", text_file=file)
    found = definitions.find("pipelines/gsm8k.py").pipeline([("prompts.path", str(file))])
    return dataclasses.replace(found, policy=PretrainedPolicy(path=str(folder / "model")))


CASES = {"copy_digits": copy_digits, "gsm8k": gsm8k}


def measured(pipeline: Pipeline, folder: Path, steps: int) -> tuple[float, float, float]:
    """Return the share of the comparisons in all steps, and of the median step its time and theirs."""
    clock = Clock()
    pipeline = override_all(pipeline, [("learn.steps", str(steps + WARM)), ("learn.stop_at_reward", "none")])
    new, read = TrajectoryStorage.check_new, StoreReads.read_padded
    TrajectoryStorage.check_new, StoreReads.read_padded = clock.checked(new), clock.paired(read)
    try:
        run(pipeline, run_dir=folder, on_event=clock.hear)
    finally:
        TrajectoryStorage.check_new, StoreReads.read_padded = new, read
    whole, checks = np.array(clock.steps[WARM:]).T
    return float(checks.sum() / whole.sum()), float(np.median(whole)), float(np.median(checks))


def main() -> int:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    missed = 0
    for name in args.cases or CASES:
        with tempfile.TemporaryDirectory() as place:
            share, whole, checks = measured(CASES[name](Path(place)), Path(place) / "run", args.steps)
        ok = share <= GOAL
        missed += not ok
        print(
            f"{name:<12} {1e3 * whole:9.1f} ms a step, of which {1e3 * checks:6.2f} ms for checks: {share:.2%} of all"
            f" (at most {GOAL:.0%}){'' if ok else '  MISSED'}"
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
