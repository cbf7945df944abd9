"""Hosts are forked, reaped and reported exactly, and no process is left, whichever of them dies."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sized
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tianflow.core.process_table import carries, processes
from tianflow.errors import RunError
from tianflow.launchers import host_forker as forker_module
from tianflow.launchers.host_forker import ForkedHost, HostForker

pytestmark = pytest.mark.e2e

ECHO, END, SLEEP, LOOK, FAMILY = (
    f"tests.support.host_forker_targets:{name}"
    for name in ("echo", "end", "sleep", "look_around", "with_descendants")
)
STOPPED_FORK_SERVER = """
import asyncio, os, signal, socket, sys
from tianflow.launchers.host_forker import HostForker

async def main():
    async with HostForker(run_id=sys.argv[1]) as forker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        await forker.spawn("host", sys.argv[2], b"stay", [theirs.fileno()])
        ours.recv(4096)  # the host's family is complete
        os.kill(forker.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, forker.pid, os.WSTOPPED | os.WNOWAIT)
        print("stopped", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""
DAEMON = "tests.support.host_forker_targets:with_daemon"


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
async def forker(run_id: str) -> AsyncIterator[HostForker]:
    async with HostForker(run_id=run_id) as forker:
        yield forker
    assert [] == await of_run(run_id)


async def table() -> dict[int, str]:
    """Every process and its state. In a thread: a loop that reads /proc is a blocked loop."""
    return await asyncio.to_thread(lambda: {entry.pid: entry.state for entry in processes()})


async def of_run(run_id: str) -> list[int]:
    return await asyncio.to_thread(
        lambda: [entry.pid for entry in processes() if carries(entry.pid, "TIANFLOW_RUN", run_id)]
    )


async def is_in(pid: int, state: str | None) -> bool:
    return (await table()).get(pid) == state


async def is_empty(queue: Sized) -> bool:
    return not queue


async def numbers(run_id: str, expected: int) -> bool:
    return expected == len(await of_run(run_id))


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.005)


async def ask(
    forker: HostForker, name: str, target: str, payload: bytes = b""
) -> tuple[ForkedHost, socket.socket]:
    """Spawn with one end of a socket pair; the child and the other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        child = await forker.spawn(name, target, payload, [theirs.fileno()])
    return child, ours


async def receive(connection: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(connection, 1 << 20)


async def report_of(
    forker: HostForker, name: str, target: str, payload: bytes = b""
) -> tuple[ForkedHost, Any]:
    """Spawn; the child and what it says, as JSON."""
    child, connection = await ask(forker, name, target, payload)
    with connection:
        return child, json.loads(await receive(connection))


async def test_twenty_children_get_their_own_payload_and_descriptor(forker: HostForker) -> None:
    children = await asyncio.gather(
        *(ask(forker, f"actor-{index}", ECHO, f"payload {index}".encode()) for index in range(20))
    )
    for index, (child, connection) in enumerate(children):
        assert f"payload {index}|{child.pid}".encode() == await receive(connection)
    assert 20 == len({child.pid for child, _ in children})
    for child, connection in children:
        connection.close()
        assert 0 == await child.wait()


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another C library is not told how to keep memory"
)
async def test_memory_that_is_taken_again_and_again_stays_with_the_process(
    forker: HostForker,
) -> None:
    """Else each time brings 12,288 faults for 48 MB."""
    child, faults = await report_of(
        forker, "host", "tests.support.host_forker_targets:work_in_memory"
    )
    assert faults < 1000
    await child.wait()


def huge_pages_can_be_asked_for() -> bool:
    """As glibc 2.35 and later do, where the kernel leaves it to who asks."""
    library, version = platform.libc_ver()
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    recent = library == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
    return (
        recent
        and mode.exists()
        and "[madvise]" in mode.read_text()
        and bool(forker_module._huge_pages())
    )


@pytest.mark.skipif(
    not huge_pages_can_be_asked_for(),
    reason="this kernel or C library has no huge pages for who asks",
)
async def test_hosts_ask_for_huge_pages(forker: HostForker) -> None:
    child, asked = await report_of(forker, "host", "tests.support.host_forker_targets:pages")
    assert asked
    await child.wait()


@pytest.mark.parametrize(
    ("told", "asks"), [("2097152", True), ("536870912", False), ("", False), (None, False)]
)
def test_pages_that_are_too_huge_are_not_asked_for(
    told: str | None, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = tmp_path / "size"
    if told is not None:
        size.write_text(told)
    monkeypatch.setattr(forker_module, "_HUGE_PAGE", size)
    assert bool(forker_module._huge_pages()) == asks


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("return 0", 0),
        ("return 3", 3),
        ("nothing", 0),
        ("exit 4", 4),
        ("_exit 5", 5),
        ("raise", 1),
        ("signal 9", -9),
        ("signal 15", -15),
        ("signal 6", -6),
    ],
)
async def test_exit_status_is_what_the_target_made_it(
    forker: HostForker, how: str, status: int
) -> None:
    child = await forker.spawn("host", END, how.encode())
    assert status == await child.wait()
    assert status == child.returncode
    assert child.pid not in await table()


async def test_a_target_that_cannot_be_imported_is_an_exit_and_tells_why(
    run_id: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with HostForker(
        run_id=run_id
    ) as forker:  # after the capture began: hosts inherit what was stderr then
        assert (
            1
            == await (
                await forker.spawn("host", "tests.support.host_forker_targets:missing", b"")
            ).wait()
        )
    assert (
        "AttributeError: module 'tests.support.host_forker_targets' has no attribute 'missing'"
        in capfd.readouterr().err
    )


async def test_several_may_wait_for_one_child_and_a_cancelled_one_disturbs_nobody(
    forker: HostForker,
) -> None:
    child = await forker.spawn("host", SLEEP, b"")
    waiting = [asyncio.create_task(child.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    child.kill()
    assert [-9, -9] == await asyncio.gather(*waiting[1:])
    assert waiting[0].cancelled()


async def test_kill_ends_a_stopped_child(forker: HostForker) -> None:
    child = await forker.spawn("host", SLEEP, b"")
    os.kill(child.pid, signal.SIGSTOP)
    await eventually(lambda: is_in(child.pid, "T"))
    child.kill()
    assert -9 == await child.wait()


async def test_terminate_reaches_a_child_that_is_just_being_born(forker: HostForker) -> None:
    for index in range(20):
        child = await forker.spawn(f"host-{index}", SLEEP, b"")
        child.terminate()
        assert -15 == await child.wait()


async def test_kill_reaches_a_child_that_is_just_being_born(forker: HostForker) -> None:
    for index in range(20):
        child = await forker.spawn(f"host-{index}", SLEEP, b"")
        child.kill()
        assert -9 == await child.wait()


async def test_kill_and_terminate_do_nothing_once_it_has_exited(forker: HostForker) -> None:
    child = await forker.spawn("host", END, b"return 0")
    await child.wait()
    child.kill()
    child.terminate()
    assert 0 == await (await forker.spawn("host", END, b"return 0")).wait()
    assert 0 == child.returncode


@pytest.mark.parametrize("how", ["leave", "stay"])
async def test_an_exit_report_means_that_no_descendant_is_left(
    forker: HostForker, how: str
) -> None:
    other = await forker.spawn("other", SLEEP, b"")
    child, descendants = await report_of(forker, "host", FAMILY, how.encode())
    if how == "stay":
        child.kill()
    status = await child.wait()
    left = set(await table())
    assert set() == left & {child.pid, *descendants}
    assert 3 == len(descendants)
    assert (7 if how == "leave" else -9) == status
    assert other.returncode is None
    assert other.pid in left


async def test_descendants_of_a_living_host_outlive_the_end_of_another(forker: HostForker) -> None:
    keeper, descendants = await report_of(forker, "keeper", FAMILY, b"stay")
    assert 0 == await (await forker.spawn("host", END, b"return 0")).wait()
    assert set() == {*descendants} - set(await table())
    keeper.kill()
    await keeper.wait()


async def test_a_daemon_lives_as_long_as_the_host_that_started_it(forker: HostForker) -> None:
    keeper, daemon = await report_of(forker, "keeper", DAEMON)
    for index in range(3):
        assert 0 == await (await forker.spawn(f"host-{index}", END, b"return 0")).wait()
        assert daemon in await table()
    keeper.kill()
    await keeper.wait()
    assert daemon not in await table()


async def test_a_child_inherits_nothing_but_what_it_was_given(
    forker: HostForker, run_id: str
) -> None:
    bystander, idle = await ask(forker, "bystander", ECHO)
    child, seen = await report_of(forker, "learner", LOOK, bytes(3_000_000))
    assert [0, 1, 2, *seen["given"]] == seen["fds"]
    assert 3_000_000 == seen["payload"]
    assert child.pid == seen["pid"] == seen["session"]
    assert ("learner", run_id, "learner", "1") == (
        seen["name"],
        seen["run"],
        seen["host"],
        seen["omp"],
    )
    assert [] == seen["ignored"] == seen["blocked"]
    assert set() == {"pickle", "_pickle", "multiprocessing", "asyncio", "torch"} & set(
        seen["modules"]
    )
    idle.close()
    await asyncio.gather(bystander.wait(), child.wait())


async def test_preloaded_modules_are_there_and_hosts_draw_different_numbers(run_id: str) -> None:
    async with HostForker(run_id=run_id, preload=("numpy.random", "no_such_module")) as forker:
        seen = [(await report_of(forker, f"host-{index}", LOOK))[1] for index in range(2)]
        assert "numpy" in seen[0]["modules"]
        assert seen[0]["random"] != seen[1]["random"]
        assert ["no_such_module"] == list(forker.preload_failures)


async def test_a_preloaded_thread_makes_forking_impossible_and_the_error_says_so(
    run_id: str,
) -> None:
    async with HostForker(run_id=run_id, preload=("tests.support.host_forker_thread",)) as forker:
        with pytest.raises(RunError, match="2 threads run in the fork server"):
            await forker.spawn("host", END, b"return 0")


async def test_impossible_requests_are_refused_before_anything_is_forked(
    forker: HostForker,
) -> None:
    child = await forker.spawn("host", SLEEP, b"")
    with pytest.raises(ValueError, match="called 'host' already"):
        await forker.spawn("host", SLEEP, b"")
    with pytest.raises(ValueError, match="accepted: 'module:function'"):
        await forker.spawn("other", "tests.support.host_forker_targets", b"")
    with pytest.raises(ValueError, match="at most 252"):
        await forker.spawn("other", SLEEP, b"", [0] * 253)
    with pytest.raises(OSError, match="Bad file descriptor"):
        await forker.spawn("other", SLEEP, b"", [987_654])
    with pytest.raises(RuntimeError, match="inside"):
        await HostForker(run_id="never-entered").spawn("other", SLEEP, b"")
    child.kill()
    await child.wait()


async def test_a_cancelled_spawn_leaves_no_child(forker: HostForker, run_id: str) -> None:
    spawning = asyncio.create_task(forker.spawn("host", SLEEP, b""))
    await asyncio.sleep(0)  # the request is out, its answer is not in
    spawning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await spawning
    await forker.spawn("other", SLEEP, b"")
    await eventually(lambda: numbers(run_id, 2))  # the fork server and the other


async def test_leaving_kills_everybody_and_costs_no_descriptor(run_id: str) -> None:
    before = open_descriptors()
    for _ in range(5):
        async with HostForker(run_id=run_id) as forker:
            for index in range(4):
                assert 0 == await (await forker.spawn(f"early-{index}", END, b"return 0")).wait()
            child, descendants = await report_of(forker, "host", FAMILY, b"stay")
        assert -9 == child.returncode
        assert set() == set(await table()) & set(descendants)
    assert [] == await of_run(run_id)
    assert before == open_descriptors()
    with pytest.raises(ChildProcessError):  # no zombie either
        os.waitpid(-1, os.WNOHANG)  # noqa: ASYNC222 - it does not wait


async def test_leaving_does_not_wait_for_imports(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with asyncio.timeout(10.0):
        async with HostForker(
            run_id=run_id, preload=("slow_module",), end_timeout_s=60.0
        ) as forker:
            spawning = asyncio.create_task(forker.spawn("host", SLEEP, b""))
            await asyncio.sleep(0)
            spawning.cancel()
    assert [] == await of_run(run_id)


async def test_leaving_ends_in_time_when_the_fork_server_is_stopped(run_id: str) -> None:
    async with HostForker(run_id=run_id, end_timeout_s=0.2) as forker:
        child = await forker.spawn("host", SLEEP, b"")
        assert forker.pid is not None
        os.kill(forker.pid, signal.SIGSTOP)
        child.kill()
    assert -9 == child.returncode
    assert [] == await of_run(run_id)


async def test_a_stopped_fork_server_ends_with_a_coordinator_that_is_killed(run_id: str) -> None:
    """Its death signal continues it, so it ends its hosts and what they have started."""
    coordinator = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STOPPED_FORK_SERVER, run_id, FAMILY, stdout=subprocess.PIPE
    )
    assert coordinator.stdout is not None
    async with asyncio.timeout(30.0):
        assert b"stopped\n" == await coordinator.stdout.readline()
        assert 4 <= len(await of_run(run_id))
        coordinator.kill()
        await coordinator.wait()

    async def all_gone() -> bool:
        return not await of_run(run_id)

    await eventually(all_gone)


async def test_hosts_start_whatever_number_of_threads_the_shell_asks_for(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenBLAS starts its threads when NumPy is imported."""
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "8")
    async with HostForker(run_id=run_id, preload=("numpy",)) as nursery:
        assert 0 == await (await nursery.spawn("host", END, b"return 0")).wait()


async def test_the_death_of_the_fork_server_ends_its_children_and_the_next_spawn_starts_another(
    forker: HostForker, run_id: str
) -> None:
    child, _ = await report_of(forker, "host", FAMILY, b"stay")
    await eventually(lambda: numbers(run_id, 5))
    assert forker.pid is not None
    os.kill(forker.pid, signal.SIGKILL)
    assert -9 == await child.wait()
    assert [] == await of_run(run_id)
    assert not forker.alive
    assert 0 == await (await forker.spawn("host", END, b"return 0")).wait()
    assert forker.alive


async def test_a_fork_server_that_dies_again_and_again_is_an_error(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "suicidal_module.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with HostForker(run_id=run_id, preload=("suicidal_module",)) as forker:
        with pytest.raises(RunError, match="died 3 times"):
            await forker.spawn("host", END, b"return 0")


async def test_a_coordinator_that_does_not_read_stops_nobody(forker: HostForker) -> None:
    """More reports than the socket holds: the fork server goes on, and tells everything in
    the end.
    """
    assert forker._server is not None
    loop, fd = asyncio.get_running_loop(), forker._server.connection.fileno()
    children = [await forker.spawn(f"host-{index}", SLEEP, b"") for index in range(5)]
    loop.remove_reader(fd)
    try:
        for _ in range(1000):
            forker._post({"preload": []})  # each is answered
            await asyncio.sleep(0)
        for child in children:
            child.kill()
        await eventually(lambda: is_empty(forker._outbox))
        for child in children:
            await eventually(partial(is_in, child.pid, None))
    finally:
        loop.add_reader(fd, forker._receive, forker._server)
    assert [-9] * 5 == [await child.wait() for child in children]


COORDINATOR = """
import asyncio, json, sys
from tianflow.launchers.host_forker import HostForker
from tests.launchers.test_host_forker import FAMILY, SLEEP, report_of

async def main():
    async with HostForker(run_id=sys.argv[1]) as forker:
        _, descendants = await report_of(forker, "host", FAMILY, b"stay")
        await forker.spawn("other", SLEEP, b"")
        print(json.dumps(descendants), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_nobody_outlives_the_coordinator(run_id: str, number: int) -> None:
    root = ROOT
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(  # noqa: ASYNC220 - the processes under test have a loop of their own
        [sys.executable, "-c", COORDINATOR, run_id],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=root,
        env=environment,
    ) as coordinator:
        try:
            assert coordinator.stdout is not None
            assert 3 == len(json.loads(await asyncio.to_thread(coordinator.stdout.readline)))
            await eventually(lambda: numbers(run_id, 6))
            coordinator.send_signal(number)
            await asyncio.to_thread(coordinator.wait)
            await eventually(lambda: numbers(run_id, 0), within_s=5.0)
        finally:
            coordinator.kill()  # also when an assertion failed: leaving the context waits for it
