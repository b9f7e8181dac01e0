"""`rlhf-pipeline stats`: counts, rewards and lengths of the trajectories that meet conditions."""

from __future__ import annotations

import argparse

from rlhf_pipeline.cli.output import say, say_json
from rlhf_pipeline.cli.parser import add_filter, add_json

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
    from rlhf_pipeline.report.words import count, evaluation_words, number

    view = View(args.path)
    found = view.stats(args.filters)
    found["evaluations"] = view.evaluations()
    view.close()
    if args.json:
        say_json(found)
        return 0
    say(f"{count(found['trajectories'], 'trajectory')} in {count(found['groups'], 'group')}")
    if found["versions"]:
        say("policy versions {} to {}".format(*found["versions"]))
    if found["reward_quantiles"]:
        shares = " | ".join(number(value) for value in found["reward_quantiles"])
        say(f"reward: mean {number(found['reward_mean'])}, deviation {number(found['reward_std'])}, quartiles {shares}")
    if found["no_reward"]:
        say(f"without a reward: {found['no_reward']:,}")
    if found["length_quantiles"]:
        shares = " | ".join(f"{value:.0f}" for value in found["length_quantiles"])
        say(f"completions: {count(found['completion_tokens'], 'token')}, quartiles of their length {shares}")
    for one in found["evaluations"]:
        newest = {name: values[-1] for name, values in one["values"].items()}
        say(f"evaluation {one['store']} of step {one['step'][-1]}: {evaluation_words(newest)}")
    say("finished by: " + (", ".join(f"{name or '-'} {num:,}" for name, num in found["finish"].items()) or "-"))
    return 0
