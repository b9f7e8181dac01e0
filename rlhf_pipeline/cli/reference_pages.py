"""The reference pages of the commands and of the errors, printed from what they describe."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

from rlhf_pipeline.cli.parser import build_parser, options_of


def commands_page() -> Iterator[str]:
    """Yield docs/commands.md: every command with its options and examples, as argparse has them."""
    yield "# Commands"
    yield ""
    yield "This page describes every command of `rlhf-pipeline`. It is generated from the command-line options by"
    yield "`rlhf-pipeline config commands --markdown > docs/commands.md`. Every command also accepts `--help` and"
    yield "`--debug`; `--debug` shows the traceback of an error. The exit codes are:"
    yield ""
    yield "- 0: success;"
    yield "- 1: the command found corruption, a difference or another problem;"
    yield "- 2: an error that the user can correct;"
    yield "- 3: a failure after which a retry may succeed;"
    yield "- 130, 143 or 129: a run was saved and stopped after SIGINT, SIGTERM or SIGHUP."
    for name, command in build_parser()[1].items():
        yield from ("", f"## {name}", "", command.description or "", "", "```text", *_usage(command), "```", "")
        actions = [item for item in options_of(command) if not {"--help", "--debug"} & set(item.option_strings)]
        if actions:
            yield from ("| argument | meaning |", "|---|---|")
            yield from (f"| {_name(action)} | {_cell(_meaning(action, command))} |" for action in actions)
            yield ""
        yield from ("```text", *(command.epilog or "").strip().splitlines(), "```")


def _usage(command: argparse.ArgumentParser) -> list[str]:
    words = re.sub(r"\s+", " ", command.format_usage()).removeprefix("usage: ").strip()
    return [words.replace(" [-h]", "").replace(" [--debug]", "")]


def _name(action: argparse.Action) -> str:
    metavar = "" if action.nargs == 0 else _cell(str(action.metavar or "|".join(map(str, action.choices or ()))))
    if not action.option_strings:
        return f"`{metavar or action.dest}`"
    return ", ".join(f"`{option} {metavar}`" if metavar else f"`{option}`" for option in action.option_strings)


def _meaning(action: argparse.Action, command: argparse.ArgumentParser) -> str:
    return (action.help or "") % {**vars(action), "prog": command.prog}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def errors_page() -> Iterator[str]:
    """Yield docs/errors.md: both trees of errors, in the words of their classes."""
    import trajectory_store.errors as of_store
    from rlhf_pipeline import errors as of_pipeline

    yield "# Errors"
    yield ""
    yield "This page lists every error class of the packages. It is generated from the classes by"
    yield "`rlhf-pipeline config errors --markdown > docs/errors.md`. An error message states what is wrong and"
    yield "where, and which command or setting to use next. Each subclass of the two base classes also derives from"
    yield "a built-in exception, so `except ValueError` works. A command prints the message and exits with code 2;"
    yield "`--debug` also shows the traceback. For the most frequent errors, see"
    yield "[troubleshooting.md](troubleshooting.md)."
    for title, module, root in (
        ("Errors of the pipeline", of_pipeline, of_pipeline.PipelineError),
        ("Errors of the store", of_store, of_store.StoreError),
    ):
        yield from ("", f"## {title}", "", f"Import these classes from `{module.__name__}`.", "")
        yield from ("| error | also derives from | condition |", "|---|---|---|")
        yield from _rows(module, root, 0)


def _rows(module: ModuleType, kind: type, depth: int) -> Iterator[str]:
    """Yield a line for an error and for each one that is a special case of it."""
    standard = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base.__module__ == "builtins")
    summary = (inspect.getdoc(kind) or "").split("\n\n")[0]
    yield f"| {'&nbsp;&nbsp;' * depth}`{kind.__name__}` | {standard} | {_cell(summary)} |"
    for subclass in vars(module).values():
        if inspect.isclass(subclass) and kind in subclass.__bases__ and subclass.__module__ == module.__name__:
            yield from _rows(module, subclass, depth + 1)
