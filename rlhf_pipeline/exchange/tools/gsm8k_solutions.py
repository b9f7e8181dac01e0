"""GSM8K's `example_model_solutions.jsonl`: four graded solutions of a question.

Fields: `question`, `ground_truth`, and one object per model with `solution` and `is_correct`. A row is one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf_pipeline.exchange.fields import Fields, RawRollout
from rlhf_pipeline.exchange.tool import NO_END, NO_SCORES, NO_TOKENS, Tool


def _is_solution(value: Any) -> bool:
    return isinstance(value, dict) and "is_correct" in value and "solution" in value


def _read(fields: Fields) -> Iterator[RawRollout]:
    for model, value in fields.row.items():
        if _is_solution(value):
            each = fields.of({**fields.row, **value})
            found = each.take(prompt="question", answer="ground_truth", completion="solution", reward="is_correct")
            yield RawRollout(**found, group=("row", fields.number), meta={"model": model})


TOOL = Tool(
    name="gsm8k-solutions",
    summary="graded solutions in the form of GSM8K's example_model_solutions.jsonl",
    signature=frozenset({"question", "ground_truth"}),
    also=lambda row: any(_is_solution(value) for value in row.values()),
    about="prompt=question, answer=ground_truth, completion=*.solution, reward=*.is_correct, one group per line",
    lacks=(NO_TOKENS, NO_END, NO_SCORES),
    read=_read,
)
