"""`rlhf-pipeline import`: other tools' rollouts into a store."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.exchange import FileReport, ImportReport, import_files
from rlhf_pipeline.report.run_folder import is_run
from rlhf_pipeline.report.words import count, duration, number

_SAY_EVERY_S = 5.0


def execute(args: argparse.Namespace) -> int:
    """Import, and say what came of it and what to type next."""
    into = Path(args.into).expanduser()
    run = into.resolve().parent if into.resolve().name == "store" else into
    if is_run(run):
        raise DefinitionError(
            f"{run} is a run, whose store is its own. Name a new folder: --into {run.parent / 'imported'}"
        )
    if args.tokenizer is not None:
        print("importing transformers for the tokenizer ...", flush=True)
    started = time.perf_counter()
    report = import_files(
        args.files,
        into,
        format=args.format,
        tokenizer=args.tokenizer,
        fields=dict(args.fields),
        group_by=args.group_by,
        chat_template=not args.no_chat_template,
        eos=not args.no_eos,
        durability=args.durability,
        on_file=_say_file,
        on_commit=_Progress(started),
    )
    print("\n".join(_lines(report, time.perf_counter() - started, args.tokenizer)))
    return 0


def _say_file(file: FileReport) -> None:
    print(f"{file.path}: {file.format}; {file.about}", flush=True)


class _Progress:
    """One line now and then, for imports that take long."""

    def __init__(self, started: float) -> None:
        self._next = started + _SAY_EVERY_S

    def __call__(self, report: ImportReport) -> None:
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + _SAY_EVERY_S
            print(f"  {count(report.num_imported, 'trajectory')} so far", file=sys.stderr, flush=True)


def _lines(report: ImportReport, seconds: float, tokenizer: str | None) -> list[str]:
    store = shlex.quote(str(report.store))
    if not report.num_imported:
        return [
            f"nothing new: all {count(report.num_skipped, 'trajectory')} are in {report.store} already.",
            f"look at them: rlhf-pipeline inspect {store}",
        ]
    made = [
        f"{report.store}: {count(report.num_imported, 'trajectory')} in {count(report.num_groups, 'group')}, "
        f"{count(report.num_tokens, 'token')}, mean reward {number(report.mean_reward, 3)}, {duration(seconds)}"
    ]
    if report.num_skipped:
        made.append(f"  {count(report.num_skipped, 'trajectory')} in the store already, not imported again")
    left_out = max((file.num_left_out for file in report.files), default=0)
    if left_out:
        made.append(f"  {left_out:,} left out: failed, not trained, or without sampled tokens")
    if report.num_encoded:
        made.append(f"  {count(report.num_encoded, 'trajectory')} encoded from text; `meta` says with which tokenizer")
    if report.num_without_log_probs:
        made.append(
            f"  {count(report.num_without_log_probs, 'trajectory')} without behaviour log-probs; "
            "`replay` computes them when it learns from the store"
        )
    if report.num_without_reward:
        made.append(f"  {count(report.num_without_reward, 'trajectory')} without a reward")
    made.append(f"look at them:    rlhf-pipeline inspect {store}")
    made.append(f"the newest one:  rlhf-pipeline show {store}")
    model = f" --set policy.path={shlex.quote(tokenizer)}" if tokenizer else " --set policy.path=MODEL"
    made.append(f"learn from them: rlhf-pipeline replay {store}{model}")
    return made
