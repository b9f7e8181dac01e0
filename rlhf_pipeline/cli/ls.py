"""`rlhf-pipeline ls`: the runs of a folder."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from rlhf_pipeline.cli.output import echo, echo_json, warn
from rlhf_pipeline.cli.parser import add_json
from rlhf_pipeline.errors import PipelineError, typed

HELP = "list the runs in a folder, one per line"
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
    from rlhf_pipeline.run.lookup import is_run
    from rlhf_pipeline.run.place import not_found
    from trajectory_store import StoreError

    folder = Path(args.folder).expanduser()
    summaries, broken = [], list[str]()
    for path in [folder] if is_run(folder) else sorted(folder.glob("*/")):
        try:
            if is_run(path):
                with closing(View(path)) as view:
                    summaries.append(view.about())
        except (PipelineError, StoreError, OSError) as error:  # one that cannot be read hides no other
            broken.append(f"{typed(path)}: {error}")
    if not summaries and not broken:
        raise not_found(folder, "run")
    if broken:
        warn("\n".join(broken))
    if args.json:
        echo_json(summaries)
        return int(bool(broken))
    rows = [("run", "step", "of", "first", "reward", "evaluated", "stored", "failed", "definition")]
    for summary in summaries:
        rewards = number(summary["reward_first"]), number(summary["reward_last"]), number(summary["evaluation"])
        steps = str(summary["step"] or 0), str(summary["of"] or "-")
        row_counts = f"{summary['stored']:,}", str(summary["failed"])
        rows.append((typed(summary["address"]), *steps, *rewards, *row_counts, str(summary["definition"])))
    echo("\n".join(aligned(rows)))
    return int(bool(broken))
