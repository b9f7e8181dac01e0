"""`rlhf-pipeline import`: other tools' rollouts into a store."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.cli.output import Ticker, echo, warn
from rlhf_pipeline.cli.parser import above_zero, add_fields, natural
from rlhf_pipeline.errors import DefinitionError, count, typed
from rlhf_pipeline.report.formatting import duration, number

if TYPE_CHECKING:
    from rlhf_pipeline.exchange import FileReport, ImportReport

HELP = "import other tools' rollouts into a store"
DETAILS = """\
Reads the dumps of other trainers: trl (completions/*.parquet), verl (rollout_data_dir), slime
(--save-debug-rollout-data), open-instruct (--save_traces), prime-rl (traces.jsonl, token exports), verifiers, skyrl,
nemo-rl, openrlhf, tinker (capture/sample.jsonl and its rollout summaries) and gsm8k-solutions. Also reads agent
trajectories (ATIF, rllm and art), Inspect logs, wandb tables, files written by `export`, and any rows with a
prompt, a completion and a reward. The tool that wrote a dump is recognised by the fields that its current version
writes into every row.

Token ids and log-probs in a file are kept. Text is encoded once, with --tokenizer. If a file lacks a value, the value
is recorded as unknown, is reported as missing, or must be specified. Rows are identified by their content. Repeating
the command therefore continues an interrupted import, and files that were moved, renamed, compressed or copied are not
imported twice. A newer version of a row or file supersedes the older version. Broken lines are reported. With --follow,
the import continues while a trainer is writing files.

examples:
  rlhf-pipeline import example_model_solutions.jsonl --into runs/gsm8k-store --tokenizer model
  rlhf-pipeline import outputs/completions --into runs/trl-store --tokenizer model --field reward=accuracy
  rlhf-pipeline import --follow outputs --into runs/beside
  rlhf-pipeline import answers.parquet --into runs/mine --tokenizer model --field prompt=question"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument(
        "files", nargs="+", metavar="FILE", help="files, folders, glob patterns, .zip archives or saved datasets"
    )
    command.add_argument("--into", required=True, metavar="STORE", help="the store's folder; created if missing")
    command.add_argument(
        "--format",
        default="auto",
        metavar="NAME",
        help="auto, rows, jsonl, trl, verl, slime, skyrl, nemo-rl, openrlhf, open-instruct, prime-rl, "
        "verifiers, tinker, rllm, art, wandb, gsm8k-solutions, atif, inspect, store (default: auto)",
    )
    command.add_argument("--tokenizer", metavar="FOLDER", help="the tokenizer for text without token ids")
    add_fields(command)
    command.add_argument(
        "--group",
        metavar="FIELD|N|none",
        help=(
            "the field that identifies the group, or the number of consecutive rows per group; `none` confirms "
            "that consecutive rows with the same prompt form a group"
        ),
    )
    command.add_argument(
        "--group-by",
        choices=("prompt",),
        help="prompt: all rows with the same prompt form one group, regardless of their position in a file",
    )
    command.add_argument(
        "--one-turn",
        action="store_true",
        help="treat each text completion as one turn, without text from an environment",
    )
    command.add_argument(
        "--skip-bad",
        type=natural,
        default=0,
        metavar="N",
        help="skip and report up to N unreadable rows",
    )
    command.add_argument(
        "--follow",
        action="store_true",
        help="keep importing the files that a trainer writes to a folder, until Ctrl-C",
    )
    command.add_argument(
        "--until-quiet",
        type=above_zero,
        metavar="SECONDS",
        help="with --follow: stop when no file has changed for this many seconds",
    )
    command.add_argument(
        "--source",
        default="",
        metavar="NAME",
        help="name of the training run that wrote the files; with different names, identical rows from two runs are "
        "both stored",
    )
    command.add_argument("--no-chat-template", action="store_true", help="encode prompts as plain text")
    command.add_argument(
        "--durability", choices=("process", "power", "group"), help="durability of a new store (default: process)"
    )


def execute(args: argparse.Namespace) -> int:
    """Import the files and report the result and the next commands."""
    from rlhf_pipeline.exchange import import_files
    from rlhf_pipeline.run import filenames
    from rlhf_pipeline.run.lookup import is_run

    into = Path(args.into).expanduser()
    run = into.resolve().parent if into.resolve().name == filenames.STORE else into
    if is_run(run):
        raise DefinitionError(
            f"{run} is a run; an import cannot write to its store. Choose a new folder: --into "
            f"{run.parent / 'imported'}"
        )
    if args.tokenizer is not None:
        echo("importing transformers for the tokenizer ...")
    started, ticker = time.perf_counter(), Ticker()
    options: dict[str, Any] = {
        "format": args.format,
        "tokenizer": args.tokenizer,
        "fields": dict(args.fields),
        "group": args.group,
        "by_prompt": args.group_by == "prompt",
        "source": args.source,
        "chat_template": not args.no_chat_template,
        "one_turn": args.one_turn,
        "skip_bad": args.skip_bad,
        "durability": args.durability,
        "on_file": _file_line,
    }
    if args.follow:
        return _follow(args, into, options)
    report = import_files(args.files, into, **options, on_commit=lambda report: ticker(report.num_imported))
    echo("\n".join(_lines(report, time.perf_counter() - started, args.tokenizer)))
    return 0


def _follow(args: argparse.Namespace, into: Path, options: dict[str, Any]) -> int:
    """Import what is written into a folder until a signal, or until nothing was for a while."""
    from rlhf_pipeline.exchange import follow_folder
    from rlhf_pipeline.run.signals import stop_on_signals

    if len(args.files) != 1 or not Path(args.files[0]).expanduser().is_dir():
        raise DefinitionError(
            "--follow needs exactly one existing folder: rlhf-pipeline import --follow FOLDER --into STORE"
        )
    echo(f"following {args.files[0]}; Ctrl-C stops")
    with stop_on_signals() as stop:
        total = follow_folder(
            args.files[0],
            into,
            stop=lambda: bool(stop),
            until_quiet_s=args.until_quiet,
            on_round=lambda report: echo(
                f"{report.store}: {count(report.num_imported, 'trajectory')} more, mean reward "
                f"{number(report.mean_reward, 3)}"
            ),
            on_vanished=lambda file: warn(
                f"{file} was removed without a compressed replacement: rows that were written to it after it was "
                "last read are not in the store"
            ),
            on_unreadable=lambda reason: warn(f"a file could not be read, so its rows are not in the store: {reason}"),
            **options,
        )
    echo(f"{into}: {count(total, 'trajectory')} imported")
    echo(f"look at them: rlhf-pipeline inspect {typed(into)}")
    return 0


def _file_line(file: FileReport) -> None:
    echo(f"{file.path}: {file.format}; {file.about}")
    if file.lacks:
        echo(f"  not in the file: {'; '.join(file.lacks)}")


def _lines(report: ImportReport, seconds: float, tokenizer: str | None) -> list[str]:
    store = typed(report.store)
    left_out = sum(file.num_left_out for file in report.files)
    reasons = "not from the policy, without sampled tokens, or already in the previous table"
    passed_over = [f"  {left_out:,} skipped: {reasons}"] if left_out else []
    if report.other_files:
        paths = ", ".join(str(path) for path in report.other_files[:3])
        passed_over.append(f"  {count(len(report.other_files), 'file')} without rollouts: {paths}")
    if report.unreadable:
        reason = next(iter(report.unreadable.values()))
        passed_over.append(f"  {count(len(report.unreadable), 'file')} could not be read: {reason}")
    passed_over += [f"  skipped: {bad}" for file in report.files for bad in file.bad]
    if not report.num_imported:
        return [
            f"nothing new: {count(report.num_skipped, 'trajectory')} already in {report.store}.",
            *passed_over,
            f"look at them: rlhf-pipeline inspect {store}",
        ]
    lines = [
        f"{report.store}: {count(report.num_imported, 'trajectory')} in {count(report.num_groups, 'group')}, "
        f"{count(report.num_tokens, 'token')}, mean reward {number(report.mean_reward, 3)}, {duration(seconds)}"
    ]
    superseded = sum(file.num_superseded for file in report.files)
    if superseded:
        lines.append(f"  {count(superseded, 'older row')} superseded by newer versions; never used for training")
    if report.num_skipped:
        lines.append(f"  {count(report.num_skipped, 'trajectory')} already in the store, not imported again")
    lines += passed_over
    if report.num_encoded:
        lines.append(f"  {count(report.num_encoded, 'trajectory')} encoded from text; `meta` records the tokenizer")
    if report.num_without_log_probs:
        lines.append(
            f"  {count(report.num_without_log_probs, 'trajectory')} without behaviour log-probs; "
            "`replay` computes them when it learns from the store"
        )
    for num, what in (
        (report.num_without_reward, "without a reward"),
        (report.num_evaluations, "from evaluations, which are marked and not used for training"),
        (report.num_failed, "marked as failed in the file: their rewards are not trusted"),
        (report.num_masked, "excluded from the loss, because the file does not record which tokens were sampled"),
        (report.num_at_unknown_temperature, "with an unknown temperature, which `replay` requires"),
        (report.num_unended, "with an unknown finish reason"),
    ):
        if num:
            lines.append(f"  {count(num, 'trajectory')} {what}")
    if (
        not report.num_groups_with_spread
        and report.num_imported > report.num_without_reward + report.num_evaluations + 1
    ):
        lines.append(
            "  NOTICE: the rewards are equal within every group, so GRPO learns nothing from them. Check that --field "
            "reward and --group select the right fields."
        )
    lines.append(f"look at them:    rlhf-pipeline inspect {store}")
    lines.append(f"the newest one:  rlhf-pipeline show {store}")
    model = f" --set policy.path={typed(tokenizer)}" if tokenizer else " --set policy.path=MODEL"
    if report.num_at_unknown_temperature:
        model += " --set collect.temperature=T"
    lines.append(f"learn from them: rlhf-pipeline replay {store}{model}")
    return lines
