"""Frames that no client would send, for a server of environments.

``python -m tests.support.fuzz_frames COUNT`` sends COUNT of them to a server in a process of its own
and reports what became of them, and how much memory and how many descriptors the server has then.
"""

from __future__ import annotations

import os
import pickle
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from tianflow.channels.frames import encode
from tianflow.channels.tcp import TcpConnection, new_context, wait
from tianflow.envs.remote_protocol import HELLO, PROTOCOL, REFUSAL, RESET, STEP, WELCOME
from tianflow.errors import BrokenChannelError, WouldBlock

PATIENCE_S = 30.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
_PROPERTIES = b"\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity" + bytes(4)
READY = b"\x04" + bytes([6 + len(_PROPERTIES)]) + b"\x05READY" + _PROPERTIES
"""What a DEALER says first in ZMTP 3, without security."""
HELLO_BODY = {
    "protocol": PROTOCOL, "client": b"c" * 16, "link": 0, "count": 1, "autoreset": "NextStep",
}  # fmt: skip


class Canary:
    """What unpickling it would do can be seen: a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def valid() -> list[list[bytes]]:
    """Messages of the protocol: as a first message only the first one is allowed."""
    large = np.zeros(3000, np.uint8)
    bodies = (
        (HELLO, HELLO_BODY),
        (RESET, {"rows": [0], "seeds": [1], "options": {"array": large}}),
        (STEP, {"rows": [0], "actions": [np.zeros(1, np.int64)]}),
    )
    return [[bytes(frame) for frame in encode(kind, 1, body)] for kind, body in bodies]


def fuzzed(chance: random.Random, canary: Path) -> Iterator[list[bytes]]:
    """Endless messages that are malformed, or not allowed as a first message, or nearly right."""
    messages = valid()
    while True:
        match chance.randrange(6):
            case 0:
                yield [chance.randbytes(chance.randrange(300)) for _ in range(chance.randint(1, 4))]
            case 1:
                yield [pickle.dumps(Canary(canary), protocol=chance.randint(0, 5))]
            case 2:
                body = {**HELLO_BODY, chance.choice(sorted(HELLO_BODY)): junk(chance)}
                yield [bytes(frame) for frame in encode(HELLO, 1, body)]
            case 3:
                yield [chance.choice(messages)[0][: chance.randrange(40)]]
            case 4:
                yield [
                    msgpack.packb([HELLO, 1, junk(chance)]),
                    *[b"x" * 2000] * chance.randrange(3),
                ]
            case _:
                yield flipped(chance, chance.choice(messages))


def junk(chance: random.Random) -> Any:
    return chance.choice(
        [
            None,
            -1,
            2**63,
            1e300,
            "x" * 5000,
            b"\0" * 16,
            [],
            {},
            [[[[]]]],
            "NextStep",
            True,
            PROTOCOL,
        ]
    )


def flipped(chance: random.Random, message: Sequence[bytes]) -> list[bytes]:
    parts = [bytearray(frame) for frame in message]
    for _ in range(chance.randint(1, 4)):
        part = chance.choice(parts)
        part[chance.randrange(len(part))] ^= 1 << chance.randrange(8)
    return [bytes(part) for part in parts]


def send_each(address: str, messages: Iterator[list[bytes]], count: int) -> Counter[str]:
    """Send ``count`` messages, each on a connection of its own, and wait for what becomes of it:
    "closed", or the kind of the answer.
    """
    context, outcomes = new_context(), Counter[str]()
    for _ in range(count):
        connection = TcpConnection(context, address)
        connection.send(next(messages))
        outcome = _outcome(connection)
        outcomes[outcome] += 1
        connection.close(farewell=outcome in (WELCOME, REFUSAL))
    context.term()
    return outcomes


def _outcome(connection: TcpConnection) -> str:
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        try:
            return connection.receive_nowait().kind
        except WouldBlock:
            wait([connection], 1.0)
        except BrokenChannelError:
            return "closed"
    raise AssertionError("a message was neither answered nor was its connection closed")


def raw(address: str, *pieces: bytes) -> bytes:
    """Send ``pieces`` over plain TCP, each after an answer to the one before, and read until the
    other end closes.
    """
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as end:
        end.settimeout(PATIENCE_S)
        found = b""
        with suppress(ConnectionError):
            for piece in pieces:
                if found:
                    found += end.recv(4096)
                end.sendall(piece)
                found += end.recv(10)  # the beginning of a greeting, or of an answer
            while more := end.recv(4096):
                found += more
        return found


def announced(length: int, *, more: bool = False) -> tuple[bytes, ...]:
    """A whole handshake, and a frame that claims to have ``length`` bytes."""
    return GREETING, READY, (b"\x03" if more else b"\x02") + length.to_bytes(8, "big")


def memory(pid: int) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def main(count: int) -> None:
    import multiprocessing

    ours, theirs = Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    process.start()
    address, pid = ours.recv(), process.pid or 0
    messages = fuzzed(random.Random(0), Path("/nonexistent/canary"))
    send_each(address, messages, min(count, 2000))  # caches are warm after these
    before = memory(pid), descriptors(pid)
    began = time.monotonic()
    outcomes = send_each(address, messages, count)
    for _ in range(20):
        raw(address, *announced(2**32))
        raw(address, *announced(2**32, more=True))
    seconds = time.monotonic() - began
    ours.send(None)
    print(f"{count} messages in {seconds:.0f} s: {dict(outcomes)}")  # noqa: T201 - its output
    print(f"statistics: {ours.recv()}")  # noqa: T201 - as above
    print(f"bytes and descriptors before {before}, after {ours.recv()}")  # noqa: T201 - as above
    process.join()


def _serve(pipe: Any) -> None:
    from tests.support.remote_worlds import serving

    with serving(num_envs=4) as server:
        pipe.send(server.address)
        pipe.recv()
        pipe.send(server.statistics())
        pipe.send((memory(os.getpid()), descriptors(os.getpid())))


if __name__ == "__main__":
    main(int(sys.argv[1]))
