"""`rlhf-pipeline collect`: one collector of a run, in a separate process."""

from __future__ import annotations

import argparse
import re

from rlhf_pipeline.cli.parser import add_process_options

HELP = "collect rollouts for a run, in a separate process"
DETAILS = """\
A collector claims rollouts one at a time, samples each with the newest weights that the learner has
published, and stores it. Any number of collectors can work on the same run. You can stop or kill a collector
at any time; no prompt is lost or repeated. A collector waits if the staleness of its next rollout would exceed
buffer.max_staleness by the time the learner uses the rollout.

examples:
  rlhf-pipeline collect long_running --run runs/mine     in one terminal; creates the run
  rlhf-pipeline learn --run runs/mine                    in a second terminal
  rlhf-pipeline collect --run runs/mine                  in a third terminal; adds a collector

`rlhf-pipeline run long_running --collectors 2` starts all these processes and restarts those that die.
The exit code is 3 if a retry may succeed, for example after a failure of the reward function or the disk."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_process_options(command)
    command.add_argument(
        "--name",
        type=_process_name,
        metavar="NAME",
        help="name of this process (default: the first unused name among collector-0, collector-1, ...)",
    )


def execute(args: argparse.Namespace) -> int:
    """Collect until the run ends; 130 or 143 if a signal stopped it, 3 if a retry may help."""
    from rlhf_pipeline.cli.process import conduct
    from rlhf_pipeline.cli.request import requested_run

    return conduct(requested_run(args), "collector", args=args)


def _process_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text) or text in ("learner", "supervisor"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a valid collector name. For example: --name collector-7")
    return text
