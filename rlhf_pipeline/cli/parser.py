"""The command line: commands and options, with "did you mean" for typos. Each command's own options are in its file.

argparse is used because `--help` then takes 0.1 s less than with libraries built on click.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from rlhf_pipeline.cli.output import echo, warn
from rlhf_pipeline.errors import did_you_mean

COMMANDS = (
    *("run", "collect", "learn", "list", "config", "inspect", "show", "tail", "diff", "verify", "replay", "evaluate"),
    *("compact", "report", "view", "status", "ls", "group", "ledger", "stats"),
    *("import", "export", "copy", "new-model", "doctor"),
)
"""The commands in the order of `--help`; each command has a file of the same name."""

_DESCRIPTION = """\
The data path of RL post-training: collect rollouts, store all of them, learn from them and inspect them.

Start here (about a minute on a CPU, without downloads):
  rlhf-pipeline run copy_digits"""

_EXAMPLES = """\
examples:
  rlhf-pipeline list                              the pipelines and their requirements
  rlhf-pipeline run copy_digits                   learn to copy digits; the run folder is runs/copy_digits
  rlhf-pipeline run my_task.py:my_pipeline        your own function that returns a Pipeline
  rlhf-pipeline run copy_digits --resume          resume a stopped run
  rlhf-pipeline config learn.lr                   the meaning and bounds of a setting
  rlhf-pipeline inspect runs/copy_digits          counts, lengths and rewards
  rlhf-pipeline show runs/copy_digits --id 17     one trajectory, token by token
  rlhf-pipeline tail runs/copy_digits -f          follow a run
  rlhf-pipeline status runs/copy_digits           processes, waits, disk usage and alarms
  rlhf-pipeline view runs/copy_digits             curves, groups and tokens in a browser
  rlhf-pipeline evaluate runs/mine --best         evaluate the best checkpoint on held-out prompts
  rlhf-pipeline replay runs/copy_digits           reproduce the learning curve from the store

`rlhf-pipeline COMMAND --help` describes a command."""


class Parser(argparse.ArgumentParser):
    """argparse with "did you mean" for commands and options."""

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or an error and report a failed write, which argparse would ignore."""
        echo(message, end="") if file is sys.stdout else warn(message.rstrip("\n"))

    def error(self, message: str) -> NoReturn:
        """Print the error and where to find help, and exit with code 2."""
        wrong = re.match(
            r"argument (?P<where>.+): invalid choice: '(?P<typed>[^']*)' \(choose from (?P<known>.+)\)", message
        )
        if wrong:
            choices = [name.strip(" '") for name in wrong["known"].split(",")]
            what = "command" if wrong["where"] == "COMMAND" else f"value for {wrong['where']}"
            message = f"there is no {what} '{wrong['typed']}'.{did_you_mean(wrong['typed'], choices)}"
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` shows all options.\n")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, up to 100 characters, with commands and their meaning on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(shutil.get_terminal_size().columns, 100))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Break lines that are wider than the terminal between words; the others stay unchanged."""
        lines = super()._fill_text(text, width, indent).splitlines()
        return "\n".join(_broken(line, width) if len(line) > width else line for line in lines)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += 4  # argparse forgets that it indents the commands


def _broken(line: str, width: int) -> str:
    start = " " * (len(line) - len(line.lstrip()))
    further = f"{start}    " if start else ""
    return textwrap.fill(
        line.lstrip(),
        width,
        initial_indent=start,
        subsequent_indent=further,
        break_on_hyphens=False,
        break_long_words=False,
    )


def module_of(command: str) -> Any:
    """Return the module of a command: `HELP`, `DETAILS`, `add_options` and `execute`."""
    return importlib.import_module(
        f"rlhf_pipeline.cli.{'import_' if command == 'import' else command.replace('-', '_')}"
    )


def build_parser(only: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser, and the parser of each command by name."""
    main = Parser(
        prog="rlhf-pipeline", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=_Help, allow_abbrev=False
    )
    main.add_argument("--version", action="store_true", help="show the version")
    main.set_defaults(debug=False)
    subparsers = main.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    commands: dict[str, Parser] = {}
    for name in COMMANDS if only is None else (only,):
        module = module_of(name)
        added = subparsers.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=module.DETAILS,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        module.add_options(added)
        commands[name] = added
    return main, commands


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `command` is one of the attributes."""
    main, commands = build_parser(argv[0] if argv and argv[0] in COMMANDS else None)
    args, unknown = main.parse_known_args(argv)
    if args.version:
        from rlhf_pipeline import __version__

        echo(f"rlhf-pipeline {__version__}")
        main.exit(0)
    if args.command is None:
        if unknown:
            main.error(
                f"{unknown[0]} is not a valid option before a command. Start with a command, for example: "
                "rlhf-pipeline list"
            )
        main.print_help()
        main.exit(0)
    if unknown:
        _refuse(unknown[0], commands[args.command])
    return args


def _refuse(typed: str, command: Parser) -> NoReturn:
    if not typed.startswith("-"):
        command.error(f"unexpected argument '{typed}'. Quote paths that contain spaces.")
    name = typed.split("=", 1)[0]
    options = [option for action in options_of(command) for option in action.option_strings if option.startswith("--")]
    command.error(f"there is no option {name}.{did_you_mean(name, options)}")


def options_of(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and arguments of a command, in the order of its help."""
    return command._actions


# -- options that several commands take ------------------------------------------------------------------------------


def add_filter(command: argparse.ArgumentParser) -> None:
    """Add `--filter`."""
    command.add_argument(
        "--filter",
        dest="filters",
        action="append",
        default=[],
        metavar="CONDITION",
        help="use only trajectories that meet the condition; may be repeated",
    )


def add_skip_damaged(command: argparse.ArgumentParser) -> None:
    """Add `--skip-damaged`."""
    command.add_argument(
        "--skip-damaged",
        action="store_true",
        help="skip and count trajectories that do not match their checksums (default: list them and reject the store)",
    )


def add_fields(command: argparse.ArgumentParser) -> None:
    """Add `--field`."""
    command.add_argument(
        "--field",
        dest="fields",
        type=_field,
        action="append",
        default=[],
        metavar="WHAT=NAME",
        help="the field that contains WHAT (prompt, completion, messages, reward, ...); use a dotted path for a nested "
        "field, `none` to ignore WHAT, and a sum such as accuracy+0.5*format for the reward; may be repeated",
    )


def _field(text: str) -> tuple[str, str]:
    target, equals, name = text.partition("=")
    if not equals or not target or not name:
        raise argparse.ArgumentTypeError(
            f"'{text}' does not have the form WHAT=NAME. For example: --field prompt=question"
        )
    return target.strip(), name.strip()


def add_json(command: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    command.add_argument("--json", action="store_true", help="print the output as JSON")


def add_overrides(command: argparse.ArgumentParser) -> None:
    """Add `--set`."""
    command.add_argument(
        "--set",
        dest="overrides",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="set a field of the definition (`rlhf-pipeline config` lists the fields); may be repeated",
    )


def add_trust(command: argparse.ArgumentParser) -> None:
    """Add `--trust`."""
    command.add_argument(
        "--trust",
        action="store_true",
        help="allow execution of the definition's code if the run was started elsewhere",
    )


def add_steps(command: argparse.ArgumentParser) -> None:
    """Add `--steps`."""
    command.add_argument(
        "--steps", type=positive, metavar="N", help="maximum number of optimizer steps; same as --set learn.steps=N"
    )


def add_watching(command: argparse.ArgumentParser) -> None:
    """Add `--progress-timeout`, `--metrics-port` and `--metrics-host`."""
    command.add_argument(
        "--progress-timeout",
        type=seconds,
        metavar="S",
        help="exit with code 3 if a rollout or step takes more than S seconds; `run --collectors` then restarts the "
        "process (default: no limit)",
    )
    command.add_argument(
        "--metrics-port",
        type=positive,
        metavar="PORT",
        help="export state, alarms and metrics in the Prometheus text format at http://HOST:PORT/metrics (requires the "
        "`prometheus` extra)",
    )
    command.add_argument(
        "--metrics-host",
        default="localhost",
        metavar="HOST",
        help=(
            "the address at which the metrics are served; 0.0.0.0 for all addresses of this machine "
            "(default: %(default)s)"
        ),
    )


def add_process_options(command: argparse.ArgumentParser) -> None:
    """Add the options of both `collect` and `learn`."""
    command.add_argument(
        "definition",
        nargs="?",
        metavar="NAME|FILE.py[:function]",
        help="the name of a built-in pipeline, or your own file; optional if the run exists",
    )
    command.add_argument("--run", required=True, metavar="DIR", help="the run folder; created if missing")
    command.add_argument("--seed", type=natural, metavar="N", help="seed for a new run (default: 0)")
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 or mps (default: the run's device, or cpu)")
    add_overrides(command)
    add_trust(command)
    add_watching(command)
    command.add_argument("--parent", type=positive, metavar="PID", help="stop when the process with this PID exits")


# -- values ----------------------------------------------------------------------------------------------------------


def _setting(text: str) -> tuple[str, str]:
    path, equals, setting = text.partition("=")
    if not equals or not path:
        raise argparse.ArgumentTypeError(
            f"'{text}' does not have the form KEY.PATH=VALUE. For example: --set learn.lr=3e-4"
        )
    return path.strip(), re.sub(r"(?<![^,])[^,]+\.py(?=:\w+(?:,|$))", _absolute_path, setting)


def _absolute_path(file: re.Match[str]) -> str:
    """Return the path of a file with code: a run that is resumed elsewhere reads the same one."""
    return os.path.abspath(os.path.expanduser(file[0]))


def natural(text: str) -> int:
    """Read a whole number from 0 up."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got '{text}'")
    return int(text)


def row_id(text: str) -> int:
    """Read a trajectory's id: a number, or `SEGMENT:ROW` as the pages show it."""
    segment, colon, row = text.partition(":")
    return natural(segment) << 32 | natural(row) if colon else natural(text)


def positive(text: str) -> int:
    """Read a whole number from 1 up."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return number


def above_zero(text: str, what: str = "number above 0") -> float:
    """Read a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a {what}, got '{text}'")
    return number


def seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    return above_zero(text, "positive number of seconds")


def share(text: str) -> float:
    """Read a count that may be a fraction."""
    return 0.0 if text == "0" else above_zero(text, "number that is at least 0")
