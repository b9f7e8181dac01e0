"""`rlhf-pipeline run --collectors N`: collectors and learner as processes, and this one to keep them alive."""

from __future__ import annotations

import argparse
import os

from rlhf_pipeline.cli.closing import finish
from rlhf_pipeline.cli.plan import Plan
from rlhf_pipeline.cli.process import signals_seen, stopped_code, view_of_stdout
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.report.words import count
from rlhf_pipeline.run.processes.supervise import SupervisorConfig, supervise


def execute(args: argparse.Namespace, plan: Plan) -> int:
    """Supervise a run; 130 or 143 if a signal stopped it."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DefinitionError("--collectors and torchrun do not go together yet; leave one of them out.")
    config = SupervisorConfig(
        collectors=plan.collectors,
        max_failures=args.max_failures,
        hang_timeout_s=args.hang_timeout,
        progress_timeout_s=args.progress_timeout,
    )
    view, seen = view_of_stdout("supervisor.log"), list[int]()
    view.say(
        f"{plan.pipeline.name}: {count(plan.collectors, 'collector')} and a learner, seed {plan.seed}, "
        f"on {plan.device}; they import torch ..."
    )
    try:
        with signals_seen(seen):
            finished = supervise(
                plan.pipeline,
                run_dir=plan.out,
                config=config,
                definition=plan.definition,
                seed=plan.seed,
                device=plan.device,
                overrides=plan.overrides,
                on_event=view,
            )
    except KeyboardInterrupt:
        view.say(f"stopped at once. Go on from the last checkpoint: {plan.again}")
        return stopped_code(seen)
    finally:
        view.close()
    finish(finished, plan, view)
    view.say(f"what happened to the processes: {plan.out / 'supervisor.log'}")
    return stopped_code(seen) if finished.reason == "interrupted" else 0
