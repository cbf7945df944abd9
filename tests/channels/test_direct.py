"""A trajectory goes straight to another node, and its sender learns once whether it lies there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzz_frames import memory
from tests.support.hostile_frames import A_TURN, BOMBS, GROWTH, TIMEOUT_S, Frames, fuzz, messages
from tests.support.worlds import small_layout
from tianflow.channels import direct
from tianflow.channels.direct import DirectListener, DirectSender, require_reachable
from tianflow.channels.frames import MalformedMessageError, Message, encode
from tianflow.channels.keys import Keys
from tianflow.channels.memory import heap_arena
from tianflow.channels.node_messages import DirectAddress
from tianflow.channels.slot_contents import SlotContents
from tianflow.channels.stream import WINDOW
from tianflow.channels.tcp import Peer, TcpConnection, TcpListener, new_context
from tianflow.errors import BrokenChannelError

PATIENCE_S = 20.0
PLACE = "store-1"
ARRAYS = {"reward": np.arange(6, dtype=np.float32), "obs/": np.ones((30, 40), np.float64)}
KEYS = Keys.generate()
"""Of the run. Nodes have them without the secret of the gateway."""
NODE_KEYS = replace(KEYS, server_secret=b"")


class World:
    """A node that receives, and one that sends, on one loop."""

    def __init__(self, keys: Keys | None) -> None:
        self.keys, self.place = keys, PLACE
        self.stored: list[tuple[Any, ...]] = []
        self.takes = True
        self.context = new_context()
        self.sender = DirectSender(context=self.context, keys=keys, place="far-1")
        self.answers: list[tuple[int, bool]] = []
        self.open()

    def open(self) -> None:
        self.listener = DirectListener(
            host="127.0.0.1", keys=self.keys, place=self.place, store=self._store
        )
        self.address = DirectAddress("store", self.listener.address, self.listener.key)

    def _store(self, ticket: int, slot: int, length: int, arrays: Any) -> bool:
        if set(arrays) != set(ARRAYS):
            raise MalformedMessageError("other fields")
        self.stored.append((ticket, slot, length, {name: a.copy() for name, a in arrays.items()}))
        return self.takes

    def send(self, ticket: int) -> None:
        self.sender.send(
            PLACE, (ticket, 3, 2), ARRAYS, lambda lies: self.answers.append((ticket, lies))
        )

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - of messages, not of events
                await asyncio.sleep(0.002)

    async def connect(self, place: str = PLACE) -> None:
        self.sender.connect({place: self.address})
        await self.until(lambda: self.sender.reaches(place))


@asynccontextmanager
async def a_world(keys: Keys | None = NODE_KEYS) -> AsyncIterator[World]:
    world = World(keys)
    try:
        yield world
    finally:
        world.sender.close()
        world.listener.close()
        world.context.destroy(linger=0)


def play(
    scenario: Callable[[World], Coroutine[Any, Any, None]], keys: Keys | None = NODE_KEYS
) -> None:
    async def run() -> None:
        async with a_world(keys) as world:
            await scenario(world)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "RECONNECT_S", 0.01)


@pytest.mark.parametrize("keys", [NODE_KEYS, None], ids=["encrypted", "plain"])
def test_a_trajectory_lies_there_before_its_sender_hears_of_it(keys: Keys | None) -> None:
    async def scenario(world: World) -> None:
        assert not world.sender.reaches(PLACE)
        await world.connect()
        for ticket in range(3):
            world.send(ticket)
        await world.until(lambda: len(world.answers) == 3)
        assert world.answers == [(0, True), (1, True), (2, True)]
        assert [found[:3] for found in world.stored] == [(0, 3, 2), (1, 3, 2), (2, 3, 2)]
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(array, world.stored[0][3][name])
        size = 3 * sum(array.nbytes for array in ARRAYS.values())
        assert (world.sender.sent, world.listener.received) == (size, size)
        assert (1, {"stranger": 0, "lost": 0}) == (
            world.listener.statistics().accepted,
            world.listener.statistics().refused,
        )

    play(scenario, keys)


def test_a_trajectory_that_is_not_taken_is_reported_as_such() -> None:
    async def scenario(world: World) -> None:
        await world.connect()
        world.takes = False
        world.send(1)
        await world.until(lambda: world.answers)
        assert world.answers == [(1, False)]
        assert world.sender.reaches(PLACE)

    play(scenario)


def test_a_lost_connection_answers_for_what_it_had_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: World) -> None:
        await world.connect()
        world.listener.close()
        world.send(1)
        world.send(2)
        await world.until(lambda: len(world.answers) == 2)
        assert world.answers == [(1, False), (2, False)]
        await world.until(lambda: not world.sender.reaches(PLACE))

    play(scenario)
    reports = [record for record in caplog.records if "no direct connection" in record.getMessage()]
    assert 1 == len(reports)
    assert "store" == reports[0].__dict__["node"]


def test_a_connection_that_was_cut_stands_again_and_the_next_trajectory_arrives() -> None:
    async def scenario(world: World) -> None:
        await world.connect()
        (peer,) = world.listener._known.values()
        world.listener._listener.close_peer(peer, "not_allowed", "a test")
        await world.until(lambda: not world.sender.reaches(PLACE))
        await world.until(lambda: world.sender.reaches(PLACE))
        world.send(1)
        await world.until(lambda: world.answers)
        assert world.answers == [(1, True)]
        await world.until(lambda: 1 == len(world.listener._known))

    play(scenario)


def test_a_connection_has_so_many_trajectories_at_most() -> None:
    """ZeroMQ would refuse more of them at some time."""

    async def scenario(world: World) -> None:
        await world.connect()
        for ticket in range(WINDOW):
            assert world.sender.reaches(PLACE)
            world.send(ticket)
        assert not world.sender.reaches(PLACE)
        await world.until(lambda: len(world.answers) == WINDOW)
        assert world.sender.reaches(PLACE)
        assert all(lies_there for _, lies_there in world.answers)

    play(scenario)


def test_a_place_that_is_gone_answers_for_what_is_on_its_way() -> None:
    async def scenario(world: World) -> None:
        await world.connect()
        world.send(1)
        world.sender.connect({})
        assert world.answers == [(1, False)]
        assert not world.sender.reaches(PLACE)

    play(scenario)


def test_a_node_has_no_connection_to_itself() -> None:
    async def scenario(world: World) -> None:
        world.sender.connect({"far-1": world.address})
        assert not world.sender._links

    play(scenario)


def test_a_process_that_has_the_port_of_a_lost_node_is_not_taken_for_it() -> None:
    async def scenario(world: World) -> None:
        world.sender.connect({"store-0": world.address})
        await world.until(lambda: world.listener.statistics().malformed.get("not_allowed"))
        assert not world.sender.reaches("store-0")
        await world.connect()

    play(scenario)


@pytest.mark.parametrize("other", ["client", "server", "none"])
def test_a_process_without_the_keys_is_refused(other: str) -> None:
    async def scenario(world: World) -> None:
        stranger = replace(Keys.generate(), server_public=KEYS.server_public)
        if other == "server":  # the key of the gateway is not that of a node
            stranger = NODE_KEYS
        context = new_context()
        connection = TcpConnection(
            context, world.address.address, keys=None if other == "none" else stranger
        )
        lost: list[Exception] = []
        connection.serve(lambda _: None, lost.append)
        with contextlib.suppress(BrokenChannelError):  # it may have been refused already
            connection.send(encode("hello", 0, PLACE))
        await world.until(lambda: lost)
        await world.until(lambda: world.listener.statistics().refused["stranger"] == 1)
        assert not world.stored
        context.destroy(linger=0)
        await world.connect()

    play(scenario)


def test_a_connection_that_is_refused_before_its_greeting_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other end may refuse it at once."""
    send, refused = TcpConnection.send, []

    def once(connection: TcpConnection, frames: Any) -> None:
        if not refused:
            refused.append(connection)
            raise BrokenChannelError("it does not take what it is sent")
        send(connection, frames)

    async def scenario(world: World) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(TcpConnection, "send", once)
            world.sender.connect({PLACE: world.address})
        assert refused
        world.sender.close()
        await world.connect()

    play(scenario)


HONEST = encode("trajectory", 1, [1, 3, 2, ARRAYS])


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("trajectory", [1, 3, 2, {}]),
        ("trajectory", [1, 3, 2]),
        ("trajectory", ["1", 3, 2, ARRAYS]),
        ("trajectory", [True, 3, 2, ARRAYS]),
        ("trajectory", None),
        ("hello", "another place"),
        ("hello", None),
        ("welcome", None),
        ("up", [0, np.zeros(3, np.uint8), [], []]),
    ],
)
def test_a_malformed_message_costs_its_connection_and_is_counted(kind: str, body: object) -> None:
    async def scenario(world: World) -> None:
        client = Client(world)
        client.send(encode("hello", 0, PLACE))
        client.send(encode(kind, 1, body))
        await world.until(lambda: client.lost)
        assert world.listener.statistics().malformed == {"not_allowed": 1}
        assert not world.stored
        client.close()

    play(scenario)


def test_a_trajectory_before_the_greeting_is_refused() -> None:
    async def scenario(world: World) -> None:
        client = Client(world)
        client.send(HONEST)
        await world.until(lambda: client.lost)
        assert not world.stored
        client.close()

    play(scenario)


class Client:
    """A process with the keys that is not honest."""

    def __init__(self, world: World) -> None:
        self.context = new_context()
        own = world.keys
        if own is not None:
            own = replace(own, server_public=world.listener.key.encode())
        self.lost: list[Exception] = []
        self.received: list[Message] = []
        self.connection = TcpConnection(self.context, world.address.address, keys=own)
        self.connection.serve(self.received.append, self.lost.append)

    def send(self, frames: Any) -> None:
        self.connection.send(frames)

    def close(self) -> None:
        self.connection.close()
        self.context.destroy(linger=0)


@pytest.mark.parametrize(
    ("kind", "body"), [("stored", True), ("stored", None), ("x", None), ("trajectory", [])]
)
def test_a_node_that_answers_what_it_may_not_is_not_reached(kind: str, body: object) -> None:
    async def scenario(world: World) -> None:
        peers: list[Peer] = []
        listener = TcpListener("tcp://127.0.0.1:*")
        listener.serve(lambda peer, _: peers.append(peer), lambda: None)
        world.sender.connect({PLACE: DirectAddress("store", listener.address, "")})
        await world.until(lambda: peers)
        listener.send(peers[0], encode("welcome", 0, None))
        await world.until(lambda: world.sender.reaches(PLACE))
        world.send(1)
        listener.send(peers[0], encode(kind, 7, body))
        await world.until(lambda: world.answers)
        assert world.answers == [(1, False)]
        world.sender.close()
        listener.close()

    play(scenario, None)


PUBLIC = "0" * 40
BAD_ADDRESSES = {
    "a port with letters": ("tcp://10.0.0.1:0x", "", False),
    "every host": ("tcp://*:5", "", False),
    "nothing": ("", "", False),
    "no key": ("tcp://10.0.0.1:5", "", True),
    "a key that is not used": ("tcp://10.0.0.1:5", PUBLIC, False),
    "a short key": ("tcp://10.0.0.1:5", PUBLIC[:-5], True),
    "a key of other letters": ("tcp://10.0.0.1:5", "é" * 40, True),
    "a key of other characters": ("tcp://10.0.0.1:5", "\x7f" * 40, True),
}


@pytest.mark.parametrize(("address", "key", "encrypted"), BAD_ADDRESSES.values(), ids=BAD_ADDRESSES)
def test_an_address_that_cannot_be_one_is_refused(
    address: str, key: str, *, encrypted: bool
) -> None:
    with pytest.raises(MalformedMessageError):
        require_reachable(DirectAddress("n", address, key), encrypted=encrypted)


def test_an_address_is_one_with_a_key_where_keys_are_used() -> None:
    require_reachable(DirectAddress("n", "tcp://10.0.0.1:5", PUBLIC), encrypted=True)
    require_reachable(DirectAddress("n", "tcp://10.0.0.1:5", ""), encrypted=False)


def test_a_node_does_not_have_the_secret_of_the_gateway() -> None:
    """It makes a key of its own, so no node can be taken for the head."""

    async def scenario(world: World) -> None:
        assert world.listener.key not in ("", KEYS.texts["server_public"])

    play(scenario)


@pytest.mark.timeout(TIMEOUT_S)
def test_no_frame_of_a_process_with_the_keys_ends_a_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is handled, or ends its connection. Honest ones are heard afterwards."""
    caplog.set_level(logging.CRITICAL + 1, logger="tianflow")  # records would be retained
    slots = heap_arena(small_layout(), 5)
    slots.slots = 4
    contents = SlotContents(slots, None, "plain")
    trajectory = [1, 3, 2, contents.trajectory(0, 2)]
    near = messages([("hello", 0, PLACE), ("trajectory", 1, trajectory)])
    with asyncio.Runner() as runner:
        world = runner.run(opened())
        world.listener._store = contents.store
        errors: list[dict[str, Any]] = []
        runner.get_loop().set_exception_handler(lambda _, found: errors.append(found))
        lost = 0

        async def attack(turn: list[Frames], *, greets: bool) -> None:
            nonlocal lost
            client = Client(world)
            if greets:
                client.send(encode("hello", 0, PLACE))
            for frames in turn:
                client.send(frames)
            client.send(encode("hello", 0, PLACE))
            await world.until(
                lambda: client.lost or sum(m.kind == "welcome" for m in client.received) > greets
            )
            lost += bool(client.lost)
            client.close()

        @fuzz
        @given(st.lists(near, min_size=1, max_size=A_TURN), st.booleans())
        def fuzzed(turn: list[Frames], greets: bool) -> None:
            runner.run(attack(turn, greets=greets))

        runner.run(attack([], greets=True))
        before = memory(os.getpid())
        fuzzed()
        assert memory(os.getpid()) - before < GROWTH
        assert lost > 0
        runner.run(world.connect())
        runner.run(closed(world))
        assert errors == []


async def opened() -> World:
    return World(None)


async def closed(world: World) -> None:
    world.sender.close()
    world.listener.close()
    world.context.destroy(linger=0)


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_costs_its_connection_and_no_memory(bomb: Frames) -> None:
    async def scenario(world: World) -> None:
        client, before = Client(world), memory(os.getpid())
        client.send(encode("hello", 0, PLACE))
        client.send(bomb)
        await world.until(lambda: client.lost)
        assert memory(os.getpid()) - before < 48 * 1024**2
        client.close()
        await world.connect()

    play(scenario)
