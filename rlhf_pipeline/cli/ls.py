"""`rlhf-pipeline ls`: the runs of a folder."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from rlhf_pipeline.cli.output import say, say_json, warn
from rlhf_pipeline.cli.parser import add_json
from rlhf_pipeline.errors import PipelineError, typed

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
    from trajectory_store import StoreError

    folder = Path(args.folder).expanduser()
    runs = [path for path in ([folder] if is_run(folder) else sorted(folder.glob("*/"))) if is_run(path)]
    if not runs:
        raise not_found(folder, "run")
    found, broken = [], list[str]()
    for path in runs:
        try:
            with closing(View(path)) as view:
                found.append(view.about())
        except (PipelineError, StoreError) as error:  # one that is damaged hides no other
            broken.append(f"{typed(path)}: {error}")
    if broken:
        warn("\n".join(broken))
    if args.json:
        say_json(found)
        return int(bool(broken))
    rows = [("run", "step", "of", "first", "reward", "evaluated", "stored", "failed", "definition")]
    for one in found:
        rewards = number(one["reward_first"]), number(one["reward_last"]), number(one["evaluation"])
        steps = str(one["step"] or 0), str(one["of"] or "-")
        kept = f"{one['stored']:,}", str(one["failed"])
        rows.append((typed(one["address"]), *steps, *rewards, *kept, str(one["definition"])))
    say("\n".join(aligned(rows)))
    return int(bool(broken))
