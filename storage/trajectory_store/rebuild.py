"""What counts where the catalog's word is missing: found from the segments, whose metadata says whose rows they hold.

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
        entry: what the catalog would say of it.
        schema: its columns.
        sources: of a merged one, the ordinals of the segments whose rows it holds.
        whole: a merged one was finished.
        commits: it holds commits, or may: its log cannot be read.
        catalog: the record of the catalog that its first commit refers to.
    """

    entry: Entry
    schema: Schema
    sources: tuple[int, ...] = ()
    whole: bool = False
    commits: bool = True
    catalog: int = 0


def rebuild(
    state: State,
    found: Iterable[Unnamed],
    failed: Collection[int],
    is_sound: Callable[[Unnamed], bool] = lambda _: False,
) -> State:
    """Return a state that counts what a lost record named.

    A segment counts that no record can have known, and so does a finished merge, in place of its sources. What was
    evicted does not come back: the ordinals of those segments stay in the catalog.

    Args:
        state: the newest that can be read.
        found: segments that it does not name.
        failed: segments that it names and that cannot be opened.
        is_sound: checks a finished merge whose sources are there as well.
    """
    found = _without_copies(state, sorted(found, key=lambda one: one.entry.ordinal))
    number, following = state.number, state.next_ordinal
    for one in found:
        ordinal = one.entry.ordinal
        unknown = ordinal >= following or one.catalog > number
        held = any(ordinal in entry.sources for entry in state.entries)
        if not one.entry.merged and one.commits and unknown and not held and not state.has_gone(ordinal):
            state = _named(state, one)
    for one in reversed(found):
        if one.entry.merged and one.whole and not any(map(state.has_gone, one.sources)):
            replaced = [entry for entry in state.entries if not set(one.sources).isdisjoint(entry.sources)]
            newer = all(set(one.sources).issuperset(e.sources) and e.ordinal < one.entry.ordinal for e in replaced)
            lost = not replaced or any(entry.ordinal in failed for entry in replaced)
            if newer and (lost or is_sound(one)):
                state = _named(state.without({entry.ordinal for entry in replaced}), one)
    for entry in [entry for entry in state.entries if entry.merged and entry.ordinal in failed]:
        state = _split(state, entry, found)
    return state


def _without_copies(state: State, found: Sequence[Unnamed]) -> list[Unnamed]:
    """Leave out folders that somebody copied under another number: the salt is a segment's own."""
    owner = {entry.salt: entry.ordinal for entry in state.entries}
    for one in found:
        owner.setdefault(one.entry.salt, one.entry.ordinal)
    return [one for one in found if owner[one.entry.salt] == one.entry.ordinal]


def _named(state: State, one: Unnamed) -> State:
    new = [column for column in one.schema if state.schema.find(column.name) is None]
    if new:
        state = replace(state, schema=state.schema.with_columns(new))
    owners = runs_of(sorted(one.sources)) if one.entry.merged else ()
    return state.with_entry(replace(one.entry, owners=owners))


def _split(state: State, entry: Entry, found: Sequence[Unnamed]) -> State:
    """Name the segments from which a merged one was made, as far as they are still there, in its place."""
    left = set(entry.sources)
    for one in reversed(found):
        held = set(one.sources or (one.entry.ordinal,))
        if one.entry.kind == entry.kind and held <= left and one.commits and (one.whole or not one.entry.merged):
            left -= held
            state = _named(state, one)
    if len(left) == len(entry.sources):
        return state
    if not left:
        return state.without({entry.ordinal})
    return state.with_entry(replace(entry, owners=runs_of(sorted(left))))


def is_superfluous(state: State, one: Unnamed, whole: Collection[int]) -> bool:
    """Return whether nothing is lost if a segment that the catalog does not name is removed.

    That is so if its rows were removed for good, if segments hold them that the catalog names and that are whole, or if
    it never held any.
    """
    if one.entry.ordinal >= state.next_ordinal:  # made by the owner of a later claim, and perhaps named by now
        return False
    home = {o: entry.ordinal for entry in state.entries for o in entry.sources if entry.ordinal != one.entry.ordinal}
    held = one.sources if one.entry.merged else (one.entry.ordinal,)
    if held and all(state.has_gone(o) or home.get(o) in whole for o in held):
        return True
    return not one.commits and not one.entry.merged
