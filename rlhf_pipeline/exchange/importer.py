"""Importing other tools' rollouts, and exports, into a store: streamed, one commit per batch, and never twice."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlhf_pipeline.buffer.trajectory_schema import EVALUATION, FAILURES, SAMPLED_BY, TEMPERATURE, trajectory_schema
from rlhf_pipeline.data.store_errors import as_ours
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError
from rlhf_pipeline.exchange._values import from_row, schema_of
from rlhf_pipeline.exchange.dump_files import ArchiveMember, Dump, DumpCandidate, find_dumps
from rlhf_pipeline.exchange.fields import NONE, Fields, check_targets
from rlhf_pipeline.exchange.file_groups import FileGroups
from rlhf_pipeline.exchange.imported_rows import COLUMNS as IDENTITY
from rlhf_pipeline.exchange.imported_rows import FileKeys, ImportedRows, version_of
from rlhf_pipeline.exchange.target import NAME, ExistingRows, check_columns, open_target
from rlhf_pipeline.exchange.tools import (
    EFFECTIVE,
    ROWS,
    Tool,
    add_summary,
    check_format,
    find_tool,
    is_annotation,
    is_metadata,
    is_summary,
    updates_of,
)
from trajectory_store import Schema, TrajectoryStore
from trajectory_store.batch import batch_of
from trajectory_store.recorder.raw_rollout import RawRollout, Row
from trajectory_store.recorder.row_encoder import Encoder

BATCH_ROWS = 512
_LOOKED_AT = 256
COLUMNS = (*FAILURES, TEMPERATURE, next(column for column in SAMPLED_BY if column.name == "log_prob_mode"))
"""The reason why a trajectory failed, and how it was sampled; if unknown: NaN, and no mode."""
BATCH_TOKENS = 1 << 20
Rows = Iterator[tuple[str, Mapping[str, Any], bool]]
"""The position of a row in its file, its columns, and whether its text was encoded."""


@dataclass(kw_only=True)
class FileReport:
    """The result of one file."""

    path: Path
    format: str
    about: str = ""
    """The target of each field."""
    lacks: tuple[str, ...] = ()
    """The values that the file lacks; they are not replaced."""
    num_imported: int = 0
    num_skipped: int = 0
    """Number of trajectories that were already in the store."""
    num_superseded: int = 0
    """Number of stored rows that a newer version in this file replaces, or that a newer version of their unit lacks."""
    awaits_rest: bool = False
    """Whether the file is being written again: until it is complete, rows that it lacks remain current."""
    num_left_out: int = 0
    """Number of rows without tokens that a policy sampled, or that repeat an earlier file."""
    num_assumed_one_turn: int = 0
    """Number of trajectories of text that the file does not mark as one turn: the user specified it, or only inspects
    them.
    """
    bad: list[str] = field(default_factory=list[str])
    """Rows that could not be read, each with its position and the reason (`skip_bad`)."""


@dataclass(kw_only=True)
class ImportReport:
    """The result of an import.

    Attributes:
        store: the folder.
        files: one report per file, in order.
        other_files: files of the folders and archives that contain no rollouts.
        unreadable: the reason for each file of the folders and archives that could not be read.
        vanished: files of a growing folder that were deleted before they were read completely.
        num_tokens: tokens of the imported trajectories, including prompts.
        num_encoded: trajectories whose text was encoded.
        num_failed: trajectories whose rows record a failure; they have no reward.
        num_masked: trajectories whose file does not record which tokens were sampled, or which their tool excluded from
            its loss; they contribute to their group's baseline, but are not used for training.
        num_unended: trajectories without a known finish reason.
        num_without_log_probs: trajectories without behaviour log-probs.
        num_at_unknown_temperature: trajectories with log-probs whose file does not record the temperature.
        num_without_reward: trajectories whose reward is not finite.
        num_evaluations: trajectories of an evaluation, which are marked and never used for training.
        reward_sum: the sum of the finite rewards.
        groups: the first reward of each group that is used for training; None if the group has two different rewards.
    """

    store: Path
    files: list[FileReport] = field(default_factory=list[FileReport])
    other_files: list[Path] = field(default_factory=list[Path])
    unreadable: dict[Path, str] = field(default_factory=dict[Path, str])
    vanished: list[Path] = field(default_factory=list[Path])
    num_tokens: int = 0
    num_encoded: int = 0
    num_failed: int = 0
    num_masked: int = 0
    num_unended: int = 0
    num_without_log_probs: int = 0
    num_at_unknown_temperature: int = 0
    num_without_reward: int = 0
    num_evaluations: int = 0
    reward_sum: float = 0.0
    groups: dict[int, float | None] = field(default_factory=dict[int, "float | None"])

    @property
    def num_imported(self) -> int:
        """The number of trajectories that were written."""
        return sum(file.num_imported for file in self.files)

    @property
    def num_skipped(self) -> int:
        """The number of trajectories that were in the store before."""
        return sum(file.num_skipped for file in self.files)

    @property
    def num_groups(self) -> int:
        """The number of groups of the imported trajectories, without groups of evaluations."""
        return len(self.groups)

    @property
    def num_groups_with_spread(self) -> int:
        """The number of groups with two different rewards; GRPO learns nothing from other groups."""
        return sum(first is None for first in self.groups.values())

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of the imported trajectories that have one."""
        graded = self.num_imported - self.num_without_reward
        return self.reward_sum / graded if graded else None

    def tally(self, row: Mapping[str, Any], *, encoded: bool = False) -> None:
        """Count one trajectory."""
        self.num_encoded += encoded
        self.num_tokens += len(row.get("input_ids", ()))
        mask, scores = row.get("assistant_mask"), row.get("log_probs")
        scored = scores is not None and not np.isnan(scores[... if mask is None else mask]).all()
        self.num_masked += mask is None or not np.any(mask)  # an absent mask is unknown
        self.num_failed += not row.get("reward_trusted", True)
        self.num_unended += not row.get("finish_reason", "")
        self.num_without_log_probs += not scored
        self.num_at_unknown_temperature += scored and math.isnan(row.get("temperature", math.nan))
        reward, group = float(row.get("task_reward", math.nan)), int(row.get("group_id", -1))
        evaluation = bool(row.get("evaluation", False))
        self.num_evaluations += evaluation
        first = self.groups.setdefault(group, reward) if group != -1 and not evaluation else None
        if math.isfinite(reward):  # as for the learner, which passes over the others
            self.reward_sum += reward
            if first is not None and first != reward:
                self.groups[group] = None if math.isfinite(first) else reward
        else:
            self.num_without_reward += 1


def import_files(
    files: Sequence[str | Path],
    into: str | Path,
    *,
    format: str = "auto",
    tokenizer: Any | None = None,
    fields: Mapping[str, str] | None = None,
    group: str | int | None = None,
    by_prompt: bool = False,
    source: str = "",
    chat_template: bool = True,
    one_turn: bool = False,
    skip_bad: int = 0,
    for_display: bool = False,
    growing: bool = False,
    settled: bool | None = None,
    durability: Literal["process", "power", "group"] | None = None,
    batch_rows: int = BATCH_ROWS,
    on_file: Callable[[FileReport], None] | None = None,
    on_commit: Callable[[ImportReport], None] | None = None,
) -> ImportReport:
    """Import rollouts into a store, which is created if it does not exist.

    Token ids and log-probs in a file are kept. Text is encoded once, at import, which `meta` records. Values that a
    file lacks remain unknown: behaviour log-probs are NaN (`RetrieveLogProb` computes them when the store is trained
    on), no end token is added, and no finish reason is invented. Rows are identified by their content
    (`imported_rows`): an import that was killed continues where it stopped when it is called again, a file that has
    grown adds only its new rows, and a file that was moved, renamed, compressed or copied adds no rows. TRL writes a
    generation into one table for each step that trains on it; of consecutive tables that differ only in `step`, only
    the first is imported.

    Args:
        files: files, folders, and saved Hugging Face datasets, see `rlhf_pipeline.data.files`; also `.pt` dumps.
        into: folder of the store.
        format: one of `rlhf_pipeline.exchange.tools.NAMES`; `auto` detects the format from the fields of the first row.
        tokenizer: a transformers tokenizer, or its folder or hub name; only needed for text without token ids.
        fields: target to field name or dotted path, for example `{"prompt": "question"}`; `none` excludes a target.
            `reward` may be a sum of fields with weights: `{"reward": "accuracy+0.5*format"}`.
        group: the field that identifies groups; or the number of consecutive rows per group; or `none` if groups of one
            trajectory each, which an import otherwise rejects, are intended.
        by_prompt: all rows of one prompt (and one version) form a group, regardless of their position in the file.
        source: a name for the training that wrote the files; it distinguishes equal rows of two trainings.
        chat_template: apply the tokenizer's chat template, if it has one, to text prompts, if the format allows it.
        one_turn: if the file does not record it, assume that completions without token ids contain no text from an
            environment.
        skip_bad: skip up to this many rows that cannot be read, and list them in the report.
        for_display: the rows are only displayed: values that an import would ask for remain unset, and are excluded
            from the loss.
        growing: a tool is still writing the files: an incomplete last line, and a file that cannot be read yet, are
            left for the next import.
        settled: files that are written again are complete, so stored rows that they lack are superseded; by default
            true if the files are not growing.
        durability: the durability of a new store; see `TrajectoryStore.create`.
        batch_rows: maximum number of trajectories per commit.
        on_file: called when a file's format is known.
        on_commit: called after every commit.

    Raises:
        MissingPathError: a file or the tokenizer does not exist.
        DefinitionError: the format, a field or the tokenizer is missing or wrong, or each group has one trajectory.
        DataError: a row is invalid; the message identifies it, and the rows before it are in the store.
        RunExistsError: another import writes to the store.
        StoreError: the store cannot be written.
    """
    check_format(format)
    field_paths = dict(fields or {})
    group = field_paths.pop("group", None) if group is None else group
    check_targets(field_paths)
    if by_prompt and group is not None:
        raise DefinitionError(
            f"--group-by prompt cannot be combined with group={group!r}, which specifies a field or a size. Omit one "
            "of the two."
        )
    how = _How(field_paths=field_paths, group=group, by_prompt=by_prompt, one_turn=one_turn, skip_bad=skip_bad)
    how = replace(how, source=source, for_display=for_display, growing=growing)
    how = replace(how, settled=not growing if settled is None else settled)
    with as_ours():
        encoder = Encoder(tokenizer, chat=chat_template)
    report = ImportReport(store=Path(into).expanduser())
    container = "jsonl" if format == "jsonl" else None
    with tempfile.TemporaryDirectory(prefix="rlhf-import-") as scratch:
        sources: list[DumpCandidate] = []
        for file in files:
            try:
                sources += find_dumps([file], container, scratch=Path(scratch))
            except (MissingPathError, FileNotFoundError):
                if not growing:
                    raise
                report.vanished.append(Path(file))
            except (DataError, DefinitionError) as error:  # its first bytes, or its end, may not be written yet
                if not growing:
                    raise
                report.unreadable[Path(file)] = str(error)
        sources = list({candidate.dump.path: candidate for candidate in reversed(sources)}.values())[::-1]
        plan = _recognise(sources, format, how, report)
        if plan or how.annotations:
            _import(plan, how, report, encoder, durability, batch_rows, on_file, on_commit)
    return report


def _import(
    plan: Sequence[_Item],
    how: _How,
    report: ImportReport,
    encoder: Encoder,
    durability: Literal["process", "power", "group"] | None,
    batch_rows: int,
    on_file: Callable[[FileReport], None] | None,
    on_commit: Callable[[ImportReport], None] | None,
) -> None:
    """Write the rows of files into the report's store, and count them."""
    exported = [item.reader for item in plan if isinstance(item.reader, Schema)]
    if exported and len(exported) != len(plan):
        raise DefinitionError("store exports and other files cannot be imported in one command.")
    columns = {column.name: column for schema in exported[::-1] for column in schema}
    checked: list[tuple[_Item, bool]] = []
    has_evaluations = False
    for item, before in zip(plan, [None, *plan], strict=False):
        try:
            repeats = before is not None and _repeats(item, before)
            has_evaluations |= isinstance(item.reader, Tool) and not repeats and _decide(item)
        except FileNotFoundError:
            if not item.how.growing:
                raise
            report.vanished.append(item.source.path)
        else:
            checked.append((item, repeats))
    if not checked and not (how.annotations and report.store.is_dir()):
        return
    extra = [*COLUMNS, *IDENTITY, *[EVALUATION][:has_evaluations], *[EFFECTIVE][: bool(how.annotations)]]
    schema = Schema(columns.values()) if exported else trajectory_schema(extra)
    if checked:
        _check_first(checked[0][0], encoder)

    def append(store: TrajectoryStore, item: _Item, new: Sequence[tuple[Mapping[str, Any], bool]]) -> Sequence[int]:
        ids = store.append_batch(batch_of(store.schema, [row for row, _ in new])).tolist()
        item.report.num_imported += len(new)
        for row, encoded in new:
            report.tally(row, encoded=encoded)
        if on_commit is not None:
            on_commit(report)
        return ids

    with open_target(report.store, schema, durability=durability) as store:
        imported = None if exported else ImportedRows(store)
        for item, repeated in checked:
            report.files.append(item.report)
            if on_file is not None:
                on_file(item.report)
            if repeated:
                continue
            if isinstance(item.reader, Schema):
                check_columns(store, item.reader)
                existing = ExistingRows(store)  # one export may contain rows that another one added
                for batch in _batches(_exported(item.source, item.reader), batch_rows):
                    is_stored = existing.find([where for where, _, _ in batch], [row for _, row, _ in batch])
                    new = [(row, encoded) for (_, row, encoded), old in zip(batch, is_stored, strict=True) if not old]
                    item.report.num_skipped += len(batch) - len(new)
                    if new:
                        append(store, item, new)
                continue
            assert imported is not None
            try:
                for batch in _batches(_converted(item, item.reader, encoder, imported), batch_rows):
                    imported.commit(append(store, item, [(row, encoded) for _, row, encoded in batch]))
                    _mark(store, item.report, imported.superseded())
            except FileNotFoundError:
                if not item.how.growing:
                    raise
                report.vanished.append(item.source.path)
                continue
            _supersede(store, item, imported)
        if imported is not None:
            _annotate(store, how, imported, report)


def _annotate(store: TrajectoryStore, how: _How, imported: ImportedRows, report: ImportReport) -> None:
    """Set what a tool wrote of stored trajectories after their episodes; the last advantage wins."""
    keys = FileKeys(how.source, "prime-rl")
    for source in how.annotations:
        advantages: dict[int, float] = {}
        effective = set[int]()
        try:
            for number, row in source.rows(growing=how.growing):
                with _naming(source, number):
                    for update in updates_of(row):
                        row_id = imported.row_of(keys.key_of(update.identity))
                        if row_id is None:
                            continue
                        if update.advantage is not None:
                            advantages[row_id] = update.advantage
                        if update.effective:
                            effective.add(row_id)
        except FileNotFoundError:
            if not how.growing:
                raise
            report.vanished.append(source.path)
        ids = np.asarray(sorted(advantages), np.int64)
        stored = store.read_scalars("advantage", ids) if len(ids) else np.zeros(0)
        values = np.asarray([advantages[row_id] for row_id in ids.tolist()], np.float32)
        changed = stored != values
        if changed.any():
            store.update(ids[changed], advantage=values[changed])
        marked = np.asarray(sorted(effective), np.int64)
        marked = marked[~np.asarray(store.read_scalars(EFFECTIVE.name, marked), bool)] if len(marked) else marked
        if len(marked):
            store.update(marked, effective=np.ones(len(marked), bool))


def _mark(
    store: TrajectoryStore, report: FileReport, superseded: Sequence[int], *, restored: Sequence[int] = ()
) -> None:
    """Mark rows as superseded, or as current again."""
    for rows, flag in ((superseded, True), (restored, False)):
        if rows:
            store.update(np.asarray(sorted(rows), np.int64), superseded=np.full(len(rows), flag))
    report.num_superseded += len(superseded)


def _supersede(store: TrajectoryStore, item: _Item, imported: ImportedRows) -> None:
    """Mark the stored rows of a file's units that the file lacks, if it is a complete newer version.

    While its writer is at work, a file is complete once it has as many rows as the store had of the unit.
    """
    for unit, (num_rows, num_before) in item.units.items():
        if not imported.is_newer(unit):
            continue
        if item.how.settled or num_rows >= num_before:
            _mark(store, item.report, imported.drop_missing(unit), restored=imported.restore(unit))
        else:
            item.report.awaits_rest = True


@contextlib.contextmanager
def _as_written(fields: Fields, tool: Tool) -> Iterator[None]:
    """Report any error of reading a row as a row that its tool does not write."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # whatever a row of foreign data may hold
        raise DataError(
            f"this row does not match the format of {tool.summary} ({type(error).__name__}: {error}). "
            f"{fields.describe_row()}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class _How:
    """How the user specifies that rows become records."""

    field_paths: Mapping[str, str]
    group: str | int | None
    by_prompt: bool
    one_turn: bool
    skip_bad: int
    source: str = ""
    for_display: bool = False
    growing: bool = False
    settled: bool = True
    beside: dict[Any, dict[Any, Any]] = field(default_factory=dict[Any, "dict[Any, Any]"])
    """The values for these in rows of other files."""
    annotations: list[Dump] = field(default_factory=list[Dump])
    """Files with later values of trajectories."""

    def fields(self, source: Dump, number: int, row: Row) -> Fields:
        return Fields(
            row,
            self.field_paths,
            path=source.path,
            number=number,
            one_turn=self.one_turn,
            for_display=self.for_display,
            beside=self.beside,
        )

    def unit(self, fields: Fields, tool: Tool) -> str:
        """Return the tool's name for the unit of a row."""
        with _as_written(fields, tool):
            return tool.unit(fields)

    def records(self, fields: Fields, tool: Tool) -> Iterator[RawRollout | None]:
        """Yield the records of a row, in the group that the user names."""
        with as_ours(), _as_written(fields, tool):
            yield from self._records(fields, tool)

    def _records(self, fields: Fields, tool: Tool) -> Iterator[RawRollout | None]:
        key = None
        if isinstance(self.group, str) and self.group != NONE and not self.group.isdecimal():
            key = ("group", str(fields.value(self.group)))
        for record in tool.read(fields):
            yield (
                record
                if record is None or key is None
                else replace(record, group=key, one_prompt=False, across_files=False)
            )

    def groups(self) -> FileGroups:
        in_turn = int(self.group) if self.group is not None and str(self.group).isdecimal() else None
        checked = not self.for_display and (self.group is None or (self.group != NONE and in_turn is None))
        return FileGroups(in_turn, by_prompt=self.by_prompt, checked=checked)


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
    source: Dump
    report: FileReport
    reader: Tool | Schema
    """The columns of an export of a store need no tool."""
    how: _How
    units: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """For each unit in the file: its rows, and those of its rows that were current in the store before."""


def _recognise(sources: Sequence[DumpCandidate], format: str, how: _How, report: ImportReport) -> list[_Item]:
    """Return which tool reads each file; the files that hold no rollouts are in the report."""
    plan: list[_Item] = []
    summaries: list[Dump] = []
    refusals: list[DataError | DefinitionError] = []
    for candidate in sources:
        try:
            item = _item(candidate, format, how, summaries)
        except FileNotFoundError:
            if not how.growing:
                raise
            report.vanished.append(candidate.dump.path)
            continue
        except (DataError, DefinitionError) as error:
            if candidate.is_named and not how.growing:
                raise
            refusals.append(error)
            if isinstance(error, DataError):
                report.unreadable[candidate.dump.path] = str(error)
            else:
                report.other_files.append(candidate.dump.path)
            continue
        if item is not None:
            plan.append(item)
    for source in summaries:
        for number, row in source.rows(growing=how.growing):
            with _naming(source, number):
                add_summary(how.beside, row)
    if not plan and not how.growing and not how.annotations:
        if refusals:
            raise refusals[0]
        if summaries:
            raise DefinitionError(
                f"{summaries[0].path} has rewards but no tokens. Also import the run's capture/sample.jsonl."
            )
        raise DataError(f"{', '.join(str(candidate.dump.path) for candidate in sources)}: there are no rows to import.")
    return plan


def _item(candidate: DumpCandidate, format: str, how: _How, summaries: list[Dump]) -> _Item | None:
    """Return how a file is read, from its first row; nothing for one without rows, or of rewards alone."""
    source = candidate.dump
    with contextlib.closing(source.rows(growing=how.growing)) as rows:
        number, row = next(rows, (0, None))
        if row is None or is_metadata(row):
            return None
        kinds = _filled(row, rows)
    if is_summary(row):
        summaries.append(source)
        return None
    if is_annotation(row):
        how.annotations.append(source)
        return None
    schema, mine = schema_of(source.unpacked if isinstance(source, ArchiveMember) else source), how
    try:
        tool = find_tool(format, row, is_export=schema is not None)
        if tool is None and how.field_paths:
            raise DefinitionError("the fields of a store export are fixed; omit --field.")
        if tool is not None:
            mine = replace(
                how, field_paths={**tool.first_row_tells(how.fields(source, number, kinds)), **how.field_paths}
            )
        if tool is ROWS and (how.growing or not candidate.is_named):
            next(ROWS.read(mine.fields(source, number, row)), None)  # is it a row at all?
        if tool is not None and tool.grows and how.growing:
            with contextlib.suppress(DefinitionError):  # raised when its turn comes
                next(how.records(mine.fields(source, number, row), tool), None)  # is its trial's result complete?
    except DefinitionError as error:
        raise DefinitionError(f"{source.path}: {error}") from None
    if tool is None:
        about = "all columns as they were exported"
        if schema is None:
            about = "the standard columns; the list of columns that the export wrote is missing"
        report = FileReport(path=source.path, format="store", about=about)
        return _Item(source=source, report=report, reader=schema or trajectory_schema(COLUMNS), how=how)
    report = FileReport(path=source.path, format=tool.name, lacks=tool.lacks)
    return _Item(source=source, report=report, reader=tool, how=mine)


def _filled(row: Row, rows: Iterator[tuple[int, Row]]) -> Row:
    """Return the first row with the values of the next ones where it has null, so that columns are distinguished."""
    filled = dict(row)
    if any(value is None for value in filled.values()):
        with contextlib.suppress(DataError):  # named when its turn comes
            for _, more in islice(rows, _LOOKED_AT):
                filled |= {name: value for name, value in more.items() if filled.get(name) is None}
    return filled


def _repeats(item: _Item, before: _Item) -> bool:
    """Return True, and report it, if a file's rows are those of the one before it, apart from one field."""
    but = item.reader.repeated_but if isinstance(item.reader, Tool) else ""
    if not but or (item.report.format, item.source.path.parent) != (before.report.format, before.source.path.parent):
        return False
    num = 0
    with contextlib.closing(item.source.rows()) as mine, contextlib.closing(before.source.rows()) as others:
        for pair in zip_longest(mine, others):  # side by side: files that differ do so in their first rows
            same = {
                repr([(k, v) for k, v in numbered_row[1].items() if k != but]) if numbered_row else ""
                for numbered_row in pair
            }
            if len(same) > 1:
                return False
            num += 1
    item.report.num_left_out = num
    item.report.about = f"repeats the rows of {before.source.path.name}, skipped"
    return True


def _decide(item: _Item) -> bool:
    """Read a file once before anything is stored: its groups, its summary, and whether it holds evaluations."""
    source, tool, how = item.source, item.reader, item.how
    assert isinstance(tool, Tool)
    groups, about, evaluates = how.groups(), {}, False
    with (
        contextlib.closing(source.rows(growing=how.growing, on_bad=lambda error: None)) as rows,
        contextlib.suppress(DataError),
    ):
        for number, row in rows:
            fields = how.fields(source, number, row)
            try:
                for record in how.records(fields, tool):
                    about = about or fields.about
                    if record is not None:
                        evaluates |= record.evaluation
                        groups.number(record, number)
            except DataError:
                continue  # named when its turn comes
            except DefinitionError as error:  # the user must specify something about the file
                where = source.where(number) if groups.num_members else source.path
                raise DefinitionError(f"{where}: {error}") from None
    try:
        if not how.growing:  # else the others may be still to come
            groups.check()
    except DefinitionError as error:
        raise DefinitionError(f"{source.path}: {error}") from None
    about = {**about, **how.field_paths} | ({} if how.group is None else {"group": str(how.group)})
    item.report.about = ", ".join(path if path == target else f"{target}={path}" for target, path in about.items())
    return evaluates


@contextlib.contextmanager
def _naming(source: Dump, number: int) -> Iterator[None]:
    """Prefix errors with the file and the row."""
    try:
        with as_ours():
            yield
    except (DataError, DefinitionError) as error:
        raise type(error)(f"{source.where(number)}: {error}") from error
    except RecursionError:
        raise DataError(f"{source.where(number)}: a value is nested too deeply to be stored.") from None


def _exported(source: Dump, schema: Schema) -> Rows:
    for number, row in source.rows(arrays=True):
        with _naming(source, number):
            # In Arrow what the store was not given is null; in JSON it is not there, and null is NaN.
            if source.container != "jsonl":
                row = {name: value for name, value in row.items() if value is not None}
            columns = from_row(schema, row)
        yield source.where(number), columns, False


def _converted(item: _Item, tool: Tool, encoder: Encoder, imported: ImportedRows) -> Rows:
    """Yield the rows of another tool's file that the store lacks, each with its identity."""
    source, report, how = item.source, item.report, item.how
    groups, keys = how.groups(), FileKeys(how.source, tool.name)
    imported.begin_file()
    item.units.clear()

    def bad(error: DataError) -> None:
        if len(report.bad) >= how.skip_bad:
            raise error
        report.bad.append(str(error))

    for number, source_row in source.rows(growing=how.growing, on_bad=bad):
        rows: list[tuple[Mapping[str, Any], bool]] = []
        left_out = num_stored = 0
        try:
            with _naming(source, number):
                fields = how.fields(source, number, source_row)
                name = how.unit(fields, tool)
                for record in how.records(fields, tool):
                    if record is None:
                        left_out += 1
                        continue
                    encoded = record.prompt_ids is None or record.completion_ids is None
                    unit = keys.unit(record, name)
                    grows = tool.grows and record.identity is not None
                    key, version = keys.key(record, unit, grows=grows), version_of(record, grows=grows)
                    group = keys.group(record, groups.number(record, number), key, unit)
                    row = encoder.row(record, {"file": str(source.path), "row": number, "format": report.format})
                    if encoded and (tokens := imported.stored_tokens(key)) is not None:
                        same = slice(row["num_prompt_tokens"] if grows else None)
                        _check_encoding(tokens[same], row["input_ids"][same])
                    if grows and imported.is_outdated(key, version, row):
                        num_stored += 1
                        continue
                    num_rows, num_before = item.units[unit] if unit in item.units else (0, imported.count(unit))
                    item.units[unit] = num_rows + 1, num_before
                    trajectory_id, is_new = imported.find(key, version, unit)
                    report.num_assumed_one_turn += not record.one_turn
                    if not is_new:
                        num_stored += 1
                        continue
                    identity = {
                        "import_key": key,
                        "import_version": version,
                        "import_unit": unit,
                        "import_group": group,
                    }
                    rows.append((row | identity | {NAME: trajectory_id, "group_id": imported.group(group)}, encoded))
        except DataError as error:
            bad(error)
            continue
        report.num_left_out += left_out
        report.num_skipped += num_stored
        for row, encoded in rows:
            yield source.where(number), row, encoded


def _check_encoding(stored: Any, encoded: Any) -> None:
    if not np.array_equal(stored, encoded):
        raise DataError(
            "this trajectory is already stored, encoded with a different tokenizer or template. A store never contains "
            "the same text in two encodings. Import into another store: --into OTHER_FOLDER"
        )


def _check_first(item: _Item, encoder: Encoder) -> None:
    """Raise what is wrong with the first rows, such as a field that none has, before a store is made for them."""
    if isinstance(item.reader, Tool):
        first = replace(item, report=replace(item.report, bad=[]), units={})
        next(_converted(first, item.reader, encoder, ImportedRows(None)), None)
