"""NeMo-RL 0.6.0 (commit 7ea279a): `train_data_stepN.jsonl` of GRPO, sync and async, and of PPO.

Writer: `Logger.log_batched_dict_as_jsonl` in `nemo_rl/utils/logger.py`, called by `nemo_rl/algorithms/grpo.py`,
`grpo_sync.py` and `ppo.py`. It slices a batch into parts of one, so each field is a list with one item. Fields:
`token_ids`, padded on the right; `input_lengths`; `token_loss_mask`, 1 for what was generated; `generation_logprobs`
and `advantages`, per token; `prev_logprobs`; `sample_loss_mask`, 0 for a sample that is kept out of the loss (cut
off, or masked by its environment); `rewards`; `content`, the texts of the messages; `idx`. Under dynamic sampling
`rewards` is of the batch before it was filtered, and `filtered_rewards` of the samples in the file. Members of a
group stand in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.exchange.fields import Fields, RawRollout, as_int, as_number
from rlhf_pipeline.exchange.sequence import cut
from rlhf_pipeline.exchange.tool import Tool, number_in

_FIELDS = (
    *("token_ids", "token_loss_mask", "input_lengths", "sample_loss_mask", "rewards"),
    *("advantages", "generation_logprobs", "prev_logprobs"),
)


def _read(fields: Fields) -> Iterator[RawRollout]:
    wrapped = isinstance(fields.row["input_lengths"], list)
    row = {name: _one(name, value) if wrapped else value for name, value in fields.row.items()}
    whole = {"tokens": row["token_ids"], "completion_mask": row["token_loss_mask"]}
    whole |= {"log_probs": row["generation_logprobs"], "advantage": row["advantages"]}
    found = cut(whole, length=as_int(row["input_lengths"], "input_lengths"))
    content = row.get("content") or []
    texts = [content] if isinstance(content, str) else [str(text) for text in content]  # the sync trainer: the answer
    found |= {"prompt": "".join(texts[:-1]), "completion": texts[-1] if texts else ""}
    found |= {"reward": row.get("filtered_rewards", row["rewards"])}
    found |= {"policy_version": max((number_in(fields.path, r"train_data_step(\d+)") or 1) - 1, 0)}
    learned = as_number(row["sample_loss_mask"], "sample_loss_mask") > 0
    meta = {name: row[name] for name in ("idx", "agent_ref") if name in row} | ({} if learned else {"learned": False})
    yield RawRollout(**fields.of(row).made(found), mask_known=learned, meta=meta)


def _one(name: str, value: Any) -> Any:
    """Return the one item of a field, which the writer puts into a list."""
    if name == "idx" or not isinstance(value, list):
        return value
    if len(value) != 1:
        if name in _FIELDS:
            raise DataError(f"field '{name}' must be a list of one item, as NeMo-RL writes it, got {len(value)} items.")
        return None
    return value[0]


TOOL = Tool(
    name="nemo-rl",
    summary="NeMo-RL's train_data_step*.jsonl",
    signature=frozenset(_FIELDS),
    about="tokens=token_ids up to input_lengths, mask=token_loss_mask, log_probs=generation_logprobs, "
    "reward=filtered_rewards or rewards, advantage=advantages, policy_version=N-1 of stepN, "
    "group=rows in turn with one prompt",
    lacks=("why a completion ended",),
    read=_read,
)
