"""`rlhf-pipeline inspect`: count what is stored, and check that the rewards can be reproduced."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.cli.output import say, say_json
from rlhf_pipeline.cli.parser import add_trust
from rlhf_pipeline.errors import DefinitionError, plain, typed
from rlhf_pipeline.report.words import count, number

if TYPE_CHECKING:
    from rlhf_pipeline.data.rewards import Reward, RewardFunction
    from rlhf_pipeline.report.inspect import Inspection, RewardCheck
    from rlhf_pipeline.run.folder import RunFolder

_BAR = 30

HELP = "count what a run has stored, and grade it again"
DETAILS = """\
Counts trajectories, groups and tokens. With --grade, calls the definition's reward function again on
every stored prompt and completion: do the stored rewards, and the curve in metrics.jsonl, hold?
Without it nothing is called; rewards may cost money.

examples:
  rlhf-pipeline inspect runs/copy_digits
  rlhf-pipeline inspect runs/copy_digits --grade
  rlhf-pipeline inspect runs/copy_digits --grade --json | jq .reward_check
  rlhf-pipeline inspect runs/mine --grade --definition ./my_task.py      if the file has moved

Exit code 1 if a reward does not agree."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE")
    command.add_argument("--grade", action="store_true", help="call the reward function on every stored trajectory")
    command.add_argument("--definition", metavar="NAME|FILE.py[:function]", help="take the reward function from here")
    add_trust(command)
    command.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Print counts and the reward check; return 1 if a reward cannot be reproduced."""
    from rlhf_pipeline.report.inspect import inspect_store
    from rlhf_pipeline.report.stored import Stored
    from rlhf_pipeline.run.folder import open_run_or_store

    run, store_path = open_run_or_store(args.path)
    reward = _reward(run, args.definition, trust=args.trust) if args.grade else None
    with Stored(store_path, whole=True) as stored:
        why_not = "the definition learns from stores and has no reward function; add --definition of one that has"
        if not args.grade:
            why_not = _would_call(args, run, len(stored.store))
        found = inspect_store(stored, run=run, reward=reward, why_no_reward=why_not)
    if args.json:
        say_json(found.to_json())
    else:
        say("\n".join(lines(found)))
    return 0 if found.reward_check is None or found.reward_check.agrees else 1


def _reward(
    run: RunFolder | None, named: str | None, *, trust: bool
) -> RewardFunction | Reward | tuple[RewardFunction | Reward, ...] | None:
    """Return the reward function of the definition, or None if it has none."""
    from rlhf_pipeline import definitions
    from rlhf_pipeline.config_text import CODE
    from rlhf_pipeline.data.rewards import no_reward
    from rlhf_pipeline.run.kept import recorded_definition, with_kept_inputs

    if named is None and run is None:
        raise DefinitionError(
            "a store alone does not say which reward function made it. Add --definition NAME|FILE.py[:function]."
        )
    overrides = () if run is None else with_kept_inputs(run, run.config.overrides)
    if named is not None:
        definition = definitions.find(named)
        overrides = tuple(item for item in overrides if trust or not CODE.search(item[1]))  # code of the run's own
    else:
        assert run is not None
        moved = "name where it is now: --definition FILE.py[:function]"
        definition = recorded_definition(run, trust=trust, moved=moved)
    reward = definition.pipeline(overrides).reward
    return None if reward is no_reward else reward


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


def lines(found: Inspection) -> Iterator[str]:
    """Yield an inspection as lines of text."""
    about = f": {found.definition}, {count(found.num_steps or 0, 'optimizer step')}" if found.definition else ""
    yield f"{found.path}{about}"
    yield _row("trajectories", f"{found.num_trajectories:,} in {_group_text(found)}")
    if found.num_prompt_tokens is None:
        yield _row("tokens", f"{found.num_completion_tokens:,}; where prompts end is not stored (num_prompt_tokens)")
    else:
        yield _row("tokens", f"{found.num_prompt_tokens:,} of prompts, {found.num_completion_tokens:,} of completions")
    if found.policy_versions:
        first, last, num = found.policy_versions
        yield _row("policy", f"versions {first} to {last}, {num} of them" if num > 1 else f"version {first}")
    if found.finish_reasons:
        reasons = ", ".join(f"{plain(name or '?')} {num:,}" for name, num in found.finish_reasons.items())
        yield _row("finished by", reasons)
    if found.num_failed:
        why = f"rlhf-pipeline show {typed(found.path)} --id {found.first_failed_id}"
        yield _row("failed", f"{count(found.num_failed, 'reward call')}; why: {why}")
    if found.mean_reward is not None:
        ends = [number(value, 3) for value in (found.mean_reward, found.first_reward, found.last_reward)]
        curve = "" if found.first_reward is None else f"; curve {ends[1]} -> {ends[2]}"
        yield _row("reward", f"mean {ends[0]}{curve}")
    yield _row("on disk", f"{found.size_bytes / 1e6:.1f} MB")
    if found.completion_lengths:
        yield "  completion lengths, in tokens"
        most = max(num for _, _, num in found.completion_lengths)
        width = max(len(f"{high}") for _, high, _ in found.completion_lengths)
        for low, high, num in found.completion_lengths:
            span = f"{low:>{width}}" + (f" to {high:>{width}}" if high > low else "")
            yield f"    {span}  {num:>10,}  {'#' * -(-num * _BAR // most)}"
    yield from _check_lines(found.reward_check, found.not_checked)


def _check_lines(check: RewardCheck | None, why_not: str | None) -> Iterator[str]:
    if check is None:
        yield f"  rewards not graded again: {why_not}"
        return
    if not check.num_trajectories and not check.num_failed_before:
        yield "  no reward is stored, so there is nothing to grade again"
        return
    yield f"  graded again by {check.function}"
    if check.num_different:
        yield f"    DISAGREES: {count(check.num_different, 'trajectory')} of {check.num_trajectories:,}"
        for item in check.first_different:
            why = f" ({plain(item.error)})" if item.error else ""
            yield f"      id {item.id}: stored {number(item.stored, 4)}, now {number(item.graded_again, 4)}{why}"
    elif check.num_trajectories:
        yield f"    agrees: {count(check.num_trajectories, 'trajectory')}, each reward is what the function says"
    if check.num_rollouts_different:
        wrong = f"{check.num_rollouts_different} of {count(check.num_rollouts, 'rollout')}"
        yield f"    DISAGREES with metrics.jsonl: {wrong}"
        for item in check.first_rollouts_different:
            yield (
                f"      step {item.step}, rollout {item.rollout}: task_reward {number(item.recorded, 4)}, "
                f"the stored trajectories give {number(item.graded_again, 4)}"
            )
    elif check.num_rollouts:
        yield f"    agrees: {count(check.num_rollouts, 'rollout')}, each mean is the task_reward in metrics.jsonl"
    if check.num_rollouts_partial:
        partial = count(check.num_rollouts_partial, "rollout")
        yield f"    {partial} not whole in the store (groups dropped or evicted), so not compared"
    if check.num_failed_before:
        yield f"    {count(check.num_failed_before, 'trajectory')} stored without a reward would have one now"


def _group_text(found: Inspection) -> str:
    sizes = list(found.group_sizes)
    if len(sizes) == 1:
        return f"{count(found.num_groups, 'group')} of {sizes[0]}"
    spread = f" of {sizes[0]} to {sizes[-1]}" if sizes else ""
    return f"{count(found.num_groups, 'group')}{spread}"


def _row(name: str, text: str) -> str:
    return f"  {name:<13} {text}"
