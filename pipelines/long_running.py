"""An unattended run: `rlhf-pipeline run long_running --collectors 2`; docs/long_running.md explains it."""

from __future__ import annotations

from rlhf_pipeline import GRPO, Buffer, Collect, CopyDigits, Learn, Pipeline, TinyPolicy, WritePath, token_match


def long_running() -> Pipeline:
    """Copy digits, like `copy_digits`, without an end: an example of the settings of an unattended run."""
    return Pipeline(
        name="long_running",
        description="copy digits for as long as you like; made for run --collectors N, on a CPU",
        policy=TinyPolicy(alphabet="0123456789=", hidden_size=64, num_layers=2, num_heads=4),
        prompts=CopyDigits(num_digits=4),
        reward=token_match,
        collect=Collect(prompts_per_rollout=16, group_size=16, max_new_tokens=4, num_slots=256),
        write=WritePath(estimator="dr_grpo"),
        # Collectors sample with weights that are up to 2 steps old, so that they and the learner need not always wait
        # for each other. A sync costs milliseconds: acknowledged trajectories also survive a power loss.
        buffer=Buffer(durability="power", max_staleness=2),
        loss=GRPO(entropy_coeff=0.01),
        # No stop_at_reward: the run continues after the task is solved. Most gradients are small then, and an optimizer
        # with a short memory and a high rate amplifies the few large ones: with copy_digits' lr=2e-3 and beta2=0.95 the
        # reward repeatedly fell back to 0.8. After a kill the steps since the last checkpoint are repeated.
        learn=Learn(steps=2000, lr=3e-4, beta2=0.999, max_grad_norm=0.3, checkpoint_every=20),
    )
