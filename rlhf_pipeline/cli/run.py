"""`rlhf-pipeline run`: check, run, and print the result and the next commands."""

from __future__ import annotations

import argparse

from rlhf_pipeline.cli.parser import (
    add_overrides,
    add_steps,
    add_trust,
    add_watching,
    natural,
    positive,
    seconds,
    share,
)
from rlhf_pipeline.errors import DefinitionError, count

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

On Ctrl-C, the run finishes the current step, saves a checkpoint, and prints the command that resumes the run. After
a crash, --resume continues from the last checkpoint. Trajectories stored after that checkpoint are reused, not
resampled."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument(
        "definition",
        nargs="?",
        metavar="NAME|FILE.py[:function]",
        help="the name of a built-in pipeline, or your own file; optional with --resume --out DIR",
    )
    command.add_argument("--out", metavar="DIR", help="the run folder (default: runs/NAME)")
    command.add_argument(
        "--seed", type=natural, metavar="N", help="seed for weights, prompts and completions (default: 0)"
    )
    add_steps(command)
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 or mps (default: cpu)")
    command.add_argument("--resume", action="store_true", help="resume a stopped run")
    command.add_argument(
        "--from",
        dest="begin_from",
        metavar="RUN[@STEP]",
        help="start a new run with the weights and optimizer state of a checkpoint (default: the newest)",
    )
    add_overrides(command)
    add_trust(command)
    add_watching(command)
    processes = command.add_argument_group("collectors and learner in separate processes (docs/long_running.md)")
    processes.add_argument(
        "--collectors",
        type=positive,
        metavar="N",
        help="start N collectors and a learner, and restart processes that die",
    )
    processes.add_argument(
        "--learners",
        type=positive,
        metavar="M",
        help="number of processes that share each learner step (default: 1)",
    )
    processes.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help=(
            "run the processes on the Ray cluster at this address; auto uses the cluster to which this "
            "machine belongs, and --ray without an address starts a new local cluster"
        ),
    )
    processes.add_argument(
        "--collector-gpus",
        type=share,
        metavar="G",
        help="number of GPUs per collector with --ray (default: 1 with --device cuda)",
    )
    processes.add_argument(
        "--max-failures",
        type=positive,
        default=5,
        metavar="N",
        help="stop the run when a process fails N times without a completed step in between (default: %(default)s)",
    )
    processes.add_argument(
        "--hang-timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="kill a process that has been frozen for S seconds (default: %(default)g)",
    )


def execute(args: argparse.Namespace) -> int:
    """Run a pipeline; 130 or 143 if a signal stopped it."""
    from rlhf_pipeline.cli import torchrun
    from rlhf_pipeline.cli.process import conduct
    from rlhf_pipeline.cli.request import requested_run

    if torchrun.is_follower():
        return torchrun.join_in(args)
    run = requested_run(args)
    processes = run.supervised
    if processes is None:
        if args.ray is not None:
            raise DefinitionError(f"--ray needs --collectors, the number of collectors: {run.again} --collectors 2")
        if args.learners is not None:
            raise DefinitionError(
                f"--learners needs --collectors: {run.again} --collectors 1. To divide each step among several "
                "processes without separate collectors, use torchrun; see docs/learner.md."
            )
        return conduct(run, "starting", args=args)
    learners = "a learner" if processes.learners == 1 else f"{processes.learners} learners"
    what = f"{count(processes.collectors, 'collector')} and {learners}"
    if args.ray is None:
        return conduct(run, what, args=args)
    from rlhf_pipeline.run.processes.on_ray import on_ray

    gpus = 1.0 if run.device.startswith("cuda") else 0.0
    collector_gpus = gpus if args.collector_gpus is None else args.collector_gpus
    number = processes.collectors + processes.learners
    ray = on_ray(args.ray, run.run_dir, processes=number, collector_gpus=collector_gpus, learner_gpus=gpus)
    return conduct(run, what, args=args, launching=ray)
