"""A relay of TCP connections that is a bad network: each chunk is late, and now and then nothing
passes for a while. Both directions alike, in order, without loss.

    python -m tests.support.relay HOST PORT --delay 0.05 --stall 2 --every 15
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.support.machines import Machine
from tests.support.paths import ROOT

CHUNK = 65536
Chunks = asyncio.Queue[tuple[float, bytes]]
"""Each with the time at which it is due."""
QUEUED = 256
"""Chunks that wait at most; then TCP holds the sender back."""


class Relay:
    """Accepts connections, and carries each to ``host`` and ``port``.

    Args:
        host: of the other end.
        port: of the other end.
        delay_s: seconds by which each chunk is late.
        stall_s: length of a stall, in seconds.
        every_s: seconds from one stall to the next; 0: there are none.
    """

    def __init__(
        self, host: str, port: int, *, delay_s: float, stall_s: float, every_s: float
    ) -> None:
        self._host, self._port, self._delay_s = host, port, delay_s
        self._stall_s, self._every_s = stall_s, every_s
        self._began = time.monotonic()

    async def run(self) -> None:
        """Print the port, and relay until cancelled."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there = await asyncio.open_connection(self._host, self._port)
            there_and_back: tuple[Chunks, Chunks] = asyncio.Queue(QUEUED), asyncio.Queue(QUEUED)
            reading = [
                asyncio.create_task(self._read(*ends))
                for ends in zip((reader, there[0]), there_and_back, strict=True)
            ]
            sending = [
                asyncio.create_task(self._send(*ends))
                for ends in zip(there_and_back, (there[1], writer), strict=True)
            ]
            await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
            for task in (*reading, *sending):
                task.cancel()
            await asyncio.gather(*reading, *sending, return_exceptions=True)
            there[1].close()
        writer.close()

    async def _read(self, reader: asyncio.StreamReader, chunks: Chunks) -> None:
        data = b"?"
        while data:
            try:
                data = await reader.read(CHUNK)
            except OSError:
                data = b""
            await chunks.put((time.monotonic() + self._delay_s, data))

    async def _send(self, chunks: Chunks, writer: asyncio.StreamWriter) -> None:
        """Until the end of the connection, which is an empty chunk."""
        data = b"?"
        while data:
            due, data = await chunks.get()
            await asyncio.sleep(due - time.monotonic())
            await asyncio.sleep(self._stall_left(time.monotonic() - self._began))
            writer.write(data)
            await writer.drain()

    def _stall_left(self, now: float) -> float:
        """Seconds until the stall at ``now`` is over; 0 without one."""
        if not self._every_s or now < self._every_s:
            return 0.0
        return max(0.0, self._stall_s - now % self._every_s)


@contextmanager
def relay(
    machine: Machine, host: str, port: int, *, delay_s: float, stall_s: float, every_s: float
) -> Iterator[int]:
    """A relay on ``machine``, on a port of its loopback, which is yielded."""
    numbers = {"delay": delay_s, "stall": stall_s, "every": every_s}
    options = [f"--{name}={number}" for name, number in numbers.items()]
    command = (sys.executable, "-m", "tests.support.relay", host, str(port), *options)
    process = machine.start(*command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Run the command of this module."""
    parser = argparse.ArgumentParser(description="Relay TCP connections, late.")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    for name in ("delay", "stall", "every"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    given = parser.parse_args()
    relay_ = Relay(
        given.host, given.port, delay_s=given.delay, stall_s=given.stall, every_s=given.every
    )
    asyncio.run(relay_.run())


if __name__ == "__main__":
    main()
