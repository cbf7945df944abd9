"""A link over a Unix socket pair, between the coordinator and a host process: typed messages,
reliable and in order.

Messages that are sent in one turn of the loop leave together, as one array of msgpack. NumPy arrays
do not travel over a link: they lie in slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgpack

from tianflow.channels.messages import MESSAGES, EventPublished

if TYPE_CHECKING:
    from tianflow.core.events import Event

PACKET = 128 * 1024
"""Most bytes of one packet, well below a socket's buffer; longer data leave in several packets."""
PART = b"\xc1"
"""First byte of a packet that holds a part of longer data: the one byte that msgpack never uses."""
LONGEST_HEADER = 5
"""Bytes before the messages of a turn, at most."""
EVENT_BACKLOG = 64
"""Packets that may wait for the other side before events are dropped. A healthy reader leaves a few
packets waiting at most.
"""
_BUFFER = 4 * PACKET


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that deliver packets whole and in order."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return ends


class Link:
    """One end: `tianflow.interfaces.MessageLink`.

    Sending never waits: what the socket does not take is queued, in order. The supervisor notices
    an end that stops reading, and kills its process; that bounds the queue.

    Args:
        end: of a `socket_pair`.
        handle: receives every message, on the loop.
        closed: called once when the other end is gone.
        failed: receives what ``handle`` raises, and BrokenChannelError for a malformed message;
            None: the error is raised where the loop called the link.
    """

    _encode: Callable[[Any], object] = staticmethod(MESSAGES.encode)
    _decode: Callable[[Any], Any] = staticmethod(MESSAGES.decode)

    def __init__(
        self,
        *,
        end: socket.socket,
        handle: Callable[[Any], None],
        closed: Callable[[], None],
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._end, self._handle, self._closed, self._failed = end, handle, closed, failed
        self._loop = asyncio.get_running_loop()
        self._packer = msgpack.Packer()
        self._unpacker = msgpack.Unpacker(use_list=True, strict_map_key=False)
        """Collects the parts of longer data."""
        self._turn: list[bytes] = []
        self._turn_bytes = 0
        self._turn_ends = False
        self._backlog: deque[bytes] = deque()
        self._open = True
        self._sequence = 0
        self._held: EventPublished | None = None
        self._drained = asyncio.Event()
        self._loop.add_reader(end.fileno(), self.handle_one)

    def send(self, message: object) -> None:
        """Send in order, with the other messages of this turn of the loop."""
        if not self._open:
            return
        packed = self._packer.pack(self._encode(message))
        if self._turn and self._turn_bytes + len(packed) > PACKET - LONGEST_HEADER:
            self.push()
        if not self._turn_ends:
            self._turn_ends = True
            self._loop.call_soon(self._end_turn)
        self._turn.append(packed)
        self._turn_bytes += len(packed)

    def push(self) -> None:
        """Give the kernel what was sent in this turn now, because the other side waits for it."""
        if not self._turn:
            return
        data = b"".join((self._packer.pack_array_header(len(self._turn)), *self._turn))
        self._turn.clear()
        self._turn_bytes = 0
        if len(data) <= PACKET:
            self._backlog.append(data)
        else:
            size = PACKET - len(PART)
            self._backlog.extend(
                PART + data[start : start + size] for start in range(0, len(data), size)
            )
        if not self._write():
            self._loop.add_writer(self._end.fileno(), self._writable)

    def _end_turn(self) -> None:
        self._turn_ends = False
        self.push()

    def send_threadsafe(self, message: object) -> None:
        """`send`, from another thread. Does nothing once the loop is closed, as with a closed
        link.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.send, message)

    def send_event(self, event: Event) -> None:
        """Send an event, or drop it when the other side is behind. The gap in the sequence numbers
        shows the reader what was dropped.

        The last event is held until the other side has caught up: without it a gap at the end would
        stay unseen.
        """
        numbered, self._sequence = EventPublished(self._sequence, event), self._sequence + 1
        if len(self._backlog) < EVENT_BACKLOG:
            self._held = None
            self.send(numbered)
        else:
            self._held = numbered

    async def flush(self) -> None:
        """Wait until the kernel has everything sent so far, or the link is lost."""
        self.push()
        while self._backlog:
            self._drained.clear()
            await self._drained.wait()

    def handle_one(self) -> bool:
        """Handle one packet that has arrived. False when no packet is there, or the link is lost.

        The loop calls it once per look: the loop's next look for more costs less than a read that
        would block.
        """
        if self._end.fileno() < 0:
            return False
        try:
            packet = self._end.recv(PACKET)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # Raised once, when the other end left with unread data. What it had sent comes next.
            self.drain()
            return False
        if not packet:
            self.close()
            self._closed()
            return False
        decode, handle = self._decode, self._handle
        for values in self._messages(packet):
            try:
                handle(decode(values))
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(error)
            if not self._open:
                break
        return True

    def _messages(self, packet: bytes) -> list[Any]:
        """The messages of the turn that ``packet`` completes. A packet that is not an array of
        msgpack is one message, which `_decode` refuses.
        """
        turn: Any
        try:
            if packet.startswith(PART):
                self._unpacker.feed(memoryview(packet)[len(PART) :])
                turn = next(self._unpacker, [])
            else:
                turn = msgpack.unpackb(packet, use_list=True, strict_map_key=False)
        except (ValueError, msgpack.UnpackException):
            turn = packet
        return turn if isinstance(turn, list) else [turn]

    def drain(self) -> None:
        """Handle everything that has arrived: the last messages of a peer that is gone."""
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
                self.send(held)  # before `flush` wakes up, so that it waits for this event too
            self._drained.set()

    def _write(self) -> bool:
        """Give the kernel what it takes. True when nothing is left."""
        while self._backlog:
            try:
                self._end.send(self._backlog[0])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                # The other end is gone, but its last messages may still lie here: the end of its
                # data closes the link.
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


class RelayLink(Link):
    """A link whose messages pass as msgpack's plain values, name and fields: for a process that
    relays them and looks at few.
    """

    def read(self, wanted: bool) -> None:
        """Receive messages, or leave them in the socket: the other end then drops events."""
        if not self._open:
            return
        if wanted:
            self._loop.add_reader(self._end.fileno(), self.handle_one)
        else:
            self._loop.remove_reader(self._end.fileno())

    _encode = staticmethod(lambda values: values)
    _decode = staticmethod(lambda values: values)
