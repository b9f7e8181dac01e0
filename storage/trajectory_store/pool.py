"""Memory that is reused as soon as nothing refers to it.

Fresh memory costs a page fault per 4 KiB, which is more than the copy into it. A buffer cannot be written while an
array, tensor or view of it is alive, so a batch stays valid for as long as anything refers to it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store import fork_safety

_SMALLEST = 12


class BufferPool:
    """Arrays backed by reused memory.

    Args:
        max_bytes: maximum memory that is kept for reuse; beyond it, arrays are newly allocated.

    >>> pool = BufferPool()
    >>> first = pool.take((2, 3), np.dtype("int32"))
    >>> first.shape, np.shares_memory(first, pool.take((2, 3), np.dtype("int32")))
    ((2, 3), False)
    >>> pool.join([b"ab", b"", memoryview(b"cd")], (2, 2), np.dtype("uint8")).tolist()
    [[97, 98], [99, 100]]
    """

    def __init__(self, max_bytes: int = 1 << 28) -> None:
        self._buffers: list[list[BytesIO]] = [[] for _ in range(64)]  # by the power of two of their size
        self._bytes = 0
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        fork_safety.guard(self, 4, self._lock)
        self._zeros = memoryview(b"")

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an uninitialised contiguous array that is not otherwise in use."""
        return self.join((), shape, dtype)

    def join(self, pieces: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array that contains the bytes of some buffers in order; each byte is written once.

        Args:
            pieces: contiguous buffers that together fill the array.
            shape: of the array.
            dtype: of the array.
        """
        count = math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        with self._lock:
            buffer = self._idle(count * dtype.itemsize)
            buffer.writelines(pieces)
            return np.frombuffer(buffer.getbuffer(), dtype, count).reshape(shape)  # np.ndarray would drop the view

    def zeros(self, nbytes: int) -> memoryview:
        """Return at least `nbytes` zero bytes, to be joined."""
        if len(self._zeros) < nbytes:
            self._zeros = memoryview(bytes(2 * nbytes))
        return self._zeros

    def _idle(self, nbytes: int) -> BytesIO:
        power = max(_SMALLEST, (nbytes - 1).bit_length())
        if nbytes <= self._max_bytes // 4:
            for buffers in self._buffers[power : power + 2]:
                for buffer in buffers:
                    buffer.seek(0)
                    if _is_idle(buffer):
                        return buffer
        size = 1 << power
        if self._bytes + size > self._max_bytes:
            self._drop_idle()
        fresh = BytesIO()
        if nbytes <= self._max_bytes // 4 and self._bytes + size <= self._max_bytes:
            self._buffers[power].append(fresh)
            self._bytes += size
            nbytes = size
        fresh.seek(nbytes - 1)
        fresh.write(b"\0")
        fresh.seek(0)
        return fresh

    def _drop_idle(self) -> None:
        for power, buffers in enumerate(self._buffers):
            busy = [buffer for buffer in buffers if not _is_idle(buffer)]
            self._bytes -= (len(buffers) - len(busy)) << power
            self._buffers[power] = busy


def _is_idle(buffer: BytesIO) -> bool:
    """Return whether no view of a buffer is alive."""
    try:
        buffer.write(b"")
    except BufferError:
        return False
    return True
