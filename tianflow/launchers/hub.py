"""The coordinator's side of the nodes of a run: which there are, their hosts, and the stream of
messages to each.

The gateway only relays. Messages stay here until a node has acknowledged them, so nothing is lost
when a gateway dies.
"""

from __future__ import annotations

import asyncio
import itertools
import platform
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tianflow import __version__
from tianflow.channels.direct import require_reachable
from tianflow.channels.frames import MalformedMessageError
from tianflow.channels.messages import (
    MESSAGES,
    AdmitNode,
    ConnectionsCounted,
    ForgetNode,
    Granted,
    Handlers,
    NodeArrived,
    NodeDisconnected,
    NodeSent,
    NodeTraffic,
    PutSettings,
    RefuseNode,
    SendToNode,
    SendWeights,
)
from tianflow.channels.node_messages import (
    PROTOCOL,
    CloseNode,
    DirectAddress,
    DirectTraffic,
    ForkHost,
    FromHost,
    HostForked,
    HostGone,
    HostRefused,
    KillHost,
    NodeLeaves,
    NodeReady,
    NodeUnable,
    OpenNode,
    RequestCut,
    SetPlaces,
    SetSlots,
    ToHost,
    pack,
    unpack,
)
from tianflow.channels.stream import ReliableStream
from tianflow.core.payloads import NO_VERSION, Prioritise, StoreTrajectory, Version
from tianflow.core.program import (
    ACTORS,
    MOVED,
    NODE_LEFT,
    NODE_LOST,
    NODE_NAME,
    NODE_ROLES,
    REPLAY,
)
from tianflow.core.statistics import NodeStatistics
from tianflow.errors import BrokenChannelError, RunError
from tianflow.interfaces import Connection
from tianflow.logs import logger
from tianflow.planning.placement import bells_on_node, servers_of, shards_on_nodes

if TYPE_CHECKING:
    from tianflow.channels.shm import SharedTransport
    from tianflow.core.payloads import Grant
    from tianflow.interfaces import MessageLink, RunView

TAKEN_S = 3.0
"""Seconds without a word after which another process may take the name of a node."""
_Sent = tuple[bytes, StoreTrajectory | None, Prioritise | None]
"""A message to a node, and the slots whose data go with it."""
CHECK_S = 0.5
"""Seconds between two looks at the leases."""
WAIT_REPORT_S = 10.0
"""Seconds between two reports that nodes are missing."""
ACKNOWLEDGE_S = 0.05
"""Seconds after which a message is acknowledged if nothing is sent meanwhile."""
log = logger("nodes")


class NodeHostProcess:
    """`tianflow.interfaces.HostProcess` on a node, as far as the coordinator sees it.

    Args:
        node: that runs it.
        number: of the host among those of the run.
        role: of the node for which it is there.
        host: its name.
    """

    def __init__(self, node: Node, number: int, role: str, host: str) -> None:
        self._node, self._number = node, number
        self.role, self.host = role, host
        self.pid = 0
        loop = asyncio.get_running_loop()
        self.forked: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self.receive: Callable[[Any], None] | None = None
        """Takes the messages of the host, as plain values."""
        self.leave: Callable[[], None] | None = None
        """Asks the host to hand over what it has, and to end."""
        self.cause = ""
        """Why it ended, if the node is the reason."""
        self.actors: set[str] = set()
        """Actors of the host that have had a grant."""

    @property
    def node(self) -> str:
        """Name of its node."""
        return self._node.name

    @property
    def place(self) -> str:
        """The place of its node; see `tianflow.interfaces.ShardPort`."""
        return self._node.incarnation

    @property
    def reachable(self) -> bool:
        """True while the connection to its node stands."""
        return self._node.connected

    async def wait(self) -> int:
        """See `tianflow.interfaces.HostProcess.wait`."""
        return await asyncio.shield(self.ended)

    def kill(self) -> None:
        """See `tianflow.interfaces.HostProcess.kill`."""
        if not self.ended.done():
            self._node.post(KillHost(self._number))

    def break_off(self, host: str, error: Exception) -> None:
        """A message of ``host``, this one, breaks a rule: its node is lost."""
        self._node.break_off(f"a message of host {host!r} was refused: {error!r}")

    def end_for(self, cause: str) -> None:
        """Ask the host to hand over what it has, and to end, because of ``cause``."""
        self.cause = cause
        if self.leave is not None:
            self.leave()

    def end(self, status: int) -> None:
        """The process is gone."""
        if not self.forked.done():
            self.forked.set_exception(RunError("launcher", "the node is gone"))
            self.forked.exception()  # so that asyncio does not report it
        if not self.ended.done():
            self.ended.set_result(status)


class NodeLink:
    """`tianflow.interfaces.MessageLink` to a host on a node.

    Args:
        node: that runs the host.
        process: the host.
        number: of the host.
        handle: receives every message.
        failed: receives what ``handle`` raises.
    """

    def __init__(
        self,
        *,
        node: Node,
        process: NodeHostProcess,
        number: int,
        handle: Callable[[object], None],
        closed: Callable[[], None],  # noqa: ARG002 - the node reports the end of a host
        failed: Callable[[Exception], None],
    ) -> None:
        self._node, self._process, self._number = node, process, number
        self._handle, self._failed = handle, failed
        process.receive = self._receive

    def send(self, message: object) -> None:
        """To the host, in order."""
        if isinstance(message, Granted):
            self._process.actors.add(message.holder)
            self._node.granting(message.grant)
        relayed = ToHost(self._number, MESSAGES.encode(message))
        if isinstance(message, StoreTrajectory) and not message.place:
            self._node.post_with(relayed, store=message)
        elif isinstance(message, Prioritise):
            self._node.post_with(relayed, prioritise=message)
        else:
            self._node.post(relayed)

    def send_threadsafe(self, message: object) -> None:
        """Not used: the coordinator has one thread."""
        raise NotImplementedError

    def send_event(self, event: object) -> None:
        """Not used: a host publishes events, not its coordinator."""
        raise NotImplementedError

    def push(self) -> None:
        """Send what was sent in this turn of the loop now."""
        self._node.push()

    async def flush(self) -> None:
        """Returns at once: the node's stream carries what was sent."""

    def drain(self) -> None:
        """Do nothing: a host's messages arrive before the report of its end."""

    def close(self) -> None:
        """Receive nothing more."""
        self._process.receive = None

    def _receive(self, values: Any) -> None:
        try:
            self._handle(MESSAGES.decode(values))
        except Exception as error:  # noqa: BLE001 - a boundary: the error names the host
            self._failed(error)


class Node:
    """One node, from its join to its end.

    Args:
        hub: that it belongs to.
        name: unique among the nodes of the run.
        incarnation: of its process.
        cores: that its hosts may use.
        roles: that it offers.
    """

    def __init__(
        self, hub: NodeHub, name: str, incarnation: str, cores: int, roles: Sequence[str]
    ) -> None:
        self._hub, self.name, self.incarnation, self.cores = hub, name, incarnation, cores
        self.roles = tuple(roles)
        self._stream: ReliableStream[_Sent] = ReliableStream()
        self._turn: list[object] = []
        self._turn_ends = self._acknowledging = False
        self._acknowledged = 0
        """Number of the last of its messages that it knows to be accepted."""
        self.connected = self.ready = self.leaving = False
        self.connection = b""
        """Its newest connection, as the gateway names it."""
        self.heard = time.monotonic()
        self.hosts: dict[int, NodeHostProcess] = {}
        self.granted: dict[int, int] = {}
        """Ticket by slot, of the last grant of each slot to a host here."""
        self.traffic: NodeTraffic | None = None
        self.direct = DirectTraffic(0, 0, 0, {})
        """Its counts of direct links, so far."""
        self.listens: DirectAddress | None = None
        """Where it takes trajectories of other nodes."""
        self._handlers = Handlers(
            {
                NodeReady: self._became_ready,
                DirectTraffic: lambda message: hub.count_direct(self, message),
                NodeUnable: lambda message: hub.refuse(self, message.reason),
                NodeLeaves: lambda _: hub.leave(self),
                HostForked: self._forked,
                HostRefused: self._refused,
                HostGone: self._gone,
                FromHost: self._from_host,
            }
        )

    @property
    def load(self) -> float:
        """Hosts a core, with one more."""
        return (len(self.hosts) + 1) / self.cores

    @property
    def accepted(self) -> int:
        """Number of its last message that was accepted."""
        return self._stream.received

    @property
    def speaks(self) -> bool:
        """True if it is connected, and was heard just now."""
        return self.connected and time.monotonic() - self.heard < TAKEN_S

    def works(self, role: str = "") -> bool:
        """True if it takes further hosts; of ``role``, if that is given."""
        able = self.ready and self.connected and not self.leaving
        return able and (not role or role in self.roles)

    def count(self, role: str) -> int:
        """Number of its hosts of ``role``."""
        return sum(process.role == role for process in self.hosts.values())

    # Stream
    # ----------------------------------------------------------------------------------------------

    def post(self, message: object) -> None:
        """Send a message, with the others of this turn of the loop."""
        self._turn.append(message)
        if not self._turn_ends:
            self._turn_ends = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def post_with(
        self,
        message: object,
        *,
        store: StoreTrajectory | None = None,
        prioritise: Prioritise | None = None,
    ) -> None:
        """Send a message with the data of a slot. It ends the turn, and the slot must not change
        until the node has them.
        """
        self._turn.append(message)
        self.push(store, prioritise)

    def granting(self, grant: Grant) -> None:
        """A host here is about to get ``grant``, and needs the weights that it names."""
        self.granted[grant.slot] = grant.ticket
        self._hub.publish()

    def _end_turn(self) -> None:
        self._turn_ends = False
        self.push()

    def push(
        self, store: StoreTrajectory | None = None, prioritise: Prioritise | None = None
    ) -> None:
        """Send what was posted in this turn now, with the data of a slot."""
        if self._turn:
            self._stream.post((pack(self._turn), store, prioritise))
            self._turn.clear()
            self._pump()

    def _pump(self) -> None:
        for number, sent in self._stream.due():
            self._acknowledged = self._stream.received
            self._hub.to_gateway(SendToNode(self.name, number, self._acknowledged, *sent))

    def attach(self, connection: bytes, received: int) -> None:
        """A connection to the node stands; it has accepted messages up to ``received``."""
        self._stream.connected(received)
        self.connection = connection
        self.connected, self.heard = True, time.monotonic()
        self._pump()

    def detach(self) -> None:
        """The connection is lost."""
        self.connected = False
        self._stream.disconnected()

    def break_off(self, why: str) -> None:
        """It sent what it may not send: it is lost."""
        self._hub.break_off(self, why)

    def receive(self, message: NodeSent) -> None:
        """A message of the node, or a sign of life. MalformedMessageError if one is missing."""
        self.heard = time.monotonic()
        self._stream.acknowledge(message.received)
        if message.number and self._stream.accept(message.number):
            if not self._acknowledging:
                self._acknowledging = True
                asyncio.get_running_loop().call_later(ACKNOWLEDGE_S, self._acknowledge)
            for inner in unpack(message.body):
                self._handlers[type(inner)](inner)
        self._pump()

    def _acknowledge(self) -> None:
        self._acknowledging = False
        if self.connected and self._acknowledged != self._stream.received:
            self._acknowledged = self._stream.received
            self._hub.to_gateway(SendToNode(self.name, 0, self._acknowledged, b""))

    @property
    def unacknowledged(self) -> int:
        """Messages to the node that it has not acknowledged."""
        return len(self._stream)

    # Hosts
    # ----------------------------------------------------------------------------------------------

    def _became_ready(self, message: NodeReady) -> None:
        self.ready = True
        log.info("a node works", node=self.name, cores=self.cores, roles=",".join(self.roles))
        if message.address:
            self.listens = DirectAddress(self.name, message.address, message.key)
            self._hub.check(self.listens)
            self._hub.set_places()
        self._hub.changed()

    def _forked(self, message: HostForked) -> None:
        process = self.hosts.get(message.number)
        if process is not None and not process.forked.done():
            process.forked.set_result(message.pid)

    def _refused(self, message: HostRefused) -> None:
        process = self.hosts.pop(message.number, None)
        if process is not None and not process.forked.done():
            error = RunError("launcher", f"node {self.name!r}: {message.reason}")
            process.forked.set_exception(error)
            process.end(-9)

    def _gone(self, message: HostGone) -> None:
        process = self.hosts.pop(message.number, None)
        if process is not None:
            process.end(message.status)
        if self.leaving and not self.hosts:
            self.post(CloseNode())

    def _from_host(self, message: FromHost) -> None:
        process = self.hosts.get(message.number)
        if process is not None and process.receive is not None:
            process.receive(message.message)


class NodeSeat:
    """A place for one host on a node: the part of `tianflow.interfaces.Transport` by which
    `tianflow.launchers.remote.RemoteHost` starts a host.
    """

    address = "shm://"

    def __init__(self, hub: NodeHub, node: Node, number: int, role: str, host: str) -> None:
        self._hub, self._node, self._number = hub, node, number
        self.process = NodeHostProcess(node, number, role, host)
        node.hosts[number] = self.process

    @property
    def node(self) -> str:
        """Name of the node."""
        return self._node.name

    @property
    def has_draws(self) -> bool:
        """True if hosts of the node map slots of draws."""
        return self._hub.gives_draws(self._node)

    def connect(self) -> Connection:
        """A connection through the node."""
        open_link = partial(NodeLink, node=self._node, process=self.process, number=self._number)
        return Connection(open_link, (), lambda: None)

    async def start(self, name: str, payload: bytes, _: Sequence[int]) -> NodeHostProcess:
        """`tianflow.interfaces.StartProcess` on the node."""
        # A replay shard reads no weights, and a node without actors gets none.
        version = self._hub.publish() if self.process.role == ACTORS else NO_VERSION
        self._node.post(ForkHost(self._number, name, payload, version))
        try:
            await asyncio.shield(self.process.forked)
        except asyncio.CancelledError:
            self.process.kill()
            raise
        return self.process

    def release(self) -> None:
        """The host was not started."""
        if not self.process.forked.done():
            self._node.hosts.pop(self._number, None)


class NodeHub:
    """The nodes of a run.

    Consumes: messages of the gateway. Produces: places for hosts, ends of hosts.
    Waits: `place` for a node that works. Unblocked by: a node that joins.

    Args:
        run: the run.
        slots: memory of the run on this machine.
        expect: nodes that have to work before the first host is placed.
        lease_s: seconds without a word after which a node is lost.
    """

    def __init__(
        self,
        *,
        run: RunView,
        slots: SharedTransport,
        expect: int,
        lease_s: float,
    ) -> None:
        self._run, self._slots = run, slots
        self._expect, self._lease_s = expect, lease_s
        self._nodes: dict[str, Node] = {}
        self._gateway: MessageLink | None = None
        self._numbers = itertools.count(1)
        self._joined = asyncio.Event()
        self._complete = False
        """True once as many nodes as expected have worked at the same time."""
        self._published = NO_VERSION
        self._bytes: dict[str, tuple[Counter[str], Counter[str]]] = {}
        """Bytes that each node was sent, and has sent, by kind, since the run began here."""
        self._places: dict[str, DirectAddress] = {}
        """Where nodes listen, as the last `SetPlaces` says."""
        self._direct: dict[str, Counter[str]] = {}
        """Bytes that each node has sent to other nodes, and received from them, likewise."""
        self._waiting: dict[str, float] = {}
        """Hosts without a place, and since when."""
        self._reported = 0.0
        self.arrived = self.refused = self.connections = 0
        """See `tianflow.interfaces.NodesView`."""
        self.connections_refused: Counter[str] = Counter()
        """See `tianflow.interfaces.NodesView`."""
        self._counted = ConnectionsCounted(0, {})
        """By the gateway that works now, so far."""
        self._handlers = Handlers(
            {
                NodeArrived: self._arrived,
                NodeSent: self._sent,
                NodeDisconnected: self._disconnected,
                NodeTraffic: self._traffic,
                ConnectionsCounted: self._count,
            }
        )
        slots.arena.on_cut, slots.grown = self._cut, self._slots_added
        run.exchange.on_settled(self._settled)

    # Gateway
    # ----------------------------------------------------------------------------------------------

    def open(self, gateway: MessageLink) -> None:
        """A gateway works, the first one or a later one."""
        self._gateway, self._published = gateway, NO_VERSION
        self._counted = ConnectionsCounted(0, {})
        self.publish()

    def shut(self) -> None:
        """The gateway is gone. Nodes connect to the next one."""
        self._gateway = None
        for node in self._nodes.values():
            node.detach()

    def to_gateway(self, message: object) -> None:
        """Send to the gateway; without one, a node is sent what it needs when it is back."""
        if self._gateway is not None:
            self._gateway.send(message)

    def handle(self, message: object) -> None:
        """A message of the gateway."""
        self._handlers[type(message)](message)

    def publish(self) -> Version:
        """Have the newest published weights sent to all nodes. Their version."""
        published = self._run.exchange.ledger.published
        if published > self._published:
            self._published = published
            self.to_gateway(SendWeights(published))
        return published

    def _settled(self) -> None:
        self.publish()

    def _sent(self, message: NodeSent) -> None:
        node = self._nodes.get(message.name)
        if node is None:
            return
        try:
            node.receive(message)
        except (MalformedMessageError, BrokenChannelError) as error:
            self.break_off(node, f"a message of it was refused: {error}")

    def break_off(self, node: Node, why: str) -> None:
        """``node`` sent what it may not send: it is lost, and the run continues."""
        self.connections_refused["broken_rule"] += 1
        self._lose(node, NODE_LOST, why)

    def _count(self, message: ConnectionsCounted) -> None:
        self.connections += message.accepted - self._counted.accepted
        self._add_refused(message.refused, self._counted.refused)
        self._counted = message

    def _disconnected(self, message: NodeDisconnected) -> None:
        node = self._nodes.get(message.name)
        if node is None or node.connection != message.connection:
            return
        node.detach()
        if node.leaving and not node.hosts:
            self._remove(node, NODE_LEFT)
            log.info("a node has left", node=node.name)
        else:
            log.warning("the connection to a node is lost", node=node.name, lease_s=self._lease_s)

    def _traffic(self, message: NodeTraffic) -> None:
        node = self._nodes.get(message.name)
        if node is None:
            return
        before, node.traffic = node.traffic, message
        sums = self._bytes.setdefault(message.name, (Counter(), Counter()))
        for place, counted in enumerate((message.sent, message.received)):
            earlier = {} if before is None else (before.sent, before.received)[place]
            for kind, number in counted.items():
                last = earlier.get(kind, 0)
                # a gateway that was started again, or a node that joined again, counts from 0
                sums[place][kind] += number - last if number >= last else number

    def count_direct(self, node: Node, message: DirectTraffic) -> None:
        """``node`` has counted its links to other nodes."""
        before, node.direct = node.direct, message
        sums = self._direct.setdefault(node.name, Counter())
        sums["sent"] += message.sent - before.sent
        sums["received"] += message.received - before.received
        self.connections += message.accepted - before.accepted
        self._add_refused(message.refused, before.refused)

    def _add_refused(self, refused: Mapping[str, int], before: Mapping[str, int]) -> None:
        for reason, number in refused.items():
            self.connections_refused[reason] += number - before.get(reason, 0)

    def check(self, listens: DirectAddress) -> None:
        """MalformedMessageError if other nodes could not connect to what ``listens``."""
        require_reachable(listens, encrypted=self._run.settings.value.config.cluster.curve)

    def set_places(self) -> None:
        """Send all nodes where nodes listen for trajectories, if that has changed."""
        places = {
            node.incarnation: node.listens
            for node in self._nodes.values()
            if node.listens is not None
        }
        if places != self._places:
            self._places = places
            for node in self._nodes.values():
                node.post(SetPlaces(places))

    def gives_draws(self, node: Node) -> bool:
        """True if ``node`` may get replay shards."""
        return REPLAY in node.roles and REPLAY in self._roles

    @property
    def _roles(self) -> Sequence[str]:
        """Roles that the run gives to nodes."""
        return NODE_ROLES if shards_on_nodes(self._run.settings.value.config) else (ACTORS,)

    def _cut(self, slot: int, ticket: int) -> None:
        for node in self._nodes.values():
            if node.granted.get(slot) == ticket:
                node.post(RequestCut(slot, ticket))

    def _slots_added(self) -> None:
        """The run has more slots."""
        for node in self._nodes.values():
            node.post(SetSlots(self._slots.arena.slots))

    # Joining
    # ----------------------------------------------------------------------------------------------

    def _arrived(self, message: NodeArrived) -> None:
        self.arrived += 1
        hello = message.hello
        try:
            problem = self._mismatch(hello)
            roles = _checked_roles(hello["roles"])
            name, incarnation, cores, received, before = (
                _checked(hello["name"], str),
                _checked_incarnation(hello["incarnation"]),
                _checked(hello["cores"], int),
                _checked(hello["received"], int),
                _checked(hello["before"], str),
            )
        except (KeyError, TypeError) as error:
            self._refuse(message, f"its first message is not complete: {error}")
            return
        known = self._nodes.get(name)
        if not NODE_NAME.fullmatch(name):
            problem = f"{name!r:.80} is not a name of a node"
        if problem:
            self._refuse(message, problem)
        elif known is not None and known.incarnation == incarnation:
            self._admit(message, known, received, fresh=False)
        elif received:
            self._refuse(message, "it was lost", again=True)
        elif known is not None and before != known.incarnation and known.speaks:
            taken = f"the name {name!r} is taken by a node that is connected"
            self._refuse(message, taken, again=False)
        elif missing := self._missing(name, cores, roles):
            self._refuse(message, missing)
        else:
            if known is not None:
                self._lose(known, NODE_LOST, "its process was started again")
            node = self._nodes[name] = Node(self, name, incarnation, cores, roles)
            log.info("a node joins", node=name, cores=cores, roles=",".join(roles))
            node.post(self._opening(node))
            if self._places:
                node.post(SetPlaces(self._places))
            self._admit(message, node, 0, fresh=True)

    def _opening(self, node: Node) -> OpenNode:
        settings, arena = self._run.settings, self._slots.arena
        config, draws = settings.value.config, None
        if self.gives_draws(node):
            draws = self._slots.draws
        return OpenNode(
            self._run.id,
            PutSettings.of(settings.value, settings.key),
            self._run.spec,
            arena.layout,
            arena.capacity,
            arena.slots,
            bells_on_node(config),
            servers_of(config),
            None if draws is None else draws.layout,
            0 if draws is None else draws.capacity,
            str(self._run.directory) if draws is not None and config.checkpoint.replay else "",
        )

    def _missing(self, name: str, cores: int, roles: Sequence[str]) -> str:
        """What the run would miss if node ``name`` offered this, in words; "": nothing.

        A run that has as many nodes as it expects begins, so one of them has to offer each role
        that it gives to nodes.
        """
        if cores < 1:
            return f"it offers {cores} cores; at least 1 is needed"
        others = [node for node in self._nodes.values() if node.name != name]
        offered = {*roles, *(role for node in others for role in node.roles)}
        missing = next((role for role in self._roles if role not in offered), "")
        if not missing or self._complete or len(others) + 1 < self._expect:
            return ""
        return (
            f"no node offers the role {missing!r}, and the run has the {self._expect} nodes of "
            f"cluster.expect with it: start one with --roles {missing} or actors,replay first"
            + (', or set cluster.replay = "head"' if missing == REPLAY else "")
        )

    def _mismatch(self, hello: Mapping[str, Any]) -> str:
        """Why a process cannot be a node of this run; "" if it can."""
        expected = {
            "run": self._run.id,
            "tianflow": __version__,
            "protocol": PROTOCOL,
            "python": python_version(),
        }
        for key, value in expected.items():
            if hello.get(key) != value:
                return (
                    f"its {key} is {hello.get(key)!r:.60}, and the {key} of the head is {value!r}"
                )
        return ""

    def _admit(self, message: NodeArrived, node: Node, received: int, *, fresh: bool) -> None:
        self.to_gateway(
            AdmitNode(message.connection, node.name, node.accepted, fresh, self._lease_s)
        )
        try:
            node.attach(message.connection, received)
        except MalformedMessageError as error:
            self._lose(node, NODE_LOST, str(error))

    def _refuse(self, message: NodeArrived, reason: str, *, again: bool = False) -> None:
        self.refused += 1
        name = message.hello.get("name")
        log.warning("a node is refused", node=f"{name!s:.60}", why=reason)
        self.to_gateway(RefuseNode(message.connection, reason, again))

    def refuse(self, node: Node, reason: str) -> None:
        """``node`` cannot run the hosts of this run."""
        self.refused += 1
        log.error("a node cannot take part", node=node.name, why=reason)
        self._remove(node, NODE_LOST)

    # Leaving
    # ----------------------------------------------------------------------------------------------

    def leave(self, node: Node) -> None:
        """``node`` was asked to end: its hosts hand over what they have."""
        node.leaving, node.listens = True, None
        self.set_places()
        log.info("a node leaves", node=node.name, hosts=len(node.hosts))
        for process in list(node.hosts.values()):
            process.end_for(NODE_LEFT)
        if not node.hosts:
            node.post(CloseNode())

    async def watch(self) -> None:
        """Find nodes whose lease is over, until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()
            # A pause of this process itself makes no node silent.
            pause, last = max(0.0, now - last - 2 * CHECK_S), now
            for node in self._nodes.values():
                node.heard += pause
            self.find_lost(now)
            self._report_waiting(now)

    def find_lost(self, now: float) -> None:
        """Lose the nodes whose lease is over at ``now`` (`time.monotonic`)."""
        for node in list(self._nodes.values()):
            if now - node.heard > self._lease_s:
                self._lose(node, NODE_LOST, f"not heard for {self._lease_s:g} s")

    def _report_waiting(self, now: float) -> None:
        since = max(min(self._waiting.values(), default=now), self._reported)
        if now - since >= WAIT_REPORT_S:
            self._reported = now
            log.warning(
                "waiting for nodes",
                hosts=len(self._waiting),
                nodes=sum(node.works() for node in self._nodes.values()),
                expected=self._expect,
            )

    def _lose(self, node: Node, reason: str, why: str) -> None:
        log.warning("a node is lost", node=node.name, why=why, hosts=len(node.hosts))
        self._remove(node, reason)

    def _remove(self, node: Node, reason: str) -> None:
        if self._nodes.get(node.name) is node:
            del self._nodes[node.name]
            node.detach()
            self.to_gateway(ForgetNode(node.name, False))
            self.set_places()
        for process in list(node.hosts.values()):
            process.cause = reason
            process.end(-9)
        node.hosts.clear()

    def detach(self) -> None:
        """Watch the run no more."""
        self._slots.arena.on_cut = self._slots.grown = None

    def close(self) -> None:
        """The run has ended: nodes may leave."""
        for node in self._nodes.values():
            node.push()
            self.to_gateway(ForgetNode(node.name, True))
        self._nodes.clear()

    # Placing
    # ----------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """A node works."""
        self._complete |= sum(node.works() for node in self._nodes.values()) >= self._expect
        self._joined.set()
        self._spread()

    def _spread(self) -> None:
        """Move hosts to nodes with more free cores. A host moves only if it has more of a core
        there, so no host moves back.
        """
        working = [node for node in self._nodes.values() if node.works(ACTORS)]
        staying = {
            node: [
                process
                for process in node.hosts.values()
                if not process.cause and process.role == ACTORS
            ]
            for node in working
        }
        # A shard stays: it would lose its items.
        coming = {node: node.count(REPLAY) for node in working}
        others = dict(coming)

        def there(node: Node) -> float:
            return (len(staying[node]) + coming[node] + 1) / node.cores

        def now(node: Node) -> float:
            return (len(staying[node]) + others[node]) / node.cores if staying[node] else 0.0

        for node in self._nodes.values():
            for process in node.hosts.values():
                if process.cause == MOVED and working:  # it has not arrived yet
                    coming[min(working, key=there)] += 1
        while working:
            most = max(working, key=now)
            least = min(working, key=there)
            if there(least) >= now(most):
                return
            coming[least] += 1
            staying[most].pop().end_for(MOVED)

    async def place(self, host: str) -> NodeSeat:
        """A place for ``host``, which has actors, on the node with the fewest hosts a core."""
        while True:
            working = self._working(ACTORS)
            if working and self._complete:
                node = min(working, key=lambda node: node.load)
                return NodeSeat(self, node, next(self._numbers), ACTORS, host)
            await self._wait_for_node(host)

    async def place_shard(self, host: str) -> NodeSeat | None:
        """A place for ``host``, which has a replay shard, on the node with the fewest shards; None:
        it belongs on the head.

        Before the run has the nodes that it expects, it waits. Later the head has a shard rather
        than that it waits for a node.
        """
        if REPLAY not in self._roles:
            return None
        while not self._complete:
            await self._wait_for_node(host)
        working = self._working(REPLAY)
        if not working:
            log.warning("no node takes a replay shard: it runs on the head", host=host)
            return None
        node = min(working, key=lambda node: (node.count(REPLAY), node.load))
        return NodeSeat(self, node, next(self._numbers), REPLAY, host)

    def _working(self, role: str) -> list[Node]:
        return [node for node in self._nodes.values() if node.works(role)]

    async def _wait_for_node(self, host: str) -> None:
        """Wait until another node works."""
        self._joined.clear()
        self._waiting[host] = time.monotonic()
        try:
            await self._joined.wait()
        finally:
            del self._waiting[host]

    def statistics(self) -> dict[str, NodeStatistics]:
        """See `tianflow.interfaces.NodesView`."""
        now, ledger = time.monotonic(), self._run.exchange.ledger
        published, late, found = ledger.published, ledger.lateness.late, {}
        for node in self._nodes.values():
            traffic = node.traffic
            actors = {name for process in node.hosts.values() for name in process.actors}
            weights = NO_VERSION if traffic is None else traffic.weights
            sent, received = self._bytes.get(node.name, (Counter[str](), Counter[str]()))
            direct = self._direct.get(node.name, Counter())
            lag = published.number - weights.number if weights.lineage == published.lineage else 0
            found[node.name] = NodeStatistics(
                up=node.connected,
                ready=node.works(),
                cores=node.cores,
                roles=node.roles,
                hosts=len(node.hosts),
                shards=tuple(
                    sorted(
                        process.host for process in node.hosts.values() if process.role == REPLAY
                    )
                ),
                actors=tuple(sorted(actors)),
                late=tuple(sorted(actors & late)),
                silent_s=now - node.heard,
                round_trip_s=0.0 if traffic is None else traffic.round_trip_s,
                weights_lag=max(0, lag),
                unacknowledged=node.unacknowledged,
                sent_bytes=dict(sent),
                received_bytes=dict(received),
                direct_sent_bytes=direct["sent"],
                direct_received_bytes=direct["received"],
            )
        return found


def python_version() -> str:
    """Major and minor version of Python, which all machines of a run share."""
    return ".".join(platform.python_version_tuple()[:2])


def new_incarnation() -> str:
    """An identifier of a process that no other process has."""
    return secrets.token_hex(8)


def _checked_incarnation(value: object) -> str:
    if not (found := str(_checked(value, str))):  # "" is the place of the head
        raise TypeError("its incarnation has no name")
    return found


def _checked_roles(value: object) -> list[str]:
    roles = [_checked(role, str) for role in _checked(value, list)]
    if not roles or not set(roles) <= set(NODE_ROLES):
        raise TypeError(f"its roles are {roles!r:.80}; accepted: {', '.join(NODE_ROLES)}")
    return roles


def _checked(value: object, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not of type {kind.__name__}")
    return value
