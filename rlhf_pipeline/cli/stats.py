"""`rlhf-pipeline stats`: counts, rewards and lengths of the trajectories that meet conditions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from rlhf_pipeline.cli.output import echo, echo_json
from rlhf_pipeline.cli.parser import add_filter, add_json
from rlhf_pipeline.errors import count, plain
from rlhf_pipeline.report.formatting import evaluation_words, number

if TYPE_CHECKING:
    from rlhf_pipeline.report.query import Answer

_BAR = 30

HELP = "summarise the number, rewards and lengths of trajectories"
DETAILS = """\
examples:
  rlhf-pipeline stats runs/copy_digits
  rlhf-pipeline stats runs/copy_digits --filter 'version>=100' --filter 'finish_reason==length'

Filters have the same syntax as for `export`. To grade every trajectory again, use `inspect --grade`."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE", help="a run or a store")
    add_filter(command)
    add_json(command)


def execute(args: argparse.Namespace) -> int:
    """Print the counts."""
    from rlhf_pipeline.report.query import View

    with closing(View(args.path)) as view:
        counts = {**view.stats(args.filters), "evaluations": view.evaluations()}
    if args.json:
        echo_json(counts)
    else:
        echo("\n".join(lines(counts)))
    return 0


def lines(counts: Answer) -> Iterator[str]:
    """Yield counts, rewards and lengths, of `View.stats`, as lines of text."""
    sizes = [int(size) for size in counts["group_sizes"]]
    of = f" of {sizes[0]}" + (f" to {sizes[-1]}" if len(sizes) > 1 else "") if sizes else ""
    yield _row("trajectories", f"{counts['trajectories']:,} in {count(counts['groups'], 'group')}{of}")
    prompts = counts["prompt_tokens"]
    where = "; prompt lengths are not stored (num_prompt_tokens)"
    token_words = (where, "") if prompts is None else (" of completions", f"{prompts:,} of prompts, ")
    yield _row("tokens", f"{token_words[1]}{counts['completion_tokens']:,}{token_words[0]}")
    if counts["unknown_masks"]:
        num = count(counts["unknown_masks"], "trajectory")
        yield _row("mask", f"unknown for {num}: all their tokens after the prompt are counted")
    if counts["versions"]:
        first, last, num = *counts["versions"], counts["num_versions"]
        yield _row("policy", f"versions {first} to {last} ({num} versions)" if num > 1 else f"version {first}")
    if counts["finish"]:
        yield _row("finished by", ", ".join(f"{plain(name) or '-'} {num:,}" for name, num in counts["finish"].items()))
    if counts["no_reward"]:
        yield _row("no reward", f"{counts['no_reward']:,}")
    if counts["reward_quantiles"]:
        shares = " | ".join(number(quantile) for quantile in counts["reward_quantiles"])
        spread = f"mean {number(counts['reward_mean'], 3)}, deviation {number(counts['reward_std'])}"
        yield _row("reward", f"{spread}, quartiles {shares}")
    for evaluation in counts.get("evaluations", ()):
        newest = {name: values[-1] for name, values in evaluation["values"].items()}
        name, step = evaluation["name"] or evaluation["store"], evaluation["step"][-1]
        yield _row("evaluation", f"{name} of step {step}: {evaluation_words(newest)}")
    if counts["lengths"]:
        yield "  completion lengths, in tokens"
        most, width = max(num for *_, num in counts["lengths"]), len(str(counts["lengths"][-1][1]))
        for low, high, num in counts["lengths"]:
            span = f"{low:>{width}}" + (f" to {high:>{width}}" if high > low else "")
            yield f"    {span}  {num:>10,}  {'#' * -(-num * _BAR // most)}"


def _row(name: str, text: str) -> str:
    return f"  {name:<13} {text}"
