"""`rlhf-pipeline run`: check, run, and say what came of it and what to type next."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from rlhf_pipeline import definitions
from rlhf_pipeline.cli import sharded, supervised
from rlhf_pipeline.cli.closing import finish
from rlhf_pipeline.cli.plan import Plan, make_plan
from rlhf_pipeline.cli.process import import_torch, signals_seen, stopped_code, view_of_stdout
from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.report.run_folder import is_run
from rlhf_pipeline.report.words import duration
from rlhf_pipeline.run.events import RunFinished


def execute(args: argparse.Namespace) -> int:
    """Run a pipeline; 130 or 143 if a signal stopped it."""
    if sharded.is_follower():
        return sharded.follow(args)
    plan = make_plan(args)
    if plan.collectors:
        return supervised.execute(args, plan)
    return run_plan(sharded.joined(plan))


def run_plan(plan: Plan, *, then: Callable[[RunView], int] = lambda view: 0) -> int:
    """Run what was planned, in this process.

    Args:
        plan: what to run, all checked.
        then: called when the run has come to its end; says more and returns the exit code.

    Returns:
        The exit code: 130 or 143 if a signal stopped it.
    """
    view = view_of_stdout()
    view.say(f"{plan.pipeline.name}: starting, seed {plan.seed}, on {plan.device}; importing torch ...")
    started = time.perf_counter()
    seen: list[int] = []
    try:
        finished = _run(plan, view, started, seen)
    except KeyboardInterrupt:
        if plan.resume or is_run(plan.out):
            view.say(f"stopped at once. Go on from the last checkpoint: {plan.again}")
        else:
            view.say("stopped before the run began; nothing was written.")
        return stopped_code(seen)
    finally:
        view.close()
        sharded.leave()
    finish(finished, plan, view)
    return stopped_code(seen) if finished.reason == "interrupted" else then(view)


def _run(plan: Plan, view: RunView, started: float, seen: list[int]) -> RunFinished:
    """Import torch and run; `seen` collects the signals that arrived."""
    with signals_seen(seen):
        import_torch(plan.device)
        from rlhf_pipeline.run import start

        definitions.share_with_workers()
        view.say(f"torch is there ({duration(time.perf_counter() - started)}); building the model and the store ...")
        return start.run(
            plan.pipeline,
            run_dir=plan.out,
            seed=plan.seed,
            device=plan.device,
            resume=plan.resume,
            definition=plan.definition,
            overrides=plan.overrides,
            on_event=view,
        )
