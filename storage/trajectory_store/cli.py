"""`trajectory-store`: look at a store, check it, copy it, merge it, export it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from trajectory_store import __version__

if TYPE_CHECKING:
    from trajectory_store.store import TrajectoryStore

EPILOG = """\
examples:
  trajectory-store stats runs/a/store
  trajectory-store show runs/a/store --where 'task_reward>=0.5' --num 2
  trajectory-store verify runs/a/store --json
  trajectory-store copy runs/a/store --to best --where 'task_reward>=0.5'
  trajectory-store export runs/a/store --to rows.parquet
  trajectory-store export runs/a/store --to rows.csv --columns prompt,completion,task_reward --force"""
_CELL_CHARACTERS = 300
"""Characters of a value that `show` prints."""
_MOST_IDS = 8
"""Ids of damaged trajectories that are printed."""
_FIRST = ("prompt", "completion", "task_reward", "reward", "group_id")
"""Columns that `show` prints first."""
_FORMATS = (".parquet", ".jsonl", ".csv")
"""Suffixes of the files that `export` writes."""
_SHELL = (
    ("skip_damaged=True or --skip-damaged", "--skip-damaged"),
    (
        "Get the ids of readable trajectories from ids(), and run verify() to list all damage.",
        "`trajectory-store verify STORE` lists all damage.",
    ),
    (", or create one with TrajectoryStore.create(path, schema)", ""),
    ("Pass the folder that TrajectoryStore.create created.", "Specify the folder of a store."),
    ("Open it with TrajectoryStore.open(path, mode='a'), or choose", "Choose"),
    (": TrajectoryStore.open(path, mode='a').accept_losses()", ""),
)
"""Advice in error messages for callers from Python, and the advice that replaces it in a shell."""


class CommandReport(NamedTuple):
    """The findings or effects of a command."""

    facts: dict[str, Any]
    """The output with `--json`."""
    lines: list[str]
    """The output without `--json`."""
    next_words: list[str]
    """The command to type next."""
    code: int = 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command; each subcommand sets `work`."""
    command_parser = argparse.ArgumentParser(
        prog="trajectory-store",
        description="Check, print, copy and export trajectory stores. A store is a folder, or a URL such as "
        "s3://bucket/store.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_parser.add_argument("--version", action="version", version=f"trajectory-store {__version__}")
    commands = command_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, work: Callable[[argparse.Namespace], CommandReport], about: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        subparser.add_argument("store", help="the store's folder, or its URL")
        subparser.add_argument("--json", action="store_true", help="print one JSON document")
        subparser.set_defaults(work=work)
        return subparser

    verify = add("verify", _verify, "recompute every checksum and report damage")
    verify.add_argument(
        "--accept-loss",
        action="store_true",
        help="accept the loss of the damaged rows, and record the loss in the store",
    )
    stats = add("stats", _stats, "count rows and bytes, and summarise each column")
    show = add("show", _show, "print the newest trajectories, newest last")
    show.add_argument("--num", type=int, default=3, help="number of trajectories to print (default: %(default)s)")
    show.add_argument("--all", action="store_true", help="also print internal and empty columns")
    copy = add("copy", _copy, "copy all or part of a store into a new store")
    copy.add_argument("--to", required=True, help="the new store: a folder that does not exist, or a URL")
    copy.add_argument(
        "--backend",
        choices=("memmap", "zarr"),
        help="backend of the new store (default: memmap in a folder, zarr at a URL)",
    )
    add("compact", _compact, "merge finished segments into fewer segments; ids, order and values do not change")
    export = add("export", _export, "write a Parquet, JSON Lines or CSV file")
    export.add_argument(
        "--to", required=True, help="the .parquet, .jsonl or .csv file; missing values are null, or empty cells in CSV"
    )
    export.add_argument("--force", action="store_true", help="replace the file if it exists")
    for subparser in (stats, show, copy, export):
        subparser.add_argument(
            "--where", metavar="CONDITION", help="use only trajectories that meet CONDITION, such as 'task_reward>=0.5'"
        )
    for subparser in (copy, export):
        subparser.add_argument("--skip-damaged", action="store_true", help="skip and count damaged trajectories")
    for subparser in (show, export):
        subparser.add_argument("--columns", metavar="A,B", help="include only these columns")
    return command_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 1 for damage, 2 for an invalid command line."""
    command_parser = parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow
        import argcomplete

        argcomplete.autocomplete(command_parser)
    typed = command_parser.parse_args(arguments)
    from trajectory_store.errors import StoreError

    try:
        outcome: CommandReport = typed.work(typed)
        if typed.json:
            _echo(json.dumps(outcome.facts, ensure_ascii=False, allow_nan=False))
        else:
            for line in outcome.lines:
                _echo(line)
            _echo(f"next:  trajectory-store {shlex.join(outcome.next_words)}")
    except BrokenPipeError:
        return 0
    except (StoreError, OSError) as error:
        sys.stderr.write(f"trajectory-store: {_plain(_for_a_shell(str(error)))}\n")
        return 2
    return outcome.code


def _echo(text: str) -> None:
    sys.stdout.write(f"{_plain(text)}\n")


def _plain(text: str) -> str:
    """Return a text that cannot drive a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _for_a_shell(text: str) -> str:
    for advice, replacement in _SHELL:
        text = text.replace(advice, replacement)
    return text


def _open(typed: argparse.Namespace, mode: Any = "r") -> TrajectoryStore:
    from trajectory_store.store import TrajectoryStore

    return TrajectoryStore.open(typed.store if "://" in typed.store else Path(typed.store).expanduser(), mode)


def _columns(typed: argparse.Namespace) -> list[str] | None:
    return typed.columns.split(",") if typed.columns else None


class _Selection(NamedTuple):
    """The trajectories that a command reads, and the damaged ones that it excludes."""

    ids: Any
    damaged: list[int]

    @property
    def note(self) -> str:
        few = ", ".join(map(str, self.damaged[:_MOST_IDS])) + ", ..." * (len(self.damaged) > _MOST_IDS)
        return f"; {len(self.damaged):,} damaged trajectories were skipped: {few}" if self.damaged else ""


def _select(store: TrajectoryStore, typed: argparse.Namespace) -> _Selection:
    ids = store.intact(skip_damaged=typed.skip_damaged if "skip_damaged" in typed else True)
    return _Selection(ids if typed.where is None else store.where(typed.where, ids), store.damaged().tolist())


def _verify(typed: argparse.Namespace) -> CommandReport:
    lines: list[str] = []
    with _open(typed, "a" if typed.accept_loss else "r") as store:
        if typed.accept_loss:
            lines.append(f"{store.accept_losses()} losses accepted and recorded in the store")
        report = store.verify()
    lines.append(_for_a_shell(str(report)))
    next_words = ["stats", typed.store]
    if not report.ok:
        lines.append("restore the files from a copy, or accept the loss of these rows:")
        next_words = ["verify", typed.store, "--accept-loss"]
    facts = {
        "store": typed.store,
        "ok": report.ok,
        "trajectories": report.trajectories,
        "problems": report.problems,
        "damaged_ids": [int(row_id) for row_id in report.damaged_ids],
        "losses": list(report.losses),
    }
    return CommandReport(facts, lines, next_words, 0 if report.ok else 1)


def _stats(typed: argparse.Namespace) -> CommandReport:
    from trajectory_store.text_rows import plain

    with _open(typed) as store:
        selection = _select(store, typed)
        ids, total, columns = selection.ids, len(store), list(_figures(store, selection.ids))
    part = "" if typed.where is None else f" of {total:,}"
    rows = [["column", "type", "given", "min", "mean", "max"]]
    for column in columns:
        figures: list[float | None] = [column[name] for name in ("min", "mean", "max")]
        unit = {"bytes": " bytes", "elements": " long"}.get(column["unit"], "")
        words = ("" if figure is None else f"{figure:.6g}{unit}" for figure in figures)
        rows.append([column["column"], column["type"], f"{column['given']:,}", *words])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f"{typed.store}: {len(ids):,} trajectories{part}, {len(columns)} columns{selection.note}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    listed = [{name: plain(fact) for name, fact in column.items()} for column in columns]
    facts = {"store": typed.store, "trajectories": len(ids), "damaged_ids": selection.damaged, "columns": listed}
    return CommandReport(facts, lines, ["show", typed.store])


def _figures(store: TrajectoryStore, ids: Any) -> Iterator[dict[str, Any]]:
    """Yield the figures of each column over the rows that have a value in it: of ragged ones and texts the lengths."""
    import numpy as np

    for column in store.schema:
        rows = ids[store.has_value(column.name, ids)]
        kind = f"{column.dtype}[]" if column.ragged else column.dtype
        kind += f" x{list(column.shape)}" if column.shape else ""
        lengths = column.axis is not None
        values = store.lengths(column.name, rows) if lengths else store.read_scalars(column.name, rows)
        low, mean, high = (
            (float(values.min()), float(values.mean(dtype=np.float64)), float(values.max()))
            if len(values)
            else (None, None, None)
        )
        unit = "" if not lengths else "bytes" if column.is_text else "elements"
        yield {
            **{"column": column.name, "type": kind, "given": len(rows), "unit": unit},
            **{"min": low, "mean": mean, "max": high},
        }


def _show(typed: argparse.Namespace) -> CommandReport:
    from trajectory_store.text_rows import plain_rows

    lines: list[str] = []
    with _open(typed) as store:
        selection = _select(store, typed)
        printed_ids = selection.ids[max(0, len(selection.ids) - typed.num) :]
        names, hidden = _columns(typed), 0
        if names is None:
            names = [column.name for column in store.schema]
            names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
            if not typed.all:
                names = [name for name in names if _is_of_interest(store, name, printed_ids)]
                hidden = len(store.schema) - len(names)
        rows = store.read(printed_ids, names)
        for i, row_id in enumerate(printed_ids.tolist()):
            lines.append(f"id {row_id}")
            lines += [f"  {name}: {_short(rows[name][i])}" for name in names]
        plainly = list(plain_rows(store, printed_ids, names)) if typed.json else []
    hidden_note = f"; {hidden} internal or empty columns are hidden: --all prints them" if hidden else ""
    lines.append(f"{len(printed_ids):,} of {len(selection.ids):,} trajectories{selection.note}{hidden_note}")
    facts = {"store": typed.store, "matching": len(selection.ids), "rows": plainly, "damaged_ids": selection.damaged}
    return CommandReport(facts, lines, ["stats", typed.store])


def _is_of_interest(store: TrajectoryStore, name: str, ids: Any) -> bool:
    """Return whether `show` prints a column: one for the machinery, or without a value in these rows, only on request.

    Those that come first are always printed: a reward that is missing is of interest.
    """
    from trajectory_store.recorder.standard import MACHINERY

    return name in _FIRST or (name not in MACHINERY and bool(store.has_value(name, ids).any()))


def _short(value: Any) -> str:
    import numpy as np

    if isinstance(value, np.ndarray):
        return np.array2string(cast("Any", value), threshold=16, edgeitems=6, max_line_width=10_000).replace("\n", "")
    text = repr(value) if isinstance(value, (str, bytes)) else str(value)
    return text if len(text) <= _CELL_CHARACTERS else f"{text[:_CELL_CHARACTERS]}... ({len(text):,} characters)"


def _copy(typed: argparse.Namespace) -> CommandReport:
    from trajectory_store.copying import copy_store

    target = typed.to if "://" in typed.to else Path(typed.to).expanduser()
    with _open(typed) as store:
        selection = _select(store, typed)
        copied = copy_store(store, target, selection.ids, backend=typed.backend)
    facts = {"to": typed.to, "trajectories": copied, "damaged_ids": selection.damaged}
    return CommandReport(
        facts, [f"{typed.to}: {copied:,} trajectories, with new ids{selection.note}"], ["verify", typed.to]
    )


def _compact(typed: argparse.Namespace) -> CommandReport:
    with _open(typed, "a") as store:
        report = store.compact()
    before, after = report.bytes_before / 1e6, report.bytes_after / 1e6
    text = (
        f"{typed.store}: nothing was done: {report.skipped}"
        if report.skipped
        else f"{typed.store}: {report.segments_before:,} segments are now {report.segments_after:,}, {before:.1f} MB "
        f"are now {after:.1f} MB; ids, order and values are unchanged"
    )
    facts = {
        **{"store": typed.store, "skipped": report.skipped},
        **{"segments_before": report.segments_before, "segments_after": report.segments_after},
        **{"bytes_before": report.bytes_before, "bytes_after": report.bytes_after},
    }
    return CommandReport(facts, [text], ["verify", typed.store], 1 if report.skipped else 0)


def _export(typed: argparse.Namespace) -> CommandReport:
    from trajectory_store.errors import BatchError, StoreExistsError
    from trajectory_store.text_rows import write_text_rows

    target = Path(typed.to).expanduser()
    if target.suffix not in _FORMATS or target.is_dir():
        raise BatchError(
            f"--to {typed.to} is not valid; it must be the path of a file that ends with {', '.join(_FORMATS[:-1])} or "
            f"{_FORMATS[-1]}."
        )
    if target.exists() and not typed.force:
        raise StoreExistsError(f"{typed.to} already exists. Choose another file, or replace it with --force.")
    with _open(typed) as store:
        selection, columns = _select(store, typed), _columns(typed)
        if target.suffix == ".parquet":
            count = store.to_parquet(target, columns, selection.ids)
        else:
            count = write_text_rows(store, target, selection.ids, columns)
    size = target.stat().st_size
    facts = {"to": typed.to, "trajectories": count, "bytes": size, "damaged_ids": selection.damaged}
    text = f"{typed.to}: {count:,} trajectories, {size / 1e6:.1f} MB{selection.note}"
    return CommandReport(facts, [text], ["stats", typed.store])


if __name__ == "__main__":
    sys.exit(main())
