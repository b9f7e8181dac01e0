"""Teach a model made from scratch to push a box onto its target, turn by turn: CPU only, nothing downloaded."""

from __future__ import annotations

from rlhf_pipeline import (
    GRPO,
    Collect,
    Evaluate,
    Learn,
    Pipeline,
    Reward,
    Sokoban,
    TinyPolicy,
    Warehouses,
    WritePath,
)


def sokoban() -> Pipeline:
    """Warehouses of 6 x 6 cells with one box, one letter a turn; a hash of the warehouse decides which are held out."""
    return Pipeline(
        name="sokoban",
        description="push a box onto its target in several turns; a 0.1 M parameter model made from scratch, on a CPU",
        policy=TinyPolicy(alphabet="LDRU#_XOPS*", hidden_size=64, num_layers=2, num_heads=4),
        prompts=Warehouses(),
        environment=Sokoban,
        reward=(Reward("solved"), Reward("nearer")),
        collect=Collect(
            prompts_per_rollout=64, group_size=4, max_new_tokens=1, max_turns=6, max_row_tokens=128, num_slots=1024
        ),
        write=WritePath(estimator="reinforce_pp"),
        loss=GRPO(entropy_coeff=0.02),
        # A reward of 1 or more is only for those who solve it, so pass@1 is their share.
        evaluate=Evaluate(prompts=Warehouses(held_out=True), every=40, num_prompts=128, group_size=4),
        learn=Learn(steps=320, lr=3e-3, warmup_steps=5, lr_schedule="linear", checkpoint_every=40),
    )
