"""Packages that only some file formats need."""

from __future__ import annotations

import importlib
from typing import Any

from rlhf_pipeline.errors import DefinitionError


def need(module: str) -> Any:
    """Import a module of an optional package: pyarrow, datasets or zstandard.

    Raises:
        DefinitionError: the package is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DefinitionError(
            f"the package {module.partition('.')[0]} is required but not installed: pip install "
            "'rlhf-pipeline[exchange]'"
        ) from error
