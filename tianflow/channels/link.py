"""A link: one Unix socket pair between the coordinator and a host process, carrying small msgpack messages.

Reliable and ordered. Messages sent in one turn of the loop go out together. Data never take this way: they lie in slots.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import msgpack

PACKET = 128 * 1024
"""Most bytes of messages put into one packet; a single larger message is refused by the kernel's own limit."""
EVENT_BACKLOG = 64
"""Packets that may wait for the other side before events are dropped; an orderly reader never lets more than a few wait."""
_BUFFER = 4 * PACKET

Message = list[Any]


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep packets whole and in order."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return ends


class Link:
    """One end. ``handle`` gets every message, on the loop; ``closed`` is called once when the other end is gone.

    Sending never waits: what the socket does not take is kept, in order. An end that stops reading is noticed by the
    supervisor, which kills its process; that bounds what is kept.
    """

    def __init__(self, *, end: socket.socket, handle: Callable[[Message], None], closed: Callable[[], None]) -> None:
        self._end, self._handle, self._closed = end, handle, closed
        self._loop = asyncio.get_running_loop()
        self._packer = msgpack.Packer()
        self._turn: list[bytes] = []
        self._turn_bytes = 0
        self._backlog: deque[bytes] = deque()
        self._open = True
        self._sequence = 0
        self._drained = asyncio.Event()
        self._loop.add_reader(end.fileno(), self._readable)

    def send(self, *message: object) -> None:
        """Send, in order, with whatever else is sent in this turn of the loop."""
        if not self._open:
            return
        packed = self._packer.pack(message)
        if self._turn and self._turn_bytes + len(packed) > PACKET:
            self._flush()
        if not self._turn:
            self._loop.call_soon(self._flush)
        self._turn.append(packed)
        self._turn_bytes += len(packed)

    def send_threadsafe(self, *message: object) -> None:
        """`send`, from another thread."""
        self._loop.call_soon_threadsafe(self.send, *message)

    def send_event(self, name: str, fields: object) -> None:
        """Send an event, or drop it when the other side is behind. The gap in its numbers tells the reader."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        if len(self._backlog) < EVENT_BACKLOG:
            self.send("event", sequence, name, fields)

    async def flush(self) -> None:
        """Wait until everything sent so far is with the kernel, or the link is lost."""
        self._flush()
        if self._backlog:
            self._drained.clear()
            await self._drained.wait()

    def drain(self) -> None:
        """Handle everything that has arrived: the last words of a peer that is gone."""
        while self._open and self._receive():
            pass

    def close(self) -> None:
        """Close this end; what was not sent is lost. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._end.fileno())
            self._loop.remove_writer(self._end.fileno())
            self._end.close()
            self._backlog.clear()
            self._turn.clear()
            self._drained.set()

    def _flush(self) -> None:
        if not self._turn or not self._open:
            return
        packet = b"".join(self._turn)
        self._turn.clear()
        self._turn_bytes = 0
        if self._backlog:
            self._backlog.append(packet)
            return
        if not self._write(packet):
            self._backlog.append(packet)
            self._loop.add_writer(self._end.fileno(), self._writable)

    def _writable(self) -> None:
        while self._backlog:
            if not self._write(self._backlog[0]):
                return
            if not self._open:
                return
            self._backlog.popleft()
        self._loop.remove_writer(self._end.fileno())
        self._drained.set()

    def _write(self, packet: bytes) -> bool:
        """True when nothing of ``packet`` is left to do."""
        try:
            self._end.send(packet)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._lost()
        return True

    def _readable(self) -> None:
        for _ in range(64):  # then others get a turn
            if not self._receive():
                return

    def _receive(self) -> bool:
        """Handle one packet. False when there is none, or the link is lost."""
        try:
            packet = self._end.recv(_BUFFER)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._lost()
            return False
        unpacker = msgpack.Unpacker(use_list=True, strict_map_key=False)
        unpacker.feed(packet)
        for message in unpacker:
            self._handle(message)
        return self._open

    def _lost(self) -> None:
        if self._open:
            self.close()
            self._closed()
