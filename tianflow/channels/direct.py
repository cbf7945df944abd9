"""Direct links between nodes: the data of a trajectory go straight to the machine of its replay
shard.

Both ends belong to one event loop each. A place is the incarnation of a node, so a process that has
the port of an earlier one is not taken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zmq.utils import z85

from tianflow.channels.frames import MALFORMED, MalformedMessageError, Message, encode, nbytes
from tianflow.channels.keys import Keys, require_address, require_keys
from tianflow.channels.node_messages import DEAD_S
from tianflow.channels.stream import WINDOW
from tianflow.channels.tcp import Peer, TcpConnection, TcpListener
from tianflow.errors import BrokenChannelError, ConfigError, TianflowError
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.channels.node_messages import DirectAddress
    from tianflow.channels.tcp import Context, ListenerStatistics

RECONNECT_S = 0.5
"""Seconds between two attempts to connect to a node."""
Store = Callable[[int, int, int, object], bool]
"""Writes a trajectory (ticket, slot, length, arrays). False if its slot is not there yet, or has a
later trajectory. Raises MalformedMessageError.
"""
log = logger("node")


def require_reachable(found: DirectAddress, *, encrypted: bool) -> None:
    """Refuse what is not the address and the key of a listener.

    Raises:
        MalformedMessageError: it is not.
    """
    try:
        require_address(found.address, path="address")
        size = len(z85.decode(found.key.encode("ascii"))) if found.key else 0
    except (ConfigError, LookupError, ValueError, struct.error) as error:
        raise MalformedMessageError(f"{found!r:.200} is not an address") from error
    if size != (32 if encrypted else 0):
        raise MalformedMessageError(f"{found!r:.200} does not have a key of 32 bytes")


class DirectListener:
    """Accepts trajectories of other nodes.

    Consumes: trajectories. Produces: data in slots, acknowledgements. Waits: never.

    Args:
        host: address of this machine at which it listens, on a free port.
        keys: of the run; None: connections are neither encrypted nor authenticated. This end makes
            a key of its own: that of the gateway stays on the head.
        place: of this node.
        store: writes a trajectory.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, *, host: str, keys: Keys | None, place: str, store: Store) -> None:
        self._place, self._store = place, store
        address = f"tcp://{host}:*"
        own = None
        if keys is not None:
            made = Keys.generate()
            own = replace(made, client_public=keys.client_public, client_secret=b"")
        require_keys(address, own, insecure=True, path="cluster.curve")
        self._listener = TcpListener(address, keys=own, dead_after_s=DEAD_S)
        self.address = self._listener.address
        """Where it listens."""
        self.key = "" if own is None else own.server_public.decode("ascii")
        """Its public key."""
        self.received = 0
        """Bytes of trajectories that arrived."""
        self._known: dict[bytes, Peer] = {}
        self._listener.serve(self._receive, self._forget_lost)

    def statistics(self) -> ListenerStatistics:
        """Counters of its connections."""
        return self._listener.statistics()

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._listener.close()

    def _forget_lost(self) -> None:
        reachable = self._listener.reachable
        self._known = {key: peer for key, peer in self._known.items() if reachable(peer)}

    def _receive(self, peer: Peer, message: Message) -> None:
        try:
            match message.kind, message.body:
                case "hello", str(place) if place == self._place:
                    self._forget_lost()
                    self._known[peer.id] = peer
                    self._listener.send(peer, encode("welcome", 0, None))
                case "trajectory", [ticket, slot, length, arrays] if peer.id in self._known:
                    if not all(type(value) is int for value in (ticket, slot, length)):
                        raise MalformedMessageError("a trajectory is not described by numbers")
                    lies_here = self._store(ticket, slot, length, arrays)
                    self.received += nbytes(arrays)
                    self._listener.send(peer, encode("stored", message.number, lies_here))
                case "bye" | "noop", _:
                    pass
                case kind, _:
                    raise MalformedMessageError(f"another node sent {kind!r:.40}")
        except MALFORMED as error:
            why = f"{type(error).__name__}: {error!s:.200}"
            self._listener.close_peer(peer, "not_allowed", why)


class DirectSender:
    """Sends trajectories to other nodes.

    Consumes: trajectories. Produces: for each, once, whether it lies there. Waits: never. A lost
    connection answers for all trajectories that it has, and is made again.

    Args:
        context: of ZeroMQ.
        keys: of the run.
        place: of this node. It has no connection to itself.
    """

    def __init__(self, *, context: Context, keys: Keys | None, place: str) -> None:
        self._context, self._keys, self._place = context, keys, place
        self._links: dict[str, _DirectLink] = {}
        self.sent = 0
        """Bytes of trajectories that were sent."""

    def connect(self, places: Mapping[str, DirectAddress]) -> None:
        """Have connections to exactly these places. MalformedMessageError if one is not valid."""
        for place in self._links.keys() - places.keys():
            self._links.pop(place).close()
        for place, found in places.items():
            require_reachable(found, encrypted=self._keys is not None)
            if place != self._place and place not in self._links:
                keys = self._keys
                if keys is not None:
                    keys = replace(keys, server_public=found.key.encode("ascii"))
                self._links[place] = _DirectLink(self._context, place, found, keys)

    def reaches(self, place: str) -> bool:
        """True while a connection to ``place`` stands and takes another trajectory."""
        link = self._links.get(place)
        return link is not None and link.open

    def send(
        self,
        place: str,
        trajectory: tuple[int, int, int],
        arrays: Mapping[str, Any],
        done: Callable[[bool], None],
    ) -> None:
        """Send ``trajectory`` (ticket, slot, length) to ``place``, which it `reaches`. ``arrays``
        must not change until ``done`` is called: with True once they lie in the slot there.
        """
        self.sent += nbytes(arrays)
        self._links[place].send([*trajectory, arrays], done)

    def close(self) -> None:
        """End all connections. Idempotent."""
        self.connect({})


class _DirectLink:
    """The connection to one place, made again whenever it is lost."""

    def __init__(
        self, context: Context, place: str, found: DirectAddress, keys: Keys | None
    ) -> None:
        self._context, self._place, self._found, self._keys = context, place, found, keys
        self._waiting: dict[int, Callable[[bool], None]] = {}
        self._number = 0
        self._connection: TcpConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reported = False
        self._stands = False
        """True once the other end has answered the greeting."""
        self._connect()

    @property
    def open(self) -> bool:
        """True if it takes another trajectory."""
        return self._stands and len(self._waiting) < WINDOW

    def _connect(self) -> None:
        self._connection = TcpConnection(
            self._context, self._found.address, keys=self._keys, dead_after_s=DEAD_S
        )
        self._connection.serve(self._receive, self._lost)
        with contextlib.suppress(BrokenChannelError):  # refused at once: its error follows
            self._connection.send(encode("hello", 0, self._place))

    def send(self, body: list[Any], done: Callable[[bool], None]) -> None:
        """Send one trajectory."""
        assert self._connection is not None
        self._number += 1
        try:
            self._connection.send(encode("trajectory", self._number, body))
        except BrokenChannelError:  # its error follows
            done(False)
        else:
            self._waiting[self._number] = done

    def _receive(self, message: Message) -> None:
        match message.kind, message.body:
            case "welcome", _:
                self._stands, self._reported = True, False
                log.info("trajectories go straight to another node", node=self._found.node)
            case "stored", bool(lies_there) if message.number in self._waiting:
                self._waiting.pop(message.number)(lies_there)
            case kind, _:
                self._lost(MalformedMessageError(f"the node sent {kind!r:.40}"))

    def _lost(self, error: TianflowError) -> None:
        if not self._reported:
            self._reported = True
            log.warning(
                "no direct connection to a node: trajectories for it go over the head",
                node=self._found.node,
                why=str(error),
            )
        self._end()
        self._timer = asyncio.get_running_loop().call_later(RECONNECT_S, self._connect)

    def close(self) -> None:
        """End the connection, and make no other one."""
        self._end()
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self._stands = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            done(False)
