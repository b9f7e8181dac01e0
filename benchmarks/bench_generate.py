"""Sampled tokens per second: the slot engine against `model.generate`, in one run.

    python benchmarks/bench_generate.py [--quick] [--threads N] [--rounds N] [--clock wall|cpu]

Both sides sample the same ragged batch of groups: 8 prompts of 20 to 120 tokens, 8 completions each, log-normal
lengths from 4 to 400 tokens. A random model does not stop by itself, so lengths are forced: by a limit per completion
here, by a per-row stopping criterion there. `generate` runs as its users run it: one left-padded batch with
`num_return_sequences`, pure sampling (no top-k), log-probs off (`generate` alone) and on (`output_logits`, from which
TorchRL and TRL derive log-probs). The slot engine always returns log-probs.

Only tokens that belong to a completion count. A ratio above 1 means that the slot engine is faster. Equal lengths are
what suits `generate` best: no row of its batch ends before another. The last row is the batch of the default pipeline:
256 completions of 4 or 5 tokens from a model of 2 layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList

from rlhf_pipeline.policies.token_policy import TokenPolicy

Batch = tuple[list[list[int]], int, list[int]]


class StopAtLength(StoppingCriteria):
    """Stops row `i` after `limits[i]` new tokens, as an end token would."""

    def __init__(self, limits: list[int], width: int) -> None:
        self.limits = torch.tensor(limits)
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] - self.width >= self.limits.to(input_ids.device)


def make_model(vocab: int, hidden: int, layers: int, positions: int = 2048) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def ragged_batch(vocab: int, prompts: int, members: int, longest: int) -> Batch:
    rng = np.random.default_rng(0)
    ids = [rng.integers(2, vocab, n).tolist() for n in rng.integers(20, 120, prompts)]
    lengths = np.exp(rng.normal(np.log(longest / 5), 0.9, prompts * members))
    return ids, members, np.clip(lengths, 4, longest).astype(int).tolist()


def generate_static(model: Qwen2ForCausalLM, batch: Batch, *, log_probs: bool, rows: int) -> None:
    """`model.generate` on left-padded batches of at most `rows` rows."""
    prompts, members, limits = batch
    per_call = max(1, rows // members)
    for start in range(0, len(prompts), per_call):
        part = prompts[start : start + per_call]
        part_limits = limits[start * members : (start + len(part)) * members]
        width = max(len(p) for p in part)
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, p in enumerate(part):
            ids[i, width - len(p) :] = torch.tensor(p)
            mask[i, width - len(p) :] = 1
        out: Any = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            num_return_sequences=members,
            max_new_tokens=max(part_limits),
            stopping_criteria=StoppingCriteriaList([StopAtLength(part_limits, width)]),
            output_logits=log_probs,
            return_dict_in_generate=log_probs,
        )
        if log_probs:
            logits = torch.stack(out.logits, 1)
            chosen = out.sequences[:, width:]
            torch.log_softmax(logits, -1).gather(-1, chosen[..., None])


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
clock = time.perf_counter


def timed(run: Callable[[], Any]) -> float:
    started = clock()
    run()
    return clock() - started


Row = tuple[dict[str, float], dict[str, float]]


def measure(model: Qwen2ForCausalLM, batch: Batch, *, rounds: int, slots: int, on_rows: int) -> Row:
    """Return rates in tokens per second, and the medians of the ratios of interleaved rounds."""
    prompts, members, limits = batch
    policy = TokenPolicy(model, eos_token_id=[], num_slots=slots)
    tokens = sum(limits)
    everything = len(prompts) * members
    seconds: dict[str, list[float]] = {"slots": [], "off": [], "on": []}
    warm: Batch = (prompts[:2], members, [min(n, 8) for n in limits[: 2 * members]])
    generate_static(model, warm, log_probs=True, rows=on_rows)
    policy.generate_ragged(warm[0], group_size=members, max_new_tokens=warm[2], seed=0)
    for _ in range(rounds):
        seconds["slots"].append(
            timed(lambda: policy.generate_ragged(prompts, group_size=members, max_new_tokens=limits, seed=0))
        )
        seconds["off"].append(timed(lambda: generate_static(model, batch, log_probs=False, rows=everything)))
        seconds["on"].append(timed(lambda: generate_static(model, batch, log_probs=True, rows=on_rows)))
    rates = {key: tokens / statistics.median(value) for key, value in seconds.items()}
    ratios = {
        key: statistics.median(a / b for a, b in zip(seconds[key], seconds["slots"], strict=True))
        for key in ("off", "on")
    }
    return rates, ratios


def compare(name: str, model: Qwen2ForCausalLM, batch: Batch, *, rounds: int, slots: int, on_rows: int) -> None:
    """Print one row."""
    rates, ratios = measure(model, batch, rounds=rounds, slots=slots, on_rows=on_rows)
    print(
        f"{name:<24}{sum(batch[2]):>8}{rates['slots']:>12.0f}{rates['off']:>12.0f}{rates['on']:>12.0f}"
        f"{ratios['off']:>10.2f}x{ratios['on']:>10.2f}x"
    )


def check(model: Qwen2ForCausalLM, batch: Batch) -> float:
    """Return the largest distance of a sampled log-prob from teacher forcing."""
    prompts, members, limits = batch
    policy = TokenPolicy(model, eos_token_id=[])
    gaps: list[float] = []
    limits = [min(n, 60) for n in limits]
    for c in policy.generate_groups(prompts, group_size=members, max_new_tokens=limits, seed=0)[::5]:
        ids = torch.tensor([prompts[c.prompt_index] + c.token_ids])
        with torch.no_grad():
            scored = policy.log_probs(ids, torch.ones_like(ids, dtype=torch.bool))[0, -len(c.token_ids) :]
        gaps.append(float((scored - c.log_probs).abs().max()))
    return float(np.max(gaps))  # NaN if one is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round on shorter completions")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds; the median ratio is printed")
    parser.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall", help="cpu: steadier on a busy machine, with --threads 1"
    )
    args = parser.parse_args()
    global clock
    clock = CLOCKS[args.clock]
    torch.set_num_threads(args.threads)
    rounds, longest = (1, 100) if args.quick else (args.rounds, 400)
    print(
        f"torch {torch.__version__}, threads: {args.threads}, {args.clock} time. "
        "Tokens/s of completions; ratio = time of generate / ours"
    )
    print(f"{'batch':<24}{'tokens':>8}{'slots':>12}{'generate':>12}{'+log-probs':>12}{'ratio':>11}{'ratio on':>11}")
    for vocab, on_rows in ((4_000, 64), (32_000, 16)):
        model = make_model(vocab, 256, 4)
        batch = ragged_batch(vocab, 8, 8, longest)
        compare(f"8 x 8, vocabulary {vocab}", model, batch, rounds=rounds, slots=64, on_rows=on_rows)
        equal = (batch[0], batch[1], [longest // 3] * len(batch[2]))
        compare(f"equal, vocabulary {vocab}", model, equal, rounds=rounds, slots=64, on_rows=on_rows)
        # Twice the queue on the same slots: what finishes is replaced, so the tail is paid once.
        if vocab == 4_000:
            twice = ragged_batch(vocab, 16, 8, longest)
            compare("16 x 8, 64 slots", model, twice, rounds=rounds, slots=64, on_rows=on_rows)
        print(f"{'':<24}largest |sampled - teacher-forced log-prob| {check(model, batch):.1e}")
    tiny = make_model(13, 64, 2)
    rng = np.random.default_rng(0)
    batch = (
        [rng.integers(2, 13, 5).tolist() for _ in range(16)],
        16,
        rng.integers(4, 6, 256).tolist(),
    )
    for slots in (64, 256):
        compare(f"tiny, 16 x 16, {slots} slots", tiny, batch, rounds=10, slots=slots, on_rows=256)


if __name__ == "__main__":
    main()
