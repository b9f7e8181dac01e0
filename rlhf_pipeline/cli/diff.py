"""`rlhf-pipeline diff`: how two runs, or two stores, differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.cli.output import Ticker, echo, echo_json
from rlhf_pipeline.errors import DefinitionError, count, did_you_mean, typed
from rlhf_pipeline.report.formatting import one_line
from rlhf_pipeline.run import filenames

if TYPE_CHECKING:
    from rlhf_pipeline.report.diff_steps import StepsDifference
    from rlhf_pipeline.report.query import Answer
    from rlhf_pipeline.report.stored import Stored
    from rlhf_pipeline.run.folder import RunFolder

_VALUE_WIDTH = 40
_FIELDS = 30

HELP = "show the differences between two runs or two stores"
DETAILS = """\
Matches trajectories by trajectory_id if all of them have one, otherwise by order of arrival, and compares them.
For two runs, also compares config.json, and finds the first optimizer step at which the batch, loss, reward or
gradient norm differs. NaN equals NaN. The column created_at, the time at which a row was written, is not compared.

examples:
  rlhf-pipeline diff runs/copy_digits runs/again
  rlhf-pipeline diff runs/copy_digits runs/again --ignore advantage
  rlhf-pipeline diff runs/copy_digits/store copy --json | jq .trajectories.columns

The exit code is 0 if the trajectories and the optimizer steps are the same, 1 if they differ, and 2 if they cannot
be compared. Two kinds of differences are listed but do not affect the exit code: settings that do not affect results,
and columns that exist on only one side."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("left", metavar="LEFT", help="a run or a store")
    command.add_argument("right", metavar="RIGHT", help="the run or store to compare with LEFT")
    command.add_argument(
        "--ignore", action="append", default=[], metavar="COLUMN", help="do not compare this column; may be repeated"
    )
    command.add_argument("--json", action="store_true", help="print the output as JSON")


def execute(args: argparse.Namespace) -> int:
    """Print the differences; return 0 if the trajectories and the optimizer steps are the same, otherwise 1."""
    from rlhf_pipeline.report.diff import compare_rows
    from rlhf_pipeline.report.diff_steps import compare_configs, compare_steps
    from rlhf_pipeline.report.stored import Stored
    from rlhf_pipeline.run.lookup import open_run_or_store

    with ExitStack() as open_stores:
        runs: list[RunFolder | None] = []
        sides: list[Stored] = []
        for path in (args.left, args.right):
            run, store = open_run_or_store(path)
            runs.append(run)
            sides.append(open_stores.enter_context(Stored(store)))
        left, right = sides
        column_names = {*left.columns, *right.columns}
        for name in args.ignore:
            if name not in column_names:
                hint = did_you_mean(name, column_names)
                raise DefinitionError(f"--ignore {name}: neither store has a column with this name.{hint}")
        config = steps = None
        if runs[0] is not None and runs[1] is not None:
            config, steps = compare_configs(runs[0], runs[1]), compare_steps(runs[0], runs[1])
        rows = compare_rows(left, right, ignore=args.ignore, on_rows=Ticker("compared"))
        # Settings that made no difference, and columns that only one side has, count as remarks.
        same = (steps is None or steps.same) and rows["same"]
        sizes = [len(side.store) for side in sides]
    if args.json:
        comparison = {"config": config, "steps": None if steps is None else asdict(steps), "trajectories": rows}
        echo_json({"same": same, "left": args.left, "right": args.right, **comparison})
    else:
        echo("\n".join(_lines(args, sizes, config, steps, rows, same=same)))
    return 0 if same else 1


def _lines(
    args: argparse.Namespace,
    sizes: list[int],
    config: list[Answer] | None,
    steps: StepsDifference | None,
    rows: Answer,
    *,
    same: bool,
) -> Iterator[str]:
    yield f"left   {args.left}: {count(sizes[0], 'trajectory')}"
    yield f"right  {args.right}: {count(sizes[1], 'trajectory')}"
    if config:
        yield filenames.CONFIG
        width = max(len(field["name"]) for field in config[:_FIELDS])
        for field in config[:_FIELDS]:
            yield f"  {field['name']:<{width}}  {_value_text(field['left'])} | {_value_text(field['right'])}"
        if len(config) > _FIELDS:
            yield f"  and {len(config) - _FIELDS} more; --json lists all"
    if steps is not None and not steps.same:
        yield "optimizer steps"
        yield from _step_lines(steps)
    apart = rows["columns_left"] or rows["columns_right"]
    if not rows["same"] or apart:
        yield (
            f"trajectories, paired by {rows['key']}" if rows["key"] else "trajectories, paired in the order of arrival"
        )
        yield from _row_lines(rows)
    aside = f" ({', '.join(rows['not_compared'])} not compared)" if rows["not_compared"] else ""
    if same:
        learned = "the same trajectories and the same optimizer steps" if steps is not None else "the same trajectories"
        remark = f"{learned}; the settings listed above had no effect"
        yield f"{remark if config or apart else 'no difference'}{aside}"
        return
    yield f"they differ{aside}"
    for column in rows["columns"][:1]:
        for path, row in zip((args.left, args.right), column["first"][0], strict=True):
            yield f"look:  rlhf-pipeline show {typed(path)} --id {row}"


def _step_lines(steps: StepsDifference) -> Iterator[str]:
    for side, span in (("left", steps.only_left), ("right", steps.only_right)):
        if span is not None:
            first, last, num = span
            where = f"{first} to {last}" if last > first else str(first)
            yield f"  only on the {side}: {count(num, 'step')}, {where}"
    for item in steps.differences:
        values = f"{_value_text(item.left)} | {_value_text(item.right)}"
        if item.what == "batch":
            sizes = f"; {values} trajectories" if item.left != item.right else ""
            values = f"different trajectories{sizes}"
        yield f"  {item.what:<13}  first at step {item.first_step}: {values} (in {item.num_steps} of {item.num_both})"


def _row_lines(rows: Answer) -> Iterator[str]:
    for side in ("left", "right"):
        if num := rows[f"num_only_{side}"]:
            yield f"  only on the {side}: {num:,}, {_ids(rows[f'first_only_{side}'], num)}"
    for side in ("left", "right"):
        if names := rows[f"columns_{side}"]:
            yield f"  columns only on the {side}: {', '.join(names)}"
    if rows["redefined"]:
        yield f"  columns with different types: {', '.join(rows['redefined'])}"
    width = max([len(column["name"]) for column in rows["columns"]], default=0)
    for column in rows["columns"]:
        yield (
            f"  {column['name']:<{width}}  {column['num']:,} of {rows['num_both']:,} differ"
            + ("" if column["largest"] is None else f", by at most {column['largest']:.2g}")
            + f"; {_ids([a if a == b else f'{a} | {b}' for a, b in column['first']], column['num'])}"
        )
        left, right = (one_line(text, _VALUE_WIDTH) for text in column["example"])
        yield f"  {'':<{width}}  the first: {left} | {right}"


def _ids(first: Any, num: int) -> str:
    return f"{'id' if num == 1 else 'ids'} {', '.join(map(str, first))}{', ...' if num > len(first) else ''}"


def _value_text(value: Any) -> str:
    return "-" if value is None else one_line(value if isinstance(value, str) else json.dumps(value), _VALUE_WIDTH)
