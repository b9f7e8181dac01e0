"""`rlhf-pipeline view`: look at runs, stores and rollout files in a browser."""

from __future__ import annotations

import argparse
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlhf_pipeline.cli.output import echo
from rlhf_pipeline.cli.parser import add_fields, natural
from rlhf_pipeline.errors import DefinitionError, PipelineError, count, typed

if TYPE_CHECKING:
    from rlhf_pipeline.exchange import ImportReport
    from rlhf_pipeline.report.query import View

_WAIT_S: Final = 2.0

HELP = "view runs, stores or rollout files in a browser, with live updates"
DETAILS = """\
examples:
  rlhf-pipeline view runs/copy_digits
  rlhf-pipeline view runs/a runs/b                 compare the curves and settings of two runs
  rlhf-pipeline view runs/mine/store
  rlhf-pipeline view rollouts.jsonl                all formats that `import` reads; no store is kept
  rlhf-pipeline view outputs/                      a folder that a trainer writes to, followed live
  rlhf-pipeline view outputs/ --store kept/        as above; the rows are kept in a store
  rlhf-pipeline view 'outputs/*.parquet' dump.zip  patterns, archives, folders of files
  rlhf-pipeline view chats.jsonl --field prompt=question --field completion=answer

The server accepts connections from this machine only. To connect from another machine:
  ssh -L PORT:127.0.0.1:PORT this-machine"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument(
        "paths", nargs="+", metavar="RUN|STORE|FILE|FOLDER", help="runs, stores, rollout files, or folders of files"
    )
    add_fields(command)
    command.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help=(
            "the tokenizer for a store without a run, or for files that contain only text (default: one token per "
            "character)"
        ),
    )
    command.add_argument(
        "--store",
        metavar="DIR",
        help="the store in which to keep the rows imported from one folder or file (default: a temporary store)",
    )
    command.add_argument("--port", type=natural, metavar="N", help="the port (default: any free port)")


def execute(args: argparse.Namespace) -> int:
    """Serve the pages until Ctrl-C."""
    from rlhf_pipeline.report.view.server import HOST, listen, serve

    if args.store is not None and (len(args.paths) > 1 or not _are_rollouts(args.paths[0])):
        raise DefinitionError("--store keeps the rows of one folder or file of rollouts. Specify exactly one.")
    with ExitStack() as stack:
        views = [_opened(path, args, stack) for path in args.paths]
        for view, name in zip(views, distinct_names(args.paths), strict=True):
            view.name = name
        try:
            bound = stack.enter_context(listen(args.port))
        except OSError as error:
            raise DefinitionError(f"port {args.port} is not available ({error.strerror}). Omit --port.") from error
        key = secrets.token_urlsafe(24)
        echo(f"open http://{HOST}:{bound.getsockname()[1]}/?key={key}\nCtrl-C stops the server.")
        serve(views, bound, key)
    return 0


def distinct_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each path: its last part, and as many of those before it as distinguish equal names.

    >>> distinct_names(["runs/a/demo", "runs/b/demo/", "other"]), distinct_names(["x", "x"])
    (['a/demo', 'b/demo', 'other'], ['x', 'x (2)'])
    """
    parts = [path.rstrip("/").split("/") for path in paths]
    names = [split[-1] or path for split, path in zip(parts, paths, strict=True)]
    for depth in range(2, max(map(len, parts), default=0) + 1):
        repeated = {name for name in names if names.count(name) > 1}
        names = [
            "/".join(split[-depth:]) if name in repeated else name for name, split in zip(names, parts, strict=True)
        ]
    return [
        f"{name} ({names[: at + 1].count(name)})" if names.count(name) > 1 and name in names[:at] else name
        for at, name in enumerate(names)
    ]


def _opened(path: str, args: argparse.Namespace, stack: ExitStack) -> View:
    """Open a run or a store; rollouts are imported into a store, and those of a folder are followed from then on."""
    from rlhf_pipeline.report.query import View

    tokenizer, fields = args.tokenizer, dict(args.fields)
    if not _are_rollouts(path):
        if fields:
            raise DefinitionError(f"--field maps fields of files, but {path} is not a file of rollouts.")
        view = View(path, tokenizer=tokenizer)
    else:
        spelling = tokenizer if tokenizer is not None and Path(tokenizer).expanduser().is_dir() else None  # not a hub's
        store_path = None if args.store is None else Path(args.store).expanduser()
        folder = store_path or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf-view-")))
        store, options = _imported(Path(path).expanduser(), folder, store_path is not None, tokenizer, fields)
        view = View(store, name=Path(path).name, tokenizer=spelling)
        if Path(path).expanduser().is_dir():
            stack.enter_context(_followed(Path(path).expanduser(), store, options))
    stack.callback(view.close)
    return view


@contextmanager
def _followed(folder: Path, store: Path, options: Mapping[str, Any]) -> Iterator[None]:
    """Import what a trainer writes into a folder while the pages are served; an error ends the following, not them."""
    from rlhf_pipeline.exchange import follow_folder
    from trajectory_store import StoreError

    leave = threading.Event()

    def pause(seconds: float) -> None:
        leave.wait(seconds)

    def follow() -> None:
        try:
            follow_folder(
                folder,
                store,
                stop=leave.is_set,
                wait=pause,
                on_vanished=lambda file: echo(
                    f"NOTICE: {file} was removed; rows written after it was last read are unknown"
                ),
                **options,
            )
        except (PipelineError, StoreError, OSError) as error:
            echo(f"NOTICE: {folder} is no longer followed: {error}")

    thread = threading.Thread(target=follow, name=f"follows {folder}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def _are_rollouts(path: str) -> bool:
    """Return True for a file, a folder of files or a pattern; False for what is a run or a store, or nothing."""
    from rlhf_pipeline.run.address import address_of
    from rlhf_pipeline.run.lookup import is_run
    from rlhf_pipeline.run.place import is_store

    place = Path(path).expanduser()
    if place.is_file():
        return True
    if place.is_dir():
        address = address_of(path)
        inside = list(place.iterdir())
        ours = is_run(address) or is_store(address) or any(is_run(item) for item in inside if item.is_dir())
        return bool(inside) and not ours  # of a folder of runs the error names them
    return "://" not in path and any(mark in path for mark in "*?[") and not place.exists()


def _imported(
    file: Path, folder: Path, is_kept: bool, tokenizer: str | None, fields: Mapping[str, str]
) -> tuple[Path, dict[str, Any]]:
    """Import files into a store; return it, and the options for what is added later.

    Text without token ids is shown by its characters, unless a tokenizer is named. A folder that has no rollouts yet is
    waited for.
    """
    from rlhf_pipeline.exchange import import_files
    from rlhf_pipeline.report.tokens import Characters

    kinds = ("ids", None), ("characters", Characters())
    same: dict[str, Any] = {"fields": fields, "for_display": True, "durability": "process"}
    same |= {"chat_template": tokenizer is not None}
    while True:
        for name, encoder in kinds if tokenizer is None else (("named", tokenizer),):
            store = folder if is_kept else folder / name
            try:
                options = {**same, "tokenizer": encoder}
                report = import_files([file], store, growing=file.is_dir(), **options)
            except DefinitionError:
                if name != "ids":
                    raise
                continue
            if report.num_imported or report.num_skipped:
                _echo_notices(report)
                return store, options
        if not file.is_dir():
            raise DefinitionError(f"{typed(file)} has no readable rollouts.")
        echo(f"waiting for rollouts in {typed(file)}; Ctrl-C stops")
        time.sleep(_WAIT_S)


def _echo_notices(report: ImportReport) -> None:
    """Print what the files lack and an import would ask for."""
    if report.other_files:
        paths = ", ".join(str(path) for path in report.other_files[:3])
        echo(f"{count(len(report.other_files), 'file')} without rollouts skipped: {paths}")
    for problem in [*report.unreadable.values()][:3]:
        echo(f"NOTICE: skipped an unreadable file: {problem}")
    for file in report.files:
        if file.num_assumed_one_turn:
            echo(
                f"NOTICE: {file.path}: for {count(file.num_assumed_one_turn, 'text')}, the file does not record which "
                "parts the policy sampled and which came from an environment, so no token is marked as sampled."
            )
        if "+" in file.about.partition("reward=")[2].partition(",")[0]:
            echo(
                f"NOTICE: {file.path}: several rewards, shown as their sum: {file.about}. To select one: --field "
                "reward=NAME"
            )
