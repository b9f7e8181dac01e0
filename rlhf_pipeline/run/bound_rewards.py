"""The rewards of a definition, bound once to the columns of its data.

What checks a definition, what collects, what evaluates and what grades stored rows again all call `bound_rewards`, so a
function is called in one way everywhere. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.data.prompts import PromptSource, columns_of
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, function_name
from rlhf_pipeline.user_code.arguments import BoundRewards, bind


def bound_rewards(pipeline: Pipeline, stored: Iterable[str] = ()) -> BoundRewards:
    """Bind the rewards of a definition to the columns of its prompts and held-out prompts, and of stored rows.

    Raises:
        DefinitionError: a function asks for something that there is not.
        DataError: the prompts cannot be read.
        MissingPathError: they are not there.
    """
    columns = {*stored, *(name for _, source in prompt_sources(pipeline) for name in columns_of(source))}
    return bind(pipeline.reward, sorted(columns))


def bound_to_stored(pipeline: Pipeline, stored: Iterable[str]) -> BoundRewards:
    """Bind the rewards of a definition to grade stored rows; its prompts may be gone, and the rows have their columns.

    Raises:
        DefinitionError: a function asks for something that there is not.
    """
    columns = [*stored]
    try:
        return bound_rewards(pipeline, columns)
    except (DataError, MissingPathError):
        return bind(pipeline.reward, columns)


def prompt_sources(pipeline: Pipeline) -> list[tuple[str, PromptSource]]:
    """Return what a definition samples from, by the field that names it; a replay samples held-out prompts alone."""
    sources = [] if pipeline.replay is not None else [("prompts", pipeline.prompts)]
    return sources + [(prompts_field(name), evaluation.prompts) for name, evaluation in pipeline.evaluations.items()]


def prompts_field(name: str) -> str:
    """Return the field that has the prompts of a set for evaluations.

    >>> prompts_field("hard"), prompts_field("")
    ('evaluate.hard.prompts', 'evaluate.prompts')
    """
    return f"evaluate.{name}.prompts" if name else "evaluate.prompts"


def check_columns(bound: BoundRewards, field: str, source: PromptSource) -> None:
    """Reject prompts that lack a column which a reward function needs.

    Raises:
        DefinitionError: with the function and the column.
    """
    lacks = bound.missing_from(columns := columns_of(source))
    if lacks is not None:
        raise DefinitionError(
            f"the reward function {function_name(lacks[0].function)} takes the argument {lacks[1]!r}, which is "
            f"not a column of {field}. The columns are: {', '.join(columns) or 'none'}. Add the column, or give the "
            "argument a default value."
        )
