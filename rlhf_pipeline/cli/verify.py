"""`rlhf-pipeline verify`: is a run, or a store, whole."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_pipeline.report.check import check_run, check_store
from rlhf_pipeline.report.run_folder import RunFolder, is_run, is_store, not_found
from rlhf_pipeline.report.words import count, plain


def execute(args: argparse.Namespace) -> int:
    """Print what each check found; 1 if something is damaged."""
    folder = Path(args.path).expanduser()
    if is_run(folder):
        findings = list(check_run(RunFolder(folder)))
    elif is_store(folder):
        findings = list(check_store(folder))
    else:
        raise not_found(folder, "run or store")
    for finding in findings:
        print(f"{'ok     ' if finding.ok else 'DAMAGED'}  {finding.part + ':':<15} {plain(finding.text)}")
    bad = sum(not finding.ok for finding in findings)
    print(f"{folder} is whole." if not bad else f"{folder}: {count(bad, 'problem')}.")
    return 1 if bad else 0
