"""`rlhf-pipeline run`: check, run, and say what came of it and what to type next."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_pipeline import definitions
from rlhf_pipeline.cli import sharded
from rlhf_pipeline.cli.plan import Plan, make_plan
from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.events import RunFinished
from rlhf_pipeline.report.run_folder import RunFolder, is_run
from rlhf_pipeline.report.words import count, duration, number


def execute(args: argparse.Namespace) -> int:
    """Run a pipeline; 130 or 143 if a signal stopped it."""
    if sharded.is_follower():
        return sharded.follow(args)
    plan = sharded.joined(make_plan(args))
    view = RunView(sys.stdout, live=sys.stdout.isatty() and os.environ.get("TERM") != "dumb")
    view.say(f"{plan.pipeline.name}: starting, seed {plan.seed}, on {plan.device}; importing torch ...")
    started = time.perf_counter()
    seen: list[int] = []
    try:
        finished = _run(plan, view, started, seen)
    except KeyboardInterrupt:
        if plan.resume or is_run(plan.out):
            view.say(f"stopped at once. Go on from the last checkpoint: {plan.command} --resume")
        else:
            view.say("stopped before the run began; nothing was written.")
        return 128 + (seen[-1] if seen else signal.SIGINT)
    finally:
        view.close()
        sharded.leave()
    finish(finished, plan, view)
    if finished.reason == "interrupted":
        return 128 + (seen[-1] if seen else signal.SIGINT)
    return 0


def _run(plan: Plan, view: RunView, started: float, seen: list[int]) -> RunFinished:
    """Import torch and run; `seen` collects the signals that arrived."""
    with _signals_seen(seen):
        runtime = _import_runtime(plan.device)
        definitions.share_with_workers()
        view.say(f"torch is there ({duration(time.perf_counter() - started)}); building the model and the store ...")
        return runtime.run(
            plan.pipeline,
            run_dir=plan.out,
            seed=plan.seed,
            device=plan.device,
            resume=plan.resume,
            definition=plan.definition,
            overrides=plan.overrides,
            on_event=view,
        )


def _import_runtime(device: str):  # noqa: ANN202 - a module
    """Import torch and all that needs it, and check the device while no folder is made yet."""
    # torch warns through a logger about how libraries use its own internals; nobody who types a command can act on it.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    import torch

    from rlhf_pipeline import runtime

    kind, _, index = device.partition(":")
    if kind == "cuda":
        found = torch.cuda.device_count()
        if int(index or 0) >= found:
            seen = f"torch sees {count(found, 'CUDA device')}" if found else "torch sees no CUDA device"
            raise DefinitionError(f"--device {device}: {seen}. Use --device cpu, or see `rlhf-pipeline doctor`.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise DefinitionError("--device mps: torch sees no Apple GPU here. Use --device cpu.")
    return runtime


def finish(finished: RunFinished, plan: Plan, view: RunView) -> None:
    """Write the report and say what came of the run and what to type next."""
    from rlhf_pipeline.report.html import write_report
    from rlhf_pipeline.report.samples import before_and_after

    view.say(result_sentence(finished, resumed=plan.resume))
    run = RunFolder(finished.run_dir)
    for line in before_and_after(run, shutil.get_terminal_size((110, 24)).columns):
        view.say(line)
    written = write_report(run)
    view.say(f"written: {', '.join(str(path) for path in written)}")
    view.say("next:")
    for command, meaning in next_commands(finished, plan):
        view.say(f"  {command:<60}  {meaning}" if len(command) < 60 else f"  {command}\n      {meaning}")


def result_sentence(finished: RunFinished, *, resumed: bool = False) -> str:
    """Return what a run reached, for example `reward 0.10 -> 0.98 in 180 steps (21 s), 23,040 trajectories stored`."""
    steps = (
        f"{count(finished.steps, 'step')} ({duration(finished.seconds)}{' since it was resumed' if resumed else ''})"
    )
    stored = f"{count(finished.num_trajectories, 'trajectory')} stored"
    if finished.first_reward is None:
        sentence = f"no rollout was finished; {count(finished.steps, 'step')}, {stored}"
    else:
        sentence = f"reward {number(finished.first_reward)} -> {number(finished.last_reward)} in {steps}, {stored}"
    why = {"target": "target reached: ", "steps": "", "interrupted": "stopped and saved: "}[finished.reason]
    return why + sentence


def next_commands(finished: RunFinished, plan: Plan) -> list[tuple[str, str]]:
    """Return commands worth typing now, each with its meaning."""
    folder = shlex.quote(str(finished.run_dir))
    more = {
        "interrupted": (f"{plan.command} --resume", "go on where it stopped"),
        "steps": (f"{plan.command} --resume --steps {2 * finished.steps}", "go on for as many steps again"),
        "target": (f"{plan.command} --resume --set learn.stop_at_reward=none", "go on beyond the target"),
    }
    looks = [
        (f"rlhf-pipeline inspect {folder}", "count what is stored and grade it again"),
        (f"rlhf-pipeline show {folder}", "the newest trajectory, token by token"),
    ]
    again = more[finished.reason]
    return [again, *looks] if finished.reason == "interrupted" else [*looks, again]


@contextmanager
def _signals_seen(seen: list[int]) -> Iterator[None]:
    """Collect the numbers of the signals that arrive, whoever handles them, for the exit code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        try:
            arrived = os.read(reading, 4096)
        except BlockingIOError:
            arrived = b""
        seen += [signum for signum in arrived if signum in (signal.SIGINT, signal.SIGTERM)]
        os.close(reading)
        os.close(writing)
