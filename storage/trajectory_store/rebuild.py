"""The state of a store whose catalog record is missing: derived from the segments, whose metadata lists their rows.

Nothing here reads or writes; a writer that holds the upkeep lock puts the result as a record, and a reader that finds
no record, or not the segments that one names, uses it as long as it is open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from trajectory_store.catalog_log import Entry, State, runs_of
from trajectory_store.schema import Schema


@dataclass(frozen=True, kw_only=True)
class Unnamed:
    """A segment that is there and that the catalog does not name.

    Attributes:
        entry: what the catalog would record of it.
        schema: its columns.
        sources: of a merged one, the ordinals of the segments whose rows it holds.
        is_complete: a merged one was finished.
        commits: it holds commits, or may: its log cannot be read.
        catalog: the record of the catalog that its first commit refers to.
    """

    entry: Entry
    schema: Schema
    sources: tuple[int, ...] = ()
    is_complete: bool = False
    commits: bool = True
    catalog: int = 0


def rebuild(
    state: State,
    unnamed_segments: Iterable[Unnamed],
    failed: Collection[int],
    is_sound: Callable[[Unnamed], bool] = lambda _: False,
) -> State:
    """Return a state that counts what a lost record named.

    A segment counts that no record can have known, and so does a finished merge, in place of its sources. What was
    evicted does not come back: the ordinals of those segments stay in the catalog.

    Args:
        state: the newest that can be read.
        unnamed_segments: segments that it does not name.
        failed: segments that it names and that cannot be opened.
        is_sound: checks a finished merge whose sources are there as well.
    """
    unnamed_segments = _without_copies(state, sorted(unnamed_segments, key=lambda segment: segment.entry.ordinal))
    number, following = state.number, state.next_ordinal
    for segment in unnamed_segments:
        ordinal = segment.entry.ordinal
        unknown = ordinal >= following or segment.catalog > number
        is_named = any(ordinal in entry.sources for entry in state.entries)
        if not segment.entry.merged and segment.commits and unknown and not is_named and not state.was_removed(ordinal):
            state = _with_segment(state, segment)
    for segment in reversed(unnamed_segments):
        if segment.entry.merged and segment.is_complete and not any(map(state.was_removed, segment.sources)):
            replaced = [entry for entry in state.entries if not set(segment.sources).isdisjoint(entry.sources)]
            newer = all(
                set(segment.sources).issuperset(e.sources) and e.ordinal < segment.entry.ordinal for e in replaced
            )
            lost = not replaced or any(entry.ordinal in failed for entry in replaced)
            if newer and (lost or is_sound(segment)):
                state = _with_segment(state.without({entry.ordinal for entry in replaced}), segment)
    for entry in [entry for entry in state.entries if entry.merged and entry.ordinal in failed]:
        state = _split(state, entry, unnamed_segments)
    return state


def _without_copies(state: State, segments: Sequence[Unnamed]) -> list[Unnamed]:
    """Exclude folders that somebody copied under another number: the salt is a segment's own."""
    owner = {entry.salt: entry.ordinal for entry in state.entries}
    for segment in segments:
        owner.setdefault(segment.entry.salt, segment.entry.ordinal)
    return [segment for segment in segments if owner[segment.entry.salt] == segment.entry.ordinal]


def _with_segment(state: State, segment: Unnamed) -> State:
    new = [column for column in segment.schema if state.schema.find(column.name) is None]
    if new:
        state = replace(state, schema=state.schema.with_columns(new))
    owners = runs_of(sorted(segment.sources)) if segment.entry.merged else ()
    return state.with_entry(replace(segment.entry, owners=owners))


def _split(state: State, entry: Entry, segments: Sequence[Unnamed]) -> State:
    """Return the segments from which a merged one was made, as far as they still exist, in its place."""
    left = set(entry.sources)
    for segment in reversed(segments):
        sources = set(segment.sources or (segment.entry.ordinal,))
        if (
            segment.entry.kind == entry.kind
            and sources <= left
            and segment.commits
            and (segment.is_complete or not segment.entry.merged)
        ):
            left -= sources
            state = _with_segment(state, segment)
    if len(left) == len(entry.sources):
        return state
    if not left:
        return state.without({entry.ordinal})
    return state.with_entry(replace(entry, owners=runs_of(sorted(left))))


def is_superfluous(state: State, segment: Unnamed, whole: Collection[int]) -> bool:
    """Return whether nothing is lost if a segment that the catalog does not name is removed.

    This holds if its rows were removed permanently, if complete segments that the catalog names contain them, or if
    it never held any.
    """
    if segment.entry.ordinal >= state.next_ordinal:  # made by the owner of a later claim, and perhaps named by now
        return False
    home = {
        o: entry.ordinal for entry in state.entries for o in entry.sources if entry.ordinal != segment.entry.ordinal
    }
    sources = segment.sources if segment.entry.merged else (segment.entry.ordinal,)
    if sources and all(state.was_removed(o) or home.get(o) in whole for o in sources):
        return True
    return not segment.commits and not segment.entry.merged
