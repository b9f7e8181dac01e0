"""What a test does at the moment of a call: look at it, let something else happen, or let it fail. It replaces nothing.

The interpreter reports each call of a function, so its callers and its code are the product's: a test of what another
process does between two steps, or of an error at one of them, needs no patch of an attribute.

>>> import textwrap
>>> with at_call(textwrap.dedent) as calls:
...     _ = textwrap.dedent(" a")
>>> calls[0].arguments["text"], calls[0].returned
(' a', 'a')
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any


@dataclass
class Call:
    """One call of the function."""

    arguments: dict[str, Any]
    number: int
    """1 for the first."""
    caller: str
    """The name of the module that called it."""
    returned: Any = None


Act = Callable[[Call], object]


@contextmanager
def at_call(
    function: Callable[..., Any], *, before: Act | None = None, after: Act | None = None
) -> Iterator[list[Call]]:
    """Watch the calls of a Python function, in this thread and in those that begin meanwhile.

    Args:
        function: or method, as its class has it. A cached function has no calls to watch: AttributeError.
        before: is called as it begins; what this raises, the call raises, and is then no longer watched in its thread.
        after: is called as it returns; what this raises, the call raises in place of its result, and likewise.

    Yields:
        The calls so far.
    """
    code: CodeType = inspect.unwrap(function, stop=lambda wrapped: hasattr(wrapped, "cache_info")).__code__
    calls: list[Call] = []
    active: dict[FrameType, Call] = {}
    outer, outer_of_threads = sys.getprofile(), threading.getprofile()

    def watch(frame: FrameType, event: str, returned: object) -> None:
        if frame.f_code is code and event in ("call", "return"):
            if event == "call":
                call = active[frame] = Call(
                    arguments=inspect.getargvalues(frame).locals.copy(),
                    number=len(calls) + 1,
                    caller=frame.f_back.f_globals["__name__"] if frame.f_back is not None else "",
                )
                calls.append(call)
                if before is not None:
                    before(call)
            elif (call := active.pop(frame, None)) is not None:
                call.returned = returned
                if after is not None:
                    after(call)
        if outer is not None:
            outer(frame, event, returned)

    sys.setprofile(watch)
    threading.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(outer)
        threading.setprofile(outer_of_threads)


def fails(error: BaseException, *, number: int = 1) -> Act:
    """Let one call fail, by default the first."""

    def fail(call: Call) -> None:
        if call.number == number:
            raise error

    return fail
