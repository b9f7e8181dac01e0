"""What can be typed."""

from __future__ import annotations

import pytest

from rlhf_pipeline import __version__
from rlhf_pipeline.cli.parser import build_parser, parse

from .conftest import Cli


def test_no_command_shows_what_there_is(cli: Cli):
    """Alone, the command prints its help and the line to start with."""
    shown = cli()
    assert shown.code == 0
    assert "rlhf-pipeline run copy_digits" in shown.out
    for command in (
        "run",
        "list",
        "inspect",
        "show",
        "tail",
        "diff",
        "verify",
        "compact",
        "copy",
        "new-model",
        "doctor",
    ):
        assert f"\n    {command} " in shown.out


def test_every_command_has_help(cli: Cli):
    """Each command explains itself, and each option and positional of it has a text."""
    _, commands = build_parser()
    for name, command in commands.items():
        shown = cli(name, "--help")
        assert shown.code == 0
        assert shown.out.startswith(f"usage: rlhf-pipeline {name}")
        options = [action for action in command._actions if action.option_strings]
        assert all(action.help for action in options)


def test_version(cli: Cli):
    """The version is the package's."""
    assert cli("--version").out == f"rlhf-pipeline {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspekt", "x"], "there is no command 'inspekt'. Did you mean 'inspect'?"),
        (["run", "x", "--sed", "4"], "there is no option --sed. Did you mean '--seed'?"),
        (["run", "x", "y"], "unexpected argument 'y'"),
        (["run", "x", "--set", "learn.lr"], "'learn.lr' does not have the form KEY.PATH=VALUE"),
        (["run", "x", "--steps", "0"], "expected a whole number of at least 1, got '0'"),
        (["run", "x", "--seed", "-1"], "expected a whole number of at least 0, got '-1'"),
        (["show", "x", "--id", "1", "--last", "2"], "not allowed with argument"),
        (["inspect"], "RUN|STORE"),
        (["--sed"], "--sed is not a valid option before a command"),
    ],
)
def test_slips(cli: Cli, argv: list[str], message: str):
    """A slip ends with exit code 2, what was wrong, and where the help is."""
    shown = cli(*argv)
    assert shown.code == 2
    assert message in shown.err
    assert "--help` shows all options" in shown.err
    assert "Traceback" not in shown.err


def test_settings():
    """`--set` may be repeated, and a value may hold an equals sign."""
    args = parse(["run", "x", "--set", "policy.alphabet=0=", "--set", "learn.lr=1"])
    assert args.overrides == [("policy.alphabet", "0="), ("learn.lr", "1")]


@pytest.mark.parametrize("name", ["a/b", "../x", "", "learner", "supervisor"])
def test_a_collector_has_a_name_that_a_file_can_have(cli: Cli, name: str):
    """A name is part of a file's name beside those of the learner and the supervisor; what cannot be one is refused."""
    shown = cli("collect", "long_running", "--run", "runs/x", "--name", name)
    assert shown.code == 2
    assert f"'{name}' is not a valid collector name. For example: --name collector-7" in shown.err
