"""One loop, one pool and one clock: what hangs or blocks costs its own call only."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_pipeline.user_code.generators import SeededGenerators
from rlhf_pipeline.user_code.runtime import Call, Limit, Runtime, in_thread, process_runtime
from rlhf_pipeline.user_code.threads import Lane


async def sleeps(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def outcomes(runtime: Runtime, *calls: Call, limit: Limit | None = None) -> list[Any]:
    """Begin calls and wait for each."""
    runtime.begin(calls, limit=limit)
    return [runtime.wait(call) for call in calls]


def coroutine(work: Callable[[], Any], **how: Any) -> Call:
    return Call("a coroutine", work, is_async=True, **how)


def test_calls_run_side_by_side_in_one_loop_and_one_pool():
    """64 of each kind that wait half a second take little more than that."""
    runtime, started = Runtime(), time.monotonic()
    calls = [Call("def", lambda: time.sleep(0.5)) for _ in range(64)]
    calls += [coroutine(lambda: sleeps(0.5)) for _ in range(64)]
    calls += [Call("returns a coroutine", lambda: sleeps(0.5)) for _ in range(64)]
    assert outcomes(runtime, *calls) == [None] * 64 + [0.5] * 128
    assert time.monotonic() - started < 3.0


def test_a_limit_keeps_order_and_a_lane_keeps_its_thread():
    """Calls of one lane are made in one thread, in the order in which they were begun."""
    runtime, order = Runtime(threads=4), list[int]()
    lane = Lane()

    def note(number: int) -> int:
        order.append(number)
        return threading.get_ident()

    calls = [Call("note", lambda number=number: note(number)) for number in range(100)]
    assert len({*outcomes(runtime, *calls, limit=Limit(1, lane))}) == 1
    assert order == [*range(100)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_hanging_call_takes_neither_thread_nor_place_from_others(is_async: bool):
    """It ends at its deadline, and the next call of its limit begins then."""
    held, runtime = threading.Event(), Runtime(threads=1)

    async def hangs() -> None:
        await asyncio.Event().wait()

    calls = [Call("hangs", hangs if is_async else held.wait, timeout_s=0.2, late="too late", is_async=is_async)]
    calls += [coroutine(lambda: sleeps(0.0)) if is_async else Call("ends", lambda: 0.0) for _ in range(3)]
    found = outcomes(runtime, *calls, limit=Limit(1))
    assert isinstance(found[0], TimeoutError)
    assert str(found[0]) == "too late"
    assert found[1:] == [0.0] * 3
    held.set()


def test_a_coroutine_that_blocks_the_loop_makes_no_other_call_late():
    """It is named; others have the time that it took, and the loop goes on in another thread once it is late."""
    runtime = Runtime()

    async def blocks() -> None:
        time.sleep(4.0)

    async def nested() -> None:
        await asyncio.gather(blocks(), sleeps(0.1))

    for work in (blocks, nested):
        others = [coroutine(lambda: sleeps(0.3), timeout_s=0.45) for _ in range(8)]
        started = time.monotonic()
        found = outcomes(runtime, coroutine(work, timeout_s=0.4), *others)
        assert isinstance(found[0], TimeoutError)
        assert found[1:] == [0.3] * 8
        assert time.monotonic() - started < 3.0
    assert any("a coroutine blocked the event loop for" in sentence for sentence in runtime.take_notices())


def test_clients_outlive_a_coroutine_that_blocks_their_loop():
    """A semaphore that calls before and after share belongs to the same loop."""
    runtime, shared = Runtime(), asyncio.Semaphore(1)

    async def blocks() -> None:
        time.sleep(2.0)

    async def uses() -> str:
        async with shared:
            await asyncio.sleep(0.05)
        return "used"

    calls = [coroutine(uses) for _ in range(4)]
    assert outcomes(runtime, *calls[:2], coroutine(blocks, timeout_s=0.2), *calls[2:])[-2:] == ["used", "used"]
    assert outcomes(runtime, coroutine(uses), coroutine(uses)) == ["used", "used"]


def test_time_for_which_others_block_does_not_count():
    """Sixteen calls that block for a tenth of a second each, with a deadline of one second: none is late."""

    async def blocks() -> int:
        time.sleep(0.1)
        await asyncio.sleep(0)
        return 1

    assert outcomes(Runtime(), *(coroutine(blocks, timeout_s=1.0) for _ in range(16))) == [1] * 16


def test_a_tool_runs_in_the_thread_of_its_conversation():
    """So does what a tool returns in a loop of its own; one that exits the process ends its call only."""
    runtime, lane = process_runtime(), Lane()

    async def calls_tools() -> tuple[int, int]:
        return await in_thread("a tool", threading.get_ident, {}), await in_thread("a tool", threading.get_ident, {})

    direct, tools = Call("direct", threading.get_ident), coroutine(calls_tools)
    runtime.begin([direct], lane=lane)
    runtime.wait(direct)
    runtime.begin([tools], lane=lane)
    assert runtime.wait(tools) == (direct.outcome, direct.outcome)
    (failed,) = outcomes(runtime, coroutine(lambda: in_thread("a tool", os.sys.exit, {})))  # type: ignore[attr-defined]
    assert isinstance(failed, RuntimeError)
    assert str(failed) == "SystemExit: "
    runtime.pool.close(lane)


def test_calls_that_nobody_waits_for_end():
    """Given up, a coroutine is cancelled, and a call that waits for its place is not made."""
    runtime, begun, cancelled = Runtime(), threading.Event(), threading.Event()

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    calls, limit = [coroutine(waits), coroutine(lambda: sleeps(0.0))], Limit(1)
    runtime.begin(calls, limit=limit)
    assert begun.wait(5.0)
    runtime.cancel_unawaited(calls)
    assert cancelled.wait(5.0)
    assert outcomes(runtime, coroutine(lambda: sleeps(0.0)), limit=limit) == [0.0]


def test_a_forked_process_has_its_own_loop():
    """The threads of its parent are not there, and its calls end all the same."""
    assert outcomes(process_runtime(), coroutine(lambda: sleeps(0.0))) == [0.0]
    child = os.fork()
    if not child:
        os._exit(int(outcomes(process_runtime(), coroutine(lambda: sleeps(0.0))) != [0.0]))
    assert os.waitpid(child, 0)[1] == 0


def test_generators_are_seeded_at_each_stretch_of_a_coroutine():
    """Coroutines that draw by turns draw what each would draw alone, and nobody else's draws change."""

    async def draws() -> list[float]:
        return [random.random() for _ in range(4) if await asyncio.sleep(0.01) is None]

    async def together(*seeds: int) -> list[list[float]]:
        async def driven(seed: int) -> list[float]:
            return await SeededGenerators(seed).drive(draws())

        return await asyncio.gather(*(driven(seed) for seed in seeds))

    random.seed(7)
    expected = random.random()
    random.seed(7)
    drawn = asyncio.run(together(1, 2, 1))
    assert random.random() == expected
    assert drawn[0] == drawn[2] != drawn[1]
    assert [drawn[0]] == asyncio.run(together(1))
