"""Importing other tools' rollouts into a store: streamed, one commit per batch, and never twice."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from rlhf_pipeline.errors import DataError, DefinitionError, did_you_mean
from rlhf_pipeline.exchange._completion import ONE_ROW, Rollout
from rlhf_pipeline.exchange._counts import FileReport, ImportReport
from rlhf_pipeline.exchange._encode import Encoder, columns_of, meta_of
from rlhf_pipeline.exchange._exported import import_stored
from rlhf_pipeline.exchange._fields import Reader
from rlhf_pipeline.exchange._nested import TinkerReader
from rlhf_pipeline.exchange._tables import Container, Source, find_sources
from rlhf_pipeline.exchange.formats import CONTAINERS, NAMES, find_format, is_tinker_summary
from rlhf_pipeline.exchange.target import Files, open_target

BATCH_ROWS = 512
BATCH_TOKENS = 1 << 20
GroupBy = Literal["auto", "prompt"]


def import_files(
    files: Sequence[str | Path],
    into: str | Path,
    *,
    format: str = "auto",
    tokenizer: Any | None = None,
    fields: Mapping[str, str] | None = None,
    group_by: GroupBy = "auto",
    chat_template: bool = True,
    eos: bool = True,
    durability: Literal["process", "power", "group"] | None = None,
    batch_rows: int = BATCH_ROWS,
    on_file: Callable[[FileReport], None] | None = None,
    on_commit: Callable[[ImportReport], None] | None = None,
) -> ImportReport:
    """Import rollouts into a store, which is made if it is not there.

    Token ids and log-probs that a file gives are kept. Text is encoded once, here, and `meta` says so; behaviour
    log-probs that are not known are NaN, and `RetrieveLogProb` fills them in when the store is trained on. Trajectory
    and group ids follow from the place in the file, so an import that was killed and is called again continues where it
    stopped, and a file that has grown gives its new rows only.

    Args:
        files: JSONL and Parquet files, saved Hugging Face datasets, or folders of files.
        into: folder of the store.
        format: one of `rlhf_pipeline.exchange.formats.NAMES`; `auto` looks at the names of the fields.
        tokenizer: of transformers, or the folder or hub name of one; only needed for text without token ids.
        fields: target to field name, for example `{"prompt": "question"}`; `none` leaves a target out. `reward` may
            be a sum of fields with weights: `{"reward": "accuracy+0.5*format"}`.
        group_by: `auto` takes the group that the format names, else rows in turn with equal prompts; `prompt` takes
            all rows of a file with the same prompt.
        chat_template: put text prompts through the tokenizer's chat template, where the format allows and it has one.
        eos: end an encoded completion with the EOS token, unless it was cut off by a length limit.
        durability: of the store; see `TrajectoryStore.create`.
        batch_rows: at most so many trajectories per commit.
        on_file: called when a file's format is known.
        on_commit: called after every commit.

    Returns:
        What was made.

    Raises:
        MissingPathError: a file or the tokenizer is not there.
        DefinitionError: the format, a field or the tokenizer is missing or wrong.
        DataError: a row is broken; it is named, and what was read before it is in the store.
        RunExistsError: another import writes to the store.
        StoreError: the store cannot be written.

    >>> import json, tempfile
    >>> from trajectory_store import TrajectoryStore
    >>> folder = Path(tempfile.mkdtemp())
    >>> row = {"prompt_ids": [1, 2], "completion_ids": [[3], [4, 5]], "rewards": [1.0, 0.0]}
    >>> _ = (folder / "rollouts.jsonl").write_text(json.dumps(row))
    >>> report = import_files([folder / "rollouts.jsonl"], folder / "store")
    >>> report.num_imported, report.num_groups, report.mean_reward
    (2, 1, 0.5)
    >>> import_files([folder / "rollouts.jsonl"], folder / "store").num_skipped
    2
    >>> with TrajectoryStore.open(folder / "store") as store:
    ...     store.read(store.ids(), ["input_ids"])["input_ids"][1].tolist()
    [1, 2, 4, 5]
    """
    if format not in NAMES:
        raise DefinitionError(f"there is no format '{format}'." + did_you_mean(format, NAMES))
    if group_by not in ("auto", "prompt"):
        raise DefinitionError(f"group_by is '{group_by}'." + did_you_mean(group_by, ("auto", "prompt")))
    container = cast(Container, format) if format in CONTAINERS else None
    sources = find_sources(files, container)
    encoder = Encoder(tokenizer, chat=chat_template, eos=eos)
    report = ImportReport(store=Path(into).expanduser())
    plan = _recognise(sources, format, fields or {})
    stored = [item for item in plan if item.reader is None]
    if stored:
        if len(stored) != len(plan):
            raise DefinitionError("exports of a store and other files cannot be imported in one command.")
        for item in stored:
            import_stored(item.source, report.store, report, item.report, durability, batch_rows, on_file, on_commit)
        return report
    with open_target(report.store, durability=durability) as store:
        there = Files(store)
        for item in plan:
            report.files.append(item.report)
            if on_file is not None:
                on_file(item.report)
            _Import(there, item, report, encoder, group_by, batch_rows, on_commit).run()
    return report


@dataclass(kw_only=True)
class _Item:
    source: Source
    reader: Reader | None
    """None for an export of a store."""
    report: FileReport
    version: int | None = None
    """The policy version of all its rows, where the path tells it."""


def _recognise(sources: Sequence[Source], format: str, fields: Mapping[str, str]) -> list[_Item]:
    plan: list[_Item] = []
    summaries: list[Source] = []
    tinker: TinkerReader | None = None
    for source in sources:
        with contextlib.closing(source.rows()) as rows:
            row = next((row for _, row in rows), None)
        if row is None:
            continue
        try:
            found = find_format(format, row, is_export=source.schema_json() is not None)
            if found is None:
                if fields:
                    raise DefinitionError("an export of a store names its own fields; leave out --field.")
                plan.append(_Item(source=source, reader=None, report=FileReport(path=source.path, format="store")))
                continue
            if found.name == "tinker":
                tinker = tinker or TinkerReader(row, fields, found)
                if is_tinker_summary(row):
                    summaries.append(source)
                    continue
                reader: Reader = tinker
            else:
                reader = found.make(row, fields, found)
        except DefinitionError as error:
            raise DefinitionError(f"{source.path}: {error}") from None
        file = FileReport(path=source.path, format=found.name)
        plan.append(_Item(source=source, reader=reader, report=file, version=found.version_of(source.path)))
    for source in summaries:
        for number, row in source.rows():
            with naming(source, number):
                cast(TinkerReader, tinker).learn(row)
    if not plan:
        if summaries:
            raise DefinitionError(
                f"{summaries[0].path} holds rewards and no tokens. Name the run's capture/sample.jsonl beside it."
            )
        raise DataError(f"{', '.join(str(source.path) for source in sources)}: there are no rows to import.")
    for item in plan:
        item.report.about = item.reader.about() if item.reader is not None else "all columns as they were exported"
    return plan


@contextlib.contextmanager
def naming(source: Source, number: int) -> Iterator[None]:
    """Prefix errors with the file and the row."""
    try:
        yield
    except (DataError, DefinitionError) as error:
        raise type(error)(f"{source.where(number)}: {error}") from error
    except RecursionError:
        raise DataError(f"{source.where(number)}: a value is nested too deeply to be kept.") from None


class _Import:
    """One file into the store."""

    def __init__(
        self,
        there: Files,
        item: _Item,
        report: ImportReport,
        encoder: Encoder,
        group_by: GroupBy,
        batch_rows: int,
        on_commit: Callable[[ImportReport], None] | None,
    ) -> None:
        self.store, self.source, self.file, self.report = there.store, item.source, item.report, report
        self.reader, self.version = cast(Reader, item.reader), item.version
        self.encoder, self.group_by, self.batch_rows, self.on_commit = encoder, group_by, batch_rows, on_commit
        self.known = there.known(item.source.path)
        self.num = 0
        self.num_groups = 0
        self._groups: dict[bytes, int] = {}
        self._last_group: tuple[Any, int] | None = None
        self._old: list[tuple[int, Rollout, str]] = []
        self._new: list[tuple[int, int, Rollout, str]] = []
        self._num_tokens = 0
        self._highest_group = -1

    def run(self) -> None:
        """Read to the end; what was read before an error is committed first."""
        try:
            for number, row in self.source.rows():
                with naming(self.source, number):
                    for rollout in self.reader.read(row):
                        self._take(rollout, number)
        finally:
            self.file.num_left_out = getattr(self.reader, "left_out", 0)
            self._check_old()
            self._commit()

    def _take(self, rollout: Rollout, number: int) -> None:
        if self.version is not None:
            rollout.policy_version = self.version
        place, group = self.num, self._group(rollout, number)
        if place < self.known.num:
            self.num += 1
            self.file.num_skipped += 1
            self._old.append((place, rollout, self.source.where(number)))
            if len(self._old) >= self.batch_rows:
                self._check_old()
            return
        self._check_old()  # nothing is added to what a changed file gave before
        encoded = self.encoder.encode(rollout)
        self.num += 1
        meta: dict[str, Any] = {"source": {"file": str(self.source.path), "row": number, "format": self.file.format}}
        if encoded is not None:
            meta["encoded"] = encoded
            self.report.num_encoded += 1
        self._new.append((place, group, rollout, meta_of(rollout, meta)))
        self._num_tokens += len(rollout.prompt_ids or ()) + len(rollout.completion_ids or ())
        if len(self._new) >= self.batch_rows or self._num_tokens >= BATCH_TOKENS:
            self._commit()

    def _group(self, rollout: Rollout, number: int) -> int:
        key = rollout.group
        prompt = rollout.prompt if rollout.prompt_ids is None else list(rollout.prompt_ids)
        if self.group_by == "prompt":
            key = prompt
        elif key is None:
            this = (rollout.policy_version, prompt)
            if self._last_group is None or self._last_group[0] != this:
                self._last_group = (this, self.num_groups)
                self.num_groups += 1
            return self._last_group[1]
        elif key == ONE_ROW:
            key = (ONE_ROW, number)
        # A digest, so that the groups of a file cost little memory whatever names them.
        digest = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest not in self._groups:
            self._groups[digest] = self.num_groups
            self.num_groups += 1
        return self._groups[digest]

    def _check_old(self) -> None:
        old, self._old = self._old, []
        if old:
            places, rollouts, wheres = zip(*old, strict=True)
            self.known.check_same(places, rollouts, wheres)

    def _commit(self) -> None:
        new, self._new, self._num_tokens = self._new, [], 0
        if not new:
            return
        rollouts = [rollout for _, _, rollout, _ in new]
        places = np.array([place for place, _, _, _ in new], np.int64)
        groups = np.array([group for _, group, _, _ in new], np.int64)
        columns = columns_of(
            rollouts, groups + self.known.base, places + self.known.base, [meta for _, _, _, meta in new]
        )
        self.store.append(columns)
        self.file.num_imported += len(new)
        seen = self._highest_group
        self._highest_group = max(seen, int(groups.max()))
        self.report.num_groups += len(np.unique(groups[groups > seen]))
        self.report.tally(columns)
        if self.on_commit is not None:
            self.on_commit(self.report)
