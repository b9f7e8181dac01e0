"""SkyRL 0.3.0 (commit a956457): `dumped_evals/global_step_N_evals/DATASET.jsonl`.

Writer: `dump_per_dataset_eval_results` in `skyrl/train/utils/trainer_utils.py`. Fields: `input_prompt` and
`output_response`, the token ids decoded with their special tokens; `score`, the reward, or one per token, whose sum
it is; `stop_reason`, of the engine; `env_class`, `env_extras`, `data_source`. The response of a multi-turn
environment holds what the environment said, and the mask is not written. Rows have no id: a group is the rows of a
file with one prompt. Without the conversation mode SkyRL puts an end token after a response that lacks one.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_pipeline.exchange.fields import Fields, RawRollout, as_reward
from rlhf_pipeline.exchange.tool import NO_SCORES, NO_TOKENS, Tool, number_in
from rlhf_pipeline.exchange.turns import check_one_turn

ONE_TURN = frozenset({"aime", "gsm8k", "lcb"})
"""The environments of skyrl-gym 0.4.0 that end after one response."""


def _read(fields: Fields) -> Iterator[RawRollout]:
    score = fields.row["score"]
    if isinstance(score, list) and "reward" not in fields.given:
        fields = fields.of({**fields.row, "score": sum(as_reward(part, "score") for part in score)})
    found = fields.take(
        prompt="input_prompt", completion="output_response", reward="score", finish_reason="stop_reason"
    )
    text = found.get("completion", "")
    check_one_turn(text, one_turn=fields.one_turn, known=fields.row["env_class"] not in ONE_TURN)
    found = {"policy_version": number_in(fields.path, r"global_step_(\d+)") or 0, **found}
    group = ("input_prompt", str(fields.row["input_prompt"]))
    yield RawRollout(**found, group=group, as_chat=False, meta=fields.meta())


TOOL = Tool(
    name="skyrl",
    summary="SkyRL's dumps of evaluations",
    signature=frozenset(
        {"input_prompt", "output_response", "score", "stop_reason", "env_class", "env_extras", "data_source"}
    ),
    about="prompt=input_prompt, completion=output_response, reward=score, finish_reason=stop_reason, "
    "group=rows with one input_prompt, policy_version=global_step_N of the folder",
    lacks=(NO_TOKENS, "which words an environment said", NO_SCORES),
    read=_read,
)
