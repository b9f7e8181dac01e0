"""One update over ragged groups of 8, in each layout, against TRL's GRPOTrainer on the same trajectories.

    python benchmarks/bench_trl.py            # prompts of about 120 and about 500 tokens; under 4 minutes
    python benchmarks/bench_trl.py --quick    # half the trajectories and a vocabulary of 8,000

A tiny Qwen2 (hidden 256, 4 layers, vocabulary 32,000, tied head), 4 prompts, 8 log-normal completions each (sigma 0.8,
median 90, at most 384 tokens), clip and a KL term; forward and backward, no optimizer. TRL is GRPOTrainer itself: its
layout of a generation batch, its cut into micro-batches of 8, its `_compute_loss`, with activations kept. Ours takes
the token budget of --budget. Real tokens (prompt and completion of every trajectory) per second of processor time on
one thread, after one micro-batch to warm up. The loss and the gradient's norm stand beside each row: all do the same
work.

The last table is the share of real tokens among the positions computed by the default layout, the mean over draws of
64 completions of sigma 0.8.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _models import qwen2

GOALS = {120: 5.0, 500: 8.0}
EFFICIENCY_GOAL = 0.85
GROUP, MICRO = 8, 8


@dataclass
class Work:
    """A model and the trajectories of one step.

    Attributes:
        prompts: int64 [P] per trajectory.
        completions: int64 [R] per trajectory.
        old: float32 [R] per trajectory.
        ref: float32 [R] per trajectory.
        advantages: float32 [N].
    """

    model: Any
    prompts: list[Any]
    completions: list[Any]
    old: list[Any]
    ref: list[Any]
    advantages: Any

    @property
    def real_tokens(self) -> int:
        """Prompt and completion tokens of all trajectories."""
        return sum(len(p) + len(c) for p, c in zip(self.prompts, self.completions, strict=True))


def make_work(prompt: int, *, groups: int, vocab: int, layers: int = 4, seed: int = 0) -> Work:
    """Random trajectories with log-probs near those of a new model."""
    import torch

    model = qwen2(vocab, layers=layers, seed=seed)
    g = torch.Generator().manual_seed(seed)
    prompts, completions, old, ref = [], [], [], []
    for _ in range(groups):
        length = int(prompt * (0.75 + 0.5 * float(torch.rand((), generator=g))))
        start = torch.randint(0, vocab, (length,), generator=g)
        for _ in range(GROUP):
            own = int((90 * (0.8 * torch.randn((), generator=g)).exp()).clamp(4, 384))
            prompts.append(start)
            completions.append(torch.randint(0, vocab, (own,), generator=g))
            level = -torch.log(torch.tensor(float(vocab)))
            for rows in (old, ref):
                rows.append(level + 0.1 * torch.randn(own, generator=g))
    return Work(model, prompts, completions, old, ref, torch.randn(len(prompts), generator=g))


def ours(work: Work, layout: str, budget: int) -> tuple[Callable[..., float], int]:
    """A step of ours in one layout, and the positions that it computes."""
    import torch
    from tensordict import TensorDict

    from rlhf_pipeline import CausalLMPolicy, GRPOLoss
    from rlhf_pipeline.functional.aggregation import token_weights
    from rlhf_pipeline.policies.packed import plan_micro_batches

    policy = CausalLMPolicy(work.model, scoring_layout=layout)
    loss = GRPOLoss(policy, entropy_bonus=False, kl_to_ref_coeff=0.04, kl_estimator="k3")
    starts = torch.tensor([len(p) for p in work.prompts])
    lengths = starts + torch.tensor([len(c) for c in work.completions])
    groups = torch.arange(len(lengths)) // GROUP
    weights = token_weights(lengths - starts, "token_mean")
    plan = plan_micro_batches(layout, lengths, max(budget, int(lengths.max())), prompt_lengths=starts, group_ids=groups)

    def padded(rows: Any) -> Any:
        width = int(lengths[rows].max())
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        scores = torch.zeros(2, len(rows), width)
        for i, row in enumerate(rows.tolist()):
            a, b = len(work.prompts[row]), int(lengths[row])
            tokens[i, :b] = torch.cat([work.prompts[row], work.completions[row]])
            scores[0, i, a:b], scores[1, i, a:b] = work.old[row], work.ref[row]
        at = torch.arange(width)
        attention = at < lengths[rows, None]
        assistant = attention & (at >= starts[rows, None])
        return TensorDict(
            {
                "tokens": {"full": tokens},
                "masks": {"all_assistant_mask": assistant, "all_attention_mask": attention},
                "log_probs": {"full": scores[0]},
                "next": {"ref_log_probs": {"full": scores[1]}},
                "advantage": work.advantages[rows, None] * assistant,
                "loss_weight": weights[rows][:, None] * assistant,
            },
            batch_size=[len(rows)],
        )

    def step(parts: int | None = None) -> float:
        total = 0.0
        for rows in plan.rows[:parts]:
            out = loss(padded(rows))
            value = out.total_loss()
            value.backward()
            total += float(value)
        for notice in policy.layout_notices():
            raise SystemExit(notice)
        return total

    return step, sum(plan.positions)


def trls(work: Work) -> tuple[Callable[..., float], int]:
    """A step of TRL's trainer, and the positions that it computes."""
    import copy

    import _trl

    from rlhf_pipeline import scratch_policy

    tokenizer = scratch_policy("01", hidden_size=8, num_layers=1, num_heads=1, seed=0).tokenizer
    parts = len(work.prompts) // MICRO
    # TRL replaces the forward method of its model.
    trainer = _trl.trainer(copy.deepcopy(work.model), tokenizer, batch=MICRO, group=GROUP)
    work_trl = trainer.model
    inputs = _trl.layout(work.prompts, work.completions, work.advantages, work.old, work.ref)
    batches = _trl.split(inputs, parts)

    def step(micro: int | None = None) -> float:
        total = 0.0
        for batch in batches[:micro]:
            value = _trl.loss_of(trainer, batch, micro_batches=parts)
            value.backward()
            total += float(value)
        return total

    step.model = work_trl  # pyright: ignore[reportFunctionMemberAccess]
    return step, (inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]) * len(work.prompts)


def norm(model: Any) -> float:
    """Of the gradient."""
    import torch

    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


def compare(prompt: int, *, groups: int, vocab: int, rounds: int, budget: int, judged: bool) -> bool:
    """Print the table of one prompt length; True where its goal is met."""
    work = make_work(prompt, groups=groups, vocab=vocab)
    steps: dict[str, tuple[Callable[..., float], int]] = {"TRL GRPOTrainer": trls(work)}
    for layout in ("padded", "packed", "prefix_shared"):
        steps[f"ours, {layout}"] = ours(work, layout, budget)
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    facts: dict[str, tuple[float, float]] = {}
    for step, _ in steps.values():
        step(1)  # Warm up; ours compares its layout with padding once.
    for _ in range(rounds):
        for name, (step, _) in steps.items():
            model = getattr(step, "model", work.model)
            model.zero_grad(set_to_none=True)
            start = time.process_time()
            value = step()
            cpu[name].append(time.process_time() - start)
            facts[name] = (value, norm(model))
            model.zero_grad(set_to_none=True)
    real = work.real_tokens
    print(
        f"\nprompts of about {prompt}: {len(work.prompts)} trajectories, {real} real tokens, "
        f"{sum(len(c) for c in work.completions)} of them completions"
    )
    print(
        f"  {'variant':22} {'cpu s':>8} {'tokens/s':>9} {'x TRL':>7} {'positions':>10} {'loss':>11} {'grad norm':>10}"
    )
    first = min(cpu["TRL GRPOTrainer"])
    for name, (_, positions) in steps.items():
        best = min(cpu[name])
        value, gradient = facts[name]
        print(
            f"  {name:22} {best:8.2f} {real / best:9.0f} {first / best:7.1f} {positions:10} "
            f"{value:11.7f} {gradient:10.6f}"
        )
    values = list(facts.values())
    apart = max(abs(v[0] - values[0][0]) + abs(v[1] / values[0][1] - 1) for v in values)
    ratio = first / min(cpu["ours, prefix_shared"])
    line = f"  prefix_shared against TRL: {ratio:.1f}x the real tokens per second; loss and norm differ by {apart:.0e}"
    if not judged:
        print(line)
        return True
    met = ratio >= GOALS[prompt] and apart < 1e-4
    print(f"{line}   goal {GOALS[prompt]:g}x: {'met' if met else 'MISSED'}", flush=True)
    return met


def efficiency(draws: int) -> bool:
    """Print the padding efficiency of the default layout; True where the goal is met."""
    import torch

    from rlhf_pipeline.config import Learn
    from rlhf_pipeline.policies.packed import plan_batches

    budget = Learn().token_budget
    found: dict[str, list[float]] = {"TRL": [], "ours": []}
    for seed in range(draws):
        g = torch.Generator().manual_seed(seed)
        prompt = (200 * (0.4 * torch.randn(8, generator=g)).exp()).clamp(20, 1000).long().repeat_interleave(8)
        own = (400 * (0.8 * torch.randn(64, generator=g)).exp()).clamp(8, 2048).long()
        total = prompt + own
        found["TRL"].append(float(total.sum()) / (64 * int(prompt.max() + own.max())))
        padded = sum(len(rows) * int(total[rows].max()) for rows in plan_batches(total, budget))
        found["ours"].append(float(total.sum()) / padded)
    mean = {name: sum(values) / draws for name, values in found.items()}
    met = mean["ours"] >= EFFICIENCY_GOAL
    print(
        f"\npadded-token efficiency, 64 trajectories, sigma 0.8, budget {budget}, mean of {draws} draws: "
        f"TRL's layout {mean['TRL']:.2f}, ours by default {mean['ours']:.2f} (worst draw {min(found['ours']):.2f})"
        f"   goal {EFFICIENCY_GOAL:g}: {'met' if met else 'MISSED'}"
    )
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary, two groups, one round, no goals")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--budget", type=int, default=4096, help="positions of a micro-batch of ours")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    sizes = {"groups": 2, "vocab": 8_000, "rounds": 1} if args.quick else {"groups": 4, "vocab": 32_000}
    met = [
        compare(prompt, **{"rounds": args.rounds, **sizes}, budget=args.budget, judged=not args.quick)
        for prompt in GOALS
    ]
    met.append(efficiency(20 if args.quick else 200))
    if args.quick:
        return 0
    print("\nall goals met" if all(met) else "\nsome goal missed")
    return int(not all(met))


if __name__ == "__main__":
    raise SystemExit(main())
