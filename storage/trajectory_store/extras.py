"""Packages that the store uses where they are installed: of an extra of `trajectory-store`, or a trainer's own."""

from __future__ import annotations

import importlib
from typing import Any, Final

from trajectory_store.errors import MissingPackageError

_EXTRA: Final = {"pyarrow": "arrow", "obstore": "s3", "numcodecs": "zarr"}


def load(module: str, what: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: such as `obstore.store`.
        what: that needs it, as the subject of a sentence.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(
            f"{what} needs the package {package}. Install it: pip install "
            + (f"'trajectory-store[{_EXTRA[package]}]'" if package in _EXTRA else package)
        ) from error
