"""Learn from stored trajectories only: imported graded solutions, or those of earlier runs."""

from __future__ import annotations

from rlhf_pipeline import GRPO, Collect, Learn, Pipeline, PretrainedPolicy, Replay, Sample, WritePath


def offline_replay() -> Pipeline:
    """GRPO on stored groups: every trajectory once per epoch, 128 in a step, three epochs."""
    return Pipeline(
        name="offline_replay",
        description="learn from stores alone: imported solutions or earlier runs; nothing is sampled",
        needs="replay.stores (`rlhf-pipeline replay STORE...`) and policy.path (a checkpoint folder)",
        policy=PretrainedPolicy(path="model"),
        replay=Replay(epochs=3),
        sample=Sample(batch_size=128),
        collect=Collect(max_new_tokens=256),
        write=WritePath(estimator="grpo"),
        # Trajectories without log-probs have the initial policy as behaviour policy. The bounds on the token ratios
        # keep the policy near it when a trajectory is used in several epochs.
        loss=GRPO(clip_low=0.2, clip_high=0.2, aggregation="token_mean", dual_clip=3.0),
        learn=Learn(steps=10_000, lr=1e-5, warmup_steps=5, token_budget=8192),
    )
