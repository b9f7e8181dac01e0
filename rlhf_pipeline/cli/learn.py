"""`rlhf-pipeline learn`: the learner of a run, in a process of its own."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rlhf_pipeline.cli.parser import add_process_options, add_steps
from rlhf_pipeline.cli.process import attend, view_of_stdout
from rlhf_pipeline.errors import RunExistsError, RunStorageError

if TYPE_CHECKING:
    from rlhf_pipeline.run.events import RunFinished

HELP = "learn from what collectors store, in a process of its own"
DETAILS = """\
Learns from the rollouts that `rlhf-pipeline collect` stores, in the order of arrival, and publishes the
weights after each step. After a kill, start it again with the same command: it repeats the steps after
its last checkpoint with the batches in the ledger.

examples:
  rlhf-pipeline learn long_running --run runs/mine
  rlhf-pipeline learn --run runs/mine                    with the recorded definition and seed
  rlhf-pipeline learn --run runs/mine --steps 5000       continue a run that has ended
  torchrun --nproc-per-node 2 -m -- rlhf_pipeline learn --run runs/mine  two processes share each step

Exit code 3: a failure that a retry may overcome (the disk, a live learner)."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_process_options(command)
    add_steps(command)


def execute(args: argparse.Namespace) -> int:
    """Learn from what collectors store; 130 or 143 if a signal stopped it, 3 if a retry may help."""
    from rlhf_pipeline.cli import several
    from rlhf_pipeline.cli.closing import finish
    from rlhf_pipeline.cli.plan import make_joining_plan
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.processes.weights import reopen
    from trajectory_store import StoreError

    if several.is_follower():
        return several.follow(args)
    plan, view = make_joining_plan(args), view_of_stdout()
    reopen(RunFolder(plan.out))
    view.say(f"{plan.pipeline.name}: learner, seed {plan.seed}, on {plan.device}; importing torch ...")

    def work() -> RunFinished:
        joined = several.joined(plan)
        from rlhf_pipeline.run.processes.learn import learn

        return learn(joined.pipeline, parent=several.parent(args.parent), on_event=view, **joined.inputs)

    try:
        finished, code = attend(
            view,
            work,
            device=plan.device,
            stopped=lambda: f"stopped at once. Continue from the last checkpoint: {plan.again}",
            retryable=(RunExistsError, RunStorageError, StoreError),
            debug=args.debug,
        )
    finally:
        several.leave()
    if finished is not None and args.parent is None:  # otherwise the supervisor reports it
        finish(finished, plan, view)
    return code
