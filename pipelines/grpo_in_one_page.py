"""GRPO in one page: the algorithm that `rlhf-pipeline run` runs, written out from the parts it is made of.

    python pipelines/grpo_in_one_page.py                        # about a minute on a CPU
    rlhf-pipeline show runs/grpo_in_one_page/store              # what was sampled, token by token

A model made from scratch learns to copy four digits. Kill the program whenever you like (`kill -9`) and start it again:
it ends with the weights that it would have had, bit for bit. There is no code for that beyond what you see here. It
follows from two rules: what was sampled is on disk before anything is learned from it, and every choice is a function
of numbers that are known after a crash.

This page is for reading. `rlhf-pipeline run copy_digits` is the same task with everything that a long run needs:
micro-batches, a ledger, metrics, checksums of checkpoints, collectors in processes of their own.
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
    """Collect and learn in turn until `steps` optimizer steps are done, or go on where the last start was cut off."""
    # Prompts and answers are characters here; `CausalLMPolicy.from_pretrained(folder)` takes any causal language model.
    policy, reference = (scratch_policy("0123456789=", seed=SEED, num_slots=ROWS, max_new_tokens=4) for _ in range(2))
    reference.requires_grad_(False)  # the policy as it was at the start; the KL term keeps the policy near it

    # The write path. `extend` runs it from the last to the first: score the trajectories under the reference, take the
    # KL to it out of the reward, compare each trajectory with its group. The result is stored beside the trajectory.
    write_path = [
        # The reward less the group's mean. GRPO divides by the standard deviation as well (estimator="grpo"); then a
        # group that agrees but for one digit pulls as hard as one that has learned nothing.
        MCAdvantage(GROUP, estimator="dr_grpo"),
        KLRewardTransform(coef=0.001),
        RetrieveLogProb(reference),
    ]
    # The store is a folder: ragged rows, one atomic and checksummed commit per `extend`. Opening it again shows every
    # row that was committed, so this line also begins the resume.
    storage = TrajectoryStorage(out / "store")
    buffer = TrajectoryReplayBuffer(storage=storage, transform=Compose(*write_path), seed=SEED)

    loss = GRPOLoss(policy, clip_epsilon=0.2, entropy_coeff=0.02)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    done = load(out / "checkpoint.pt", policy, optimizer)

    for step in range(done + 1, steps + 1):
        # Collect. The rows of step n are number (n - 1) * ROWS to n * ROWS of the store, so its length says whether
        # they have been sampled. After a crash they may have been, by the same weights: nothing is sampled twice.
        if len(storage.store) < step * ROWS:
            buffer.extend(lazy_stack(list(rollout(policy, step))))

        # Sample. A batch is a function of the rows that it may choose from, the seed and the step: no cursor, no state.
        # These are all rows of this step; with an earlier `start`, strategy="priority" would replay older ones as well.
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
    """Sample `GROUP` completions of each prompt of a step, grade them, and give them as trajectories.

    The prompt's number names its group and its stream of random numbers, so a rollout that a crash cut short is sampled
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
        # policy that sampled, at the temperature at which it sampled: what the loss's ratio is taken against.
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
    """Replace the checkpoint as a whole: a kill leaves the old one or the new one."""
    unfinished = path.with_suffix(".unfinished")
    torch.save({"step": step, "policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    os.replace(unfinished, path)


def load(path: Path, policy: CausalLMPolicy, optimizer: torch.optim.Optimizer) -> int:
    """Put back what `save` wrote, and return how many steps are done."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    policy.load_state_dict(saved["policy"])
    optimizer.load_state_dict(saved["optimizer"])
    print(f"going on after step {saved['step']}", flush=True)
    return saved["step"]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("runs/grpo_in_one_page"))
    options.add_argument("--steps", type=int, default=120)
    given = options.parse_args()
    main(given.out, given.steps)
