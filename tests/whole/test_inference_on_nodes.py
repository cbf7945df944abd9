"""Servers on the head choose the actions of actors on a node as local inference does: actions,
rewards, starts, versions and recorded fields are the same, for every kind of request.

Node, gateway, CURVE and the connection between them are the real ones, on one loop. Only processes
are missing: rollouts step into the slots of the node, and servers answer in those of the head.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch

from tests.components.test_central_inference import (
    COMPARED,
    KINDS,
    STEPS,
    Arrays,
    Stage,
    assert_same,
    config_of,
    copies,
    played_locally,
)
from tests.support.effort import EVERY
from tianflow.channels.doorbell import Doorbell
from tianflow.channels.keys import Keys
from tianflow.channels.link import Link, socket_pair
from tianflow.channels.messages import (
    MESSAGES,
    AdmitNode,
    Commit,
    GatewayListens,
    NodeArrived,
    NodeSent,
    PutSettings,
    SendToNode,
    StartGateway,
)
from tianflow.channels.node_messages import FromHost, NodeReady, OpenNode, pack, unpack
from tianflow.channels.shm import SharedTransport
from tianflow.components.rollout import RolloutResult
from tianflow.components.turns import Turns, Wait
from tianflow.config.model import Config
from tianflow.core.payloads import EnvironmentSpec, Grant, Trajectory
from tianflow.envs import probe
from tianflow.hosts.gateway import Gateway
from tianflow.interfaces import LiveSettings
from tianflow.launchers import node as nodes
from tianflow.launchers.node import Membership
from tianflow.planning.layouts import trajectory_layout
from tianflow.rundir.join_file import JoinFile

PATIENCE_S = 20.0 + COMPARED / 10.0
REQUESTS = ["mlp", "lstm", "masks", "cnn"] if EVERY > 1 else list(KINDS)
"""Policies whose requests carry other fields: noise alone, a state, a mask, images."""


class Cluster:
    """A head whose coordinator knows one node, and the node, with slots of the same numbers."""

    def __init__(self, config: Config, spec: EnvironmentSpec, *, actors: int, servers: int) -> None:
        layout = trajectory_layout(config, spec)
        self.place = servers
        """Of the host of the actors among the doorbells of the node."""
        self.head = SharedTransport(layout=layout, capacity=actors, bells=servers + 1)
        self.head.add_slots(actors)
        settings = PutSettings.of(LiveSettings(config, 1, paused=False, hold_learner=False), 0)
        self._open = OpenNode(
            "r", settings, spec, layout, actors, actors, bells=servers + 1, servers=servers
        )
        ours, theirs = socket_pair()
        self._link = Link(end=ours, handle=self._handle, closed=lambda: None)
        self._keys = Keys.generate()
        start = StartGateway("tcp://127.0.0.1:*", self._keys.texts, layout, None, "stacks")
        self._gateway = Gateway(start, theirs, self.head.slots, self.head.weights, self.head.bells)
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._accepted = 0
        self._ready = asyncio.Event()
        self.arrivals = 0
        """Connections of the node."""
        self.committed: asyncio.Queue[Trajectory] = asyncio.Queue()
        """Trajectories of the node, which lie in the slots of the head."""
        self.rung = asyncio.Event()
        """Set when a server or the host of the actors is to look."""
        self._host = nodes._Host(1)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From the join of the node until it has left."""
        relaying = asyncio.create_task(self._gateway.run())
        join = JoinFile("r", await self._address, self._keys)
        self.node = Membership(join=join, name="n", cores=1, before="")
        joined = asyncio.create_task(self.node.run())
        await self._ready.wait()
        watched = [*self.head.bells[: self.place], self.slots.bells[self.place]]
        for bell in watched:
            asyncio.get_running_loop().add_reader(bell.fd, self._ring, bell)
        try:
            yield
        finally:
            for bell in watched:
                asyncio.get_running_loop().remove_reader(bell.fd)
            self.node._end("left")
            await joined
            self._link.close()
            self._gateway.stop()
            await relaying
            self.head.close()

    @property
    def slots(self) -> SharedTransport:
        """Memory of the node."""
        return self.node._memory

    def _ring(self, bell: Doorbell) -> None:
        bell.clear()
        self.rung.set()

    def _handle(self, message: Any) -> None:
        """What the gateway says to the coordinator."""
        match message:
            case GatewayListens(address):
                self._address.set_result(address)
            case NodeArrived(connection):
                first = not self.arrivals
                self.arrivals += 1
                self._link.send(AdmitNode(connection, "n", self._accepted, first, PATIENCE_S))
                if first:
                    self._link.send(SendToNode("n", 1, 0, pack([self._open])))
            case NodeSent(_, number, _, body):
                if number:
                    self._accepted = number
                    self._link.send(SendToNode("n", 0, number, b""))
                for inner in unpack(body):
                    if isinstance(inner, NodeReady):
                        self._ready.set()
                    elif isinstance(inner, FromHost):
                        commit = MESSAGES.decode(inner.message)
                        assert isinstance(commit, Commit)
                        self.committed.put_nowait(commit.trajectory)

    def commit(self, grant: Grant, result: RolloutResult) -> None:
        """The host of the actors commits a trajectory."""
        found = Trajectory(
            grant.ticket, grant.slot, result.length, result.env_steps, result.version
        )
        values = MESSAGES.encode(Commit("actor", found, ()))
        packed = msgpack.packb(values)
        self.node._from_host(self._host, msgpack.unpackb(packed, strict_map_key=False))

    def lose_connection(self) -> None:
        """As if a router between the machines had failed. The node connects again."""
        listener, member = self._gateway._listener, self._gateway._members["n"]
        assert listener is not None
        listener.close_peer(member.peer, "lost", "a router has failed")


class FarStage(Stage):
    """As `Stage`, with actors on the node of a cluster, and servers on its head."""

    def __init__(self, kind: str, *, actors: int, servers: int, cluster: Cluster) -> None:
        slots, head = cluster.slots, cluster.head.arena
        super().__init__(kind, actors=actors, servers=servers, steps=STEPS, slots=slots, head=head)
        self.cluster = cluster
        self.outages: list[int] = []
        """Numbers of the answers that are lost with the connection, in order."""
        self.answers = 0
        """That servers have computed."""

    def answer(self, at_most: int = 64) -> int:
        count = super().answer(at_most)
        if count:
            self.answers += count
            if self.outages and self.answers >= self.outages[0]:
                del self.outages[0]
                self.cluster.lose_connection()
            self.cluster.head.bells[-1].ring()
        return count

    async def far_trajectories(self) -> list[tuple[RolloutResult, Arrays, Arrays]]:
        """One trajectory of every actor: what it is on the node, and on the head."""
        grants, going = list[Grant](), dict[int, Turns[RolloutResult]]()
        for index, rollout in enumerate(self.rollouts):
            slot, grant = self.lease(index)
            grants.append(grant)
            going[index] = rollout.turns(slot, grant, 1)
        results: dict[int, RolloutResult] = {}
        try:
            await self._finish(going, grants, results)
        finally:
            for turns in going.values():
                turns.close()
        for _ in results:
            await self.cluster.committed.get()
        node, head = self.slots.arena, self.head
        return [
            (results[index], copies(node, index), copies(head, index)) for index in sorted(results)
        ]

    async def _finish(
        self,
        going: dict[int, Turns[RolloutResult]],
        grants: Sequence[Grant],
        results: dict[int, RolloutResult],
    ) -> None:
        """Step and answer until no rollout is left in ``going``, and commit what they return."""
        waits: dict[int, Wait] = {}
        while going:
            for index, turns in list(going.items()):
                if index in waits and not waits[index].ready():
                    continue
                try:
                    waits[index] = next(turns)
                except StopIteration as end:
                    results[index] = end.value
                    del going[index]
                    self.cluster.commit(grants[index], end.value)
            if going:
                await self.cluster.rung.wait()
                self.cluster.rung.clear()
                self.answer()

    def close(self) -> None:
        for rollout in self.rollouts:
            rollout.close()


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The node forks nothing, not even to try the environment; PyTorch computes on one thread."""

    def answer(config: Config, **_: object) -> SimpleNamespace:
        return SimpleNamespace(problems=(), spec=probe(config))

    monkeypatch.setattr(nodes, "probe", answer)
    monkeypatch.setattr(nodes, "HostForker", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(nodes, "RECONNECT_S", 0.001)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compare(kind: str, *, actors: int, servers: int, outages: Sequence[int] = ()) -> FarStage:
    """Every trajectory is that of local inference, on both machines; the weights change after each.
    With one actor, one row is one batch, so nothing is rounded in another order.
    """
    config = config_of(kind, actors=actors, central=True, steps=STEPS)
    spec, local = probe(config), played_locally(kind, actors)

    async def play() -> FarStage:
        # a new thread has PyTorch's default number of threads, which round in another order
        pool = ThreadPoolExecutor(initializer=torch.set_num_threads, initargs=(1,))
        asyncio.get_running_loop().set_default_executor(pool)
        cluster = Cluster(config, spec, actors=actors, servers=servers)
        async with asyncio.timeout(PATIENCE_S), cluster.running():
            made = partial(FarStage, kind, actors=actors, servers=servers, cluster=cluster)
            stage = await asyncio.to_thread(made)
            stage.outages = list(outages)
            try:
                for number, wanted in enumerate(local):
                    stage.publish(number)
                    found = await stage.far_trajectories()
                    for (result, there, here), (expected, own) in zip(found, wanted, strict=True):
                        assert result == expected
                        assert_same(there, own, exact=actors == 1)
                        assert_same(here, there, exact=True)
            finally:
                stage.close()
        return stage

    return asyncio.run(play())


@pytest.mark.parametrize(("actors", "servers"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("kind", REQUESTS)
def test_servers_on_the_head_give_what_local_inference_gives_on_a_node(
    kind: str, actors: int, servers: int
) -> None:
    stage = compare(kind, actors=actors, servers=servers)
    assert stage.answers >= min(COMPARED, 45) * actors


def test_a_connection_that_is_lost_with_an_answer_changes_no_action() -> None:
    """The node asks again, and the head sends the answer that it has."""
    stage = compare("lstm", actors=1, servers=1, outages=[5, STEPS, STEPS + 1])
    assert stage.outages == []
    assert stage.cluster.arrivals >= 4
    assert stage.answers == math.ceil(COMPARED / STEPS) * STEPS
