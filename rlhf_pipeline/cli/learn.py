"""`rlhf-pipeline learn`: the learner of a run, in a separate process."""

from __future__ import annotations

import argparse

from rlhf_pipeline.cli.parser import add_process_options, add_steps

HELP = "run the learner, in a separate process, on the rollouts that collectors store"
DETAILS = """\
The learner uses the rollouts that `rlhf-pipeline collect` stores, in order of arrival, and publishes its
weights after each step. If the learner is killed, restart it with the same command. It then repeats the
steps after its last checkpoint with the batches recorded in the ledger.

examples:
  rlhf-pipeline learn long_running --run runs/mine
  rlhf-pipeline learn --run runs/mine                    uses the recorded definition and seed
  rlhf-pipeline learn --run runs/mine --steps 5000       continues a run that has ended
  torchrun --nproc-per-node 2 -m -- rlhf_pipeline learn --run runs/mine  two processes share each step

The exit code is 3 if a retry may succeed, for example after a disk failure or while another learner is running."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_process_options(command)
    add_steps(command)


def execute(args: argparse.Namespace) -> int:
    """Learn from what collectors store; 130 or 143 if a signal stopped it, 3 if a retry may help."""
    from rlhf_pipeline.cli import torchrun
    from rlhf_pipeline.cli.process import conduct
    from rlhf_pipeline.cli.request import requested_run
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.processes.weights import reopen

    if torchrun.is_follower():
        return torchrun.join_in(args)
    run = requested_run(args)
    reopen(RunFolder(run.run_dir))
    return conduct(run, "learner", args=args)
