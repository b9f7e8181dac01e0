"""prime-rl 0.8 (commit 559b447): `token_exports/step_N/rank_R.jsonl` of `--enable-token-export`.

Writer: `TokenExporter` in `src/prime_rl/trainer/rl/token_export.py`. Fields per token: `token_ids`, `position_ids`,
`loss_mask`, `advantages`, `inference_logprobs`, `trainer_logprobs`, `entropy` and more; per sequence:
`schema_version`, `step`, `rank`, `micro_step`, `micro_sequence_idx`, `export_sequence_idx`, `env_name`. There are no
rewards, no groups.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_pipeline.exchange.fields import Fields, RawRollout
from rlhf_pipeline.exchange.sequence import cut
from rlhf_pipeline.exchange.tool import Tool


def _read(fields: Fields) -> Iterator[RawRollout | None]:
    row = fields.row
    whole = {"tokens": row["token_ids"], "completion_mask": row["loss_mask"]}
    found = cut({**whole, "log_probs": row["inference_logprobs"], "advantage": row["advantages"]})
    if not found["completion_ids"]:
        yield None
        return
    found["policy_version"] = row["step"]
    yield RawRollout(**fields.made(found), group=("row", fields.number), meta=fields.meta("env_name", "rank"))


TOOL = Tool(
    name="prime-rl",
    summary="token exports of prime-rl",
    signature=frozenset(
        {
            *("schema_version", "step", "rank", "env_name", "export_sequence_idx"),
            *("token_ids", "loss_mask", "advantages", "inference_logprobs", "trainer_logprobs"),
        }
    ),
    about="tokens=token_ids, mask=loss_mask, log_probs=inference_logprobs, advantage=advantages, policy_version=step",
    lacks=("rewards", "groups: each row is one", "why a completion ended"),
    read=_read,
)
