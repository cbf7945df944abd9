"""Worker: a run whose events many clients read, and those clients in a process of their own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib import child
from benchmarks.workers import training, turns
from tianflow import open_run
from tianflow.hosts import event_loop as loops
from tianflow.rundir.control_file import ControlFile
from tianflow.server.common import client


async def watch(
    config: Path, window: training.Window, runs: Path, windows: int, readers: int
) -> dict[str, Any]:
    """Measure windows of the run alone and windows beside the readers, in turn."""
    http = (
        f"http.{name}={2 * readers}"
        for name in ("max_streams", "max_connections", "max_requests_per_s")
    )
    async with open_run(config, ["http.port=0", *http], runs_dir=runs, http=True) as run:
        await training.until_started(run)
        await turns.until_all_work(run)
        await asyncio.sleep(window.warm_s)
        (contact,) = client.running(runs).values()
        alone, beside = [], []
        for _ in range(windows):
            alone.append(await turns.window(run, window.seconds) | {"events": 0.0})
            async with reading(contact, readers) as events_per_s:
                found = await turns.window(run, window.seconds)
            beside.append(found | {"events": events_per_s[0]})
    return {"alone": mean(alone), "beside": mean(beside)}


def mean(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the means over all windows, and the 99th percentile of the lags."""
    means = {
        name: sum(one[name] for one in found) / len(found)
        for name in ("trained_per_s", "staleness_mean", "events")
    }
    return means | {"lag": turns.p99_ms([late for one in found for late in one["late"]])}


@asynccontextmanager
async def reading(contact: ControlFile, readers: int) -> AsyncIterator[list[float]]:
    """Hold ``readers`` connections while the context is open. Afterwards the list holds their
    events per second.
    """
    events_per_s: list[float] = []
    command = (
        sys.executable,
        "-m",
        "benchmarks.workers.event_readers",
        "read",
        contact.address,
        contact.run or "",
        contact.token,
        str(readers),
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    if await process.stdout.readline() != b"ready\n":
        raise RuntimeError("the server refused some of the readers")
    began = asyncio.get_running_loop().time()
    yield events_per_s
    seconds = asyncio.get_running_loop().time() - began
    output, _ = await process.communicate(b"")
    events_per_s.append(int(output) / seconds)


async def read(address: str, run: str, token: str, readers: int) -> None:
    """Print ``ready`` once all readers are connected. Read until standard input ends, and print the
    number of events of all readers.
    """
    host, port = address.removeprefix("http://").rsplit(":", 1)
    head = (
        f"GET /api/v1/runs/{run}/events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer "
        f"{token}\r\n\r\n"
    ).encode()
    events = 0

    async def count_events(reader: asyncio.StreamReader) -> None:
        nonlocal events
        while line := await reader.readline():
            events += line.startswith(b"event:")

    async with asyncio.TaskGroup() as group:
        connections = []
        for _ in range(readers):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head)
            if b" 200 " not in (await reader.readuntil(b"\r\n\r\n")).splitlines()[0]:
                raise RuntimeError("the server refused a reader")
            connections.append((group.create_task(count_events(reader)), writer))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        before = events
        await asyncio.to_thread(sys.stdin.read)
        sys.stdout.write(f"{events - before}\n")
        for task, writer in connections:
            task.cancel()
            writer.close()


def main() -> None:
    """Arguments: ``CONFIG WARM_S SECONDS RUNS WINDOWS READERS``, or ``read ADDRESS RUN TOKEN
    READERS``.
    """
    if sys.argv[1] == "read":
        address, run, token, readers = sys.argv[2:]
        loops.run(read(address, run, token, int(readers)))
        return
    parser = training.arguments()
    parser.add_argument("windows", type=int)
    parser.add_argument("readers", type=int)
    given = parser.parse_args()
    window = training.Window(given.warm_s, given.seconds)
    child.report(loops.run(watch(given.config, window, given.runs, given.windows, given.readers)))


if __name__ == "__main__":
    main()
