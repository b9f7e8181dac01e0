"""Dumps of `torch.save`, as files of an import."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DataError


@dataclass(frozen=True, slots=True)
class TorchDump:
    """A file of `torch.save` with a list of rows under `samples`, as slime writes it. It is read whole.

    Only tensors and plain values are loaded, no objects: nothing in the file is executed.
    """

    path: Path
    container: str = "pt"

    def rows(
        self, *, arrays: bool = False, growing: bool = False, on_bad: Callable[[DataError], None] | None = None
    ) -> Generator[tuple[int, dict[str, Any]], None, None]:
        """Yield `(number, row)`, counted from 0, tensors as lists; the arguments are those of `SourceFile.rows`."""
        import torch

        try:
            dump = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # what a damaged file raises is not of one type
            raise DataError(
                f"{self.path} cannot be read as tensors and plain values ({type(error).__name__}: "
                f"{str(error).splitlines()[0]}). Objects of custom classes are not loaded."
            ) from error
        if not isinstance(dump, dict) or not isinstance(dump.get("samples"), list):
            raise DataError(f"{self.path} has no list 'samples', so it is not slime's debug rollout data.")
        for number, sample in enumerate(dump["samples"]):
            yield number, {name: _plain(value) for name, value in sample.items()}

    def where(self, number: int) -> str:
        """Return the location of a row for error messages."""
        return f"{self.path}, row {number}"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
