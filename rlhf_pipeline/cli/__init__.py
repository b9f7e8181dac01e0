"""The `rlhf-pipeline` command.

Every command answers before anything heavy is imported; only `run`, `new-model` and `doctor` need torch, and they say
so first.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

from rlhf_pipeline.cli.parser import parse
from rlhf_pipeline.errors import PipelineError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 1 damage found (`verify`, `inspect`, `doctor`), 2 a mistake in what was asked, 130 and 143 a run that
    was stopped by SIGINT or SIGTERM and saved.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes, not a traceback
    # Read when torch is first imported. By default its CPU threads spin while they wait; where another process wants a
    # core (a second run, a collector beside a learner) generation is then 9 times slower, measured on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        command = importlib.import_module(f"rlhf_pipeline.cli.{args.module}")
        code = command.execute(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe (head, less) has left. Point stdout elsewhere, or Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        if args.debug:
            raise
        print("\ninterrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug or not _is_on_purpose(error):
            raise
        print(f"rlhf-pipeline: {error}", file=sys.stderr)
        return 2
    return code


def _is_on_purpose(error: Exception) -> bool:
    """Return True for an error whose message is written for people."""
    store = sys.modules.get("trajectory_store")
    return isinstance(error, PipelineError) or (store is not None and isinstance(error, store.StoreError))
