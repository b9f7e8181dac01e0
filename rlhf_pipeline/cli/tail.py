"""`rlhf-pipeline tail`: the newest trajectories, and new ones as they arrive."""

from __future__ import annotations

import argparse
import shutil
import signal
import time
from pathlib import Path

from rlhf_pipeline.cli.output import say, warn
from rlhf_pipeline.cli.parser import add_filter, natural

_POLL_S = 0.25
_POLL_URL_S = 2.0
"""The interval at a URL, where each poll costs a few requests."""

HELP = "show the newest trajectories, and new ones as they arrive"
DETAILS = """\
One line per trajectory: id, policy version, group, reward, completion tokens, finish reason, and the
start of the completion. For a run also the newest optimizer step, and with --follow each new one.

examples:
  rlhf-pipeline tail runs/copy_digits
  rlhf-pipeline tail runs/copy_digits -f           watch a running run
  rlhf-pipeline tail runs/copy_digits -f -n 0 --filter 'reward>=1'
  rlhf-pipeline tail runs/mine/store -n 50 --filter 'finish_reason==failed'

Filters are those of `export`. Following only reads and blocks no other process; the store may be
appended to, evicted from and compacted meanwhile."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE")
    command.add_argument("-n", "--num", type=natural, default=10, metavar="N", help="how many (default: %(default)s)")
    command.add_argument("-f", "--follow", action="store_true", help="print new ones as they are stored, until Ctrl-C")
    add_filter(command)


def execute(args: argparse.Namespace) -> int:
    """Print the newest trajectories; with `--follow`, continue until Ctrl-C, which exits as quietly as `tail -f`."""
    from rlhf_pipeline.report.follow import Follower
    from rlhf_pipeline.report.stored import Stored
    from rlhf_pipeline.run.folder import open_run_or_store
    from rlhf_pipeline.run.medium import address_of, is_url

    try:
        if args.follow:
            _wait_for_store(address_of(args.path))
        run, store_path = open_run_or_store(args.path)
        with Stored(store_path) as stored:
            follower = Follower(run, stored, args.filters, say, shutil.get_terminal_size((110, 24)).columns)
            follower.newest(args.num)
            if args.follow:
                follower.follow(_POLL_URL_S if is_url(store_path) else _POLL_S)
    except KeyboardInterrupt:
        if not args.follow:
            raise
        return 128 + signal.SIGINT
    return 0


def _wait_for_store(folder: Path | str) -> None:
    """Wait until a run that has just started has a store."""
    from rlhf_pipeline.run.folder import RunFolder, is_run, is_store

    said = False
    while is_run(folder) and not is_store(RunFolder.open(folder).store_path):
        if not said:
            warn(f"{folder} has stored nothing yet; waiting for it")
            said = True
        time.sleep(_POLL_S)
