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
        # Collectors sample with weights of up to 4 steps ago, so that neither they nor the learner wait for the other.
        # A rollout takes seconds and a sync milliseconds: what is acknowledged here survives a power loss, too.
        buffer=Buffer(durability="power", max_staleness=4),
        loss=GRPO(entropy_coeff=0.02),
        # No stop_at_reward. After a kill the steps since the last checkpoint are taken again: a few seconds of work.
        learn=Learn(steps=2000, lr=2e-3, checkpoint_every=20),
    )
