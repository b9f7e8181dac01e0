"""Upkeep: eviction, merging small segments, and removing what killed processes left.

Every change is one record of the catalog, put if absent. So upkeep by several processes at once cannot lose or double a
row: the one that comes second finds that the segments it merged no longer count, and discards its work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store.backend import Segment
from trajectory_store.batch import Batch
from trajectory_store.catalog import Catalog
from trajectory_store.catalog_log import Entry, State, owners_of, runs_of
from trajectory_store.columns import ColumnReader
from trajectory_store.errors import SegmentGoneError, StoreError
from trajectory_store.format import ORDINAL_SHIFT, ROW_ID, ROW_TIME, TARGET, SegmentMeta
from trajectory_store.ragged import Int64Array
from trajectory_store.rebuild import Unnamed, rebuild
from trajectory_store.root import MAX_ELEMENTS, MAX_ROWS, Root
from trajectory_store.schema import Schema
from trajectory_store.verify import VerifyReport

CHUNK_ROWS = 1024
FANOUT = 8
"""Number of small segments of similar size that are merged: a value is rewritten once per factor of 8 of growth."""

SUPERSEDED = 1 << 16
"""From this many updates on, a merge excludes superseded ones."""

LEASE_S = 120.0
TIDY_S = 600.0
"""The interval at which a process that begins no segment searches for small segments to merge, such as those of killed
processes.
"""

log = logging.getLogger("trajectory_store")


@dataclass(frozen=True)
class CompactReport:
    """The result of `compact`.

    Attributes:
        segments_before: segments of rows and updates before.
        segments_after: segments of rows and updates after.
        rows: trajectories that moved.
        bytes_before: disk space before.
        bytes_after: disk space after.
        skipped: the reason if nothing was done, otherwise empty.
    """

    segments_before: int
    segments_after: int
    rows: int
    bytes_before: int
    bytes_after: int
    skipped: str = ""


# Eviction


def evict(catalog: Catalog, root: Root) -> int:
    """Remove the oldest segments that the limits of the store no longer cover."""
    if root.max_trajectories is None and root.max_bytes is None:
        return 0
    catalog.refresh()
    victims = _victims(catalog, root)
    rows = sum(s.rows for s in victims)
    if not all(catalog.is_final(s) for s in victims) or sum(s.rows for s in victims) != rows:
        return 0  # the next new segment tries again
    if not victims:
        return 0
    gone = {s.ordinal for s in victims}
    useless = _useless_updates(catalog, gone)
    removed = _drop(catalog, gone | useless, {s.ordinal: s.rows for s in victims})
    return len(gone & removed)


def _drop(catalog: Catalog, ordinals: set[int], rows: dict[int, int]) -> set[int]:
    """Take segments out of the catalog and remove them; return those that this process took out.

    `rows` has the number of rows of each segment whose rows are lost for good. Unless the catalog still names all of
    these, nothing is removed: a segment merged since has its rows elsewhere, and their updates must stay.
    """
    removed: dict[int, Entry] = {}

    def step(state: State) -> State | None:
        removed.clear()
        removed.update({e.ordinal: e for e in state.entries if e.ordinal in ordinals})
        if not rows.keys() <= removed.keys():
            removed.clear()
        return state.dropped(removed.keys(), sum(rows.get(o, 0) for o in removed)) if removed else None

    if catalog.journal.change(step, catalog.newest_ns) is None:
        return set()
    _remove(catalog, removed.values())
    return set(removed)


def _remove(catalog: Catalog, entries: Iterable[Entry]) -> None:
    """Remove segments that the newest record no longer names, once that record is safe."""
    catalog.journal.sync()
    catalog.follow_state()
    for entry in entries:
        catalog.medium.remove(entry)


def _victims(catalog: Catalog, root: Root) -> list[Segment]:
    """The oldest segments that the limits no longer cover, oldest first."""
    spans = [(s.time_span(), s) for s in catalog.row_segments() if s.rows]
    spans.sort(key=lambda item: item[0][1])
    usage = {s.ordinal: s.disk_bytes() for _, s in spans} if root.max_bytes else {}
    total = sum(usage.values())
    victims: list[Segment] = []
    for (_, last), segment in spans:
        newer = sum(s.rows for (first, _), s in spans if first > last)
        dead = root.max_trajectories is not None and newer >= root.max_trajectories
        heavy = root.max_bytes is not None and total > root.max_bytes and newer > 0
        if not (dead or heavy) or segment.is_live():
            break
        victims.append(segment)
        total -= usage.get(segment.ordinal, 0)
    return victims


def _belong(state: State, targets: Int64Array, gone: Collection[int] = ()) -> npt.NDArray[np.bool_]:
    """Return which updates belong to rows that count, including unreadable rows and rows not in this record yet."""
    owners = targets >> ORDINAL_SHIFT
    belongs = owners >= state.next_ordinal
    for first, last in owners_of([e for e in state.entries if e.kind == "rows" and e.ordinal not in gone]):
        belongs |= (first <= owners) & (owners <= last)
    return belongs


def _useless_updates(catalog: Catalog, gone: set[int]) -> set[int]:
    """Return the finished update segments whose trajectories are all gone."""
    out: set[int] = set()
    for update in list(catalog.updates.values()):
        if catalog.is_final(update) and not _belong(catalog.state, update.array(TARGET)[: update.rows], gone).any():
            out.add(update.ordinal)
    return out


# Merging


def compact(catalog: Catalog, root: Root) -> CompactReport:
    """Merge finished segments into few; ids, the order of arrival and every value stay.

    Segments that a living process appends to stay unchanged. Superseded updates are excluded.
    """
    before, bytes_before, moved = len(catalog.segments) + len(catalog.updates), _disk_bytes(catalog), 0
    with _claim(catalog) as mine:
        if not mine:
            return CompactReport(
                before, before, 0, bytes_before, bytes_before, "another process is compacting the store"
            )
        still = [s for s in catalog.row_segments() if catalog.is_final(s)]
        updates = [s for s in catalog.updates.values() if catalog.is_final(s)]
        _drop(catalog, {s.ordinal for s in _sound(catalog, [s for s in (*still, *updates) if not s.rows])}, {})
        still, updates = (_sound(catalog, [s for s in some if s.rows]) for some in (still, updates))
        for group in _packed(still, *_most(root)):
            if len(group) > 1 or not (catalog.medium.complete or group[0].meta.merged):
                moved += sum(s.rows for s in group) if _merge(catalog, group) else 0
        for same in _by_columns(updates):
            for group in _packed(same, MAX_ROWS, MAX_ELEMENTS):
                _merge(catalog, group, superseded=True)
    catalog.refresh()
    after = len(catalog.segments) + len(catalog.updates)
    return CompactReport(before, after, moved, bytes_before, _disk_bytes(catalog))


def fold(catalog: Catalog, root: Root, stop: Callable[[], bool] = lambda: False) -> int:
    """Merge small finished segments of similar size while there are enough of them; return the number of merges.

    If a merge is due, at least one is made, even if asked to stop: so a process that only appends once does its share.
    A store that was opened for appending n times has about `8 * log8(n)` segments, and each row was moved `log8(n)`
    times.
    """
    merges = 0
    with _claim(catalog) as mine:
        while mine and not (merges and stop()) and (group := _due(catalog, root, sealing=True)):
            sound = _sound(catalog, group)
            if len(sound) < len(group):
                continue  # without the damaged ones, others may be due
            if not _merge(catalog, group, superseded=sum(s.rows for s in group) >= SUPERSEDED):
                break
            merges += 1
    return merges


def _due(catalog: Catalog, root: Root, *, sealing: bool) -> list[Segment]:
    """Return the small segments of similar size to merge next; empty if there are not enough."""
    most = _most(root)
    kinds = [catalog.row_segments(), *_by_columns(catalog.updates.values())]
    for every in kinds:
        segments = [s for s in every if not (s.is_unfit or s.gaps)]
        if not catalog.medium.complete:
            for segment in segments:
                if segment.records >= catalog.medium.bucket.many and segment.finished and not segment.meta.merged:
                    return [segment]
        tiers: dict[int, list[Segment]] = {}
        for segment in segments:
            tiers.setdefault(_tier(segment), []).append(segment)
        for _, members in sorted(tiers.items()):
            if len(members) < FANOUT:
                continue
            still = [s for s in members if (catalog.is_final(s) if sealing else not s.is_live())]
            group = max([[], *_packed(still, *most)], key=len)
            if len(group) >= FANOUT:
                return group
    return []


def _tier(segment: Segment) -> int:
    """Return the size of a segment as a power of the fan-out; -1 for an empty one."""
    weight = max(segment.rows, *(n // 256 for n in segment.elements().values()), 0) if segment.rows else 0
    return -1 if not weight else (weight.bit_length() - 1) // (FANOUT.bit_length() - 1)


def _most(root: Root) -> tuple[int, int]:
    """Return the rows, and the elements per axis, of the largest merged segment."""
    rows, elements = root.largest
    if root.max_trajectories is not None or root.max_bytes is not None:  # segments are evicted whole
        return root.segment_rows or rows, root.segment_elements or elements
    return rows, elements


def recover(catalog: Catalog) -> None:
    """Bring the catalog in line with the segments that are there; the caller holds the upkeep lock.

    Segments that lost records named are named again, a finished merge whose record was lost takes the place of its
    sources, and segments whose writers died are ended, so that they need not be checked by everybody who opens.
    """
    catalog.refresh()
    journal, medium = catalog.journal, catalog.medium
    unnamed_segments, failed, sound = medium.survey(journal.state), set(catalog.failed), dict[int, bool]()

    def is_sound(segment: Unnamed) -> bool:
        if segment.entry.ordinal not in sound:
            sound[segment.entry.ordinal] = _holds(catalog, segment)
        return sound[segment.entry.ordinal]

    def step(state: State) -> State | None:
        after = rebuild(state, unnamed_segments, failed, is_sound)
        return None if after == state and journal.is_sound else after

    journal.change(step, catalog.newest_ns)
    catalog.refresh()
    dead: dict[int, int] = {}
    for segment in (*catalog.segments.values(), *catalog.updates.values()):
        with suppress(SegmentGoneError):  # another process evicts it
            if medium.close_dead(segment):
                dead[segment.ordinal] = segment.rows
            catalog.refresh_segment(segment.ordinal)
    if dead:
        journal.change(lambda state: _with_rows(state, dead), catalog.newest_ns)
        catalog.refresh()


def recover_claimed(catalog: Catalog) -> None:
    """Bring the catalog in line where there are no locks, if a record or a segment is lost."""
    if not catalog.journal.is_sound or catalog.unopened:
        with _claim(catalog) as mine:
            if mine:
                recover(catalog)


def _with_rows(state: State, rows: Mapping[int, int]) -> State | None:
    """Return a state that knows how many rows some segments have for good."""
    entries = tuple(replace(e, rows=rows[e.ordinal]) if e.ordinal in rows else e for e in state.entries)
    return None if entries == state.entries else replace(state, entries=entries)


def _holds(catalog: Catalog, unnamed: Unnamed) -> bool:
    """Return whether all checksums of a segment hold that the catalog does not name."""
    report = VerifyReport(catalog.medium.where)
    entry = replace(unnamed.entry, owners=runs_of(sorted(unnamed.sources)))
    segment = catalog.medium.open_segments([entry])[0]
    if not isinstance(segment, Segment):
        return False
    catalog.medium.check_segments([segment], report)
    return report.ok


def undamaged_segments(catalog: Catalog) -> set[int]:
    """Return the segments that are there without any damage that is known."""
    every = (*catalog.segments.values(), *catalog.updates.values())
    return {segment.ordinal for segment in every if not segment.gaps}


def accept_losses(catalog: Catalog, ids: Int64Array | None = None) -> int:
    """Record that the owner of the store accepts the loss of rows, and of updates of them, that are damaged now.

    Returns:
        The number of commits that were accepted: those with one of the ids, or all.
    """
    lost: dict[int, set[tuple[int, int]]] = {}
    for segment in (*catalog.segments.values(), *catalog.updates.values()):
        for gap in segment.lost:
            is_selected = ids is None or np.isin(segment.gap_ids(gap), ids).any()
            if is_selected and segment.is_damage(
                gap
            ):  # of a commit whose rows are not known, the row that it begins with
                lost.setdefault(segment.ordinal, set()).add((gap.first, max(gap.first, gap.end - 1)))

    def step(state: State) -> State | None:
        entries = tuple(
            replace(e, accepted=tuple(sorted({*e.accepted, *lost.get(e.ordinal, ())}))) for e in state.entries
        )
        return None if entries == state.entries else replace(state, entries=entries)

    if catalog.journal.change(step, catalog.newest_ns) is not None:
        catalog.follow_state()
    return sum(map(len, lost.values()))


def _by_columns(updates: Iterable[Segment]) -> list[list[Segment]]:
    """Group update segments by the columns that they hold."""
    out: dict[tuple[str, ...], list[Segment]] = {}
    for segment in sorted(updates, key=lambda s: s.ordinal):
        out.setdefault(segment.schema.names, []).append(segment)
    return list(out.values())


def _packed(segments: list[Segment], most_rows: int, most_elements: int) -> list[list[Segment]]:
    """Split segments into runs that each fit one full segment."""
    groups: list[list[Segment]] = []
    rows = 0
    elements: dict[str, int] = {}
    for segment in segments:
        used = segment.elements() if segment.rows else {}
        total = {a: elements.get(a, 0) + used.get(a, 0) for a in {*elements, *used}}
        fits = rows + segment.rows <= most_rows and all(n <= most_elements for n in total.values())
        if not groups or not fits:
            groups.append([])
            rows, total = 0, dict(used)
        groups[-1].append(segment)
        rows, elements = rows + segment.rows, total
    return groups


def _sound(catalog: Catalog, group: list[Segment]) -> list[Segment]:
    """Return the segments in which all checksums hold; mark the others as unfit for a merge.

    A merge would copy damage into a segment whose new checksums hide it, and remove what may be repaired.
    """
    out: list[Segment] = []
    for segment in group:
        report = VerifyReport(catalog.medium.where)
        catalog.medium.check_segments([segment], report)
        if not report.problems and not report.losses and not segment.gaps:
            out.append(segment)
            continue
        segment.is_unfit = True
        catalog.refresh()
        if segment in (catalog.segments.get(segment.ordinal), catalog.updates.get(segment.ordinal)):
            what = (*report.problems, *report.losses, "rows are missing")[0]
            log.warning("a damaged segment was not merged: %s. Run verify().", what)
    return out


def _merge(catalog: Catalog, group: list[Segment], *, superseded: bool = False) -> bool:
    """Merge segments of one kind into one that takes their place; return whether that was done.

    Updates must have the same columns; `superseded` excludes those of them that a newer one supersedes, and those of
    rows that are gone.
    """
    ids = np.concatenate([s.row_ids(0, s.rows) for s in group])
    extra = {ROW_ID: ids, ROW_TIME: np.concatenate([s.row_times() for s in group])}
    ordinals = np.repeat([s.ordinal for s in group], [s.rows for s in group])
    rows = np.concatenate([np.arange(s.rows) for s in group])
    order = np.argsort(ids)
    if group[0].meta.kind == "update":
        targets = extra[TARGET] = np.concatenate([s.array(TARGET)[: s.rows] for s in group])
        order = np.lexsort((ids, extra[ROW_TIME]))
        if superseded:
            last = _last_of(catalog, targets[order])
            if len(group) == 1 and group[0].meta.merged and last.all():
                return False
            order = order[last]
    extra = {name: values[order] for name, values in extra.items()}
    return _write_merged(catalog, group, ordinals[order], rows[order], extra)


def _last_of(catalog: Catalog, targets: Int64Array) -> npt.NDArray[np.bool_]:
    """Return which updates are the last ones of their rows, except those whose rows are gone."""
    last = np.zeros(len(targets), bool)
    last[len(targets) - 1 - np.unique(targets[::-1], return_index=True)[1]] = True
    return last & _belong(catalog.state, targets)


def _write_merged(
    catalog: Catalog, group: list[Segment], ordinals: Int64Array, rows: Int64Array, extra: dict[str, Int64Array]
) -> bool:
    """Write rows of segments to a new one that takes their place; return False if another process was first."""
    names = {c.name for s in group for c in s.schema}
    schema = catalog.state.schema.only(names)
    sources = {s.ordinal for s in group}
    if not len(rows):
        return bool(_drop(catalog, sources, {}))
    reader = ColumnReader.of_rows(catalog, ordinals, rows)
    meta = SegmentMeta(
        schema=schema,
        rows_cap=len(rows),
        elems_cap={axis: max(1, int(reader.spans(columns[0]).lengths.sum())) for axis, columns in schema.axes.items()},
        kind=group[0].meta.kind,
        merged=True,
        durability="power",
        store=catalog.state.store,
        sources=tuple(sorted(source for s in group for source in s.meta.sources or ((s.ordinal, s.rows),))),
    )
    reserved = catalog.journal.change(lambda s: replace(s, next_ordinal=s.next_ordinal + 1), catalog.newest_ns)
    if reserved is None:
        return False
    entry = Entry(reserved.next_ordinal - 1, meta.kind, meta.salt, merged=True, rows=len(rows))

    def parts() -> Iterator[Batch]:
        for first in range(0, len(rows), CHUNK_ROWS):
            part = slice(first, first + CHUNK_ROWS)
            batch = read_batch(ColumnReader.of_rows(catalog, ordinals[part], rows[part]), schema).fitted(schema)
            batch.extra = {name: values[part] for name, values in extra.items()}
            yield batch

    try:
        catalog.medium.write_merged(entry, meta, parts())
    except BaseException:
        _discard(catalog, entry)
        raise

    def step(state: State) -> State | None:
        old = [e for e in state.entries if e.ordinal in sources]
        if len(old) < len(sources):
            return None
        if catalog.claim is not None and (state.claim is None or state.claim[0] != catalog.claim):
            return None  # the claim expired, and its new owner may have swept the new segment away
        return state.without(sources).with_entry(replace(entry, owners=owners_of(old)))

    before = {e.ordinal: e for e in catalog.state.entries if e.ordinal in sources}
    done = catalog.journal.change(step, catalog.newest_ns) or catalog.journal.state
    if not any((e.ordinal, e.salt) == (entry.ordinal, entry.salt) for e in done.entries):
        _discard(catalog, entry)
        return False
    _remove(catalog, before.values())
    return True


def _discard(catalog: Catalog, entry: Entry) -> None:
    """Remove a merged segment that will not count; a later sweep removes what this cannot."""
    with suppress(StoreError):
        catalog.medium.remove(entry)


def read_batch(reader: ColumnReader, schema: Schema) -> Batch:
    """Read whole rows in the form in which they are written; columns without a value in any row are omitted."""
    batch = Batch(len(reader.ids), {}, {})
    for column in schema:
        present = reader.present(column)
        if column.optional and not present.any():
            continue
        if not present.all():
            batch.partial[column.name] = present
        if column.axis is None:
            batch.values[column.name] = reader.scalars(column)
            continue
        ragged = reader.ragged(column)
        batch.values[column.name] = ragged.values.reshape(-1)
        batch.lengths[column.axis] = ragged.lengths
    return batch


def _disk_bytes(catalog: Catalog) -> int:
    return sum(s.disk_bytes() for s in (*catalog.segments.values(), *catalog.updates.values()))


def sweep(catalog: Catalog, state: State) -> None:
    """Remove what killed processes left behind, on the word of a record that could be read and is safe."""
    if catalog.journal.is_sound and catalog.journal.state.number >= state.number:
        catalog.journal.put_copy()
        catalog.medium.sweep(state, undamaged_segments(catalog))


# The upkeep claim


@contextmanager
def _claim(catalog: Catalog) -> Generator[bool]:
    """Hold the upkeep claim, which avoids double work and protects an unfinished merge from a sweep.

    At the end, it removes what killed processes left, as of a record with this claim. The owner of a later claim may be
    writing a merged segment that no record names yet; its number is above those that the last record with this claim
    knew, so the sweep spares it.
    """
    with catalog.medium.bucket.upkeep_lock() as mine:
        owner = fs.token(8) if mine is None else None
        if mine is False or (owner is not None and not _take_lease(catalog, owner)):
            yield False
            return
        catalog.claim = owner
        try:
            catalog.refresh()
            yield True
            state = catalog.state
            if owner is None or (state.claim is not None and state.claim[0] == owner):
                sweep(catalog, state)
        finally:
            catalog.claim = None
            if owner is not None:
                catalog.journal.change(lambda s: replace(s, claim=None) if s.claim and s.claim[0] == owner else None)


def _take_lease(catalog: Catalog, owner: str) -> bool:
    def step(state: State) -> State | None:
        now = time.time_ns()
        if state.claim is not None and now < state.claim[1] < now + int(2e9 * LEASE_S):
            return None
        return replace(state, claim=(owner, now + int(1e9 * LEASE_S)))

    return catalog.journal.change(step, catalog.newest_ns) is not None


class Background:
    """Upkeep beside a process that appends: small segments are merged in a separate thread."""

    def __init__(self, look_in: Callable[[], AbstractContextManager[Catalog]], root: Root) -> None:
        self._look_in = look_in
        self._root = root
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._looked = time.monotonic()

    def tidy(self, catalog: Catalog, *, began: bool) -> None:
        """After a commit that began a segment, evict what exceeds the limits; then and now and then, merge what is due.

        The rows are committed by then, so a failure here must not look like a failed append.
        """
        now = time.monotonic()
        if not began and now - self._looked < TIDY_S:
            return
        self._looked = now
        try:
            if began:
                evict(catalog, self._root)
            if (self._thread is None or not self._thread.is_alive()) and _due(catalog, self._root, sealing=False):
                self._thread = threading.Thread(target=self._run, name="trajectory-upkeep", daemon=True)
                self._thread.start()
        except SegmentGoneError:  # another process is doing the same
            return
        except (StoreError, OSError) as error:
            fs.pass_external(error)
            log.warning("upkeep failed and will be retried later: %s", error)

    def _run(self) -> None:
        try:
            with self._look_in() as catalog:
                fold(catalog, self._root, self._stop.is_set)
        except (StoreError, OSError) as error:
            log.warning("merging small segments failed and will be retried later: %s", error)

    def pause(self) -> None:
        """Wait for the current merge; the next one begins when one is due again."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self._thread = None
        self._stop.clear()
