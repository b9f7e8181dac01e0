"""Reading rows: from ids to arrays, padded or ragged.

Rows are copied by assigning slices of memoryviews: that reaches the speed of a bare row copy, where numpy's
own memmap objects cost twelve times as much per slice. What does not depend on the column is done once per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from trajectory_store.catalog import Catalog
from trajectory_store.errors import BatchError, CorruptionError
from trajectory_store.format import ORDINAL_SHIFT, ROW_MASK, TARGET, offsets_name
from trajectory_store.maps import will_need
from trajectory_store.places import Places, Spans
from trajectory_store.pool import BufferPool
from trajectory_store.ragged import Int64Array, RaggedArray
from trajectory_store.schema import Column
from trajectory_store.segment import Segment
from trajectory_store.updates import Later

Side = Literal["left", "right"]
_UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
_BYTE = _UNSIGNED[1]
_EDGES = np.dtype("V16")
_NOTHING = np.empty(0, np.uint8)


class Gather:
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
        self._base = self._wanting(Places(*catalog.locate(ids)))
        self._spans: dict[str, Spans] = {}
        self._updated: dict[str, Places] = {}

    @classmethod
    def of_rows(cls, catalog: Catalog, ordinals: Int64Array, rows: Int64Array) -> Gather:
        """Read rows of segments as they were committed, also those of updates."""
        gather = cls(catalog, np.empty(0, np.int64), {})
        gather._ids = rows
        gather._base = gather._wanting(Places(ordinals, rows))
        return gather

    def __len__(self) -> int:
        return len(self._ids)

    def _wanting(self, places: Places) -> Places:
        """Tell segments whose columns have to be fetched which rows of them will be read."""
        if not self._catalog.medium.complete:
            for ordinal, rows in places.runs:
                self._catalog.any_segment(ordinal).want(rows)
        return places

    def fetch(self, columns: Iterable[Column]) -> None:
        """Where columns have to be fetched, ask for all that will be read, and not for one column after another."""
        medium, catalog = self._catalog.medium, self._catalog
        if medium.complete:
            return
        columns = list(columns)
        updates = {s: [TARGET, *(c.name for c in columns if s.has(c.name))] for s in catalog.updates.values()}
        medium.fetch({segment: names for segment, names in updates.items() if len(names) > 1})
        wanted: dict[Segment, set[str]] = {}
        for column in columns:
            for ordinal, _ in self._places(column).runs:
                segment = catalog.any_segment(ordinal)
                names = wanted.setdefault(segment, set())
                names.update([column.name] if segment.has(column.name) else [])
                names.update([offsets_name(column.axis)] if column.axis in segment.schema.axes else [])
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
        return self._wanting(Places(ordinals, np.where(hit, at & ROW_MASK, self._base.rows)))

    def _look_up(self, key: str, places: Places, find: Callable[[Segment], Any]) -> dict[int, Any]:
        """By ordinal the array of each segment of the rows; without those that have none."""
        table = self._catalog.table(key)
        for ordinal, _ in places.runs:
            if ordinal not in table:
                found = find(self._catalog.any_segment(ordinal))
                if found is not None:
                    table[ordinal] = found
        return table

    def _edges(self, axis: str, places: Places) -> dict[int, npt.NDArray[np.void]]:
        """Per row where it begins and where it ends, as one item: both are read in one step."""

        def edges(segment: Segment) -> npt.NDArray[np.void] | None:
            if axis not in segment.schema.axes:
                return None
            offsets = segment.offsets(axis)
            return np.ndarray(len(offsets) - 1, _EDGES, offsets, strides=offsets.strides)

        return self._look_up(offsets_name(axis), places, edges)

    def _items(self, column: Column, places: Places) -> dict[int, memoryview]:
        """The values of a ragged column; those of `io="pread"` are sliced like memoryviews."""
        return self._look_up(column.name, places, lambda s: s.items(column.name) if s.has(column.name) else None)

    def _arrays(self, column: Column, places: Places) -> dict[int, npt.NDArray[Any]]:
        """The values of a scalar column."""
        return self._look_up(column.name, places, lambda s: s.array(column.name) if s.has(column.name) else None)

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
                parts = spans.slices[at : at + len(rows)]
                at += len(rows)
                if segment.has(column.name):
                    edges = np.array([(part.start, part.stop) for part in parts], np.int64) * (item * column.width)
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
        spans = self.spans(column)
        try:
            texts = self._texts(column, spans)
        except UnicodeDecodeError as error:
            raise CorruptionError(
                f"{self._catalog.medium.where}: column '{column.name}' holds bytes that are no text for some of these "
                f"rows ({error.reason}). Run verify(): it lists the trajectories that are damaged."
            ) from None
        if spans.places.order is None:
            return texts
        placed: list[Any] = [None] * len(texts)
        for place, value in zip(spans.places.order.tolist(), texts, strict=True):
            placed[place] = value
        return placed

    def _texts(self, column: Column, spans: Spans) -> list[Any]:
        """The same in run order."""
        pieces = zip(spans.places.spread(self._items(column, spans.places)), spans.slices, strict=True)
        if column.dtype == "bytes":
            return [b"" if source is None else bytes(source[part]) for source, part in pieces]
        fill = str(column.fill_value)
        return [fill if source is None else str(source[part], "utf-8") for source, part in pieces]

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


def _rows(column: Column, table: Mapping[int, Any], spans: Spans) -> list[Any]:
    """Per row, in the order of the batch, its values; a segment without the column is not in the table."""
    owners, parts = spans.places.owners, _scaled(spans.parts, column.width)
    try:
        return [table[owner][part] for owner, part in zip(owners, parts, strict=True)]
    except KeyError:
        fill, dtype = column.fill_value, column.np_dtype
        return [
            table[owner][part] if owner in table else np.full(part.stop - part.start, fill, dtype)
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
