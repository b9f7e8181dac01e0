"""The errors of what lives in the store's package, as the pipeline's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, RunExistsError
from trajectory_store import BatchError, SchemaError, StoreBusyError, TokenizerNotFoundError


@contextmanager
def as_ours() -> Iterator[None]:
    """Raise a DataError for rows that the store's package rejects, and a DefinitionError for what it was asked with."""
    try:
        yield
    except TokenizerNotFoundError as error:
        raise MissingPathError(str(error)) from error
    except StoreBusyError as error:
        raise RunExistsError(str(error)) from error
    except BatchError as error:
        raise DataError(str(error)) from error
    except SchemaError as error:
        raise DefinitionError(str(error)) from error
