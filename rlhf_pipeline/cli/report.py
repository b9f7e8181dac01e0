"""`rlhf-pipeline report`: write the report page and the curve again."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_pipeline.errors import MissingPathError
from rlhf_pipeline.report.html import write_report
from rlhf_pipeline.report.stored import open_run_or_store


def execute(args: argparse.Namespace) -> int:
    """Write `report.html` and `reward.svg`."""
    run, store_path = open_run_or_store(args.path)
    if run is None:
        raise MissingPathError(
            f"{store_path} is a store alone; a report needs the run around it. "
            f"`rlhf-pipeline inspect {store_path}` works."
        )
    target = Path(args.out).expanduser() if args.out else None
    if target is not None and not target.parent.is_dir():
        raise MissingPathError(
            f"there is no folder {target.parent} for {target.name}. Make it first, or leave --out out."
        )
    for path in write_report(run, target):
        print(path)
    return 0
