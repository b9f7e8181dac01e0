"""`rlhf-pipeline config`: what can be set, what it means, and what it is in a definition."""

from __future__ import annotations

import argparse

from rlhf_pipeline.cli.output import say

HELP = "show what can be set: meaning, bounds, default"
DETAILS = ""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add what can be typed."""
    command.add_argument("names", nargs="*", metavar="PIPELINE|FIELD", help="one definition, one field, or both")


def execute(args: argparse.Namespace) -> int:
    """Print the settings."""
    say(str(args.names))
    return 0
