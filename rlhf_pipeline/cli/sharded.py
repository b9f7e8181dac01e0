"""`rlhf-pipeline run` under torchrun: the first process runs the pipeline, the others learn along with it.

Nothing here imports torch in a process that torchrun has not started.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.signals import STOPPING

if TYPE_CHECKING:
    from rlhf_pipeline.cli.plan import Plan


def is_one_of_several() -> bool:
    """Return True in a process that torchrun started beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def is_follower() -> bool:
    """Return True in a process of torchrun that is not the first."""
    return is_one_of_several() and os.environ["RANK"] != "0"


def joined(plan: Plan) -> Plan:
    """Join the group in its first process and tell the others what is run; the plan itself in a process alone.

    Raises:
        DefinitionError: the definition learns from stores, which takes one process.
    """
    if not is_one_of_several():
        return plan
    if plan.pipeline.replay is not None:
        raise DefinitionError("learning from stores takes one process: start it without torchrun.")
    from rlhf_pipeline.learner.distributed import join_group, send

    device = join_group(plan.device)
    overrides = [list(pair) for pair in plan.overrides]
    out = plan.out.resolve() if isinstance(plan.out, Path) else plan.out
    more = {"definition": plan.definition, "overrides": overrides, "out": str(out)}
    send({"what": "begin", **more, "seed": plan.seed, "device": plan.device})
    return dataclasses.replace(plan, device=device)


def follow(args: argparse.Namespace) -> int:
    """Follow the first process until it stops."""
    from rlhf_pipeline import definitions
    from rlhf_pipeline.run.folder import RunFolder, is_run
    from rlhf_pipeline.run.medium import address_of

    # The first process answers a signal: it finishes the step, saves, and says stop.
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # about how libraries use torch's internals
    from rlhf_pipeline.learner.distributed import join_group, receive
    from rlhf_pipeline.run import build

    recorded = args.resume and args.out and is_run(address_of(args.out))
    default = RunFolder.open(address_of(args.out)).config.device if recorded else "cpu"
    device = join_group(args.device or default)
    plan = receive()
    overrides = tuple((str(path), str(text)) for path, text in plan["overrides"])
    pipeline = definitions.find(plan["definition"]).pipeline(overrides)
    build.follow(pipeline, run_dir=address_of(plan["out"]), seed=plan["seed"], device=device)
    return 0


def leave() -> None:
    """Tell the others to stop, where there are any."""
    if not is_one_of_several():
        return
    import torch.distributed as dist

    from rlhf_pipeline.learner.distributed import send

    if dist.is_initialized():
        try:
            send({"what": "stop"})
        except RuntimeError:
            logging.getLogger(__name__).warning("a process of the group has left before the end")
        dist.destroy_process_group()
