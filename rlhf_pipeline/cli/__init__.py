"""The `rlhf-pipeline` command.

One file per command, with its options, its help and its action. Help and usage errors need neither NumPy nor torch,
and read-only commands need no torch, so that they answer at once.
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

    0 is success, 1 a finding (damage, a difference, a problem), 2 a user error, 3 a failure that may succeed on a retry
    (`collect`, `learn`), 130, 143 and 129 a run that was stopped by SIGINT, SIGTERM or SIGHUP and saved.
    """
    debug = False
    try:
        from rlhf_pipeline.cli.output import open_standard_streams

        open_standard_streams()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes, not a traceback
        # Read when torch is first imported. By default its CPU threads spin while they wait. If another process needs
        # a core (a second run, a collector beside a learner), this makes generation 9 times slower, measured on two
        # cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from rlhf_pipeline.cli.parser import module_of, parse

        args = parse(sys.argv[1:] if argv is None else argv)
        debug = args.debug
        code = module_of(args.command).execute(args)
    except BrokenPipeError:
        from rlhf_pipeline.cli.output import leave_standard_output

        leave_standard_output()  # the reader of a pipe (head, less) has exited
        return 141
    except (KeyboardInterrupt, Exception) as error:
        # Python 3.11 wraps what interrupts the creation of a class, while modules are imported.
        if not debug and KeyboardInterrupt in (type(error), type(error.__cause__)):
            sys.stderr.write("\nrlhf-pipeline: interrupted\n")
            return 130
        message = _message(error)
        if debug or message is None:
            raise
        from rlhf_pipeline.cli.output import OutputError, leave_standard_output, warn

        if isinstance(error, OutputError):
            leave_standard_output()
        warn(f"rlhf-pipeline: {message}")
        return 2
    return code


def _message(error: BaseException) -> str | None:
    """Return the message for an error that a user can act on; None for an internal error."""
    from rlhf_pipeline.errors import PipelineError

    store = sys.modules.get("trajectory_store")
    if isinstance(error, PipelineError) or (store is not None and isinstance(error, store.StoreError)):
        return str(error)
    if _lacks_memory(error):
        return (
            "not enough memory. Lower learn.token_budget, collect.num_slots or collect.prompts_per_rollout, or raise "
            "the memory limit of this process (`ulimit -v`) or container. Acknowledged trajectories are kept, and "
            "--resume continues a run. (--debug shows the traceback.)"
        )
    if isinstance(error, UnicodeEncodeError) and any("\udc80" <= letter <= "\udcff" for letter in str(error.object)):
        return (
            f"Python encodes file names as {sys.getfilesystemencoding()}, which cannot encode a name on the command "
            "line. Enable UTF-8 mode: PYTHONUTF8=1 rlhf-pipeline ..."
        )
    if not isinstance(error, OSError) or error.strerror is None or error.filename is None:
        return None
    return f"{os.fsdecode(error.filename)}: {error.strerror}. (--debug shows the traceback.)"


def _lacks_memory(error: BaseException) -> bool:
    """Return whether memory ran out, by Python's own error or by those of torch and C++ libraries."""
    phrases = ("can't allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in phrases)
    )
