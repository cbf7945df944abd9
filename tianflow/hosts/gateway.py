"""The gateway of a run on several machines: the only process of the head that faces the network.

It admits nodes at the coordinator's word and relays messages. The data of a trajectory arrive with
the message that commits it, and lie in their slot before the coordinator gets that message. So do
the columns that a replay shard has drawn. Trajectories and priorities for a shard on a node leave
from their slots. Weights leave from shared memory, once for each node, the newest only.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgpack
import numpy as np

from tianflow.channels.arena import Arena, answer_fields, at_place, input_rows, row_of
from tianflow.channels.attachments import Attachments, DrawParts, Encoding
from tianflow.channels.doorbell import Doorbell
from tianflow.channels.frames import (
    MALFORMED,
    MalformedMessageError,
    Message,
    encode,
    joined,
    nbytes,
    pieces,
)
from tianflow.channels.keys import Keys
from tianflow.channels.link import Link
from tianflow.channels.messages import (
    MESSAGES,
    AdmitNode,
    ConnectionsCounted,
    ForgetNode,
    GatewayFailed,
    GatewayListens,
    Handlers,
    NodeArrived,
    NodeDisconnected,
    NodeSent,
    NodeTraffic,
    RefuseNode,
    SendToNode,
    SendWeights,
    StartGateway,
)
from tianflow.channels.node_messages import DEAD_S, MOST_BYTES
from tianflow.channels.shm import SharedMemory, SharedWeights, mapped_arena, stored_nbytes
from tianflow.channels.stream import accepts
from tianflow.channels.tcp import Peer, TcpListener
from tianflow.core.payloads import NO_VERSION, Version
from tianflow.core.resource_limits import permit_open_files
from tianflow.errors import BrokenChannelError, ConfigError
from tianflow.hosts import event_loop as loops
from tianflow.hosts.signals import outlive_sigterm

BEAT_S = 1.0
"""Seconds between two signs of life on the link of a node, and two reports of its traffic."""
MOST_GUESTS = 64
"""Connections that wait for the coordinator's word; further ones are closed."""


@dataclass(slots=True)
class _Member:
    """A node, as its gateway knows it.

    ``weights``: the version that it has; None until it says that it has room for weights.
    ``sending``: weights are on their way to it.
    """

    peer: Peer
    received: int
    connected: bool = True
    weights: Version | None = None
    sending: bool = False
    round_trip_s: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)
    arrived: Counter[str] = field(default_factory=Counter)


class Gateway:
    """Relays between the coordinator's link and the nodes.

    Consumes: messages of both sides. Produces: messages for both sides, trajectories in slots.
    Waits: never. Unblocked by: the end of the link ends it.

    Args:
        start: what the coordinator started it with.
        end: of the link to the coordinator.
        slots: descriptor of the slots of the run.
        weights: descriptor of its weights.
        bells: doorbells of the inference servers, and the gateway's own as the last one.
        draws: with replay, descriptor of its slots of draws.
    """

    def __init__(
        self,
        start: StartGateway,
        end: socket.socket,
        slots: int,
        weights: int,
        bells: Sequence[Doorbell] = (),
        *,
        draws: int | None = None,
    ) -> None:
        self._arena, self._memory = mapped_arena(start.layout, slots), weights
        encoding = cast("Encoding", start.encoding)
        self._attachments = Attachments(start.layout, encoding)
        self._draws: Arena | None = None
        self._columns: DrawParts
        if start.draws is not None and draws is not None:
            self._draws = mapped_arena(start.draws, draws)
            self._columns = DrawParts(start.draws)
        self._bells = bells
        self._asking: dict[int, tuple[str, int]] = {}
        """(node, its request) by slot, of requests to inference servers without an answer."""
        if bells:
            asyncio.get_running_loop().add_reader(bells[-1].fd, self._answered)
        self._weights: SharedWeights | None = None
        self._published = NO_VERSION
        self._guests: dict[bytes, Peer] = {}
        self._members: dict[str, _Member] = {}
        self._names: dict[bytes, str] = {}
        self._counted: ConnectionsCounted | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = Link(end=end, handle=self._obey, closed=self.stop)
        self._handlers = Handlers(
            {
                AdmitNode: self._admit,
                RefuseNode: self._refuse,
                SendToNode: self._relay_down,
                SendWeights: self._publish,
                ForgetNode: self._forget,
            }
        )
        try:
            keys = Keys.of(start.keys) if start.keys else None
            self._listener: TcpListener | None = TcpListener(
                start.address, keys=keys, dead_after_s=DEAD_S
            )
        except ConfigError as error:
            self._listener = None
            self._link.send(GatewayFailed(str(error)))
            return
        self._link.send(GatewayListens(self._listener.address))
        self._listener.serve(self._receive, self._find_lost)

    def stop(self) -> None:
        """End the gateway."""
        if not self.closed.done():
            self.closed.set_result(None)

    async def run(self) -> None:
        """Until the coordinator is gone. An error of the beats ends it, and it is restarted: nodes
        would lose a gateway that does not beat.
        """
        beats = asyncio.create_task(self._beat())
        try:
            await asyncio.wait({beats, self.closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)
            if self._bells:
                asyncio.get_running_loop().remove_reader(self._bells[-1].fd)
            if self._listener is not None:
                self._listener.close()
            self._link.close()
        if not self.closed.done():
            beats.result()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._find_lost()
            for name, member in self._members.items():
                if member.connected:
                    self._send(member, "beat", 0, [time.monotonic()])
                self._link.send(
                    NodeTraffic(
                        name,
                        dict(member.sent),
                        dict(member.arrived),
                        member.weights or NO_VERSION,
                        member.round_trip_s,
                    )
                )
            self._count()

    def _count(self) -> None:
        """Report the connections that were refused, if there are new ones."""
        if self._listener is None:
            return
        found = self._listener.statistics()
        counted = ConnectionsCounted(found.accepted, found.refused)
        if counted != self._counted:
            self._counted = counted
            self._link.send(counted)

    # To nodes
    # ----------------------------------------------------------------------------------------------

    def _obey(self, message: Any) -> None:
        self._handlers[type(message)](message)

    def _admit(self, message: AdmitNode) -> None:
        peer = self._guests.pop(message.connection, None)
        if peer is None:
            return
        before = self._members.get(message.name)
        member = _Member(peer, message.received)
        if before is not None:
            self._names.pop(before.peer.id, None)
            if not message.fresh:
                member.sent, member.arrived = before.sent, before.arrived
                # Messages of the connection before may have come after the coordinator's word.
                member.received = max(member.received, before.received)
        self._members[message.name], self._names[peer.id] = member, message.name
        welcome = [message.name, message.received, message.fresh, message.lease_s]
        self._send(member, "welcome", 0, welcome)

    def _refuse(self, message: RefuseNode) -> None:
        peer = self._guests.pop(message.connection, None)
        if peer is not None and self._listener is not None:
            self._listener.send(peer, encode("refused", 0, [message.reason, message.again]))

    def _relay_down(self, message: SendToNode) -> None:
        member = self._members.get(message.name)
        if member is None or not member.connected:
            return
        trajectories, priorities = list[Any](), list[Any]()
        if (found := message.store) is not None:
            arrays = self._attachments.of(self._arena.views(found.slot), found.length)
            trajectories.append([found.ticket, found.slot, found.length, arrays])
        if (drawn := message.prioritise) is not None:
            assert self._draws is not None
            views = self._draws.views(drawn.slot)
            arrays = self._columns.priorities(views, drawn.first, drawn.items)
            priorities.append([drawn.slot, drawn.first, drawn.items, arrays])
        data = np.frombuffer(message.body, np.uint8)
        body = [message.received, data, trajectories, priorities]
        kind = "trajectories" if trajectories else "priorities" if priorities else "messages"
        self._send(member, "down", message.number, body, counted=kind)

    def _publish(self, message: SendWeights) -> None:
        self._published = max(self._published, message.version)
        for member in self._members.values():
            self._send_weights(member)

    def _send_weights(self, member: _Member) -> None:
        """Send the newest weights, unless the node has them or older ones are on their way."""
        if member.sending or not member.connected:
            return
        if member.weights is None or member.weights >= self._published:
            return
        if self._weights is None:
            memory = SharedMemory.attach(self._memory)
            self._weights = SharedWeights(memory=memory, nbytes=stored_nbytes(memory.nbytes))
        flat = np.empty(self._weights.flat_nbytes, np.uint8)
        self._weights.announce(self._published)
        version = self._weights.read_into(flat)
        member.sending = True
        body = [*version, flat.nbytes, pieces(flat)]
        self._send(member, "weights", 0, body, counted="weights")

    def _forget(self, message: ForgetNode) -> None:
        member = self._members.pop(message.name, None)
        if member is not None:
            self._names.pop(member.peer.id, None)
            self._send(member, "ended" if message.ended else "lost", 0, None)

    def _send(
        self,
        member: _Member,
        kind: str,
        number: int,
        body: object,
        *,
        counted: str = "messages",
    ) -> None:
        if self._listener is None:
            return
        frames = encode(kind, number, body)
        if self._listener.send(member.peer, frames):
            member.sent[counted] += sum(map(len, frames))
        elif member.connected:
            self._find_lost()

    def _find_lost(self) -> None:
        """Report the nodes whose connections are over."""
        if self._listener is None:
            return
        for name, member in self._members.items():
            if member.connected and not self._listener.reachable(member.peer):
                member.connected = member.sending = False
                self._link.send(NodeDisconnected(name, member.peer.id))
        gone = [i for i, peer in self._guests.items() if not self._listener.reachable(peer)]
        for connection in gone:
            del self._guests[connection]

    # From nodes
    # ----------------------------------------------------------------------------------------------

    def _receive(self, peer: Peer, message: Message) -> None:
        assert self._listener is not None
        name = self._names.get(peer.id)
        try:
            if name is None:
                self._greet(peer, message)
            else:
                self._handle(name, self._members[name], message)
        except MALFORMED as error:
            why = f"{type(error).__name__}: {error!s:.200}"
            self._listener.close_peer(peer, "not_allowed", why)

    def _greet(self, peer: Peer, message: Message) -> None:
        hello = message.body
        if message.kind != "hello" or not isinstance(hello, dict):
            raise MalformedMessageError(f"a stranger begins with {message.kind!r:.40}")
        if any(type(name) is not str for name in hello):
            raise MalformedMessageError("a stranger names a value by something that is not a text")
        if len(self._guests) >= MOST_GUESTS:
            raise MalformedMessageError("too many connections wait to be admitted")
        self._link.send(NodeArrived(peer.id, hello))
        self._guests[peer.id] = peer

    def _handle(self, name: str, member: _Member, message: Message) -> None:
        match message.kind, message.body:
            case "up", [received, np.ndarray() as body, list(trajectories), list(columns)] if (
                _whole(received)
            ):
                if body.nbytes > MOST_BYTES:
                    raise MalformedMessageError(f"a message has {body.nbytes} bytes")
                if accepts(member.received, message.number):
                    self._store_all(member, trajectories, columns)
                    member.received = message.number
                    member.arrived["messages"] += body.nbytes
                    self._link.send(NodeSent(name, message.number, received, body.tobytes()))
            case "beat", [received, list(progress), float(echo)] if _whole(received):
                self._report(progress)
                if echo and math.isfinite(echo):
                    member.round_trip_s = max(0.0, time.monotonic() - echo)
                self._link.send(NodeSent(name, 0, received, b""))
            case "ask", list(requests):
                for slot, request, inputs in requests:
                    self._ask(name, slot, request, inputs)
            case "stored", [lineage, number] if _whole(lineage, number):
                version = Version(lineage, number)
                if version < NO_VERSION:  # every published version is newer, also before the first
                    raise MalformedMessageError(f"{version!r:.60} is not a version")
                member.weights, member.sending = version, False
                self._send_weights(member)
            case "bye" | "noop", _:
                pass
            case kind, _:
                raise MalformedMessageError(f"a node sent {kind!r:.40}")

    def _report(self, progress: Sequence[Any]) -> None:
        for slot, ticket, steps in progress:
            if not _whole(slot, ticket, steps):
                raise MalformedMessageError("progress is not a slot, a ticket and steps")
            if 0 <= slot < self._arena.slots:
                self._arena.report(slot, ticket, steps)

    def _ask(self, name: str, slot: Any, request: Any, inputs: Any) -> None:
        """Write a request of a node into its slot, and ask the inference server of the slot."""
        if not self._bells or type(slot) is not int or not 0 <= slot < self._arena.slots:
            raise MalformedMessageError(f"no inference server answers slot {slot!r:.20}")
        if not _whole(request):
            raise MalformedMessageError(f"{request!r:.20} is not a request")
        row = row_of(request)
        if row >= self._arena.layout.steps:
            raise MalformedMessageError(f"a trajectory has no row {row}")
        places = input_rows(self._arena, slot, row)
        if not isinstance(inputs, dict) or inputs.keys() != places.keys():
            raise MalformedMessageError("a request has other fields than the run")
        for name_of_field, array in inputs.items():
            joined(places[name_of_field], array)
        own = at_place(request, len(self._bells) - 1)
        self._asking[slot] = name, request
        if self._arena.answer_to(slot, own) is None:
            self._arena.ask_for(slot, own)
            self._bells[slot % (len(self._bells) - 1)].ring()
        else:  # the connection was lost before the answer arrived
            self._bells[-1].ring()

    def _answered(self) -> None:
        """Send the answers that inference servers have written."""
        self._bells[-1].clear()
        found: dict[str, list[Any]] = {}
        for slot, (name, request) in list(self._asking.items()):
            own = at_place(request, len(self._bells) - 1)
            version = self._arena.answer_to(slot, own)
            if version is not None:
                del self._asking[slot]
                views = self._arena.request_views(slot)
                answer = {key: views[key].copy() for key in answer_fields(views)}
                found.setdefault(name, []).append([slot, request, *version, answer])
        for name, answers in found.items():
            member = self._members.get(name)
            if member is not None and member.connected:
                self._send(member, "answers", 0, answers)

    def _store_all(
        self, member: _Member, trajectories: Sequence[Any], columns: Sequence[Any]
    ) -> None:
        """Write data of slots that a node has sent with a message."""
        for slot, length, arrays in trajectories:
            self._store(slot, length, arrays)
            member.arrived["trajectories"] += nbytes(arrays)
        for slot, first, items, arrays in columns:
            self._store_drawn(slot, first, items, arrays)
            member.arrived["draws"] += nbytes(arrays)

    def _store(self, slot: Any, length: Any, arrays: Any) -> None:
        """Write a trajectory into its slot."""
        if type(slot) is not int or not 0 <= slot < self._arena.slots:
            raise MalformedMessageError(f"there is no slot {slot!r:.20}")
        self._attachments.write(self._arena.views(slot), length, arrays)

    def _store_drawn(self, slot: Any, first: Any, items: Any, arrays: Any) -> None:
        """Write columns that a replay shard has drawn."""
        if self._draws is None or type(slot) is not int or not 0 <= slot < self._draws.slots:
            raise MalformedMessageError(f"there is no slot {slot!r:.20} of draws")
        self._columns.write(self._draws.views(slot), first, items, arrays)


def _whole(*values: object) -> bool:
    """True if all ``values`` are whole numbers. True and False are not: the coordinator takes none
    for a number.
    """
    return all(type(value) is int for value in values)


def main(payload: bytes, descriptors: Sequence[int]) -> int:
    """Run the gateway. The exit status.

    Args:
        payload: a packed `StartGateway`.
        descriptors: the end of the link, the slots, the weights, with replay the draws, doorbells.
    """
    outlive_sigterm()
    permit_open_files()
    start = MESSAGES.decode(msgpack.unpackb(payload, strict_map_key=False))
    if not isinstance(start, StartGateway):
        raise BrokenChannelError(f"a gateway starts with StartGateway, not {type(start).__name__}")
    number, slots, weights, *rest = descriptors
    draws = None if start.draws is None else rest.pop(0)
    bells = [Doorbell(bell) for bell in rest]
    end = socket.socket(fileno=number)
    end.setblocking(False)

    async def run() -> None:
        await Gateway(start, end, slots, weights, bells, draws=draws).run()

    loops.run(run())
    return 0
