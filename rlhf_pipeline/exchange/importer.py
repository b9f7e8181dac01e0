"""Importing other tools' rollouts, and exports, into a store: streamed, one commit per batch, and never twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange._completion import Encoder, Rollout
from rlhf_pipeline.exchange._reader import ONE_ROW, Reader
from rlhf_pipeline.exchange._tables import Container, Source, find_sources
from rlhf_pipeline.exchange._values import batch_of, from_row
from rlhf_pipeline.exchange.formats import (
    CONTAINERS,
    Rewards,
    check_format,
    find_format,
    is_tinker_summary,
    tinker_reward,
    tinker_samples,
)
from rlhf_pipeline.exchange.target import NAME, There, check_columns, open_target
from trajectory_store import Schema, StoreError

BATCH_ROWS = 512
BATCH_TOKENS = 1 << 20
Rows = Iterator[tuple[str, Mapping[str, Any], bool]]
"""The place of a row in its file, its columns, and whether its text was encoded."""


@dataclass(kw_only=True)
class FileReport:
    """The result of one file."""

    path: Path
    format: str
    about: str = ""
    """Which field was read as what."""
    num_imported: int = 0
    num_skipped: int = 0
    """Trajectories that the store had already."""
    num_left_out: int = 0
    """Rows that are not finished trajectories (failed calls, agents that are not trained), or that repeat an earlier
    file."""


@dataclass(kw_only=True)
class ImportReport:
    """The result of an import.

    Attributes:
        store: the folder.
        files: one report per file, in order.
        num_groups: groups among the imported trajectories.
        num_tokens: their tokens, prompts included.
        num_encoded: trajectories whose text was encoded.
        num_without_log_probs: trajectories without behaviour log-probs.
        num_without_reward: trajectories whose reward is not finite.
        reward_sum: of the others.
    """

    store: Path
    files: list[FileReport] = field(default_factory=list[FileReport])
    num_groups: int = 0
    num_tokens: int = 0
    num_encoded: int = 0
    num_without_log_probs: int = 0
    num_without_reward: int = 0
    reward_sum: float = 0.0

    @property
    def num_imported(self) -> int:
        """Trajectories that were written."""
        return sum(file.num_imported for file in self.files)

    @property
    def num_skipped(self) -> int:
        """Trajectories that were in the store before."""
        return sum(file.num_skipped for file in self.files)

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of the imported trajectories that have one."""
        graded = self.num_imported - self.num_without_reward
        return self.reward_sum / graded if graded else None

    def tally(self, row: Mapping[str, Any], *, encoded: bool = False) -> None:
        """Count one trajectory."""
        self.num_encoded += encoded
        self.num_tokens += len(row.get("input_ids", ()))
        scores = row.get("log_probs")
        scored = scores is not None and not np.isnan(scores[row.get("assistant_mask", ...)]).all()
        self.num_without_log_probs += not scored
        reward = float(row.get("task_reward", math.nan))
        if math.isfinite(reward):  # as for the learner, which passes over the others
            self.reward_sum += reward
        else:
            self.num_without_reward += 1


def import_files(
    files: Sequence[str | Path],
    into: str | Path,
    *,
    format: str = "auto",
    tokenizer: Any | None = None,
    fields: Mapping[str, str] | None = None,
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
    stopped, and a file that has grown gives its new rows only. TRL writes a generation into one table per step that it
    takes on it: of tables in turn that differ only in `step`, the first is imported.

    Args:
        files: JSONL and Parquet files, saved Hugging Face datasets, or folders of files.
        into: folder of the store.
        format: one of `rlhf_pipeline.exchange.formats.NAMES`; `auto` looks at the names of the fields.
        tokenizer: of transformers, or the folder or hub name of one; only needed for text without token ids.
        fields: target to field name, for example `{"prompt": "question"}`; `none` leaves a target out. `reward` may
            be a sum of fields with weights: `{"reward": "accuracy+0.5*format"}`.
        chat_template: put text prompts through the tokenizer's chat template, where the format allows and it has one.
        eos: end an encoded completion with the EOS token, unless it was cut off by a length limit.
        durability: of the store; see `TrajectoryStore.create`.
        batch_rows: at most so many trajectories per commit.
        on_file: called when a file's format is known.
        on_commit: called after every commit.

    Raises:
        MissingPathError: a file or the tokenizer is not there.
        DefinitionError: the format, a field or the tokenizer is missing or wrong.
        DataError: a row is broken; it is named, and what was read before it is in the store.
        RunExistsError: another import writes to the store.
        StoreError: the store cannot be written.
    """
    check_format(format)
    sources = find_sources(files, cast(Container, format) if format in CONTAINERS else None)
    encoder = Encoder(tokenizer, chat=chat_template, eos=eos)
    report = ImportReport(store=Path(into).expanduser())
    plan = _recognise(sources, format, fields or {})
    exported = [item.reader for item in plan if isinstance(item.reader, Schema)]
    if exported and len(exported) != len(plan):
        raise DefinitionError("exports of a store and other files cannot be imported in one command.")
    columns = {column.name: column for schema in exported[::-1] for column in schema}
    with open_target(
        report.store, Schema(columns.values()) if exported else trajectory_schema(), durability=durability
    ) as store:
        there, groups = There(store), set[int]()
        for item, before in zip(plan, [None, *plan], strict=False):
            report.files.append(item.report)
            repeated = before is not None and _repeats(item, before)
            if on_file is not None:
                on_file(item.report)
            if repeated:
                continue
            if isinstance(item.reader, Schema):
                check_columns(store, item.reader)
                if len(report.files) > 1:
                    there = There(store)  # one export may hold what another one gave
                rows = _exported(item.source, item.reader)
            else:
                rows = _converted(item.source, item.reader, item.report, there.begin(item.source.path), encoder)
            for batch in _batches(rows, batch_rows):
                found = there.find([where for where, _, _ in batch], [row for _, row, _ in batch])
                new = [(row, encoded) for (_, row, encoded), old in zip(batch, found, strict=True) if not old]
                item.report.num_skipped += len(batch) - len(new)
                if not new:
                    continue
                store.append_batch(batch_of(store.schema, [row for row, _ in new]))
                item.report.num_imported += len(new)
                for row, encoded in new:
                    report.tally(row, encoded=encoded)
                    groups.add(int(row.get("group_id", -1)))
                report.num_groups = len(groups) - (-1 in groups)
                if on_commit is not None:
                    on_commit(report)
    return report


def _batches(rows: Rows, size: int) -> Iterator[list[tuple[str, Mapping[str, Any], bool]]]:
    """Yield rows some at a time; those before an error, then the error."""
    batch: list[tuple[str, Mapping[str, Any], bool]] = []
    tokens, error = 0, None
    while True:
        try:
            item = next(rows, None)
        except (DataError, DefinitionError) as raised:
            item, error = None, raised
        if item is not None:
            batch.append(item)
            tokens += len(item[1].get("input_ids", ()))
        if batch and (item is None or len(batch) >= size or tokens >= BATCH_TOKENS):
            yield batch
            batch, tokens = [], 0
        if error is not None:
            raise error
        if item is None:
            return


@dataclass(kw_only=True)
class _Item:
    source: Source
    report: FileReport
    reader: Reader | Schema
    """The columns of an export of a store need no reader."""


def _recognise(sources: Sequence[Source], format: str, fields: Mapping[str, str]) -> list[_Item]:
    plan: list[_Item] = []
    summaries: list[Source] = []
    rewards: Rewards = {}
    for source in sources:
        with contextlib.closing(source.rows()) as rows:
            row = next((row for _, row in rows), None)
        if row is None:
            continue
        written = source.schema_json()
        try:
            found = find_format(format, row, is_export=written is not None)
            if found is None:
                if fields:
                    raise DefinitionError("an export of a store names its own fields; leave out --field.")
                schema = trajectory_schema() if written is None else _schema(source, written)
                about = "all columns as they were exported"
                if written is None:
                    about = "the columns that this version knows; the export's own list of columns is not beside it"
                report = FileReport(path=source.path, format="store", about=about)
                plan.append(_Item(source=source, report=report, reader=schema))
                continue
            if found.name == "tinker":
                if is_tinker_summary(row):
                    summaries.append(source)
                    continue
                found = replace(found, parts=partial(tinker_samples, rewards))
            reader = Reader(found, row, fields, source.path)
        except DefinitionError as error:
            raise DefinitionError(f"{source.path}: {error}") from None
        plan.append(_Item(source=source, reader=reader, report=FileReport(path=source.path, format=found.name)))
    for source in summaries:
        for number, row in source.rows():
            with _naming(source, number):
                tinker_reward(rewards, row)
    if not plan:
        if summaries:
            raise DefinitionError(
                f"{summaries[0].path} holds rewards and no tokens. Name the run's capture/sample.jsonl beside it."
            )
        raise DataError(f"{', '.join(str(source.path) for source in sources)}: there are no rows to import.")
    known = (
        f"reward=total_reward of {sum(map(len, rewards.values())):,} summaries" if rewards else "no rollout summaries"
    )
    for item in plan:
        if isinstance(item.reader, Reader):
            item.report.about = item.reader.about() + (f", {known}" if item.report.format == "tinker" else "")
    return plan


def _repeats(item: _Item, before: _Item) -> bool:
    """Return True, and say so in its report, if a file's rows are those of the one before it, apart from one field."""
    but = item.reader.layout.repeated_but if isinstance(item.reader, Reader) else ""
    if not but or (item.report.format, item.source.path.parent) != (before.report.format, before.source.path.parent):
        return False
    num = 0
    with contextlib.closing(item.source.rows()) as mine, contextlib.closing(before.source.rows()) as others:
        for pair in zip_longest(mine, others):  # side by side: files that differ do so in their first rows
            same = {repr([(k, v) for k, v in one[1].items() if k != but]) if one else "" for one in pair}
            if len(same) > 1:
                return False
            num += 1
    item.report.num_left_out = num
    item.report.about = f"the rows of {before.source.path.name} again, left out"
    return True


def _schema(source: Source, written: str) -> Schema:
    try:
        return Schema.from_json(json.loads(written))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StoreError) as error:
        raise DataError(
            f"{source.path}: the list of its columns, which `export` wrote, cannot be read ({type(error).__name__}: "
            f"{error}). Export the store again."
        ) from error


@contextlib.contextmanager
def _naming(source: Source, number: int) -> Iterator[None]:
    """Prefix errors with the file and the row."""
    try:
        yield
    except (DataError, DefinitionError) as error:
        raise type(error)(f"{source.where(number)}: {error}") from error
    except RecursionError:
        raise DataError(f"{source.where(number)}: a value is nested too deeply to be kept.") from None


def _exported(source: Source, schema: Schema) -> Rows:
    for number, row in source.rows(arrays=True):
        with _naming(source, number):
            # In Arrow what the store was not given is null; in JSON it is not there, and null is NaN.
            if source.container != "jsonl":
                row = {name: value for name, value in row.items() if value is not None}
            made = from_row(schema, row)
        yield source.where(number), made, False


def _converted(source: Source, reader: Reader, report: FileReport, base: int, encoder: Encoder) -> Rows:
    """Yield the rows of another tool's file; their ids follow from their places in it, counted from `base`."""
    groups, place = _Groups(), base
    for number, given in source.rows():
        made: list[tuple[Mapping[str, Any], bool]] = []
        with _naming(source, number):
            for rollout in reader.read(given):
                if rollout is None:
                    report.num_left_out += 1
                    continue
                ids = {NAME: place, "group_id": base + groups.number(rollout, number)}
                said = {"file": str(source.path), "row": number, "format": report.format}
                encoded = rollout.prompt_ids is None or rollout.completion_ids is None
                made.append((encoder.row(rollout, said) | ids, encoded))
                place += 1
        for row, encoded in made:
            yield source.where(number), row, encoded


class _Groups:
    """Numbers the groups of a file."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._last: Any = None

    def number(self, rollout: Rollout, row: int) -> int:
        """Return the number of a rollout's group; `row` is its row in the file."""
        key = rollout.group
        if key is None:  # rows in turn with one prompt: called after the first of them
            prompt = rollout.prompt if rollout.prompt_ids is None else rollout.prompt_ids
            if self._last is None or self._last[:2] != (rollout.policy_version, prompt):
                self._last = (rollout.policy_version, prompt, row)
            key = self._last
        elif key[0] == ONE_ROW:
            key = (*key, row)
        # A digest, so that the groups of a file cost little memory whatever names them.
        digest = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return self._numbers.setdefault(digest, len(self._numbers))
