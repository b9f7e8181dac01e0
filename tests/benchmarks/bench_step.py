"""The whole step, rollout to optimizer, against TRL's GRPOTrainer: trajectories per second of processor time.

    python tests/benchmarks/bench_step.py            # up to 64 and up to 256 new tokens; under 4 minutes
    python tests/benchmarks/bench_step.py --quick    # up to 32 tokens, two steps

One Qwen2 with random weights (4 layers, hidden 256, vocabulary 32,000), saved once and loaded by both; GSM8K questions
as prompts; 2 prompts x 8 completions a step; a KL term against a frozen copy (beta 0.04); AdamW. Completions stop
raggedly: a share of the vocabulary ends one, 1 token in 40 at the limit of 64 and 1 in 100 at 256.

TRL is `GRPOTrainer.train()`, one micro-batch of 16, activations kept, nothing logged or saved. Ours is the collector
(slot engine, reference log-probs, advantage, trajectories committed to a store on disk) and the learner (read back,
loss, AdamW, ledger), which do more. Each variant runs in a fork of its own on one thread; its first step warms up and
does not count.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import shutil
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in (".", "storage", "tests/benchmarks")]

QUESTIONS = ROOT / ".." / "shared" / "data" / "gsm8k" / "train.jsonl"
PROMPTS, GROUP, VOCABULARY, BETA = 2, 8, 32_000, 0.04
GOAL = 3.0


def reward(prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]) -> float:
    """0 or 1 by a checksum of the completion: costs nothing and differs inside a group."""
    return float(zlib.crc32(completion.encode()) & 1)


def trl_reward(completions: list[str], **columns: Any) -> list[float]:
    """The same, as TRL asks for it."""
    return [reward("", completion, None, {}) for completion in completions]


def make_checkpoint(folder: Path, stop_share: float) -> None:
    """A model whose first tokens, a share of the vocabulary, end a completion."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from rlhf_pipeline.policies.new_model import new_model

    small = folder / "tokenizer"
    if not small.exists():
        new_model(small, text_file=QUESTIONS, vocab_size=4096, hidden_size=8, num_layers=1, num_heads=1)
    tokenizer = AutoTokenizer.from_pretrained(small)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = Qwen2ForCausalLM(config)
    # Ids above the tokenizer's own, so that no prompt contains one.
    ends = [tokenizer.eos_token_id, *range(VOCABULARY - round(stop_share * VOCABULARY), VOCABULARY)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, do_sample=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def run_trl(folder: Path, limit: int, steps: int) -> dict[str, float]:
    """`GRPOTrainer.train()`; processor seconds per step after the first."""
    import _trl
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

    ends: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.process_time())

    def graded(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return trl_reward(completions)

    with QUESTIONS.open(encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in lines]
    trainer = _trl.trainer(
        str(folder / "model"),
        AutoTokenizer.from_pretrained(folder / "model"),
        prompts=questions[: PROMPTS * (steps + 1)],
        batch=PROMPTS * GROUP,
        group=GROUP,
        max_new_tokens=limit,
        steps=steps + 1,
        reward=graded,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer.add_callback(Clock())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return {"seconds": (ends[-1] - ends[0]) / steps, "length": sum(lengths) / len(lengths)}


def run_ours(folder: Path, limit: int, steps: int, layout: str) -> dict[str, float]:
    """Collector and learner; processor seconds per step after the first."""
    import torch
    from torchrl.envs.transforms import Compose

    from rlhf_pipeline import (
        CausalLMPolicy,
        Collect,
        Collector,
        GRPOLoss,
        JsonlPrompts,
        Learn,
        MCAdvantage,
        RetrieveLogProb,
        TrajectoryReplayBuffer,
    )
    from rlhf_pipeline.learner.learner import Learner
    from rlhf_pipeline.run.ledger import Ledger

    sampling: dict[str, Any] = {"max_new_tokens": limit, "num_slots": PROMPTS * GROUP, "dtype": torch.float32}
    policy, reference = (CausalLMPolicy.from_pretrained(folder / "model", **sampling) for _ in range(2))
    reference.requires_grad_(False)
    reference.scoring_layout = layout
    run = Path(tempfile.mkdtemp(dir=folder))
    buffer = TrajectoryReplayBuffer(
        storage=run / "store", transform=Compose(MCAdvantage(GROUP), RetrieveLogProb(reference))
    )
    collector = Collector(
        policy=policy,
        prompts=JsonlPrompts(path=str(QUESTIONS), as_chat=False),
        reward=reward,
        buffer=buffer,
        config=Collect(prompts_per_rollout=PROMPTS, group_size=GROUP, max_new_tokens=limit, num_slots=PROMPTS * GROUP),
        seed=0,
    )
    learner = Learner(
        policy=policy,
        loss=GRPOLoss(policy, entropy_bonus=False, kl_to_ref_coeff=BETA, kl_estimator="k3"),
        buffer=buffer,
        config=Learn(lr=1e-6, layout=layout),  # pyright: ignore[reportArgumentType]
        max_staleness=0,
        max_completion_tokens=limit,
        ledger=Ledger(run / "ledger.jsonl"),
        seed=0,
    )
    ends: list[float] = []
    tokens: list[int] = []
    for step in range(steps + 1):
        tokens.append(collector.collect(step, policy_version=step).num_tokens)
        learner.step(step + 1)
        ends.append(time.process_time())
    for notice in learner.take_notices():
        raise SystemExit(notice)
    buffer.trajectories.close()
    return {"seconds": (ends[-1] - ends[0]) / steps, "length": sum(tokens) / (len(tokens) * PROMPTS * GROUP)}


def _send(pipe: Connection, variant: str, folder: Path, limit: int, steps: int) -> None:
    warnings.simplefilter("ignore")
    try:
        if variant == "trl":
            pipe.send(run_trl(folder, limit, steps))
        else:
            pipe.send(run_ours(folder, limit, steps, variant))
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def measure(*args: Any) -> dict[str, float]:
    """Run a variant in a fork."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, *args))
    process.start()
    there.close()
    result = here.recv()
    process.join()
    if isinstance(result, str):
        raise SystemExit(result)
    return result


VARIANTS = {
    "trl": "TRL GRPOTrainer",
    "padded": "ours, padded (the default)",
    "prefix_shared": "ours, prefix_shared",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
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
    cases = [(32, 2)] if args.quick else [(64, 4), (256, 2)]
    rounds = 1 if args.quick else args.rounds
    folder = Path(tempfile.mkdtemp())
    all_met = True
    try:
        for limit, steps in cases:
            make_checkpoint(folder, 1 / 100 if limit > 64 else 1 / 40)
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
            for _ in range(rounds):
                for name in VARIANTS:
                    runs[name].append(measure(name, folder, limit, steps))
            count = PROMPTS * GROUP
            print(f"\nup to {limit} new tokens, {count} trajectories a step, {steps} steps, best of {rounds}")
            print(f"  {'variant':30} {'cpu s a step':>12} {'trajectories/s':>15} {'tokens each':>12} {'x TRL':>7}")
            best = {name: min(found, key=lambda run: run["seconds"]) for name, found in runs.items()}
            for name, run in best.items():
                print(
                    f"  {VARIANTS[name]:30} {run['seconds']:12.2f} {count / run['seconds']:15.2f} "
                    f"{run['length']:12.1f} {best['trl']['seconds'] / run['seconds']:7.1f}"
                )
            ratio = best["trl"]["seconds"] / best["padded"]["seconds"]
            met = ratio >= GOAL
            all_met &= met
            if not args.quick:
                print(f"  by default {ratio:.1f}x TRL   goal {GOAL:g}x: {'met' if met else 'MISSED'}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not args.quick:
        print("\nall goals met" if all_met else "\nsome goal missed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
