"""verl 0.9.1: `trainer.rollout_data_dir/STEP.jsonl`, of both trainers.

Writer: `_write_generations` in `verl/trainer/ppo/ray_trainer.py` (`RayPPOTrainer`) and in
`verl/trainer/ppo/v1/trainer_base.py` (`trainer.use_v1`). Fields of both: `input` and `output`, the prompt and the
response decoded without special tokens; `gts`, the ground truth; `score`, the sum of the token scores; `step`, the
number of the step, counted from 1. `RayPPOTrainer` adds what the reward function gave and `request_id`, in the order
of balanced batches, without any id of the prompt: a group is the rows of a step with one prompt. The v1 trainer adds
`uid`, the key `PROMPT_SESSION_OUTPUT` of each sample: a group is one PROMPT.

What the reward function gave may overwrite `score` (`base_data[k] = v`): a function that returns a dict under DAPO's
manager puts its own score there, without the overlong penalty, which then stands in `overlong_reward`. The manager
`limited` says `timeout` and `error` of a grading that failed, whose score is 0.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.exchange.fields import Fields, RawRollout
from rlhf_pipeline.exchange.tool import NO_END, NO_SCORES, NO_TOKENS, Tool
from rlhf_pipeline.exchange.turns import check_one_turn

_KEY = re.compile(r"(.+)_\d+_\d+\Z")


def _group(fields: Fields, step: int) -> Hashable:
    key = fields.row.get("uid")
    found = _KEY.match(str(key)) if key is not None else None
    return (step, "input", str(fields.row["input"])) if found is None else (step, found[1])


def _read(fields: Fields) -> Iterator[RawRollout]:
    row = fields.row
    if row.get("overlong_reward") is not None and "reward" not in fields.given:
        raise DefinitionError(
            "the rows have score and overlong_reward, and verl's DAPO manager writes the score with the penalty or "
            "without it. Say which: --field reward=score (a reward function that returns a number) or "
            "--field reward=score+overlong_reward (one that returns a dict)"
        )
    found = fields.take(prompt="input", completion="output", reward="score", policy_version="step", answer="gts")
    check_one_turn(found.get("completion", ""), one_turn=fields.one_turn)
    step = found.get("policy_version", 0)
    if "policy_version" not in fields.given:
        found["policy_version"] = max(step - 1, 0)
    failed = isinstance(row.get("error"), str) and row["error"]
    failure = "timeout" if row.get("timeout") is True else "grader_error" if failed else ""
    yield RawRollout(**found, group=_group(fields, step), failure=failure, as_chat=False, meta=fields.meta())


TOOL = Tool(
    name="verl",
    summary="verl's rollout_data_dir dumps",
    signature=frozenset({"input", "output", "gts", "score", "step"}),
    about="prompt=input, completion=output, reward=score, answer=gts, policy_version=step-1, group=the prompt in uid, "
    "else rows of a step with one input",
    lacks=(NO_TOKENS, "special tokens: verl leaves out the chat markup of prompts", NO_END, NO_SCORES),
    read=_read,
)
