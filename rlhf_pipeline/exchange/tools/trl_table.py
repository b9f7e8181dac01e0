"""TRL 1.16: the completions table of `GRPOTrainer(log_completions=True)`, `completions/completions_STEP.parquet`.

Writer: `GRPOTrainer.log` in `trl/trainer/grpo_trainer.py`. Columns in this order: `step`, counted from 1; `prompt`
and `completion`, text or messages; one column per reward function, called after it; those of `log_extra`;
`advantage`. The weights of the functions are not written, nor which columns are rewards. Completions are decoded
without special tokens. Rows of one prompt stand in turn. Each log writes the last generation, also where several
steps are taken on it. A completion that no function could score has NaN in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.exchange.fields import Fields, RawRollout
from rlhf_pipeline.exchange.tool import NO_END, NO_SCORES, NO_TOKENS, Tool

_FIXED = ("step", "prompt", "completion", "advantage")


def _first_row_tells(fields: Fields) -> dict[str, str]:
    """Return the one column of numbers that may be the reward, unless the user names it."""
    if "reward" in fields.given:
        return {}
    numbers = [
        name
        for name, value in fields.row.items()
        if name not in _FIXED and (value is None or isinstance(value, (bool, int, float)))
    ]
    if len(numbers) > 1:
        raise DefinitionError(
            f"which columns are the rewards? The columns of numbers are {', '.join(numbers)}. Name one or a sum, "
            f"with the training's weights: --field reward={numbers[0]} or --field reward={numbers[0]}+0.5*{numbers[1]}"
        )
    if not numbers:
        raise DefinitionError(f"no column of rewards. {fields.there()} Name it: --field reward=NAME")
    return {"reward": numbers[0]}


def _read(fields: Fields) -> Iterator[RawRollout]:
    found = fields.take(prompt="prompt", completion="completion", advantage="advantage", policy_version="step")
    if "policy_version" not in fields.given:
        found["policy_version"] = max(found.get("policy_version", 0) - 1, 0)
    yield RawRollout(**found, as_chat=False, meta=fields.meta())


TOOL = Tool(
    name="trl",
    summary="the completions table of TRL's GRPOTrainer",
    signature=frozenset(_FIXED),
    also=lambda row: [*row][:3] == ["step", "prompt", "completion"] and [*row][-1] == "advantage",
    about="prompt=prompt, completion=completion, advantage=advantage, policy_version=step-1, "
    "group=rows in turn with one prompt",
    lacks=(NO_TOKENS, NO_END, NO_SCORES, "the weights of the reward functions"),
    read=_read,
    first_row_tells=_first_row_tells,
    repeated_but="step",
)
