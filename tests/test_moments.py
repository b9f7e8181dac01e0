"""The helper that acts at the moment of a call: it sees calls of every thread, and its errors are those of the call."""

from __future__ import annotations

import threading

import pytest

from tests.moments import Call, at_call, fails


class Counter:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int, *, times: int = 1) -> int:
        """Add a number."""
        self.count += number * times
        return self.count


def test_calls_are_seen_with_their_arguments_and_results():
    """In nested contexts, in a thread that begins meanwhile, and not after the context."""
    counter = Counter()
    with at_call(Counter.add) as outer, at_call(Counter.__init__) as made:
        counter.add(1, times=2)
        thread = threading.Thread(target=counter.add, args=(3,))
        thread.start()
        thread.join()
        Counter()
    counter.add(7)
    assert [(call.arguments["number"], call.arguments["times"], call.returned) for call in outer] == [
        (1, 2, 2),
        (3, 1, 5),
    ]
    assert [call.number for call in made] == [1]


def test_what_happens_at_a_call_happens_once_and_in_order():
    """Before the call it acts on what the call finds; after it, on what the call left."""
    counter = Counter()

    def double(call: Call) -> None:
        call.arguments["self"].count *= 10

    counter.add(1)
    with at_call(Counter.add, before=double):
        assert counter.add(1) == 11
    with at_call(Counter.add, after=double):
        assert counter.add(1) == 12
    assert counter.count == 120


@pytest.mark.parametrize(("moment", "count"), [("before", 1), ("after", 3)])
def test_an_error_at_a_call_is_raised_by_the_call(moment, count):
    """Before it, nothing has happened; after it, all has. The next call works."""
    counter = Counter()
    with at_call(Counter.add, **{moment: fails(OSError("full"), number=2)}):
        counter.add(1)
        with pytest.raises(OSError, match="full"):
            counter.add(2)
        assert counter.count == count
        counter.add(4)
    assert counter.count == count + 4
