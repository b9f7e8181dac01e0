"""`trajectory-store`: look at a store, check it, copy it, merge it, export it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from trajectory_store.store import TrajectoryStore

EPILOG = """\
examples:
  trajectory-store stats runs/a/store
  trajectory-store show runs/a/store --where 'task_reward>=0.5' --num 2
  trajectory-store verify runs/a/store
  trajectory-store copy runs/a/store --to best --where 'task_reward>=0.5'
  trajectory-store export runs/a/store --to rows.parquet"""
_SHOWN = 300
"""Characters of a value that `show` prints."""
_NAMED = 8
"""Ids of damaged trajectories that are printed."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command; each subcommand sets `work`."""
    command_parser = argparse.ArgumentParser(
        prog="trajectory-store",
        description="Stores of trajectories: folders, or URLs such as s3://bucket/store.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = command_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, work: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        subparser.add_argument("store", help="the store's folder, or its URL")
        subparser.set_defaults(work=work)
        return subparser

    verify = add("verify", _verify, "recompute every checksum, and report damage in words")
    verify.add_argument(
        "--accept-loss", action="store_true", help="record the damage that is there as the loss of those rows"
    )
    stats = add("stats", _stats, "count rows and bytes, and sum up each column")
    show = add("show", _show, "print trajectories, the newest last")
    show.add_argument("--num", type=int, default=3, help="how many of the newest (default: %(default)s)")
    copy = add("copy", _copy, "copy a store, or a part of it, into a new one")
    copy.add_argument("--to", required=True, help="the new store: a folder that does not exist, or a URL")
    copy.add_argument("--backend", choices=("memmap", "zarr"), help="of the new store; default: as its place takes")
    add("compact", _compact, "merge finished segments into few; ids, order and values stay")
    export = add("export", _export, "write a Parquet file")
    export.add_argument("--to", required=True, help="the file; values that were not given are null")
    for subparser in (stats, show, copy, export):
        subparser.add_argument("--where", metavar="CONDITION", help="only these, such as 'task_reward>=0.5'")
    for subparser in (copy, export):
        subparser.add_argument(
            "--skip-damaged", action="store_true", help="leave damaged trajectories out, and count them"
        )
    for subparser in (show, export):
        subparser.add_argument("--columns", metavar="A,B", help="only these columns")
    return command_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 1 for damage, 2 for what was typed."""
    typed = parser().parse_args(arguments)
    from trajectory_store.errors import StoreError

    try:
        return typed.work(typed)
    except BrokenPipeError:
        return 0
    except (StoreError, OSError) as error:
        sys.stderr.write(f"trajectory-store: {_plain(str(error))}\n")
        return 2


def _say(text: str) -> None:
    sys.stdout.write(f"{_plain(text)}\n")


def _plain(text: str) -> str:
    """Return a text that cannot drive a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _next(command: str, store: object, more: str = "") -> None:
    _say(f"next:  trajectory-store {command} {shlex.quote(str(store))}{more}")


def _open(typed: argparse.Namespace, mode: Any = "r") -> TrajectoryStore:
    from trajectory_store.store import TrajectoryStore

    return TrajectoryStore.open(typed.store if "://" in typed.store else Path(typed.store).expanduser(), mode)


def _ids(store: TrajectoryStore, typed: argparse.Namespace) -> tuple[Any, str]:
    """Return the ids that are meant, and what to say of damaged ones, which are left out or an error."""
    damaged = store.damaged()
    skip = typed.skip_damaged if "skip_damaged" in typed else True
    ids = store.intact(skip_damaged=skip)
    few = ", ".join(map(str, damaged[:_NAMED].tolist())) + ", ..." * (len(damaged) > _NAMED)
    left_out = f"; {len(damaged):,} damaged ones are left out: {few}" if len(damaged) else ""
    return (ids if typed.where is None else store.where(typed.where, ids)), left_out


def _verify(typed: argparse.Namespace) -> int:
    with _open(typed, "a" if typed.accept_loss else "r") as store:
        if typed.accept_loss:
            _say(f"{store.accept_losses()} losses accepted, and recorded in the store")
        report = store.verify()
    _say(str(report))
    if report.ok:
        _next("stats", typed.store)
    else:
        _say("put the files back from a copy, or accept the loss of these rows:")
        _next("verify", typed.store, " --accept-loss")
    return 0 if report.ok else 1


def _stats(typed: argparse.Namespace) -> int:
    with _open(typed) as store:
        ids, left_out = _ids(store, typed)
        part = "" if typed.where is None else f" of {len(store):,}"
        _say(f"{typed.store}: {len(ids):,} trajectories{part}, {len(store.schema)} columns{left_out}")
        rows = [("column", "type", "given", "min", "mean", "max"), *_figures(store, ids)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    _next("show", typed.store)
    return 0


def _figures(store: TrajectoryStore, ids: Any) -> Iterator[tuple[str, ...]]:
    """Yield a line for each column: of ragged ones and texts the figures of their lengths."""
    import numpy as np

    for column in store.schema:
        num_present = int(store.present(column.name, ids).sum())
        kind = f"{column.dtype}[]" if column.ragged else column.dtype
        kind += f" x{list(column.shape)}" if column.shape else ""
        lengths = column.axis is not None
        values = store.lengths(column.name, ids) if lengths else store.read_scalars(column.name, ids)
        numbers = values[~np.isnan(values)] if values.dtype.kind == "f" else values
        figures = ("", "", "")
        if len(numbers):
            unit = "" if not lengths else " bytes" if column.is_text else " long"
            statistics = (numbers.min(), numbers.astype(np.float64).mean(), numbers.max())
            figures = tuple(f"{float(figure):.6g}{unit}" for figure in statistics)
        yield (column.name, kind, f"{num_present:,}", *figures)


def _show(typed: argparse.Namespace) -> int:
    with _open(typed) as store:
        matching_ids, left_out = _ids(store, typed)
        printed_ids = matching_ids[max(0, len(matching_ids) - typed.num) :]
        names = typed.columns.split(",") if typed.columns else None
        rows = store.read(printed_ids, names)
        for i, row in enumerate(printed_ids.tolist()):
            _say(f"id {row}")
            for name, values in rows.items():
                _say(f"  {name}: {_short(values[i])}")
    _say(f"{len(printed_ids):,} of {len(matching_ids):,} trajectories{left_out}")
    _next("stats", typed.store)
    return 0


def _short(value: Any) -> str:
    import numpy as np

    if isinstance(value, np.ndarray):
        return np.array2string(cast("Any", value), threshold=16, edgeitems=6, max_line_width=10_000).replace("\n", "")
    text = repr(value) if isinstance(value, (str, bytes)) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def _copy(typed: argparse.Namespace) -> int:
    from trajectory_store.compare import copy_store

    target = typed.to if "://" in typed.to else Path(typed.to).expanduser()
    with _open(typed) as store:
        ids, left_out = _ids(store, typed)
        copied = copy_store(store, target, ids, backend=typed.backend)
    _say(f"{typed.to}: {copied:,} trajectories, with ids of their own{left_out}")
    _next("verify", typed.to)
    return 0


def _compact(typed: argparse.Namespace) -> int:
    with _open(typed, "a") as store:
        report = store.compact()
    if report.skipped:
        _say(f"{typed.store}: nothing was done: {report.skipped}")
        return 1
    before, after = report.bytes_before / 1e6, report.bytes_after / 1e6
    _say(
        f"{typed.store}: {report.segments_before:,} segments are {report.segments_after:,}, "
        f"{before:.1f} MB are {after:.1f} MB; ids, order and values are as before"
    )
    _next("verify", typed.store)
    return 0


def _export(typed: argparse.Namespace) -> int:
    with _open(typed) as store:
        ids, left_out = _ids(store, typed)
        count = store.to_parquet(typed.to, typed.columns.split(",") if typed.columns else None, ids)
    size = Path(typed.to).expanduser().stat().st_size / 1e6
    _say(f"{typed.to}: {count:,} trajectories, {size:.1f} MB{left_out}")
    again = f"TrajectoryStore.from_parquet('a-new-folder', {typed.to!r})"
    _say(f"next:  {again} makes a store of it again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
