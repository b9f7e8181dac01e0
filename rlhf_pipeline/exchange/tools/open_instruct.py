"""open-instruct (commit e6c3044): `RUN_rollouts_NNNNNN.jsonl` of `--save_traces`.

Writer: `_save_rollouts` of `RolloutRecord` in `open_instruct/rl_utils.py`. Fields: `step`, `sample_idx`;
`prompt_idx`, the group within the step; `prompt_tokens`, `response_tokens`; `reward`, `advantage`; `finish_reason`,
of vLLM; `dataset`; `ground_truth`, token ids or text; `request_info`, of tools, or null; `logprobs`, per response
token, or null. Tool output is part of `response_tokens`, and the mask of it is not written: where
`request_info.tool_calleds` is true, which tokens were sampled is unknown. `--mask_truncated_completions` drops rows
before `prompt_idx` is counted, so a group whose prompts differ is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_pipeline.exchange.fields import Fields, RawRollout, Row, part_of
from rlhf_pipeline.exchange.tool import Tool


def _read(fields: Fields) -> Iterator[RawRollout]:
    row, info = fields.row, part_of(fields.row, "request_info")
    truth = row["ground_truth"]
    are_ids = isinstance(truth, list) and all(isinstance(item, int) for item in truth)
    text = {} if are_ids else {"answer": "ground_truth"}
    scores = {} if row["logprobs"] is None else {"log_probs": "logprobs"}
    found = fields.take(
        prompt_ids="prompt_tokens",
        completion_ids="response_tokens",
        reward="reward",
        advantage="advantage",
        finish_reason="finish_reason",
        policy_version="step",
        **text,
        **scores,
    )
    called = bool(info.get("tool_calleds"))
    failure = "timeout" if info.get("timeouts") else "tool_error" if info.get("tool_errors") else ""
    group = (row["step"], row["prompt_idx"])
    yield RawRollout(**found, group=group, mask_known=not called, failure=failure, meta=fields.meta())


def is_metadata(row: Row) -> bool:
    """Return True for the row of the file that is written beside the shards, which has no rollouts."""
    return row.keys() == {"run_name", "git_commit", "model_name", "timestamp"}


TOOL = Tool(
    name="open-instruct",
    summary="rollout shards of open-instruct's --save_traces",
    signature=frozenset(
        {
            *("step", "sample_idx", "prompt_idx", "prompt_tokens", "response_tokens", "reward", "advantage"),
            *("finish_reason", "dataset", "ground_truth", "request_info", "logprobs"),
        }
    ),
    about="prompt_ids=prompt_tokens, completion_ids=response_tokens, log_probs=logprobs, reward=reward, "
    "advantage=advantage, finish_reason=finish_reason, policy_version=step, group=step+prompt_idx",
    lacks=("which tokens tools gave: rows that called one stay out of the loss",),
    read=_read,
)
