"""`rlhf-pipeline verify`: check whether a run, or a store, is intact."""

from __future__ import annotations

import argparse

from rlhf_pipeline.cli.output import echo
from rlhf_pipeline.errors import count

HELP = "check a run or a store for corruption"
DETAILS = """\
Verifies all checksums of a store. For a run, verifies all checksums of its store, ledger, metrics, checkpoints,
rollouts and published weights, and checks that these parts are consistent, that the store contains each trajectory
in the ledger, and that no step is missing. The run may be active. The exit code is 1 if a part is corrupted or
missing.

examples:
  rlhf-pipeline verify runs/copy_digits
  rlhf-pipeline verify runs/copy_digits/store
  rlhf-pipeline verify runs/copy_digits/store --accept-loss          all corrupted commits
  rlhf-pipeline verify runs/copy_digits/store --accept-loss 17 18    only the commits that contain these trajectories"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|STORE", help="a run or a store")
    command.add_argument(
        "--accept-loss",
        nargs="*",
        type=int,
        metavar="ID",
        help="accept the loss of the corrupted commits that contain trajectories with these ids (default: all "
        "corrupted commits); `verify` then no longer reports the loss as a problem, and the trajectories become "
        "readable again if the files are restored",
    )


def execute(args: argparse.Namespace) -> int:
    """Print the result of each check; return 1 if something is damaged."""
    from rlhf_pipeline.report.check import check_run, check_store
    from rlhf_pipeline.run.address import address_of
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.lookup import is_run
    from rlhf_pipeline.run.place import is_store, not_found

    folder = address_of(args.path)
    if args.accept_loss is not None:
        from trajectory_store import TrajectoryStore

        where = RunFolder.open(folder).store_path if is_run(folder) else folder
        with TrajectoryStore.open(where, "a") as store:
            accepted = store.accept_losses(args.accept_loss or None)
        echo(f"{where}: accepted the loss of {count(accepted, 'damaged commit')}.")
    if is_run(folder):
        findings = list(check_run(RunFolder.open(folder)))
    elif is_store(folder):
        findings = list(check_store(folder))
    else:
        raise not_found(folder, "run or store")
    for finding in findings:
        echo(f"{'ok     ' if finding.ok else 'DAMAGED'}  {finding.part + ':':<15} {finding.text}")
    bad = sum(not finding.ok for finding in findings)
    echo(f"{folder} is intact." if not bad else f"{folder}: {count(bad, 'problem')}.")
    return 1 if bad else 0
