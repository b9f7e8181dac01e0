"""The files of an import: those that `rlhf_pipeline.data.files` reads, archives of them, dumps of `torch.save`."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline.data.files import Container, SourceFile, find_sources, natural
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError
from rlhf_pipeline.exchange.torch_dumps import TorchDump
from rlhf_pipeline.exchange.zip_members import open_archive, open_member

_FILES = re.compile(r"\.(jsonl|ndjson|csv|tsv|parquet|arrow|feather)(\.gz|\.zst)?$|\.(pt|zip|eval)$|\.table\.json$")
_TAR = re.compile(r"\.(tgz|tbz2?|txz)$|\.tar(\.\w+)?$")
_DOCUMENTS = re.compile(r"\.json(\.gz|\.zst)?$")
_TRAJECTORY = re.compile(r"^(trajectory|episode_hash)[\w.-]*\.json(\.gz|\.zst)?$")
"""The file of a Harbor trial's trajectory or of an rLLM episode, next to files of settings and results."""
_MOST_UNPACKED = 64 << 30
"""The maximum size of an archive in bytes; a larger archive is rejected before anything is written."""
_DEEPEST = 4
"""Maximum depth of archives within archives."""


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file in an archive: its place there, and where it was unpacked."""

    path: Path
    unpacked: SourceFile | TorchDump | EvaluationLog | TarArchive

    @property
    def container(self) -> str:
        """The container of the rows, as in `data.files`."""
        return self.unpacked.container

    def rows(
        self, *, arrays: bool = False, growing: bool = False, on_bad: Callable[[DataError], None] | None = None
    ) -> Generator[tuple[int, dict[str, Any]], None, None]:
        """Yield `(number, row)`, see `SourceFile.rows`; errors report the location in the archive."""
        on_bad_member = None if on_bad is None else lambda error: on_bad(self._with_archive_path(error))
        try:
            yield from self.unpacked.rows(arrays=arrays, growing=growing, on_bad=on_bad_member)
        except DataError as error:
            raise self._with_archive_path(error) from error

    def where(self, number: int) -> str:
        """Return the location of a row for error messages."""
        return self.unpacked.where(number).replace(str(self.unpacked.path), str(self.path))

    def _with_archive_path(self, error: DataError) -> DataError:
        return DataError(str(error).replace(str(self.unpacked.path), str(self.path)))


@dataclass(frozen=True, slots=True)
class EvaluationLog:
    """An `.eval` archive of Inspect: a file for each sample, and a header with the settings of all."""

    path: Path
    container: str = "eval"

    def rows(
        self, *, arrays: bool = False, growing: bool = False, on_bad: Callable[[DataError], None] | None = None
    ) -> Generator[tuple[int, dict[str, Any]], None, None]:
        """Yield `(number, row)`, of each sample a log that holds it alone; the arguments are those of a file."""
        with open_archive(self.path) as archive:

            def document(name: str) -> Any:
                with open_member(archive, archive.getinfo(name)) as file:
                    return json.load(file)

            names = archive.namelist()
            head = next((name for name in ("header.json", "_journal/start.json") if name in names), None)
            header = {} if head is None else document(head)
            about = {name: header.get(name, {}) for name in ("eval", "plan")}
            samples = sorted((Path(name) for name in names if re.match(r"samples/.*\.json$", name)), key=natural)
            for number, name in enumerate(samples):
                yield number, {**about, "samples": [document(name.as_posix())]}

    def where(self, number: int) -> str:
        """Return the location of a sample for error messages."""
        return f"{self.path}, sample {number}"


@dataclass(frozen=True, slots=True)
class TarArchive:
    """A tar archive, which is not read: it has no list of its members, so each look at it would read all of it."""

    path: Path
    container: str = "tar"

    def rows(
        self, *, arrays: bool = False, growing: bool = False, on_bad: Callable[[DataError], None] | None = None
    ) -> Generator[tuple[int, dict[str, Any]], None, None]:
        """Raise that the archive must be unpacked."""
        raise DataError(f"{self.path} is a tar archive, which is not supported. Unpack it: tar -xf {self.path}")
        yield

    def where(self, number: int) -> str:
        """Return the archive as an error message names it."""
        return str(self.path)


Dump = SourceFile | TorchDump | ArchiveMember | EvaluationLog | TarArchive


@dataclass(frozen=True, slots=True)
class DumpCandidate:
    """A file to read.

    A file that `is_named` on the command line must contain rollouts; a file in a folder or an archive may not.
    """

    dump: Dump
    is_named: bool


def find_dumps(
    paths: Sequence[str | Path], container: Container | None = None, *, scratch: Path
) -> list[DumpCandidate]:
    """Return what is to be read, in order; see `find_sources`.

    A folder is its files, or where it has none those of its folders; an archive is unpacked into `scratch`.
    """
    dumps: list[DumpCandidate] = []
    for pattern in paths:
        path = Path(pattern).expanduser()
        if path.is_dir():
            dumps += _in_folder(path, scratch)
        elif path.exists() or not (matching := _matching(path)):
            dumps += _from_command_line(_of_file(path, container, scratch))
        else:
            dumps += _from_command_line(dump for file in matching for dump in _of_file(file, container, scratch))
    return list({item.dump.path: item for item in reversed(dumps)}.values())[::-1]


def _from_command_line(dumps: Iterable[Dump]) -> list[DumpCandidate]:
    return [DumpCandidate(dump, not isinstance(dump, ArchiveMember)) for dump in dumps]


def _matching(path: Path) -> list[Path]:
    """Return the files that a pattern names, also in folders below it; nothing where it is not a pattern."""
    at = next((place for place, part in enumerate(path.parts) if re.search(r"[*?\[]", part)), None)
    if at is None:
        return []
    folder = Path(*path.parts[:at]) if at else Path()
    files = [item for item in folder.glob(str(Path(*path.parts[at:]))) if item.is_file()]
    if not files:
        raise MissingPathError(f"no file matches the pattern {path}.")
    return sorted(files, key=natural)


def _of_file(path: Path, container: Container | None, scratch: Path) -> list[Dump]:
    if _TAR.search(path.name.lower()) and path.is_file():
        return [TarArchive(path.resolve())]
    if path.suffix == ".pt" and path.is_file():
        return [TorchDump(path.resolve())]
    if path.suffix.lower() == ".eval" and path.is_file():
        return [EvaluationLog(path.resolve())]
    if path.suffix.lower() == ".zip" and path.is_file():
        return _members(path.resolve(), path.resolve(), scratch)
    return list(find_sources([path], container))


def _in_folder(folder: Path, scratch: Path) -> list[DumpCandidate]:
    torch_files = sorted(folder.glob("*.pt"), key=natural)
    if torch_files:
        archives = [TarArchive(file.resolve()) for file in sorted(folder.iterdir()) if _TAR.search(file.name.lower())]
        dumps = (*(TorchDump(file.resolve()) for file in torch_files), *archives)
        return [DumpCandidate(dump, False) for dump in dumps]
    if any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return [DumpCandidate(source, True) for source in find_sources([folder])]
    files = rollout_files(folder)
    if not files:
        raise DefinitionError(
            f"{folder} and its subfolders contain no .jsonl, .csv, .parquet, .pt, .zip, .eval or .json files."
        )
    return [DumpCandidate(dump, False) for file in files for dump in _of_file(file, None, scratch)]


def rollout_files(folder: Path) -> list[Path]:
    """Return the files under a folder that may hold rollouts, in order; of `.json` only where there is nothing else."""
    files = [file for file in folder.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(folder))]
    lines = [file for file in files if _FILES.search(file.name.lower())]
    stories = [file for file in files if _TRAJECTORY.match(file.name)]
    rollouts = [file for file in lines + stories if file.name != "aggregated_results.jsonl"]
    archives = [file for file in files if _TAR.search(file.name.lower())]  # each is reported as unread
    documents = [file for file in files if _DOCUMENTS.search(file.name.lower())]
    return sorted((rollouts or documents) + archives, key=natural)


def trial_results(file: Path) -> list[Path]:
    """Return where the `result.json` of a Harbor trial may be, for a trajectory; nothing for any other file."""
    return [folder / "result.json" for folder in file.parents[:2]] if _TRAJECTORY.match(file.name) else []


def _is_hidden(path: Path) -> bool:
    """Return whether a file is hidden, or one of prime-rl's parts of a rollout in flight, which it deletes later."""
    in_flight = any(pair == ("traces", "live") for pair in itertools.pairwise(path.parts))
    return in_flight or any(part.startswith((".", "__")) for part in path.parts)


def _members(archive_path: Path, path: Path, scratch: Path, depth: int = 1) -> list[Dump]:
    """Unpack the files of an archive that may hold rollouts; names in the archive are not used as paths.

    Args:
        archive_path: the archive on disk.
        path: the name of the archive in messages: an archive within another one has its path there.
        scratch: an existing folder to unpack into.
        depth: the number of archives that contain these members.
    """
    if depth > _DEEPEST:
        raise DefinitionError(f"{path} is nested in more than {_DEEPEST} archives. Unpack it and specify the files.")
    with open_archive(archive_path) as archive:
        items = [item for item in archive.infolist() if not item.is_dir() and not _is_hidden(Path(item.filename))]
        lines = [item for item in items if re.search(_FILES, item.filename.lower())]
        stories = [item for item in items if _TRAJECTORY.match(Path(item.filename).name)]
        chosen = lines + stories or [item for item in items if _DOCUMENTS.search(item.filename.lower())]
        chosen += [item for item in items if _TAR.search(item.filename.lower())]
        if sum(item.file_size for item in chosen) > _MOST_UNPACKED:
            raise DefinitionError(
                f"{path} unpacks to more than {_MOST_UNPACKED >> 30} GiB. Unpack it and specify the files."
            )
        if not chosen:
            raise DefinitionError(f"{path} contains no .jsonl, .csv, .parquet, .pt, .zip, .eval or .json files.")
        members: list[Dump] = []
        for item in sorted(chosen, key=lambda item: natural(Path(item.filename))):
            place = scratch / f"{len([*scratch.iterdir()])}" / Path(item.filename).name
            place.parent.mkdir()
            with open_member(archive, item) as packed, place.open("wb") as file:
                shutil.copyfileobj(packed, file)
            inside = path / item.filename
            if place.suffix.lower() == ".zip":
                members += _members(place, inside, scratch, depth + 1)
                continue
            inner = [dump for dump in _of_file(place, None, scratch) if not isinstance(dump, ArchiveMember)]
            members += [ArchiveMember(inside, dump) for dump in inner]
        return members
