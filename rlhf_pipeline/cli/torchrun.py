"""A learner of several processes: the first one runs the command, the others follow it.

torchrun or a supervisor (`run --learners`) starts them. Nothing here imports torch in a single process.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rlhf_pipeline.errors import DefinitionError, count
from rlhf_pipeline.run.processes.launch import PLACE, is_one_of_several
from rlhf_pipeline.run.signals import STOPPING, StopRequest

if TYPE_CHECKING:
    from rlhf_pipeline.run.run import Run


def is_follower() -> bool:
    """Return True in a process of a group that is not the first."""
    return is_one_of_several() and os.environ["RANK"] != "0"


def parent(supervisor: int | None = None) -> int | None:
    """Return the process that this one must not outlive: the given supervisor, or torchrun."""
    return os.getppid() if supervisor is None and is_one_of_several() else supervisor


def joined(run: Run) -> Run:
    """In the first process of a group, join it and send the run to the others; return it for this process."""
    if not is_one_of_several():
        return run
    from rlhf_pipeline.learner.group import join_group, send
    from rlhf_pipeline.run.address import resolved
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.loggers import check_logger
    from rlhf_pipeline.run.processes.rendezvous import meeting_of

    device = join_group(run.device, meeting_of(RunFolder(run.run_dir), StopRequest()))
    overrides = [list(pair) for pair in run.overrides]
    out = resolved(run.run_dir)
    more = {"definition": run.definition, "overrides": overrides, "out": str(out)}
    send({"what": "begin", **more, "seed": run.seed, "device": run.device})
    check_logger(run.pipeline.learn.logger)
    return dataclasses.replace(run, device=device)


def join_in(args: argparse.Namespace) -> int:
    """Follow the first process until it stops."""
    from rlhf_pipeline import definitions
    from rlhf_pipeline.run.address import address_of
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.processes.heartbeat import Heartbeat

    # Only the first process reacts to a signal: it finishes the step, saves, and stops the others.
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    joins = args.command == "learn"
    run_name = args.run if joins else args.out
    run = None if run_name is None else RunFolder(address_of(run_name))
    recorded = run is not None and (joins or args.resume) and run.record.exists
    device = args.device or (run.config.device if run is not None and recorded else "cpu")
    import_torch(device)
    from rlhf_pipeline.learner.group import join_group, receive
    from rlhf_pipeline.run import build
    from rlhf_pipeline.run.processes.rendezvous import meeting_of

    with ExitStack() as stack:
        meeting = None
        if run is not None and joins and args.parent is not None:  # a supervisor watches this process
            heartbeat = stack.enter_context(Heartbeat(run.processes, f"learner-{os.environ['RANK']}"))
            heartbeat.beat("waiting for the first process")
            meeting = meeting_of(run, StopRequest(args.parent))
        device = join_group(device, meeting)
        plan = receive()
        overrides = tuple((str(path), str(text)) for path, text in plan["overrides"])
        pipeline = definitions.find(plan["definition"]).pipeline(overrides)
        build.take_part(pipeline, run_dir=address_of(plan["out"]), seed=plan["seed"], device=device)
    return 0


def import_torch(device: str) -> None:
    """Import torch and check the device, before any folder is made."""
    # torch logs warnings about libraries' use of its internals, which the user of a command cannot act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    import torch

    kind, _, index = device.partition(":")
    if device == "cuda" and PLACE in os.environ and not is_one_of_several():
        _take_a_gpu(int(os.environ[PLACE]), torch.cuda.device_count())
    if kind == "cuda":
        num_devices = torch.cuda.device_count()
        if int(index or 0) >= num_devices:
            device_text = (
                f"torch detects {count(num_devices, 'CUDA device')}" if num_devices else "torch detects no CUDA device"
            )
            raise DefinitionError(f"--device {device}: {device_text}. Use --device cpu, or see `rlhf-pipeline doctor`.")
        if index:
            torch.cuda.set_device(device)  # else libraries' own calls, and pinned memory, take a context on the first
    if kind == "mps" and not torch.backends.mps.is_available():
        raise DefinitionError("--device mps: torch detects no Apple GPU. Use --device cpu.")


def _take_a_gpu(place: int, num_devices: int) -> None:
    """Let this process see one GPU alone: a supervisor's processes take them in turn.

    Other libraries, such as vLLM, then use it as well. CUDA reads the variable when it is first used.
    """
    if num_devices < 2:
        return
    configured = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = configured.split(",")[:num_devices] if configured else [str(number) for number in range(num_devices)]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[place % num_devices]


def leave() -> None:
    """Stop the other processes, if there are any."""
    if not is_one_of_several():
        return
    import torch.distributed as dist

    from rlhf_pipeline.learner.group import send

    if dist.is_initialized():
        try:
            send({"what": "stop"})
        except RuntimeError:
            logging.getLogger(__name__).warning("a process of the group exited before the end")
        dist.destroy_process_group()
