"""What can be typed: commands, options, help with examples, and "did you mean" for slips.

argparse, because the whole `--help` then costs 0.1 s less than with the libraries built on click.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections.abc import Sequence
from typing import NoReturn

from rlhf_pipeline.cli import help_texts
from rlhf_pipeline.errors import did_you_mean


class _Parser(argparse.ArgumentParser):
    """argparse with "did you mean" for commands and options."""

    def error(self, message: str) -> NoReturn:
        wrong = re.match(
            r"argument (?P<where>.+): invalid choice: '(?P<typed>[^']*)' \(choose from (?P<known>.+)\)", message
        )
        if wrong:
            known = [name.strip(" '") for name in wrong["known"].split(",")]
            what = "command" if wrong["where"] == "COMMAND" else f"value for {wrong['where']}"
            message = f"there is no {what} '{wrong['typed']}'.{did_you_mean(wrong['typed'], known)}"
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` shows what can be typed.\n")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, up to 100 characters, with commands and their meaning on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(shutil.get_terminal_size().columns, 100))

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += 4  # argparse forgets that it indents the commands


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser, and the parser of each command by name."""
    main = _Parser(
        prog="rlhf-pipeline",
        description=help_texts.DESCRIPTION,
        epilog=help_texts.EXAMPLES,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    main.add_argument("--version", action="store_true", help="show the version")
    main.set_defaults(debug=False)
    subparsers = main.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    commands: dict[str, argparse.ArgumentParser] = {}

    def command(name: str, module: str, help_line: str, more: str = "") -> argparse.ArgumentParser:
        added = subparsers.add_parser(
            name,
            help=help_line,
            description=f"{help_line[0].upper()}{help_line[1:]}.",
            epilog=more,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        added.set_defaults(module=module)
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        commands[name] = added
        return added

    run = command("run", "run", "run a pipeline", help_texts.RUN)
    run.add_argument(
        "definition",
        nargs="?",
        metavar="NAME|FILE.py[:function]",
        help="a built-in pipeline or your own; may be left out with --resume --out DIR",
    )
    run.add_argument("--out", metavar="DIR", help="the run folder (default: runs/NAME)")
    run.add_argument("--seed", type=_natural, metavar="N", help="seeds weights, prompts and completions (default: 0)")
    run.add_argument(
        "--steps", type=_positive, metavar="N", help="optimizer steps at most; same as --set learn.steps=N"
    )
    run.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, mps (default: cpu)")
    run.add_argument("--resume", action="store_true", help="go on with a run that stopped")
    _add_overrides(run)
    several = run.add_argument_group("collectors and learner as processes of their own (docs/long_running.md)")
    several.add_argument(
        "--collectors", type=_positive, metavar="N", help="supervise N collectors and a learner; dead ones start again"
    )
    several.add_argument(
        "--max-failures",
        type=_positive,
        default=5,
        metavar="N",
        help="give up when a process fails N times in a row and nothing is learned (default: %(default)s)",
    )
    several.add_argument(
        "--hang-timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="kill a process that is frozen for S seconds (default: %(default)g)",
    )
    several.add_argument(
        "--progress-timeout",
        type=_seconds,
        metavar="S",
        help="kill a process that is in one rollout or step for S seconds (default: never)",
    )

    collect = command("collect", "collect", "collect rollouts into a run, in a process of its own", help_texts.COLLECT)
    _add_process_options(collect)
    collect.add_argument(
        "--name",
        type=_process_name,
        metavar="NAME",
        help="of this process (default: the first free of collector-0, ...)",
    )

    learn = command("learn", "learn", "learn from what collectors store, in a process of its own", help_texts.LEARN)
    _add_process_options(learn)
    learn.add_argument(
        "--steps", type=_positive, metavar="N", help="optimizer steps at most; same as --set learn.steps=N"
    )

    listing = command("list", "listing", "list the pipelines that can be run")
    listing.add_argument("files", nargs="*", metavar="FILE.py", help="list the definitions in these files instead")

    inspect = command("inspect", "inspect", "count what a run has stored, and grade it again", help_texts.INSPECT)
    inspect.add_argument("path", metavar="RUN|STORE")
    inspect.add_argument("--definition", metavar="NAME|FILE.py[:function]", help="take the reward function from here")
    inspect.add_argument("--json", action="store_true", help="print JSON")

    show = command("show", "show", "show stored trajectories, token by token", help_texts.SHOW)
    show.add_argument("path", metavar="RUN|STORE")
    which = show.add_mutually_exclusive_group()
    which.add_argument("--id", type=_natural, metavar="N", help="the trajectory with this id")
    which.add_argument("--group", type=_natural, metavar="G", help="all trajectories of this group")
    which.add_argument("--last", type=_positive, metavar="N", help="the newest N trajectories")
    which.add_argument(
        "--step", type=_positive, metavar="S", help="the trajectories that optimizer step S learned from"
    )
    show.add_argument("--full", action="store_true", help="show every token of every trajectory")

    tail = command("tail", "tail", "show the newest trajectories, and those that come", help_texts.TAIL)
    tail.add_argument("path", metavar="RUN|STORE")
    tail.add_argument("-n", "--num", type=_natural, default=10, metavar="N", help="how many (default: %(default)s)")
    tail.add_argument("-f", "--follow", action="store_true", help="go on as more are stored, until Ctrl-C")
    _add_filter(tail)

    diff = command("diff", "diff", "say how two runs, or two stores, differ", help_texts.DIFF)
    diff.add_argument("left", metavar="LEFT", help="a run or a store")
    diff.add_argument("right", metavar="RIGHT", help="another one")
    diff.add_argument(
        "--ignore", action="append", default=[], metavar="COLUMN", help="do not compare it; may be given several times"
    )
    diff.add_argument("--json", action="store_true", help="print JSON")

    verify = command("verify", "verify", "check a run or a store for damage", help_texts.VERIFY)
    verify.add_argument("path", metavar="RUN|STORE")

    replay = command(
        "replay", "replay", "learn from stores alone; or take a run's steps again and compare", help_texts.REPLAY
    )
    replay.add_argument("paths", nargs="*", metavar="STORE|RUN", help="what to learn from; only read")
    replay.add_argument(
        "--definition",
        metavar="NAME|FILE.py[:function]",
        help="what learns (default: the definition of the first RUN, else offline_replay)",
    )
    replay.add_argument("--out", metavar="DIR", help="the run folder (default: runs/NAME-replay)")
    replay.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps at most")
    replay.add_argument("--epochs", type=_above_zero, metavar="E", help="stop when each was used E times on average")
    replay.add_argument(
        "--weight",
        dest="weights",
        type=_above_zero,
        action="append",
        default=[],
        metavar="W",
        help="share of each batch that comes from a store; one for each STORE, in their order",
    )
    _add_filter(replay)
    replay.add_argument("--seed", type=_natural, metavar="N", help="seeds weights and batches (default: the run's)")
    replay.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, mps (default: the run's, or cpu)")
    replay.add_argument("--resume", action="store_true", help="go on with a replay that stopped")
    _add_overrides(replay)
    replay.add_argument(
        "--from-step",
        type=_positive,
        metavar="K",
        help="of one RUN: take steps K and later again from its checkpoint, and compare; changes nothing",
    )

    compact = command("compact", "compact", "merge the segments of a store that nobody writes to", help_texts.COMPACT)
    compact.add_argument("path", metavar="RUN|STORE")

    report = command("report", "report", "write report.html and reward.svg of a run again")
    report.add_argument("path", metavar="RUN")
    report.add_argument("--out", metavar="FILE.html", help="where to (default: RUN/report.html)")

    imported = command("import", "import_", "bring other tools' rollouts into a store", help_texts.IMPORT)
    imported.add_argument("files", nargs="+", metavar="FILE", help="files, saved datasets, or folders of files")
    imported.add_argument("--into", required=True, metavar="STORE", help="the store's folder; made if it is not there")
    imported.add_argument(
        "--format",
        default="auto",
        metavar="NAME",
        help="auto, jsonl, parquet, hf, trl, verl, skyrl, nemo-rl, openrlhf, open-instruct, prime-rl, "
        "verifiers, tinker, gsm8k-solutions, store (default: auto)",
    )
    imported.add_argument("--tokenizer", metavar="FOLDER", help="encodes text that has no token ids")
    imported.add_argument(
        "--field",
        dest="fields",
        type=_field,
        action="append",
        default=[],
        metavar="WHAT=NAME",
        help="the field that holds the prompt, completion, reward, group, ...; none leaves it out, and reward may be "
        "a sum: accuracy+0.5*format; may be given several times",
    )
    imported.add_argument(
        "--group-by",
        default="auto",
        choices=("auto", "prompt"),
        help="auto: the format's groups, else rows in turn with equal prompts; prompt: all rows with one prompt",
    )
    imported.add_argument("--no-chat-template", action="store_true", help="encode prompts as plain text")
    imported.add_argument("--no-eos", action="store_true", help="do not end encoded completions with the EOS token")
    imported.add_argument(
        "--durability", choices=("process", "power", "group"), help="of a new store (default: process)"
    )

    export = command("export", "export", "write a store as Parquet, JSONL or a Hugging Face dataset", help_texts.EXPORT)
    export.add_argument("path", metavar="RUN|STORE")
    export.add_argument(
        "--to", required=True, metavar="FILE.parquet|FILE.jsonl|FOLDER", help="must not exist; a folder is a dataset"
    )
    _add_filter(export)
    export.add_argument("--columns", nargs="+", metavar="NAME", help="only these columns")

    copy = command("copy", "copying", "copy a store, whole or in part, to either backend", help_texts.COPY)
    copy.add_argument("path", metavar="RUN|STORE")
    copy.add_argument("--to", required=True, metavar="STORE", help="the new folder; must not exist")
    copy.add_argument(
        "--backend",
        choices=("memmap", "zarr"),
        default="memmap",
        help="memmap: raw, for training; zarr: compressed, for keeping (default: %(default)s)",
    )
    _add_filter(copy)

    model = command(
        "new-model",
        "new_model",
        "make a small untrained model and its tokenizer from a text file",
        help_texts.NEW_MODEL,
    )
    model.add_argument("folder", metavar="FOLDER", help="where to; must not exist")
    model.add_argument("--text", required=True, metavar="FILE", help="the text that the tokenizer is made from")
    model.add_argument("--vocab-size", type=_positive, default=4096, metavar="N", help="tokens (default: %(default)s)")
    model.add_argument("--hidden-size", type=_positive, default=256, metavar="N", help="(default: %(default)s)")
    model.add_argument("--num-layers", type=_positive, default=4, metavar="N", help="(default: %(default)s)")
    model.add_argument("--seed", type=_natural, default=0, metavar="N", help="seeds the weights (default: %(default)s)")

    command("doctor", "doctor", "say what this machine and this folder can do, and what is missing")
    return main, commands


def _add_filter(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--filter",
        dest="filters",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only trajectories that meet it; may be given several times",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what was typed, with `module` naming the module in `rlhf_pipeline.cli` that does it.

    Raises:
        SystemExit: after `--help`, `--version`, and (with code 2) after a mistake.
    """
    main, commands = build_parser()
    args, unknown = main.parse_known_args(argv)
    if args.version:
        from rlhf_pipeline import __version__

        print(f"rlhf-pipeline {__version__}")
        main.exit(0)
    if args.command is None:
        if unknown:
            main.error(f"{unknown[0]} is not an option here. A command comes first, for example: rlhf-pipeline list")
        main.print_help()
        main.exit(0)
    if unknown:
        _refuse(unknown[0], commands[args.command])
    return args


def _refuse(typed: str, command: argparse.ArgumentParser) -> NoReturn:
    if not typed.startswith("-"):
        command.error(f"'{typed}' is one word too many. Put quotes around a path with spaces.")
    name = typed.split("=", 1)[0]
    known = [option for action in command._actions for option in action.option_strings if option.startswith("--")]
    command.error(f"there is no option {name}.{did_you_mean(name, known)}")


def _add_overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        dest="overrides",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="change one field of the definition; may be given several times",
    )


def _add_process_options(command: argparse.ArgumentParser) -> None:
    """Add what `collect` and `learn` both take."""
    command.add_argument(
        "definition",
        nargs="?",
        metavar="NAME|FILE.py[:function]",
        help="a built-in pipeline or your own; may be left out where the run is there",
    )
    command.add_argument("--run", required=True, metavar="DIR", help="the run folder; made if it is not there")
    command.add_argument("--seed", type=_natural, metavar="N", help="of a new run (default: 0)")
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, mps (default: the run's, or cpu)")
    _add_overrides(command)
    command.add_argument(
        "--parent", type=_positive, metavar="PID", help="stop when this process, which started this one, is gone"
    )


def _field(text: str) -> tuple[str, str]:
    target, equals, name = text.partition("=")
    if not equals or not target or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not WHAT=NAME. For example: --field prompt=question")
    return target.strip(), name.strip()


def _setting(text: str) -> tuple[str, str]:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY.PATH=VALUE. For example: --set learn.lr=3e-4")
    return path.strip(), value


def _process_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text) or text in ("learner", "supervisor"):
        raise argparse.ArgumentTypeError(f"'{text}' cannot name a collector. For example: --name collector-7")
    return text


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 up")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return seconds


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 up")
    return number


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number
