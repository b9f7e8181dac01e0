"""Reading rows: from addresses to arrays, padded or ragged.

Rows are copied by assigning slices of memoryviews: that reaches the speed of a bare row copy, where numpy's
own memmap objects cost twelve times as much per slice.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from trajectory_store._catalog import Address, Catalog
from trajectory_store._errors import BatchError
from trajectory_store._layout import PRESENT
from trajectory_store._pool import BufferPool
from trajectory_store._ragged import Int64Array, RaggedArray, offsets_of
from trajectory_store._schema import Column
from trajectory_store._writer import ORDINAL_SHIFT, ROW_MASK

Side = Literal["left", "right"]
SMALL = 512
Plan = list[tuple[int, int, int, int]]
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Spans(NamedTuple):
    """Where the elements of rows are, the rows of a segment next to one another.

    Attributes:
        runs: per segment its ordinal, and the first and one past the last of its places in the lists.
        order: `[B]` the place in the batch of each place in the lists; None where they agree.
        starts: per place the first element in the segment.
        ends: per place one past the last element.
        lengths: `[B]` int64, in the order of the batch.
    """

    runs: list[tuple[int, int, int]]
    order: Int64Array | None
    starts: list[int]
    ends: list[int]
    lengths: Int64Array

    def plan(self, begins: Int64Array, ends: Int64Array) -> Plan:
        """Per place where it goes, given in the order of the batch, and where it comes from."""
        if self.order is not None:
            begins, ends = begins[self.order], ends[self.order]
        return list(zip(begins.tolist(), ends.tolist(), self.starts, self.ends, strict=True))


class Gather:
    """Reads columns of one list of ids, sharing the look-ups between columns.

    Args:
        catalog: where the segments are.
        ids: `[B]` int64.
    """

    def __init__(self, catalog: Catalog, ids: Int64Array) -> None:
        self._catalog = catalog
        self._ids = ids
        self._base = catalog.locate(ids)
        self._spans: dict[str, Spans] = {}
        self._plans: dict[tuple[int, int, int, str], Plan] = {}
        self._widths: dict[int, int] = {}
        self._patched: dict[str, Address] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def _address(self, column: Column) -> Address:
        """Where the newest values of a column are; the base itself where no row has later ones."""
        found = self._patched.get(column.name)
        if found is not None:
            return found
        found = self._base
        in_place = column.mutable and self._catalog.mutable_in_place
        overlay = None if in_place else self._catalog.overlay(column.name)
        if overlay is not None:
            later = overlay.lookup(self._ids)
            self._leave_out_folded(later)
            hit = later >= 0
            if hit.any():
                found = Address(
                    np.where(hit, later >> ORDINAL_SHIFT, found.ordinals),
                    np.where(hit, later & ROW_MASK, found.rows),
                )
        self._patched[column.name] = found
        return found

    def _leave_out_folded(self, later: Int64Array) -> None:
        """A compacted segment holds patches up to a point; those must not cover it again."""
        for ordinal in np.unique(self._base.ordinals).tolist():
            folded = self._catalog.any_segment(ordinal).meta.folded
            for patch, rows in folded.items():
                first = patch << ORDINAL_SHIFT
                inside = (later >= first) & (later < first + rows)
                later[inside & (self._base.ordinals == ordinal)] = -1

    def present(self, column: Column) -> npt.NDArray[np.bool_]:
        """`[B]` bool: whether a value was given at the append or by a patch."""
        ordinals, rows = self._address(column)
        out = np.ones(len(rows), bool)
        if not column.optional:
            return out
        for owner, where in groups(ordinals):
            segment = self._catalog.any_segment(owner)
            names = [c.name for c in segment.schema.optional]
            if column.name in names:
                bit = np.uint64(names.index(column.name))
                out[where] = (segment.array(PRESENT)[rows[where]] >> bit) & np.uint64(1)
            else:
                out[where] = column.name in segment.schema
        return out

    def spans(self, column: Column) -> Spans:
        """Where the rows of a ragged column are."""
        axis = column.axis or ""
        address = self._address(column)
        key = axis if address is self._base else f"{axis}.{column.name}"
        found = self._spans.get(key)
        if found is None:
            found = self._spans[key] = self._find_spans(axis, address)
        return found

    def _find_spans(self, axis: str, address: Address) -> Spans:
        ordinals, rows = address
        n = len(rows)
        if not n:
            return Spans([], None, [], [], np.empty(0, np.int64))
        order: Int64Array | None = None
        first = int(ordinals[0])
        runs = [(first, 0, n)]
        if not bool((ordinals == first).all()):
            order = np.argsort(ordinals, kind="stable")
            ordinals, rows = ordinals[order], rows[order]
            cuts = (np.flatnonzero(ordinals[1:] != ordinals[:-1]) + 1).tolist()
            runs = [(int(ordinals[a]), a, b) for a, b in itertools.pairwise([0, *cuts, n])]
        starts: list[int] = []
        ends: list[int] = []
        for ordinal, a, b in runs:
            segment = self._catalog.any_segment(ordinal)
            if axis not in segment.schema.axes:
                starts += [0] * (b - a)
                ends += [0] * (b - a)
            elif b - a > SMALL:
                offsets = segment.offsets(axis)
                starts += offsets[rows[a:b]].tolist()
                ends += offsets[rows[a:b] + 1].tolist()
            else:
                view = segment.offset_view(axis)
                places: list[int] = rows[a:b].tolist()
                starts += [view[r] for r in places]
                ends += [view[r + 1] for r in places]
        lengths = np.array(ends, np.int64) - np.array(starts, np.int64)
        if order is not None:
            lengths[order] = lengths.copy()
        return Spans(runs, order, starts, ends, lengths)

    def width(self, column: Column) -> int:
        """The longest row."""
        spans = self.spans(column)
        found = self._widths.get(id(spans))
        if found is None:
            found = self._widths[id(spans)] = int(spans.lengths.max()) if len(spans.lengths) else 0
        return found

    def base_lengths(self, axis: str) -> Int64Array:
        """`[B]` int64: elements per row on an axis, as committed with the row."""
        return self._find_spans(axis, self._base).lengths

    def lengths(self, column: Column) -> Int64Array:
        """`[B]` int64: elements per row."""
        return self.spans(column).lengths

    def scalars(self, column: Column) -> npt.NDArray[Any]:
        """`[B]` values of a scalar column."""
        ordinals, rows = self._address(column)
        out = np.empty(len(rows), column.np_dtype)
        if not len(rows):
            return out
        first = int(ordinals[0])
        if bool((ordinals == first).all()):
            self._scalars_of(column, first, rows, slice(None), out)
        else:
            for owner, where in groups(ordinals):
                self._scalars_of(column, owner, rows[where], where, out)
        return out

    def _scalars_of(self, column: Column, ordinal: int, rows: Int64Array, where: Any, out: npt.NDArray[Any]) -> None:
        segment = self._catalog.any_segment(ordinal)
        if not segment.has(column):
            out[where] = column.fill_value
            return
        array = segment.array(column.name)
        n = len(rows)
        if n > SMALL and int(rows[-1]) - int(rows[0]) == n - 1 and bool((np.diff(rows) == 1).all()):
            out[where] = array[int(rows[0]) : int(rows[0]) + n]
        else:
            out[where] = array[rows]

    def assign(self, column: Column, values: npt.NDArray[Any]) -> None:
        """Store values of a mutable column in place, through the shared map."""
        ordinals, rows = self._base
        for owner, where in groups(ordinals):
            segment = self._catalog.any_segment(owner)
            if not segment.has(column):
                segment.add_mutable(column)
                segment.has(column)
            segment.assign(column.name, rows[where], values[where])

    def prefetch(self, columns: Sequence[Column]) -> None:
        """Ask the kernel for the pages of the rows, all at once, before the first one is touched."""
        for column in columns:
            if column.axis is None:
                continue
            spans = self.spans(column)
            item = column.np_dtype.itemsize
            for ordinal, first, last in spans.runs:
                segment = self._catalog.any_segment(ordinal)
                raw = segment.raw(column.name) if segment.has(column) else None
                if not isinstance(raw, memoryview) or not isinstance(raw.obj, mmap.mmap):
                    continue
                for a, b in zip(spans.starts[first:last], spans.ends[first:last], strict=True):
                    if a < b:
                        start = a * item & -mmap.PAGESIZE
                        raw.obj.madvise(mmap.MADV_WILLNEED, start, b * item - start)

    def ragged(self, column: Column) -> RaggedArray:
        """The rows of a ragged column in one new flat array."""
        spans = self.spans(column)
        edges = offsets_of(spans.lengths)
        flat = np.empty(int(edges[-1]), column.np_dtype)
        if len(flat):
            self._copy(column, spans, flat, spans.plan(edges[:-1], edges[1:]))
        return RaggedArray(flat, spans.lengths)

    def text(self, column: Column) -> list[str]:
        """The rows of a text column."""
        spans = self.spans(column)
        out: list[str] = []
        for ordinal, first, last in spans.runs:
            segment = self._catalog.any_segment(ordinal)
            if segment.has(column):
                source = segment.items(column.name)
                pieces = zip(spans.starts[first:last], spans.ends[first:last], strict=True)
                out += [str(source[a:b], "utf-8") for a, b in pieces]
            else:
                out += [str(column.fill_value)] * (last - first)
        if spans.order is None:
            return out
        placed = [""] * len(out)
        for place, value in zip(spans.order.tolist(), out, strict=True):
            placed[place] = value
        return placed

    def padded(
        self,
        column: Column,
        width: int,
        pad: Any,
        side: Side,
        take: BufferPool,
        out: npt.NDArray[Any] | None,
    ) -> npt.NDArray[Any]:
        """`[B, width]`: the rows of a ragged column with `pad` beside them."""
        spans = self.spans(column)
        n, dtype = len(self._ids), column.np_dtype
        array = take.take((n, width), dtype) if out is None else _fit(out, column, n, width)
        array.fill(pad)
        if not array.size:
            return array
        base = array if out is None else out
        stride = base.shape[1]
        key = (id(spans), stride, width, side)
        plan = self._plans.get(key)
        if plan is None:
            places = np.arange(0, n * stride, stride, dtype=np.int64)
            if side == "left":
                places += width - spans.lengths
            plan = self._plans[key] = spans.plan(places, places + spans.lengths)
        self._copy(column, spans, base, plan)
        return array

    def _copy(self, column: Column, spans: Spans, target: npt.NDArray[Any], plan: Plan) -> None:
        """Copy each row's items to its place in a contiguous array; the places are in the order of the spans."""
        flat = target.reshape(-1)
        view = memoryview(cast("bytearray", flat.view(_UNSIGNED[flat.itemsize])))
        for ordinal, first, last in spans.runs:
            segment = self._catalog.any_segment(ordinal)
            part = plan if len(spans.runs) == 1 else plan[first:last]
            if segment.has(column):
                source = segment.items(column.name)
                for a, b, c, d in part:
                    view[a:b] = source[c:d]
            else:
                for a, b, _, _ in part:
                    flat[a:b] = column.fill_value


def _fit(out: npt.NDArray[Any], column: Column, n: int, width: int) -> npt.NDArray[Any]:
    fits = out.ndim == 2 and out.shape[0] >= n and out.shape[1] >= width
    if not fits or out.dtype != column.np_dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise BatchError(
            f"out['{column.name}'] is {out.dtype} {list(out.shape)}; this batch needs a writable, "
            f"contiguous {column.dtype} array of at least [{n}, {width}]. Bound the width with "
            "lengths() first, or leave `out` away: buffers are reused by themselves."
        )
    return out[:n, :width]


def groups(ordinals: Int64Array) -> list[tuple[int, Int64Array]]:
    """The positions of each distinct value, ascending within a value."""
    if not len(ordinals):
        return []
    cuts = np.flatnonzero(ordinals[1:] != ordinals[:-1]) + 1
    edges = [0, *cuts.tolist(), len(ordinals)]
    if len(edges) <= 64 and len(set(ordinals[edges[:-1]].tolist())) == len(edges) - 1:
        runs = itertools.pairwise(edges)
        return [(int(ordinals[a]), np.arange(a, b, dtype=np.int64)) for a, b in runs]
    order = np.argsort(ordinals, kind="stable")
    ranked = ordinals[order]
    cuts = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
    return [(int(ordinals[part[0]]), part) for part in np.split(order, cuts)]


def pad_value_of(column: Column, pad_value: Any) -> Any:
    """The pad value of one column from one value or a mapping of column names."""
    if isinstance(pad_value, Mapping):
        return pad_value.get(column.name, 0)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return pad_value
