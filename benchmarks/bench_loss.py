"""GRPOLoss against TorchRL's and TRL's, forward and backward: time and memory beyond what the model holds.

    python benchmarks/bench_loss.py            # vocabularies of 32,000 and 151,936; under 4 minutes on one core
    python benchmarks/bench_loss.py --quick    # a small vocabulary; half a minute

One tiny Qwen2 (hidden 256, 2 layers, tied head) and one padded batch: prompts of 128 tokens, log-normal completions
(sigma 0.8) of up to 384, the batch as wide as its longest row; clip, and a KL term against the reference. TRL is
GRPOTrainer's own `_compute_loss` on the same trajectories in its own layout, with activations kept. With --full no row
is padded, so that only the prompts are left to skip.

Each variant runs in a fork of its own, in rounds, so that a busy machine is busy for all of them. One thread by
default, because threads that wait for each other on a busy machine burn CPU time. The best run counts. Ratios of CPU
seconds are the result; wall seconds stand beside them. Memory is the peak resident size (VmHWM, reset through
/proc/self/clear_refs) above the resident size before the first step, gradients included. "loss + KL" leaves out the
entropy bonus; TorchRL's differs because it divides the KL by all positions, padding included.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from typing import Any

from _models import forked, memory, qwen2, resident_from_now

VARIANTS = {
    "ours": "GRPOLoss, entropy bonus",
    "ours-no-bonus": "GRPOLoss, no entropy bonus (entropy still reported)",
    "ours-recompute": "GRPOLoss, no bonus, head='recompute'",
    "torchrl": "TorchRL GRPOLoss, default",
    "torchrl-no-entropy": "TorchRL GRPOLoss, entropy_bonus=False",
    "trl": "TRL GRPOTrainer's loss (no bonus, entropy reported)",
}
TARGETS = {("ours", "torchrl"): 6.0, ("ours-no-bonus", "torchrl-no-entropy"): 2.5, ("ours-no-bonus", "trl"): 2.0}
MEMORY_TARGET = 4.0


@dataclass(frozen=True)
class Case:
    """One problem size: vocabulary, rows, padded length, prompt length; `full` for rows without padding."""

    vocab: int
    rows: int
    length: int = 512
    prompt: int = 128
    full: bool = False


def build(case: Case, variant: str) -> tuple[Any, Any]:
    """The loss of a variant and its batch."""
    import torch
    from tensordict import TensorDict
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives import llm

    from rlhf_pipeline import CausalLMPolicy, GRPOLoss, scratch_policy

    model = qwen2(case.vocab, layers=2)
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
    if variant == "trl":
        return trl_loss(model, tokenizer, batch, completion, prompt), batch
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


def trl_loss(model: Any, tokenizer: Any, batch: Any, completion: Any, prompt: int) -> Any:
    """TRL's own loss of the batch, laid out as its trainer does."""
    import _trl

    trainer = _trl.trainer(model, tokenizer, batch=len(batch), group=len(batch))
    ends = [prompt + n for n in completion.tolist()]
    rows = {
        key: [row[prompt:end] for row, end in zip(batch[name], ends, strict=True)]
        for key, name in (
            ("ids", ("tokens", "full")),
            ("old", ("log_probs", "full")),
            ("ref", ("next", "ref_log_probs", "full")),
        )
    }
    prompts = list(batch["tokens", "full"][:, :prompt])
    advantages = batch["advantage"].reshape(len(batch), -1)[:, prompt]
    inputs = _trl.layout(prompts, rows["ids"], advantages, rows["old"], rows["ref"])
    return TRLLoss(trainer, inputs)


class TRLLoss:
    """Stands where a loss module stands in `run_variant`."""

    def __init__(self, trainer: Any, inputs: Any) -> None:
        self.trainer, self.inputs = trainer, inputs

    def zero_grad(self, set_to_none: bool) -> None:
        self.trainer.model.zero_grad(set_to_none=set_to_none)

    def __call__(self, batch: Any) -> Any:
        import _trl

        return {"loss_total": _trl.loss_of(self.trainer, self.inputs)}


def run_variant(case: Case, variant: str, reps: int, threads: int) -> dict[str, float]:
    """Run one variant and return its figures."""
    import torch

    torch.set_num_threads(threads)
    loss, batch = build(case, variant)
    mask = batch["masks", "all_assistant_mask"]
    before = resident_from_now()
    cpu: list[float] = []
    wall: list[float] = []
    value = 0.0
    for _ in range(reps + 1):
        loss.zero_grad(set_to_none=True)
        start = time.perf_counter(), time.process_time()
        out = loss(batch)
        terms = {k: v.sum() for k, v in out.items() if k.startswith("loss_") and v is not None}
        torch.stack(list(terms.values())).sum().backward()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
        value = float(sum(v for k, v in terms.items() if k != "loss_entropy"))
    return {
        "cpu": min(cpu[1:] or cpu),
        "wall": min(wall[1:] or wall),
        "memory": memory("VmHWM") - before,
        "loss": value,
        "active": int(mask.sum()),
        "positions": mask.numel(),
    }


def import_all(names: list[str]) -> None:
    """Import in the parent what the forks need, so that they do not each pay for it."""
    import torch
    import torchrl.modules.llm
    import torchrl.objectives.llm  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import rlhf_pipeline.losses.grpo
    import rlhf_pipeline.policies.new_model  # noqa: F401

    torch.set_num_threads(1)
    if "trl" in names:
        import datasets  # noqa: F401
        from trl import GRPOTrainer  # noqa: F401


def compare(case: Case, *, rounds: int, reps: int, threads: int, names: list[str], judged: bool) -> bool:
    """Print the table of one case; True where every target is met."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            runs[name].append(forked(run_variant, case, name, reps, threads))
    best = {
        name: {key: min(run[key] for run in found) for key in ("cpu", "wall", "memory", "loss")}
        for name, found in runs.items()
    }
    first = next(iter(runs.values()))[0]
    print(
        f"\nvocabulary {case.vocab}: {case.rows} trajectories x {case.length}, "
        f"{first['active']:.0f} of {first['positions']:.0f} positions count"
    )
    print(f"  {'variant':52} {'cpu s':>8} {'wall s':>8} {'added MB':>9} {'loss + KL':>11}")
    for name, row in best.items():
        print(
            f"  {VARIANTS[name]:52} {row['cpu']:8.2f} {row['wall']:8.2f} "
            f"{row['memory'] / 2**20:9.0f} {row['loss']:11.6f}"
        )
    all_met = True
    for (ours, peer), target in TARGETS.items():
        if ours not in best or peer not in best:
            continue
        speed = best[peer]["cpu"] / best[ours]["cpu"]
        space = best[peer]["memory"] / best[ours]["memory"]
        line = f"  {ours} against {peer}: {speed:.1f}x less CPU time, {space:.1f}x less memory"
        if judged:
            met = [speed >= target, space >= MEMORY_TARGET]
            words = ["met" if ok else "MISSED" for ok in met]
            line += f"   goals: {target:g}x {words[0]}, {MEMORY_TARGET:g}x {words[1]}"
            all_met &= all(met)
        print(line, flush=True)
    return all_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary and one round")
    parser.add_argument("--rounds", type=int, help="2 by default; 1 at the large vocabulary")
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="every row as long as the longest")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--vocab", type=int, help="one vocabulary instead of both")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    import_all(args.variants)
    cases = [Case(32_000, 6, full=args.full), Case(151_936, 3, full=args.full)]
    if args.vocab:
        cases = [Case(args.vocab, args.rows, args.length, args.prompt, args.full)]
    if args.quick:
        cases = [Case(8_000, 4, 256, 64, args.full)]
    met = [
        compare(
            case,
            rounds=args.rounds or (2 if case.vocab == 32_000 else 1),
            reps=args.reps,
            threads=args.threads,
            names=args.variants,
            judged=not (args.quick or args.full),
        )
        for case in cases
    ]
    if args.quick or args.full:
        return 0
    print("\nall goals met" if all(met) else "\nsome goal missed")
    return int(not all(met))


if __name__ == "__main__":
    raise SystemExit(main())
