"""Later values: which update holds the newest value of a column for each trajectory, and those values folded in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store.backend import Segment
from trajectory_store.catalog import Catalog
from trajectory_store.errors import SnapshotGoneError
from trajectory_store.format import ORDINAL_SHIFT, ROW_ID, ROW_MASK, TARGET
from trajectory_store.ragged import Int64Array, distinct
from trajectory_store.schema import Column
from trajectory_store.snapshot import within

News = tuple[Int64Array, Int64Array, Int64Array]
"""Updates: their targets, addresses and times."""

_NONE: Int64Array = np.empty(0, np.int64)

NOT_SEEN_YET = 1 << 20
"""Number of rows beyond the known rows of a segment for which there may be updates, because commits are read one after
another. The tables have space for these rows; the limit prevents a damaged target from exhausting memory.
"""


def _keeps_all(segment: Segment, owners: Int64Array, limits: Mapping[int, int]) -> bool:
    """Return whether a merged segment still has every update of a snapshot that its sources had.

    The snapshot has `limits` updates per segment; `owners` names the segment that each of those here was written to.
    """
    left = dict(zip(*(n.tolist() for n in np.unique(owners, return_counts=True)), strict=True))
    return all(left.get(o, 0) == limits.get(o, 0) for a, b in segment.owners for o in range(a, b + 1))


def _joined(news: Sequence[News]) -> News:
    targets, addresses, times = (np.concatenate(parts) for parts in zip(*news, strict=True))
    return targets, addresses, times


def _picked(news: News, count: npt.NDArray[np.bool_]) -> News:
    targets, addresses, times = news
    return news if count.all() else (targets[count], addresses[count], times[count])


class Later:
    """The newest update of one column, per trajectory.

    Updates are ordered by commit time, then by first address, so every reader ends with the same values, in whatever
    order it read the commits.
    """

    def __init__(self, catalog: Catalog, column: Column, limits: Mapping[int, int] | None = None) -> None:
        self.column = column
        self._catalog = catalog
        self._limits = limits
        self._read_up_to: dict[int, tuple[int, int]] = {}
        self._address: dict[int, Int64Array] = {}
        self._time: dict[int, Int64Array] = {}
        self._folded: dict[int, npt.NDArray[Any]] = {}
        self._rows: dict[int, int] = {}
        self._news: list[tuple[Int64Array, Int64Array]] = []
        self._waiting: News = (_NONE, _NONE, _NONE)
        self._generation = -1
        self.catch_up()

    def __bool__(self) -> bool:
        return bool(self._address)

    def catch_up(self) -> bool:
        """Read the new updates; return False if segments are gone, so that all must be read again."""
        generation, segments = self._catalog.generation, self._catalog.updates
        if generation == self._generation:
            return True
        if any(ordinal not in segments for ordinal in self._read_up_to):
            return False
        news_parts = [self._waiting] if len(self._waiting[0]) else []
        read_to: dict[int, tuple[int, int]] = {}
        for ordinal in sorted(segments):
            segment = segments[ordinal]
            records, rows = self._read_up_to.get(ordinal, (0, 0))
            if segment.rows == rows or self.column.name not in segment.schema:
                continue
            read_to[ordinal] = (segment.records, segment.rows)
            news_parts.append(self._read(segment, records, rows))
        waiting = self._waiting
        if news_parts:
            news, waiting = self._split(news_parts[0] if len(news_parts) == 1 else _joined(news_parts))
            self._apply(*news, ordered=len(news_parts) == len(read_to) == 1)
        self._read_up_to.update(read_to)  # only now: if reading failed because a segment is gone, all is read again
        self._waiting = waiting
        self._fold_news()
        self._generation = generation
        return True

    def _read(self, segment: Segment, records: int, first: int) -> News:
        """Return the updates of a segment from row `first` on."""
        targets = np.array(segment.array(TARGET)[first : segment.rows])
        base = segment.ordinal << ORDINAL_SHIFT
        addresses = np.arange(base + first, base + segment.rows, dtype=np.int64)
        times = segment.row_times(records, first)
        count = (targets >= 0) & (times >= 0)
        if self._limits is not None:
            sources = segment.row_ids(first, segment.rows)
            inside = within(self._limits, sources)
            lacks, owners = bool((count & ~inside).any()), (sources >> ORDINAL_SHIFT)[count & inside]
            if segment.meta.merged and lacks and not _keeps_all(segment, owners, self._limits):
                raise SnapshotGoneError(
                    f"a merge removed the values that column '{self.column.name}' had in this snapshot. Read "
                    "without the snapshot, or use snapshots taken after the last compact()."
                )
            count &= inside
        return _picked((targets, addresses, times), count)

    def _split(self, unsorted_news: News) -> tuple[News, News]:
        """Return the updates of rows that may be known, and those that wait until they are.

        The catalog is read before the commits, so an update may be newer than the record that names its row's segment.
        A damaged target waits for ever; `verify` reports it.
        """
        ordinals, rows = self._catalog.state.next_ordinal, self._catalog.watermark() + NOT_SEEN_YET
        count = (unsorted_news[0] >> ORDINAL_SHIFT < ordinals) & (unsorted_news[0] & ROW_MASK < rows)
        return (
            (_picked(unsorted_news, count), _picked(unsorted_news, ~count))
            if not count.all()
            else (unsorted_news, (_NONE, _NONE, _NONE))
        )

    def _apply(self, targets: Int64Array, addresses: Int64Array, times: Int64Array, *, ordered: bool) -> None:
        if not ordered:
            order = np.lexsort((self._sources(addresses), times))
            targets, addresses, times = targets[order], addresses[order], times[order]
        owners = targets >> ORDINAL_SHIFT
        first = int(owners[0]) if len(owners) else 0
        single_owner = bool((owners == first).all())
        for owner in [first] if single_owner else distinct(owners):
            mine = slice(None) if single_owner else owners == owner
            self._apply_to(owner, targets[mine], addresses[mine], times[mine])

    def _apply_to(self, owner: int, targets: Int64Array, addresses: Int64Array, times: Int64Array) -> None:
        if not len(targets):
            return
        where = targets & ROW_MASK
        self._grow(owner, int(where.max()) + 1)
        newest_times, place = self._time[owner], self._address[owner]
        before = newest_times[where]
        newer = times > before
        tied = np.flatnonzero(times == before)
        if len(tied):
            newer[tied] = self._sources(addresses[tied]) > self._sources(place[where[tied]])
        newest_times[where[newer]] = times[newer]
        place[where[newer]] = addresses[newer]
        if self._folded:
            self._news.append((targets[newer], addresses[newer]))

    def _sources(self, addresses: Int64Array) -> Int64Array:
        """Return where updates were first written: merging does not change which of two with the same time counts."""
        out, owners = addresses.copy(), addresses >> ORDINAL_SHIFT
        for owner in distinct(owners):
            segment = self._catalog.any_segment(owner)
            if segment.meta.merged:
                mine = owners == owner
                out[mine] = segment.array(ROW_ID)[addresses[mine] & ROW_MASK]
        return out

    def _grow(self, owner: int, size: int) -> None:
        for table in (self._address, self._time):
            column_table = table.get(owner)
            if column_table is None or len(column_table) < size:
                grown = np.full(max(size, 2 * (0 if column_table is None else len(column_table)), 64), -1, np.int64)
                if column_table is not None:
                    grown[: len(column_table)] = column_table
                table[owner] = grown

    def lookup(self, ids: Int64Array) -> Int64Array:
        """Return the address (ordinal above row) of the newest update of each row, or -1: `[B]` int64."""
        out = np.full(len(ids), -1, np.int64)
        if not self._address:
            return out
        owners, rows = ids >> ORDINAL_SHIFT, ids & ROW_MASK
        for owner in distinct(owners):
            addresses = self._address.get(owner)
            if addresses is not None:
                where = np.flatnonzero((owners == owner) & (rows < len(addresses)))
                out[where] = addresses[rows[where]]
        return out

    # Scalars: the newest values in arrays like the base, so that reading them costs no more than reading the base.

    def _values_at(self, addresses: Int64Array) -> npt.NDArray[Any]:
        """Return the values of updates."""
        out = np.empty(len(addresses), self.column.np_dtype)
        owners, rows = addresses >> ORDINAL_SHIFT, addresses & ROW_MASK
        for owner in distinct(owners):
            mine = owners == owner
            out[mine] = self._catalog.any_segment(owner).array(self.column.name)[rows[mine]]
        return out

    def _fold_news(self) -> None:
        """Bring the folded arrays up to date."""
        for gone in [home for home in self._folded if home not in self._catalog.segments]:
            del self._folded[gone]
            self._rows.pop(gone, None)
        if not self._news:
            return
        targets, addresses = (np.concatenate(parts) for parts in zip(*self._news, strict=True))
        ordinals, rows = self._catalog.find(targets)
        new = self._values_at(addresses)
        for home, array in self._folded.items():
            inside = (ordinals == home) & (rows < self._rows.get(home, 0))
            array[rows[inside]] = new[inside]
        self._news = []

    def forget_segment(self, ordinal: int) -> None:
        """Forget the values that were read of a segment; of one of updates, everything."""
        self._folded.pop(ordinal, None)
        self._rows.pop(ordinal, None)
        if ordinal in self._read_up_to:
            self.__init__(self._catalog, self.column, self._limits)

    def folded(self, segment: Segment) -> npt.NDArray[Any]:
        """Return the newest values of a scalar column in a segment: an array at least as long as its rows."""
        done, rows = self._rows.get(segment.ordinal, 0), segment.rows
        if done < rows:
            array = self._folded.get(segment.ordinal)
            if array is None or len(array) < rows:
                grown = np.empty(rows if segment.finished else max(64, 2 * rows), self.column.np_dtype)
                if array is not None:
                    grown[:done] = array[:done]
                array = self._folded[segment.ordinal] = grown
            array[done:rows] = segment.values(self.column)[done:rows]
            if segment.meta.merged:
                later = self.lookup(segment.row_ids(done, rows))
            else:
                later = self._address.get(segment.ordinal, _NONE)[done:rows]
            hit = np.flatnonzero(later >= 0)
            if len(hit):
                array[done + hit] = self._values_at(later[hit])
            self._rows[segment.ordinal] = rows
        return self._folded[segment.ordinal]


def later_of(catalog: Catalog, column: Column) -> Later | None:
    """Return the later values of a column, up to date, or None if there are none."""
    if not catalog.updates:
        return None
    with catalog.lock:
        later = catalog.later_values.get(column.name)
        if later is None or not later.catch_up():
            later = catalog.later_values[column.name] = Later(catalog, column)
        return later if later else None
