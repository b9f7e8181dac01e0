"""slime 0.3.1 (commit 624b824): `--save-debug-rollout-data PATH/{rollout_id}.pt`, or `--dump-details`.

Writer: `save_debug_rollout_data` in `slime/observability/rollout_data_utils.py`: a file of `torch.save` with
`rollout_id` and `samples`, each `Sample.to_dict()` of `slime/utils/types.py`. Fields: `group_index`, `index`;
`prompt`, text or messages; `tokens`, prompt and response; `response`, `response_length`; `reward`, a number or a
dict, of which the run's `--reward-key` names one; `loss_mask`, per response token, or None for all;
`rollout_log_probs`, per response token, 0 for what was not sampled; `status`, `completed`, `truncated`, `aborted`,
`failed` or `pending`; `remove_sample`, whose mask slime sets to 0; `weight_versions`; `label`; `metadata`. The
version is that of the rollout, `rollout_id`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange.fields import Fields, RawRollout, as_ids, as_int
from rlhf_pipeline.exchange.tool import Tool, number_in

_ENDS = {"completed": ("stop", ""), "truncated": ("length", ""), "aborted": ("abort", "engine")}
_ENDS |= {"failed": ("", "tool_error"), "pending": ("", "engine")}
"""By status: why the response ended, and the kind of failure. `failed` is slime's word for a tool or an API."""


def _read(fields: Fields) -> Iterator[RawRollout | None]:
    row = fields.row
    size = as_int(row["response_length"], "response_length")
    tokens = as_ids(row["tokens"], "tokens")
    if not 0 <= size <= len(tokens):
        raise DataError(f"response_length is {size}, and there are {len(tokens)} tokens.")
    if row["status"] not in _ENDS:
        raise DataError(f"field 'status' must be one of {', '.join(_ENDS)}, got {row['status']!r}.")
    reason, failure = _ENDS[str(row["status"])]
    if failure and not size:
        yield None
        return
    if isinstance(row["reward"], dict) and "reward" not in fields.given:
        keys = [*map(str, row["reward"])]
        raise DefinitionError(
            f"the rewards are dicts ({', '.join(keys)}). Name the run's --reward-key: --field reward=reward.{keys[0]}"
        )
    more = {"completion_mask": "loss_mask", "log_probs": "rollout_log_probs", "answer": "label"}
    more = {target: name for target, name in more.items() if row.get(name) is not None}
    found = fields.take(prompt="prompt", completion="response", reward="reward", **more)
    version = number_in(fields.path, r"(?:eval_)?(\d+)\.pt\Z")
    found = {"policy_version": version or 0, "finish_reason": reason, **found}
    start = len(tokens) - size
    found |= {"prompt_ids": tokens[:start], "completion_ids": tokens[start:]}
    group = None if row["group_index"] is None else (row["group_index"],)
    meta = fields.meta("index", "status", "metadata", "weight_versions", "remove_sample")
    yield RawRollout(**found, group=group, failure=failure, mask_known=not row["remove_sample"], meta=meta)


TOOL = Tool(
    name="slime",
    summary="slime's debug rollout data",
    signature=frozenset(
        {
            *("group_index", "index", "prompt", "tokens", "response", "response_length", "label", "reward"),
            *("loss_mask", "weight_versions", "rollout_log_probs", "remove_sample", "status", "metadata"),
        }
    ),
    about="tokens=tokens, completion=the last response_length of them, mask=loss_mask, log_probs=rollout_log_probs, "
    "reward=reward, finish_reason=status, group=group_index, policy_version=rollout_id of the file's name",
    read=_read,
)
