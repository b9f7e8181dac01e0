"""`rlhf-pipeline ls`: the runs of a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_pipeline.cli.output import say, say_json
from rlhf_pipeline.cli.parser import add_json
from rlhf_pipeline.errors import typed

HELP = "list the runs of a folder, one line each"
DETAILS = """\
examples:
  rlhf-pipeline ls                    the runs in runs/
  rlhf-pipeline ls elsewhere --json"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="the folder (default: %(default)s)")
    add_json(command)


def execute(args: argparse.Namespace) -> int:
    """Print one line per run: steps, first, last and evaluated reward, trajectories."""
    from rlhf_pipeline.report.formatting import aligned, number
    from rlhf_pipeline.report.query import View
    from rlhf_pipeline.run.folder import is_run, not_found

    folder = Path(args.folder).expanduser()
    runs = [path for path in ([folder] if is_run(folder) else sorted(folder.glob("*/"))) if is_run(path)]
    if not runs:
        raise not_found(folder, "run")
    found = []
    for path in runs:
        view = View(path)
        found.append(view.about())
        view.close()
    if args.json:
        say_json(found)
        return 0
    rows = [("run", "step", "of", "first", "reward", "evaluated", "stored", "failed", "definition")]
    for one in found:
        rewards = number(one["reward_first"]), number(one["reward_last"]), number(one["evaluation"])
        steps = str(one["step"] or 0), str(one["of"] or "-")
        kept = f"{one['stored']:,}", str(one["failed"])
        rows.append((typed(one["address"]), *steps, *rewards, *kept, str(one["definition"])))
    say("\n".join(aligned(rows)))
    return 0
