"""Grade-school mathematics: questions from a JSONL file, any checkpoint folder, reward = the final number is right."""

from __future__ import annotations

from rlhf_pipeline import (
    GRPO,
    Buffer,
    Collect,
    Learn,
    Pipeline,
    PretrainedPolicy,
    Prompts,
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
