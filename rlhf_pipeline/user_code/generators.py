"""The process's random generators, seeded for the task of one prompt."""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Awaitable, Generator
from typing import Any, Final

_SWAP: Final = threading.RLock()
"""Only one task at a time uses the process's generators."""


class SeededGenerators:
    """Seeds `random`, and NumPy if it is in use, within the context.

    On re-entry they continue from the same point, so a coroutine can be driven stretch by stretch: between two of its
    `await`s the generators are those of others. Only code that is driven like this waits for each other.

    >>> with SeededGenerators(3):
    ...     first = random.random()
    >>> with SeededGenerators(3):
    ...     random.random() == first
    True
    """

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._states: tuple[Any, Any] = (None, None)
        self._before: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        _SWAP.acquire()
        numpy = _numpy()
        self._before = random.getstate(), None if numpy is None else numpy.random.get_state()
        if self._seed is not None:
            random.seed(self._seed)
            if numpy is not None:
                numpy.random.seed(self._seed % 2**32)
            self._seed = None
        else:
            _put(self._states)

    def __exit__(self, *_: object) -> None:
        numpy = _numpy()
        self._states = random.getstate(), None if numpy is None else numpy.random.get_state()
        _put(self._before)
        _SWAP.release()

    @types.coroutine
    def drive(self, awaitable: Awaitable[Any]) -> Generator[Any, Any, Any]:
        """Await something whose every stretch draws from these generators."""
        steps: Any = awaitable.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            with self:
                try:
                    waits_for = steps.send(value) if error is None else steps.throw(error)
                except StopIteration as end:
                    return end.value
            value, error = None, None
            try:
                value = yield waits_for
            except BaseException as raised:  # noqa: BLE001 - a cancellation, too, is for the coroutine
                error = raised


def _numpy() -> Any:
    return sys.modules.get("numpy")


def _put(states: tuple[Any, Any]) -> None:
    if states[0] is not None:
        random.setstate(states[0])
    if states[1] is not None:
        _numpy().random.set_state(states[1])
