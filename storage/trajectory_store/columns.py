"""Reading rows: from ids to arrays, padded or ragged.

Rows are copied by assigning slices of memoryviews: that reaches the speed of a bare row copy, where numpy's
own memmap objects cost twelve times as much per slice. What does not depend on the column is done once per batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import getitem
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trajectory_store.catalog import Catalog
from trajectory_store.errors import BatchError, CorruptionError
from trajectory_store.format import ORDINAL_SHIFT, ROW_MASK, TARGET, offsets_name
from trajectory_store.maps import will_need
from trajectory_store.medium import Part
from trajectory_store.pool import BufferPool
from trajectory_store.ragged import Int64Array, RaggedArray, offsets_of
from trajectory_store.schema import Column
from trajectory_store.segment import Segment
from trajectory_store.updates import Later

Side = Literal["left", "right"]
_UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
_BYTE = _UNSIGNED[1]
_EDGES = np.dtype("V16")
_NOTHING = np.empty(0, np.uint8)
_FEW = 4
"""Rows of one segment for which looking at them first costs more than it saves."""
T = TypeVar("T")


class Places:
    """The rows of a batch, segment by segment.

    "Run order" is the order of the runs one after another; it is the order of the batch where one segment has all rows.

    Attributes:
        ordinals: `[B]` int64, the segment of each row, in the order of the batch.
        rows: `[B]` int64, the row in it.
        order: `[B]` the place in the batch of each row in run order; None where the orders agree.
        runs: per segment its ordinal and the rows in it.

    >>> places = Places(np.array([5, 2, 5]), np.array([0, 1, 7]))
    >>> [(ordinal, rows.tolist()) for ordinal, rows in places.runs]
    [(2, [1]), (5, [0, 7])]
    >>> places.join([rows * 10 for _, rows in places.runs]).tolist()
    [0, 10, 70]
    """

    def __init__(self, ordinals: Int64Array, rows: Int64Array) -> None:
        self.ordinals = ordinals
        self.rows = rows
        self.order: Int64Array | None = None
        self.runs: list[tuple[int, Int64Array]] = []
        if not len(rows):
            return
        if np.count_nonzero(ordinals[1:] < ordinals[:-1]):  # else they are in run order, as rows that arrive are
            self.order = ordinals.argsort(kind="stable")
            ordinals, rows = ordinals[self.order], rows[self.order]
        edges = [0, *(np.flatnonzero(ordinals[1:] != ordinals[:-1]) + 1).tolist(), len(rows)]
        self.runs += [(int(ordinals[a]), rows[a:b]) for a, b in itertools.pairwise(edges)]

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def inverse(self) -> Int64Array:
        """`[B]` the place in run order of each row of the batch."""
        inverse = np.empty(len(self.rows), np.int64)
        inverse[self.order] = np.arange(len(inverse))
        return inverse

    @cached_property
    def owners(self) -> list[int]:
        """The segment of each row of the batch."""
        return self.ordinals.tolist()

    def restore(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """From run order to the order of the batch."""
        return values if self.order is None else values[self.inverse]

    def join(self, parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """From the values of each run to those of the batch, in its order."""
        return parts[0] if len(parts) == 1 else self.restore(np.concatenate(parts))

    def split(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """From values of the batch to those of each run."""
        values = values if self.order is None else values[self.order]
        return np.split(values, np.cumsum([len(rows) for _, rows in self.runs[:-1]])) if self.runs else []


class Spans:
    """Where the elements of rows are on one axis.

    Args:
        places: the rows.
        edges: `[B, 2]` int64, in run order: the first element in the segment and one past the last; an attribute, too.

    Attributes:
        starts: `[B]` int64, in run order: the first elements.
        lengths: `[B]` int64, in the order of the batch.
        width: the longest row.
    """

    def __init__(self, places: Places, edges: Int64Array) -> None:
        self.places = places
        self.edges = edges
        self.starts: Int64Array
        self.starts, self._ends = edges.T.copy()
        self._counts = self._ends - self.starts
        self.lengths: Int64Array = places.restore(self._counts)
        self._blanks: dict[tuple[int, int], tuple[memoryview, list[memoryview]]] = {}

    @cached_property
    def width(self) -> int:
        """The longest row."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    @cached_property
    def heads(self) -> list[tuple[int, Int64Array]]:
        """The first elements of the rows of each segment that has more than a few of them."""
        edges = itertools.accumulate((len(rows) for _, rows in self.places.runs), initial=0)
        starts = zip(self.places.runs, itertools.pairwise(edges), strict=True)
        return [(ordinal, self.starts[a:b]) for (ordinal, _), (a, b) in starts if b - a > _FEW]

    @cached_property
    def parts(self) -> list[slice]:
        """Per row, in the order of the batch, what to copy."""
        starts, ends = self.places.restore(self.starts), self.places.restore(self._ends)
        return list(map(slice, starts.tolist(), ends.tolist()))

    def blanks(self, width: int, blank: memoryview, item: int) -> list[memoryview]:
        """Per row, in the order of the batch, what pads it to a width: a part of `blank`, `item` bytes per element."""
        found = self._blanks.get((width, item))
        if found is None or found[0] is not blank:
            parts = [blank[:size] for size in ((width - self.lengths) * item).tolist()]
            found = self._blanks[width, item] = (blank, parts)
        return found[1]

    def flat(self, table: Mapping[int, T]) -> tuple[list[T | None], list[slice], list[slice]]:
        """How to copy the rows one after another: what a table has for the segment, what to copy, where it goes.

        Rows that are next to one another in a segment and in the batch are copied at once.
        """
        starts, ends = self.starts, self._ends
        begins = offsets_of(self.lengths)[:-1]
        begins = begins if self.places.order is None else begins[self.places.order]
        stops = begins + self._counts
        owners = np.repeat([o for o, _ in self.places.runs], [len(rows) for _, rows in self.places.runs])
        breaks = (starts[1:] != ends[:-1]) | (begins[1:] != stops[:-1]) | (owners[1:] != owners[:-1])
        cuts = np.flatnonzero(breaks)
        firsts, lasts = np.concatenate(([0], cuts + 1)), np.concatenate((cuts, [len(starts) - 1]))
        parts = map(slice, starts[firsts].tolist(), ends[lasts].tolist())
        targets = map(slice, begins[firsts].tolist(), stops[lasts].tolist())
        return [table.get(owner) for owner in owners[firsts].tolist()], list(parts), list(targets)


class ColumnReader:
    """Reads columns of one list of ids, sharing the look-ups between columns.

    Args:
        catalog: where the segments are.
        ids: `[B]` int64.
        limits: the updates that count, per update segment, where values as of a snapshot are read: none where it is
            empty; None for all.
    """

    def __init__(self, catalog: Catalog, ids: Int64Array, limits: Mapping[int, int] | None = None) -> None:
        self._catalog = catalog
        self._ids = ids
        self._limits = limits
        self._base = Places(*catalog.locate(ids))
        self._spans: dict[str, Spans] = {}
        self._updated: dict[str, Places] = {}

    @classmethod
    def of_rows(cls, catalog: Catalog, ordinals: Int64Array, rows: Int64Array) -> ColumnReader:
        """Read rows of segments as they were committed, also those of updates."""
        reader = cls(catalog, np.empty(0, np.int64), {})
        reader._ids = rows
        reader._base = Places(ordinals, rows)
        return reader

    def __len__(self) -> int:
        return len(self._ids)

    def fetch(self, columns: Iterable[Column]) -> None:
        """Where columns have to be fetched, ask for all that will be read, and not for one column after another."""
        medium, catalog = self._catalog.medium, self._catalog
        if medium.complete:
            return
        columns = list(columns)
        wanted: dict[Segment, list[Part]] = {}
        for update in catalog.updates.values():
            names = [column.name for column in columns if update.has(column.name)]
            if names:
                wanted[update] = [(name, None) for name in (TARGET, *names)]
        medium.fetch(wanted)
        wanted = {}
        for column in columns:
            for ordinal, rows in self._places(column).runs:
                segment = catalog.any_segment(ordinal)
                names = [column.name] if segment.has(column.name) else []
                names += [offsets_name(column.axis)] if column.axis in segment.schema.axes else []
                wanted.setdefault(segment, []).extend((name, rows) for name in names)
        medium.fetch(wanted)

    def _later(self, column: Column) -> Later | None:
        if self._limits is None:
            return self._catalog.later(column)
        return self._catalog.later_as_of(column, self._limits)

    def _places(self, column: Column) -> Places:
        """Where the newest values of a column are; the base itself where no row has later ones."""
        if not self._catalog.updates or (self._limits is not None and not self._limits):
            return self._base
        found = self._updated.get(column.name)
        if found is None:
            found = self._updated[column.name] = self._find_places(column)
        return found

    def _find_places(self, column: Column) -> Places:
        later = self._later(column)
        if later is None:
            return self._base
        at = later.lookup(self._ids)
        hit = at >= 0
        if not hit.any():
            return self._base
        ordinals = np.where(hit, at >> ORDINAL_SHIFT, self._base.ordinals)
        return Places(ordinals, np.where(hit, at & ROW_MASK, self._base.rows))

    def _look_up(self, key: str, places: Places, find: Callable[[Segment, Int64Array], Any]) -> dict[int, Any]:
        """By ordinal the array of each segment of the rows, with these in it; without those that have none."""
        table = self._catalog.table(key)
        for ordinal, rows in places.runs:
            if ordinal not in table:
                found = find(self._catalog.any_segment(ordinal), rows)
                if found is not None:
                    table[ordinal] = found
        return table

    def _edges(self, axis: str, places: Places) -> dict[int, npt.NDArray[np.void]]:
        """Per row where it begins and where it ends, as one item: both are read in one step."""

        def edges(segment: Segment, rows: Int64Array) -> npt.NDArray[np.void] | None:
            if axis not in segment.schema.axes:
                return None
            offsets = segment.offsets(axis, rows)
            return np.ndarray(len(offsets) - 1, _EDGES, offsets, strides=offsets.strides)

        return self._look_up(offsets_name(axis), places, edges)

    def _items(self, column: Column, places: Places) -> dict[int, memoryview]:
        """The values of a ragged column; those of `io="pread"` are sliced like memoryviews."""
        name = column.name
        return self._look_up(name, places, lambda s, rows: s.items(name, rows) if s.has(name) else None)

    def _arrays(self, column: Column, places: Places) -> dict[int, npt.NDArray[Any]]:
        """The values of a scalar column."""
        name = column.name
        return self._look_up(name, places, lambda s, rows: s.array(name, rows) if s.has(name) else None)

    def _touch(self, column: Column, spans: Spans) -> None:
        """Look at the first element of every row at once: these waits for memory overlap, those of the copies do not.

        A tenth of a warm batch's time, a third of one from a store much larger than the processor's caches.
        """
        if not self._catalog.medium.keeps_arrays:
            return
        arrays = self._catalog.table(f"{column.name}.values")
        for ordinal, firsts in spans.heads:
            array = arrays.get(ordinal)
            if array is None:
                segment = self._catalog.any_segment(ordinal)
                array = arrays[ordinal] = segment.array(column.name) if segment.has(column.name) else _NOTHING
            if len(array):  # an empty row may begin at the very end
                array.take(firsts if column.width == 1 else firsts * column.width, mode="clip")

    def present(self, column: Column) -> npt.NDArray[np.bool_]:
        """`[B]` bool: whether a value was given at the append or by an update."""
        places = self._places(column)
        if not column.optional or not len(places):
            return np.ones(len(places), bool)
        return places.join([self._catalog.any_segment(o).present(column, rows) for o, rows in places.runs])

    def spans(self, column: Column) -> Spans:
        """Where the rows of a ragged column are."""
        axis = column.axis or ""
        places = self._places(column)
        key = axis if places is self._base else f"{axis}.{column.name}"
        found = self._spans.get(key)
        if found is None:
            found = self._spans[key] = self._find_spans(axis, places)
        return found

    def _find_spans(self, axis: str, places: Places) -> Spans:
        if not places.runs:
            return Spans(places, np.empty((0, 2), np.int64))
        edges = self._edges(axis, places)
        parts = [
            edges[ordinal][rows] if ordinal in edges else np.zeros(len(rows), _EDGES) for ordinal, rows in places.runs
        ]
        found = (parts[0] if len(parts) == 1 else np.concatenate(parts)).view(np.int64).reshape(-1, 2)
        most = max(self._catalog.any_segment(ordinal).meta.elems_cap.get(axis, 0) for ordinal, _ in places.runs)
        if int(found.min()) < 0 or int(found.max()) > most or np.count_nonzero(found[:, 0] > found[:, 1]):
            raise CorruptionError(
                f"{self._catalog.medium.where}: the offsets of axis '{axis}' contradict themselves for some of these "
                "rows. Run verify(): it lists the trajectories that are damaged."
            )
        return Spans(places, found)

    def base_lengths(self, axis: str) -> Int64Array:
        """`[B]` int64: elements per row on an axis, as committed with the row."""
        return self._find_spans(axis, self._base).lengths

    def lengths(self, column: Column) -> Int64Array:
        """`[B]` int64: elements per row; of text and bytes the bytes."""
        lengths = self.spans(column).lengths
        if not _fill_length(column):
            return lengths
        places, missing = self._places(column), np.full(len(lengths), _fill_length(column))
        parts = [
            part if self._catalog.any_segment(ordinal).has(column.name) else missing[: len(part)]
            for (ordinal, _), part in zip(places.runs, places.split(lengths), strict=True)
        ]
        return places.join(parts) if parts else lengths

    def scalars(self, column: Column) -> npt.NDArray[Any]:
        """`[B]` values of a scalar column."""
        if self._catalog.updates and self._catalog.medium.complete and self._limits is None:
            later = self._catalog.later(column)
            if later is not None:
                return self._newest(column, later)
        places = self._places(column)
        if not places.runs:
            return np.empty(0, column.np_dtype)
        try:
            arrays = self._catalog.table(column.name)
            return places.join([arrays[ordinal][rows] for ordinal, rows in places.runs])
        except KeyError:  # a segment was not looked up before, or lacks the column
            pass
        arrays = self._arrays(column, places)
        parts = [
            np.full(len(rows), column.fill_value, column.np_dtype) if array is None else array[rows]
            for array, rows in ((arrays.get(ordinal), rows) for ordinal, rows in places.runs)
        ]
        return places.join(parts)

    def _newest(self, column: Column, later: Later) -> npt.NDArray[Any]:
        """The same from arrays that updates are folded into."""
        if not self._base.runs:
            return np.empty(0, column.np_dtype)
        catalog = self._catalog
        parts = [
            later.folded(catalog.any_segment(ordinal), lambda at: catalog.values_at(column, at))[rows]
            for ordinal, rows in self._base.runs
        ]
        return self._base.join(parts)

    def prefetch(self, columns: Sequence[Column]) -> None:
        """Ask the kernel for the pages of the rows, all at once, before the first one is touched."""
        axes: set[tuple[int, str]] = set()
        for column in columns:
            axis, item = column.axis, column.np_dtype.itemsize
            for ordinal, rows in self._places(column).runs:
                segment = self._catalog.any_segment(ordinal)
                if axis is None:
                    if segment.has(column.name):
                        will_need(segment.raw(column.name), rows * item, (rows + 1) * item)
                elif axis in segment.schema.axes and (ordinal, axis) not in axes:
                    axes.add((ordinal, axis))
                    will_need(segment.raw(offsets_name(axis)), rows * 8, (rows + 2) * 8)
        for column in columns:
            if column.axis is None:
                continue
            spans, item, at = self.spans(column), column.np_dtype.itemsize, 0
            for ordinal, rows in spans.places.runs:
                segment = self._catalog.any_segment(ordinal)
                edges = spans.edges[at : at + len(rows)] * (item * column.width)
                at += len(rows)
                if segment.has(column.name):
                    will_need(segment.raw(column.name), edges[:, 0], edges[:, 1])

    def ragged(self, column: Column) -> RaggedArray:
        """The rows of a ragged column in one new flat array."""
        spans = self.spans(column)
        flat = np.empty(int(spans.lengths.sum()) * column.width, column.np_dtype)
        if len(flat):
            sources, parts, targets = spans.flat(self._items(column, spans.places))
            _copy(column, flat, sources, _scaled(parts, column.width), _scaled(targets, column.width))
        return RaggedArray(flat.reshape(-1, *column.shape) if column.shape else flat, spans.lengths)

    def text(self, column: Column) -> list[Any]:
        """The rows of a column of text or bytes."""
        spans, fill = self.spans(column), str(column.fill_value).encode()
        rows = _rows(column, self._items(column, spans.places), spans, fill)
        if column.dtype == "bytes":
            return [bytes(row) for row in rows]
        try:
            return [str(row, "utf-8") for row in rows]
        except UnicodeDecodeError as error:
            raise CorruptionError(
                f"{self._catalog.medium.where}: column '{column.name}' holds bytes that are no text for some of these "
                f"rows ({error.reason}). Run verify(): it lists the trajectories that are damaged."
            ) from None

    def padded(
        self,
        column: Column,
        spans: Spans,
        width: int,
        pad: Any,
        side: Side,
        pool: BufferPool,
        out: npt.NDArray[Any] | None,
    ) -> npt.NDArray[Any]:
        """`[B, width, *shape]`: the rows of a ragged column with `pad` beside them."""
        shape, dtype = (len(self._ids), width, *column.shape), column.np_dtype
        target = None if out is None else _fit(out, column, *shape[:2])
        self._touch(column, spans)
        pieces: list[Any] = [None] * (2 * shape[0])
        pieces[side == "left" :: 2] = _rows(column, self._items(column, spans.places), spans)
        pieces[side == "right" :: 2] = spans.blanks(width, *_blank(column, pad, width, pool))
        array = pool.join(pieces, shape, dtype)
        if target is None:
            return array
        np.copyto(target, array)
        return target


def scan(catalog: Catalog, column: Column, skip: int) -> npt.NDArray[Any] | None:
    """`[N]`: a scalar column of all rows in the order of arrival, less the first `skip`, copied run by run.

    None where the rows lie in too many runs for that, or have to be fetched.
    """
    runs = _few_runs(catalog, skip)
    if runs is None:
        return None
    later = catalog.later(column)
    parts: list[npt.NDArray[Any]] = []
    for ordinal, first, count in runs:
        segment = catalog.any_segment(ordinal)
        if later is not None:
            array = later.folded(segment, lambda at: catalog.values_at(column, at))
        elif segment.has(column.name):
            array = segment.array(column.name)
        else:
            array = np.full(first + count, column.fill_value, column.np_dtype)
        parts.append(array[first : first + count])
    return np.concatenate(parts) if parts else np.empty(0, column.np_dtype)


def scan_lengths(catalog: Catalog, column: Column, skip: int) -> Int64Array | None:
    """The same for the lengths of a ragged column."""
    runs = _few_runs(catalog, skip)
    if runs is None or catalog.later(column) is not None:
        return None
    parts: list[Int64Array] = []
    for ordinal, first, count in runs:
        segment = catalog.any_segment(ordinal)
        if (column.axis or "") in segment.schema.axes:
            parts.append(np.diff(segment.offsets(column.axis or "")[first : first + count + 1]))
        else:
            parts.append(np.full(count, _fill_length(column)))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _fill_length(column: Column) -> int:
    """Bytes that a row reads as where its segment lacks a column."""
    return len(str(column.fill_value).encode()) if column.is_text else 0


def _few_runs(catalog: Catalog, skip: int) -> list[tuple[int, int, int]] | None:
    if not catalog.medium.complete:
        return None
    runs = catalog.runs(skip)
    return runs if len(runs) <= max(64, sum(count for _, _, count in runs) // 64) else None


def _copy(
    column: Column,
    flat: npt.NDArray[Any],
    sources: list[memoryview | None],
    parts: list[slice],
    targets: list[slice],
) -> None:
    """Copy a part of each source to its target; None stands for a segment without the column."""
    view = memoryview(cast("bytearray", flat.view(_UNSIGNED[flat.itemsize])))
    for target, source, part in zip(targets, sources, parts, strict=True):
        if source is not None:
            view[target] = source[part]
        else:
            flat[target] = column.fill_value


def _rows(column: Column, table: Mapping[int, Any], spans: Spans, fill: Any = None) -> list[Any]:
    """Per row, in the order of the batch, its values; those of a segment without the column are the fill."""
    owners, parts = spans.places.owners, _scaled(spans.parts, column.width)
    try:
        return list(map(getitem, map(table.__getitem__, owners), parts))
    except KeyError:  # a segment without the column is not in the table
        blank = np.full(spans.width * column.width if fill is None else 0, column.fill_value, column.np_dtype)
        return [
            table[owner][part] if owner in table else blank[: part.stop - part.start] if fill is None else fill
            for owner, part in zip(owners, parts, strict=True)
        ]


def _blank(column: Column, pad: Any, width: int, pool: BufferPool) -> tuple[memoryview, int]:
    """What stands beside the longest row that there may be, and how many of its items are an element."""
    size = width * column.width
    if not pad and isinstance(pad, int):
        return pool.zeros(size * column.np_dtype.itemsize), column.width * column.np_dtype.itemsize
    return np.full(size, pad, column.np_dtype).view(_BYTE).data, column.width * column.np_dtype.itemsize


def _scaled(parts: list[slice], width: int) -> list[slice]:
    """From elements to values."""
    return parts if width == 1 else [slice(part.start * width, part.stop * width) for part in parts]


def _fit(out: npt.NDArray[Any], column: Column, n: int, width: int) -> npt.NDArray[Any]:
    fits = out.ndim == 2 + len(column.shape) and out.shape[0] >= n and out.shape[1] >= width
    fits = fits and out.shape[2:] == column.shape
    if not fits or out.dtype != column.np_dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise BatchError(
            f"out['{column.name}'] is {out.dtype} {list(out.shape)}; this batch needs a writable, "
            f"contiguous {column.dtype} array of at least {[n, width, *column.shape]}. Bound the width with "
            "lengths() first, or leave `out` away: buffers are reused by themselves."
        )
    return out[:n, :width]
