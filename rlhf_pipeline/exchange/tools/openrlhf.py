"""OpenRLHF 0.9.6: the generations with rewards of `openrlhf.cli.batch_inference --eval_task rm`.

Writer: `batch_rm_inference` in `openrlhf/cli/batch_inference.py`, the last one: 0.9.7 removed it, and OpenRLHF 0.11
writes no rollouts to files. Fields: `input`, the prompt as it was sampled from, template applied; `output`; `reward`,
of the reward model. Best-of-N samples are not in turn (`prompts * N`, then by rank): a group is the rows of a file
with one prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_pipeline.exchange.fields import Fields, RawRollout
from rlhf_pipeline.exchange.tool import NO_END, NO_SCORES, NO_TOKENS, Tool
from rlhf_pipeline.exchange.turns import check_one_turn


def _read(fields: Fields) -> Iterator[RawRollout]:
    found = fields.take(prompt="input", completion="output", reward="reward")
    check_one_turn(found.get("completion", ""), one_turn=fields.one_turn)
    yield RawRollout(**found, group=("input", str(fields.row["input"])), as_chat=False, meta=fields.meta())


TOOL = Tool(
    name="openrlhf",
    summary="OpenRLHF's generations with rewards",
    signature=frozenset({"input", "output", "reward"}),
    also=lambda row: len(row) == 3,
    about="prompt=input, completion=output, reward=reward, group=rows with one input",
    lacks=(NO_TOKENS, NO_END, NO_SCORES, "the policy's version"),
    read=_read,
)
