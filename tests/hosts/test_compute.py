"""One thread computes, first come first served, and no exception is ever lost."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from tests.support.worlds import turns
from tianflow.channels.doorbell import Doorbell
from tianflow.components.turns import Turns, Wait
from tianflow.hosts.compute import Compute

Opened = tuple[Compute, list[BaseException]]


class BreakError(Exception):
    """What a compute function raises here."""


def fail() -> None:
    raise BreakError("on purpose")


@pytest.fixture
def opened() -> Iterator[Opened]:
    orphans: list[BaseException] = []
    compute = Compute(name="compute-test", on_orphan=orphans.append)
    yield compute, orphans
    compute.close()
    compute._thread.join(10)
    assert not compute._thread.is_alive()


def held(
    started: threading.Event, go_on: threading.Event, then: Callable[[], object] = lambda: None
) -> Callable[[], object]:
    """A function that says that it runs, and ends when told to."""

    def work() -> object:
        started.set()
        assert go_on.wait(20)
        return then()

    return work


async def has_started(event: threading.Event) -> None:
    await asyncio.to_thread(event.wait, 10)


async def test_what_a_function_returns_comes_back(opened: Opened) -> None:
    compute, _ = opened
    assert 5 == await compute.run(lambda: 5)
    assert () == await compute.run(tuple)


async def test_everything_runs_on_the_one_thread(opened: Opened) -> None:
    compute, _ = opened
    names = await asyncio.gather(*(compute.run(threading.current_thread) for _ in range(20)))
    assert {compute._thread} == set(names)
    assert "compute-test" == compute._thread.name
    assert compute._thread.daemon, "a host ends without joining it"


async def test_who_came_first_is_first(opened: Opened) -> None:
    compute, _ = opened
    order: list[int] = []
    await asyncio.gather(
        *(compute.run(lambda number=number: order.append(number)) for number in range(200))
    )  # type: ignore[misc]  # mypy does not infer lambda defaults
    assert list(range(200)) == order


async def test_the_loop_is_free_meanwhile(opened: Opened) -> None:
    compute, _ = opened
    started, go_on = threading.Event(), threading.Event()
    running = asyncio.ensure_future(compute.run(held(started, go_on)))
    await has_started(started)
    await turns(10)
    assert not running.done()
    go_on.set()
    await running


async def test_an_exception_reaches_its_caller_with_its_traceback_and_the_next_runs(
    opened: Opened,
) -> None:
    compute, orphans = opened
    with pytest.raises(BreakError, match="on purpose") as caught:
        await compute.run(fail)
    assert "fail" in [entry.name for entry in caught.traceback]
    assert (7, []) == (await compute.run(lambda: 7), orphans)


async def test_a_stop_iteration_reaches_its_caller(opened: Opened) -> None:
    compute, orphans = opened
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await asyncio.wait_for(compute.run(lambda: next(iter(()))), 10)
    assert [] == orphans


async def test_the_exception_of_a_cancelled_caller_is_an_orphan(opened: Opened) -> None:
    compute, orphans = opened
    started, go_on = threading.Event(), threading.Event()
    running = asyncio.ensure_future(compute.run(held(started, go_on, fail)))
    await has_started(started)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    go_on.set()
    await compute.run(lambda: None)
    assert [BreakError] == [type(orphan) for orphan in orphans]


async def test_a_caller_that_is_cancelled_in_the_turn_of_its_exception_loses_it_to_the_orphans(
    opened: Opened,
) -> None:
    compute, orphans = opened
    started, go_on = threading.Event(), threading.Event()
    running = asyncio.ensure_future(compute.run(held(started, go_on, fail)))
    await has_started(started)
    go_on.set()
    compute._jobs.put(None)
    compute._thread.join(10)  # its answer is in the loop's queue now
    asyncio.get_running_loop().call_soon(running.cancel)
    await asyncio.wait([running])
    assert ([BreakError], True) == ([type(orphan) for orphan in orphans], running.cancelled())


async def test_the_result_of_a_cancelled_caller_is_no_orphan(opened: Opened) -> None:
    compute, orphans = opened
    started, go_on = threading.Event(), threading.Event()
    running = asyncio.ensure_future(compute.run(held(started, go_on)))
    await has_started(started)
    running.cancel()
    go_on.set()
    await compute.run(lambda: None)
    assert [] == orphans


def test_an_exception_after_the_loop_was_closed_is_an_orphan(opened: Opened) -> None:
    compute, orphans = opened
    started, go_on = threading.Event(), threading.Event()

    async def leave() -> None:
        running = asyncio.ensure_future(compute.run(held(started, go_on, fail)))
        await has_started(started)
        running.cancel()

    asyncio.run(leave())
    go_on.set()
    assert 3 == asyncio.run(compute.run(lambda: 3)), "the thread has survived it"
    assert [BreakError] == [type(orphan) for orphan in orphans]


def test_a_result_after_the_loop_was_closed_harms_nothing(opened: Opened) -> None:
    compute, orphans = opened
    started, go_on = threading.Event(), threading.Event()

    async def leave() -> None:
        running = asyncio.ensure_future(compute.run(held(started, go_on)))
        await has_started(started)
        running.cancel()

    asyncio.run(leave())
    go_on.set()
    assert (3, []) == (asyncio.run(compute.run(lambda: 3)), orphans)


async def test_closing_asks_what_runs_to_stop_and_lets_the_queue_empty(opened: Opened) -> None:
    compute, _ = opened
    assert not compute.stopping.is_set()
    running = asyncio.ensure_future(compute.run(lambda: compute.stopping.wait(20)))
    queued = asyncio.ensure_future(compute.run(lambda: "queued"))
    await turns(1)
    compute.close()
    assert (True, "queued") == (await running, await queued)
    await asyncio.to_thread(compute._thread.join, 10)
    assert not compute._thread.is_alive()


async def test_the_waiting_thread_keeps_no_result_alive(opened: Opened) -> None:
    class Result:
        pass

    compute, _ = opened
    result = await compute.run(Result)
    watched = weakref.ref(result)
    del result
    async with asyncio.timeout(10):
        while watched() is not None:
            gc.collect()
            await asyncio.sleep(0.001)  # the thread may still be on its way back to its queue


# Work that waits
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def with_bell() -> Iterator[tuple[Compute, Doorbell]]:
    bell = Doorbell.create()
    compute = Compute(name="compute-test", on_orphan=lambda _: None, bell=bell)
    yield compute, bell
    compute.close()
    compute._thread.join(10)
    assert not compute._thread.is_alive()
    bell.close()


async def test_other_work_runs_while_one_waits(with_bell: tuple[Compute, Doorbell]) -> None:
    compute, bell = with_bell
    over = threading.Event()

    def waits() -> Turns[str]:
        yield Wait(over.is_set)
        return "continued"

    waiting = asyncio.ensure_future(compute.run(waits))
    assert 5 == await compute.run(lambda: 5)
    assert not waiting.done()
    over.set()
    bell.ring()
    assert "continued" == await waiting


async def test_a_wait_ends_at_its_time(with_bell: tuple[Compute, Doorbell]) -> None:
    compute, _ = with_bell

    def waits() -> Turns[float]:
        until = time.monotonic() + 0.02
        yield Wait(lambda: False, until)
        return time.monotonic() - until

    assert await compute.run(waits) >= 0.0


async def test_waits_of_several_continue_in_any_order(
    with_bell: tuple[Compute, Doorbell],
) -> None:
    compute, bell = with_bell
    may: set[int] = set()
    order: list[int] = []

    def waits(number: int) -> Turns[None]:
        for _ in range(3):
            yield Wait(lambda: number in may)
        order.append(number)

    running = [
        asyncio.ensure_future(compute.run(lambda number=number: waits(number)))  # type: ignore[misc]
        for number in range(3)
    ]
    for number in (2, 0, 1):
        may.add(number)
        bell.ring()
        await running[number]
    assert [2, 0, 1] == order


async def test_an_exception_after_a_wait_reaches_its_caller(
    with_bell: tuple[Compute, Doorbell],
) -> None:
    compute, _ = with_bell

    def waits() -> Turns[None]:
        yield Wait(lambda: True)
        fail()

    with pytest.raises(BreakError):
        await compute.run(waits)


async def test_the_end_closes_what_waits(with_bell: tuple[Compute, Doorbell]) -> None:
    compute, _ = with_bell
    closed = threading.Event()

    def waits() -> Turns[None]:
        try:
            yield Wait(lambda: False)
        finally:
            closed.set()

    waiting = asyncio.ensure_future(compute.run(waits))
    await compute.run(lambda: None)
    compute.close()
    await has_started(closed)
    assert closed.is_set()
    waiting.cancel()


async def test_work_that_never_waits_needs_no_doorbell(opened: Opened) -> None:
    compute, _ = opened

    def never() -> Turns[int]:
        return 7
        yield

    assert 7 == await compute.run(never)


async def test_work_may_not_wait_on_a_thread_without_a_doorbell(opened: Opened) -> None:
    compute, _ = opened

    def waits() -> Turns[None]:
        yield Wait(lambda: True)

    with pytest.raises(RuntimeError, match="without a doorbell"):
        await compute.run(waits)
