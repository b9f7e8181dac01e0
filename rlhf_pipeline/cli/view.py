"""`rlhf-pipeline view`: look at runs, stores and rollout files in a browser."""

from __future__ import annotations

import argparse
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.cli.output import say
from rlhf_pipeline.cli.parser import add_fields, natural
from rlhf_pipeline.errors import DefinitionError, typed
from rlhf_pipeline.report.formatting import count

if TYPE_CHECKING:
    from rlhf_pipeline.exchange import ImportReport
    from rlhf_pipeline.report.query import View

HELP = "look at runs, stores or rollout files in a browser, live"
DETAILS = """\
examples:
  rlhf-pipeline view runs/copy_digits
  rlhf-pipeline view runs/a runs/b                 compare runs: curves, differing settings
  rlhf-pipeline view runs/mine/store
  rlhf-pipeline view rollouts.jsonl                what `import` reads; nothing is kept
  rlhf-pipeline view 'outputs/*.parquet' dump.zip  patterns, archives, folders of files
  rlhf-pipeline view chats.jsonl --field prompt=question --field completion=answer

The pages are served on this machine only. From elsewhere: ssh -L PORT:127.0.0.1:PORT this-machine"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("paths", nargs="+", metavar="RUN|STORE|FILE|FOLDER")
    add_fields(command)
    command.add_argument(
        "--tokenizer", metavar="FOLDER", help="of stores alone, and of files that hold text only (default: characters)"
    )
    command.add_argument("--port", type=natural, metavar="N", help="the port (default: any free one)")


def execute(args: argparse.Namespace) -> int:
    """Serve the pages until Ctrl-C."""
    from rlhf_pipeline.report.view.server import HOST, listen, serve

    with ExitStack() as stack:
        views = [_opened(path, args.tokenizer, dict(args.fields), stack) for path in args.paths]
        try:
            bound = stack.enter_context(listen(args.port))
        except OSError as error:
            raise DefinitionError(f"port {args.port} is taken ({error.strerror}). Leave --port out.") from error
        key = secrets.token_urlsafe(24)
        say(f"open http://{HOST}:{bound.getsockname()[1]}/?key={key}\nCtrl-C ends it.")
        serve(views, bound, key)
    return 0


def _opened(path: str, tokenizer: str | None, fields: Mapping[str, str], stack: ExitStack) -> View:
    """Open a run or a store; files of rollouts are imported into a store that goes with this process."""
    from rlhf_pipeline.report.query import View

    if not _are_rollouts(path):
        if fields:
            raise DefinitionError(f"--field names fields of files, and {path} is none.")
        view = View(path, tokenizer=tokenizer)
    else:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf-view-")))
        spelling = (
            tokenizer if tokenizer is not None and Path(tokenizer).expanduser().is_dir() else None
        )  # else the hub's
        store = _imported(Path(path).expanduser(), folder, tokenizer, fields)
        view = View(store, name=Path(path).name, tokenizer=spelling)
    stack.callback(view.close)
    return view


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


def _imported(file: Path, folder: Path, tokenizer: str | None, fields: Mapping[str, str]) -> Path:
    """Import a file into a store; text without token ids is shown by its characters, unless a tokenizer is named."""
    from rlhf_pipeline.exchange import import_files
    from rlhf_pipeline.report.tokens import Characters

    kinds = ("ids", None), ("characters", Characters())
    for name, encoder in kinds if tokenizer is None else (("named", tokenizer),):
        try:
            report = import_files(
                [file],
                folder / name,
                tokenizer=encoder,
                fields=fields,
                for_display=True,
                chat_template=tokenizer is not None,
                durability="process",
            )
        except DefinitionError:
            if name != "ids":
                raise
            continue
        if report.num_imported:
            _say_notices(report)
            return folder / name
    raise DefinitionError(f"{typed(file)} has no rollouts that can be read.")


def _say_notices(report: ImportReport) -> None:
    """Say what the files do not tell, which an import would ask for."""
    if report.other_files:
        paths = ", ".join(str(path) for path in report.other_files[:3])
        say(f"{count(len(report.other_files), 'file')} without rollouts left out: {paths}")
    for problem in report.unreadable[:3]:
        say(f"NOTICE: skipped an unreadable file: {problem}")
    for file in report.files:
        if file.num_assumed_one_turn:
            say(
                f"NOTICE: {file.path}: of {count(file.num_assumed_one_turn, 'text')} the file does not tell which "
                "words the policy sampled and which an environment said, so none is marked as sampled."
            )
        if "+" in file.about.partition("reward=")[2].partition(",")[0]:
            say(
                f"NOTICE: {file.path}: several rewards, shown as their sum: {file.about}. Name one: --field reward=NAME"
            )
