"""Sealed folders in an object store, in pieces that are found by their content.

A piece is a tensor of a safetensors file, or a whole file of another kind. A piece that is stored already, from an
earlier version or a checkpoint, is not sent again, and a process that has it does not fetch it again: if some tensors
change, only these are transferred. New pieces are packed together, 64 MB a pack, so small tensors need few requests.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.files import folder_problem
from trajectory_store.new_files import new_file
from trajectory_store.objects.remote import ObstoreBucket

PACKS: Final = "packs"
SEALED: Final = (filenames.WEIGHTS, filenames.CHECKPOINTS)
"""The folders of a run that contain sealed folders."""
_PACK_BYTES: Final = 1 << 26
_AT_ONCE: Final = 8
_LONGEST_HEADER: Final = 1 << 27


@dataclass(frozen=True, slots=True)
class Span:
    """Some bytes of a file, or of a pack."""

    where: str
    start: int
    length: int


Files = Mapping[str, list[tuple[str, Span]]]
"""The pieces of each file of a folder, in order: the hash of each piece, and where it is."""


class BundledFolders:
    """The sealed folders of a run, written by one process."""

    def __init__(self, bucket: ObstoreBucket, root: Path) -> None:
        self._bucket = bucket
        self._root = root
        self._bundles: dict[str, Files] | None = None
        """The content of the bucket by folder; None until this process first writes, which removes unused packs."""
        self._here: dict[str, Span] = {}
        """Pieces in files of this process, by their hash."""

    def keep(self, name: str) -> None:
        """Put the missing pieces of a folder, then the list of its pieces."""
        bundles = self._all_bundles()
        spans = {content: span for files in bundles.values() for pieces in files.values() for content, span in pieces}
        files: dict[str, list[str]] = {}
        new: dict[str, bytes] = {}
        for file in sorted(path for path in (self._root / name).rglob("*") if path.is_file()):
            contents = files[str(file.relative_to(self._root / name))] = []
            for start, raw in _pieces(file):
                contents.append(content := _content(raw))
                self._here[content] = Span(str(file), start, len(raw))
                if not raw:
                    spans[content] = Span("", 0, 0)
                elif content not in spans and content not in new:
                    if sum(map(len, new.values())) + len(raw) > _PACK_BYTES:
                        spans |= self._packed(new)
                        new = {}
                    new[content] = raw
        spans |= self._packed(new)
        final = {file: [(content, spans[content]) for content in contents] for file, contents in files.items()}
        self._bucket.put(f"{name}.json", _to_json(final))
        bundles[name] = final

    def _packed(self, new: Mapping[str, bytes]) -> dict[str, Span]:
        """Put pieces as one pack, if there are any; return where each is."""
        ends = list(itertools.accumulate(map(len, new.values())))
        if not ends:
            return {}
        whole = b"".join(new.values())
        pack = f"{PACKS}/{_content(whole)}"
        self._bucket.put(pack, whole)
        return {
            content: Span(pack, end - len(raw), len(raw)) for (content, raw), end in zip(new.items(), ends, strict=True)
        }

    def drop(self, name: str) -> None:
        """Remove a folder, and the packs that no other folder needs."""
        bundles = self._all_bundles()
        files = bundles.pop(name, None)
        if files is not None:
            self._bucket.delete([f"{name}.json"])
            self._sweep({span.where for pieces in files.values() for _, span in pieces})

    def names(self, parent: str) -> list[str]:
        """Return the names of the folders in a folder."""
        keys = (key.removeprefix(f"{parent}/") for key in self._bucket.keys(f"{parent}/"))
        return [key.removesuffix(".json") for key in keys if key.endswith(".json") and key != filenames.NEWEST_WEIGHTS]

    def bring(self, name: str) -> None:
        """Fetch a folder, damaged or not; the local copy of a removed folder stays."""
        final = self._root / name
        if final.is_dir() and folder_problem(final, checksums=False) is None:
            return
        raw = self._bucket.get(f"{name}.json")
        if raw is None:
            return
        files = _files_of(raw, name)
        pieces = self._fetch([piece for some in files.values() for piece in some], name)
        with new_file(final) as temporary:
            for file, some in files.items():
                path = temporary / file
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as out:
                    for content, _ in some:
                        place = out.tell()
                        out.write(pieces[content])
                        self._here[content] = Span(str(final / file), place, len(pieces[content]))
            with suppress(FileNotFoundError):
                shutil.rmtree(final)

    def _fetch(self, pieces: list[tuple[str, Span]], name: str) -> dict[str, bytes]:
        """Return pieces by their hash: from files of this process if they have them, else from the packs."""
        contents: dict[str, bytes] = {}
        missing: dict[str, dict[str, Span]] = {}
        for content, span in pieces:
            here = self._read(content) if span.length else b""
            if here is None:
                missing.setdefault(span.where, {})[content] = span
            else:
                contents[content] = here

        def fetch(pack: str) -> dict[str, bytes]:
            spans = missing[pack]
            joined = _joined(spans)
            parts = self._bucket.ranges(pack, [(span.start, span.start + span.length) for span in joined])
            return _cut(joined, parts, spans)

        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for part in pool.map(fetch, missing):
                    contents |= part
        except FileNotFoundError as error:
            raise DataError(
                f"an object of {self._bucket.where}/{name} no longer exists. A newer version may have replaced it."
            ) from error
        return contents

    def _read(self, content: str) -> bytes | None:
        span = self._here.get(content)
        if span is None:
            return None
        try:
            with open(span.where, "rb", buffering=0) as file:
                raw = os.pread(file.fileno(), span.length, span.start)
        except FileNotFoundError:
            raw = b""
        if _content(raw) == content:
            return raw
        del self._here[content]
        return None

    def _all_bundles(self) -> dict[str, Files]:
        if self._bundles is None:
            self._bundles = self._listed_folders()
            self._sweep(set(self._bucket.keys(f"{PACKS}/")))
        return self._bundles

    def _listed_folders(self) -> dict[str, Files]:
        names = [f"{parent}/{name}" for parent in SEALED for name in self.names(parent)]
        read = zip(names, self._bucket.get_many([f"{name}.json" for name in names]), strict=True)
        return {name: _files_of(raw, name) for name, raw in read if raw is not None}

    def _sweep(self, packs: set[str]) -> None:
        used = {span.where for files in (self._bundles or {}).values() for some in files.values() for _, span in some}
        self._bucket.delete(sorted(packs - used - {""}))


def _content(raw: bytes) -> str:
    """Return the hash that identifies these bytes."""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def _pieces(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of a file, each with its offset."""
    cuts = _tensor_ends(file) if file.suffix == ".safetensors" else []
    with file.open("rb") as stream:
        start = 0
        for end in cuts or [file.stat().st_size]:
            yield start, stream.read(end - start)
            start = end


def _tensor_ends(file: Path) -> list[int]:
    """Return where the header and each tensor of a safetensors file end; nothing if its layout is different."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(size - 8, _LONGEST_HEADER):
            return []
        header: dict[str, Any] = json.loads(stream.read(length))
    ends = sorted({8 + length, *(8 + length + entry["data_offsets"][1] for k, entry in header.items() if k[0] != "_")})
    return ends if ends[-1] == size else []


def _joined(spans: Mapping[str, Span]) -> list[Span]:
    """Return the spans of one pack with adjacent ones joined, which takes one request each."""
    out: list[Span] = []
    for span in sorted(spans.values(), key=lambda span: span.start):
        if out and out[-1].start + out[-1].length >= span.start:
            out[-1] = Span(span.where, out[-1].start, span.start + span.length - out[-1].start)
        else:
            out.append(span)
    return out


def _cut(joined: list[Span], parts: list[bytes], spans: Mapping[str, Span]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    for content, span in spans.items():
        place = next(at for at, whole in enumerate(joined) if whole.start <= span.start < whole.start + whole.length)
        start = span.start - joined[place].start
        contents[content] = parts[place][start : start + span.length]
    return contents


def _to_json(files: Files) -> bytes:
    rows = {file: [[content, *astuple(span)] for content, span in pieces] for file, pieces in files.items()}
    return json.dumps({"format": 1, "files": rows}).encode()


def _files_of(raw: bytes, name: str) -> Files:
    try:
        rows = json.loads(raw)["files"]
        return {file: [(content, Span(*place)) for content, *place in pieces] for file, pieces in rows.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{name}.json cannot be read ({error!r}). Restore it from a copy.") from error
