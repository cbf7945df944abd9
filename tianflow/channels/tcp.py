"""Messages over TCP between processes and machines, on ZeroMQ sockets.

`TcpListener` accepts connections, `TcpConnection` is the other end. A frame above the limit closes
its connection before memory is reserved for it. A message that cannot be decoded closes its
connection, too, and is counted. With `Keys`, CURVE encrypts connections and authenticates both
ends. Heartbeats detect an end that is gone without a word.

ZeroMQ limits the size of a frame and the number of waiting messages, but not the number of frames
in one message. Only a peer with the key, or a process of the same machine, can exploit that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from tianflow.channels.frames import (
    MAX_FRAME,
    MAX_FRAMES,
    Frame,
    MalformedMessageError,
    Message,
    decode,
    encode,
)
from tianflow.channels.keys import Keys
from tianflow.errors import BrokenChannelError, ConfigError, Problem, TianflowError, WouldBlock
from tianflow.logs import logger

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
COPIED = 64 * 1024
"""Shorter frames are copied when they are sent: sharing them would cost more."""
OVERHEAD = 256
"""Bytes that CURVE adds to a frame, generously."""
BACKLOG = 1024
"""Connections that wait to be accepted at most; the system may permit fewer. A node is not to wait
behind strangers.
"""
QUEUED = 64
"""Messages of one connection that wait for a listener; then TCP holds the sender back."""
HANDSHAKE_S = 10.0
"""A connection whose handshake takes longer is closed."""
HEARTBEAT_S = 2.0
"""Seconds between two heartbeats. A connection without one for `HEARTBEATS` of them is lost."""
HEARTBEATS = 5
TURN = 64
"""Messages that a loop handles before others of its callbacks have a turn."""
BYE, NOOP = "bye", "noop"
"""Kinds of message of the transport itself: a farewell, and a test of a connection."""
ZAP = "inproc://zeromq.zap.01"
DOMAIN = "tianflow"
ADMITTED, REFUSED = b"200", b"400"
# The members of its enumerations cost time in every call.
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
NOW, NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
MECHANISM_MISMATCH = 0x11000002
"""What ZeroMQ reports when one end uses CURVE and the other does not."""
log = logger("channels.tcp")


class RefusedConnectionError(TianflowError):
    """The two ends of a connection do not match; the text names both.

    Attributes:
        again: True if the reason may pass by itself, or the other end may just have died.
    """

    def __init__(self, summary: str, *, again: bool = False) -> None:
        self.again = again
        super().__init__(summary)


@dataclass(frozen=True, slots=True)
class ListenerStatistics:
    """Counters of a `TcpListener`, since it began."""

    accepted: int
    """TCP connections."""
    admitted: int
    """Of them, those whose handshake succeeded."""
    ended: int
    """Connections that are over."""
    farewells: int
    """Connections that said that they end."""
    closed: int
    """Connections that were closed because of a malformed message."""
    refused_keys: int
    """Handshakes with a client key that is not accepted."""
    malformed: Mapping[str, int] = field(default_factory=dict)
    """Malformed messages, by the kind of mistake."""
    wordless: int = 0
    """Connections that ended before a message of them was read: another protocol, no valid key, or
    silence.
    """
    lost: int = 0
    """Connections that ended without a farewell after a message of them was read: the peer died, or
    sent a frame over the limit.
    """

    @property
    def strangers(self) -> int:
        """Connections without a successful handshake: another protocol, or no valid key."""
        return self.accepted - self.admitted

    @property
    def refused(self) -> dict[str, int]:
        """Connections that were refused, closed or lost, by reason
        (`tianflow.core.statistics.CONNECTION_REFUSALS`).
        """
        return {**self.malformed, "stranger": self.wordless, "lost": self.lost}

    @property
    def cut(self) -> int:
        """Connections that ended without a word: the peer died, or sent a frame over the limit."""
        return max(0, self.ended - self.strangers - self.farewells - self.closed)


class Peer(NamedTuple):
    """One connection, as a `TcpListener` names it."""

    id: bytes
    descriptor: int
    """The descriptor of its socket when its message arrived."""


class LoopReader:
    """Calls a function on the running loop whenever sockets of ZeroMQ may have something to read.

    The descriptor of a socket becomes readable when the state of the socket changes, not while
    messages wait. Each use of the socket may consume that signal, so its user calls `again` after
    it.

    Args:
        sockets: to watch.
        drain: reads until nothing is left. False: it stopped before that, and is called again.
    """

    def __init__(self, sockets: Sequence[Socket], drain: Callable[[], bool]) -> None:
        self._loop, self._drain = asyncio.get_running_loop(), drain
        self._descriptors = [int(end.getsockopt(zmq.FD)) for end in sockets]
        self._handle: asyncio.Handle | None = None
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self.again)
        self.again()

    def again(self) -> None:
        """Look again in the next turn of the loop."""
        if self._handle is None and self._descriptors:
            self._handle = self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._handle = None
        finished = False
        try:
            finished = self._drain()
        finally:
            if not finished:
                self.again()

    def close(self) -> None:
        """Watch no more. Idempotent."""
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._descriptors.clear()
        if self._handle is not None:
            self._handle.cancel()


class TcpListener:
    """The end that accepts connections. All methods but `wake` belong to one thread, which either
    calls `receive` or has a loop (`serve`).

    Args:
        address: ``tcp://HOST:PORT``, as `require_address` accepts it.
        keys: None: neither encrypted nor authenticated.
        max_frame: bytes of the largest frame that is accepted.
        heartbeat_s: seconds between two heartbeats.
        dead_after_s: seconds without an acknowledgement by the system of a peer, after which its
            connection is over; None: only heartbeats decide.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: Keys | None = None,
        max_frame: int = MAX_FRAME,
        heartbeat_s: float = HEARTBEAT_S,
        dead_after_s: float | None = None,
    ) -> None:
        self._keys = keys
        self._context: Context = zmq.Context()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self._socket = self._context.socket(zmq.ROUTER)
        _set_up(self._socket, address, max_frame, heartbeat_s, dead_after_s)
        self._socket.router_mandatory = True
        self._socket.rcvhwm = QUEUED
        self._socket.backlog = BACKLOG
        self._socket.zap_domain = DOMAIN.encode()
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.server_secret
        self._monitor = _monitor(self._context, self._socket)
        self._observing = threading.Lock()
        ends = (self._socket, self._zap, self._monitor, self._woken.fileno())
        self._watched: list[tuple[Any, int]] = [(end, zmq.POLLIN) for end in ends]
        self._accepted = self._admitted = self._ended = self._farewells = self._closed = 0
        self._refused_keys = self._wordless = self._lost = 0
        self._malformed: Counter[str] = Counter()
        self._heard: dict[int, bool] = {}
        """By descriptor, of connections with a message that was read: True once their end needs no
        further explanation.
        """
        self._over: dict[int, bool | None] = {}
        """The same, of connections that have ended, perhaps with messages that were not read yet;
        None: none was read.
        """
        self.changed = False
        """True if a connection has ended since this was last set to False."""
        self._reader: LoopReader | None = None
        self._watcher: LoopReader | None = None
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            problem = Problem("--listen", address, f"cannot listen there: {error.strerror}")
            raise ConfigError([problem]) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """Where it listens, with the port that was chosen."""
        self._port = int(self.address.rpartition(":")[2])

    def receive(self, timeout_s: float) -> tuple[Peer, Message] | None:
        """The next message; None after ``timeout_s``, or if `wake` was called. Malformed messages
        close their connections and are not returned.
        """
        ready: dict[Any, int] = dict(zmq.zmq_poll(self._watched, int(timeout_s * 1000)))
        if self._zap in ready:
            self._authenticate()
        if self._monitor in ready:
            self._observe()
        self._judge()
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        return self._take() if self._socket in ready and _readable(self._socket) else None

    def serve(self, handle: Callable[[Peer, Message], None], ended: Callable[[], None]) -> None:
        """Give every message to ``handle`` on the running loop, until `close`. ``ended`` is called
        after a connection has ended; `reachable` finds which.
        """

        def report() -> None:
            if self.changed:
                self.changed = False
                ended()

        def look() -> bool:
            while _readable(self._zap):
                self._authenticate()
            self._observe()
            self._judge()
            report()
            return True

        def drain() -> bool:
            self._observe()  # a descriptor may belong to another connection than before
            report()
            for _ in range(TURN):
                if self._reader is None:
                    return True
                if not _readable(self._socket):
                    self._judge_all()
                    return True
                if (found := self._take()) is not None:
                    handle(*found)
            return False

        self._watcher = LoopReader([self._zap, self._monitor], look)
        self._reader = LoopReader([self._socket], drain)

    def _take(self) -> tuple[Peer, Message] | None:
        """The message that is there; None if it is malformed."""
        parts: list[zmq.Frame] = [self._socket.recv(NOW, copy=False)]
        more = True
        while more:
            part = self._socket.recv(NOW, copy=False)
            more = part.more
            if len(parts) <= MAX_FRAMES + 1:
                parts.append(part)
        peer = Peer(parts[0].bytes, int(parts[1].get(zmq.SRCFD)))
        try:
            message = decode([part.buffer for part in parts[1:]])
        except MalformedMessageError as error:
            self.close_peer(peer, "undecodable", str(error))
            return None
        where = self._over if peer.descriptor in self._over else self._heard
        where[peer.descriptor] = message.kind == BYE
        if message.kind == BYE:
            self._farewells += 1
        return peer, message

    def send(self, peer: Peer, frames: Sequence[Frame]) -> bool:
        """Send what `encode` made. False if the connection is over, or the peer does not read."""
        try:
            _send(self._socket, [peer.id, *frames])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        finally:
            if self._reader is not None:
                self._reader.again()
        return True

    def reachable(self, peer: Peer) -> bool:
        """True if the connection is open and the peer reads from it."""
        return self.send(peer, encode(NOOP, 0, None))

    def close_peer(self, peer: Peer, mistake: str, details: str) -> None:
        """Close the connection of ``peer`` because of a malformed message, and count that.

        Args:
            peer: the sender.
            mistake: what to count it as, one of a few words.
            details: what to log.
        """
        if not self.reachable(peer):  # its descriptor may belong to another connection by now
            return
        self._malformed[mistake] += 1
        self._heard[peer.descriptor] = True
        log.warning("a malformed message: its connection is closed", mistake=mistake, why=details)
        try:
            duplicate = socket.socket(fileno=os.dup(peer.descriptor))
        except OSError:  # it ended in this moment
            return
        with duplicate, contextlib.suppress(OSError):
            if duplicate.getsockname()[1] == self._port:
                self._closed += 1
                duplicate.shutdown(socket.SHUT_RDWR)

    def wake(self) -> None:
        """Make `receive` return. May be called from another thread and from a signal handler."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def statistics(self) -> ListenerStatistics:
        """Counts so far. May be called from another thread."""
        self._observe()
        return ListenerStatistics(
            accepted=self._accepted,
            admitted=self._admitted,
            ended=self._ended,
            farewells=self._farewells,
            closed=self._closed,
            refused_keys=self._refused_keys,
            malformed=dict(self._malformed),
            wordless=self._wordless,
            lost=self._lost,
        )

    def close(self) -> None:
        """Stop listening and end all connections. Idempotent."""
        for reader in (self._reader, self._watcher):
            if reader is not None:
                reader.close()
        self._reader = self._watcher = None
        self._context.destroy(linger=0)
        self._wake.close()
        self._woken.close()

    def _authenticate(self) -> None:
        """Answer whether a client is admitted (ZeroMQ RFC 27)."""
        _, number, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        if self._keys is None:
            admitted = mechanism == b"NULL"
        else:
            found = z85.encode(credentials[0]) if credentials else b""
            admitted = mechanism == b"CURVE" and secrets.compare_digest(
                found, self._keys.client_public
            )
        if not admitted:
            self._refused_keys += 1
        status = ADMITTED if admitted else REFUSED
        self._zap.send_multipart([b"1.0", number, status, b"", b"", b""])

    def _observe(self) -> None:
        # Another thread may ask for statistics, and one socket has one user at a time.
        with self._observing:
            for event, descriptor in _events(self._monitor):
                if event == zmq.EVENT_ACCEPTED:
                    self._accepted += 1
                    self._judge_one(descriptor)  # of an earlier connection
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._admitted += 1
                elif event == zmq.EVENT_DISCONNECTED:
                    self._over[descriptor] = self._heard.pop(descriptor, None)
                    self._ended += 1
                    self.changed = True

    def _judge(self) -> None:
        """Count how connections have ended, once all their messages are read: the report of an end
        overtakes them.
        """
        if self._over and not _readable(self._socket):
            self._judge_all()

    def _judge_all(self) -> None:
        for descriptor in list(self._over):
            self._judge_one(descriptor)

    def _judge_one(self, descriptor: int) -> None:
        explained = self._over.pop(descriptor, True)
        self._wordless += explained is None
        self._lost += explained is False


class TcpConnection:
    """The end that connects. A lost connection stays lost: to try again takes another one.

    Args:
        context: of ZeroMQ; its holder ends it.
        address: ``tcp://HOST:PORT``.
        keys: as the listener has them.
        heartbeat_s: seconds between two heartbeats.
        dead_after_s: seconds without an acknowledgement by the system of the listener, after which
            the connection, or the attempt to make it, is over; None: only heartbeats decide.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        *,
        keys: Keys | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        dead_after_s: float | None = None,
    ) -> None:
        self.address, self._keys = address, keys
        self._socket = context.socket(zmq.DEALER)
        _set_up(self._socket, address, MAX_FRAME, heartbeat_s, dead_after_s)
        if dead_after_s is not None:
            self._socket.connect_timeout = int(dead_after_s * 1000)
        self._socket.reconnect_ivl = -1
        if keys is not None:
            self._socket.curve_serverkey = keys.server_public
            self._socket.curve_publickey = keys.client_public
            self._socket.curve_secretkey = keys.client_secret
        self._monitor = _monitor(context, self._socket)
        self.watched = ((self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN))
        """What `wait` looks at."""
        self._reader: LoopReader | None = None
        self._watcher: LoopReader | None = None
        self._socket.connect(address)

    def send(self, frames: Sequence[Frame]) -> None:
        """Send what `encode` made, as soon as the connection stands.

        Raises:
            BrokenChannelError: the other end does not read, or the connection is over. Then
                `receive_nowait` raises the reason.
        """
        try:
            _send(self._socket, frames)
        except zmq.Again:
            raise BrokenChannelError(f"{self.address} does not take what it is sent") from None
        finally:
            if self._reader is not None:
                self._reader.again()

    def serve(
        self, handle: Callable[[Message], None], lost: Callable[[TianflowError], None]
    ) -> None:
        """Give every message to ``handle`` on the running loop, until `close`. ``lost`` is called
        once, with the error that `receive_nowait` raises, when the connection is over.
        """

        def drain() -> bool:
            for _ in range(TURN):
                if self._reader is None or not _readable(self._socket):
                    return True
                try:
                    message = self._take()
                except TianflowError as error:
                    self.close()
                    lost(error)
                    return True
                if message.kind != NOOP:
                    handle(message)
            return False

        def look() -> bool:
            if self._reader is not None and not drain():  # messages come before the end
                return False
            if self._reader is None:
                return True
            try:
                self._observe()
            except TianflowError as error:
                self.close()
                lost(error)
            return True

        self._reader = LoopReader([self._socket], drain)
        self._watcher = LoopReader([self._monitor], look)

    def receive_nowait(self) -> Message:
        """The next message.

        Raises:
            WouldBlock: there is none yet.
            BrokenChannelError: the connection is lost, or could not be made.
            RefusedConnectionError: the two ends do not have the same keys.
            MalformedMessageError: the other end violates the protocol.
        """
        while True:
            if not _readable(self._socket):
                self._observe()
                raise WouldBlock
            message = self._take()
            if message.kind != NOOP:
                return message

    def _take(self) -> Message:
        """The message that is there. MalformedMessageError if its frames are not a message."""
        frames = self._socket.recv_multipart(NOW, copy=False)
        return decode([frame.buffer for frame in frames])

    def _observe(self) -> None:
        for event, value in _events(self._monitor):
            if event in _HANDSHAKE_FAILED:
                # without details, the other end may also have died in the handshake
                again = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                text = self._unmatched(event, value)
                if again:
                    text = (
                        f"the connection to {self.address} ended in its handshake; perhaps {text}"
                    )
                raise RefusedConnectionError(text, again=again)
            if event == zmq.EVENT_DISCONNECTED:
                raise BrokenChannelError(f"the connection to {self.address} is lost")
            if event == zmq.EVENT_CLOSED:
                raise BrokenChannelError(f"{self.address} does not accept connections")

    def _unmatched(self, event: int, value: int) -> str:
        if self._keys is None:
            own = "this end has no key"
            theirs = "requires one" if value == MECHANISM_MISMATCH else "may require one"
        else:
            own = f"this end has the key {self._keys.fingerprint} ({self._keys.origin})"
            theirs = "has no key, or another one"
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                theirs = "does not accept it for clients"
            elif value == MECHANISM_MISMATCH:
                theirs = "has none"
        return f"the keys do not match: {own}, {self.address} {theirs}"

    def close(self, *, farewell: bool = False) -> None:
        """End the connection; ``farewell`` says so to the other end. Idempotent."""
        if self._socket.closed:
            return
        for reader in (self._reader, self._watcher):
            if reader is not None:
                reader.close()
        self._reader = self._watcher = None
        if farewell:
            with contextlib.suppress(BrokenChannelError):
                self.send(encode(BYE, 0, None))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=1000 if farewell else 0)


_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


def wait(connections: Sequence[TcpConnection], timeout_s: float) -> None:
    """Wait until one of ``connections`` may have something to receive, at most ``timeout_s``."""
    watched: list[tuple[Any, int]] = [
        item for connection in connections for item in connection.watched
    ]
    zmq.zmq_poll(watched, max(0, int(timeout_s * 1000 + 0.999)))


def new_context() -> Context:
    """What connections of one holder share: one thread that moves their bytes."""
    return zmq.Context()


def _set_up(
    end: Socket, address: str, max_frame: int, heartbeat_s: float, dead_after_s: float | None
) -> None:
    end.linger = 0
    end.ipv6 = "[" in address
    end.maxmsgsize = max_frame + OVERHEAD
    end.handshake_ivl = int(HANDSHAKE_S * 1000)
    end.heartbeat_ivl = int(heartbeat_s * 1000)
    end.heartbeat_timeout = end.heartbeat_ttl = int(heartbeat_s * HEARTBEATS * 1000)
    end.copy_threshold = COPIED
    if dead_after_s is not None:
        end.tcp_maxrt = int(dead_after_s * 1000)


WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)
"""Events that are read. Without open files, ZeroMQ reports a failed accept in an endless loop."""


def _monitor(context: Context, watched: Socket) -> Socket:
    name = f"inproc://monitor-{secrets.token_hex(8)}"
    watched.monitor(name, WATCHED)
    monitor = context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.connect(name)
    return monitor


def _events(monitor: Socket) -> list[tuple[int, int]]:
    """What has happened to the connections of a socket: events and their values."""
    found: list[tuple[int, int]] = []
    while _readable(monitor):
        event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
        found.append((int(event["event"]), int(event["value"])))
    return found


def _readable(end: Socket) -> bool:
    """True if a message can be received, without the cost of an exception if not."""
    return bool(int(end.getsockopt(EVENTS)) & READABLE)


def _send(end: Socket, frames: Sequence[Frame]) -> None:
    """Send one message. Long frames are shared with ZeroMQ, and must not change.

    Raises:
        zmq.ZMQError: nothing of it was sent.
    """
    *parts, last = frames
    for part in parts:
        end.send(part, NOW_AND_MORE, copy=len(part) < COPIED)
    end.send(last, NOW, copy=len(last) < COPIED)
