"""The gateway: what a node sends lies in its slot before the coordinator hears of it, and what a
stranger sends harms nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzz_frames import descriptors, memory
from tests.support.hostile_frames import A_TURN, BOMBS, GROWTH, TIMEOUT_S, Frames, fuzz, messages
from tests.support.replay_exchange_worlds import DRAWN, DRAWS
from tests.support.worlds import small_layout
from tianflow.channels.arena import (
    MOST_PLACES,
    SlotRequests,
    input_rows,
    place_of,
    row_of,
)
from tianflow.channels.attachments import Attachments, DrawParts
from tianflow.channels.frames import Message, encode, nbytes
from tianflow.channels.keys import Keys
from tianflow.channels.link import Link, socket_pair
from tianflow.channels.messages import (
    AdmitNode,
    ConnectionsCounted,
    ForgetNode,
    GatewayListens,
    NodeArrived,
    NodeDisconnected,
    NodeSent,
    NodeTraffic,
    RefuseNode,
    SendToNode,
    SendWeights,
    StartGateway,
)
from tianflow.channels.shm import SharedMemory, SharedTransport, SharedWeights
from tianflow.channels.tcp import TcpConnection, new_context
from tianflow.core.layout import written_rows
from tianflow.core.payloads import MOST_ROWS, NO_VERSION, Prioritise, StoreTrajectory, Version
from tianflow.errors import TianflowError
from tianflow.hosts import gateway as gateways
from tianflow.hosts.gateway import Gateway

T = TypeVar("T")
SLOTS = 3
FLAT = 64
PATIENCE_S = 20.0
LAYOUT = small_layout()
Scenario = Callable[["World"], Coroutine[Any, Any, None]]


class Client:
    """A process at the other end of the network."""

    def __init__(self, context: Any, address: str, keys: Keys | None) -> None:
        self.received: list[Message] = []
        self.lost: TianflowError | None = None
        self.connection = TcpConnection(context, address, keys=keys)
        self.connection.serve(self.received.append, self._lost)

    def _lost(self, error: TianflowError) -> None:
        self.lost = error

    def send(self, kind: str, number: int, body: object) -> None:
        self.connection.send(encode(kind, number, body))

    def kinds(self) -> list[str]:
        return [message.kind for message in self.received]

    def up(
        self,
        number: int,
        body: bytes = b"m",
        trajectories: Sequence[Any] = (),
        columns: Sequence[Any] = (),
    ) -> None:
        sent = [0, np.frombuffer(body, np.uint8), list(trajectories), list(columns)]
        self.send("up", number, sent)


class World:
    """A gateway on this loop, and the coordinator's end of its link."""

    def __init__(self, keys: Keys | None, servers: int) -> None:
        self.keys = keys
        layout = small_layout(request_noise=2) if servers else LAYOUT
        bells = servers + 1 if servers else 0
        self.slots = SharedTransport(
            layout=layout, capacity=SLOTS, draws=DRAWS, draw_slots=2, bells=bells
        )
        self.slots.add_slots(SLOTS)
        memory = SharedMemory.attach(self.slots.weights, SharedWeights.nbytes_for(FLAT))
        self.weights = SharedWeights(memory=memory, nbytes=FLAT)
        self.received: list[Any] = []
        ours, theirs = socket_pair()
        self.link = Link(end=ours, handle=self.received.append, closed=lambda: None)
        texts = {} if keys is None else keys.texts
        start = StartGateway("tcp://127.0.0.1:*", texts, layout, DRAWS, "stacks")
        assert self.slots._draws is not None
        draws = self.slots._draws.memory.fd
        self.gateway = Gateway(
            start, theirs, self.slots.slots, self.slots.weights, self.slots.bells, draws=draws
        )
        self.context = new_context()
        self.clients: list[Client] = []

    async def until(self, what: str, condition: Callable[[], T]) -> T:
        async with asyncio.timeout(PATIENCE_S):
            while not (found := condition()):  # noqa: ASYNC110 - of messages, not of events
                await asyncio.sleep(0.005)
        assert found, what
        return found

    async def got(self, kind: type[T], count: int = 1) -> list[T]:
        """Messages of ``kind`` to the coordinator, once there are ``count``."""

        def found() -> list[T]:
            return [message for message in self.received if isinstance(message, kind)]

        await self.until(f"{count} {kind.__name__}", lambda: len(found()) >= count)
        return found()

    async def connect(self, keys: Keys | None = None) -> Client:
        address = (await self.got(GatewayListens))[0].address
        self.clients.append(Client(self.context, address, keys or self.keys))
        return self.clients[-1]

    async def join(self, name: str = "n", received: int = 0) -> Client:
        """An admitted node."""
        client, before = await self.connect(), {m.connection for m in self.arrivals()}
        hello = {"name": name}
        client.send("hello", 0, hello)

        def found() -> list[NodeArrived]:  # not of a stranger that is closed by now
            return [m for m in self.arrivals() if m.hello == hello and m.connection not in before]

        (arrived,) = await self.until("its arrival", found)
        self.link.send(AdmitNode(arrived.connection, name, received, True, 15.0))
        await self.until("welcome", lambda: "welcome" in client.kinds())
        return client

    def arrivals(self) -> list[NodeArrived]:
        return [message for message in self.received if isinstance(message, NodeArrived)]

    def beats(self) -> list[int]:
        """What nodes that are alive have received, as they say."""
        return [m.received for m in self.received if isinstance(m, NodeSent) and not m.number]

    def traffic(self) -> dict[str, int]:
        """Bytes that nodes were sent, by kind, as last reported."""
        reports = [m for m in self.received if isinstance(m, NodeTraffic)]
        return dict(reports[-1].sent) if reports else {}

    def sent(self) -> list[NodeSent]:
        """Numbered messages that reached the coordinator."""
        return [m for m in self.received if isinstance(m, NodeSent) and m.number]

    async def works(self) -> None:
        """A new node is admitted and heard."""
        client = await self.join("probe")
        before = len(self.sent())
        client.up(1, b"probe")
        await self.until("it is heard", lambda: len(self.sent()) > before)

    def rings(self, bell: int) -> bool:
        """True if the doorbell has rung since the last look."""
        try:
            return os.eventfd_read(self.slots.bells[bell].fd) > 0
        except BlockingIOError:
            return False

    def trajectory(self, length: int, value: int) -> dict[str, Any]:
        views, rows = self.slots.arena.views(0), written_rows(LAYOUT, length)
        return {name: np.full_like(views[name][: rows[name]], value) for name in views}


@asynccontextmanager
async def a_world(keys: Keys | None = None, servers: int = 0) -> AsyncIterator[World]:
    world = World(keys, servers)
    running = asyncio.create_task(world.gateway.run())
    try:
        yield world
    finally:
        for client in world.clients:
            client.connection.close()
        world.context.destroy(linger=0)
        world.link.close()
        async with asyncio.timeout(PATIENCE_S):
            await running
        world.slots.close()


def play(scenario: Scenario, keys: Keys | None = None, servers: int = 0) -> None:
    async def run() -> None:
        async with a_world(keys, servers) as world:
            await scenario(world)

    asyncio.run(run())


def test_a_node_is_admitted_at_the_word_of_the_coordinator() -> None:
    async def scenario(world: World) -> None:
        client = await world.join("n", received=7)
        assert world.arrivals()[0].hello == {"name": "n"}
        assert client.received[0].body == ["n", 7, True, 15.0]

    play(scenario, Keys.generate())


def test_a_refusal_reaches_the_process_that_asked() -> None:
    async def scenario(world: World) -> None:
        client = await world.connect()
        client.send("hello", 0, {"name": "n"})
        (arrived,) = await world.got(NodeArrived)
        world.link.send(RefuseNode(arrived.connection, "its python is older", False))
        await world.until("refused", lambda: client.kinds() == ["refused"])
        assert client.received[0].body == ["its python is older", False]

    play(scenario)


def test_a_process_with_other_keys_is_not_heard() -> None:
    async def scenario(world: World) -> None:
        stranger = await world.connect(Keys.generate())
        await world.until("it is lost", lambda: stranger.lost is not None)
        assert world.arrivals() == []
        await world.works()

    play(scenario, Keys.generate())


def test_a_trajectory_lies_in_its_slot_before_the_coordinator_hears_of_it() -> None:
    async def scenario(world: World) -> None:
        client, seen = await world.join(), list[float]()
        world.link._handle = lambda message: (
            seen.append(float(world.slots.arena.views(1)["reward"][0, 0])),
            world.received.append(message),
        )
        client.up(1, b"commit", [[1, 3, world.trajectory(3, 5)]])
        await world.until("it is heard", world.sent)
        assert seen[-1] == 5.0
        assert world.sent()[0].body == b"commit"
        reward = world.slots.arena.views(1)["reward"]
        assert (reward[:3] == 5.0).all()
        assert (reward[3:] == 0.0).all()
        camera = world.slots.arena.views(1)["obs/camera"]
        assert (camera[:4] == 5).all()
        assert (camera[4:] == 0).all()

    play(scenario)


def test_a_compressed_trajectory_lies_in_its_slot_as_it_was() -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        arrays = {
            name: {"lz4": block(array), "dtype": array.dtype.str, "shape": array.shape}
            for name, array in world.trajectory(3, 5).items()
        }
        client.up(1, b"commit", [[1, 3, arrays]])
        await world.until("it is heard", world.sent)
        views = world.slots.arena.views(1)
        for name, array in world.trajectory(3, 5).items():
            np.testing.assert_array_equal(array, views[name][: len(array)])

    play(scenario)


def test_an_array_that_would_need_more_than_its_place_closes_the_connection() -> None:
    async def scenario(world: World) -> None:
        client, arrays = await world.join(), world.trajectory(3, 5)
        bomb = np.zeros(1 << 24, np.uint8)
        arrays["reward"] = {"lz4": block(bomb), "dtype": "|u1", "shape": bomb.shape}
        client.up(1, b"commit", [[1, 3, arrays]])
        await world.until("it is closed", lambda: client.lost is not None)
        assert [] == world.sent()
        await world.works()

    play(scenario)


def block(array: Any) -> Any:
    return np.frombuffer(lz4.block.compress(array.tobytes(), store_size=False), np.uint8)


def test_a_repeated_message_changes_no_slot_and_is_not_relayed() -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        client.up(1, b"a", [[1, 4, world.trajectory(4, 5)]])
        client.up(1, b"a", [[1, 4, world.trajectory(4, 9)]])
        client.up(2, b"b")
        await world.until("the second one", lambda: len(world.sent()) == 2)
        assert [message.body for message in world.sent()] == [b"a", b"b"]
        assert (world.slots.arena.views(1)["reward"] == 5.0).all()

    play(scenario)


def test_after_a_restart_of_the_gateway_the_messages_before_it_are_repetitions() -> None:
    async def scenario(world: World) -> None:
        client = await world.join(received=4)
        client.up(4, b"old", [[1, 4, world.trajectory(4, 9)]])
        client.up(5, b"new")
        await world.until("the new one", world.sent)
        assert [message.body for message in world.sent()] == [b"new"]
        assert (world.slots.arena.views(1)["reward"] == 0.0).all()

    play(scenario)


def test_a_message_that_both_connections_of_a_node_carry_changes_no_slot_twice() -> None:
    """The first one may arrive while the coordinator decides about the second connection. The slot
    may belong to another trajectory when the message comes again.
    """

    async def scenario(world: World) -> None:
        first = await world.join()
        second = await world.connect()
        second.send("hello", 0, {"name": "n"})
        arrived = (await world.got(NodeArrived, 2))[-1]
        first.up(1, b"a", [[1, 4, world.trajectory(4, 5)]])
        await world.until("the first one", world.sent)
        world.slots.arena.views(1)["reward"][...] = 7.0
        world.link.send(AdmitNode(arrived.connection, "n", 0, False, 15.0))
        await world.until("welcome", lambda: "welcome" in second.kinds())
        assert second.received[0].body[1] == 0  # the coordinator has not acknowledged it
        second.up(1, b"a", [[1, 4, world.trajectory(4, 5)]])
        second.up(2, b"b")
        await world.until("the second one", lambda: len(world.sent()) == 2)
        assert [message.body for message in world.sent()] == [b"a", b"b"]
        assert (world.slots.arena.views(1)["reward"] == 7.0).all()

    play(scenario)


def wrong_dtype(world: World) -> list[Any]:
    return [1, 4, {**world.trajectory(4, 5), "reward": np.ones((4, 2), np.int64)}]


def nested(world: World) -> list[Any]:
    inner: Any = 1
    for _ in range(400):
        inner = {"x": [inner]}
    return [1, 4, {**world.trajectory(4, 5), "reward": inner}]


def wrong_shape(world: World) -> list[Any]:
    return [1, 4, {**world.trajectory(4, 5), "reward": np.ones((3, 2), np.float32)}]


def a_field_is_missing(world: World) -> list[Any]:
    arrays = world.trajectory(4, 5)
    del arrays["reward"]
    return [1, 4, arrays]


@pytest.mark.parametrize(
    "attachment",
    [
        wrong_dtype,
        wrong_shape,
        nested,
        a_field_is_missing,
        lambda world: [SLOTS, 4, world.trajectory(4, 5)],
        lambda world: [-1, 4, world.trajectory(4, 5)],
        lambda world: [1.0, 4, world.trajectory(4, 5)],
        lambda world: [1, 5, world.trajectory(4, 5)],
        lambda world: [1, 0, world.trajectory(1, 5)],
        lambda _: [1, 4],
        lambda _: 7,
        lambda _: [1, 4, [1]],
    ],
)
def test_a_trajectory_that_does_not_fit_closes_the_connection(
    attachment: Callable[[World], Any],
) -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        client.up(1, b"a", [attachment(world)])
        await world.until("it is closed", lambda: client.lost is not None)
        assert world.sent() == []
        await world.got(NodeDisconnected)
        await world.works()

    play(scenario)


@pytest.mark.parametrize(
    ("kind", "number", "body"),
    [
        ("up", 3, [0, np.zeros(1, np.uint8), [], []]),
        ("up", 1, None),
        ("up", 1, [0, b"bytes", [], []]),
        ("up", 1, [0, np.zeros(1, np.uint8), [[]], []]),
        ("beat", 0, [0, [[0, 1]], 0.0]),
        ("beat", 0, [0, [["a", 1, 1]], 0.0]),
        ("stored", 0, ["a", 1]),
        ("weights", 0, []),
    ],
)
def test_a_malformed_message_of_a_node_closes_its_connection_only(
    kind: str, number: int, body: object
) -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        client.send(kind, number, body)
        await world.until("it is closed", lambda: client.lost is not None)
        await world.works()

    play(scenario)


@pytest.mark.parametrize(
    ("kind", "body"),
    [("up", [0, np.zeros(1, np.uint8), [], []]), ("hello", None), ("hello", {"a": np.ones(3)})],
)
def test_a_stranger_that_does_not_introduce_itself_is_closed(kind: str, body: object) -> None:
    async def scenario(world: World) -> None:
        client = await world.connect()
        client.send(kind, 1, body)
        await world.until("it is closed", lambda: client.lost is not None)
        await world.works()

    play(scenario)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("up", [True, np.zeros(1, np.uint8), [], []]),
        ("up", [0, np.zeros(16 * 1024**2 + 1, np.uint8), [], []]),
        ("stored", [True, 1]),
        ("beat", [False, [], 0.0]),
        ("beat", [0, [[1.0, 1, 1]], 0.0]),
        ("beat", [0, [[1, 2**63, 1]], 0.0]),
        ("ask", [[1, 512.0, {}]]),
    ],
)
def test_no_value_reaches_the_coordinator_that_it_would_not_accept(kind: str, body: object) -> None:
    """A value of another type in a message of the gateway ends the run."""

    async def scenario(world: World) -> None:
        client = await world.join()
        client.send(kind, 1, body)
        await world.until("it is closed", lambda: client.lost is not None)
        assert world.sent() == []
        await world.works()

    play(scenario, servers=1)


def test_a_hello_with_names_that_are_not_texts_is_closed() -> None:
    async def scenario(world: World) -> None:
        client = await world.connect()
        client.send("hello", 0, {"name": "n", 3: 4})
        await world.until("it is closed", lambda: client.lost is not None)
        assert world.arrivals() == []
        await world.works()

    play(scenario)


def test_a_round_trip_is_a_finite_time() -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        for echo in (float("-inf"), float("nan")):
            client.send("beat", 0, [0, [], echo])
        await world.until("both are heard", lambda: len(world.beats()) == 2)
        assert world.gateway._members["n"].round_trip_s == 0.0

    play(scenario)


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_closes_its_connection_and_costs_no_memory(bomb: Frames) -> None:
    async def scenario(world: World) -> None:
        client, before = await world.join(), memory(os.getpid())
        client.connection.send(bomb)
        await world.until("it is closed", lambda: client.lost is not None)
        assert memory(os.getpid()) - before < 48 * 1024**2
        await world.works()

    play(scenario)


# Replay shards on nodes
# --------------------------------------------------------------------------------------------------

COLUMNS = DrawParts(DRAWS)


def drawn(world: World, value: float) -> dict[str, Any]:
    """Columns of a draw, all of ``value``."""
    assert world.slots.draws is not None
    views = {name: np.full_like(a, value) for name, a in world.slots.draws.views(0).items()}
    return COLUMNS.of(views, 1, 3)


def test_drawn_columns_lie_in_their_slot_before_the_coordinator_hears_of_them() -> None:
    async def scenario(world: World) -> None:
        draws = world.slots.draws
        assert draws is not None
        client, seen = await world.join(), list[list[float]]()
        world.link._handle = lambda message: (
            seen.append(draws.views(1)["probability"].tolist()),
            world.received.append(message),
        )
        client.up(1, b"drawn", columns=[[1, 1, 3, drawn(world, 5)]])
        await world.until("it is heard", world.sent)
        assert seen[-1] == [0.0, 5.0, 5.0, 5.0, *[0.0] * (DRAWN - 4)]
        assert draws.views(1)["obs/"][:, 1:4].min() == draws.views(1)["obs/"].max() == 5.0
        assert not draws.views(1)["obs/"][:, 4:].any()
        counted = [m for m in await world.got(NodeTraffic, 2) if m.received][-1].received
        assert counted["draws"] == nbytes(drawn(world, 5))

    play(scenario)


@pytest.mark.parametrize(
    "columns",
    [
        lambda world: [2, 1, 3, drawn(world, 5)],
        lambda world: [-1, 1, 3, drawn(world, 5)],
        lambda world: [True, 1, 3, drawn(world, 5)],
        lambda world: ["a", 1, 3, drawn(world, 5)],
        lambda _: [1, 1, 3, None],
        lambda _: [1, 1, 3, {}],
        lambda world: [1, DRAWN - 2, 3, drawn(world, 5)],
        lambda world: [1, 1, 4, drawn(world, 5)],
        lambda world: [1, True, 3, drawn(world, 5)],
        lambda world: [1, 1, 3, {**drawn(world, 5), "key": np.zeros(3, np.int64)}],
        lambda _: [1],
        lambda _: 3,
    ],
)
def test_columns_that_do_not_fit_close_the_connection(columns: Callable[[World], Any]) -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        client.up(1, b"a", columns=[columns(world)])
        await world.until("it is closed", lambda: client.lost is not None)
        assert world.sent() == []
        await world.works()

    play(scenario)


def test_data_of_slots_go_with_the_message_that_is_about_them() -> None:
    async def scenario(world: World) -> None:
        draws = world.slots.draws
        assert draws is not None
        client = await world.join()
        for name, array in world.trajectory(3, 7).items():
            world.slots.arena.views(2)[name][: len(array)] = array
        draws.views(1)["priority"][:] = np.arange(DRAWN)
        world.link.send(SendToNode("n", 1, 0, b"store", StoreTrajectory(9, 2, 3)))
        world.link.send(SendToNode("n", 2, 0, b"pri", prioritise=Prioritise(4, 1, 2, 3)))
        world.link.send(SendToNode("n", 3, 0, b"else"))

        def downs() -> list[Message]:
            return [message for message in client.received if message.kind == "down"]

        await world.until("all are there", lambda: len(downs()) == 3)
        stored, prioritised, other = (message.body for message in downs())
        assert (b"store", []) == (stored[1].tobytes(), stored[3])
        ((ticket, slot, length, arrays),) = stored[2]
        assert (9, 2, 3) == (ticket, slot, length)
        there = {name: np.zeros_like(array) for name, array in world.slots.arena.views(2).items()}
        Attachments(LAYOUT).write(there, 3, arrays)
        np.testing.assert_array_equal(there["reward"], world.slots.arena.views(2)["reward"])
        assert 7.0 == there["reward"][2, 0]
        assert (b"pri", []) == (prioritised[1].tobytes(), prioritised[2])
        ((slot, first, items, arrays),) = prioritised[3]
        assert (1, 2, 3, [2.0, 3.0, 4.0]) == (slot, first, items, arrays["priority"].tolist())
        assert (b"else", [], []) == (other[1].tobytes(), other[2], other[3])
        await world.until(
            "its bytes are reported",
            lambda: {"trajectories", "priorities", "messages"} <= world.traffic().keys(),
        )
        assert world.traffic()["trajectories"] > nbytes(stored[2][0][3])

    play(scenario)


def honest(world: World) -> list[tuple[str, int, object]]:
    """What nodes send."""
    asked = (9 * MOST_ROWS + 2) * MOST_PLACES + 1
    hello = {"protocol": 1, "run": "r", "name": "n", "incarnation": "i", "cores": 2}
    trajectory = [1, 3, world.trajectory(3, 5)]
    return [
        ("hello", 0, hello),
        ("up", 1, [0, np.frombuffer(b"message", np.uint8), [trajectory], []]),
        ("up", 2, [0, np.zeros(2000, np.uint8), [], []]),
        ("up", 1, [0, np.frombuffer(b"drawn", np.uint8), [], [[1, 1, 3, drawn(world, 5)]]]),
        ("beat", 0, [0, [[2, 41, 3]], 0.5]),
        ("stored", 0, [0, 1]),
        ("ask", 0, [[1, asked, a_request(world, 1, 3)]]),
        ("bye", 0, None),
    ]


class Assault:
    """Connections to one gateway, one after the other, of nodes and of strangers.

    What ends the gateway, or what the coordinator would not accept from it, is an error of a
    callback of this loop.
    """

    def __init__(self, world: World, listens: GatewayListens) -> None:
        self.world, self.listens, self.member = world, listens, list[Client]()
        self.sent = self.closed = self.turns = 0
        self.errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, found: self.errors.append(found))

    async def turn(self, attack: list[Frames], *, stranger: bool) -> None:
        client = await (self._stranger() if stranger else self._node())
        self.turns += 1
        self.sent += len(attack)
        for frames in attack:
            if client.lost is None:
                with contextlib.suppress(TianflowError):  # it was closed just now
                    client.connection.send(frames)
        mark = self.turns + 1000  # a stranger may not send it
        if client.lost is None:
            with contextlib.suppress(TianflowError):
                client.send("beat", 0, [mark, [], 0.0])
        await self.world.until(
            "all was read",
            lambda: client.lost is not None or self.world.beats()[-1:] == [mark] or self.errors,
        )
        assert self.errors == []
        if client.lost is not None:
            self.closed += 1
        if client.lost is not None and not stranger:
            self.member.clear()
        if stranger:
            client.connection.close()
            self.world.clients.remove(client)
        self.world.received[:] = [self.listens, *self.world.received[-50:]]

    async def _stranger(self) -> Client:
        return await self.world.connect()

    async def _node(self) -> Client:
        if not self.member:
            self.world.link.send(ForgetNode("n", False))
            self.member.append(await self.world.join("n"))
        return self.member[0]


@pytest.mark.timeout(TIMEOUT_S)
def test_no_frame_of_a_node_or_a_stranger_ends_the_gateway(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is handled, or closes its connection and is counted. Nothing is left of it."""
    caplog.set_level(logging.CRITICAL + 1, logger="tianflow")  # records would be retained
    with asyncio.Runner() as runner:
        context = a_world(servers=1)
        world = runner.run(context.__aenter__())
        try:
            assault = runner.run(_assault(world))

            @fuzz
            @given(
                st.lists(messages(honest(world)), min_size=1, max_size=A_TURN),
                st.integers(0, 3).map(lambda number: number == 0),
            )
            def attack(frames: list[Frames], stranger: bool) -> None:
                runner.run(assault.turn(frames, stranger=stranger))

            runner.run(world.works())
            before = memory(os.getpid()), descriptors(os.getpid())
            attack()
            grown = memory(os.getpid()) - before[0]
            few = before[1] + 16  # of one connection, and what ZeroMQ opens once
            closing = world.until("descriptors", lambda: descriptors(os.getpid()) <= few)
            runner.run(closing)
            runner.run(world.works())
            listener = world.gateway._listener
            assert listener is not None
            assert assault.errors == []
            assert assault.closed > assault.turns // 10
            refused = listener.statistics().malformed
            assert sum(refused.values()) >= assault.closed
            assert grown < GROWTH
            print(  # noqa: T201 - the report of a campaign
                f"{assault.sent} frames, {assault.turns} turns: {refused}, {grown / 2**20:.1f} MiB"
            )
        finally:
            runner.run(context.__aexit__(None, None, None))


async def _assault(world: World) -> Assault:
    return Assault(world, (await world.got(GatewayListens))[0])


def test_every_connection_that_is_refused_is_counted_by_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateways, "BEAT_S", 0.01)

    async def scenario(world: World) -> None:
        def counted(**expected: int) -> Callable[[], bool]:
            return lambda: (
                [
                    message.refused
                    for message in world.received
                    if isinstance(message, ConnectionsCounted)
                ][-1:]
                == [expected]
            )

        await world.until("nothing", counted(stranger=0, lost=0))
        stranger = await world.connect(Keys.generate())
        await world.until("a stranger", counted(stranger=1, lost=0))
        assert stranger.lost is not None
        client = await world.join("a")
        client.connection.send([b"nonsense"])
        await world.until("bytes", counted(stranger=1, lost=0, undecodable=1))
        client = await world.join("b")
        client.send("x", 1, None)
        await world.until("a kind", counted(stranger=1, lost=0, undecodable=1, not_allowed=1))
        client = await world.join("c")
        client.connection.close()
        await world.until("an end", counted(stranger=1, lost=1, undecodable=1, not_allowed=1))
        client = await world.join("d")
        client.connection.close(farewell=True)
        await world.got(NodeDisconnected, 4)
        await world.works()
        assert counted(stranger=1, lost=1, undecodable=1, not_allowed=1)()

    play(scenario, Keys.generate())


def test_weights_are_sent_once_a_node_has_room_and_the_newest_only() -> None:
    async def scenario(world: World) -> None:
        def publish(number: int) -> None:
            world.weights.publish(Version(0, number), np.full(FLAT, number, np.uint8))
            world.link.send(SendWeights(Version(0, number)))

        def weights() -> list[list[Any]]:
            return [message.body for message in client.received if message.kind == "weights"]

        client = await world.join()
        publish(1)
        await world.works()
        assert weights() == []
        client.send("stored", 0, list(NO_VERSION))
        await world.until("the first weights", weights)
        publish(2)
        publish(3)
        await world.until("they are published", lambda: world.gateway._published.number == 3)
        client.send("stored", 0, [0, 1])
        await world.until("newer weights", lambda: len(weights()) == 2)
        client.send("stored", 0, [0, 3])
        await world.works()
        found = weights()
        assert [body[:2] for body in found] == [[0, 1], [0, 3]]
        assert found[1][2] == len(found[1][3])
        assert (found[1][3][:FLAT] == 3).all()

    play(scenario)


@pytest.mark.parametrize("stored", [[-1, 3], [0, -2], [0, 1.0], [0]])
def test_weights_of_no_version_close_the_connection(stored: Sequence[Any]) -> None:
    """Nothing is published yet, so there is nothing that could be sent to their node."""

    async def scenario(world: World) -> None:
        client, errors = await world.join(), list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, found: errors.append(found))
        client.send("stored", 0, stored)
        await world.until("it is closed", lambda: client.lost is not None or errors)
        assert errors == []
        await world.works()

    play(scenario)


def a_request(world: World, slot: int, value: float) -> dict[str, Any]:
    """What a node sends of row 2 of a request."""
    places = input_rows(world.slots.arena, slot, 2)
    return {name: np.full_like(array, value) for name, array in places.items()}


def answer(world: World, version: Version) -> list[tuple[int, int]]:
    """Answer every request in the slots of the head, as an inference server does."""
    requests = SlotRequests(world.slots.arena, index=0, servers=1)
    found = requests.open()
    for slot, request in found:
        world.slots.arena.request_views(slot)["action"][...] = 1
        requests.answer(slot, request, version)
        world.slots.bells[place_of(request)].ring()
    return found


def test_a_request_of_a_node_is_answered_by_a_server_of_the_head() -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        asked = (9 * MOST_ROWS + 2) * MOST_PLACES + 5
        client.send("ask", 0, [[1, asked, a_request(world, 1, 3)]])
        await world.until("a request", lambda: world.rings(0))
        assert (world.slots.arena.views(1)["obs/camera"][2] == 3).all()
        assert (world.slots.arena.request_views(1)["noise"][2] == 3).all()
        assert [row_of(request) for _, request in answer(world, Version(0, 7))] == [2]
        await world.until("an answer", lambda: "answers" in client.kinds())
        ((slot, request, lineage, number, fields),) = client.received[-1].body
        assert (slot, request, lineage, number) == (1, asked, 0, 7)
        assert (fields["action"] == 1).all()
        assert not {"noise", "asked/at"} & fields.keys()

    play(scenario, servers=1)


def test_a_request_that_is_sent_again_is_not_computed_again() -> None:
    """The connection was lost between the answer of the server and its arrival."""

    async def scenario(world: World) -> None:
        client = await world.join("n")
        asked = (9 * MOST_ROWS + 2) * MOST_PLACES + 5
        client.send("ask", 0, [[1, asked, a_request(world, 1, 3)]])
        await world.until("a request", lambda: world.rings(0))
        client.connection.close()
        await world.got(NodeDisconnected)
        answer(world, Version(0, 7))
        again = await world.join("n")
        again.send("ask", 0, [[1, asked, a_request(world, 1, 3)]])
        await world.until("an answer", lambda: "answers" in again.kinds())
        assert not world.rings(0)
        assert answer(world, Version(0, 8)) == []

    play(scenario, servers=1)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda world: [SLOTS, 512, a_request(world, 1, 3)],
        lambda world: [1, 4 * MOST_PLACES, a_request(world, 1, 3)],
        lambda world: [1, 512, {**a_request(world, 1, 3), "noise": np.ones(3)}],
        lambda _: [1, 512, {}],
        lambda _: [1, 512],
        lambda _: [1, "a", {}],
    ],
)
def test_a_request_that_does_not_fit_closes_the_connection(
    request_of: Callable[[World], Any],
) -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        client.send("ask", 0, [request_of(world)])
        await world.until("it is closed", lambda: client.lost is not None)
        assert not world.rings(0)
        await world.works()

    play(scenario, servers=1)


def test_a_request_without_inference_servers_closes_the_connection() -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        client.send("ask", 0, [[1, 512, {}]])
        await world.until("it is closed", lambda: client.lost is not None)
        await world.works()

    play(scenario)


def test_the_progress_of_a_node_is_seen_in_the_slots_of_the_head() -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        client.send("beat", 0, [0, [[2, 41, 3], [SLOTS, 1, 1], [-1, 1, 1]], 0.0])
        await world.until("progress", lambda: world.slots.arena.progress(2, 41) == 3)
        assert client.lost is None

    play(scenario)


@pytest.mark.parametrize(("ended", "kind"), [(True, "ended"), (False, "lost")])
def test_a_node_hears_whether_the_run_has_ended_or_it_is_lost(*, ended: bool, kind: str) -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        world.link.send(SendToNode("n", 1, 0, b"last"))
        world.link.send(ForgetNode("n", ended))
        await world.until("the end", lambda: kind in client.kinds())
        assert client.kinds()[-2:] == ["down", kind]

    play(scenario)


def test_an_error_of_the_beats_ends_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes would lose a gateway that does not beat; one that has ended is restarted."""

    def fail(_: Gateway) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tianflow.hosts.gateway.BEAT_S", 0.01)
    monkeypatch.setattr(Gateway, "_find_lost", fail)

    async def run() -> None:
        world = World(None, 0)
        running = asyncio.create_task(world.gateway.run())
        await asyncio.wait({running}, timeout=PATIENCE_S)
        world.context.destroy(linger=0)
        world.link.close()
        world.slots.close()
        assert running.done()
        with pytest.raises(ZeroDivisionError):
            await running

    asyncio.run(run())


def test_what_a_lost_node_still_sends_is_refused() -> None:
    async def scenario(world: World) -> None:
        client = await world.join()
        world.link.send(ForgetNode("n", False))
        await world.until("the end", lambda: "lost" in client.kinds())
        client.up(1, b"late", [[1, 4, world.trajectory(4, 9)]])
        await world.until("it is closed", lambda: client.lost is not None)
        assert world.sent() == []
        assert (world.slots.arena.views(1)["reward"] == 0.0).all()
        await world.works()

    play(scenario)


def test_many_connections_without_a_word_keep_no_node_out() -> None:
    async def scenario(world: World) -> None:
        address = (await world.got(GatewayListens))[0].address
        port = int(address.rpartition(":")[2])
        strangers = [socket.socket() for _ in range(200)]
        try:
            for stranger in strangers:
                stranger.setblocking(False)
                stranger.connect_ex(("127.0.0.1", port))
            await world.works()
        finally:
            for stranger in strangers:
                stranger.close()

    play(scenario, Keys.generate())


def test_a_connection_that_ends_is_reported_and_the_node_may_come_back() -> None:
    async def scenario(world: World) -> None:
        client = await world.join("n")
        client.connection.close()
        (arrived,) = world.arrivals()
        assert await world.got(NodeDisconnected) == [NodeDisconnected("n", arrived.connection)]
        again = await world.join("n")
        world.link.send(SendToNode("n", 1, 0, b"again"))
        await world.until("a message", lambda: "down" in again.kinds())

    play(scenario)
