"""Reading rows: from ids to padded or ragged arrays.

Rows are copied by assigning slices of memoryviews, which is as fast as a bare row copy; numpy's own memmap objects
cost twelve times as much per slice. Work that does not depend on the column is done once per batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import getitem
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trajectory_store.backend import Part, Rows, Segment
from trajectory_store.catalog import Catalog
from trajectory_store.errors import BatchError, CorruptionError, DamageFoundError, SchemaError
from trajectory_store.file_access import AHEAD, will_need
from trajectory_store.format import ORDINAL_SHIFT, ROW_MASK, TARGET, offsets_name
from trajectory_store.pool import BufferPool
from trajectory_store.ragged import Int64Array, RaggedArray
from trajectory_store.schema import Column
from trajectory_store.updates import Later, later_of

Side = Literal["left", "right"]
P = ParamSpec("P")
R = TypeVar("R")
_NONE = np.empty(0, np.int64)
_FEW = 4
"""For up to this many rows of one segment, touching the rows first takes longer than it saves."""


class Places:
    """The rows of a batch, segment by segment.

    "Run order" is the order of the runs one after another; it is the order of the batch if one segment has all rows.

    Attributes:
        order: `[B]` the position in the batch of each row in run order; None if the orders agree.
        runs: per segment, its ordinal and the rows in it.
        edges: where each run begins in run order, and where the last one ends.

    >>> places = Places(np.array([5, 2, 5]), np.array([0, 1, 7]))
    >>> [(ordinal, rows.tolist()) for ordinal, rows in places.runs]
    [(2, [1]), (5, [0, 7])]
    >>> tables = {2: np.arange(2), 5: np.arange(10) * 10}
    >>> places.restore(places.gather(tables)).tolist()
    [0, 1, 70]
    """

    def __init__(self, ordinals: Int64Array, rows: Int64Array) -> None:
        self.ordinals = ordinals
        self.rows = rows
        self.order: Int64Array | None = None
        self.edges = [0]
        self.runs: list[tuple[int, Rows]] = []
        if not len(rows):
            return
        if np.count_nonzero(ordinals[1:] < ordinals[:-1]):  # else they are in run order already, as arriving rows are
            self.order = ordinals.argsort(kind="stable")
            ordinals, rows = ordinals[self.order], rows[self.order]
        self.edges = [0, *(np.flatnonzero(ordinals[1:] != ordinals[:-1]) + 1).tolist(), len(rows)]
        self.runs += [(int(ordinals[a]), rows[a:b]) for a, b in itertools.pairwise(self.edges)]

    @classmethod
    def of_runs(cls, runs: Sequence[tuple[int, int, int]]) -> Places:
        """Build from runs `(segment, first row, number of rows)`, without a look-up."""
        places = cls.__new__(cls)
        places.order = None
        places.edges = list(itertools.accumulate((count for *_, count in runs), initial=0))
        places.runs = [(ordinal, slice(first, first + count)) for ordinal, first, count in runs]
        return places

    @cached_property
    def ordinals(self) -> Int64Array:
        """`[B]` int64: the segment of each row, in the order of the batch."""
        return np.repeat([ordinal for ordinal, _ in self.runs], np.diff(self.edges))

    @cached_property
    def rows(self) -> Int64Array:
        """`[B]` int64: each row's number in its segment."""
        return np.concatenate([_NONE, *(np.r_[rows] for _, rows in self.runs)])

    @cached_property
    def inverse(self) -> Int64Array:
        """`[B]` int64: the position in run order of each row of the batch."""
        inverse = np.empty(len(self.rows), np.int64)
        inverse[self.order] = np.arange(len(inverse))
        return inverse

    def restore(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reorder values from run order to the order of the batch."""
        return values if self.order is None else values[self.inverse]

    def gather(self, tables: Mapping[int, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Pick the batch's values, in run order, from the values of all rows of each segment."""
        parts = [tables[ordinal][rows] for ordinal, rows in self.runs]
        return parts[0] if len(parts) == 1 and isinstance(self.runs[0][1], np.ndarray) else np.concatenate(parts)


class Spans:
    """The location of the elements of rows on one axis.

    Args:
        places: the rows.
        edges: `[B, 2]` int64, in run order: the first element in the segment and one past the last.

    Attributes:
        starts: `[B]` int64, in run order: the first elements.
        ends: `[B]` int64, in run order: one past the last.
        lengths: `[B]` int64, in the order of the batch.
        width: the length of the longest row; a negative length counts as a huge one.
    """

    def __init__(self, places: Places, edges: Int64Array) -> None:
        self.places = places
        self.starts: Int64Array
        self.ends: Int64Array
        self.starts, self.ends = edges.T.copy()
        self._counts = self.ends - self.starts
        self.lengths: Int64Array = places.restore(self._counts)
        self.width = int(np.maximum.reduce(self.lengths.view(np.uint64))) if len(self.lengths) else 0
        self._zeros: dict[tuple[int, int], list[memoryview]] = {}

    @cached_property
    def parts(self) -> tuple[list[int], list[slice]]:
        """The segment of each row and its elements in it, in the order of the batch."""
        starts, ends = self.places.restore(self.starts), self.places.restore(self.ends)
        return self.places.ordinals.tolist(), list(map(slice, starts.tolist(), ends.tolist()))

    def blanks(self, column: Column, width: int, pad: Any, pool: BufferPool) -> list[memoryview]:
        """Return the padding of each row of the batch to `width` elements."""
        item, zero = column.width * column.np_dtype.itemsize, not pad and isinstance(pad, int)
        paddings = self._zeros.get((width, item)) if zero else None
        if paddings is None:
            row = pool.zeros(width * item) if zero else _full(width * column.width, pad, column).view("u1").data
            paddings = [row[:size] for size in ((width - self.lengths) * item).tolist()]
            if zero:  # columns of one size share them
                self._zeros[width, item] = paddings
        return paddings

    @property
    def are_scattered(self) -> bool:
        """Whether most rows do not begin where the row before them ends."""
        return 2 * int(np.count_nonzero(self.starts[1:] != self.ends[:-1])) > len(self.starts)

    @cached_property
    def rows(self) -> RaggedArray:
        """Rows of these lengths without values: those of columns are put beside them."""
        total = int(np.add.reduce(self.lengths))
        return RaggedArray(np.broadcast_to(np.zeros(1, np.uint8), total), self.lengths)

    def joined(self, width: int) -> tuple[list[int], Iterable[slice], Iterable[slice]]:
        """Return how to copy the rows one after another: the segments, and the source and target slices.

        Rows that are adjacent both in a segment and in the batch are copied together.
        """
        owners, edges = self._pieces
        first, last, begin, stop = (edges if width == 1 else edges * width).tolist()
        return owners, map(slice, first, last), map(slice, begin, stop)

    @cached_property
    def _pieces(self) -> tuple[list[int], Int64Array]:
        """The ranges to copy: the segments, and `[4, K]` the start and end of each in the segment and the batch."""
        starts, ends, order = self.starts, self.ends, self.places.order
        begins, owners = self.rows.offsets[:-1], self.places.ordinals
        if order is not None:
            begins, owners = begins[order], owners[order]
        stops = begins + self._counts
        breaks = (starts[1:] != ends[:-1]) | (begins[1:] != stops[:-1]) | (owners[1:] != owners[:-1])
        cuts = np.flatnonzero(breaks)
        firsts, lasts = np.concatenate(([0], cuts + 1)), np.concatenate((cuts, [len(starts) - 1]))
        return owners[firsts].tolist(), np.array((starts[firsts], ends[lasts], begins[firsts], stops[lasts]))


def contained(read: Callable[Concatenate[ColumnReader, P], R]) -> Callable[Concatenate[ColumnReader, P], R]:
    """Let damage cost the rows that it holds: it is searched among what was read, and excluded when that is read again.

    Raises:
        DamageFoundError: damage was found that was not known; another try excludes it.
    """

    @functools.wraps(read)
    def wrapper(self: ColumnReader, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            values_read = read(self, *args, **kwargs)
        except DamageFoundError:
            raise
        except CorruptionError as error:
            if self.find_damage():
                raise DamageFoundError(str(error)) from error
            raise
        for segment, gaps in self.watched:  # a loop: each step of each read asks
            if len(segment.gaps) > gaps:
                self.confirm()
                break
        return values_read

    return wrapper


class ColumnReader:
    """Reads columns of one list of ids, sharing the look-ups between columns.

    Args:
        catalog: where the segments are.
        ids: `[B]` int64.
        limits: how many updates of each update segment count, to read values as of a snapshot; empty for none, None
            for all.
        places: where the rows are, if that is known.
        checked: compare what is read with its checksums before.
        every: these are all rows: those that are found damaged are excluded, by reading again; else they are an error.
    """

    def __init__(
        self,
        catalog: Catalog,
        ids: Int64Array,
        limits: Mapping[int, int] | None = None,
        places: Places | None = None,
        *,
        checked: bool = False,
        every: bool = False,
    ) -> None:
        self._catalog = catalog
        self.ids = ids
        self._limits = limits
        self._every = every
        self._is_checking = checked
        self._unchecked = checked and not catalog.is_checked
        self._checked: set[tuple[str, bool]] = set()
        self._base = Places(*catalog.locate(ids)) if places is None else places
        segments, updates = catalog.segments, catalog.updates
        watched = [segments[ordinal] for ordinal, _ in self._base.runs if ordinal in segments]
        self.watched = [(segment, len(segment.gaps)) for segment in (*watched, *updates.values())]
        """These segments, and all of updates, with the number of their parts that are excluded."""
        self._spans: dict[str, Spans] = {}
        self._updated: dict[str, Places] = {}

    def confirm(self) -> None:
        """Reject what was read if its rows are among those that another read has found damaged since this one began."""
        self.watched = [(segment, len(segment.gaps)) for segment, _ in self.watched]
        self._catalog.note_damage()
        if self._catalog.is_left_out(self._base.ordinals, self._base.rows):
            raise DamageFoundError(f"{self._catalog.medium.where}: damaged rows were found")

    @classmethod
    def of_rows(cls, catalog: Catalog, ordinals: Int64Array, rows: Int64Array) -> ColumnReader:
        """Read rows of segments, including those of updates, as committed."""
        return cls(catalog, rows, {}, Places(ordinals, rows))

    @classmethod
    def of_all(
        cls, catalog: Catalog, most: int | None, limits: Mapping[int, int] | None, *, checked: bool
    ) -> ColumnReader:
        """Read all rows in the order of arrival, or the newest `most`."""
        ids, runs = catalog.newest(most)
        return cls(catalog, ids, limits, None if runs is None else Places.of_runs(runs), checked=checked, every=True)

    @contained
    def fetch(self, columns: Iterable[Column]) -> None:
        """If columns have to be fetched, request all of them together instead of one after another."""
        medium, catalog = self._catalog.medium, self._catalog
        if medium.complete:
            return
        columns = list(columns)
        parts_of: dict[Segment, list[Part]] = {}
        for update in catalog.updates.values():
            names = [column.name for column in columns if column.name in update.schema]
            if names:
                parts_of[update] = [(name, None) for name in (TARGET, *names)]
        medium.fetch(parts_of)
        parts_of = {}
        for column in columns:
            for ordinal, rows in self._places(column).runs:
                segment = catalog.any_segment(ordinal)
                names = [column.name] if column.name in segment.schema else []
                names += [offsets_name(column.axis)] if column.axis in segment.schema.axes else []
                parts_of.setdefault(segment, []).extend((name, rows) for name in names)
        medium.fetch(parts_of)

    def find_damage(self) -> bool:
        """Search for damage among these rows and all updates, and exclude it; return whether some was found."""
        catalog = self._catalog
        if any(len(segment.gaps) > gaps for segment, gaps in self.watched):
            catalog.note_damage()
            return True
        every = [(u, slice(0, u.rows)) for u in catalog.updates.values()]
        return catalog.find_damage([*every, *((catalog.any_segment(o), rows) for o, rows in self._base.runs)])

    def check(self, columns: Iterable[Column]) -> None:
        """Compare the rows of several columns together, as `_check` does one after another; it has less to prepare.

        Columns with later values are left to `_check`.
        """
        catalog = self._catalog
        if not self._unchecked or catalog.updates or (catalog.failed and catalog.lost_updates):
            return
        left, is_due = list[Column](), catalog.look_is_due
        for column in columns:
            if is_due or not catalog.has_compared(column, flags=False):
                left.append(column)
            else:
                self._checked.add((column.name, False))
        if left:
            self._compare(left, self._base.runs, flags=False)

    def _compare(self, columns: Sequence[Column], runs: Sequence[tuple[int, Rows]], *, flags: bool) -> None:
        """Compare columns of rows, and raise as `_check` does if some do not match."""
        catalog = self._catalog
        if catalog.check([(catalog.any_segment(o), rows) for o, rows in runs], columns, flags=flags, warn=self._every):
            if self._every:
                raise DamageFoundError(f"{catalog.medium.where}: damaged rows were found")
            catalog.locate(self.ids)
        self._checked |= {(column.name, flags) for column in columns}

    def _check(self, column: Column, *, flags: bool = False) -> None:
        """Compare the rows of a column, and all its later values, with their checksums, once per reader.

        With `flags`, also whether they were given.

        Raises:
            CorruptionError: some do not match; it names the rows and the segment.
            DamageFoundError: some of all rows do not match, and are excluded from now on.
        """
        if (column.name, flags) in self._checked:
            return
        catalog = self._catalog
        if catalog.has_compared(column, flags=flags) and not catalog.look_is_due:
            return
        if catalog.lost_updates and column.optional and len(self.ids):
            raise CorruptionError(
                f"{catalog.medium.where}: the latest values of {column.name} cannot be read: they may be in "
                f"{catalog.lost_updates}, which cannot be opened. Run verify(), and restore the damaged segments from "
                "a copy."
            )
        updates = [update for update in catalog.updates.values() if column.name in update.schema]
        every_update = [(update, slice(0, update.rows)) for update in updates]
        catalog.check(every_update, (column,), flags=flags, warn=self._every)
        for update, gap in ((u, gap) for u in updates for gap in u.gaps if u.is_damage(gap)):
            targets = update.sure_targets(gap)
            mine = self.ids if targets is None else self.ids[np.isin(self.ids, targets)]
            if not len(mine):
                continue
            if targets is not None:
                catalog.note_damage()  # they are hidden from now on
                if self._every:
                    raise DamageFoundError(f"{catalog.medium.where}: some later values are damaged")
            raise catalog.unreadable(update, gap, mine)
        places = self._places(column)
        if places is not self._base:
            for ordinal, rows in self._base.runs:
                catalog.any_segment(ordinal).compare(rows, (column,), flags=flags)
        self._compare([column], places.runs, flags=flags)

    def _later(self, column: Column) -> Later | None:
        if self._limits is None:
            return later_of(self._catalog, column)
        return Later(self._catalog, column, self._limits)

    def _places(self, column: Column) -> Places:
        """Return where the newest values of a column are: the base itself if no row has later ones."""
        if not self._catalog.updates or (self._limits is not None and not self._limits):
            return self._base
        places = self._updated.get(column.name)
        if places is None:
            places = self._updated[column.name] = self._find_places(column)
        return places

    def _find_places(self, column: Column) -> Places:
        later = self._later(column)
        if later is None:
            return self._base
        at = later.lookup(self.ids)
        hit = at >= 0
        if not hit.any():
            return self._base
        ordinals = np.where(hit, at >> ORDINAL_SHIFT, self._base.ordinals)
        return Places(ordinals, np.where(hit, at & ROW_MASK, self._base.rows))

    def _look_up(self, key: str, places: Places, find: Callable[[Segment, Rows], Any]) -> dict[int, Any]:
        """Return the table of one array per segment, by ordinal, complete for these rows."""
        table = self._catalog.table(key)
        for ordinal, rows in places.runs:
            if ordinal not in table:
                table[ordinal] = find(self._catalog.any_segment(ordinal), rows)
        return table

    def _items(self, column: Column, places: Places) -> dict[int, memoryview]:
        """Return the values of a ragged column; with `io="pread"` they are sliced like memoryviews."""
        return self._look_up(f"{column.name}.items", places, lambda segment, rows: segment.items(column, rows))

    def _values(self, column: Column, places: Places) -> dict[int, npt.NDArray[Any]]:
        """Return the values of a column as numpy arrays."""
        return self._look_up(column.name, places, lambda segment, rows: segment.values(column, rows))

    def _touch(self, column: Column, spans: Spans) -> None:
        """Read the first element of every row in one go: these waits for memory overlap, those of the copies do not.

        This saves a tenth of a warm batch's time, a third if the store is much larger than the processor's caches.
        """
        if not self._catalog.medium.keeps_arrays:
            return
        arrays = self._values(column, spans.places)
        for (ordinal, _), (a, b) in zip(spans.places.runs, itertools.pairwise(spans.places.edges), strict=True):
            array, firsts = arrays[ordinal], spans.starts[a:b]
            if b - a > _FEW and len(array):  # an empty row may begin at the very end of the array
                array.take(firsts if column.width == 1 else firsts * column.width, mode="clip")

    @contained
    def present(self, column: Column) -> npt.NDArray[np.bool_]:
        """Return whether a value was given, by the append or by an update: `[B]` bool."""
        if self._is_checking:
            self._check(column, flags=True)
        places = self._places(column)
        if not column.optional or not places.runs:
            return np.ones(places.edges[-1], bool)
        flags_by_run = [self._catalog.any_segment(ordinal).present(column, rows) for ordinal, rows in places.runs]
        sizes = [b - a for a, b in itertools.pairwise(places.edges)]
        return places.restore(np.concatenate([np.full(n, of) for n, of in zip(sizes, flags_by_run, strict=True)]))

    @contained
    def spans(self, column: Column) -> Spans:
        """Return where the elements of a ragged column are."""
        return self._spans_of(column)

    def _spans_of(self, column: Column) -> Spans:
        """Return the spans, for a step that is itself `contained`."""
        if self._unchecked:
            self._check(column)
        places = self._places(column)
        key = column.axis or "" if places is self._base else f"{column.axis}.{column.name}"
        spans = self._spans.get(key)
        if spans is None:
            spans = self._spans[key] = self._find_spans(column, places)
        return spans

    def _find_spans(self, column: Column, places: Places) -> Spans:
        """Look up the spans. One item per row holds both its start and its end, so one read gives both."""
        if not places.runs:
            return Spans(places, np.empty((0, 2), np.int64))
        axis = column.axis or ""
        self._rows_ahead(offsets_name(axis), places)
        edges = self._look_up(offsets_name(axis), places, lambda segment, rows: segment.edges(column, rows))
        edges_of_rows = places.gather(edges)
        spans = Spans(places, edges_of_rows.view(np.int64).reshape(-1, 2))
        segments = (self._catalog.any_segment(ordinal) for ordinal, _ in places.runs)
        most = max(segment.meta.elems_cap.get(axis, len(column.fill_bytes)) for segment in segments)
        if (
            max(int(np.maximum.reduce(edges_of_rows.view(np.uint64))), spans.width) > most
        ):  # unsigned: what is below 0 is huge
            raise self._contradiction(column)
        return spans

    def _contradiction(self, column: Column) -> CorruptionError:
        return CorruptionError(
            f"{self._catalog.medium.where}: the offsets of axis '{column.axis or ''}' are inconsistent for some of "
            "the requested rows. Run verify(): it lists the damaged trajectories."
        )

    @contained
    def base_lengths(self, column: Column) -> Int64Array:
        """Return the elements per row on a column's axis, as committed with the row: `[B]` int64."""
        return self._find_spans(column, self._base).lengths

    @contained
    def scalars(self, column: Column) -> npt.NDArray[Any]:
        """Return the values of a scalar column: `[B]`."""
        if self._unchecked:
            self._check(column)
        later = None
        if self._catalog.updates and self._catalog.medium.complete and self._limits is None:
            later = later_of(self._catalog, column)
        places = self._base if later is not None else self._places(column)
        if not places.runs:
            return np.empty(0, column.np_dtype)
        if later is not None:  # the newest values are folded into separate arrays
            segments = (self._catalog.any_segment(ordinal) for ordinal, _ in places.runs)
            return places.restore(places.gather({s.ordinal: later.folded(s) for s in segments}))
        self._rows_ahead(column.name, places)
        return places.restore(places.gather(self._values(column, places)))

    def _ahead(self, name: str, ordinal: int, first: int, end: int) -> None:
        """Ask the kernel for many adjacent elements of an array before they are read; it reads others page by page."""
        segment = self._catalog.any_segment(ordinal)
        size = segment.specs[name].itemsize if name in segment.specs else 0
        if (end - first) * size >= AHEAD and self._catalog.medium.keeps_arrays:
            will_need(segment.raw(name), first * size, end * size)

    def _rows_ahead(self, name: str, places: Places) -> None:
        for ordinal, rows in places.runs:
            if isinstance(rows, slice):
                self._ahead(name, ordinal, rows.start, rows.stop)

    @contained
    def ragged(self, column: Column) -> RaggedArray:
        """Return the rows of a ragged column in one new flat array; text as its bytes."""
        spans = self._spans_of(column)
        flat = np.empty(len(spans.rows.values) * column.width, column.np_dtype)
        if len(flat):
            items, view = (
                self._items(column, spans.places),
                memoryview(cast("bytearray", flat.view(f"u{flat.itemsize}"))),
            )
            owners, parts, targets = spans.joined(column.width)
            parts = list(parts)
            if flat.nbytes >= AHEAD * len(parts):
                for ordinal, part in zip(owners, parts, strict=True):
                    self._ahead(column.name, ordinal, part.start // column.width, part.stop // column.width)
            try:
                for target, values in zip(targets, _pieces(items, owners, parts), strict=True):
                    view[target] = values
            except CorruptionError:  # the file ends early, and the error gives the position
                raise
            except ValueError:  # an offset points behind the values
                raise self._contradiction(column) from None
        return spans.rows.beside(flat.reshape(-1, *column.shape) if column.shape else flat)

    def _rows(self, column: Column, spans: Spans) -> list[Any]:
        """Return the values of each row, in the order of the batch."""
        items, (owners, parts) = self._items(column, spans.places), spans.parts
        if column.width > 1:
            parts = [slice(part.start * column.width, part.stop * column.width) for part in parts]
        return list(_pieces(items, owners, parts))

    @contained
    def text(self, column: Column) -> list[Any]:
        """Return the rows of a column of text or bytes."""
        spans = self._spans_of(column)
        if spans.are_scattered:
            rows = self._rows(column, spans)
        else:  # in few pieces: `inspect` of 30,720 trajectories takes three quarters of the time
            data = self.ragged(column).values.data
            rows = [data[a:b] for a, b in itertools.pairwise(spans.rows.offsets.tolist())]
        if column.dtype == "bytes":
            return [bytes(row) for row in rows]
        try:
            return [str(row, "utf-8") for row in rows]
        except UnicodeDecodeError as error:
            raise CorruptionError(
                f"{self._catalog.medium.where}: in some of the requested rows, column '{column.name}' contains bytes "
                f"that are not valid text ({error.reason}). Run verify(): it lists the damaged trajectories."
            ) from None

    @contained
    def padded(
        self,
        column: Column,
        multiple: int,
        pad: Any,
        side: Side,
        pool: BufferPool,
        out: npt.NDArray[Any] | None,
    ) -> tuple[npt.NDArray[Any], Int64Array]:
        """Return the rows of a ragged column, padded with `pad`, and their lengths: `[B, T, *shape]` and `[B]`.

        T is the length of the longest row, rounded up to a multiple of `multiple`.
        """
        spans = self._spans_of(column)
        width = -(-spans.width // multiple) * multiple
        shape, dtype = (len(self.ids), width, *column.shape), column.np_dtype
        target = None if out is None else _fit(out, column, *shape[:2])
        self._touch(column, spans)
        pieces: list[Any] = [None] * (2 * shape[0])
        pieces[side == "left" :: 2] = self._rows(column, spans)
        pieces[side == "right" :: 2] = spans.blanks(column, width, pad, pool)
        array = pool.join(pieces, shape, dtype)
        if target is None:
            return array, spans.lengths
        np.copyto(target, array)
        return target, spans.lengths


def _full(count: int, pad: Any, column: Column) -> npt.NDArray[Any]:
    try:
        return np.full(count, pad, column.np_dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise SchemaError(
            f"pad_value={pad!r} cannot be converted to {column.dtype}, the dtype of column '{column.name}'."
        ) from error


def _pieces(items: Mapping[int, Any], owners: Iterable[int], parts: Iterable[slice]) -> Iterable[Any]:
    """Return parts of the items of their segments."""
    return map(getitem, map(items.__getitem__, owners), parts)


def _fit(out: npt.NDArray[Any], column: Column, n: int, width: int) -> npt.NDArray[Any]:
    fits = out.ndim == 2 + len(column.shape) and out.shape[0] >= n and out.shape[1] >= width
    fits = fits and out.shape[2:] == column.shape
    if not fits or out.dtype != column.np_dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise BatchError(
            f"out['{column.name}'] is an array of dtype {out.dtype} and shape {list(out.shape)}; this batch needs a "
            f"writable, contiguous array of dtype {column.dtype} whose shape is at least "
            f"{[n, width, *column.shape]}. Compute the width with lengths() first, or omit `out`: buffers are reused "
            "anyway."
        )
    return out[:n, :width]
