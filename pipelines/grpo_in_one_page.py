"""GRPO in one page: the algorithm of `rlhf-pipeline run`, written out with its own parts.

    python pipelines/grpo_in_one_page.py                        # about a minute on a CPU
    rlhf-pipeline show runs/grpo_in_one_page/store              # what was sampled, token by token

A model made from scratch learns to copy four digits. Kill the program at any time (`kill -9`) and start it again: it
ends with the same weights as an uninterrupted run, bit for bit. There is no code for that beyond what you see here. It
follows from two rules: samples are on disk before anything is learned from them, and every choice is a function of
numbers that are known after a crash.

This page is for reading. `rlhf-pipeline run copy_digits` is the same task with everything that a long run needs:
micro-batches, a ledger, metrics, checksums of checkpoints, collectors in separate processes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs.transforms import Compose

from rlhf_pipeline import (
    CausalLMPolicy,
    CopyDigits,
    GRPOLoss,
    KLRewardTransform,
    MCAdvantage,
    RetrieveLogProb,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    scratch_policy,
    token_match,
)

SEED = 0
PROMPTS, GROUP = 16, 16  # per step: 16 prompts, each answered 16 times
ROWS = PROMPTS * GROUP
TASK = CopyDigits(num_digits=4)  # prompt number n of a seed is always the same: "2741=", with the answer "2741"


def main(out: Path, steps: int) -> None:
    """Collect and learn in turn until `steps` optimizer steps are done, continuing from an interrupted start."""
    # Prompts and answers are characters here; `CausalLMPolicy.from_pretrained(folder)` takes any causal language model.
    policy, reference = (scratch_policy("0123456789=", seed=SEED, num_slots=ROWS, max_new_tokens=4) for _ in range(2))
    reference.requires_grad_(False)  # the initial policy; the KL term keeps the policy near it

    # The write path. `extend` runs it from last to first: score the trajectories under the reference, subtract the KL
    # to it from the reward, compare each trajectory with its group. The results are stored with the trajectory.
    write_path = [
        # The reward minus the group's mean. GRPO also divides by the standard deviation (estimator="grpo"); then a
        # group that differs in one digit only pulls as hard as one that has learned nothing.
        MCAdvantage(GROUP, estimator="dr_grpo"),
        KLRewardTransform(coef=0.001),
        RetrieveLogProb(reference),
    ]
    # The store is a folder: ragged rows, one atomic and checksummed commit per `extend`. Opening it again shows every
    # committed row, so this line also starts the resume.
    storage = TrajectoryStorage(out / "store")
    buffer = TrajectoryReplayBuffer(storage=storage, transform=Compose(*write_path), seed=SEED)

    loss = GRPOLoss(policy, clip_epsilon=0.2, entropy_coeff=0.02)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    done = load(out / "checkpoint.pt", policy, optimizer)

    for step in range(done + 1, steps + 1):
        # Collect. The rows of step n are (n - 1) * ROWS to n * ROWS of the store, so its length shows whether they
        # have been sampled. After a crash they may have been, with the same weights: nothing is sampled twice.
        if len(storage.store) < step * ROWS:
            buffer.extend(lazy_stack(list(rollout(policy, step))))

        # Sample. A batch is a function of the rows to choose from, the seed and the step: no cursor, no state. Here it
        # is all rows of this step; with an earlier `start`, strategy="priority" would replay older ones as well.
        batch = buffer.sample_step(step, strategy="fresh", start=(step - 1) * ROWS, at=step * ROWS)

        # Learn: clipped policy gradient and entropy bonus, over the sampled tokens of a padded batch.
        out_of_loss = loss(batch)
        out_of_loss.total_loss().backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        save(out / "checkpoint.pt", step, policy, optimizer)
        reward, entropy = batch["task_reward"].mean().item(), out_of_loss.entropy.item()
        print(f"step {step:3d}   reward {reward:.2f}   entropy {entropy:.2f}", flush=True)
    storage.close()


def rollout(policy: CausalLMPolicy, step: int) -> Iterator[TensorDict]:
    """Sample `GROUP` completions of each prompt of a step, grade them, and yield them as trajectories.

    The prompt's number identifies its group and its random stream, so a rollout that a crash interrupts is sampled
    again token for token.
    """
    numbers = range((step - 1) * PROMPTS, step * PROMPTS)
    prompts = [TASK.prompt(number, SEED) for number in numbers]
    prompt_ids = [policy.tokenizer.encode(prompt.text) for prompt in prompts]
    completions = policy.generate_groups(prompt_ids, group_size=GROUP, seed=SEED, stream_ids=numbers)
    for completion in completions:
        prompt, before = prompts[completion.prompt_index], prompt_ids[completion.prompt_index]
        text = policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        # From here to the loss these ids are the truth; no text is encoded again. The log-probs are those of the
        # sampling policy at the sampling temperature: the denominator of the loss's ratio.
        unscored = torch.full((len(before),), torch.nan)
        yield TensorDict(
            {
                ("tokens", "full"): torch.tensor(before + completion.token_ids),
                ("masks", "all_assistant_mask"): torch.arange(len(before) + len(completion.token_ids)) >= len(before),
                ("log_probs", "full"): torch.cat([unscored, completion.log_probs]),
                ("next", "done"): torch.tensor(True),
                "task_reward": torch.tensor(token_match(prompt.text, text, prompt.answer, {})),
                "group_id": torch.tensor(numbers[completion.prompt_index]),
                "policy_version": torch.tensor(step - 1),  # optimizer steps behind these weights
                "prompt": prompt.text,
                "completion": text,
                "finish_reason": completion.finish_reason,
            }
        )


def save(path: Path, step: int, policy: CausalLMPolicy, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint atomically: a kill leaves the old one or the new one."""
    unfinished = path.with_suffix(".unfinished")
    torch.save({"step": step, "policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    os.replace(unfinished, path)


def load(path: Path, policy: CausalLMPolicy, optimizer: torch.optim.Optimizer) -> int:
    """Restore what `save` wrote, and return how many steps are done."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    policy.load_state_dict(saved["policy"])
    optimizer.load_state_dict(saved["optimizer"])
    print(f"continuing after step {saved['step']}", flush=True)
    return saved["step"]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("runs/grpo_in_one_page"))
    options.add_argument("--steps", type=int, default=120)
    given = options.parse_args()
    main(given.out, given.steps)
