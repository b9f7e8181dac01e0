"""GSM8K with a real chat model on a CPU, as far as it goes: `SmolLM2-135M-Instruct`, an experiment.

    python benchmarks/experiment_gsm8k.py --runs FOLDER              # 40 steps; started again, it goes on where it was
    python benchmarks/experiment_gsm8k.py --runs FOLDER --steps 10
    python benchmarks/experiment_gsm8k.py --runs FOLDER --only-read --save   # saves the figures so far in results/
    python benchmarks/experiment_gsm8k.py --markdown                 # the table of the committed results, and no more

GRPO with the model's own chat template and two rewards: that the final number is right, and, at a tenth of it, that the
answer ends with `####` and a number, as it was asked for. The last 200 questions of `train.jsonl` are held out and
answered greedily before the first step, and every 20 steps. Needs the packages that `pipelines/sums.py` needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlhf_pipeline import (
    GRPO,
    Collect,
    Evaluate,
    Learn,
    Matches,
    Pipeline,
    PretrainedPolicy,
    Prompts,
    Reward,
    WritePath,
    definitions,
    final_number_match,
)

DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "gsm8k"
RESULTS = Path(__file__).with_name("results") / "experiment_gsm8k.json"
HELD_OUT, SEED = 200, 0
ASKED = "Solve the problem step by step. End with #### and the number."


def gsm8k_smollm2() -> Pipeline:
    """GRPO on questions of `train.jsonl`, evaluated on those of `held_out.jsonl`; both files are made by this one."""
    model = definitions.find("sums").pipeline().policy
    assert isinstance(model, PretrainedPolicy)
    return Pipeline(
        name="gsm8k_smollm2",
        description="SmolLM2-135M on grade-school maths: correct final numbers and the requested format",
        policy=model,
        prompts=Prompts(path="train.jsonl", system=ASKED),
        reward=(
            Reward(final_number_match, name="answer"),
            Reward(Matches(pattern=r"####\s*-?\$?[\d,.]+\s*\Z"), weight=0.1, name="format"),
        ),
        collect=Collect(prompts_per_rollout=4, group_size=8, max_new_tokens=128, num_slots=64),
        write=WritePath(estimator="grpo"),
        loss=GRPO(clip_low=0.2, clip_high=0.28),
        evaluate=Evaluate(
            prompts=Prompts(path="held_out.jsonl", system=ASKED),
            every=20,
            num_prompts=HELD_OUT,
            group_size=1,
            temperature=0.01,
            success="answer",
        ),
        learn=Learn(steps=40, lr=2e-5, warmup_steps=2, token_budget=8192, checkpoint_every=2),
    )


def command_of(runs: Path, steps: int) -> list[str]:
    """Return the command that starts the run, or goes on with it; the files of its questions are made before."""
    lines = (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    run, sets = runs / "gsm8k", []
    for name, field, part in (("train", "", lines[:-HELD_OUT]), ("held_out", "evaluate.", lines[-HELD_OUT:])):
        file = runs / f"{name}.jsonl"
        if not file.exists():
            file.write_text("".join(part), encoding="utf-8")
        sets += ["--set", f"{field}prompts.path={file.resolve()}"]
    resume = ["--resume"] if (run / "config.json").exists() else []
    words = ["run", f"{Path(__file__).resolve()}:gsm8k_smollm2", "--out", str(run), "--seed", str(SEED)]
    words += ["--steps", str(steps), *sets]
    return [sys.executable, "-m", "rlhf_pipeline", *words, *resume]


def found_by(run: Path) -> dict[str, Any]:
    """Return what a run shows so far: its steps, what they took, its rewards, and its evaluations by step."""
    from rlhf_pipeline.report.query import View
    from rlhf_pipeline.run.rows import StepRows

    rows = [*StepRows(run / "metrics.jsonl")]
    with contextlib.closing(View(run)) as view:
        (found,) = view.evaluations()
    names = ("evaluation/reward/answer", "evaluation/reward/format", "evaluation/cut_off")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "host": {"processors": os.cpu_count(), "machine": platform.machine(), "load": round(os.getloadavg()[0], 1)},
        "seed": SEED,
        "held-out questions": HELD_OUT,
        "steps": rows[-1]["step"],
        "median seconds of a rollout": round(statistics.median(row["rollout_s"] for row in rows), 1),
        "median seconds of an update": round(statistics.median(row["update_s"] for row in rows), 1),
        "reward": [round(row["task_reward"], 4) for row in rows],
        "held out": {
            str(step): {name.removeprefix("evaluation/"): found["values"][name][at] for name in names}
            for at, step in enumerate(found["step"])
        },
    }


def markdown(found: dict[str, Any]) -> list[str]:
    """Return the table that benchmarks/README.md prints: what is right of the held-out questions, by step."""
    lines = ["| step | correct final number | requested format | cut off |", "|---|---|---|---|"]
    for step, values in found["held out"].items():
        cells = (values["reward/answer"], values["reward/format"], values["cut_off"])
        lines.append(f"| {step} | {' | '.join(f'{value:.3f}' for value in cells)} |")
    return lines


def main() -> None:
    """Run to the last step, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where the run is")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only-read", action="store_true", help="run nothing")
    parser.add_argument("--markdown", action="store_true", help="print the table of the committed results")
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULTS.name}")
    args = parser.parse_args()
    if args.markdown:
        print("\n".join(markdown(json.loads(RESULTS.read_text(encoding="utf-8")))))
        return
    args.runs.mkdir(parents=True, exist_ok=True)
    if not args.only_read:
        subprocess.run(command_of(args.runs, args.steps), check=True)
    found = found_by(args.runs / "gsm8k")
    print(json.dumps(found, indent=1))
    if args.save:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
