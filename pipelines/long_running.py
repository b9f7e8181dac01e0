"""A run that is left alone: `rlhf-pipeline run long_running --collectors 2`; docs/long_running.md explains it."""

from __future__ import annotations

from rlhf_pipeline import GRPO, Buffer, Collect, CopyDigits, Learn, Pipeline, TinyPolicy, WritePath, token_match


def long_running() -> Pipeline:
    """Copying digits, as `copy_digits`, without an end: it shows the settings of a run that is left alone."""
    return Pipeline(
        name="long_running",
        description="copy digits for as long as you like; made for run --collectors N, on a CPU",
        policy=TinyPolicy(alphabet="0123456789=", hidden_size=64, num_layers=2, num_heads=4),
        prompts=CopyDigits(num_digits=4),
        reward=token_match,
        collect=Collect(prompts_per_rollout=16, group_size=16, max_new_tokens=4, num_slots=256),
        write=WritePath(estimator="dr_grpo"),
        # Collectors sample with weights that are up to 2 steps old, so that neither they nor the learner wait for each
        # other all the time. A sync costs milliseconds: what is acknowledged here survives a power loss, too.
        buffer=Buffer(durability="power", max_staleness=2),
        loss=GRPO(entropy_coeff=0.01),
        # No stop_at_reward: the run goes on after the task is solved. Gradients are small then, and an optimizer that
        # forgets quickly, with a high rate, blows up the few that are not: with copy_digits' lr=2e-3 and beta2=0.95 the
        # reward fell back to 0.8 again and again. After a kill the steps since the last checkpoint are taken again.
        learn=Learn(steps=2000, lr=3e-4, beta2=0.999, max_grad_norm=0.3, checkpoint_every=20),
    )
