"""Arguments of `TrajectoryRecorder.record`: lists, and the arrays and tensors of any library, without importing one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Scalar(Protocol):
    """A number of NumPy, or a tensor of one element."""

    def tolist(self) -> Any:
        """Return it as a number of Python."""
        ...


class Array(Scalar, Protocol):
    """An array of NumPy, or a tensor."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __getitem__(self, index: Any, /) -> Any: ...


Numbers = Sequence[float | Scalar | None] | Array
"""One number per completion; None if it is unknown."""
TokenIds = Sequence[Sequence[int] | Array] | Array
"""Token ids or versions, or a mask, per completion."""
TokenNumbers = Sequence[Sequence[float | None] | Array | None] | Array
"""A number per token of each completion."""
