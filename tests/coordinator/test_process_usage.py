"""CPU time and memory of processes: read from /proc, and never lower than before."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import time

import pytest

from tianflow.coordinator import process_usage
from tianflow.coordinator.process_usage import ProcessReading, ProcessUsage, read_process


def reading(pid: int, cpu_s: float, *, start: int = 1, memory: int = 100) -> ProcessReading:
    return ProcessReading((pid, start), cpu_s, memory)


def test_a_process_is_read_as_the_system_counts_it() -> None:
    before = read_process(os.getpid())
    assert before is not None
    began = time.process_time()
    block = mmap.mmap(-1, 2**25)  # memory that the process did not have before
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1  # written, so that it is resident
    while time.process_time() - began < 0.1:
        pass
    after = read_process(os.getpid())
    assert after is not None
    assert before.identity == after.identity
    assert 0.05 < after.cpu_s - before.cpu_s < 0.5
    assert abs(after.cpu_s - time.process_time()) < 0.5
    assert after.memory_bytes - before.memory_bytes > len(block) // 2
    block.close()


def test_a_process_that_has_ended_is_not_read() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read_process(child.pid) is None, "it is a zombie"
    child.wait()
    assert read_process(child.pid) is None


def test_a_replaced_process_continues_the_cpu_time_of_its_name() -> None:
    usage = ProcessUsage(pids=dict)
    seen = []
    for found in (
        reading(7, 1.0),
        reading(7, 3.0),
        reading(8, 0.5),
        reading(8, 0.75, start=2),  # the pid was reused
        reading(8, 1.0, start=2),
    ):
        usage.take({"learner": found})
        seen.append(usage.statistics["learner"].cpu_s)
    assert [1.0, 3.0, 3.5, 4.25, 4.5] == seen


def test_a_process_that_has_ended_leaves_its_cpu_time_and_no_memory() -> None:
    usage = ProcessUsage(pids=dict)
    usage.take({"learner": reading(7, 1.0), "actors-0": reading(8, 2.0)})
    usage.take({"learner": reading(7, 1.5)})
    assert (1.5, 100) == (
        usage.statistics["learner"].cpu_s,
        usage.statistics["learner"].memory_bytes,
    )
    assert (2.0, None) == (
        usage.statistics["actors-0"].cpu_s,
        usage.statistics["actors-0"].memory_bytes,
    )


async def test_processes_are_read_again_and_again_until_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_usage, "EVERY_S", 0.001)
    asked: list[int] = []
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read(pid: int) -> ProcessReading | None:
        asked.append(pid)
        if len(asked) >= 6:
            loop.call_soon_threadsafe(enough.set)
        return reading(pid, float(len(asked))) if pid == 7 else None

    usage = ProcessUsage(pids=lambda: {"learner": 7, "gone": 9}, read=read)
    assert {} == usage.statistics
    running = asyncio.create_task(usage.run())
    await asyncio.wait_for(enough.wait(), 10.0)
    running.cancel()
    await asyncio.wait([running])
    assert {"learner"} == set(usage.statistics)
    assert [7, 9] * 3 == asked[:6]


async def test_a_reading_that_fails_costs_itself_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_usage, "EVERY_S", 0.001)
    asked: list[int] = []

    def read(pid: int) -> ProcessReading:
        asked.append(pid)
        if len(asked) <= 3:
            raise IndexError("list index out of range")
        return reading(pid, 1.0)

    usage = ProcessUsage(pids=lambda: {"learner": 7}, read=read)
    running = asyncio.create_task(usage.run())
    async with asyncio.timeout(10.0):
        while not usage.statistics:  # noqa: ASYNC110 - a reading tells nobody
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert 1 == caplog.text.count("the processes of the run cannot be measured")
