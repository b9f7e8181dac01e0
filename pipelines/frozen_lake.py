"""Teach a model made from scratch to cross a frozen lake, turn by turn: CPU only, nothing downloaded, a few minutes."""

from __future__ import annotations

from rlhf_pipeline import (
    GRPO,
    Buffer,
    Collect,
    Evaluate,
    FrozenLake,
    LakeMaps,
    Learn,
    Pipeline,
    Reward,
    Sample,
    TinyPolicy,
    WritePath,
)


def frozen_lake() -> Pipeline:
    """Maps of 4 x 4 cells, one letter a turn; a hash of the map decides which are held out."""
    return Pipeline(
        name="frozen_lake",
        description="cross a frozen lake in several turns; a 0.1 M parameter model made from scratch, on a CPU",
        policy=TinyPolicy(alphabet="LDRU.,O#G", hidden_size=64, num_layers=2, num_heads=4),
        prompts=LakeMaps(start_anywhere=True),
        environment=FrozenLake,
        # A walk that is still going is worth what it has gained: with a small weight, not falling would hardly pay.
        reward=(Reward("reached"), Reward("nearer")),
        collect=Collect(
            prompts_per_rollout=64, group_size=4, max_new_tokens=1, max_turns=10, max_row_tokens=56, num_slots=1024
        ),
        # Where all members of a group walk into the same dead end, only the batch's mean tells that they can do better.
        write=WritePath(estimator="reinforce_pp"),
        loss=GRPO(entropy_coeff=0.02),
        # One step on the whole of each rollout, and two on walks of the last eight: by steps on new walks alone, some
        # seeds stay with a way that leads into a hole half the time (benchmarks/experiment_frozen_lake.py).
        buffer=Buffer(max_staleness=24),
        sample=Sample(strategy="anchored", min_ess=0.3),
        # A reward of 1 or more is only for those who reach the goal, so pass@1 is their share; the checkpoint of the
        # best evaluation is kept, and counts.
        evaluate=Evaluate(prompts=LakeMaps(held_out=True), every=60, num_prompts=128, group_size=4),
        learn=Learn(steps=480, epochs=3, lr=3e-3, warmup_steps=5, lr_schedule="linear", checkpoint_every=60),
    )
