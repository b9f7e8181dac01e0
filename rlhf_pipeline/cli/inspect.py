"""`rlhf-pipeline inspect`: count what is stored, and check that the rewards can be reproduced."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.cli.output import echo, echo_json
from rlhf_pipeline.cli.parser import add_trust
from rlhf_pipeline.cli.stats import lines
from rlhf_pipeline.errors import DefinitionError, count, plain, typed
from rlhf_pipeline.report.formatting import number

if TYPE_CHECKING:
    from rlhf_pipeline.report.query import Answer
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.user_code.arguments import BoundRewards

HELP = "count the trajectories of a run, and optionally grade them again"
DETAILS = """\
Counts trajectories, groups and tokens. With --grade, calls the definition's reward function again on
every stored prompt and completion, and compares the results with the stored rewards and metrics.jsonl.
Without --grade, no reward function is called, because calls may be expensive.

examples:
  rlhf-pipeline inspect runs/copy_digits
  rlhf-pipeline inspect runs/copy_digits --grade
  rlhf-pipeline inspect runs/copy_digits --grade --json | jq .reward_check
  rlhf-pipeline inspect runs/mine --grade --definition ./my_task.py      if the file has moved

The exit code is 1 if a reward differs."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE", help="a run or a store")
    command.add_argument("--grade", action="store_true", help="call the reward function on every stored trajectory")
    command.add_argument(
        "--definition", metavar="NAME|FILE.py[:function]", help=("use the reward function of this definition")
    )
    add_trust(command)
    command.add_argument("--json", action="store_true", help="print the output as JSON")


def execute(args: argparse.Namespace) -> int:
    """Print counts and the reward check; return 1 if a reward cannot be reproduced."""
    from rlhf_pipeline.report.inspect import grade
    from rlhf_pipeline.report.query import View
    from rlhf_pipeline.run.disk import disk_usage

    with closing(View(args.path)) as view:
        reward = _reward(view.run, args.definition, trust=args.trust) if args.grade else None
        counts = {**view.about(), **view.stats(), "bytes": disk_usage(view.stored.path)}
        check = counts["reward_check"] = None if reward is None else grade(view, reward)
        why_not = (
            "the definition learns from stores and has no reward function; add --definition with a definition that "
            "has a reward function"
        )
        if not args.grade:
            why_not = _would_call(args, view.run, counts["trajectories"])
        elif reward is not None:
            why_not = "the store has no column task_reward"
        counts["not_checked"] = why_not if check is None else None
        failed = (
            view.trajectories(where=["finish_reason==failed"], limit=1)["rows"]
            if counts["finish"].get("failed")
            else []
        )
    if args.json:
        echo_json(counts)
    else:
        definition, steps = counts["definition"], counts["step"] or 0
        about = f": {definition}, {count(steps, 'optimizer step')}" if definition else ""
        echo(f"{counts['address']}{about}")
        if counts["reward_first"] is not None:
            echo(f"  curve         reward {number(counts['reward_first'], 3)} -> {number(counts['reward_last'], 3)}")
        echo("\n".join(lines(counts)))
        for row in failed:
            echo(f"  failed        to see the reason: rlhf-pipeline show {typed(counts['address'])} --id {row['id']}")
        echo(f"  on disk       {counts['bytes'] / 1e6:.1f} MB")
        echo("\n".join(_check_lines(check) if check else [f"  rewards not graded again: {why_not}"]))
    return 0 if check is None or check["agrees"] else 1


def _reward(
    run: RunFolder | None, definition_name: str | None, *, trust: bool
) -> Callable[[Iterable[str]], BoundRewards] | None:
    """Return what binds the rewards of the definition, or None if it has none."""
    from rlhf_pipeline import definitions
    from rlhf_pipeline.config_text import CODE
    from rlhf_pipeline.data.rewards import no_reward
    from rlhf_pipeline.run.bound_rewards import bound_to_stored
    from rlhf_pipeline.run.saved_inputs import definition_of, with_copied_inputs

    if run is not None:
        definition, overrides = (
            definition_of(run, definition_name, trust=trust),
            with_copied_inputs(run, run.config.overrides),
        )
        if definition_name is not None and not trust:
            overrides = tuple(item for item in overrides if not CODE.search(item[1]))  # code of the run's own
    elif definition_name is not None:
        definition, overrides = definitions.find(definition_name), ()
    else:
        raise DefinitionError(
            "a store without a run does not record its reward function. Add --definition NAME|FILE.py[:function]."
        )
    pipeline = definition.pipeline(overrides)
    return None if pipeline.reward is no_reward else functools.partial(bound_to_stored, pipeline)


def _would_call(args: argparse.Namespace, run: RunFolder | None, num: int) -> str:
    """Return what `--grade` would call, from the record alone: no code of the run is loaded."""
    words = ["inspect", typed(args.path), "--grade"]
    if args.definition is not None:
        words += ["--definition", typed(args.definition)]
    elif run is None:
        words += ["--definition", "NAME|FILE.py[:function]"]
    recorded = None if run is None or args.definition is not None else run.config.pipeline.get("reward")
    names = ", ".join(sorted(set(_names(recorded)))) or "the definition's reward function"
    return f"`rlhf-pipeline {' '.join(words)}` calls {plain(names)} on {count(num, 'trajectory')}"


def _names(recorded: Any) -> Iterator[str]:
    """Yield the functions of a recorded reward: a name, or several with weights."""
    if isinstance(recorded, str):
        yield recorded
    elif isinstance(recorded, dict):
        yield from _names(recorded.get("function"))
    elif isinstance(recorded, list):
        for item in recorded:
            yield from _names(item)


def _check_lines(check: Answer) -> Iterator[str]:
    if not check["trajectories"] and not check["failed_before"]:
        yield "  no reward is stored, so no reward can be compared"
        return
    yield f"  graded again by {check['function']}"
    if check["different"]:
        yield f"    DISAGREES: {count(check['different'], 'trajectory')} of {check['trajectories']:,}"
        for item in check["first_different"]:
            why = f" ({plain(item['error'])})" if item["error"] else ""
            yield f"      id {item['id']}: stored {number(item['stored'], 4)}, now {number(item['now'], 4)}{why}"
    elif check["trajectories"]:
        yield f"    agrees: {count(check['trajectories'], 'trajectory')}; the function reproduces every stored reward"
    if check["rollouts_different"]:
        wrong = f"{check['rollouts_different']} of {count(check['rollouts'], 'rollout')}"
        yield f"    DISAGREES with metrics.jsonl: {wrong}"
        for item in check["first_rollouts_different"]:
            yield (
                f"      step {item['step']}, rollout {item['rollout']}: task_reward {number(item['recorded'], 4)}, "
                f"but {number(item['now'], 4)} from the stored trajectories"
            )
    elif check["rollouts"]:
        yield f"    agrees: {count(check['rollouts'], 'rollout')}; every mean equals the task_reward in metrics.jsonl"
    if check["rollouts_partial"]:
        partial = count(check["rollouts_partial"], "rollout")
        yield f"    not compared: {partial} incomplete in the store (groups dropped or evicted)"
    if check["failed_before"]:
        yield f"    {count(check['failed_before'], 'trajectory')} stored without a reward would now have one"
