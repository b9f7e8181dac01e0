"""`rlhf-pipeline stats`: counts, rewards and lengths of the trajectories that meet conditions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from rlhf_pipeline.cli.output import say, say_json
from rlhf_pipeline.cli.parser import add_filter, add_json
from rlhf_pipeline.errors import plain
from rlhf_pipeline.report.formatting import count, evaluation_words, number

if TYPE_CHECKING:
    from rlhf_pipeline.report.query import Answer

_BAR = 30

HELP = "count trajectories, their rewards and lengths"
DETAILS = """\
examples:
  rlhf-pipeline stats runs/copy_digits
  rlhf-pipeline stats runs/copy_digits --filter 'version>=100' --filter 'finish_reason==length'

Filters are those of `export`. `inspect` also grades every trajectory again."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE")
    add_filter(command)
    add_json(command)


def execute(args: argparse.Namespace) -> int:
    """Print the counts."""
    from rlhf_pipeline.report.query import View

    with closing(View(args.path)) as view:
        found = {**view.stats(args.filters), "evaluations": view.evaluations()}
    if args.json:
        say_json(found)
    else:
        say("\n".join(lines(found)))
    return 0


def lines(found: Answer) -> Iterator[str]:
    """Yield counts, rewards and lengths, of `View.stats`, as lines of text."""
    sizes = [int(size) for size in found["group_sizes"]]
    of = f" of {sizes[0]}" + (f" to {sizes[-1]}" if len(sizes) > 1 else "") if sizes else ""
    yield _row("trajectories", f"{found['trajectories']:,} in {count(found['groups'], 'group')}{of}")
    prompts = found["prompt_tokens"]
    where = "; where prompts end is not stored (num_prompt_tokens)"
    told = (where, "") if prompts is None else (" of completions", f"{prompts:,} of prompts, ")
    yield _row("tokens", f"{told[1]}{found['completion_tokens']:,}{told[0]}")
    if found["versions"]:
        first, last, num = *found["versions"], found["num_versions"]
        yield _row("policy", f"versions {first} to {last}, {num} of them" if num > 1 else f"version {first}")
    if found["finish"]:
        yield _row("finished by", ", ".join(f"{plain(name) or '-'} {num:,}" for name, num in found["finish"].items()))
    if found["no_reward"]:
        yield _row("no reward", f"{found['no_reward']:,}")
    if found["reward_quantiles"]:
        shares = " | ".join(number(value) for value in found["reward_quantiles"])
        spread = f"mean {number(found['reward_mean'], 3)}, deviation {number(found['reward_std'])}"
        yield _row("reward", f"{spread}, quartiles {shares}")
    for one in found.get("evaluations", ()):
        newest = {name: values[-1] for name, values in one["values"].items()}
        yield _row("evaluation", f"{one['name'] or one['store']} of step {one['step'][-1]}: {evaluation_words(newest)}")
    if found["lengths"]:
        yield "  completion lengths, in tokens"
        most, width = max(num for *_, num in found["lengths"]), len(str(found["lengths"][-1][1]))
        for low, high, num in found["lengths"]:
            span = f"{low:>{width}}" + (f" to {high:>{width}}" if high > low else "")
            yield f"    {span}  {num:>10,}  {'#' * -(-num * _BAR // most)}"


def _row(name: str, text: str) -> str:
    return f"  {name:<13} {text}"
