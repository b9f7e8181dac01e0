"""Learning, sampling and GRPO as a whole at real sizes, beside full logits, TRL's layout, vLLM and TRL's trainer.

    python benchmarks/bench_learner_h200.py                  # one GPU: Qwen2.5-0.5B and 1.5B shapes, bfloat16
    python benchmarks/bench_learner_h200.py --models 0.5b --json results.json
    python benchmarks/bench_learner_h200.py --tiny           # a CPU, a tiny model: does all of it run

Weights are random, nothing is downloaded. One step learns from 64 trajectories, 8 prompts of 8, with log-normal
prompts and completions (sigma 0.8), stored and read like any others. `ours` is `Learner.step` whole: the plan, the
store's reads, forward, backward, clipping, AdamW with float32 masters, the ledger. The paths beside it get the same
trajectories, loss weights and optimizer: `full logits` pads to the token budget and forms the logits of every position;
`TRL layout` pads prompts to the longest on the left and completions to the longest on the right, 8 rows at a time,
keeps the logits of the completions, and computes log-probs and entropies by TRL's formulas, written down again here.
`Liger loss` is that layout with Liger's fused head and loss (`pip install liger-kernel`), which TRL takes with
`use_liger_kernel`; `Liger loss, padding-free` lays the rows end to end, on a GPU with FlashAttention.

Every path must give the same loss and gradient norm; the deviation from the first stands in the table. MFU is
`ModelCost.flops` (real tokens, causal attention, the head on completions only) over the *measured* peak of large
matmuls in the same run. Decoding is timed without the prompts: what a call with one new token each takes is
subtracted.

The last section is GRPO end to end: our collector and learner, and TRL's `GRPOTrainer.train()` with whatever is
installed that its GPU users turn on: vLLM colocated, FlashAttention-2, Liger's layer kernels, bfloat16 with float32
weights (`pip install trl vllm flash-attn liger-kernel`; TRL 1.16 has no padding-free GRPO). Both get the same model,
questions, group size and reward; a share of the vocabulary ends a completion, so lengths are ragged. `--model` names a
real model. On a CPU, TRL samples with transformers.

The exit code is 1 if a path of ours fails or a path computes something else; a missed goal does not change it, nor does
a peer that is not installed or does not run here. With `--json`, each figure is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.metadata
import importlib.util
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict as Row
from tensordict import lazy_stack

if TYPE_CHECKING:
    from rlhf_pipeline import CausalLMPolicy, GRPOLoss, Learn, TrajectoryReplayBuffer
    from rlhf_pipeline.learner.optimizer import PolicyOptimizer


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Qwen2.5 model, and what it is to reach on one H200."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    goal_mfu: float | None = None
    goal_tokens: float | None = None


SHAPES = {
    "0.5b": Shape(896, 4864, 24, 14, 2, 151_936, 0.35, 95_000),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151_936, 0.45, 38_000),
    "tiny": Shape(64, 160, 2, 4, 2, 4_997),
}
GOAL_AGAINST_TRL = 4.0
GOAL_DECODE = 60_000.0
GOAL_OF_VLLM = 0.7
MOST_OFF = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""How far loss and gradient norm of a path may be from those of the first, as a share of them: rounding."""
NOT_INSTALLED = "not installed"
NOT_RUN = "does not run here"
NOT_DONE = "it was not ready when the time was over"
"""Of a peer: it is installed, and raises."""
GOAL_GRPO = 2.0
REPS = 3
LAYOUTS = ("auto", "padded", "packed", "prefix_shared")
BETA, LOW, HIGH, TRL_ROWS = 0.04, 0.2, 0.28, 8


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much work one step is."""

    prompts: int = 8
    group: int = 8
    prompt_median: int = 200
    completion_median: int = 500
    completion_most: int = 2048
    token_budget: int = 16_384
    reps: int = 3


def make_policy(shape: Shape, device: torch.device) -> CausalLMPolicy:
    """A model of this shape with random weights, in bfloat16 on a GPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlhf_pipeline import CausalLMPolicy

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    with device:
        model: Any = Qwen2ForCausalLM(config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return CausalLMPolicy(model.to(dtype), eos_token_id=[], pad_token_id=0)


def make_rows(sizes: Sizes, vocab: int) -> list[Row]:
    """Trajectories with log-normal lengths, fixed by the sizes alone."""
    rng = torch.Generator().manual_seed(1)
    level = -float(torch.tensor(float(vocab)).log())
    rows: list[Row] = []
    for prompt in range(sizes.prompts):
        length = int(sizes.prompt_median * (0.8 * torch.randn((), generator=rng)).exp().clamp(0.2, 4.0)) + 1
        ids = torch.randint(5, vocab, (length,), generator=rng)
        for member in range(sizes.group):
            own = int(sizes.completion_median * (0.8 * torch.randn((), generator=rng)).exp())
            own = max(1, min(own, sizes.completion_most))
            assistant = torch.arange(length + own) >= length
            scores = level + 0.1 * torch.randn(2, length + own, generator=rng)
            rows.append(
                Row(
                    {
                        ("tokens", "full"): torch.cat([ids, torch.randint(5, vocab, (own,), generator=rng)]),
                        ("masks", "all_assistant_mask"): assistant,
                        ("log_probs", "full"): torch.where(assistant, scores[0], torch.nan),
                        ("next", "ref_log_probs", "full"): torch.where(assistant, scores[1], torch.nan),
                        "group_id": torch.tensor(prompt),
                        "trajectory_id": torch.tensor(prompt * sizes.group + member),
                        "policy_version": torch.tensor(0),
                        "num_prompt_tokens": torch.tensor(length),
                        "task_reward": torch.rand((), generator=rng),
                        ("next", "done"): torch.tensor(True),
                    }
                )
            )
    return rows


def our_loss(policy: CausalLMPolicy) -> GRPOLoss:
    """Clip-higher with a KL term of k3 against the reference, token mean."""
    from rlhf_pipeline import GRPOLoss

    return GRPOLoss(policy, clip_epsilon=(LOW, HIGH), entropy_bonus=False, kl_to_ref_coeff=BETA, kl_estimator="k3")


def steps_of_ours(policy: CausalLMPolicy, buffer: TrajectoryReplayBuffer, config: Learn, ledger: Path):
    """A function that takes one whole step and returns (loss, gradient norm)."""
    from rlhf_pipeline import Learner
    from rlhf_pipeline.run.ledger import Ledger

    learner = Learner(
        policy=policy,
        loss=our_loss(policy),
        buffer=buffer,
        config=config,
        max_staleness=1_000_000,
        max_completion_tokens=4096,
        ledger=Ledger(ledger),
        seed=0,
    )
    done = [0]

    def step() -> tuple[float, float]:
        done[0] += 1
        metrics = learner.step(done[0])
        for notice in learner.take_notices():
            print(f"    notice: {notice}")
        loss, norm = metrics["loss"], metrics["grad_norm"]
        return float(loss or 0.0), float(norm or 0.0)

    return step


def token_losses(
    log_probs: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, advantage: torch.Tensor
) -> torch.Tensor:
    """The same loss on plain log-probs, float32."""
    ratio = (log_probs - old).clamp(-20, 20).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
    gap = (log_probs - ref).clamp(-20, 20)
    return policy + BETA * ((-gap).exp() - 1 + gap)


def steps_of_full_logits(policy: CausalLMPolicy, rows: list[Row], config: Learn, device: torch.device):
    """Padded to the token budget, logits of every position in float32."""
    from rlhf_pipeline.learner.optimizer import PolicyOptimizer
    from rlhf_pipeline.policies.packed import plan_batches

    optimizer = PolicyOptimizer(policy.model, config)
    table = _columns(rows, device)
    lengths = torch.tensor([len(row["tokens", "full"]) for row in rows])

    def step() -> tuple[float, float]:
        total = 0.0
        for chosen in plan_batches(lengths, max(config.token_budget, int(lengths.max()))):
            batch = {name: _pad([values[i] for i in chosen.tolist()]) for name, values in table.items()}
            mask = batch["mask"][:, 1:]
            # Padding stands on the right, where a causal model does not look from a real token.
            logits = policy.model(input_ids=batch["ids"], use_cache=False).logits[:, :-1].float()
            log_probs = logits.log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]
            del logits
            losses = token_losses(log_probs, *(batch[name][:, 1:] for name in ("old", "ref", "advantage")))
            loss = (losses * mask).sum() / _tokens(table)
            loss.backward()
            total += float(loss.detach())
        return _finish(optimizer, config, total)

    return step


def steps_of_trl_layout(policy: CausalLMPolicy, rows: list[Row], config: Learn, device: torch.device):
    """Prompts padded on the left, completions on the right, to the longest of all; TRL's formulas."""
    from rlhf_pipeline.learner.optimizer import PolicyOptimizer

    optimizer = PolicyOptimizer(policy.model, config)
    table = _columns(rows, device)
    prompts = [int(row["num_prompt_tokens"]) for row in rows]
    before, after = max(prompts), max(len(row["tokens", "full"]) - n for row, n in zip(rows, prompts, strict=True))

    def laid_out(values: list[torch.Tensor], chosen: range) -> torch.Tensor:
        out = values[0].new_zeros(len(chosen), before + after)
        for place, i in enumerate(chosen):
            out[place, before - prompts[i] : before - prompts[i] + len(values[i])] = values[i]
        return out

    def step() -> tuple[float, float]:
        total = 0.0
        for start in range(0, len(rows), TRL_ROWS):
            chosen = range(start, min(start + TRL_ROWS, len(rows)))
            batch = {name: laid_out(values, chosen) for name, values in table.items()}
            positions = (batch["real"].cumsum(1) - 1).clamp_min(0)
            logits = policy.model(
                input_ids=batch["ids"],
                attention_mask=batch["real"],
                position_ids=positions,
                use_cache=False,
                logits_to_keep=after + 1,
            ).logits[:, :-1]
            ids = batch["ids"][:, -after:]
            log_probs = _selected(logits, ids)
            with torch.no_grad():
                for part in logits.reshape(-1, logits.shape[-1]).split(128):
                    spread = part.log_softmax(-1)
                    (spread.exp() * spread).sum(-1)
            del logits
            losses = token_losses(log_probs.float(), *(batch[name][:, -after:] for name in ("old", "ref", "advantage")))
            loss = (losses * batch["mask"][:, -after:]).sum() / _tokens(table)
            loss.backward()
            total += float(loss.detach())
        return _finish(optimizer, config, total)

    return step


def steps_with_liger(
    policy: CausalLMPolicy, rows: list[Row], config: Learn, device: torch.device, *, padding_free: bool
):
    """Liger's fused head and loss, on TRL's padded rows or on rows laid end to end."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    from rlhf_pipeline.learner.optimizer import PolicyOptimizer
    from rlhf_pipeline.policies.packed import plan_micro_batches

    if padding_free and device.type == "cuda":
        policy.model.set_attn_implementation("flash_attention_2")  # pyright: ignore[reportCallIssue]
    optimizer = PolicyOptimizer(policy.model, config)
    fused = LigerFusedLinearGRPOLoss(
        beta=BETA, epsilon_low=LOW, epsilon_high=HIGH, loss_type="dapo", compiled=device.type == "cuda"
    )
    table = _columns(rows, device)
    prompts = [int(row["num_prompt_tokens"]) for row in rows]
    sizes = [len(row["tokens", "full"]) for row in rows]
    trunk: Any = policy.model.model
    plan = [torch.arange(start, min(start + TRL_ROWS, len(rows))) for start in range(0, len(rows), TRL_ROWS)]
    if padding_free:
        plan = plan_micro_batches("packed", sizes, max(config.token_budget, *sizes)).rows

    def states(chosen: list[int]) -> list[torch.Tensor]:
        """The states that predict the completion of each row, `[tokens, H]`."""
        ids = [table["ids"][i] for i in chosen]
        if padding_free:
            positions = torch.cat([torch.arange(len(row), device=device) for row in ids])[None]
            hidden = trunk(input_ids=torch.cat(ids)[None], position_ids=positions, use_cache=False)
            parts = hidden.last_hidden_state[0].split([len(row) for row in ids])
        else:
            before = max(prompts[i] for i in chosen)
            shift = [before - prompts[i] for i in chosen]
            width = before + max(sizes[i] - prompts[i] for i in chosen)
            padded, real = ids[0].new_zeros(2, len(chosen), width)
            for place, row in enumerate(ids):
                padded[place, shift[place] : shift[place] + len(row)] = row
                real[place, shift[place] : shift[place] + len(row)] = 1
            positions = (real.cumsum(1) - 1).clamp_min(0)
            hidden = trunk(input_ids=padded, attention_mask=real, position_ids=positions, use_cache=False)
            parts = [
                row[first : first + size]
                for row, first, size in zip(hidden.last_hidden_state, shift, map(len, ids), strict=True)
            ]
        return [part[prompts[i] - 1 : -1] for part, i in zip(parts, chosen, strict=True)]

    def step() -> tuple[float, float]:
        total = 0.0
        for batch in plan:
            chosen = batch.tolist()
            own = {name: _pad([values[i][prompts[i] :] for i in chosen]) for name, values in table.items()}
            loss, *_ = fused(
                _pad(states(chosen)),
                policy.head_weight,
                own["ids"],
                own["mask"].long(),
                own["advantage"][:, 0],
                ref_per_token_logps=own["ref"],
                old_per_token_logps=own["old"],
                num_items_in_batch=_tokens(table),
            )
            loss.backward()
            total += float(loss.detach())
        return _finish(optimizer, config, total)

    return step


def _selected(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of tokens as TRL takes them: by logsumexp per row in float32, by log_softmax per row in bfloat16."""
    if logits.dtype == torch.float32:
        chosen = logits.gather(-1, ids[..., None])[..., 0]
        return chosen - torch.stack([row.logsumexp(-1) for row in logits])
    pairs = zip(logits, ids, strict=True)
    return torch.stack([row.log_softmax(-1).gather(-1, i[:, None])[:, 0] for row, i in pairs])


def _columns(rows: list[Row], device: torch.device) -> dict[str, list[torch.Tensor]]:
    rewards = torch.stack([row["task_reward"] for row in rows])
    groups = torch.stack([row["group_id"] for row in rows])
    advantage = torch.zeros_like(rewards)
    for group in groups.unique():
        at = groups == group
        advantage[at] = (rewards[at] - rewards[at].mean()) / rewards[at].std().clamp_min(1e-6)
    masks = [row["masks", "all_assistant_mask"] for row in rows]
    table = {
        "ids": [row["tokens", "full"] for row in rows],
        "mask": masks,
        "real": [torch.ones(len(mask), dtype=torch.int64) for mask in masks],
        "old": [row["log_probs", "full"].nan_to_num() for row in rows],
        "ref": [row["next", "ref_log_probs", "full"].nan_to_num() for row in rows],
        "advantage": [mask * a for mask, a in zip(masks, advantage, strict=True)],
    }
    return {name: [value.to(device) for value in values] for name, values in table.items()}


def _pad(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


def _tokens(table: dict[str, list[torch.Tensor]]) -> int:
    return sum(int(mask.sum()) for mask in table["mask"])


def _finish(optimizer: PolicyOptimizer, config: Learn, total: float) -> tuple[float, float]:
    norm = float(optimizer.clip(config.max_grad_norm))
    optimizer.step(config.lr)
    return total, norm


def measure(step: Callable[[], tuple[float, float]], reps: int, device: torch.device) -> dict[str, float]:
    """Median seconds, peak memory above nothing (GPU), loss and norm, after one warm-up."""
    loss, norm = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    for _ in range(reps):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"seconds": statistics.median(seconds), "peak": float(peak), "loss": loss, "norm": norm}


Keep = Callable[[dict[str, Any]], None]
"""Takes what a section has found so far, each time that there is more."""


def step_section(
    name: str, sizes: Sizes, device: torch.device, peak_flops: float, variants: list[str], keep: Keep
) -> dict[str, Any]:
    """Print the table of one model's step."""
    shape = SHAPES[name]
    rows = make_rows(sizes, shape.vocab)
    lengths = torch.tensor([len(row["tokens", "full"]) for row in rows])
    scored = torch.tensor([int(row["masks", "all_assistant_mask"].sum()) for row in rows])
    tokens = int(lengths.sum())
    print(
        f"\nstep, {name}: {len(rows)} trajectories, {tokens:,} real tokens, {int(scored.sum()):,} of them completions"
    )
    head = f"  {'path':36} {'s/step':>8} {'tokens/s':>10} {'MFU':>6} {'peak GB':>8} {'loss off':>9} {'norm off':>9}"
    print(head)
    found: dict[str, dict[str, Any]] = {}
    first: dict[str, float] | None = None
    for variant in variants:
        keep(found)
        try:
            with tempfile.TemporaryDirectory() as folder:
                result = _run_variant(variant, name, sizes, rows, device, Path(folder))
        except ModuleNotFoundError as error:
            found[variant] = {NOT_INSTALLED: str(error.name)}
            print(f"  {variant:36} {NOT_INSTALLED}: {error.name}")
            continue
        except Exception as error:  # noqa: BLE001 - a peer may not compile here, or have no kernel for this device
            found[variant] = _not_run(error, ours=variant.startswith("ours"))
            print(f"  {variant:36} {_in_words(found[variant])}")
            _free(device)
            continue
        cost = result.pop("cost")
        first = first or result
        result["tokens_per_s"] = tokens / result["seconds"]
        result["mfu"] = cost.flops(lengths, scored) / (result["seconds"] * peak_flops)
        off = [abs(result[key] - first[key]) / max(abs(first[key]), 1e-12) for key in ("loss", "norm")]
        found[variant] = result | {"loss_off": off[0], "norm_off": off[1]}
        if not max(off) <= MOST_OFF[torch.bfloat16 if device.type == "cuda" else torch.float32]:
            found[variant]["failed"] = "loss or gradient norm differ from the first path's"
        peak = f"{result['peak'] / 1e9:8.2f}" if result["peak"] else f"{'-':>8}"
        print(
            f"  {variant:36} {result['seconds']:8.3f} {result['tokens_per_s']:10,.0f} {result['mfu']:6.1%} "
            f"{peak} {off[0]:9.1e} {off[1]:9.1e}",
            flush=True,
        )
        _free(device)
    keep(found)
    if name != "tiny":
        _verdict(shape, found)
    return found


def _not_run(error: Exception, *, ours: bool) -> dict[str, Any]:
    """Return what to record of a path that raised: a failure of ours, or a peer that does not run here."""
    lines = str(error).strip().splitlines()
    return {"failed" if ours else NOT_RUN: f"{type(error).__name__}: {lines[0][:90] if lines else ''}"}


def _in_words(row: dict[str, Any]) -> str:
    ((what, why),) = row.items()
    return f"{what}: {why}"


def _run_variant(
    variant: str, name: str, sizes: Sizes, rows: list[Row], device: torch.device, folder: Path
) -> dict[str, Any]:
    from rlhf_pipeline import Learn, MCAdvantage, TrajectoryReplayBuffer
    from rlhf_pipeline.learner.metrics import ModelCost

    policy = make_policy(SHAPES[name], device)
    kind, _, option = variant.partition(", ")
    # A learning rate that moves nothing: every path and repetition sees the same weights.
    config = Learn(lr=1e-12, token_budget=sizes.token_budget, max_grad_norm=1e9)
    cost = ModelCost.of(policy)
    if kind != "ours":
        make: Any = steps_of_trl_layout if kind == "TRL layout" else steps_of_full_logits
        if kind == "Liger loss":
            make = partial(steps_with_liger, padding_free=bool(option))
        return measure(make(policy, rows, config, device), sizes.reps, device) | {"cost": cost}
    layout, *more = option.split(", ")
    config = dataclasses.replace(
        config,
        layout=layout,  # pyright: ignore[reportArgumentType]
        activation_checkpointing="recomputed activations" in more,
        compile="off" if "not compiled" in more else "auto",
    )
    buffer = TrajectoryReplayBuffer(storage=folder / "store", transform=MCAdvantage(sizes.group))
    try:
        buffer.extend(lazy_stack(rows))  # pyright: ignore[reportArgumentType]
        step = steps_of_ours(policy, buffer, config, folder / "ledger.jsonl")
        return measure(step, sizes.reps, device) | {"cost": cost}
    finally:
        buffer.trajectories.close()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _verdict(shape: Shape, found: dict[str, dict[str, Any]]) -> None:
    """Say which goals are met; goals hold for an H200 only, the ratio to TRL's layout wherever it is measured."""
    ours = {name: row for name, row in found.items() if name.startswith("ours") and "seconds" in row}
    if not ours:
        return
    best = min(ours, key=lambda name: ours[name]["seconds"])
    row, lines = ours[best], []
    trl = found.get("TRL layout", {})
    if "seconds" in trl:
        lines.append(("x TRL's layout", trl["seconds"] / row["seconds"], GOAL_AGAINST_TRL))
    if torch.cuda.is_available() and shape.goal_mfu is not None and shape.goal_tokens is not None:
        lines.append(("MFU of the measured peak", row["mfu"], shape.goal_mfu))
        lines.append(("real tokens/s", row["tokens_per_s"], shape.goal_tokens))
    for what, value, goal in lines:
        print(f"  {best}: {value:,.2f} {what}, goal {goal:,g}: {'met' if value >= goal else 'missed'}")


def decode_section(
    name: str, device: torch.device, slots: list[int], context: int, new: int, keep: Keep
) -> dict[str, Any]:
    """Print sampled tokens per second of our engine, of vLLM where it is installed, and of transformers.

    transformers samples by `generate`, and by `generate_batch`: continuous batching, on a GPU with CUDA graphs and
    compiled.

    Beside the rate of decoding alone stands that of the whole call, prompts included. Ours and vLLM's with log-probs,
    through the same interface and in the same process; completions of one length, and of log-normal ones up to four
    times that.
    """
    from rlhf_pipeline.policies.engines.protocol import Engine, Request

    shape = SHAPES[name]
    policy = make_policy(shape, device)
    print(f"\ndecode, {name}: prompts of {context} tokens, {new} new tokens each, or log-normal around that")
    print(f"  {'engine':28} {'lengths':>8} {'slots':>6} {'tokens/s':>10} {'whole call':>11}")
    found: dict[str, Any] = {}
    rng = torch.Generator().manual_seed(2)
    drawn: dict[int, tuple[list[list[int]], list[int]]] = {}
    for number in slots:
        prompts = [torch.randint(5, shape.vocab, (context,), generator=rng).tolist() for _ in range(number)]
        spread = (new * (0.8 * torch.randn(number, generator=rng)).exp()).long().clamp(1, 4 * new).tolist()
        drawn[number] = prompts, spread

    def sampled(engine: Engine, prompts: list[list[int]], limits: list[int]) -> int:
        return len(engine.generate(Request(prompts=prompts, max_new_tokens=limits)).token_ids)

    def static(model: Any, prompts: list[list[int]], limits: list[int]) -> int:
        ids, most = torch.tensor(prompts, device=device), limits[0]
        options = {"max_new_tokens": most, "min_new_tokens": most, "do_sample": True, "top_k": 0, "pad_token_id": 0}
        return int(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, context:].numel())

    def timed(engine: str, number: int, call: Callable[[list[int]], int]) -> None:
        for lengths, limits in (("equal", [new] * number), ("ragged", drawn[number][1])):
            if lengths == "ragged" and engine.startswith("transformers"):
                continue  # it has one limit for all
            seconds: dict[bool, list[float]] = {True: [], False: []}
            tokens = call(limits)
            for _ in range(REPS):
                for whole in (True, False):
                    _free(device)
                    started = time.perf_counter()
                    call(limits if whole else [1] * number)
                    seconds[whole].append(time.perf_counter() - started)
            both, prompts_alone = (statistics.median(seconds[whole]) for whole in (True, False))
            rate, of_call = (tokens - number) / (both - prompts_alone), tokens / both
            found[f"{engine}, {lengths}, {number}"] = rate
            found[f"{engine}, {lengths}, {number}, whole call"] = of_call
            print(f"  {engine:28} {lengths:>8} {number:6} {rate:10,.0f} {of_call:11,.0f}", flush=True)
            keep(found)

    for number, (prompts, _) in drawn.items():
        policy.num_slots = number
        timed("ours: slots", number, partial(sampled, policy.engine, prompts))
        timed("transformers generate", number, partial(static, policy.model, prompts))
    # What has to be prepared comes last: a peer that compiles for too long costs its own line.
    for number, (prompts, _) in drawn.items():
        makers: dict[str, Callable[[contextlib.ExitStack], Callable[[list[int]], int] | None]] = {
            "transformers generate_batch": partial(_continuous, shape, device, prompts, new),
            "vLLM": partial(_vllm_call, policy, number, context + 4 * new, prompts, sampled),
        }
        for engine, make in makers.items():
            line = f"{engine}, {number}"
            found[line] = {NOT_RUN: NOT_DONE}
            keep(found)
            try:
                with contextlib.ExitStack() as stack:
                    made = make(stack)
                    if made is not None:
                        timed(engine, number, made)
                del found[line]
            except Exception as error:  # noqa: BLE001 - a peer may not run here
                found[line] = _not_run(error, ours=False)
                print(f"  {engine:28} {_in_words(found[line])}")
    keep(found)
    best, peer = (found.get(f"{engine}, equal, 256") for engine in ("ours: slots", "vLLM"))
    if best is not None and name == "0.5b":
        print(f"  ours at 256 slots: {best:,.0f}, goal {GOAL_DECODE:,g}: {'met' if best >= GOAL_DECODE else 'missed'}")
        if peer is not None:
            share = best / peer
            print(f"  of vLLM's: {share:.2f}, goal {GOAL_OF_VLLM:g}: {'met' if share >= GOAL_OF_VLLM else 'missed'}")
    return found


def grpo_section(
    name: str, sizes: Sizes, device: torch.device, *, model: Path | None, questions: Path | None
) -> dict[str, Any]:
    """Print trajectories and tokens per second of whole steps: ours, and TRL's trainer where it is installed."""
    from _grpo import QUESTIONS, Task, made_up_questions, run_ours, run_trl, save_checkpoint

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def made(special: dict[str, Any]) -> Any:
        policy = make_policy(SHAPES[name], torch.device("cpu"))
        for key, value in special.items():
            setattr(policy.model.config, key, value)
        return policy.model

    on_gpu, found = device.type == "cuda", dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        if questions is None:
            questions = QUESTIONS if QUESTIONS.is_file() else made_up_questions(Path(folder) / "questions.jsonl")
        vocab, share = SHAPES[name].vocab, 1 / sizes.completion_median
        task = Task(
            model=model or save_checkpoint(Path(folder), made, questions=questions, vocab=vocab, stop_share=share),
            questions=questions,
            prompts=sizes.prompts,
            group=sizes.group,
            limit=sizes.completion_most,
            steps=sizes.reps,
            dtype="bfloat16" if on_gpu else "float32",
            device=device.type,
        )
        options = _options_of_trl(task, on_gpu=on_gpu)
        print(f"\ngrpo, {model or name}: {task.prompts} prompts of {task.group} completions, up to {task.limit} tokens")
        print(f"  {'trainer':12} {'s/step':>8} {'trajectories/s':>15} {'tokens/s':>10} {'tokens each':>12}")
        for trainer, call in {"ours": partial(run_ours, task, clock), "TRL": partial(run_trl, task, clock)}.items():
            try:
                row: dict[str, Any] = call(**options) if trainer == "TRL" else call()
            except ModuleNotFoundError as error:
                found[trainer] = {NOT_INSTALLED: str(error.name)}
                print(f"  {trainer:12} {NOT_INSTALLED}: {error.name}")
                continue
            except Exception as error:  # noqa: BLE001 - the peer may not run here
                found[trainer] = _not_run(error, ours=trainer == "ours")
                print(f"  {trainer:12} {_in_words(found[trainer])}")
                continue
            finally:
                _free(device)
            row |= {"trajectories_per_s": task.rows / row["seconds"]}
            row |= {"tokens_per_s": row["length"] * row["trajectories_per_s"]}
            found[trainer] = row | ({"options": {k: str(v) for k, v in options.items()}} if trainer == "TRL" else {})
            print(
                f"  {trainer:12} {row['seconds']:8.3f} {row['trajectories_per_s']:15.2f} {row['tokens_per_s']:10,.0f} "
                f"{row['length']:12.1f}",
                flush=True,
            )
    if "seconds" in found["ours"] and "seconds" in found["TRL"]:
        ratio, of_tokens = (found["ours"][rate] / found["TRL"][rate] for rate in ("trajectories_per_s", "tokens_per_s"))
        goal = f", goal {GOAL_GRPO:g}: {'met' if ratio >= GOAL_GRPO else 'missed'}" if on_gpu else ""
        print(f"  {ratio:.2f} x TRL's trajectories a second{goal}; {of_tokens:.2f} x its tokens")
        print(f"  TRL ran with {', '.join(f'{key}={value}' for key, value in options.items())}")
    return found


def _options_of_trl(task: Any, *, on_gpu: bool) -> dict[str, Any]:
    """Return what a user of TRL turns on, as far as it is installed."""
    if not on_gpu:
        return {"model_init_kwargs": {"dtype": "float32"}}
    has = {name: importlib.util.find_spec(name) is not None for name in ("vllm", "flash_attn", "liger_kernel")}
    options: dict[str, Any] = {
        "use_cpu": False,
        "bf16": True,
        "model_init_kwargs": {"dtype": "float32"},
        "batch": min(TRL_ROWS, task.rows),
        "accumulate": max(1, task.rows // TRL_ROWS),
    }
    if has["flash_attn"]:
        options["model_init_kwargs"]["attn_implementation"] = "flash_attention_2"
    if has["liger_kernel"]:
        options["use_liger_kernel"] = True
    if has["vllm"]:
        options |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
        options["vllm_max_model_length"] = 2 * task.limit
    return options


def _continuous(
    shape: Shape, device: torch.device, prompts: list[list[int]], new: int, stack: contextlib.ExitStack
) -> Callable[[list[int]], int]:
    """Return a call of transformers' continuous batching on a model of its own, compiled and captured."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model: Any = make_policy(shape, device).model
    on_gpu = device.type == "cuda"
    options = {"return_logprobs": True, "max_memory_percent": 0.4, "use_cuda_graph": on_gpu}
    config = ContinuousBatchingConfig(**options, default_compile_level=1 if on_gpu else 0)  # pyright: ignore[reportArgumentType]
    if not on_gpu:
        config.num_blocks, config.max_batch_tokens = 64, 256

    def call(limits: list[int]) -> int:
        generation = GenerationConfig(
            max_new_tokens=limits[0], do_sample=True, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=-1
        )
        found = model.generate_batch(
            prompts, generation, continuous_batching_config=config, persistent_manager=True, progress_bar=False
        )
        return sum(len(one.generated_tokens) for one in found.values())

    def end() -> None:
        with contextlib.suppress(AttributeError):
            model.destroy_cached_continuous_batching_manager()

    stack.callback(end)
    if call([new]) != new * len(prompts):
        raise RuntimeError("it sampled another number of tokens than was asked for")
    return call


def _vllm_call(
    policy: CausalLMPolicy,
    slots: int,
    positions: int,
    prompts: list[list[int]],
    sampled: Callable[..., int],
    stack: contextlib.ExitStack,
) -> Callable[[list[int]], int] | None:
    engine = _vllm(policy, slots, positions, stack)
    return None if engine is None else partial(sampled, engine, prompts)


def _vllm(policy: CausalLMPolicy, slots: int, positions: int, stack: contextlib.ExitStack) -> Any:
    """Give vLLM with the policy's weights until the stack ends; None where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from rlhf_pipeline.policies.engines.vllm import VLLMEngine

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    policy.save_pretrained(folder)
    weight = policy.head_weight
    engine = VLLMEngine(
        folder,
        num_slots=slots,
        vocab=policy.vocab_size,
        max_positions=positions,
        dtype=str(weight.dtype).removeprefix("torch."),
        memory=0.4,
        eager=not weight.is_cuda,
    )
    stack.callback(engine.close)
    engine.load_weights(policy.model.state_dict(), 0)
    return engine


def measured_peak_flops(device: torch.device, dtype: torch.dtype, *, size: int, seconds: float) -> float:
    """Operations per second of large square matmuls on a device, the best of a while: a peak that can be reached."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, ends = 0.0, time.perf_counter() + seconds
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.mm(a, b)
    while time.perf_counter() < ends:
        wait()
        started = time.perf_counter()
        torch.mm(a, b)
        wait()
        best = max(best, 2.0 * size**3 / (time.perf_counter() - started))
    return best


def main() -> int:
    """Run the sections that were asked for."""
    from transformers.utils.logging import disable_progress_bar

    from rlhf_pipeline.learner.metrics import peak_flops_of

    disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", "--quick", action="store_true", help="a tiny model, on the device there is")
    parser.add_argument("--models", default="0.5b,1.5b")
    parser.add_argument("--sections", default="step,decode,grpo")
    parser.add_argument("--token-budget", type=int, default=16_384)
    parser.add_argument("--prompt-median", type=int, default=200)
    parser.add_argument("--completion-median", type=int, default=500)
    parser.add_argument("--grpo-completion-median", type=int, default=100)
    parser.add_argument("--grpo-completion-most", type=int, default=256)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--model", type=Path, help="a model's folder for the section grpo, instead of random weights")
    parser.add_argument("--questions", type=Path, help="JSONL with a `question` per line for that section; GSM8K's")
    parser.add_argument("--json", type=Path, help="write hardware, versions and figures here")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        print("There is no CUDA device: the tiny mode runs instead (--tiny).")
        args.tiny = True
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = 8192 if device.type == "cuda" else 512
    peak = measured_peak_flops(device, dtype, size=size, seconds=2.0 if device.type == "cuda" else 0.2)
    known = peak_flops_of(device, dtype)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    print(f"{hardware}, torch {torch.__version__}: measured peak {peak / 1e12:.2f} TFLOP/s ({dtype})", end="")
    print("" if known is None else f", data sheet {known / 1e12:.0f}")
    sizes = Sizes(
        prompt_median=args.prompt_median,
        completion_median=args.completion_median,
        token_budget=args.token_budget,
        reps=args.reps,
    )
    # So that both trainers take their steps within a minute.
    of_grpo = dataclasses.replace(
        sizes, completion_median=args.grpo_completion_median, completion_most=args.grpo_completion_most
    )
    slots, context, new, models = args.slots, 512, 128, args.models.split(",")
    if args.tiny:
        sizes = Sizes(prompts=4, group=4, prompt_median=20, completion_median=24, completion_most=96, token_budget=512)
        of_grpo, slots, context, new, models = sizes, [4], 16, 8, ["tiny"]
    variants = [f"ours, {layout}" for layout in LAYOUTS]
    variants += ["ours, auto, not compiled", "ours, packed, recomputed activations", "full logits", "TRL layout"]
    variants += ["Liger loss", "Liger loss, padding-free"]
    libraries = ("torch", "transformers", "torchrl", "trl", "vllm", "liger-kernel", "flash-attn")
    results: dict[str, Any] = {
        "hardware": hardware,
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda} | _versions(libraries),
        "peak_flops": peak,
        "sizes": dataclasses.asdict(sizes),
    }

    def keep(section: str, found: dict[str, Any]) -> None:
        """Write all figures so far: whatever ends this process leaves them."""
        results[section] = found
        if args.json:
            args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")

    for name in models:
        if "step" in args.sections:
            step_section(name, sizes, device, peak, variants, partial(keep, f"step {name}"))
        if "decode" in args.sections:
            decode_section(name, device, slots, context, new, partial(keep, f"decode {name}"))
        if "grpo" in args.sections:
            grpo = grpo_section(name, of_grpo, device, model=args.model, questions=args.questions)
            keep(f"grpo {name}", grpo)
        _free(device)
    if args.json:
        print(f"\nwritten: {args.json}")
    sections = [results.get(f"{section} {name}", {}) for name in models for section in ("step", "grpo")]
    paths = [row for section in sections for row in section.values()]
    return 1 if any("failed" in row for row in paths) else 0


def _versions(libraries: tuple[str, ...]) -> dict[str, str]:
    installed = {}
    for library in libraries:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[library] = importlib.metadata.version(library)
    return installed


if __name__ == "__main__":
    raise SystemExit(main())
