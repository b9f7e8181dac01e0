"""The tools whose dumps `import` reads, one module each: what its current writer writes, and nothing like it."""

from __future__ import annotations

from rlhf_pipeline.errors import DefinitionError, did_you_mean
from rlhf_pipeline.exchange.fields import Row
from rlhf_pipeline.exchange.tool import Tool
from rlhf_pipeline.exchange.tools import (
    episodes,
    gsm8k_solutions,
    nemo_rl,
    open_instruct,
    openrlhf,
    plain_rows,
    skyrl,
    slime,
    tinker,
    token_exports,
    trl_table,
    verl,
)

TOOLS: tuple[Tool, ...] = (
    *(trl_table.TOOL, verl.TOOL, slime.TOOL, *episodes.TOOLS, token_exports.TOOL, open_instruct.TOOL, skyrl.TOOL),
    *(nemo_rl.TOOL, openrlhf.TOOL, tinker.TOOL, gsm8k_solutions.TOOL),
)
ROWS = plain_rows.TOOL
NAMES: tuple[str, ...] = ("auto", "jsonl", "rows", *dict.fromkeys(tool.name for tool in TOOLS), "store")
"""What `--format` takes; `jsonl` is `rows` of a file whose name tells nothing; `store` is what `export` writes."""


def is_store_row(row: Row) -> bool:
    """Return True for a row that `rlhf-pipeline export` wrote."""
    return "input_ids" in row and any(name in row for name in ("assistant_mask", "num_prompt_tokens", "trajectory_id"))


def check_format(name: str) -> None:
    """Raise a DefinitionError where `--format` does not take a name."""
    if name not in NAMES:
        raise DefinitionError(f"there is no format '{name}'." + did_you_mean(name, NAMES))


def find_tool(name: str, row: Row, *, is_export: bool = False) -> Tool | None:
    """Return the tool of a file from its first row; None for rows that `export` wrote, or where `is_export` says so.

    Raises:
        DefinitionError: the file is not of the tool that is named.

    >>> find_tool("auto", {"prompt": "1+1=", "completion": "2", "reward": 1.0}).name
    'rows'
    """
    check_format(name)
    if name == "store" or (name == "auto" and (is_export or is_store_row(row))):
        return None
    found = next((tool for tool in TOOLS if tool.matches(row)), ROWS)
    if name in ("jsonl", "rows"):
        return ROWS
    if name in ("auto", found.name):
        return found
    named = [tool for tool in TOOLS if tool.name == name]
    lacking = min((tool.signature - row.keys() for tool in named), key=len)
    raise DefinitionError(
        f"this is not {' or '.join(tool.summary for tool in named)}: it lacks the fields {', '.join(sorted(lacking))}, "
        f"and looks like --format {found.name}."
    )
