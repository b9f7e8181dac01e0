"""`rlhf-pipeline run`: check, run, and print the result and the next commands."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf_pipeline.cli.parser import add_overrides, add_steps, add_trust, natural, positive, seconds, share
from rlhf_pipeline.cli.process import attend, view_of_stdout
from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.report.words import count, duration
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.events import RunFinished

if TYPE_CHECKING:
    from rlhf_pipeline.cli.plan import Plan

HELP = "run a pipeline"
DETAILS = """\
examples:
  rlhf-pipeline run copy_digits
  rlhf-pipeline run copy_digits --seed 1 --out runs/seed-1
  rlhf-pipeline run copy_digits --set learn.lr=3e-4 --set collect.group_size=8
  rlhf-pipeline run gsm8k --set policy.path=model --set prompts.path=train.jsonl --device cuda
  rlhf-pipeline run ./my_task.py:my_pipeline
  rlhf-pipeline run copy_digits --resume --steps 800
  rlhf-pipeline run --from runs/copy_digits@100 --set learn.lr=3e-4 --out runs/slower
  rlhf-pipeline run long_running --collectors 2
  rlhf-pipeline run long_running --collectors 8 --learners 2 --ray auto --out s3://bucket/run

Ctrl-C finishes the step, saves, and prints how to continue. After a crash, --resume continues from the
last checkpoint; trajectories stored since then are used again, not resampled."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument(
        "definition",
        nargs="?",
        metavar="NAME|FILE.py[:function]",
        help="a built-in pipeline or your own; may be left out with --resume --out DIR",
    )
    command.add_argument("--out", metavar="DIR", help="the run folder (default: runs/NAME)")
    command.add_argument(
        "--seed", type=natural, metavar="N", help="seeds weights, prompts and completions (default: 0)"
    )
    add_steps(command)
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, mps (default: cpu)")
    command.add_argument("--resume", action="store_true", help="continue a run that stopped")
    command.add_argument(
        "--from",
        dest="begin_from",
        metavar="RUN[@STEP]",
        help="begin a new run with the weights and the optimizer of a checkpoint (default: its newest)",
    )
    add_overrides(command)
    add_trust(command)
    several = command.add_argument_group("collectors and learner in separate processes (docs/long_running.md)")
    several.add_argument(
        "--collectors", type=positive, metavar="N", help="supervise N collectors and a learner; restart any that die"
    )
    several.add_argument(
        "--learners", type=positive, metavar="M", help="processes that share each step of the learner (default: 1)"
    )
    several.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="place them with Ray: an address, auto for this machine's cluster, or no value for a new local one",
    )
    several.add_argument(
        "--collector-gpus",
        type=share,
        metavar="G",
        help="GPUs per collector with --ray (default: 1 with --device cuda)",
    )
    several.add_argument(
        "--max-failures",
        type=positive,
        default=5,
        metavar="N",
        help="give up when a process fails N times in a row without a step in between (default: %(default)s)",
    )
    several.add_argument(
        "--hang-timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="kill a process that is frozen for S seconds (default: %(default)g)",
    )
    several.add_argument(
        "--progress-timeout",
        type=seconds,
        metavar="S",
        help="kill a process that takes more than S seconds for one rollout or step (default: never)",
    )


def execute(args: argparse.Namespace) -> int:
    """Run a pipeline; 130 or 143 if a signal stopped it."""
    from rlhf_pipeline.cli import several
    from rlhf_pipeline.cli.plan import make_plan

    if several.is_follower():
        return several.follow(args)
    plan = make_plan(args)
    if args.ray is not None and not plan.collectors:
        raise DefinitionError(f"--ray places the processes of a run: say how many. {plan.again} --collectors 2")
    if args.learners is not None and not plan.collectors:
        raise DefinitionError(
            f"--learners goes with collectors in processes of their own: {plan.again} --collectors 1. Or start the run "
            "in one process and share its steps with torchrun, see docs/learner.md."
        )
    return _supervise(args, plan) if plan.collectors else run_plan(several.joined(plan))


def run_plan(plan: Plan, *, then: Callable[[RunView], int] = lambda view: 0) -> int:
    """Run a plan in this process.

    Args:
        plan: the checked plan.
        then: called when the run has ended; prints more and returns the exit code.

    Returns:
        The exit code: 130 or 143 if a signal stopped it.
    """
    from rlhf_pipeline.cli import several
    from rlhf_pipeline.cli.closing import finish
    from rlhf_pipeline.run.folder import is_run

    view, began = view_of_stdout(), time.perf_counter()
    view.say(f"{plan.pipeline.name}: starting, seed {plan.seed}, on {plan.device}; importing torch ...")

    def stopped() -> str:
        if plan.resume or is_run(plan.out):
            return f"stopped at once. Continue from the last checkpoint: {plan.again}"
        return "stopped before the run began; nothing was written."

    def work() -> RunFinished:
        from rlhf_pipeline.run import start

        view.say(f"imported torch ({duration(time.perf_counter() - began)}); building the model and the store ...")
        return start.run(plan.pipeline, resume=plan.resume, parent=several.parent(), on_event=view, **plan.inputs)

    try:
        finished, code = attend(view, work, device=plan.device, stopped=stopped)
    finally:
        several.leave()
    if finished is None:
        return code
    finish(finished, plan, view)
    return code or then(view)


def _supervise(args: argparse.Namespace, plan: Plan) -> int:
    """Keep collector and learner processes alive."""
    from rlhf_pipeline.cli import several
    from rlhf_pipeline.cli.closing import finish
    from rlhf_pipeline.run.address import below
    from rlhf_pipeline.run.processes.supervise import SupervisorConfig, supervise

    if several.is_one_of_several():
        raise DefinitionError("--collectors and torchrun do not go together yet; leave one of them out.")
    config = SupervisorConfig(
        collectors=plan.collectors,
        learners=plan.learners,
        max_failures=args.max_failures,
        hang_timeout_s=args.hang_timeout,
        progress_timeout_s=args.progress_timeout,
    )
    view = view_of_stdout(filenames.SUPERVISOR_LOG)
    view.say(
        f"{plan.pipeline.name}: {count(plan.collectors, 'collector')} and "
        f"{'a learner' if plan.learners == 1 else f'{plan.learners} learners'}, seed {plan.seed}, "
        f"on {plan.device}; they import torch ..."
    )
    gpus = 1.0 if plan.device.startswith("cuda") else 0.0

    def work() -> RunFinished:
        if args.ray is None:
            return supervise(plan.pipeline, config=config, on_event=view, **plan.inputs)
        from rlhf_pipeline.run.processes.on_ray import on_ray

        own = gpus if args.collector_gpus is None else args.collector_gpus
        processes = plan.collectors + plan.learners
        with on_ray(args.ray, plan.out, processes=processes, collector_gpus=own, learner_gpus=gpus) as launch:
            return supervise(plan.pipeline, config=config, launch=launch, on_event=view, **plan.inputs)

    finished, code = attend(
        view,
        work,
        device=None,
        stopped=lambda: f"stopped at once. Continue from the last checkpoint: {plan.again}",
    )
    if finished is not None:
        finish(finished, plan, view)
        view.say(f"the log of the processes: {below(plan.out, filenames.SUPERVISOR_LOG)}")
    return code
