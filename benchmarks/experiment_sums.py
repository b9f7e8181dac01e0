"""Does a real chat model learn on a CPU, and is a run that was killed the same? `pipelines/sums.py`, an experiment.

    python benchmarks/experiment_sums.py --runs FOLDER            # three seeds, then seed 0 again with five kills
    python benchmarks/experiment_sums.py --runs FOLDER --save     # the same, and writes results/sums.json
    python benchmarks/experiment_sums.py --markdown               # the tables of the committed results, and no more

Each run is `rlhf-pipeline run sums --seed N`. Its accuracy is the share of 64 held-out sums that it has right, sampled
as good as greedily, before the first step, half way and at the end; accuracies, completions and times are read from the
run's own evaluations and metrics. The run of the kills gets SIGKILL at a random moment after each of five steps drawn
from the seed, and is resumed by the same command; what counts is whether the weights of its last step are those of the
run that nobody killed, byte for byte.

Whatever is cut, the command started again goes on: a run resumes from its checkpoint, a kill that was done is kept
beside the run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_pipeline.run.rows import StepRows

RESULTS = Path(__file__).with_name("results") / "sums.json"
SEEDS, STEPS, KILLS, SHOWN = (0, 1, 2), 40, 5, 8


def command_of(run: Path, seed: int, more: Sequence[str] = (), *, pipeline: str = "sums") -> list[str]:
    """Return the command that starts a run, or goes on with it; `more` are its other options."""
    words = ["run", pipeline, "--seed", str(seed), "--out", str(run), *more]
    resume = ["--resume"] if (run / "config.json").exists() else []
    return [sys.executable, "-m", "rlhf_pipeline", *words, *resume]


def steps_of(run: Path, since: float = 0.0) -> int:
    """Return the last step that a run has taken since a time; 0 if there is none."""
    return max((row["step"] for row in StepRows(run / "metrics.jsonl") if row["time"] >= since), default=0)


def kill_and_resume(run: Path, seed: int, *, steps: int, kills: int, more: Sequence[str] = ()) -> list[int]:
    """Run to the end of `steps` through `kills` kills; the steps that they came after."""
    noted = run.with_name(f"{run.name}.kills.json")
    done: list[int] = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else []
    chance = random.Random(f"kills {seed}")
    # One in each part of the run, so that some are soon after a checkpoint and some before the next.
    points = [part * steps // kills + chance.randint(1, steps // kills - 1) for part in range(kills)]
    moments = [chance.random() for _ in points]
    for point, moment in [*zip(points, moments, strict=True)][len(done) :]:
        started = time.time()
        with subprocess.Popen(command_of(run, seed, more)) as process:
            while process.poll() is None and steps_of(run, started) < point:
                time.sleep(0.2)
            took = [row["rollout_s"] + row["update_s"] for row in StepRows(run / "metrics.jsonl")]
            time.sleep(moment * statistics.median(took or [0.0]))
            if process.poll() is not None:
                raise SystemExit(f"{run} ended with {process.returncode} before its kill after step {point}")
            process.kill()
        done.append(steps_of(run))
        noted.write_text(json.dumps(done) + "\n", encoding="utf-8")
    subprocess.run(command_of(run, seed, more), check=True)
    return done


def weights_of(run: Path) -> tuple[str, str]:
    """Return the name of a run's newest checkpoint, and the SHA-256 of its weights."""
    newest = max((run / "checkpoints").iterdir())
    digest = hashlib.sha256()
    for file in sorted(newest.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return newest.name, digest.hexdigest()


def made_on() -> dict[str, Any]:
    """Return the day, the machine and the libraries of results."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "host": {"processors": os.cpu_count(), "machine": platform.machine(), "load": round(os.getloadavg()[0], 1)},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }


def evaluations_of(run: Path, figure: str) -> dict[str, float]:
    """Return a figure of a run's evaluations by step, from its evaluation store."""
    from rlhf_pipeline.report.query import View

    with contextlib.closing(View(run)) as view:
        (found,) = view.evaluations()
    return {str(step): value for step, value in zip(found["step"], found["values"][figure], strict=True)}


def completions_of(run: Path, count: int) -> list[dict[str, str]]:
    """Return the first held-out questions, and what was said before the first step and after the last."""
    from trajectory_store import TrajectoryStore

    (folder,) = (run / "evaluations").iterdir()
    with TrajectoryStore.open(folder) as store:
        rows = store.read(store.ids(), ["policy_version", "prompt", "completion"])
    said: dict[str, dict[int, str]] = {}
    for step, prompt, completion in zip(*rows.values(), strict=True):
        said.setdefault(prompt, {})[int(step)] = completion
    last = max(map(int, rows["policy_version"]))
    return [
        {"question": "".join(re.findall(r"What is \d+ \+ \d+\?", prompt)), "before": of[0], "after": of[last]}
        for prompt, of in [*said.items()][:count]
    ]


def seconds_of(run: Path) -> float:
    """Return the median time of a step."""
    return statistics.median(row["rollout_s"] + row["update_s"] for row in StepRows(run / "metrics.jsonl"))


def found_by(runs: Path) -> dict[str, Any]:
    """Return what the runs in a folder show, of those seeds that are finished."""
    finished = [seed for seed in SEEDS if (runs / f"sums-{seed}" / "report.html").exists()]
    of_seed = {
        str(seed): {
            "accuracy": evaluations_of(run, "evaluation/reward"),
            "steps": steps_of(run),
            "median seconds of a step": round(seconds_of(run), 1),
            "weights": weights_of(run)[1],
        }
        for seed in finished
        for run in [runs / f"sums-{seed}"]
    }
    found: dict[str, Any] = {
        **made_on(),
        "held-out sums": 64,
        "seeds": of_seed,
    }
    if 0 in finished:
        found["completions of seed 0"] = completions_of(runs / "sums-0", SHOWN)
    killed = runs / "sums-0-killed"
    if (killed / "report.html").exists() and 0 in finished:
        kills = json.loads(killed.with_name(f"{killed.name}.kills.json").read_text(encoding="utf-8"))
        weights = weights_of(killed)[1]
        found["seed 0 killed"] = {"after steps": kills, "weights": weights, "equal": weights == of_seed["0"]["weights"]}
    return found


def markdown(found: dict[str, Any]) -> list[str]:
    """Return the lines that the README prints: the accuracies of the seeds, and completions before and after."""
    steps = [int(step) for step in next(iter(found["seeds"].values()))["accuracy"]]
    lines = [f"| held-out accuracy | {' | '.join(f'step {step}' for step in steps)} |", "|---" * (len(steps) + 1) + "|"]
    for seed, one in found["seeds"].items():
        lines.append(f"| seed {seed} | {' | '.join(f'{value:.2f}' for value in one['accuracy'].values())} |")
    if "completions of seed 0" not in found:
        return lines
    lines += ["", "| held-out question | before | after |", "|---|---|---|"]
    for one in found["completions of seed 0"]:
        lines.append("| " + " | ".join(_in_a_cell(one[name]) for name in ("question", "before", "after")) + " |")
    return lines


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("<|im_end|>", "").split()).replace("|", "\\|")


def main() -> None:
    """Run what is not finished, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where the runs are")
    parser.add_argument("--only", help="run one alone: a seed, or `killed`; `none` only reads those there are")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the committed results")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name} of the results")
    args = parser.parse_args()
    if args.markdown:
        print("\n".join(markdown(json.loads(RESULTS.read_text(encoding="utf-8")))))
        return
    args.runs.mkdir(parents=True, exist_ok=True)
    for name in [args.only] if args.only else [*map(str, SEEDS), "killed"]:
        if name == "killed":
            kill_and_resume(args.runs / "sums-0-killed", 0, steps=STEPS, kills=KILLS)
        elif name != "none":
            subprocess.run(command_of(args.runs / f"sums-{name}", int(name)), check=True)
    found = found_by(args.runs)
    print("\n".join(markdown(found)))
    print(json.dumps({name: value for name, value in found.items() if name != "completions of seed 0"}, indent=1))
    if args.save:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
