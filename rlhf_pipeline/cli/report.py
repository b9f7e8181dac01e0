"""`rlhf-pipeline report`: write the report page and the curve again."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_pipeline.cli.output import echo
from rlhf_pipeline.errors import MissingPathError, typed

HELP = "rewrite a run's report.html, which contains the pages of `view` in one file"
DETAILS = """\
examples:
  rlhf-pipeline report runs/copy_digits
  rlhf-pipeline report runs/copy_digits --out copy_digits.html      for a read-only run folder"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN", help="a run")
    command.add_argument("--out", metavar="FILE.html", help="the output file (default: RUN/report.html)")


def execute(args: argparse.Namespace) -> int:
    """Write `report.html`."""
    from rlhf_pipeline.report.one_file import write_report
    from rlhf_pipeline.run.lookup import open_run_or_store

    run, store_path = open_run_or_store(args.path)
    if run is None:
        raise MissingPathError(
            f"{store_path} is a store without a run, but a report needs a run. To inspect the store: rlhf-pipeline "
            f"inspect {typed(store_path)}"
        )
    target = Path(args.out).expanduser() if args.out else None
    if target is not None and not target.parent.is_dir():
        raise MissingPathError(
            f"the folder {target.parent} for {target.name} does not exist. Create it, or omit --out."
        )
    echo(str(write_report(run, target)))
    return 0
