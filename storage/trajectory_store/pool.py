"""Output buffers that are reused as soon as nobody holds them.

Fresh memory costs a page fault per 4 KiB, which is more than the copy into it. A buffer is lent again only
when its reference count says that no array, tensor or view of it is alive, so a batch stays valid for as
long as anything points to it.
"""

from __future__ import annotations

import math
import threading
from sys import getrefcount
from typing import Any

import numpy as np
import numpy.typing as npt

_IDLE_REFERENCES = 2
_SMALLEST = 12


class BufferPool:
    """Arrays backed by reused memory.

    Args:
        max_bytes: memory kept for reuse; beyond it, arrays come from the allocator.

    >>> pool = BufferPool()
    >>> first = pool.take((2, 3), np.dtype("int32"))
    >>> first.shape, first is pool.take((2, 3), np.dtype("int32"))
    ((2, 3), False)
    """

    def __init__(self, max_bytes: int = 1 << 28) -> None:
        self._buffers: list[list[npt.NDArray[np.uint8]]] = [[] for _ in range(64)]  # by the power of two of their size
        self._bytes = 0
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an uninitialised contiguous array that nothing else uses."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0 or nbytes > self._max_bytes // 4:
            return np.empty(shape, dtype)
        power = max(_SMALLEST, (nbytes - 1).bit_length())
        with self._lock:
            for buffers in self._buffers[power : power + 2]:
                for i in range(len(buffers)):
                    if getrefcount(buffers[i]) == _IDLE_REFERENCES:
                        return np.ndarray(shape, dtype, buffers[i])
            size = 1 << power
            if self._bytes + size > self._max_bytes:
                self._drop_idle()
            fresh = np.empty(size, np.uint8)
            if self._bytes + size <= self._max_bytes:
                self._buffers[power].append(fresh)
                self._bytes += size
            return np.ndarray(shape, dtype, fresh)

    def _drop_idle(self) -> None:
        for buffers in self._buffers:
            for i in reversed(range(len(buffers))):
                if getrefcount(buffers[i]) == _IDLE_REFERENCES:
                    self._bytes -= len(buffers.pop(i))
