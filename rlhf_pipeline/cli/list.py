"""`rlhf-pipeline list`: the pipelines that can be run."""

from __future__ import annotations

import argparse
import ast
import shutil
import textwrap
from pathlib import Path

from rlhf_pipeline.cli.output import echo, warn
from rlhf_pipeline.errors import PipelineError

HELP = "list the available pipelines"
DETAILS = """\
examples:
  rlhf-pipeline list
  rlhf-pipeline list my_task.py          lists the definitions in your own file"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument(
        "files",
        nargs="*",
        metavar="FILE.py",
        help="list the definitions in these files instead of the built-in pipelines",
    )


def execute(args: argparse.Namespace) -> int:
    """Print name, description and requirements of each definition; a broken file becomes one line of output."""
    from rlhf_pipeline import definitions

    files = [Path(name).expanduser() for name in args.files] or definitions.builtin_files()
    failed = False
    for file in files:
        try:
            pipelines = [(definition, definition.pipeline()) for definition in definitions.definitions_in(file)]
        except PipelineError as error:
            warn(f"{file}: {error}")
            failed = True
            continue
        for definition, pipeline in pipelines:
            title = definition.name if not args.files else f"{file}:{definition.function}"
            echo(f"{title}\n{_indented(pipeline.description or '(no description)')}")
            echo(_indented(f"needs: {pipeline.needs}"))
    for program in [] if args.files else definitions.builtin_programs():
        about = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or "(no description)"
        echo(f"example program: python {program}\n{_indented(about.splitlines()[0])}")
    echo("\nTo run a pipeline: rlhf-pipeline run NAME, or rlhf-pipeline run FILE.py[:function]")
    return 2 if failed else 0


def _indented(text: str) -> str:
    width = max(shutil.get_terminal_size().columns, 40)
    return textwrap.fill(text, width=width, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
