"""A node: the process that runs hosts of actors or replay shards on a machine of its own, for a run
elsewhere.

Hosts do not know about it: they see a link, slots and weights in shared memory. The node relays
their messages, sends the data of a trajectory with the message that commits it, and holds a grant
back until the weights that it names are here. The data of a trajectory for a shard on another node
go straight there, before the message. The columns that a shard has drawn go with its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tianflow import __version__
from tianflow.channels.arena import (
    MOST_PLACES,
    SlotRequests,
    answer_fields,
    input_rows,
    place_of,
    row_of,
)
from tianflow.channels.direct import DirectListener, DirectSender
from tianflow.channels.frames import (
    MALFORMED,
    MalformedMessageError,
    Message,
    encode,
    joined,
    nbytes,
)
from tianflow.channels.link import RelayLink
from tianflow.channels.messages import Abort, Commit, Drawn, Granted, Handlers
from tianflow.channels.node_messages import (
    DEAD_S,
    PROTOCOL,
    CloseNode,
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
from tianflow.channels.shm import SharedMemory, SharedTransport, SharedWeights
from tianflow.channels.slot_contents import SlotContents
from tianflow.channels.stream import ReliableStream
from tianflow.channels.tcp import RefusedConnectionError, TcpConnection, new_context
from tianflow.core.payloads import NO_VERSION, DrawPart, Version
from tianflow.core.program import ACTORS, NODE_ROLES
from tianflow.errors import (
    BrokenChannelError,
    ConfigError,
    RunError,
    TianflowError,
)
from tianflow.launchers.host_forker import HostForker
from tianflow.launchers.hub import new_incarnation, python_version
from tianflow.launchers.processes import PRELOAD, TARGET
from tianflow.logs import logger
from tianflow.planning.memory import usable_memory
from tianflow.planning.probe import probe
from tianflow.rundir.join_file import NAME, JoinFile

if TYPE_CHECKING:
    from tianflow.channels.doorbell import Doorbell
    from tianflow.channels.tcp import Context
    from tianflow.config.model import Config
    from tianflow.interfaces import MessageLink
    from tianflow.launchers.host_forker import ForkedHost
    from tianflow.planning.probe import Answer

BEAT_S = 0.25
"""Seconds between two signs of life, which carry the progress of environments."""
RECONNECT_S = 0.2
"""Seconds between two attempts to connect."""
REJOIN_S = 1.0
"""Seconds between two looks for a run to join."""
TURN_BYTES, TURN_SLOTS = 64 * 1024, 64
"""Data of slots that one message carries at most, unless those of one slot alone are more."""
MOST_WAITING = 1024
"""Messages to the head that wait at most before hosts are not read any more. Their events are
dropped then, and counted.
"""
JOIN_S = 5.0
"""Seconds after which an attempt to join ends. The next one reads the join file again."""
PATIENCE_S = 15.0
"""Seconds without a run after which a node that takes part once ends."""
REFUSED = (*MALFORMED, BrokenChannelError)
"""What a malformed message of the head raises; `unpack` raises the last one."""
log = logger("node")


async def _probed(config: Config) -> Answer:
    """Validate ``config`` in a process of its own. A cancellation ends that process."""
    stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        work = asyncio.get_running_loop().run_in_executor(
            None,
            partial(probe, config, report=log.info, output=subprocess.DEVNULL, stop=stop),
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            os.eventfd_write(stop, 1)
            await asyncio.wait([work])
            work.exception()  # so that asyncio does not report it
            raise
    finally:
        os.close(stop)


class RefusedNodeError(TianflowError):
    """The run does not accept this node. ``again``: it may later."""

    def __init__(self, summary: str, *, again: bool = False) -> None:
        self.again, self.bad = again, not again
        super().__init__(summary)


@dataclass(slots=True)
class _Turn:
    """Messages that leave together, with the data of the slots that they are about."""

    messages: list[object] = field(default_factory=list)
    trajectories: list[Any] = field(default_factory=list)
    columns: list[Any] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True)
class _Waiting:
    """A message of a host to the head, with data of slots. It leaves after those before it.

    ``ready``: False while the data are on their way to another node.
    """

    message: object
    trajectories: Sequence[Any] = ()
    columns: Sequence[Any] = ()
    ready: bool = True


class _Host:
    """A host process on this node."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: deque[_Waiting] = deque()
        """Its messages that have not left, because the first one is not ready."""
        self.drawing: dict[int, tuple[int, int, int]] = {}
        """(slot, first column, count) of the draws that it was asked for."""
        self.link: RelayLink | None = None
        self.process: ForkedHost | None = None
        self.killed = False

    def read(self, wanted: bool) -> None:
        """Read the messages of the host, or leave them in its socket."""
        if self.link is not None:
            self.link.read(wanted)

    def kill(self) -> None:
        self.killed = True
        if self.process is not None:
            self.process.kill()


class Membership:
    """This process as a node of a run, in one incarnation: from its join until it is lost, or the
    run ends.

    Consumes: messages of the gateway and of hosts. Produces: the same, relayed.
    Waits: for nothing. Unblocked by: the end of the run, of the lease, or `leave`.

    Args:
        join: the run.
        name: of the node.
        cores: that its hosts may use.
        before: the incarnation that this one follows; "": none.
        roles: that it offers.
    """

    def __init__(
        self,
        *,
        join: JoinFile,
        name: str,
        cores: int,
        before: str,
        roles: Sequence[str] = NODE_ROLES,
    ) -> None:
        self._join, self._name, self._cores, self._before = join, name, cores, before
        self._roles = roles
        self._forker = HostForker(run_id=join.run, preload=PRELOAD)
        self._stack = contextlib.AsyncExitStack()
        self.incarnation = new_incarnation()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done with how it ended: "ended" (the run), "lost" or "left". RefusedNodeError: the run
        does not accept it.
        """
        self._context: Context = new_context()
        self._connection: TcpConnection | None = None
        self._stream: ReliableStream[tuple[bytes, list[Any], list[Any]]] = ReliableStream()
        self._first: list[bytes] | None = []
        """Messages that came until the first one was decoded; None afterwards."""
        self._turn = _Turn()
        self._turn_ends = self._held_back = False
        self._heard = time.monotonic()
        self._lease_s = JOIN_S
        self.admitted = False
        """True once the run has accepted this node."""
        self.last_error = "it does not answer"
        """Why there is no connection."""
        self._outage = self._welcomed = False
        self._echo = 0.0
        self._slots: SharedTransport | None = None
        self._weights: SharedWeights | None = None
        self._version = NO_VERSION
        self._held: deque[tuple[Version, object]] = deque()
        """Messages that wait for weights."""
        self._servers: Sequence[Doorbell] = ()
        """Doorbells that hosts here ring to ask inference servers."""
        self._requests: SlotRequests
        self._asked: dict[int, int] = {}
        """The last request of each slot that was sent."""
        self._hosts: dict[int, _Host] = {}
        self._ready = False
        """True once it takes hosts."""
        self._ordered: set[int] = set()
        """Numbers of the hosts that were ordered."""
        self._open_slots: dict[int, int] = {}
        """Ticket by slot, of grants to hosts here."""
        self._contents: SlotContents | None = None
        self._granted: dict[int, str] = {}
        """By slot, the place where the trajectory of its last grant here is to lie."""
        self._listener: DirectListener | None = None
        self._sender = DirectSender(context=self._context, keys=join.keys, place=self.incarnation)
        self._traffic = DirectTraffic(0, 0, 0, {})
        """As it was reported."""
        self._progress: dict[int, tuple[int, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._handlers = Handlers(
            {
                OpenNode: self._open,
                SetSlots: self._set_slots,
                SetPlaces: self._set_places,
                RequestCut: self._request_cut,
                ForkHost: self._order_host,
                KillHost: self._kill_host,
                ToHost: self._to_host,
                CloseNode: lambda _: self._end("left"),
            }
        )

    async def run(self) -> str:
        """Until it ends; see `ended`."""
        self._connect()
        self._start(self._watch())
        try:
            return await self.ended
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._stack.aclose()
            self._sender.close()
            if self._listener is not None:
                self._listener.close()
            if self._connection is not None:
                self._connection.close(farewell=True)
            for host in list(self._hosts.values()):
                host.kill()
                if host.link is not None:
                    host.link.close()
            for bell in self._servers:
                asyncio.get_running_loop().remove_reader(bell.fd)
            if self._weights is not None:
                self._weights.memory.close()
            if self._slots is not None:
                self._slots.close()
            self._context.destroy(linger=200)

    def leave(self) -> None:
        """Ask the run to take the work of this node back; `ended` follows."""
        if self.admitted:
            self._post(NodeLeaves())
        else:
            self._end("left")

    def _end(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    # Connection
    # ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self.ended.done():
            return
        self._connection = TcpConnection(
            self._context, self._join.address, keys=self._join.keys, dead_after_s=DEAD_S
        )
        self._connection.serve(self._receive, self._lost)
        self._welcomed = False
        self._send(
            "hello",
            0,
            {
                "protocol": PROTOCOL,
                "run": self._join.run,
                "tianflow": __version__,
                "python": python_version(),
                "name": self._name,
                "incarnation": self.incarnation,
                "before": self._before,
                "received": self._stream.received,
                "cores": self._cores,
                "roles": list(self._roles),
            },
        )

    def _lost(self, error: TianflowError) -> None:
        self._stream.disconnected()
        self.last_error = str(error)
        if isinstance(error, RefusedConnectionError) and not error.again and not self.admitted:
            self._fail(RefusedNodeError(str(error)))
            return
        if self.admitted and not self._outage:
            self._outage = True
            log.warning("the connection to the head is lost", why=str(error))
        self._connection = None
        asyncio.get_running_loop().call_later(RECONNECT_S, self._connect)

    async def _watch(self) -> None:
        """Signs of life, and the end of the lease by this machine's clock."""
        while True:
            await asyncio.sleep(BEAT_S)
            if time.monotonic() - self._heard > self._lease_s:
                self._end("lost")
                return
            self._send("beat", 0, [self._stream.received, self._new_progress(), self._echo])
            self._echo = 0.0
            self._report_traffic()

    def _report_traffic(self) -> None:
        """Report the links to other nodes, if they have carried anything."""
        sent, listener = self._sender.sent, self._listener
        traffic = DirectTraffic(sent, 0, 0, {})
        if listener is not None:
            found = listener.statistics()
            traffic = DirectTraffic(sent, listener.received, found.accepted, found.refused)
        if traffic != self._traffic:
            self._traffic = traffic
            self._post(traffic)

    def _new_progress(self) -> list[tuple[int, int, int]]:
        """(slot, ticket, steps) of the environments that have moved."""
        if self._slots is None:
            return []
        found = []
        for slot, ticket in self._open_slots.items():
            steps = self._slots.arena.progress(slot, ticket)
            if self._progress.get(slot) != (ticket, steps):
                self._progress[slot] = ticket, steps
                found.append((slot, ticket, steps))
        return found

    def _send(self, kind: str, number: int, body: object) -> None:
        """Send on this connection. Until the welcome the gateway accepts a greeting only. Other
        messages are due again then.
        """
        if self._connection is not None and (self._welcomed or kind == "hello"):
            # a connection that takes nothing more is over; its error follows
            with contextlib.suppress(BrokenChannelError):
                self._connection.send(encode(kind, number, body))

    def _receive(self, message: Message) -> None:
        self._heard = time.monotonic()
        with self._refusing(message.kind):
            self._obey(message)

    @contextlib.contextmanager
    def _refusing(self, kind: str) -> Iterator[None]:
        """A message of this kind that the head may not send ends the membership, not the node."""
        try:
            yield
        except REFUSED as error:
            self.last_error = f"a message of the head is refused: {type(error).__name__}: {error}"
            log.warning("a message of the head is refused", kind=kind[:40], why=repr(error))
            self._end("lost")  # messages may be missing now; the next membership has all
        except Exception as error:  # noqa: BLE001 - a boundary: the node could not go on
            self._fail(error)

    def _obey(self, message: Message) -> None:
        match message.kind, message.body:
            case "welcome", [str(), int(received), bool(), float(lease_s)] if (
                0 < lease_s < math.inf
            ):
                self._welcome(received, lease_s)
            case "refused", [str(), bool()] if self.admitted:
                self._end("lost")
            case "refused", [str(reason), bool(again)]:
                self._fail(RefusedNodeError(reason, again=again))
            case "down", [int(received), np.ndarray() as body, list(trajectories), list(columns)]:
                self._acknowledge(received)
                if message.number and self._stream.accept(message.number):
                    self._inside_first(trajectories, columns)
                    self._take(body.tobytes())
                self._pump()
            case "weights", [int(lineage), int(number), int(size), sent]:
                self._store_weights(Version(lineage, number), _flat(size, sent))
            case "answers", list(answers):
                self._answer(answers)
            case "beat", [float(echo)]:
                self._echo = echo
            case ("lost" | "ended") as how, _:
                self._end(how)
            case kind, _:
                raise MalformedMessageError(f"the gateway sent {kind!r:.40}")

    def _inside_first(self, trajectories: Sequence[Any], columns: Sequence[Any]) -> None:
        """Write the data of slots, before the message that is about them is handled."""
        for trajectory in trajectories:
            self._inside.write(*trajectory)
        for priorities in columns:
            self._inside.write_priorities(*priorities)

    def _take(self, body: bytes) -> None:
        """Handle the messages in ``body``. The first one has the settings of the run: to decode it
        may import modules of a user, for longer than the lease. A thread does that.
        """
        if self._first is None:
            for inner in unpack(body):
                self._handlers[type(inner)](inner)
            return
        self._first.append(body)
        if len(self._first) == 1:
            self._start(self._take_first(self._first))

    async def _take_first(self, bodies: Sequence[bytes]) -> None:
        with self._refusing("down"):
            first = await asyncio.to_thread(unpack, bodies[0])
            self._first = None
            for inner in first:
                self._handlers[type(inner)](inner)
            for body in bodies[1:]:
                self._take(body)

    def _welcome(self, received: int, lease_s: float) -> None:
        if self._outage:
            log.info("connected to the head again", node=self._name)
        self._lease_s, self.admitted, self._outage = lease_s, True, False
        self._welcomed = True
        self._stream.connected(received)
        self._pump()
        self._say_stored()
        self._asked.clear()  # an answer may have been lost with the connection
        for bell in self._servers:
            bell.ring()

    # Messages
    # ----------------------------------------------------------------------------------------------

    def _post(
        self, message: object, trajectories: Sequence[Any] = (), columns: Sequence[Any] = ()
    ) -> None:
        """Send with the others of this turn. Many or large data of slots end the turn."""
        size = sum(nbytes(arrays) for *_, arrays in (*trajectories, *columns))
        if self._turn.nbytes and self._turn.nbytes + size > TURN_BYTES:
            self._push()
        turn = self._turn
        turn.messages.append(message)
        turn.trajectories += trajectories
        turn.columns += columns
        turn.nbytes += size
        slots = len(turn.trajectories) + len(turn.columns)
        if turn.nbytes > TURN_BYTES or slots >= TURN_SLOTS:
            self._push()
        elif not self._turn_ends:
            self._turn_ends = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_ends = False
        if self._turn.messages:
            self._push()

    def _push(self) -> None:
        """Send what was posted in this turn now."""
        turn, self._turn = self._turn, _Turn()
        self._stream.post((pack(turn.messages), turn.trajectories, turn.columns))
        self._pump()
        if len(self._stream) >= MOST_WAITING and not self._held_back:
            self._held_back = True
            for host in self._hosts.values():
                host.read(False)

    def _acknowledge(self, received: int) -> None:
        self._stream.acknowledge(received)
        if self._held_back and len(self._stream) < MOST_WAITING // 2:
            self._held_back = False
            for host in self._hosts.values():
                host.read(True)

    def _pump(self) -> None:
        for number, (body, trajectories, columns) in self._stream.due():
            data = np.frombuffer(body, np.uint8)
            sent = [self._stream.received, data, trajectories, columns]
            self._send("up", number, sent)

    # Run
    # ----------------------------------------------------------------------------------------------

    @property
    def _memory(self) -> SharedTransport:
        """Slots and weights. MalformedMessageError before the run has said what they look like."""
        if self._slots is None:
            raise MalformedMessageError("the run is not open here")
        return self._slots

    @property
    def _inside(self) -> SlotContents:
        """Contents of the slots. MalformedMessageError likewise."""
        if self._contents is None:
            raise MalformedMessageError("the run is not open here")
        return self._contents

    def _open(self, message: OpenNode) -> None:
        layout, config = message.layout, message.settings.live.config
        if self._slots is not None or not 0 <= message.servers <= message.bells <= MOST_PLACES:
            raise MalformedMessageError("the run is open already, or has too many doorbells")
        if not 0 < layout.steps <= layout.nbytes:
            raise MalformedMessageError(f"{layout.steps} steps have {layout.nbytes} bytes")
        try:
            self._slots = SharedTransport(
                layout=layout,
                capacity=message.capacity,
                draws=message.draws,
                draw_slots=message.draw_slots,
                bells=message.bells,
            )
            self._add_slots(message.slots)
            self._contents = SlotContents(
                self._slots.arena, self._slots.draws, config.cluster.encoding
            )
        except TianflowError as error:
            self._unable(str(error))
            return
        self._say_stored()
        self._servers = self._slots.bells[: message.servers]
        self._requests = SlotRequests(self._slots.arena, index=0, servers=1)
        for bell in self._servers:
            asyncio.get_running_loop().add_reader(bell.fd, self._ask, bell)
        self._start(self._prepare(message))

    async def _prepare_replay(self, directory: str) -> None:
        """Prepare for replay shards, which write into ``directory`` unless it is "". TianflowError
        if they could not work here.
        """
        if directory and not await asyncio.to_thread(sees_run, Path(directory), self._join):
            raise TianflowError(
                f"checkpoint.replay = true: shards here could not write into {directory}, the "
                "directory of the run. Accepted: a directory of runs that all machines see, "
                'checkpoint.replay = false, cluster.replay = "head", or --roles actors here'
            )
        self._listener = DirectListener(
            host=await asyncio.to_thread(own_host, self._join.address),
            keys=self._join.keys,
            place=self.incarnation,
            store=self._inside.store,
        )

    def _ask(self, bell: Doorbell) -> None:
        """Send the requests of hosts here to the inference servers of the head."""
        bell.clear()
        assert self._slots is not None
        arena, found = self._slots.arena, list[Any]()
        for slot, request in self._requests.open():
            if self._asked.get(slot) != request:
                self._asked[slot] = request
                found.append([slot, request, input_rows(arena, slot, row_of(request))])
        if found:
            self._send("ask", 0, found)

    def _answer(self, answers: Sequence[Any]) -> None:
        """Hand the answers of inference servers to the hosts that wait for them."""
        slots, places = self._memory, set()
        for slot, request, lineage, number, fields in answers:
            self._inside.require(slot, request)
            views, place = slots.arena.request_views(slot), place_of(request)
            if set(fields) != set(answer_fields(views)) or place >= len(slots.bells):
                raise MalformedMessageError("an answer has other fields than the run")
            for name in fields:
                joined(views[name], fields[name])
            self._requests.answer(slot, request, Version(lineage, number))
            places.add(place)
        for place in places:
            slots.bells[place].ring()

    def _add_slots(self, more: int) -> None:
        """Allocate ``more`` slots. TianflowError if this machine is too small: the system would
        permit them, and end a process later.
        """
        slots, room = self._memory, usable_memory()
        wanted = (slots.arena.slots + more) * slots.arena.layout.nbytes
        if wanted > room:
            raise TianflowError(
                f"the slots of the run need {wanted} bytes, and this machine has {room}: lower "
                "balance.memory_limit"
            )
        slots.add_slots(more)

    def _unable(self, reason: str) -> None:
        self._post(NodeUnable(reason))
        self._end_turn()
        self._fail(RefusedNodeError(reason))

    async def _prepare(self, message: OpenNode) -> None:
        """Make the environment once, in a process of its own: a host that cannot make it would end
        the run. Prepare for replay shards, if there may be some. Then take hosts.
        """
        config, lines = message.settings.live.config, list[str]()
        try:
            answer = await _probed(config)
        except (ConfigError, RunError) as error:
            lines = [str(error)]
        else:
            lines = [
                f"{problem.path} = {problem.value}: {problem.message}"
                for problem in answer.problems
            ]
            if not lines and answer.spec != message.spec:
                lines = [f"env.id = {config.env.id}: has other spaces here than at the head"]
        try:
            if not lines and message.draws is not None:
                await self._prepare_replay(message.directory)
        except TianflowError as error:
            lines = [str(error)]
        if lines:
            self._unable("; ".join(lines))
            return
        await self._stack.enter_async_context(self._forker)
        self._ready = True
        listener = self._listener
        self._post(NodeReady() if listener is None else NodeReady(listener.address, listener.key))

    def _set_slots(self, message: SetSlots) -> None:
        more = message.slots - self._memory.arena.slots
        if more < 0:
            raise MalformedMessageError("slots do not become fewer")
        self._add_slots(more)

    def _set_places(self, message: SetPlaces) -> None:
        if ACTORS in self._roles:
            self._sender.connect(message.places)

    def _request_cut(self, message: RequestCut) -> None:
        self._inside.require(message.slot, message.ticket)
        self._memory.arena.request_cut(message.slot, message.ticket)

    def _store_weights(self, version: Version, flat: Any) -> None:
        if self._weights is None:
            memory = SharedMemory.attach(
                os.dup(self._memory.weights), SharedWeights.nbytes_for(flat.nbytes)
            )
            self._weights = SharedWeights(memory=memory, nbytes=flat.nbytes)
        self._weights.publish(version, flat)
        self._version = max(self._version, version)
        self._say_stored()
        while self._held and self._held[0][0] <= self._version:
            self._release(self._held.popleft()[1])

    def _say_stored(self) -> None:
        """Say which weights are here: the gateway sends newer ones then. Only actors need them."""
        if self._slots is not None and ACTORS in self._roles:
            self._send("stored", 0, list(self._version))

    def _hold(self, version: Version, message: object) -> None:
        """Handle ``message`` once weights of ``version`` are here, in order."""
        if version <= self._version and not self._held:
            self._release(message)
        else:
            self._held.append((version, message))

    def _release(self, message: object) -> None:
        if isinstance(message, ForkHost):
            self._start(self._fork(message))
        elif isinstance(message, ToHost):
            self._deliver(message)

    # Hosts
    # ----------------------------------------------------------------------------------------------

    def _to_host(self, message: ToHost) -> None:
        name, fields = message.message
        if name == Granted.__name__:
            ticket, slot, version, *_, place = fields[2]
            self._inside.require(slot, ticket)
            self._inside.granted(slot, ticket)
            self._open_slots[slot] = ticket
            self._granted[slot] = place
            self._hold(Version(*version), message)
            return
        if name == DrawPart.__name__ and message.number in self._hosts:
            draw, slot, first, items = fields[:4]
            self._inside.require_draw(slot)
            self._hosts[message.number].drawing[draw] = slot, first, items
        self._deliver(message)

    def _deliver(self, message: ToHost) -> None:
        host = self._hosts.get(message.number)
        if host is not None and host.link is not None:
            host.link.send(message.message)

    def _order_host(self, message: ForkHost) -> None:
        if not self._ready or message.number in self._ordered:
            raise MalformedMessageError("a host is ordered twice, or before the node takes hosts")
        self._ordered.add(message.number)
        self._hold(message.version, message)

    async def _fork(self, message: ForkHost) -> None:
        host = self._hosts[message.number] = _Host(message.number)
        connection = self._memory.connect(RelayLink)
        try:
            link = connection.open_link(
                handle=lambda values: self._from_host(host, values),
                closed=lambda: None,
                failed=self._fail,
            )
            assert isinstance(link, RelayLink)
            host.link = link
            link.read(not self._held_back)
            # Names repeat while an earlier process of the host still ends.
            name = f"{message.name}-{message.number}"
            host.process = await self._forker.spawn(
                name, TARGET, message.payload, connection.descriptors
            )
        except (RunError, ValueError) as error:
            del self._hosts[message.number]
            self._post(HostRefused(message.number, str(error)))
            return
        finally:
            connection.close()
        self._post(HostForked(message.number, host.process.pid))
        if host.killed:
            host.process.kill()
        self._start(self._wait_for(host, host.process, link))

    async def _wait_for(self, host: _Host, process: ForkedHost, link: MessageLink) -> None:
        status = await process.wait()
        await asyncio.sleep(0)
        link.drain()  # what it sent before it died still counts
        link.close()
        del self._hosts[host.number]
        self._relay(host, _Waiting(HostGone(host.number, status)))

    def _kill_host(self, message: KillHost) -> None:
        host = self._hosts.get(message.number)
        if host is not None:
            host.kill()
            return
        for item in self._held:
            if isinstance(item[1], ForkHost) and item[1].number == message.number:
                self._held.remove(item)
                self._post(HostGone(message.number, -9))
                return

    def _from_host(self, host: _Host, values: Any) -> None:
        name, fields = values
        if name == Commit.__name__:
            self._commit(host, fields)
            return
        found: Sequence[Any] = ()
        if name == Abort.__name__:
            self._open_slots.pop(fields[1], None)
        elif name == Drawn.__name__:
            slot, first, items = host.drawing.pop(fields[0])
            if fields[1]:
                found = [[slot, first, items, self._inside.drawn(slot, first, items)]]
        self._relay(host, _Waiting(FromHost(host.number, values), columns=found))

    def _commit(self, host: _Host, fields: Sequence[Any]) -> None:
        """Relay the message that commits a trajectory. Its data leave for the head with it; or for
        the place of its grant, before it. If that cannot be reached, they go to the head.
        """
        holder, trajectory, episodes, _ = fields
        ticket, slot, length = trajectory[:3]
        self._open_slots.pop(slot, None)
        place = self._granted.get(slot, "")

        def message(place: str) -> FromHost:
            return FromHost(host.number, [Commit.__name__, [holder, trajectory, episodes, place]])

        if place == self.incarnation and self._listener is not None:
            self._relay(host, _Waiting(message(place)))
            return
        # The slot gets its next grant only once the data have arrived.
        arrays = self._inside.trajectory(slot, length)
        waiting = _Waiting(message(""), [(slot, length, arrays)])
        if not self._sender.reaches(place):
            self._relay(host, waiting)
            return

        def arrived(lies_there: bool) -> None:
            if lies_there:
                waiting.message, waiting.trajectories = message(place), ()
            waiting.ready = True
            self._relay_ready(host)

        waiting.ready = False
        host.waiting.append(waiting)
        self._sender.send(place, (ticket, slot, length), arrays, arrived)

    def _relay(self, host: _Host, message: _Waiting) -> None:
        """Send a message of a host to the head, after its messages before."""
        if host.waiting:
            host.waiting.append(message)
        else:
            self._post(message.message, message.trajectories, message.columns)

    def _relay_ready(self, host: _Host) -> None:
        while host.waiting and host.waiting[0].ready:
            found = host.waiting.popleft()
            self._post(found.message, found.trajectories, found.columns)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, Exception) else RunError("node", repr(error)))


class NodeProcess:
    """What ``tianflow node`` runs: one membership after the other.

    Args:
        join_file: of the run. It is read again before each join, because a resumed run has another
            address and other keys.
        name: of the node.
        cores: that hosts may use.
        once: end with the run, instead of waiting for the next join file.
        roles: that it offers.
    """

    def __init__(
        self,
        *,
        join_file: Path,
        name: str,
        cores: int,
        once: bool,
        roles: Sequence[str] = NODE_ROLES,
    ) -> None:
        self._path, self._name, self._cores, self._once = join_file, name, cores, once
        self._roles = roles
        self._membership: Membership | None = None
        self._leaving = asyncio.Event()
        self._last = False
        """True if it joins no run after this one."""

    def leave(self) -> None:
        """End: hosts hand over what they have. A second call ends them at once."""
        if self._leaving.is_set() and self._membership is not None:
            self._membership._end("left")  # noqa: SLF001 - the two are one thing
        self._leaving.set()
        if self._membership is not None:
            self._membership.leave()

    def end_with_run(self) -> None:
        """End once the run has ended, or has lost this node; at once without a run. A run that is
        being stopped needs its nodes until it has saved what their replay shards hold.
        """
        self._last = True
        if self._membership is None or not self._membership.admitted:
            self.leave()

    async def run(self) -> None:
        """Until it is asked to leave, or, with ``once``, until the run ends.

        Raises:
            ConfigError: the join file is not valid.
            RefusedNodeError: the run does not accept this node.
        """
        before, waiting = "", False
        member_at = time.monotonic()
        while not self._leaving.is_set():
            try:
                join = JoinFile.read(self._path)
            except FileNotFoundError:
                if self._once and before and time.monotonic() - member_at > PATIENCE_S:
                    return
                if not waiting:
                    log.info("waiting for a run", join_file=str(self._path))
                waiting = True
                await self._pause()
                continue
            waiting = False
            try:
                how, before, admitted, error = await self._join(join, before)
            except RefusedNodeError as refusal:
                if not refusal.again:
                    raise
                log.warning("the run does not accept this node yet", why=str(refusal))
                await self._pause()
                continue
            gc.collect()  # slots and weights of that membership, which lie in cycles
            if admitted:
                log.info("no longer a node", run=join.run, how=how)
            elif how == "lost":
                log.warning("the head cannot be reached", address=join.address, why=error)
            if admitted:
                member_at = time.monotonic()
            if self._last or how == "left" or (self._once and how == "ended"):
                return
            if self._once and time.monotonic() - member_at > PATIENCE_S:
                return
            await self._pause()

    async def _join(self, join: JoinFile, before: str) -> tuple[str, str, bool, str]:
        """How a membership ended, its incarnation, whether it was admitted, and its last error."""
        member = Membership(
            join=join, name=self._name, cores=self._cores, before=before, roles=self._roles
        )
        self._membership = member
        try:
            how = await member.run()
            return how, member.incarnation, member.admitted, member.last_error
        finally:
            self._membership = None

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), REJOIN_S)


def _flat(size: int, sent: Any) -> NDArray[np.uint8]:
    """The ``size`` bytes of weights that were sent in parts."""
    if size != nbytes(sent):
        raise MalformedMessageError(f"weights of {size} bytes have {nbytes(sent)}")
    flat = np.empty(size, np.uint8)
    joined(flat, sent)
    return flat


def sees_run(directory: Path, join: JoinFile) -> bool:
    """True if ``directory``, that of the run, is the same on this machine as on the head."""
    try:
        found = JoinFile.read(directory / NAME)
    except (ConfigError, OSError):
        return False
    keys = [None if file.keys is None else file.keys.texts for file in (found, join)]
    return found.run == join.run and keys[0] == keys[1]


def own_host(address: str) -> str:
    """The address of this machine on its route to ``address``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # no packet leaves: the system only picks a route
        except OSError as error:
            raise TianflowError(f"there is no route to {address}: {error}") from error
        found = str(probe.getsockname()[0])
    return f"[{found}]" if kind is socket.AF_INET6 else found


def default_name() -> str:
    """Name of a node that was given none: that of the machine."""
    return socket.gethostname()
