"""`rlhf-pipeline tail`: the newest trajectories, and new ones as they arrive."""

from __future__ import annotations

import argparse
import io
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from rlhf_pipeline.cli.output import can_draw, echo, echo_json, warn
from rlhf_pipeline.cli.parser import add_filter, add_json, natural
from rlhf_pipeline.errors import DefinitionError

_POLL_S = 0.25
_FRAME_S = 1.0
_POLL_URL_S = 2.0
"""The interval at a URL, where each poll costs a few requests."""

HELP = "show the newest trajectories, and new ones as they arrive"
DETAILS = """\
Prints one line per trajectory: id, policy version, group, reward, number of completion tokens, finish reason,
and the start of the completion. For a run, --follow shows a live display of the reward curve, metrics, processes
and newest groups. If the output is not a terminal, or with --plain, --follow prints one line per step instead. For
a run's store, or with --filter, --follow prints each new trajectory.

examples:
  rlhf-pipeline tail runs/copy_digits
  rlhf-pipeline tail runs/copy_digits -f           follow an active run
  rlhf-pipeline tail runs/copy_digits -f | grep -v nan
  rlhf-pipeline tail runs/copy_digits/store -f     print each new trajectory
  rlhf-pipeline tail runs/copy_digits -f -n 0 --filter 'reward>=1'
  rlhf-pipeline tail runs/mine/store -n 50 --filter 'finish_reason==failed'

Filters have the same syntax as for `export`. --follow only reads and does not block other processes. While
`tail` is running, other processes can append rows, evict rows and compact the store."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE", help="a run or a store")
    command.add_argument(
        "-n", "--num", type=natural, default=10, metavar="N", help="number of trajectories (default: %(default)s)"
    )
    command.add_argument(
        "-f", "--follow", action="store_true", help="print new trajectories and steps as they arrive, until Ctrl-C"
    )
    command.add_argument("--plain", action="store_true", help="print lines even if the output is a terminal")
    add_filter(command)
    add_json(command)


def execute(args: argparse.Namespace) -> int:
    """Print the newest trajectories; with `--follow`, continue until Ctrl-C, which exits as quietly as `tail -f`."""
    from rlhf_pipeline.report.query import View
    from rlhf_pipeline.report.tail import Tail, step_line
    from rlhf_pipeline.run.address import address_of
    from rlhf_pipeline.run.lookup import is_run
    from rlhf_pipeline.run.place import not_found
    from rlhf_pipeline.run.rows import NewRows

    if args.json and args.follow:
        raise DefinitionError("--json prints only the current rows. Omit --follow, or read metrics.jsonl.")
    address = address_of(args.path)
    steps_alone = args.follow and not args.filters and is_run(address)
    wait = _waiter(_POLL_S if isinstance(address, Path) else _POLL_URL_S)
    try:
        if steps_alone and can_draw(sys.stdout) and not args.plain:
            _draw(address)
        if args.follow and not steps_alone:
            _wait_for_store(address)
        with closing(View(address)) as view:
            if args.json:
                echo_json(view.trajectories(where=args.filters, limit=args.num)["rows"][::-1] if args.num else [])
            elif steps_alone:
                steps = NewRows(view.metrics_rows())
                _echo(map(step_line, steps.rows[-args.num :] if args.num else ()))
                while not wait():
                    if not is_run(address):
                        raise not_found(address, "run")
                    _echo(map(step_line, steps.read()))
            else:
                tail = Tail(view, args.filters, shutil.get_terminal_size((110, 24)).columns)
                _echo(tail.newest(args.num))
                while args.follow and not wait():
                    _echo(tail.fresh())
    except KeyboardInterrupt:
        if not args.follow:
            raise
        return 128 + signal.SIGINT
    return 0


def _echo(lines: Iterable[str]) -> None:
    for line in lines:
        echo(line)


def _draw(address: Path | str) -> NoReturn:
    """Draw a run in place until Ctrl-C."""
    from rlhf_pipeline.cli.live import Screen

    with closing(Screen(address, sys.stdout)) as screen:
        while True:
            screen.draw()
            time.sleep(_FRAME_S if isinstance(address, Path) else _POLL_URL_S)


def _waiter(seconds: float) -> Callable[[], bool]:
    """Return a function that waits, and returns whether the reader of a pipe (head, grep -q) has exited."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors and hang-ups only
    except (AttributeError, io.UnsupportedOperation, OSError):
        return lambda: bool(time.sleep(seconds))
    return lambda: bool(poll.poll(seconds * 1000))


def _wait_for_store(folder: Path | str) -> None:
    """Wait until a run that has just started has a store."""
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.lookup import is_run
    from rlhf_pipeline.run.place import is_store

    reported = False
    while is_run(folder) and not is_store(RunFolder.open(folder).store_path):
        if not reported:
            warn(f"{folder} has not stored any trajectories yet; waiting for the first one")
            reported = True
        time.sleep(_POLL_S)
