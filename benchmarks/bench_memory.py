"""Peak memory of GRPOLoss over 4,096 and 16,384 completion tokens: the same, with the model's activations subtracted.

    python benchmarks/bench_memory.py            # vocabulary 32,000; a minute
    python benchmarks/bench_memory.py --quick    # vocabulary 8,000

The hidden states that predict the completion tokens are a parameter, resident before the step, so that nothing but the
loss is measured: reading the batch, the chunked head at a fixed chunk size, the token loss, the diagnostics, and the
gradients of head and hidden states. The last, [tokens, hidden] float32, goes to the model and is subtracted. Each size
runs in a fork of its own. Peak is VmHWM, reset through /proc/self/clear_refs, above the resident size before the step;
each figure is the least of --rounds.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

from _models import HIDDEN, forked, memory, resident_from_now

TOKENS = (4_096, 16_384)
LENGTH, PROMPT, CHUNK = 576, 64, 512
GOAL = 0.10


def peak(tokens: int, vocab: int, entropy_bonus: bool) -> int:
    """The peak of a step above the resident size before it."""
    import torch
    from tensordict import TensorDict
    from torch import nn

    from rlhf_pipeline import GRPOLoss

    class Actor(nn.Module):
        temperature = 1.0

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.states = nn.Parameter(torch.randn(rows * (LENGTH - PROMPT), HIDDEN))
            self.head_weight = nn.Parameter(0.02 * torch.randn(vocab, HIDDEN))

        def hidden_states(self, input_ids: Any, attention_mask: Any) -> Any:
            raise NotImplementedError

        def scoring_rows(self, input_ids: Any, attention_mask: Any, score_mask: Any) -> Any:
            return SimpleNamespace(hidden=self.states)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = tokens // (LENGTH - PROMPT)
    actor = Actor(rows)
    attention = torch.ones(rows, LENGTH, dtype=torch.bool)
    assistant = attention & (torch.arange(LENGTH) >= PROMPT)
    level = -torch.log(torch.tensor(float(vocab)))
    batch = TensorDict(
        {
            "tokens": {"full": torch.randint(0, vocab, (rows, LENGTH))},
            "masks": {"all_assistant_mask": assistant, "all_attention_mask": attention},
            "log_probs": {"full": level.expand(rows, LENGTH)},
            "next": {"ref_log_probs": {"full": level.expand(rows, LENGTH)}},
            "advantage": torch.randn(rows, 1) * assistant,
        },
        [rows],
    )
    loss = GRPOLoss(actor, entropy_bonus=entropy_bonus, kl_to_ref_coeff=0.04, chunk_size=CHUNK)
    before = resident_from_now()
    loss(batch).total_loss().backward()
    return memory("VmHWM") - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    import torch

    import rlhf_pipeline.losses.grpo  # noqa: F401

    torch.set_num_threads(1)
    vocab, rounds = (8_000, 1) if args.quick else (args.vocab, args.rounds)
    all_met = True
    print(f"vocabulary {vocab}, hidden {HIDDEN}, chunks of {CHUNK} rows; MB")
    print(f"  {'':16} {'tokens':>7} {'peak':>7} {'less hidden gradient':>21} {'[tokens, V] float32':>20}")
    for name, bonus in (("no entropy bonus", False), ("entropy bonus", True)):
        alone: list[float] = []
        for tokens in TOKENS:
            total = min(forked(peak, tokens, vocab, bonus) for _ in range(rounds)) / 2**20
            alone.append(total - tokens * HIDDEN * 4 / 2**20)
            full = tokens * vocab * 4 / 2**20
            print(f"  {name:16} {tokens:7} {total:7.0f} {alone[-1]:21.0f} {full:20.0f}")
        change = alone[1] / alone[0] - 1
        met = abs(change) <= GOAL
        all_met &= met
        print(
            f"  {name}: {change:+.1%} from {TOKENS[0]} to {TOKENS[1]} tokens   goal within {GOAL:.0%}: "
            f"{'met' if met else 'MISSED'}"
        )
    print("\nall goals met" if all_met else "\nsome goal missed")
    return int(not (all_met or args.quick))


if __name__ == "__main__":
    raise SystemExit(main())
