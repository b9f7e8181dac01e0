"""GSM8K as trajectories, for the benchmarks: real text, token ids of a tokenizer trained on it, log-probs beside them.

The texts are the questions and answers of `train.jsonl` and the four model solutions per question of
`example_model_solutions.jsonl`. No model is at hand that gives log-probs, so those are made: the log of the bigram
frequency plus noise of 0.1, in float32, so their last bits are as random as a model's; the reference differs from them
by noise of 0.05. The prompt has none (NaN), as in a rollout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trajectory_store import RaggedArray

DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "gsm8k"
SOLUTIONS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
VOCABULARY = 16384


def texts() -> tuple[list[str], list[str]]:
    """Questions, and an answer of each."""
    questions: list[str] = []
    answers: list[str] = []
    with (DATA / "train.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            questions.append(row["question"])
            answers.append(row["answer"])
    with (DATA / "example_model_solutions.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            for name in SOLUTIONS:
                questions.append(row["question"])
                answers.append(row[name]["solution"])
    return questions, answers


def trajectories(limit: int | None = None) -> dict[str, Any]:
    """The columns of `trajectory_schema`, one row per answer; the same on every call.

    Args:
        limit: at most so many.
    """
    questions, answers = (part[:limit] for part in texts())
    prompts, completions = _encode(questions, answers)
    lengths = np.array([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)])
    starts = np.array([len(p) for p in prompts])
    ids = np.fromiter((t for pair in zip(prompts, completions, strict=True) for part in pair for t in part), np.int32)
    count = len(lengths)
    place = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    mask = place >= np.repeat(starts, lengths)
    rng = np.random.default_rng(0)
    own = np.where(mask, np.minimum(_bigram(ids) + rng.normal(0, 0.1, len(ids)), -1e-6), np.nan).astype(np.float32)
    reference = (own + rng.normal(0, 0.05, len(ids))).astype(np.float32)
    rewards = rng.integers(0, 2, count).astype(np.float32)
    return {
        "input_ids": RaggedArray(ids, lengths),
        "assistant_mask": RaggedArray(mask, lengths),
        "log_probs": RaggedArray(own, lengths),
        "ref_log_probs": RaggedArray(reference, lengths),
        "advantage": rng.standard_normal(count).astype(np.float32),
        "task_reward": rewards,
        "group_id": np.arange(count) // 8,
        "policy_version": np.arange(count) // 64,
        "num_prompt_tokens": starts.astype(np.int32),
        "created_at": 1.7e9 + np.cumsum(rng.exponential(0.2, count)),
        "trajectory_id": np.arange(count),
        "finish_reason": ["stop"] * count,
        "prompt": questions,
        "completion": answers,
        "meta": ['{"source": "gsm8k"}'] * count,
    }


def part(data: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Some of the rows, in their order."""
    stop = min(stop, len(data["prompt"]))
    rows = range(start, stop)
    return {k: v.take(rows) if isinstance(v, RaggedArray) else v[start:stop] for k, v in data.items()}


def payload(data: dict[str, Any]) -> int:
    """Bytes of the values that were given: elements, UTF-8 text, scalars."""
    total = 0
    for values in data.values():
        if isinstance(values, RaggedArray):
            total += values.values.nbytes
        elif isinstance(values, list):
            total += sum(len(text.encode()) for text in values)
        else:
            total += values.nbytes
    return total


def _encode(questions: list[str], answers: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*questions, *answers], trainer)
    return ([e.ids for e in tokenizer.encode_batch(part)] for part in (questions, answers))  # type: ignore[return-value]


def _bigram(ids: np.ndarray) -> np.ndarray:
    """Log frequency of each token after the one before it, smoothed by how often it comes at all."""
    pairs = np.concatenate([[0], ids[:-1].astype(np.int64) * VOCABULARY + ids[1:]])
    _, at, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    single = np.bincount(ids, minlength=VOCABULARY)
    before = single[np.concatenate([[0], ids[:-1]])]
    return np.log(0.9 * counts[at] / np.maximum(before, 1) + 0.1 * single[ids] / len(ids))
