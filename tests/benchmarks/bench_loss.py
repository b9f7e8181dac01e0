"""GRPOLoss against TorchRL's, forward and backward: time and memory beyond what the model holds.

    python tests/benchmarks/bench_loss.py            # vocabularies of 32,000 and 151,936; a few minutes on 2 cores
    python tests/benchmarks/bench_loss.py --quick    # a small vocabulary; half a minute

One tiny Qwen2 (hidden 256, 2 layers, tied head) and one padded batch: prompts of 128 tokens, log-normal completions
(sigma 0.8) of up to 384, the batch as wide as its longest row; clip, and a KL term against the reference. With --full
no row is padded, so that only the prompts are left to skip. Each variant runs in a process of its own, in rounds, so
that a busy machine is busy for all of them. One thread by default, because threads that wait for each other on a busy
machine burn CPU time. The best round counts. Ratios of CPU seconds are the result; wall seconds stand beside them.
Memory is the peak resident size (VmHWM) above the size before the first step, gradients included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIANTS = {
    "ours": "GRPOLoss, entropy bonus",
    "ours-no-bonus": "GRPOLoss, no entropy bonus (entropy still reported)",
    "ours-recompute": "GRPOLoss, no bonus, head='recompute'",
    "torchrl": "TorchRL GRPOLoss, default",
    "torchrl-no-entropy": "TorchRL GRPOLoss, entropy_bonus=False",
}
PAIRS = (("ours", "torchrl"), ("ours-no-bonus", "torchrl-no-entropy"), ("ours-recompute", "torchrl-no-entropy"))
TARGETS = {("ours", "torchrl"): 6.0, ("ours-no-bonus", "torchrl-no-entropy"): 2.5}


@dataclass(frozen=True)
class Case:
    """One problem size: vocabulary, rows, padded length, prompt length; `full` for rows without padding."""

    vocab: int
    rows: int
    length: int = 512
    prompt: int = 128
    full: bool = False


def memory(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def build(case: Case, variant: str) -> tuple[Any, Any]:
    """The loss of a variant and its batch."""
    import torch
    from tensordict import TensorDict
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives import llm
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlhf_pipeline import CausalLMPolicy, GRPOLoss
    from rlhf_pipeline.policies.new_model import scratch_policy

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=case.vocab,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model: Any = Qwen2ForCausalLM(config).eval()
    rows, length, prompt = case.rows, case.length, case.prompt
    room = length - prompt
    completion = torch.full((rows,), room)
    if not case.full:
        quantiles = (torch.arange(rows) + 0.5) / rows
        normal = torch.distributions.Normal(0.0, 0.8).icdf(quantiles)
        completion = (0.35 * room * normal.exp()).clamp(max=room).long()
        completion[-1] = room
    at = torch.arange(length)
    attention = at < (completion + prompt)[:, None]
    assistant = attention & (at >= prompt)
    level = -torch.log(torch.tensor(float(case.vocab)))
    scores = (level + 0.1 * torch.randn(2, rows, length)) * assistant
    advantage = torch.randn(rows, 1) * assistant
    batch = TensorDict(
        {
            "tokens": {"full": torch.randint(0, case.vocab, (rows, length)) * attention},
            "masks": {"all_assistant_mask": assistant, "all_attention_mask": attention},
            "log_probs": {"full": scores[0]},
            "next": {"ref_log_probs": {"full": scores[1]}},
            "advantage": advantage,
        },
        batch_size=[rows],
    )
    if variant.startswith("ours"):
        options: dict[str, Any] = {"kl_to_ref_coeff": 0.04, "kl_estimator": "k3"}
        options["entropy_bonus"] = variant == "ours"
        options["head"] = "recompute" if variant == "ours-recompute" else "auto"
        return GRPOLoss(CausalLMPolicy(model), **options), batch
    tokenizer = scratch_policy("01", hidden_size=8, num_layers=1, num_heads=1, seed=0).tokenizer
    wrapper = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True)
    batch["advantage"] = advantage[..., None]
    peer: Any = llm.GRPOLoss
    loss = peer(
        wrapper,
        masking_strategy="rlhf",
        kl_to_ref_coeff=0.04,
        entropy_bonus=variant == "torchrl",
    )
    return loss, batch


def child(case: Case, variant: str, reps: int, threads: int) -> None:
    """Run one variant and print its figures as JSON."""
    import torch

    torch.set_num_threads(threads)
    loss, batch = build(case, variant)
    mask = batch["masks", "all_assistant_mask"]
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    before = memory("VmRSS")
    cpu: list[float] = []
    wall: list[float] = []
    out: Any = None
    for _ in range(reps + 1):
        loss.zero_grad(set_to_none=True)
        start = time.perf_counter(), time.process_time()
        out = loss(batch)
        terms = [v for k, v in out.items() if k.startswith("loss_") and v is not None]
        torch.stack([term.sum() for term in terms]).sum().backward()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    result = {
        "cpu": min(cpu[1:] or cpu),
        "wall": min(wall[1:] or wall),
        "memory": memory("VmHWM") - before,
        "objective": float(out.loss_objective),
        "active": int(mask.sum()),
        "positions": mask.numel(),
    }
    print(json.dumps(result))


def measure(case: Case, variant: str, reps: int, threads: int) -> dict[str, float]:
    """Run a variant in its own process."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), str(root / "storage"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-W", "ignore", __file__, "--child", variant, "--reps", str(reps)]
    command += ["--vocab", str(case.vocab), "--rows", str(case.rows)]
    command += ["--length", str(case.length), "--prompt", str(case.prompt)]
    command += ["--threads", str(threads), *(["--full"] if case.full else [])]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{variant} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(case: Case, *, rounds: int, reps: int, threads: int, names: list[str], judged: bool) -> bool:
    """Print the table of one case; True where every target is met."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            runs[name].append(measure(case, name, reps, threads))
    best = {
        name: {
            "cpu": min(r["cpu"] for r in found),
            "wall": min(r["wall"] for r in found),
            "memory": min(r["memory"] for r in found),
            "objective": found[0]["objective"],
        }
        for name, found in runs.items()
    }
    first = next(iter(runs.values()))[0]
    print(
        f"\nvocabulary {case.vocab}: {case.rows} trajectories x {case.length}, "
        f"{first['active']:.0f} of {first['positions']:.0f} positions count"
    )
    print(f"  {'variant':52} {'cpu s':>8} {'wall s':>8} {'added MB':>9} {'objective':>11}")
    for name, row in best.items():
        print(
            f"  {VARIANTS[name]:52} {row['cpu']:8.2f} {row['wall']:8.2f} "
            f"{row['memory'] / 2**20:9.0f} {row['objective']:11.6f}"
        )
    met = True
    for ours, peer in PAIRS:
        if ours not in best or peer not in best:
            continue
        speed = best[peer]["cpu"] / best[ours]["cpu"]
        wall = best[peer]["wall"] / best[ours]["wall"]
        space = best[peer]["memory"] / best[ours]["memory"]
        target = TARGETS.get((ours, peer)) if judged else None
        note = "" if target is None else f"   targets {target:g}x and 4x less memory"
        print(
            f"  {ours} against {peer}: {speed:.1f}x less CPU time, {wall:.1f}x faster, {space:.1f}x less memory{note}"
        )
        met &= target is None or (speed >= target and space >= 4.0)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary and one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="every row as long as the longest")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--child", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--vocab", type=int, help="one vocabulary instead of both")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128)
    args = parser.parse_args()
    if args.child:
        child(Case(args.vocab, args.rows, args.length, args.prompt, args.full), args.child, args.reps, args.threads)
        return 0
    cases = [Case(32_000, 8, full=args.full), Case(151_936, 4, full=args.full)]
    if args.vocab:
        cases = [Case(args.vocab, args.rows, args.length, args.prompt, args.full)]
    rounds = args.rounds
    if args.quick:
        cases, rounds = [Case(8_000, 4, 256, 64, args.full)], 1
    met = [
        compare(
            case,
            rounds=rounds,
            reps=args.reps,
            threads=args.threads,
            names=args.variants,
            judged=not (args.quick or args.full),
        )
        for case in cases
    ]
    if not (args.quick or args.full):
        print("\nall targets met" if all(met) else "\nsome target missed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
