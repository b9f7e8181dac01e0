"""The whole step, rollout to optimizer, against TRL's GRPOTrainer: processor time per trajectory and per token.

    python benchmarks/bench_step.py                      # every case; about 12 minutes
    python benchmarks/bench_step.py --cases ragged full
    python benchmarks/bench_step.py --quick              # up to 32 tokens, two steps

One Qwen2 with random weights (4 layers, hidden 256), saved once and loaded by both; GSM8K questions as prompts; a KL
term against a frozen copy (beta 0.04); AdamW. In the case `ragged` a share of the vocabulary ends a completion, one
token in 40; in the others nothing does, so every completion has the same length.

TRL is `GRPOTrainer.train()`, one micro-batch, activations kept, nothing logged or saved. Ours is the collector (slot
engine, reference log-probs, advantage, trajectories committed to a store on disk) and the learner (read back, loss,
AdamW, ledger), which do more; both as they come. Each variant runs in a fork of its own on one thread; its first step
warms up and does not count. Memory is the most that the process held, and then how much of it was more than what the
imports of both hold, which for models of this size is most of it.

The last column is how much of our time the step's matrix products alone would take, each at the rate that a product of
its shape reaches in the same run: where it is near 1, nothing but fewer products is faster. Sampling multiplies as many
rows at once as completions are live, which is slower than the large products of learning.
"""

from __future__ import annotations

import argparse
import logging
import resource
import shutil
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _grpo import QUESTIONS, Task, run_ours, run_trl, save_checkpoint
from _models import HIDDEN, INTERMEDIATE, forked, qwen2

PROMPTS, LAYERS = 2, 4
MEMORY_GOAL = 0.4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One regime, and what it is to reach against TRL, per token."""

    vocab: int = 32_000
    limit: int = 64
    group: int = 8
    stop_share: float = 0.0
    steps: int = 2
    goal: float | None = None

    @property
    def rows(self) -> int:
        """Trajectories of a step."""
        return PROMPTS * self.group


CASES = {
    "ragged": Case(stop_share=1 / 40, steps=4, goal=4.0),
    "full": Case(goal=3.5),
    "256 tokens": Case(limit=256, steps=1, goal=3.0),
    "groups of 32": Case(group=32, stop_share=1 / 40, steps=1, goal=10.0),
    "vocabulary 4k": Case(vocab=4_096, steps=4, goal=2.2),
    "1024 tokens": Case(vocab=4_096, limit=1_024, steps=1),
    "vocabulary 152k": Case(vocab=151_936, steps=1),
}
QUICK = {"quick": Case(limit=32, stop_share=1 / 40)}


def make_task(folder: Path, questions: Path, case: Case) -> Task:
    """Save the model of a case, and return what to do with it."""
    make = partial(qwen2, case.vocab, layers=LAYERS)
    model = save_checkpoint(
        folder,
        lambda special: make(**special),
        questions=questions,
        vocab=case.vocab,
        stop_share=case.stop_share,
    )
    return Task(model=model, questions=questions, prompts=PROMPTS, group=case.group, limit=case.limit, steps=case.steps)


def measure(variant: str, task: Task) -> dict[str, float]:
    """Run a variant in this process, which nothing else has used."""
    found = run_trl(task, model_init_kwargs={"dtype": "float32"}) if variant == "trl" else run_ours(task)
    return {**found, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def matmul_rate(rows: int, wide: int, inner: int = HIDDEN) -> float:
    """Operations per processor second of float32 products `[rows, inner] @ [wide, inner].T`, the best of several."""
    import torch

    a, b = torch.randn(rows, inner), torch.randn(wide, inner)
    best = 0.0
    for _ in range(8):
        started = time.process_time()
        for _ in range(4):
            torch.mm(a, b.t())
        best = max(best, 8 * rows * wide * inner / (time.process_time() - started))
    return best


def products(case: Case, prompt: float, length: float) -> float:
    """Processor seconds of the matrix products of one of our steps; attention left out, prompts once a group."""
    kv = HIDDEN // 2
    trunk = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * kv + 3 * HIDDEN * INTERMEDIATE)
    own, prompts = case.rows * length, PROMPTS * prompt
    # Sampled token by token. Scored by the reference forward only; learned from forward and backward.
    at_once = max(1, round(own / case.limit))
    seconds = 0.0
    for rows, in_trunk, in_head in ((at_once, own, own), (512, prompts + 4 * (prompts + own), 4 * own)):
        seconds += 2 * in_trunk * trunk / matmul_rate(rows, INTERMEDIATE)
        seconds += 2 * in_head * HIDDEN * case.vocab / matmul_rate(rows, case.vocab)
    return seconds


def held_now() -> float:
    """What this process holds, in MB."""
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="JSONL with a question per line")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    import datasets  # noqa: F401
    import torch
    import torchrl.modules.llm  # noqa: F401
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOTrainer  # noqa: F401

    import rlhf_pipeline.collectors.collector
    import rlhf_pipeline.learner.learner  # noqa: F401

    logging.disable(logging.WARNING)
    disable_progress_bar()
    torch.set_num_threads(1)
    cases = QUICK if args.quick else {name: CASES[name] for name in args.cases}
    folder = Path(tempfile.mkdtemp())
    missed = False
    try:
        imports = held_now()
        print(f"large matrix products: {matmul_rate(1024, 1024, 1024) / 1e9:.0f} GFLOP a second of processor time")
        print(f"the imports of both hold {imports:.0f} MB")
        print(
            f"{'':16} {'rows':>5} {'tokens each':>16} {'cpu s a step':>16} {'ms a token':>14} {'x TRL':>15} "
            f"{'memory, MB':>13} {'x TRL':>6} {'of it more':>12} {'x TRL':>6} {'products':>9}"
        )
        print(f"{'':22} {'TRL':>8}{'ours':>8} {'TRL':>8}{'ours':>8} {'TRL':>7}{'ours':>7} {'row':>7}{'token':>8}")
        for name, case in cases.items():
            task = make_task(folder, args.questions, case)
            trl, ours = (forked(measure, variant, task) for variant in ("trl", "ours"))
            each = [1e3 * run["seconds"] / (case.rows * run["length"]) for run in (trl, ours)]
            per_row, per_token = trl["seconds"] / ours["seconds"], each[0] / each[1]
            more = [run["memory"] - imports for run in (trl, ours)]
            whole, memory = ours["memory"] / trl["memory"], more[1] / more[0]
            share = products(case, ours["prompt"], ours["length"]) / ours["seconds"]
            print(
                f"{name:16} {case.rows:5} {trl['length']:8.1f}{ours['length']:8.1f} "
                f"{trl['seconds']:8.2f}{ours['seconds']:8.2f} {each[0]:7.2f}{each[1]:7.2f} "
                f"{per_row:7.2f}{per_token:8.2f} {trl['memory']:6.0f}{ours['memory']:7.0f} {whole:6.2f} "
                f"{more[0]:5.0f}{more[1]:7.0f} {memory:6.2f} {share:9.2f}",
                flush=True,
            )
            if case.goal is not None and not args.quick:
                met = per_token >= case.goal and memory <= MEMORY_GOAL
                missed |= not met
                goal = f"goal {case.goal:g}x, memory beyond the imports {MEMORY_GOAL:g}x"
                print(f"{'':16} {goal}: {'met' if met else 'MISSED'}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not args.quick:
        print("some goal missed" if missed else "all goals met")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
