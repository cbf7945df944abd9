"""The launcher ``nodes``: actors on other machines, also replay shards if the settings say so, and
the rest on this one, the head.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack

from tianflow.channels.keys import Keys, is_loopback, require_keys
from tianflow.channels.messages import (
    MESSAGES,
    GatewayFailed,
    GatewayListens,
    StartGateway,
)
from tianflow.channels.shm import SharedTransport
from tianflow.core.program import LauncherCapabilities
from tianflow.errors import RunError
from tianflow.launchers.host_forker import ForkedHost, HostForker
from tianflow.launchers.hub import NodeHub
from tianflow.launchers.processes import PRELOAD, TARGET
from tianflow.launchers.remote import RemoteHost, shared_slots
from tianflow.logs import logger
from tianflow.planning.placement import bells_on_head
from tianflow.rundir.join_file import NAME, JoinFile

if TYPE_CHECKING:
    from tianflow.config.model import ClusterSettings, Config
    from tianflow.core.payloads import Activity, TrajectoryLayout
    from tianflow.core.program import HostPlan, HostSpec
    from tianflow.interfaces import HostHandle, MessageLink, RunView
    from tianflow.launchers.hub import NodeHostProcess

GATEWAY = "tianflow.hosts.gateway:main"
SIOCGIFADDR = 0x8915
ON_HEAD = ("learner", "rank", "inference", "evaluator")
END_S = 1.0
"""Seconds for nodes to hear that the run has ended."""
log = logger("nodes")


class NodeLauncher:
    """`tianflow.interfaces.Launcher`: hosts of actors run on nodes, processes of ``tianflow node``
    that join the run, and so do replay shards where the settings say so. The other hosts are forked
    here.

    A subclass starts the nodes too (`provide`).
    """

    capabilities = LauncherCapabilities(nodes=True)

    def prepare(self) -> None:
        """Do nothing: hosts import what they need."""

    def slots(
        self, *, config: Config, layout: TrajectoryLayout, draws: TrajectoryLayout | None
    ) -> SharedTransport:
        """Shared memory of the head. Nodes have slots of the same numbers."""
        return shared_slots(config=config, layout=layout, draws=draws, bells=bells_on_head(config))

    async def provide(self, join_file: Path, run: RunView) -> None:
        """Provide nodes until cancelled. Here an operator starts them; an error ends the run.

        Args:
            join_file: for ``tianflow node``.
            run: the run.
        """

    async def launch(self, run: RunView, slots: SharedTransport) -> None:
        """Run until the end. No process, socket or memory of a host is left on this machine; nodes
        end their hosts themselves.
        """
        config = run.settings.value.config
        async with HostForker(run_id=run.id, preload=PRELOAD) as forker:
            hub = NodeHub(
                run=run, slots=slots, expect=config.cluster.expect, lease_s=config.cluster.lease_s
            )
            run.inbox.register_nodes(hub)
            gateway = GatewayKeeper(run=run, slots=slots, forker=forker, hub=hub)
            tasks = [
                asyncio.create_task(_or_fail(run, name, work))
                for name, work in (
                    ("gateway", gateway.run),
                    ("nodes", hub.watch),
                    ("launcher", partial(self._provide, gateway, run)),
                )
            ]
            try:
                await run.run(_starter(run, slots, forker, hub))
                hub.close()
                await gateway.flush()
            finally:
                hub.detach()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _provide(self, gateway: GatewayKeeper, run: RunView) -> None:
        await gateway.listens.wait()
        await self.provide(gateway.join_file, run)


async def _or_fail(run: RunView, name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Await ``work``. An error of it ends the run."""
    try:
        await work()
    except RunError as error:
        run.inbox.fail(error)
    except Exception as error:  # noqa: BLE001 - a boundary: the run would wait for nodes for ever
        run.inbox.fail(RunError(name, f"ended: {error!r}"))


def _starter(
    run: RunView, slots: SharedTransport, forker: HostForker, hub: NodeHub
) -> Callable[[HostSpec, int], Awaitable[HostHandle]]:
    learner_started = asyncio.Event()

    async def fork(name: str, payload: bytes, descriptors: Sequence[int]) -> ForkedHost:
        return await forker.spawn(name, TARGET, payload, descriptors)

    async def start(host: HostSpec, incarnation: int) -> HostHandle:
        role = host.components[0].role if host.components else "actor"
        if role not in ("learner", "rank", "replay"):
            await learner_started.wait()  # only the learner knows how large the weights are
        while True:
            seat = None
            if role not in ON_HEAD:
                place = hub.place_shard if role == "replay" else hub.place
                seat = await place(host.name)
            if seat is None:
                plan = await run.plan_host(host, incarnation)
                remote = RemoteHost(run=run, plan=plan, learner_started=learner_started)
                await remote.start(slots, fork)
                return remote
            try:
                # cores are numbers of this machine
                plan = await run.plan_host(replace(host, cores=()), incarnation)
                if not seat.has_draws:
                    plan = replace(plan, draws=None)
                placed = NodeHost(
                    run=run, plan=plan, learner_started=learner_started, process=seat.process
                )
                await placed.start(seat, seat.start)
            except BaseException as error:
                seat.release()
                if isinstance(error, RunError) and seat.process.cause:
                    continue  # its node is gone, and another one takes the host
                raise
            placed.follow_node()
            return placed

    return start


class NodeHost(RemoteHost):
    """A host on a node. While the connection to the node is lost, the lease decides about it."""

    def __init__(
        self,
        *,
        run: RunView,
        plan: HostPlan,
        learner_started: asyncio.Event,
        process: NodeHostProcess,
    ) -> None:
        super().__init__(run=run, plan=plan, learner_started=learner_started)
        self._placed = process

    def _message_failed(self, error: Exception) -> None:
        """A message that breaks a rule costs the node: the run has others, and it may come back."""
        details = "".join(traceback.format_exception(error))
        log.error("a message of a host on a node is refused", host=self._host.name, why=details)
        self._placed.break_off(self._host.name, error)

    def follow_node(self) -> None:
        """Leave when the node leaves."""
        self._placed.leave = self.ask_to_stop
        if self._placed.cause:  # it was asked to end meanwhile
            self.ask_to_stop()

    @property
    def node(self) -> str:
        """Name of its node."""
        return self._placed.node

    @property
    def place(self) -> str:
        """The place of its node."""
        return self._placed.place

    @property
    def cause(self) -> str:
        """Why it ended, or is about to, if its node is the reason."""
        return self._placed.cause

    @property
    def silent_for(self) -> float:
        """Seconds since its last message; 0 while its node cannot be heard, and before it works:
        its node may still fetch the weights that it starts with.
        """
        return super().silent_for if self.started and self._placed.reachable else 0.0

    @property
    def activities(self) -> Sequence[Activity]:
        """As of the last heartbeat; none while its node cannot be heard."""
        return self._activities if self._placed.reachable else ()


class GatewayKeeper:
    """Runs the gateway of a run, and restarts it when it dies. Nodes lose nothing by that.

    Consumes: exits of the gateway. Produces: the join file. Waits: for its process. Unblocked by:
    its exit.

    Args:
        run: that it belongs to.
        slots: memory that the gateway maps.
        forker: starts it.
        hub: gets its messages.
    """

    def __init__(
        self, *, run: RunView, slots: SharedTransport, forker: HostForker, hub: NodeHub
    ) -> None:
        self._run, self._slots, self._forker, self._hub = run, slots, forker, hub
        self._settings: ClusterSettings = run.settings.value.config.cluster
        self._keys = Keys.generate() if self._settings.curve else None
        self._link: MessageLink | None = None
        self._address = self._settings.listen
        self._deaths: deque[float] = deque()
        self._refusal = ""
        self.listens = asyncio.Event()
        """Set once it listens, and the join file is written."""
        self.join_file = run.directory / NAME

    async def run(self) -> None:
        """Until cancelled. RunError when it cannot listen, or dies again and again."""
        require_keys(
            self._address, self._keys, insecure=not self._settings.curve, path="cluster.listen"
        )
        limits = self._run.settings.value.config.run
        loop = asyncio.get_running_loop()
        try:
            while True:
                status = await self._run_once()
                if self._refusal:
                    raise RunError("gateway", self._refusal)
                log.warning("the gateway is gone", status=status)
                self._deaths.append(loop.time())
                while self._deaths[0] < loop.time() - limits.restart_window_s:
                    self._deaths.popleft()
                if len(self._deaths) > limits.max_restarts:
                    raise RunError("gateway", f"ended {len(self._deaths)} times, last by {status}")
        finally:
            self.join_file.unlink(missing_ok=True)

    async def _run_once(self) -> int:
        connection = self._slots.connect()
        try:
            self._link = link = connection.open_link(
                handle=self._handle, closed=lambda: None, failed=self._failed
            )
            draws = self._slots.draws
            start = StartGateway(
                self._address,
                {} if self._keys is None else self._keys.texts,
                self._slots.arena.layout,
                None if draws is None else draws.layout,
                self._settings.encoding,
            )
            payload = msgpack.packb(MESSAGES.encode(start))
            process = await self._forker.spawn("gateway", GATEWAY, payload, connection.descriptors)
        finally:
            connection.close()
        try:
            status = await process.wait()
            link.drain()
            return status
        finally:
            self._hub.shut()
            link.close()
            process.kill()

    def _handle(self, message: object) -> None:
        match message:
            case GatewayListens(address):
                self._listening(address)
            case GatewayFailed(reason):
                self._refusal = reason
                assert self._link is not None
                self._link.close()  # the gateway ends with it
            case _:
                self._hub.handle(message)

    def _listening(self, address: str) -> None:
        assert self._link is not None
        self._address = address  # nodes find a later gateway at the same port
        if not self.listens.is_set():
            host, port = self._settings.address, address.rpartition(":")[2]
            shown = f"tcp://{host or advertised(address)}:{port}"
            JoinFile(self._run.id, shown, self._keys).write(self.join_file)
            log.info("waiting for nodes", join_file=str(self.join_file), address=shown)
            self.listens.set()
        self._hub.open(self._link)

    def _failed(self, error: Exception) -> None:
        self._run.inbox.fail(RunError("gateway", f"a message was refused: {error!r}"))

    async def flush(self) -> None:
        """Wait until the gateway has what was sent to it, and nodes could have heard it."""
        if self._link is not None:
            try:
                await asyncio.wait_for(self._link.flush(), END_S)
            except TimeoutError:
                return
            await asyncio.sleep(END_S / 4)


def advertised(address: str) -> str:
    """The host by which other machines reach ``address``, which may stand for every address of this
    one.
    """
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if is_loopback(address) or host not in ("*", "0.0.0.0", "[::]"):  # noqa: S104 - compared only
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # no packet leaves: the system only picks a route
            return str(probe.getsockname()[0])
        except OSError:  # a network without a route to others
            return next(_addresses(probe), socket.gethostname())


def _addresses(end: socket.socket) -> Iterator[str]:
    """IPv4 addresses of this machine's interfaces, without loopback."""
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode())
        try:
            answer = fcntl.ioctl(end.fileno(), SIOCGIFADDR, request)
        except OSError:  # the interface has none
            continue
        address = socket.inet_ntoa(answer[20:24])
        if not address.startswith("127."):
            yield address
