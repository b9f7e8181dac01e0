"""GRPO end to end, the same task with TRL's trainer and with ours: rollout, reference, loss, optimizer, again."""

from __future__ import annotations

import json
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _gsm8k import DATA

QUESTIONS = DATA / "train.jsonl"
BETA = 0.04


@dataclass(frozen=True, kw_only=True)
class Task:
    """What both learn.

    Attributes:
        model: folder of the model and its tokenizer.
        questions: JSONL with a `question` per line.
        prompts: of a step.
        group: completions of each.
        limit: the most tokens of a completion.
        steps: how many count; one more comes first.
        dtype: of the weights.
        device: where they are.
    """

    model: Path
    questions: Path
    prompts: int
    group: int
    limit: int
    steps: int
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def rows(self) -> int:
        """Trajectories of a step."""
        return self.prompts * self.group


def made_up_questions(path: Path, count: int = 512) -> Path:
    """Write questions of about the length of GSM8K's, for where that is not at hand."""
    rng = random.Random(0)
    things = ("apples", "books", "coins", "pens", "tickets")
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            facts = [
                f"Anna buys {rng.randint(2, 99)} {rng.choice(things)} and gives {rng.randint(1, 9)} of them to Ben."
                for _ in range(max(1, round(rng.lognormvariate(1.3, 0.4))))
            ]
            file.write(json.dumps({"question": " ".join([*facts, "How many are left?"]), "answer": "1"}) + "\n")
    return path


def reward(prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]) -> float:
    """0 or 1 by a checksum of the completion: costs nothing and differs inside a group."""
    return float(zlib.crc32(completion.encode()) & 1)


def save_checkpoint(
    folder: Path,
    make: Callable[[dict[str, Any]], Any],
    *,
    questions: Path,
    vocab: int,
    stop_share: float,
) -> Path:
    """Save a model of whose tokens a share ends a completion, with a tokenizer; return its folder.

    Args:
        folder: gets `tokenizer` and `model`.
        make: returns the model, given its special tokens.
        questions: train the tokenizer.
        vocab: of the model.
        stop_share: of the vocabulary, beside the tokenizer's end token.
    """
    from transformers import AutoTokenizer, GenerationConfig

    from rlhf_pipeline.policies.new_model import new_model

    small = folder / "tokenizer"
    if not small.exists():
        new_model(small, text_file=questions, vocab_size=4000, hidden_size=8, num_layers=1, num_heads=1)
    tokenizer = AutoTokenizer.from_pretrained(small)
    model = make({"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
    # Ids above the tokenizer's own, so that no prompt contains one.
    ends = [tokenizer.eos_token_id, *range(vocab - round(stop_share * vocab), vocab)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, do_sample=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def run_trl(task: Task, clock: Callable[[], float] = time.process_time, **options: Any) -> dict[str, float]:
    """`GRPOTrainer.train()`: seconds per step after the first, by a clock, and the mean length of completions."""
    import _trl
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

    ends: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(clock())

    def graded(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [reward("", completion, None, {}) for completion in completions]

    with task.questions.open(encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in lines]
    trainer = _trl.trainer(
        str(task.model),
        AutoTokenizer.from_pretrained(task.model),
        prompts=questions[: task.prompts * (task.steps + 1)],
        **{"batch": task.rows, **options},
        group=task.group,
        max_new_tokens=task.limit,
        steps=task.steps + 1,
        reward=graded,
    )
    trainer.add_callback(Clock())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    # The calls of the first step are not counted, and neither are its lengths.
    own = lengths[task.rows :]
    return {"seconds": (ends[-1] - ends[0]) / task.steps, "length": sum(own) / len(own)}


def run_ours(task: Task, clock: Callable[[], float] = time.process_time) -> dict[str, float]:
    """Collector and learner: as `run_trl`, and the mean length of prompts."""
    import torch
    from torchrl.envs.transforms import Compose

    from rlhf_pipeline import (
        CausalLMPolicy,
        Collect,
        Collector,
        GRPOLoss,
        Learn,
        MCAdvantage,
        Prompts,
        RetrieveLogProb,
        TrajectoryReplayBuffer,
    )
    from rlhf_pipeline.learner.learner import Learner
    from rlhf_pipeline.run.ledger import Ledger

    sampling: dict[str, Any] = {
        "max_new_tokens": task.limit,
        "num_slots": task.rows,
        "dtype": getattr(torch, task.dtype),
        "device": task.device,
    }
    policy, reference = (CausalLMPolicy.from_pretrained(task.model, **sampling) for _ in range(2))
    reference.requires_grad_(False)
    config = Learn(lr=1e-6)
    reference.scoring_layout = config.layout  # as a run has it
    with tempfile.TemporaryDirectory(dir=task.model.parent) as run:
        buffer = TrajectoryReplayBuffer(
            storage=Path(run) / "store", transform=Compose(MCAdvantage(task.group), RetrieveLogProb(reference))
        )
        collector = Collector(
            policy=policy,
            prompts=Prompts(path=str(task.questions), as_chat=False),
            reward=reward,
            buffer=buffer,
            config=Collect(
                prompts_per_rollout=task.prompts,
                group_size=task.group,
                max_new_tokens=task.limit,
                num_slots=task.rows,
            ),
            seed=0,
        )
        learner = Learner(
            policy=policy,
            loss=GRPOLoss(policy, entropy_bonus=False, kl_to_ref_coeff=BETA, kl_estimator="k3"),
            buffer=buffer,
            config=config,
            max_staleness=0,
            max_completion_tokens=task.limit,
            ledger=Ledger(Path(run) / "ledger.jsonl"),
            seed=0,
        )
        ends: list[float] = []
        tokens: list[int] = []
        for step in range(task.steps + 1):
            tokens.append(collector.collect(step, policy_version=step).num_tokens)
            learner.step(step + 1)
            ends.append(clock())
        for notice in learner.take_notices():
            raise SystemExit(notice)
        lengths = buffer.store.read_scalars("num_prompt_tokens")[task.rows :: task.group]
        buffer.trajectories.close()
    return {
        "seconds": (ends[-1] - ends[0]) / task.steps,
        "length": sum(tokens[1:]) / (task.steps * task.rows),
        "prompt": float(lengths.mean()),
    }
