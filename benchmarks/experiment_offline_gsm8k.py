"""Does learning from graded solutions alone carry over to questions that were never seen?

`example_model_solutions.jsonl` of GSM8K has four graded solutions for each of 1,319 questions. The questions are split
at random into 1,000 to learn from and 319 held out. The first part is imported into a store and learned from with
`replay_stores`, 50 steps, by a small model made from scratch. Before and after, the policy scores all solutions of the
held-out questions. The margin of a question that has both is

    mean over its correct solutions of the log-prob  -  the same over its incorrect ones

of the completion's tokens given the question, per token or summed over the completion. The change of the margin is
paired by question, with its standard error over questions; and `rising` is the share of questions whose margin rose.

    python benchmarks/experiment_offline_gsm8k.py --keep FOLDER    # five seeds: model, split and batches; some minutes
    python benchmarks/experiment_offline_gsm8k.py --keep FOLDER --save    # and writes results/
    python benchmarks/experiment_offline_gsm8k.py --markdown    # the table of the committed results, and no more
    python benchmarks/experiment_offline_gsm8k.py --quick       # one seed
    python benchmarks/experiment_offline_gsm8k.py --set loss.aggregation=sequence_mean --steps 100

A control with the rewards of each question permuted among its solutions shows what the procedure gives by itself. What
is finished is a file in the folder of --keep, and is not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from experiment_replay import interval

from rlhf_pipeline import CausalLMPolicy, TrajectoryStorage, definitions
from rlhf_pipeline.exchange import import_files
from rlhf_pipeline.policies.new_model import new_model
from rlhf_pipeline.run.checkpoint import list_checkpoints
from rlhf_pipeline.run.start import run

DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "gsm8k"
RESULTS = Path(__file__).with_name("results") / "experiment_offline_gsm8k.json"
SETTINGS = (
    ("learn.lr", "3e-3"),
    ("learn.steps", "50"),
    ("replay.epochs", "none"),
    ("loss.aggregation", "token_mean"),
    ("write.estimator", "grpo"),
    ("sample.batch_size", "128"),
    ("learn.checkpoint_every", "1000"),
)
HELD_OUT = 319


@dataclass(frozen=True, kw_only=True)
class Change:
    """Of the margin, on questions that have correct and incorrect solutions.

    Attributes:
        before: mean margin over questions, in nats.
        after: the same after the steps.
        error: standard error of the mean change over questions.
        rising: share of questions whose margin rose.
        questions: how many.
    """

    before: float
    after: float
    error: float
    rising: float
    questions: int

    @property
    def change(self) -> float:
        """After minus before."""
        return self.after - self.before

    @property
    def t(self) -> float:
        """The change in standard errors."""
        return self.change / self.error


def prepare(folder: Path, *, seed: int, permute: bool = False, questions: int = 1000, hidden: int = 64) -> None:
    """Make the model, and the stores of the two parts of the questions.

    Args:
        folder: where to.
        seed: of the model's weights and of the split.
        permute: give the grades of each question to its solutions at random, in the part that is learned from.
        questions: that are learned from.
        hidden: size of the model.
    """
    new_model(
        folder / "model", text_file=DATA / "train.jsonl", vocab_size=2048, hidden_size=hidden, num_layers=2, seed=seed
    )
    text = (DATA / "example_model_solutions.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert len({row["question"] for row in rows}) == len(rows)
    rng = random.Random(f"split {seed}")
    rng.shuffle(rows)
    parts = {"held-out": rows[:HELD_OUT], "learned": rows[HELD_OUT : HELD_OUT + questions]}
    if permute:
        for row in parts["learned"]:
            solutions = [value for value in row.values() if isinstance(value, dict)]
            grades = [solution["is_correct"] for solution in solutions]
            rng.shuffle(grades)
            for solution, grade in zip(solutions, grades, strict=True):
                solution["is_correct"] = grade
    for name, part in parts.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        import_files([file], folder / name, tokenizer=str(folder / "model"))


def learn(folder: Path, *, seed: int, settings: tuple[tuple[str, str], ...] = SETTINGS) -> Path:
    """Learn from the store `learned`, and return the checkpoint."""
    overrides = (
        ("policy.path", str(folder / "model")),
        ("replay.stores", str(folder / "learned")),
        *settings,
    )
    definition = definitions.find("offline_replay")
    run(
        definition.pipeline(overrides),
        run_dir=folder / "run",
        seed=seed,
        definition=definition.name,
        overrides=overrides,
    )
    return list_checkpoints(folder / "run" / "checkpoints")[-1]


def log_probs(model: Path, store: Path) -> dict[str, np.ndarray]:
    """Score the completions of a store: `sum` and `num` of their tokens, `reward` and `group` of each."""
    policy = CausalLMPolicy.from_pretrained(model)
    storage = TrajectoryStorage(store, mode="r")
    ids = storage.store.ids()
    ids = ids[np.argsort(storage.store.lengths("input_ids", ids), kind="stable")]
    sums, counts = [], []
    with torch.no_grad():
        for first in range(0, len(ids), 64):
            batch: Any = storage.read(row_ids=ids[first : first + 64])
            mask = batch["masks", "all_assistant_mask"]
            found = policy.log_probs(batch["tokens", "full"], batch["masks", "all_attention_mask"], mask)
            sums.append((found.double() * mask).sum(1))
            counts.append(mask.sum(1))
    scores = {"sum": torch.cat(sums).numpy(), "num": torch.cat(counts).numpy()}
    scores["reward"] = storage.store.read_scalars("task_reward", ids)
    scores["group"] = storage.store.read_scalars("group_id", ids)
    storage.close()
    return scores


def margins(scores: dict[str, np.ndarray], values: np.ndarray) -> np.ndarray:
    """Return the margin of each question that has both kinds of solutions, in the order of the questions."""
    found = []
    for group in np.unique(scores["group"]):
        inside = scores["group"] == group
        right = scores["reward"][inside] > 0.5
        if right.any() and not right.all():
            found.append(values[inside][right].mean() - values[inside][~right].mean())
    return np.asarray(found)


def change(before: dict[str, np.ndarray], after: dict[str, np.ndarray], *, per_token: bool) -> Change:
    """Compare two scorings of one store."""
    old, new = (margins(s, s["sum"] / s["num"] if per_token else s["sum"]) for s in (before, after))
    moved = new - old
    return Change(
        before=float(old.mean()),
        after=float(new.mean()),
        error=float(moved.std(ddof=1) / np.sqrt(len(moved))),
        rising=float((moved > 0).mean()),
        questions=len(moved),
    )


def experiment(folder: Path, *, seed: int, permute: bool, settings: tuple[tuple[str, str], ...]) -> dict[str, Change]:
    """One seed: prepare, score, learn, score again; the changes on held-out and on learned questions."""
    prepare(folder, seed=seed, permute=permute)
    stores = {"held-out": folder / "held-out", "learned": folder / "learned"}
    before = {name: log_probs(folder / "model", store) for name, store in stores.items()}
    checkpoint = learn(folder, seed=seed, settings=settings)
    after = {name: log_probs(checkpoint, store) for name, store in stores.items()}
    changes: dict[str, Change] = {}
    for name in stores:
        changes[f"{name}, per token"] = change(before[name], after[name], per_token=True)
        changes[f"{name}, per sequence"] = change(before[name], after[name], per_token=False)
    return changes


def kept(folder: Path | None, *, seed: int, permute: bool, settings: tuple[tuple[str, str], ...]) -> dict[str, Change]:
    """Return what is in the folder of those that are finished; else find it out, and keep it there."""
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    file = folder and folder / f"seed{seed}-{'permuted' if permute else 'true'}-{digest}.json"
    if file is not None and file.exists():
        return {name: Change(**one) for name, one in json.loads(file.read_text(encoding="utf-8")).items()}
    with tempfile.TemporaryDirectory() as work:
        found = experiment(Path(work), seed=seed, permute=permute, settings=settings)
    if file is not None:
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({name: dataclasses.asdict(one) for name, one in found.items()}) + "\n")
        partial.replace(file)
    return found


def markdown(results: dict[str, Any]) -> list[str]:
    """Return the table that benchmarks/README.md prints: means over the seeds with 95 % intervals."""
    runs: dict[str, list[dict[str, Change]]] = {
        grades: [{name: Change(**one) for name, one in seed.items()} for seed in seeds]
        for grades, seeds in results["runs"].items()
    }
    lines = [
        "| questions | grades | margin per token, nats | margin per sequence, nats "
        "| questions with an increased margin per token |",
        "|---|---|---|---|---|",
    ]
    for questions in ("held-out", "learned"):
        changes = {
            (grades, per): [seed[f"{questions}, per {per}"].change for seed in seeds]
            for grades, seeds in runs.items()
            for per in ("token", "sequence")
        }
        rows = {grades: [changes[grades, per] for per in ("token", "sequence")] for grades in runs}
        if questions == "held-out":  # the learned ones have other grades
            rows["true minus permuted"] = [
                [true - other for true, other in zip(changes["true", per], changes["permuted", per], strict=True)]
                for per in ("token", "sequence")
            ]
        for grades, (token, sequence) in rows.items():
            rising = ""
            if grades in runs:
                rising = f"{statistics.fmean(seed[f'{questions}, per token'].rising for seed in runs[grades]):.0%}"
            cells = ("{:+.4f} ± {:.4f}".format(*interval(token)), "{:+.1f} ± {:.1f}".format(*interval(sequence)))
            lines.append(f"| {questions} | {grades} | {cells[0]} | {cells[1]} | {rising} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, no control")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", dest="more", action="append", default=[], metavar="KEY.PATH=VALUE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what is finished here, and use what is there")
    parser.add_argument("--markdown", action="store_true", help="print the table of the committed results")
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULTS.name}")
    args = parser.parse_args()
    if args.markdown:
        print("\n".join(markdown(json.loads(RESULTS.read_text(encoding="utf-8")))))
        return
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    typed = [tuple(text.split("=", 1)) for text in args.more]
    settings: Any = tuple({**dict(SETTINGS), "learn.steps": str(args.steps), **dict(typed)}.items())
    print(", ".join(f"{name}={value}" for name, value in settings))
    names = f"{'seed':>4}  {'grades':<9} {'questions':<22} {'before':>9} {'after':>9} {'change':>9}"
    print(f"{names} {'s.e.':>7} {'t':>6} {'rising':>7}")
    collected: dict[str, list[dict[str, Change]]] = {}
    for seed in range(1 if args.quick else args.seeds):
        for permute in (False,) if args.quick else (False, True):
            started = time.perf_counter()
            found = kept(args.keep, seed=seed, permute=permute, settings=settings)
            grades = "permuted" if permute else "true"
            collected.setdefault(grades, []).append(found)
            for name, item in found.items():
                print(
                    f"{seed:>4}  {grades:<9} {name:<22} {item.before:>9.4f} {item.after:>9.4f} {item.change:>+9.4f} "
                    f"{item.error:>7.4f} {item.t:>+6.1f} {item.rising:>7.0%}",
                    flush=True,
                )
            both = ", ".join(f"{found[f'{name}, per token'].questions} {name}" for name in ("held-out", "learned"))
            print(f"      questions with both kinds: {both}; {time.perf_counter() - started:.0f} s", flush=True)
    if args.quick:
        return
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "settings": dict(settings),
        "seeds": args.seeds,
        "runs": {
            grades: [{name: dataclasses.asdict(one) for name, one in seed.items()} for seed in seeds]
            for grades, seeds in collected.items()
        },
    }
    print("\n".join(markdown(results)))
    if args.save:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
