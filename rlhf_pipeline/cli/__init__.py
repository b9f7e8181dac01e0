"""The `rlhf-pipeline` command.

One file per command: its options, its help, what it does. Every command answers before anything heavy is imported:
help and mistakes need neither NumPy nor torch, and the commands that look need no torch.
"""

from __future__ import annotations

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 1 damage found (`verify`, `inspect`, `doctor`), 2 a mistake in what was asked, 130 and 143 a run that
    was stopped by SIGINT or SIGTERM and saved.
    """
    debug = False
    try:
        from rlhf_pipeline.cli.output import open_standard_streams

        open_standard_streams()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes, not a traceback
        # Read when torch is first imported. By default its CPU threads spin while they wait; where another process
        # wants a core (a second run, a collector beside a learner) generation is then 9 times slower, measured on two
        # cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from rlhf_pipeline.cli.parser import module_of, parse

        args = parse(sys.argv[1:] if argv is None else argv)
        debug = args.debug
        code = module_of(args.command).execute(args)
    except BrokenPipeError:
        from rlhf_pipeline.cli.output import leave_standard_output

        leave_standard_output()  # the reader of a pipe (head, less) has left
        return 141
    except KeyboardInterrupt:
        if debug:
            raise
        sys.stderr.write("\nrlhf-pipeline: interrupted\n")
        return 130
    except Exception as error:
        message = _message(error)
        if debug or message is None:
            raise
        from rlhf_pipeline.cli.output import OutputError, leave_standard_output, warn

        if isinstance(error, OutputError):
            leave_standard_output()
        warn(f"rlhf-pipeline: {message}")
        return 2
    return code


def _message(error: Exception) -> str | None:
    """Return the message for an error that a user can act on; None for a bug of ours."""
    from rlhf_pipeline.errors import PipelineError

    store = sys.modules.get("trajectory_store")
    if isinstance(error, PipelineError) or (store is not None and isinstance(error, store.StoreError)):
        return str(error)
    if _lacks_memory(error):
        return (
            "there is not enough memory. Lower learn.token_budget, collect.num_slots or collect.prompts_per_rollout, "
            "or raise the limit of this process (`ulimit -v`, the container's). What was acknowledged is kept: a run "
            "goes on with --resume. (--debug shows where.)"
        )
    if isinstance(error, UnicodeEncodeError) and any("\udc80" <= letter <= "\udcff" for letter in str(error.object)):
        return (
            f"Python reads file names as {sys.getfilesystemencoding()} here, which does not know one of the names that "
            "were typed. Turn on its UTF-8 mode: PYTHONUTF8=1 rlhf-pipeline ..."
        )
    if not isinstance(error, OSError) or error.strerror is None or error.filename is None:
        return None
    return f"{os.fsdecode(error.filename)}: {error.strerror}. (--debug shows where.)"


def _lacks_memory(error: Exception) -> bool:
    """Whether memory ran out: Python's own error, or how torch and C++ libraries say it."""
    said = ("can't allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    )
