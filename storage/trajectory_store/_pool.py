"""Output buffers that are reused as soon as nobody holds them.

Fresh memory costs a page fault per 4 KiB, which is more than the copy into it. A buffer is lent again only
when its reference count says that no array, tensor or view of it is alive, so a batch stays valid for as
long as anything points to it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_IDLE_REFERENCES = 2
_SMALLEST = 1 << 12


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
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._bytes = 0
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an uninitialised contiguous array that nothing else uses."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if nbytes == 0 or nbytes > self._max_bytes // 4:
            return np.empty(shape, dtype)
        with self._lock:
            buffers = self._buffers
            for i in range(len(buffers)):
                if nbytes <= len(buffers[i]) <= 4 * max(nbytes, _SMALLEST) and (
                    sys.getrefcount(buffers[i]) == _IDLE_REFERENCES
                ):
                    return buffers[i][:nbytes].view(dtype).reshape(shape)
            size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
            if self._bytes + size > self._max_bytes:
                self._drop_idle()
            fresh = np.empty(size, np.uint8)
            if self._bytes + size <= self._max_bytes:
                buffers.append(fresh)
                self._bytes += size
            return fresh[:nbytes].view(dtype).reshape(shape)

    def _drop_idle(self) -> None:
        kept: list[npt.NDArray[np.uint8]] = []
        while self._buffers:
            buffer = self._buffers.pop()
            if sys.getrefcount(buffer) > _IDLE_REFERENCES:
                kept.append(buffer)
        self._buffers = kept
        self._bytes = sum(len(b) for b in kept)
