"""`rlhf-pipeline learn`: the learner of a run, in a process of its own."""

from __future__ import annotations

import argparse

from rlhf_pipeline.cli.output import warn
from rlhf_pipeline.cli.parser import add_process_options, add_steps
from rlhf_pipeline.cli.process import TRY_AGAIN, import_torch, signals_seen, stopped_code, view_of_stdout
from rlhf_pipeline.errors import RunExistsError, RunStorageError

HELP = "learn from what collectors store, in a process of its own"
DETAILS = """\
Learns from the rollouts that `rlhf-pipeline collect` stores, in the order of their arrival, and publishes
the weights after each step. Killed, it is started again with the same command, and takes the steps
after its last checkpoint again as the ledger says.

examples:
  rlhf-pipeline learn long_running --run runs/mine
  rlhf-pipeline learn --run runs/mine                    definition and seed are the recorded ones
  rlhf-pipeline learn --run runs/mine --steps 5000       go on with a run that has ended

Exit code 3: a failure that a retry may overcome (the disk, a live learner)."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add what can be typed."""
    add_process_options(command)
    add_steps(command)


def execute(args: argparse.Namespace) -> int:
    """Learn from what collectors store; 130 or 143 if a signal stopped it, 3 if a retry may help."""
    from rlhf_pipeline import definitions
    from rlhf_pipeline.cli.closing import finish
    from rlhf_pipeline.cli.plan import make_joining_plan
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.processes.weights import reopen
    from trajectory_store import StoreError

    plan = make_joining_plan(args)
    view, seen = view_of_stdout(), list[int]()
    reopen(RunFolder(plan.out))
    view.say(f"{plan.pipeline.name}: learner, seed {plan.seed}, on {plan.device}; importing torch ...")
    try:
        with signals_seen(seen):
            import_torch(plan.device)
            from rlhf_pipeline.run.processes.learn import learn

            definitions.share_with_workers()
            finished = learn(
                plan.pipeline,
                run_dir=plan.out,
                seed=plan.seed,
                device=plan.device,
                parent=args.parent,
                definition=plan.definition,
                overrides=plan.overrides,
                on_event=view,
            )
    except KeyboardInterrupt:
        view.say(f"stopped at once. Go on from the last checkpoint: {plan.again}")
        return stopped_code(seen)
    except (RunExistsError, RunStorageError, StoreError) as error:
        if args.debug:
            raise
        warn(f"rlhf-pipeline: {error}")
        return TRY_AGAIN
    finally:
        view.close()
    if args.parent is None:  # else the supervisor says it
        finish(finished, plan, view)
    return stopped_code(seen) if finished.reason == "interrupted" else 0
