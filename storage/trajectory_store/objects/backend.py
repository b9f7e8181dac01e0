"""The medium of immutable objects: a commit is one object, and its put-if-absent is the commit."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store import fork_safety, fs
from trajectory_store.backend import Claim, Gap, Medium, Part, SealedError, Segment, SegmentWriter
from trajectory_store.batch import Batch
from trajectory_store.bucket import Bucket, number_from
from trajectory_store.catalog_log import Entry, State
from trajectory_store.errors import CorruptionError, ReadFailedError, StoreError, UnsyncedError, WriteFailedError
from trajectory_store.format import (
    KEY,
    ArraySpec,
    SegmentMeta,
    blocks_of,
    checked_int,
    from_hex,
    group_json,
    ordinal_of,
    page_elements,
    per_name,
    read_attributes,
    read_intact,
    segment_name,
    spec_json,
    to_hex,
    with_crc,
)
from trajectory_store.objects.archive import (
    BLOCK,
    LEVEL,
    Commit,
    NeedMore,
    build,
    commit_key,
    directory,
    is_canonical,
    read_commit,
    read_record,
    seq_of,
)
from trajectory_store.objects.segment import Cache, ObjectSegment, brief_of
from trajectory_store.objects.sharded import CHECKS, ShardWriter, has_index, layout_of, pages, sharded_json
from trajectory_store.rebuild import Unnamed, is_superfluous
from trajectory_store.root import Root
from trajectory_store.verify import VerifyReport

CACHE_BYTES = "TRAJECTORY_STORE_CACHE_BYTES"
"""The environment variable with the number of bytes of fetched columns that a process keeps."""
COPY = "zarr.copy"
"""The second copy of the metadata of a segment."""
MERGING = "merging.json"
"""The later content of a merged segment: put first, so that it is known even if the merge does not finish."""
MOST_COMMITS = 1 << 10
"""Maximum number of commits of a segment: reading commits individually is slow, and a finished segment's are merged."""
AHEAD = 256
"""Number of objects that one `fetch` requests and keeps in memory until they are read."""
_OLD_S = 60.0


_open_here: weakref.WeakSet[ObjectMedium] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [medium.forget_parent() for medium in _open_here])


class ObjectMedium(Medium):
    """Segments of a store in a bucket."""

    complete = False

    def __init__(
        self, bucket: Bucket, root: Root, cache_dir: str | os.PathLike[str] | None, cache_bytes: int | None
    ) -> None:
        self.bucket = bucket
        self.where = bucket.where
        self._root = root
        self._options = cache_dir, cache_bytes
        max_bytes = int(number_from(CACHE_BYTES, 1 << 34)) if cache_bytes is None else cache_bytes
        self._cache = Cache(cache_dir, max_bytes)
        self._own_commits: dict[int, list[Commit]] = {}
        _open_here.add(self)

    def forget_parent(self) -> None:
        """Start afresh after a fork: the parent's commits and files are those of another process."""
        self._own_commits.clear()
        self._cache.remove.detach()
        self._cache.begin()

    def fresh(self) -> ObjectMedium:
        """Return the same bucket with a separate cache."""
        return ObjectMedium(self.bucket, self._root, *self._options)

    # Reading

    def open_segments(self, entries: Sequence[Entry]) -> list[Segment | Exception]:
        """Open segments for reading."""
        headers = self.bucket.get_many([f"{entry.name}/{KEY}" for entry in entries])
        out: list[Segment | Exception] = []
        for entry, raw in zip(entries, headers, strict=True):
            try:
                out.append(self._open(entry, raw))
            except StoreError as error:
                out.append(error)
        object_segments = [s for s in out if isinstance(s, ObjectSegment)]
        try:
            self._read_all(object_segments)
        except StoreError as error:
            if isinstance(error, ReadFailedError) and self.bucket.costly:
                raise  # the next try may succeed
            return [self._alone(s) if isinstance(s, ObjectSegment) else s for s in out]
        return list(out)

    def _read_all(self, segments: Sequence[ObjectSegment]) -> None:
        self.refresh([s for s in segments if s.ordinal in self._own_commits])
        self._catch_up([s for s in segments if not s.finished and s.ordinal not in self._own_commits], opening=True)
        for segment in segments:
            if segment.may_be_torn and segment.ordinal not in self._own_commits:
                self._check_objects(segment)
            if segment.finished or not segment.is_live():
                segment.expect_rows(segment.promised)

    def _alone(self, segment: ObjectSegment) -> Segment | Exception:
        """Read a segment by itself, so that an error costs no other; half of it, unchecked, is never used."""
        try:
            self._read_all([segment])
        except StoreError as error:
            return error if isinstance(error, ReadFailedError) or not segment.records else segment
        return segment

    def _open(self, entry: Entry, raw: bytes | None) -> ObjectSegment:
        meta, sealed = self._read_meta(entry.name, raw, entry.salt)
        return ObjectSegment(self.bucket, self._cache, entry, meta, sealed)

    def _read_meta(
        self, name: str, raw: bytes | None, salt: int | None = None
    ) -> tuple[SegmentMeta, Mapping[str, Any] | None]:
        """Return the metadata of a segment from its zarr.json, or else from the copy of it."""
        copies = (self.bucket.get(key) if key else raw for key in (None, f"{name}/{COPY}"))
        attributes = read_intact(copies, f"{name}/{KEY}", "segment", salt)
        meta = SegmentMeta.from_attributes(attributes, name)
        sealed = attributes.get("sealed") if meta.merged else None
        if meta.merged:
            check_sealed(sealed, meta, name)
        return meta, sealed

    def refresh(self, segments: Sequence[Segment]) -> None:
        """Read new commits of segments; the requests for all segments are made at the same time."""
        asking: list[ObjectSegment] = []
        for segment in segments:
            if not isinstance(segment, ObjectSegment):
                continue
            own_commits = self._own_commits.get(segment.ordinal)
            if own_commits is None:
                asking.append(segment)
                continue
            for commit in own_commits[segment.records :]:
                segment.add(commit)
        for _ in range(2):  # most segments have no new commit, and most others have one
            sizes = [segment.next_size for segment in asking]
            tails = self.bucket.tails([segment.key(segment.records) for segment in asking], sizes)
            asking = [s for s, tail in zip(asking, tails, strict=True) if s.take_next(tail) and not s.finished]
        self._catch_up(asking)

    def _catch_up(self, segments: Sequence[ObjectSegment], *, opening: bool = False) -> None:
        """Read commits of which there may be many: a listing of their objects shows which to request.

        With `opening`, it also distinguishes the end of a segment from an object missing or damaged in its middle. A
        reader that follows a segment does not: the objects may have been removed after a merge.
        """
        listed = self.bucket.keys_of([f"{segment.name}/" for segment in segments])
        seqs_of = {
            s: [seq for key in keys if (seq := seq_of(key)) is not None]
            for s, keys in zip(segments, listed, strict=True)
        }
        while seqs_of:
            seqs = {segment: segment.next_seqs(some) for segment, some in seqs_of.items()}
            requested = [segment.key(seq) for segment, some in seqs.items() for seq in some]
            tails = iter(self.bucket.tails(requested, [self.bucket.tail] * len(requested)))
            again: dict[ObjectSegment, list[int]] = {}
            for segment, some in seqs.items():
                first = segment.records
                commits = [segment.parse(seq, next(tails)) for seq in some]
                segment.take(commits)
                if opening and segment.records == first and any(commits):
                    now = segment.parse(
                        first, self.bucket.tails([segment.key(first)], [self.bucket.tail])[0]
                    )  # put meanwhile?
                    if now is None or not segment.add(now):
                        _ = any(commit is not None and segment.pass_over(commit) for commit in commits)
                if segment.records > first and not segment.finished:
                    again[segment] = seqs_of[segment]
            seqs_of = again
        for segment, keys in zip(segments, listed, strict=True) if opening else ():
            seqs_there = {seq_of(key) for key in keys}
            for seq in range(segment.records):
                if seq not in seqs_there and segment.history[seq].n_rows and segment.is_missing(seq):
                    segment.leave_out(seq, f"object {segment.key(seq)} is missing")

    def _check_objects(self, segment: ObjectSegment) -> None:
        """Exclude the commits that did not reach the disk as a whole before the machine went down."""
        report, lost_commits = VerifyReport(self.where), segment.lost_commits()
        for seq in range(segment.records):
            if seq in lost_commits:
                continue
            damage = _damage_in(self.bucket.get(segment.key(seq)), segment, seq, report)
            if damage:
                segment.leave_out(seq, damage[0].why)

    def fetch(self, parts_of: Mapping[Segment, Iterable[Part]]) -> None:
        """Request together the objects that will be read first; the segments use them when they are read."""
        segment_of = {
            key: s for s, parts in parts_of.items() if isinstance(s, ObjectSegment) for key in s.missing(parts)
        }
        for key, raw in self.bucket.ahead(list(segment_of)[:AHEAD]).items():
            segment_of[key].got[key] = raw

    def forget(self, segment: Segment) -> None:
        """Free the cached columns of a segment that was removed."""
        if isinstance(segment, ObjectSegment):
            self._cache.forget(segment)

    def close(self) -> None:
        """Remove the cache."""
        self._cache.remove()

    # Writing

    def sync(self, segment: Segment, first: int) -> None:
        """Wait until the objects of a segment are on the disk."""
        if isinstance(segment, ObjectSegment):
            self.bucket.sync(
                f"{segment.name}/{KEY}", f"{segment.name}/{COPY}", *map(segment.key, range(first, segment.records))
            )

    def make_segment(self, meta: SegmentMeta, claim: Claim, least: int) -> ObjectWriter:
        """Put the metadata of an empty segment under a free number, and enter it in the catalog."""
        raw = group_json(with_crc(meta.to_attributes()))
        while True:
            ordinal = least
            if not self.bucket.put_once(f"{segment_name(ordinal)}/{KEY}", raw):
                least = ordinal + 1
                continue
            lock = self.bucket.lock(f"{segment_name(ordinal)}/{KEY}")
            least = claim(ordinal, meta.salt)
            if least == ordinal:
                self.bucket.put_once(f"{segment_name(ordinal)}/{COPY}", raw)
                own_commits = self._own_commits[ordinal] = []
                return ObjectWriter(self.bucket, ordinal, meta, own_commits, lock, compress=self._root.compress)
            lock = None  # which releases it

    def write_merged(self, entry: Entry, meta: SegmentMeta, parts: Iterable[Batch]) -> None:
        """Put a segment of sharded arrays, its metadata last."""
        self.bucket.put(f"{entry.name}/{MERGING}", group_json(with_crc(meta.to_attributes())))
        writers = {spec.name: (spec, ShardWriter(entry.name, spec, self.bucket.put)) for spec in meta.arrays()}
        ends = dict.fromkeys(meta.schema.axes, 0)
        for i, batch in enumerate(parts):
            for name, values in batch.arrays(meta).items():
                spec, writer = writers[name]
                if spec.edges:
                    axis = spec.axis or ""
                    values = values[bool(i) :] + ends[axis]
                    ends[axis] = int(values[-1])
                writer.write(values)
        for _, writer in writers.values():
            writer.finish()
        self.bucket.put(f"{entry.name}/{CHECKS}", b"".join(writer.checks for _, writer in writers.values()))
        sealed: dict[str, Any] = {"rows": entry.rows, "ends": ends}
        sealed["checks"] = {name: writer.pages for name, (_, writer) in writers.items()}
        raw = group_json(with_crc({**replace(meta, elems_cap=ends).to_attributes(), "sealed": sealed}))
        self.bucket.put(f"{entry.name}/{COPY}", raw)
        if not self.bucket.put_once(f"{entry.name}/{KEY}", raw):
            raise WriteFailedError(None, f"{entry.name} was created by another process", self.where)
        self.bucket.sync(entry.name)

    def seal(self, segment: Segment) -> bool:
        """Put the end of a segment whose writer seems dead; if it is alive after all, its next commit fails."""
        return isinstance(segment, ObjectSegment) and (self.close_dead(segment) or self._put_end(segment))

    def close_dead(self, segment: Segment) -> bool:
        """End a segment in a folder whose writer died, once its objects are checked and synced."""
        if not isinstance(segment, ObjectSegment) or not segment.may_be_torn or segment.finished or not segment.rows:
            return False
        self._check_objects(segment)
        if segment.gaps:
            return False
        self.bucket.sync(segment.name)
        return self._put_end(segment, synced=True)

    def fence(self, segment: Segment) -> None:
        """Put the end of a segment, whether its writer is alive or not."""
        while isinstance(segment, ObjectSegment) and not segment.finished:
            self.refresh([segment])
            if not segment.finished:
                self._put_end(segment)

    def _put_end(self, segment: ObjectSegment, *, synced: bool = False) -> bool:
        last = segment.elements()
        end = Commit(
            ordinal=segment.ordinal,
            seq=segment.records,
            salt=segment.meta.salt,
            time_ns=segment.newest_ns + 1,
            n_rows=0,
            rows_end=segment.rows,
            version=segment.meta.version,
            starts=last,
            ends=last,
            sealed=True,
            synced=synced,
        )
        if self.bucket.put_once(segment.key(end.seq), build(end, {}, compress=False)):
            segment.add(end)
        else:
            self.refresh([segment])
        return segment.finished

    def remove(self, entry: Entry) -> None:
        """Delete the objects of a segment that no longer counts.

        An end that another process than the writer put stays for ever: without it, a writer that was stopped for long
        could still commit at that number, and no reader would see the commit.
        """
        name = entry.name
        self._delete(name, self.bucket.keys(f"{name}/"))

    def _delete(self, name: str, keys: Sequence[str]) -> None:
        ends = [key for key in keys if key.endswith(".zip")]
        seals = {ends[-1]} if ends and self._is_seal(ends[-1]) else set[str]()
        self.bucket.delete(key for key in keys if key not in seals)

    def _is_seal(self, key: str) -> bool:
        tail = self.bucket.tails([key], [self.bucket.tail])[0]
        if tail is None:
            return False
        try:
            return read_attributes(read_record(*tail, key), key, "commit").get("sealed") is True
        except (StoreError, NeedMore):
            return False

    def sweep(self, state: State, whole: Collection[int]) -> None:
        """Delete objects of segments without which nothing is lost."""
        for unnamed in self.survey(state):
            if is_superfluous(state, unnamed, whole):
                self._delete(unnamed.entry.name, self.bucket.keys(f"{unnamed.entry.name}/"))
        self.bucket.sweep(_OLD_S)

    # Checking

    def survey(self, state: State) -> list[Unnamed]:
        """Return the segments that are there and that a record of the catalog does not name."""
        counted = {entry.name for entry in state.entries}
        folders: dict[str, list[str]] = {}
        for key in self.bucket.keys("seg-"):
            name = key.partition("/")[0]
            if name not in counted and ordinal_of(name) is not None:
                folders.setdefault(name, []).append(key)
        out: list[Unnamed] = []
        raws = self.bucket.get_many([f"{name}/{KEY}" for name in folders])
        for (name, keys), raw in zip(folders.items(), raws, strict=True):
            with suppress(StoreError, KeyError, TypeError, ValueError):
                out.append(self._survey_one(name, keys, raw, state))
        return out

    def _survey_one(self, name: str, keys: Sequence[str], raw: bytes | None, state: State) -> Unnamed:
        whole, ordinal = True, ordinal_of(name) or 0
        try:
            meta, _ = self._read_meta(name, raw)
        except StoreError:
            whole, raw = False, self.bucket.get(f"{name}/{MERGING}")
            meta = SegmentMeta.from_attributes(read_intact([raw], f"{name}/{MERGING}", "segment"), name)
        if meta.store != state.store or name != segment_name(ordinal, merged=meta.merged):
            raise CorruptionError(f"{name} is a segment of another store.")
        entry = Entry(ordinal, meta.kind, meta.salt, meta.merged, meta.rows_cap if meta.merged else None)
        commits, catalog = [key for key in keys if key.endswith(".zip")], 0
        if commits:
            tail = self.bucket.tails([commits[0]], [self.bucket.tail])[0]
            with suppress(StoreError, NeedMore):
                catalog = 0 if tail is None else read_commit(*tail, commits[0], meta).catalog
        only_end = len(commits) == 1 and self._is_seal(commits[0])
        return Unnamed(
            entry=entry,
            schema=meta.schema,
            sources=tuple(source for source, _ in meta.sources),
            is_complete=whole and meta.merged,
            commits=meta.merged or (bool(commits) and not only_end),
            catalog=catalog,
        )

    def check(self, segment: Segment, report: VerifyReport) -> None:
        """Fetch every object of a segment and recompute its checksums."""
        if not isinstance(segment, ObjectSegment):
            raise TypeError(f"{segment.name} is not a segment of a bucket")
        for gap in segment.gaps:
            segment.report(report, gap)
        expected = segment.meta.to_attributes()
        if segment.sealed is not None:
            expected["sealed"] = dict(segment.sealed)
        expected_header = group_json(with_crc(expected))
        keys = (f"{segment.name}/{KEY}", f"{segment.name}/{COPY}")
        for key, raw in zip(keys, self.bucket.get_many(keys), strict=True):
            if raw != expected_header and (raw is not None or key.endswith(KEY) or segment.sealed is not None):
                report.problem(f"{key} is damaged or missing")
        if segment.sealed is not None:
            _check_sealed(self.bucket, segment, report)
        else:
            _check_commits(self.bucket, segment, report, self.refresh)


def check_sealed(sealed: Any, meta: SegmentMeta, name: str) -> None:
    """Reject a merged segment whose metadata cannot be right."""
    try:
        checked_int(sealed["rows"], meta.rows_cap)
        per_name(sealed["ends"], meta.elems_cap)
        for spec in meta.arrays():
            layout = layout_of(spec, sealed)
            if layout.sums is None:
                from_hex(sealed["checks"][spec.name], pages(layout.count(spec)))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{name}/{KEY}: the attribute 'sealed' is missing or damaged ({error}).") from None


def _check_sealed(bucket: Bucket, segment: ObjectSegment, report: VerifyReport) -> None:
    for name, spec in segment.specs.items():
        layout = segment.layouts[name]
        if bucket.get(f"{segment.name}/{name}/zarr.json") != sharded_json(spec, layout):
            report.problem(f"{segment.name}/{name}/zarr.json is damaged or missing")
        if not segment.has_checks(name):
            report.problem(f"{segment.name}/{CHECKS} is damaged or missing for {name}")
        for number, key in enumerate(layout.shards(segment.name, spec)):
            if not has_index(bucket, key, layout):
                report.problem(f"object {key}: its index is damaged or missing")
            chunks = range(number * layout.chunks, min((number + 1) * layout.chunks, layout.count(spec)))
            lost = list[int]()
            try:
                for chunk, values in segment.chunks(name, chunks):
                    if isinstance(values, str):
                        report.problem(f"{segment.name}: {values}")
                        lost.append(chunk)
                    else:
                        report.bytes += values.nbytes
            except FileNotFoundError:
                report.problem(f"{segment.name}: object {key} is missing")
                lost += chunks
            for first, end in (part for chunk in lost for part in segment.rows_of_chunk(spec, chunk)):
                segment.report(report, Gap(0, first, end, f"rows {first} to {end - 1} of {name} are damaged", name))
    report.rows += segment.rows


def _check_commits(
    bucket: Bucket, segment: ObjectSegment, report: VerifyReport, follow: Callable[[Sequence[Segment]], object]
) -> None:
    commit_keys = {key for key in bucket.keys(f"{segment.name}/") if key.endswith(".zip")}
    lost_commits = segment.lost_commits()
    for seq, brief in enumerate(segment.history):
        if seq in lost_commits:
            continue
        key = segment.key(seq)
        gaps = _damage_in(bucket.get(key) if key in commit_keys else None, segment, seq, report)
        for gap in gaps:
            segment.report(report, gap)
        report.rows += 0 if gaps else brief.n_rows
    last = max((int(key[-12:-4]) for key in commit_keys if key[-12:-4].isdigit()), default=-1)
    if (
        last >= segment.records and last not in lost_commits
    ):  # the listing is newer than what was read: the segment may have grown in between
        first = segment.records
        follow([segment])
        if last >= segment.records and segment.records == first:
            report.problem(f"{segment.name}: commit {first} is missing or damaged, but commit {last} exists")


def _damage_in(raw: bytes | None, segment: ObjectSegment, seq: int, report: VerifyReport) -> list[Gap]:
    """Return the rows of a commit that its object does not have right; what is wrong and costs no row is reported."""
    key, brief = segment.key(seq), segment.history[seq]

    def whole(why: str) -> list[Gap]:
        return [Gap(seq, brief.rows_end - brief.n_rows, brief.rows_end, why)]

    if raw is None:
        return whole(f"object {key} is missing")
    try:
        commit = read_commit(raw, len(raw), key, segment.meta)
        places = directory(raw, len(raw), key)
        report.catalog_numbers.add(commit.catalog)
        stated = (commit.ordinal, commit.seq, commit.salt)
        begins = tuple(commit.starts.values()) == segment.starts(seq)
        if stated != (segment.ordinal, seq, segment.meta.salt) or brief_of(commit) != brief or not begins:
            return whole(f"object {key} contains a different commit from the one expected at this position")
        gaps = list[Gap]()
        for name, spec in segment.specs.items() if brief.n_rows else ():
            values, wrong = segment.compared(seq, spec, places, commit.crc, raw)
            report.bytes += values.nbytes
            gaps += wrong
            shaped = spec._replace(capacity=segment.extent(spec, seq)[0])
            docs = (spec_json(shaped, zstd=level, indent=None) for level in (None, LEVEL))
            if raw[slice(*places.get(f"{name}/zarr.json", (0, 0)))] not in docs:
                report.problem(f"object {key}: {name}/zarr.json is damaged")
        if not gaps and (not is_canonical(raw, key) or commit.to_json() != raw[slice(*places["zarr.json"])]):
            report.problem(
                f"object {key} is damaged: it differs from the object that its writer put; its values are intact"
            )
    except (StoreError, KeyError) as error:
        return whole(str(error))
    return gaps


# A writer


class ObjectWriter(SegmentWriter):
    """Appends commits to one segment in a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        ordinal: int,
        meta: SegmentMeta,
        own_commits: list[Commit],
        lock: fs.OpenFile | None,
        *,
        compress: bool,
    ) -> None:
        super().__init__(ordinal, meta)
        self._bucket = bucket
        self._own_commits = own_commits
        self._lock = lock
        self._compress = compress
        self._name = segment_name(ordinal)
        self._is_finished = False
        self._is_unsynced = False
        """Whether the last commit was found in a folder but could not be synced."""
        self._finishing = threading.RLock()
        fork_safety.guard(self, 3, self._finishing)

    def fits(self, batch: Batch) -> bool:
        """Return whether a batch still fits; a segment of many commits ends, so that upkeep may merge it."""
        return self.records < MOST_COMMITS and super().fits(batch)

    def commit(self, batch: Batch, time_ns: int, catalog: int) -> int:
        """Put the object of a commit; return its first row."""
        arrays = batch.arrays(self.meta)
        ends = {axis: end + int(batch.lengths[axis].sum()) for axis, end in self.ends.items()}
        crc = {name: self._crcs(name, values) for name, values in arrays.items()}
        time_ns = max(time_ns, self.last_time + 1)
        commit = self._next(time_ns, batch.n_rows, ends, catalog=catalog, crc=crc)
        shaped = {name: (self._exact(name, values), values) for name, values in arrays.items()}
        return self._put_commit(commit, build(commit, shaped, compress=self._compress))

    def _crcs(self, name: str, values: npt.NDArray[Any]) -> str:
        """Return the checksums of the blocks of an array; the first offset is always 0, and in none."""
        spec = self.specs[name]
        start = self.rows + spec.edges if spec.axis is None or spec.edges else self.ends[spec.axis]
        raw, itemsize = values[spec.edges :].view(np.uint8), spec.itemsize
        blocks = blocks_of(self.meta, (itemsize, page_elements(spec)), start, start + len(raw) // itemsize)
        return to_hex(blocks.crcs(raw, itemsize))

    def _next(self, time_ns: int, n_rows: int, ends: Mapping[str, int], **more: Any) -> Commit:
        """Return the record of the next commit, or of the end."""
        return Commit(
            ordinal=self.ordinal,
            seq=self.records,
            salt=self.meta.salt,
            time_ns=time_ns,
            n_rows=n_rows,
            rows_end=self.rows + n_rows,
            starts=dict(self.ends),
            ends=ends,
            before=self._block(),
            version=self.meta.version,
            **more,
        )

    def _exact(self, name: str, values: npt.NDArray[Any]) -> ArraySpec:
        """Return the spec of an array that holds exactly these values."""
        spec = self.specs[name]
        return spec._replace(capacity=len(values) * spec.dtype.itemsize // spec.itemsize)

    def _put_commit(self, commit: Commit, raw: bytes) -> int:
        """Put the object of a commit; return its first row."""
        try:
            mine = self._bucket.put_once(commit_key(self._name, commit.seq), raw)
        except UnsyncedError:
            self._count(commit)
            raise
        if not mine:
            raise SealedError(f"segment {self._name} was ended by another process")
        self._count(commit)
        return commit.rows_end - commit.n_rows

    def _count(self, commit: Commit) -> None:
        """Count a commit that is there; to do so again changes nothing."""
        if len(self._own_commits) == commit.seq:
            self._own_commits.append(commit)
        self.rows, self.ends, self.last_time, self.records = (
            commit.rows_end,
            dict(commit.ends),
            commit.time_ns,
            commit.seq + 1,
        )

    def wait_durable(self, records: int) -> None:
        """Check that what was found in a folder, after its call was interrupted, is on the disk as promised."""
        if self._is_unsynced and self._bucket.durable:
            raise OSError(errno.EIO, "syncing the folder failed")

    def _block(self) -> list[list[int]]:
        if self.records % BLOCK != BLOCK - 1:
            return []
        return [[c.n_rows, c.time_ns, *c.ends.values()] for c in self._own_commits[1 - BLOCK :]]

    def finish(self) -> None:
        """Put the end of the segment, after a commit whose call was interrupted; if that fails, upkeep puts it."""
        with self._finishing:
            if self._is_finished:
                return
            if self.records or self.pending:
                try:
                    self._put_end()
                except (StoreError, OSError) as error:
                    fs.pass_external(error)
                    if self.pending:
                        raise
            self._is_finished = True
            self.abandon()

    def _put_end(self) -> None:
        """Put the end at the next number. If a commit is there, its call was interrupted: it counts.

        A put that is still under way finds the end in its place: what the segment holds is certain from here on.
        """
        is_found = False
        while True:
            synced = self._is_synced()
            self._is_unsynced = is_found and not synced
            end = self._next(self.last_time + 1, 0, dict(self.ends), synced=synced)
            key = commit_key(self._name, end.seq)
            if self._bucket.put_once(key, build(end, {}, compress=False)):
                if len(self._own_commits) == end.seq:
                    self._own_commits.append(end)
                break
            raw = self._bucket.get(key)
            commit = None if raw is None else read_commit(raw, len(raw), key, self.meta)
            if commit is None or not commit.n_rows:
                break  # another process ended the segment
            self._count(commit)
            is_found = True
        self.pending = False

    def _is_synced(self) -> bool:
        """Sync the segment in a folder; return whether that succeeded."""
        with fs.tolerated():
            self._bucket.sync(self._name)
            return True
        return False

    def abandon(self) -> None:
        """Let go of the lock, without an end."""
        self._lock = None
