"""A link: one Unix socket pair between the coordinator and a host process, carrying small msgpack
messages.

Reliable and ordered. Messages sent in one turn of the loop go out together. Data never take this
way: they lie in slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import msgpack

PACKET = 128 * 1024
"""Most bytes of one packet, well below what a socket's buffer takes; what is longer goes in
several.
"""
EVENT_BACKLOG = 64
"""Packets that may wait for the other side before events are dropped; an orderly reader never lets
more than a few wait.
"""
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
    """One end. ``handle`` gets every message, on the loop; ``closed`` is called once when the other
    end is gone.

    Sending never waits: what the socket does not take is kept, in order. An end that stops reading
    is noticed by the supervisor, which kills its process; that bounds what is kept.
    """

    def __init__(
        self, *, end: socket.socket, handle: Callable[[Message], None], closed: Callable[[], None]
    ) -> None:
        self._end, self._handle, self._closed = end, handle, closed
        self._loop = asyncio.get_running_loop()
        self._packer = msgpack.Packer()
        self._unpacker = msgpack.Unpacker(use_list=True, strict_map_key=False)
        self._turn: list[bytes] = []
        self._turn_bytes = 0
        self._turn_ends = False
        self._backlog: deque[bytes] = deque()
        self._open = True
        self._sequence = 0
        self._held: tuple[object, ...] | None = None
        self._drained = asyncio.Event()
        self._loop.add_reader(end.fileno(), self.handle_one)

    def send(self, *message: object) -> None:
        """Send, in order, with whatever else is sent in this turn of the loop."""
        if not self._open:
            return
        packed = self._packer.pack(message)
        if self._turn and self._turn_bytes + len(packed) > PACKET:
            self.push()
        if not self._turn_ends:
            self._turn_ends = True
            self._loop.call_soon(self._end_turn)
        self._turn.append(packed)
        self._turn_bytes += len(packed)

    def push(self) -> None:
        """Give the kernel what was sent in this turn now, for the other side waits for it, and not
        when the turn is over.
        """
        if not self._turn:
            return
        data = b"".join(self._turn)
        self._turn.clear()
        self._turn_bytes = 0
        if len(data) <= PACKET:
            self._backlog.append(data)
        else:
            self._backlog.extend(
                data[start : start + PACKET] for start in range(0, len(data), PACKET)
            )
        if not self._write():
            self._loop.add_writer(self._end.fileno(), self._writable)

    def _end_turn(self) -> None:
        self._turn_ends = False
        self.push()

    def send_threadsafe(self, *message: object) -> None:
        """`send`, from another thread. Nothing happens once the loop is closed, as with a closed
        link.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.send, *message)

    def send_event(self, name: str, fields: object) -> None:
        """Send an event, or drop it when the other side is behind. The gap in its numbers tells the
        reader.

        The last one is held until the other side has caught up: without it a gap at the end would
        tell nobody.
        """
        event, self._sequence = ("event", self._sequence, name, fields), self._sequence + 1
        if len(self._backlog) < EVENT_BACKLOG:
            self._held = None
            self.send(*event)
        else:
            self._held = event

    async def flush(self) -> None:
        """Wait until everything sent so far is with the kernel, or the link is lost."""
        self.push()
        while self._backlog:
            self._drained.clear()
            await self._drained.wait()

    def handle_one(self) -> bool:
        """Handle one packet that has arrived. False when there is none, or the link is lost.

        The loop calls it once a look: its next look for more costs less than to be told here that
        there are none.
        """
        if self._end.fileno() < 0:
            return False
        try:
            packet = self._end.recv(PACKET)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # said once, when the other end went without reading everything; what it had sent comes
            # next, unannounced
            self.drain()
            return False
        if not packet:
            self.close()
            self._closed()
            return False
        self._unpacker.feed(packet)
        for message in self._unpacker:
            self._handle(message)
            if not self._open:
                break
        return True

    def drain(self) -> None:
        """Handle everything that has arrived: the last words of a peer that is gone."""
        while self.handle_one():
            pass

    def close(self) -> None:
        """Close this end; what was not sent is lost. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._end.fileno())
            self._stop_writing()
            self._end.close()

    def _writable(self) -> None:
        if self._write() and self._open:
            self._loop.remove_writer(self._end.fileno())
            if self._held is not None:
                held, self._held = self._held, None
                self.send(
                    *held
                )  # before whoever waits in `flush` is woken, so that it waits for this, too
            self._drained.set()

    def _write(self) -> bool:
        """Give the kernel what it takes. True when nothing is left."""
        while self._backlog:
            try:
                self._end.send(self._backlog[0])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                # The other end is gone, but its last words may still lie here: the end of what it
                # sent closes the link.
                self._stop_writing()
                return True
            self._backlog.popleft()
        return True

    def _stop_writing(self) -> None:
        self._loop.remove_writer(self._end.fileno())
        self._backlog.clear()
        self._turn.clear()
        self._held = None
        self._drained.set()
