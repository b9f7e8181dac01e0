"""Grade-school mathematics: questions from a JSONL file, any checkpoint folder, reward = the final number is right."""

from __future__ import annotations

import dataclasses

from rlhf_pipeline import (
    GRPO,
    Buffer,
    Collect,
    Evaluate,
    Learn,
    Pipeline,
    PretrainedPolicy,
    Prompts,
    Reward,
    SoftOverlong,
    WritePath,
    final_number_match,
)


def gsm8k() -> Pipeline:
    """GRPO with the KL penalty in the reward, on questions in GSM8K's form."""
    return Pipeline(
        name="gsm8k",
        description="grade-school maths from a JSONL file; reward = the final number is right",
        needs="prompts.path (GSM8K's train.jsonl) and policy.path (a checkpoint folder; `rlhf-pipeline new-model`)",
        policy=PretrainedPolicy(path="model"),
        prompts=Prompts(
            path="train.jsonl",
            prompt_field="question",
            answer_field="answer",
            system="Solve the problem step by step. End with #### and the number.",
        ),
        reward=final_number_match,
        collect=Collect(prompts_per_rollout=8, group_size=8, max_new_tokens=256, num_slots=64),
        write=WritePath(estimator="grpo", kl_coef=0.001),
        buffer=Buffer(max_staleness=0),
        loss=GRPO(clip_low=0.2, clip_high=0.28),
        learn=Learn(steps=200, lr=1e-6, warmup_steps=5, token_budget=8192),
    )


def gsm8k_evaluated() -> Pipeline:
    """The same with two weighted rewards, and an evaluation on the test questions that keeps the best checkpoint."""
    learned = gsm8k()
    assert isinstance(learned.prompts, Prompts)
    return dataclasses.replace(
        learned,
        name="gsm8k_evaluated",
        description="gsm8k with a second reward for the length, evaluated on test questions every 20 steps",
        needs=f"{learned.needs}, and evaluate.prompts.path (GSM8K's test.jsonl)",
        reward=(final_number_match, Reward(SoftOverlong(max_tokens=256, cache=64), weight=0.2, name="length")),
        evaluate=Evaluate(
            prompts=dataclasses.replace(learned.prompts, path="test.jsonl"),
            every=20,
            num_prompts=200,
            group_size=4,
            # The sum of both rewards: 1 for a right answer within 192 tokens, 0.8 for one at the limit.
            success_at=0.8,
        ),
    )
