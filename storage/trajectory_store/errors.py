"""The errors of the store, one tree; each subclass also derives from a built-in exception.

    StoreError
    +-- SchemaError (ValueError)              a schema or column definition is wrong
    |   +-- UnknownColumnError                the schema does not have the column
    |   +-- TokenizerNotFoundError (FileNotFoundError)  the tokenizer folder does not exist
    +-- BatchError (ValueError)               rows do not match the schema
    +-- StoreNotFoundError (FileNotFoundError)
    +-- StoreExistsError (FileExistsError)
    +-- NotAStoreError (ValueError)           the folder is not a store
    +-- FormatVersionError (ValueError)       written by another version of the format
    +-- StoreBusyError (BlockingIOError)      another process has exclusive use of the store
    +-- StoreClosedError (ValueError)         used after close()
    +-- ReadOnlyError (PermissionError)       a write to a store that is open for reading only
    +-- MissingRowError (LookupError)         an id is not in the store, or was removed from it
    |   +-- PlaceError (IndexError)           no row at this position in the order of arrival
    |   +-- SegmentGoneError                  the segment was removed since the last refresh
    |   +-- SnapshotGoneError                 a merge removed the values as of a snapshot
    +-- WriteFailedError (OSError)            the disk is full or failing; no acknowledged row is lost
    |   +-- UnsyncedError                     the written rows are in the store, but may not be on the disk
    +-- ReadFailedError (OSError)             the file system could not read the data
    +-- CorruptionError (ValueError)          the files are corrupted or inconsistent
    +-- MissingPackageError (ImportError)     an optional package is not installed

Every message reports the problem, its location and the next step.
"""

from __future__ import annotations

from collections.abc import Iterable


class StoreError(Exception):
    """The base class of all errors of this package."""


class SchemaError(StoreError, ValueError):
    """A schema or a column definition is invalid."""


class UnknownColumnError(SchemaError):
    """The schema does not have the column."""


class TokenizerNotFoundError(SchemaError, FileNotFoundError):
    """The specified tokenizer folder does not exist."""


class BatchError(StoreError, ValueError):
    """Rows do not match the schema."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is no store at the path."""


class StoreExistsError(StoreError, FileExistsError):
    """The path already exists."""


class NotAStoreError(StoreError, ValueError):
    """The folder is not a store."""


class FormatVersionError(StoreError, ValueError):
    """This release cannot read the format version of the store."""


class StoreBusyError(StoreError, BlockingIOError):
    """Another process has exclusive use of the store."""


class StoreClosedError(StoreError, ValueError):
    """The store was used after `close()`."""


class ReadOnlyError(StoreError, PermissionError):
    """A write was attempted on a store that is open for reading only."""


class MissingRowError(StoreError, LookupError):
    """An id is not in the store, or was removed from it."""


class PlaceError(MissingRowError, IndexError):
    """There is no row at this position in the order of arrival."""


class SegmentGoneError(MissingRowError):
    """A segment has been evicted or compacted since the last refresh. Reads refresh the store and retry."""

    missing: str = "a segment"
    """The segment or the object that is gone, by name."""

    @classmethod
    def of(cls, missing: str, event: str) -> SegmentGoneError:
        """Return the error for a segment or an object to which something happened."""
        error = cls(f"{missing} {event}. Call refresh() and get the ids from ids().")
        error.missing = missing
        return error


class SnapshotGoneError(MissingRowError):
    """A merge removed the values of a snapshot because later updates had replaced them."""


class WriteFailedError(StoreError, OSError):
    """The disk is full or failing. Acknowledged rows are safe and readable."""


class UnsyncedError(WriteFailedError):
    """A sync failed after a write. The written rows or values are in the store, but may not survive a power loss."""


class ReadFailedError(StoreError, OSError):
    """The file system could not read the data."""


class CorruptionError(StoreError, ValueError):
    """The files are corrupted or inconsistent."""


class DamageFoundError(CorruptionError):
    """A read that detects corruption is repeated without the corrupted rows. Callers never receive this error."""


class MissingPackageError(StoreError, ImportError):
    """An optional package that this store or format needs is not installed."""


def is_unknown(error: BaseException) -> bool:
    """Return whether a write may have happened, or may happen later: no system rejected it with a number."""
    return isinstance(error, WriteFailedError) and error.errno is None


def is_refused(error: BaseException) -> bool:
    """Return whether the system rejected a write, so that it has not happened and never will."""
    return isinstance(error, WriteFailedError) and not (isinstance(error, UnsyncedError) or is_unknown(error))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "row"), counted(0, "row")
    ('1 row', '0 rows')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a sentence with the nearest valid name, or with all valid names.

    >>> did_you_mean("input_idz", ["input_ids", "reward"])
    " Did you mean 'input_ids'?"
    >>> did_you_mean("zzz", ["b", "a"])
    ' Available: a, b.'
    """
    import difflib

    names = sorted(candidates)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else f" Available: {', '.join(names)}."
