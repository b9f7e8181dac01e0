"""The formats that `import` reads, and how a file is recognised by its field names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_pipeline.errors import DefinitionError, did_you_mean
from rlhf_pipeline.exchange._flat import FlatReader, OpenInstructReader, TRLReader, verl_reader
from rlhf_pipeline.exchange._nested import PrimeRLReader, SolutionsReader, TinkerReader, is_solution
from rlhf_pipeline.exchange._rollout import Rollout
from rlhf_pipeline.exchange._sources import Container

Row = Mapping[str, Any]


class Reader(Protocol):
    """Turns rows of one file into rollouts."""

    def about(self) -> str:
        """Return which field was taken for what, in words."""
        ...

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollouts of one row."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format."""

    name: str
    summary: str
    """What it is, in a few words."""
    matches: Callable[[Row], bool]
    """Whether a row looks like it."""
    reader: Callable[[Row, Mapping[str, str]], Reader]
    """Makes a reader from the first row and the user's `--field` options."""


def _has(*names: str) -> Callable[[Row], bool]:
    return lambda row: all(name in row for name in names)


def _is_prime_rl(row: Row) -> bool:
    return _has("traces", "task")(row) or _has("token_ids", "loss_mask", "inference_logprobs")(row)


def is_tinker_summary(row: Row) -> bool:
    """Return True for a rollout summary of tinker-cookbook: rewards, and no tokens."""
    return _has("total_reward", "group_idx", "traj_idx")(row)


def _is_tinker(row: Row) -> bool:
    return _has("prompt_tokens", "samples")(row) or row.get("kind") == "sample" or is_tinker_summary(row)


def _is_solutions(row: Row) -> bool:
    return any(is_solution(value) for value in row.values())


def is_store_row(row: Row) -> bool:
    """Return True for a row that `rlhf-pipeline export` wrote."""
    return "input_ids" in row and any(name in row for name in ("assistant_mask", "num_prompt_tokens", "trajectory_id"))


FORMATS: tuple[Format, ...] = (
    Format(
        name="gsm8k-solutions",
        summary="graded solutions in the form of GSM8K's example_model_solutions.jsonl",
        matches=_is_solutions,
        reader=SolutionsReader,
    ),
    Format(
        name="prime-rl",
        summary="episodes (traces.jsonl) or token exports of prime-rl",
        matches=_is_prime_rl,
        reader=PrimeRLReader,
    ),
    Format(
        name="tinker",
        summary="captured samples of tinker-cookbook, with its rollout summaries",
        matches=_is_tinker,
        reader=TinkerReader,
    ),
    Format(
        name="open-instruct",
        summary="rollout shards of open-instruct's --save_traces",
        matches=_has("prompt_tokens", "response_tokens", "reward"),
        reader=OpenInstructReader,
    ),
    Format(
        name="trl",
        summary="the completions table of TRL's trainers",
        matches=_has("step", "prompt", "completion", "advantage"),
        reader=TRLReader,
    ),
    Format(
        name="verl",
        summary="verl's rollout_data_dir dumps",
        matches=_has("input", "output", "score", "step"),
        reader=verl_reader,
    ),
    Format(
        name="groups",
        summary="prompts, completions and rewards by their field names",
        matches=lambda row: True,
        reader=FlatReader,
    ),
)
"""In the order in which they are tried; the last takes any row that has a prompt, a completion and a reward."""

CONTAINERS: tuple[Container, ...] = ("jsonl", "parquet", "hf")
NAMES: tuple[str, ...] = ("auto", *CONTAINERS, *(item.name for item in FORMATS[:-1]), "store")
"""What `--format` takes: a container name reads `groups` by field names; `store` is what `export` writes."""


def find_format(name: str, row: Row, *, is_export: bool = False) -> Format | None:
    """Return the format of a file from its first row; None for rows that `export` wrote.

    Args:
        name: one of `NAMES`.
        row: the first row.
        is_export: the columns of a store are written down with the file.

    Raises:
        DefinitionError: there is no format of that name, or the row lacks its fields.

    >>> find_format("auto", {"input": "1+1=", "output": "2", "score": 1.0, "step": 3}).name
    'verl'
    """
    if name not in NAMES:
        raise DefinitionError(f"there is no format '{name}'." + did_you_mean(name, NAMES))
    if name == "store" or (name in ("auto", *CONTAINERS) and (is_export or is_store_row(row))):
        return None
    if name == "auto":
        return next(item for item in FORMATS if item.matches(row))
    if name in CONTAINERS:
        return FORMATS[-1]
    found = next(item for item in FORMATS if item.name == name)
    if not found.matches(row):
        looks = next(item for item in FORMATS if item.matches(row))
        raise DefinitionError(
            f"this is not {found.summary}. It has the fields {', '.join(sorted(map(str, row)))} and looks like "
            f"--format {looks.name if looks is not FORMATS[-1] else 'jsonl'}."
        )
    return found
