"""``tianflow node`` refuses what it cannot use, waits for what is to come, and ends when it is asked
to.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import select
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzz_frames import descriptors, memory
from tests.support.hostile_frames import (
    A_TURN,
    BOMBS,
    GROWTH,
    TIMEOUT_S,
    Frames,
    altered,
    encoded,
    fuzz,
    messages,
)
from tests.support.replay_exchange_worlds import DRAWN, DRAWS
from tests.support.settings import cartpole
from tests.support.worlds import small_layout
from tianflow.channels import node_messages
from tianflow.channels.arena import MOST_PLACES, answer_fields
from tianflow.channels.attachments import Attachments
from tianflow.channels.frames import Message, encode
from tianflow.channels.keys import Keys
from tianflow.channels.memory import heap_arena
from tianflow.channels.messages import (
    MESSAGES,
    Commit,
    Drawn,
    Granted,
    PutSettings,
    RequestGrants,
    Stop,
)
from tianflow.channels.node_messages import (
    NODE_MESSAGES,
    CloseNode,
    DirectAddress,
    ForkHost,
    FromHost,
    HostGone,
    KillHost,
    NodeReady,
    NodeUnable,
    OpenNode,
    RequestCut,
    SetPlaces,
    SetSlots,
    ToHost,
    pack,
)
from tianflow.channels.shm import SharedTransport
from tianflow.channels.slot_contents import SlotContents
from tianflow.channels.tcp import Peer, TcpListener
from tianflow.cli.node import parse_cores, parse_roles
from tianflow.config.loading import load_config
from tianflow.core.payloads import DrawPart, Grant, Holdings, Trajectory, Version
from tianflow.core.process_table import carries, processes
from tianflow.core.program import NODE_ROLES
from tianflow.errors import ConfigError, TianflowError
from tianflow.interfaces import LiveSettings
from tianflow.launchers import node as nodes
from tianflow.launchers.node import Membership, NodeProcess, RefusedNodeError
from tianflow.launchers.nodes import NodeLauncher, advertised
from tianflow.planning import placement
from tianflow.planning.probe import UndecidedError
from tianflow.planning.validation import require_valid
from tianflow.rundir.join_file import JoinFile

PATIENCE_S = 20.0
SMALL_LAYOUT = small_layout()
MARK = "TIANFLOW_TEST_NODE"


def process(path: Path, *, once: bool = False) -> NodeProcess:
    return NodeProcess(join_file=path, name="n", cores=1, once=once)


def end(work: Any, *, after_s: float = 0.0, made: NodeProcess | None = None) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            if made is not None:
                asyncio.get_running_loop().call_later(after_s, made.leave)
            await work

    asyncio.run(run())


def test_a_node_without_a_join_file_waits_and_leaves_when_it_is_asked_to(tmp_path: Path) -> None:
    made = process(tmp_path / "join.toml")
    end(made.run(), after_s=0.2, made=made)


def test_a_node_whose_head_does_not_answer_leaves_when_it_is_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "join.toml"
    JoinFile("r", "tcp://127.0.0.1:9", Keys.generate()).write(path)
    made = process(path)
    end(made.run(), after_s=0.2, made=made)


def test_a_node_that_takes_part_once_gives_up_a_head_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "JOIN_S", 0.1)
    monkeypatch.setattr(nodes, "PATIENCE_S", 0.2)
    path = tmp_path / "join.toml"
    JoinFile("r", "tcp://127.0.0.1:9", Keys.generate()).write(path)
    end(process(path, once=True).run())
    (record,) = {entry.getMessage(): entry for entry in caplog.records}.values()
    assert record.getMessage() == "the head cannot be reached"
    assert "does not accept connections" in record.__dict__["why"]


def test_a_join_file_of_another_start_of_the_run_is_refused_by_its_keys(tmp_path: Path) -> None:
    keys, other = Keys.generate(), Keys.generate()
    listener = TcpListener("tcp://127.0.0.1:*", keys=keys)
    path = tmp_path / "join.toml"
    stranger = replace(other, server_public=keys.server_public)
    JoinFile("r", listener.address, stranger).write(path)

    async def run() -> None:
        listener.serve(lambda *_: None, lambda: None)
        try:
            await process(path).run()
        finally:
            listener.close()

    with pytest.raises(RefusedNodeError, match="the keys do not match"):
        end(run())


def test_a_join_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "join.toml"
    JoinFile("r", "tcp://127.0.0.1:9", Keys.generate()).write(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read or change the keys"):
        end(process(path).run())


@pytest.mark.parametrize(
    ("text", "found"), [("0", {0}), ("0-1", {0, 1}), ("0,1", {0, 1}), (" 1 , 0-0 ", {0, 1})]
)
def test_cores_are_numbers_and_ranges(
    text: str, found: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert parse_cores(text) == found


@pytest.mark.parametrize("text", ["", "a", "2", "0-2", "1-", "-1", "0--1", "0;1", "1-0"])
def test_cores_that_do_not_exist_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ConfigError, match="are not cores of this machine; accepted: numbers from"):
        parse_cores(text)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://127.0.0.1:5", "127.0.0.1"),
        ("tcp://localhost:5", "localhost"),
        ("tcp://10.1.2.3:5", "10.1.2.3"),
        ("tcp://[fd00::1]:5", "[fd00::1]"),
    ],
)
def test_nodes_reach_the_address_at_which_the_head_listens(address: str, host: str) -> None:
    assert advertised(address) == host


def test_a_head_that_listens_everywhere_is_reached_by_an_address_of_its_own() -> None:
    assert advertised("tcp://0.0.0.0:5") not in ("0.0.0.0", "*", "")


def test_actors_on_nodes_have_a_host_each_and_no_cores_of_the_head() -> None:
    config = cartpole().model_copy(deep=True)
    actors = config.actors.model_copy(update={"count": 5})
    config = config.model_copy(update={"actors": actors})
    hosts = placement.build(config, NodeLauncher.capabilities).hosts
    elsewhere = [host for host in hosts if host.name.startswith("actors-")]
    assert len(elsewhere) == 5
    assert all(host.cores == () for host in elsewhere)


def test_doorbells_of_head_and_node_have_room_for_servers_and_hosts() -> None:
    central = SimpleNamespace(
        central=True,
        inference=SimpleNamespace(servers=2),
        actors=SimpleNamespace(hosts=None, count=9),
    )
    assert placement.bells_on_head(central) == 3  # type: ignore[arg-type]  # as far as it is read
    assert placement.bells_on_node(central) == 2 + placement.MOST_ASKING  # type: ignore[arg-type]
    assert placement.hosts_on_nodes(central) == 9  # type: ignore[arg-type]


def test_a_node_says_nothing_but_its_greeting_until_it_is_welcomed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway closes the connection of a stranger that says anything else. Over a link with a
    long round trip, the first signs of life would be due before the welcome.
    """
    monkeypatch.setattr(nodes, "BEAT_S", 0.01)
    path = tmp_path / "join.toml"
    beats = 20

    async def run() -> None:
        listener, heard = TcpListener("tcp://127.0.0.1:*"), asyncio.Queue[tuple[Peer, str]]()
        listener.serve(lambda peer, message: heard.put_nowait((peer, message.kind)), lambda: None)
        JoinFile("r", listener.address, None).write(path)
        member = Membership(join=JoinFile.read(path), name="n", cores=1, before="")
        task = asyncio.create_task(member.run())

        async def hear(kind: str) -> Peer:
            said = ""
            while said != kind:
                peer, said = await heard.get()
            return peer

        async with asyncio.timeout(PATIENCE_S):
            peer = await hear("hello")
            await asyncio.sleep(beats * nodes.BEAT_S)  # that nothing comes is the experiment
            assert heard.empty()
            listener.send(peer, encode("welcome", 0, ["n", 0, True, 5.0]))
            await hear("beat")
            member.leave()
            await hear("up")
            listener.send(peer, encode("ended", 0, None))
            assert await task == "ended"
        listener.close()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["ended", "lost"])
def test_a_node_in_a_job_stays_until_its_run_is_over_and_joins_no_other(
    tmp_path: Path, how: str
) -> None:
    """A batch system stops all machines at once. The head has still to save what shards hold."""
    path = tmp_path / "join.toml"

    async def run() -> None:
        listener, heard = TcpListener("tcp://127.0.0.1:*"), asyncio.Queue[tuple[Peer, str]]()
        listener.serve(lambda peer, message: heard.put_nowait((peer, message.kind)), lambda: None)
        JoinFile("r", listener.address, None).write(path)
        made = process(path)
        node = asyncio.create_task(made.run())
        async with asyncio.timeout(PATIENCE_S):
            peer, _ = await heard.get()
            listener.send(peer, encode("welcome", 0, ["n", 0, True, 5.0]))
            await heard.get()
            made.end_with_run()
            for _ in range(3):
                assert "beat" == (await heard.get())[1]
            assert not node.done()
            listener.send(peer, encode(how, 0, None))
            await node
        listener.close()

    asyncio.run(run())


def test_a_node_in_a_job_without_a_run_leaves_at_once(tmp_path: Path) -> None:
    made = process(tmp_path / "join.toml")

    async def run() -> None:
        node = asyncio.create_task(made.run())
        await asyncio.sleep(0)
        made.end_with_run()
        async with asyncio.timeout(PATIENCE_S):
            await node

    asyncio.run(run())


def test_an_environment_that_hangs_is_not_waited_for_by_a_node_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that makes it ends with the membership, and a node that leaves ends at once."""
    beginning, ended = threading.Event(), threading.Event()

    def probe(_config: object, *, stop: int, **_: object) -> None:
        beginning.set()
        assert select.select([stop], [], [], PATIENCE_S)[0]
        ended.set()
        raise UndecidedError("stopped")

    monkeypatch.setattr(nodes, "probe", probe)
    path = tmp_path / "join.toml"
    JoinFile("r", "tcp://127.0.0.1:9", None).write(path)
    settings = SimpleNamespace(live=SimpleNamespace(config=cartpole()))

    async def run() -> None:
        member = Membership(join=JoinFile.read(path), name="n", cores=1, before="")
        running = asyncio.create_task(member.run())
        member._start(member._prepare(cast("Any", SimpleNamespace(settings=settings, spec=None))))
        assert await asyncio.to_thread(beginning.wait, PATIENCE_S)
        member.leave()
        assert "left" == await running
        assert ended.is_set()

    asyncio.run(run())


def test_a_node_goes_on_while_the_settings_of_the_run_import_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be lost if its loop waited. Later messages wait for the first one."""
    imported = threading.Event()

    def unpack(body: bytes) -> list[object]:
        if body == b"first":
            assert imported.wait(PATIENCE_S)
        return [body]

    monkeypatch.setattr(nodes, "unpack", unpack)
    path = tmp_path / "join.toml"
    JoinFile("r", "tcp://127.0.0.1:9", None).write(path)

    async def run() -> None:
        member = Membership(join=JoinFile.read(path), name="n", cores=1, before="")
        handled: list[bytes] = []
        member._handlers = cast("Any", {bytes: handled.append})
        for body in (b"first", b"second"):
            member._take(body)
        await asyncio.sleep(0.01)
        assert handled == []
        member._take(b"third")
        imported.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*member._tasks)
        member._take(b"fourth")
        assert handled == [b"first", b"second", b"third", b"fourth"]
        member._context.destroy(linger=0)

    asyncio.run(run())


async def test_short_data_of_a_turn_leave_in_one_message_and_large_data_at_once() -> None:
    member = Membership(join=JoinFile("r", "tcp://127.0.0.1:9", None), name="n", cores=1, before="")
    posted: list[tuple[int, int]] = []
    member._stream.post = lambda item: posted.append((len(unpacked_all(item[0])), len(item[1])))  # type: ignore[method-assign]

    def data(size: int) -> list[Any]:
        return [(1, 2, {"obs": np.zeros(size, np.uint8), "reward": np.zeros(2, np.float32)})]

    member._post(NodeReady(), data(1000))
    member._post(NodeReady(), data(1000))
    member._post(NodeReady())
    assert [] == posted
    await asyncio.sleep(0)
    assert [(3, 2)] == posted
    member._post(NodeReady())
    member._post(NodeReady(), data(nodes.TURN_BYTES))
    assert [(3, 2), (2, 1)] == posted
    member._post(NodeReady(), data(1000))
    member._post(NodeReady(), data(nodes.TURN_BYTES))
    assert [(3, 2), (2, 1), (1, 1), (1, 1)] == posted
    posted.clear()
    for _ in range(nodes.TURN_SLOTS + 1):
        member._post(NodeReady(), data(10))
    assert [(nodes.TURN_SLOTS, nodes.TURN_SLOTS)] == posted
    await asyncio.sleep(0)
    assert [1, nodes.TURN_SLOTS] == sorted(slots for _, slots in posted)
    member._context.destroy(linger=0)


def test_hosts_are_not_read_while_too_many_messages_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a node does not grow while the head does not acknowledge."""
    monkeypatch.setattr(nodes, "MOST_WAITING", 4)
    path = tmp_path / "join.toml"
    JoinFile("r", "tcp://127.0.0.1:9", None).write(path)

    async def run() -> None:
        member = Membership(join=JoinFile.read(path), name="n", cores=1, before="")
        reads: list[bool] = []
        member._hosts[1] = cast("Any", SimpleNamespace(read=reads.append))
        for _ in range(6):
            member._post(NodeReady())
            member._end_turn()
        assert reads == [False]
        member._acknowledge(4)
        assert reads == [False]
        member._acknowledge(5)
        assert reads == [False, True]
        member._context.destroy(linger=0)

    asyncio.run(run())


# Trajectories for shards on other nodes
# --------------------------------------------------------------------------------------------------


class FakeSender:
    """Links to other nodes that do nothing by themselves."""

    def __init__(self, *places: str) -> None:
        self.places = set(places)
        self.sent: list[tuple[str, tuple[int, int, int], Any]] = []
        self.done: list[Any] = []

    def reaches(self, place: str) -> bool:
        return place in self.places

    def send(self, place: str, trajectory: tuple[int, int, int], arrays: Any, done: Any) -> None:
        self.sent.append((place, trajectory, arrays))
        self.done.append(done)

    def close(self) -> None: ...


class Relaying:
    """A node in a run, as far as it relays messages of one host. Nothing leaves it."""

    def __init__(self, *places: str) -> None:
        join = JoinFile("r", "tcp://127.0.0.1:9", None)
        self.member = Membership(join=join, name="n", cores=1, before="")
        self.slots, draws = heap_arena(SMALL_LAYOUT, 4), heap_arena(DRAWS, 2)
        self.slots.slots, draws.slots, self.draws = 4, 2, draws
        self.sender, self.posted = FakeSender(*places), list[Any]()
        self.host = nodes._Host(1)
        member = cast("Any", self.member)
        member._contents = SlotContents(self.slots, draws, "plain")
        member._sender, member._hosts = self.sender, {1: self.host}
        member._post = lambda *found: self.posted.append(found)
        self.relays: list[Any] = []
        self.host.link = cast("Any", SimpleNamespace(send=self.relays.append))

    def granted(self, ticket: int, slot: int, place: str) -> None:
        grant = Grant(ticket, slot, Version(-1, -1), place=place)
        self.member._to_host(unpacked(ToHost(1, MESSAGES.encode(Granted("actor-0", 0, grant)))))

    def says(self, message: object) -> None:
        """The host sends ``message``."""
        values = msgpack.unpackb(msgpack.packb(MESSAGES.encode(message)), strict_map_key=False)
        self.member._from_host(self.host, values)

    def commits(self, ticket: int, slot: int) -> None:
        self.says(Commit("actor-0", Trajectory(ticket, slot, 2, 4, Version(0, 1)), ()))

    def messages(self) -> list[Any]:
        """What was posted: name of the message and place of a commit, with the number of slots
        whose data go with it.
        """
        found = []
        for message, trajectories, columns in self.posted:
            name, fields = message.message if isinstance(message, FromHost) else ("", [])
            where = fields[3] if name == "Commit" else ""
            carried = len(trajectories), len(columns)
            found.append((name or type(message).__name__, where, *carried))
        return found


def unpacked(message: object) -> Any:
    return unpacked_all(pack([message]))[0]


def unpacked_all(body: bytes) -> list[Any]:
    return node_messages.unpack(body)


@contextlib.asynccontextmanager
async def relaying(*places: str) -> AsyncIterator[Relaying]:
    world = Relaying(*places)
    yield world
    world.member._context.destroy(linger=0)


async def test_data_for_another_node_go_there_before_the_head_hears_of_them() -> None:
    async with relaying("b") as world:
        world.granted(7, 2, "b")
        world.slots.views(2)["reward"][:2] = 3.0
        world.commits(7, 2)
        world.says(RequestGrants("actor-0", 0, 1))
        assert [] == world.posted
        ((place, trajectory, arrays),) = world.sender.sent
        assert ("b", (7, 2, 2)) == (place, trajectory)
        assert 3.0 == arrays["reward"].max()
        world.sender.done[0](True)
        assert [("Commit", "b", 0, 0), ("RequestGrants", "", 0, 0)] == world.messages()
        world.says(RequestGrants("actor-0", 0, 1))
        assert 3 == len(world.posted)


async def test_data_that_do_not_arrive_there_go_to_the_head() -> None:
    async with relaying("b") as world:
        world.granted(7, 2, "b")
        world.commits(7, 2)
        world.sender.done[0](False)
        assert [("Commit", "", 1, 0)] == world.messages()


async def test_messages_of_a_host_leave_in_order_whatever_arrives_first() -> None:
    async with relaying("b") as world:
        for ticket, slot in ((7, 2), (8, 3)):
            world.granted(ticket, slot, "b")
            world.commits(ticket, slot)
        world.member._relay(world.host, nodes._Waiting(HostGone(1, 0)))
        world.sender.done[1](True)
        assert [] == world.posted
        world.sender.done[0](False)
        assert [("Commit", "", 1, 0), ("Commit", "b", 0, 0), ("HostGone", "", 0, 0)] == (
            world.messages()
        )


async def test_data_for_a_place_that_is_not_reached_go_to_the_head_at_once() -> None:
    async with relaying() as world:
        world.granted(7, 2, "b")
        world.commits(7, 2)
        assert [("Commit", "", 1, 0)] == world.messages()


async def test_data_for_a_shard_of_the_same_node_stay_where_they_are() -> None:
    async with relaying() as world:
        cast("Any", world.member)._listener = object()
        world.granted(7, 2, world.member.incarnation)
        world.commits(7, 2)
        assert [("Commit", world.member.incarnation, 0, 0)] == world.messages()


async def test_the_place_is_that_of_the_grant() -> None:
    """A slot may have been granted for another place before."""
    async with relaying("b") as world:
        world.granted(7, 2, "b")
        world.granted(8, 2, "")
        world.commits(8, 2)
        world.commits(9, 3)
        assert [("Commit", "", 1, 0)] * 2 == world.messages()
        assert [] == world.sender.sent


async def test_the_columns_that_a_shard_has_drawn_go_with_its_answer() -> None:
    async with relaying() as world:
        for draw, slot in ((4, 1), (5, 0)):
            request = DrawPart(draw, slot, 2, 3, 0)
            world.member._to_host(unpacked(ToHost(1, MESSAGES.encode(request))))
        world.draws.views(1)["version"][:] = np.arange(DRAWN)
        world.says(Drawn(5, 0, Holdings()))
        world.says(Drawn(4, 3, Holdings()))
        assert [("Drawn", "", 0, 0), ("Drawn", "", 0, 1)] == world.messages()
        ((slot, first, items, arrays),) = world.posted[1][2]
        assert (1, 2, 3, [2, 3, 4]) == (slot, first, items, arrays["version"].tolist())
        assert {} == world.host.drawing
        assert ["DrawPart", "DrawPart"] == [name for name, _ in world.relays]


def test_a_node_sees_the_run_if_the_join_file_there_is_its_own(tmp_path: Path) -> None:
    keys = Keys.generate()
    JoinFile("r", "tcp://10.0.0.1:9", keys).write(tmp_path / "join.toml")
    own = JoinFile.read(tmp_path / "join.toml")
    assert nodes.sees_run(tmp_path, replace(own, address="tcp://127.0.0.1:8"))
    assert not nodes.sees_run(tmp_path, replace(own, run="q"))
    assert not nodes.sees_run(tmp_path, replace(own, keys=None))
    assert not nodes.sees_run(tmp_path, replace(own, keys=Keys.generate()))
    assert not nodes.sees_run(tmp_path / "elsewhere", own)


def test_a_node_listens_at_its_address_on_the_way_to_the_head() -> None:
    assert "127.0.0.1" == nodes.own_host("tcp://127.0.0.1:9")
    assert "127.0.0.1" == nodes.own_host("tcp://localhost:9")
    with pytest.raises(TianflowError, match="there is no route to tcp://no-such-host.invalid:9"):
        nodes.own_host("tcp://no-such-host.invalid:9")


@pytest.mark.parametrize(
    ("text", "found"),
    [("actors", ["actors"]), ("replay,actors", ["actors", "replay"]), (" replay ", ["replay"])],
)
def test_roles_are_names_with_commas(text: str, found: list[str]) -> None:
    assert found == parse_roles(text)


@pytest.mark.parametrize("text", ["", "learner", "actors,", "actors;replay"])
def test_roles_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="are not roles of a node; accepted: actors, replay, or"):
        parse_roles(text)


def children() -> list[int]:
    """Processes that a node of this test has started."""
    return [
        entry.pid
        for entry in processes()
        if entry.pid != os.getpid() and carries(entry.pid, MARK, str(os.getpid()))
    ]


@pytest.mark.e2e
def test_a_node_leaves_at_once_while_the_environment_that_it_tries_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before ``env.start_timeout_s``, and without a process of that environment."""
    monkeypatch.setenv(MARK, str(os.getpid()))
    path = tmp_path / "join.toml"
    JoinFile("r", "tcp://127.0.0.1:9", None).write(path)
    environment = {"id": "tests.support.failing_environments:Hanging"}
    config = load_config({"env": environment, "algorithm": {"name": "ppo"}})
    message = SimpleNamespace(settings=SimpleNamespace(live=SimpleNamespace(config=config)))

    async def run() -> None:
        member = Membership(join=JoinFile.read(path), name="n", cores=1, before="")
        running = asyncio.create_task(member.run())
        member._start(member._prepare(cast("Any", message)))
        async with asyncio.timeout(PATIENCE_S):
            while not await asyncio.to_thread(children):  # noqa: ASYNC110 - a process tells nobody
                await asyncio.sleep(0.05)
            member.leave()
            assert "left" == await running

    asyncio.run(run())  # waits for the threads, too
    assert [] == children()


# A head that sends what no head sends
# --------------------------------------------------------------------------------------------------

LAYOUT = small_layout(request_noise=2)
FLAT = 64
ASKED = 9 * MOST_PLACES + 1


class FakeForker:
    """Hosts that never start to work, and never end."""

    def __init__(self, **_: object) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def spawn(self, *_: object) -> Any:
        return SimpleNamespace(pid=7, kill=lambda: None, wait=asyncio.Event().wait)


class Head:
    """A listener to which one node after the other connects, and that is not honest."""

    def __init__(self) -> None:
        config = cartpole()
        spec = require_valid(config).spec
        assert spec is not None
        settings = PutSettings.of(LiveSettings(config, 1, paused=False, hold_learner=False), 0)
        self.opened = OpenNode("r", settings, spec, LAYOUT, 8, 4, 4, 2, DRAWS, 2)
        self.listener = TcpListener("tcp://127.0.0.1:*")
        self.listener.serve(self._receive, lambda: None)
        self.peers: list[Peer] = []
        self.errors: list[dict[str, Any]] = []
        self.outcomes: dict[str, int] = {}
        self.sent, self.echo = 0, 0.0
        self.roles: Sequence[str] = NODE_ROLES
        """Of the nodes."""
        self.heard: list[Any] = []
        """Messages of nodes."""
        self.kinds: set[str] = set()
        asyncio.get_running_loop().set_exception_handler(lambda _, found: self.errors.append(found))

    def _receive(self, peer: Peer, message: Message) -> None:
        if message.kind == "hello":
            self.peers.append(peer)
        elif message.kind == "up":
            self.heard += node_messages.unpack(message.body[1].tobytes())
        self.kinds.add(message.kind)
        if message.kind == "beat":
            self.echo = max(self.echo, float(message.body[2]))

    def send(self, frames: Frames) -> None:
        self.sent += 1
        self.listener.send(self.peers[-1], frames)

    def down(self, number: int, *found: object) -> Frames:
        return encoded("down", number, [0, np.frombuffer(pack(found), np.uint8), [], []])

    async def attack(self, frames: Sequence[Frames], *, opened: bool) -> str:
        """How the membership of a node ends to which ``frames`` are sent: "left", if it stayed."""
        joined, before = len(self.peers), len(self.errors)
        member = Membership(
            join=JoinFile("r", self.listener.address, None),
            name="n",
            cores=1,
            before="",
            roles=self.roles,
        )
        running = asyncio.create_task(member.run())
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: len(self.peers) > joined)
            if opened:
                self.send(encoded("welcome", 0, ["n", 0, True, 15.0]))
                self.send(self.down(1, self.opened))
                await until(lambda: member._ready or running.done())
            for message in frames:
                self.send(message)
            mark = float(self.sent) * 1e6  # above all that is sent otherwise
            self.send(encoded("beat", 0, [mark]))
            # It has read all, or has ended, or has connected again after bytes that mean nothing.
            await until(
                lambda: (
                    running.done()
                    or (mark in (member._echo, self.echo) and not member._first)
                    or len(self.peers) > joined + 1
                )
            )
            member._end("left")
            try:
                how = await running
            except RefusedNodeError:
                how = "refused"
        assert len(self.errors) == before, self.errors
        self.outcomes[how] = self.outcomes.get(how, 0) + 1
        return how


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - of another task, not of an event
        await asyncio.sleep(0.001)


@pytest.fixture
def safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forked, and little memory is there."""
    spec = require_valid(cartpole()).spec
    answer = SimpleNamespace(problems=(), spec=spec)
    monkeypatch.setattr(nodes, "probe", lambda *_, **__: answer)
    monkeypatch.setattr(nodes, "HostForker", FakeForker)
    monkeypatch.setattr(nodes, "usable_memory", lambda: 2**20)
    monkeypatch.setattr(nodes, "RECONNECT_S", 0.001)


def meet(scenario: Any) -> None:
    async def run() -> None:
        head = Head()
        try:
            await scenario(head)
        finally:
            head.listener.close()

    asyncio.run(run())


NOTHING = np.frombuffer(pack([]), np.uint8)
PRIORITIES = {"priority": np.ones(1, np.float32)}
MALFORMED: dict[str, Any] = {
    "an unknown kind": ("x", None),
    "a welcome without a lease": ("welcome", ["n", 0, True, float("nan")]),
    "an acknowledgement of what was not sent": ("welcome", ["n", 99, True, 15.0]),
    "a message of numbers": ("down", [0, 3]),
    "bytes without a message": ("down", [0, np.frombuffer(b"\xc1", np.uint8), [], []]),
    "weights that are larger than they are": ("weights", [0, 1, 2**40, np.zeros(64, np.uint8)]),
    "weights without bytes": ("weights", [0, 1, 64, None]),
    "weights of another type": ("weights", [0, 1, 64, np.zeros(16, np.float32)]),
    "an answer without fields": ("answers", [[1, ASKED, 0, 7, {}]]),
    "an answer to no slot": ("answers", [[99, ASKED, 0, 7, {}]]),
    "an answer to what is not a slot": ("answers", [[-1, ASKED, 0, 7, {}]]),
    "answers that are numbers": ("answers", [3]),
    "a beat of text": ("beat", ["x"]),
    "a trajectory for no slot": ("down", [0, NOTHING, [[1, 9, 2, {}]], []]),
    "a trajectory of no ticket": ("down", [0, NOTHING, [[None, 1, 2, {}]], []]),
    "a trajectory without fields": ("down", [0, NOTHING, [[1, 1, 2, {}]], []]),
    "a trajectory that is a number": ("down", [0, NOTHING, [3], []]),
    "priorities for no slot": ("down", [0, NOTHING, [], [[2, 0, 1, {}]]]),
    "priorities without an array": ("down", [0, NOTHING, [], [[1, 0, 1, {}]]]),
    "priorities of no columns": ("down", [0, NOTHING, [], [[1, DRAWN, 1, PRIORITIES]]]),
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.usefixtures("safe")
def test_a_malformed_message_of_the_head_ends_the_membership_and_not_the_node(
    sent: tuple[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(head: Head) -> None:
        assert await head.attack([encoded(sent[0], 2, sent[1])], opened=True) == "lost"

    meet(scenario)
    assert "a message of the head is refused" in caplog.text


@pytest.mark.parametrize(
    "message",
    [
        SetSlots(3),
        SetSlots(9),
        RequestCut(4, 9),
        RequestCut(-1, 9),
        ToHost(1, 3),
        ToHost(1, ["Granted", ["actor-0", 0, [9, 99, [0, 0]]]]),
        ToHost(1, ["Granted", ["actor-0", 0, ["x", 1, [0, 0]]]]),
        SetPlaces({"b": DirectAddress("b", "10.0.0.1", "")}),
        SetPlaces({"b": DirectAddress("b", "tcp://10.0.0.1:5", "0" * 40)}),
    ],
)
@pytest.mark.usefixtures("safe")
def test_an_order_that_does_not_fit_ends_the_membership_and_not_the_node(message: object) -> None:
    async def scenario(head: Head) -> None:
        assert await head.attack([head.down(2, message)], opened=True) == "lost"

    meet(scenario)


@pytest.mark.parametrize(
    "message", [SetSlots(5), RequestCut(1, 9), ForkHost(1, "a", b"", Version(-1, -1))]
)
@pytest.mark.usefixtures("safe")
def test_an_order_before_the_run_is_open_ends_the_membership(message: object) -> None:
    async def scenario(head: Head) -> None:
        assert await head.attack([head.down(1, message)], opened=False) == "lost"

    meet(scenario)


@pytest.mark.usefixtures("safe")
def test_a_second_opening_and_one_with_too_many_doorbells_are_refused() -> None:
    async def scenario(head: Head) -> None:
        assert await head.attack([head.down(2, head.opened)], opened=True) == "lost"
        many = replace(head.opened, bells=10**9)
        assert await head.attack([head.down(1, many)], opened=False) == "lost"

    meet(scenario)


@pytest.mark.usefixtures("safe")
def test_a_node_that_is_too_small_for_the_slots_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "usable_memory", lambda: 100)

    async def scenario(head: Head) -> None:
        assert await head.attack([], opened=True) == "refused"

    meet(scenario)


@pytest.mark.usefixtures("safe")
def test_honest_messages_keep_a_node() -> None:
    async def scenario(head: Head) -> None:
        ups = head.down(2, SetSlots(5), ForkHost(1, "actors-0", b"", Version(-1, -1)))
        assert await head.attack([ups, *honest(head)[-1:]], opened=True) == "left"

    def honest(head: Head) -> list[Frames]:
        return [encoded(*message) for message in honest_messages(head, orders=False)]

    meet(scenario)


def honest_messages(head: Head, *, orders: bool = True) -> list[tuple[str, int, object]]:
    """What a head sends after the opening of the run."""
    slots = SharedTransport(layout=LAYOUT, capacity=2)
    slots.add_slots(2)
    views = slots.arena.request_views(1)
    answer = {name: views[name].copy() for name in answer_fields(views)}
    slots.close()
    found: list[tuple[str, int, object]] = [
        ("weights", 0, [0, 1, FLAT, np.zeros(FLAT, np.uint8)]),
        ("beat", 0, [1.5]),
        ("answers", 0, [[1, ASKED, 0, 7, answer]]),
    ]
    if orders:
        found += [
            ("welcome", 0, ["n", 0, True, 15.0]),
            ("refused", 0, ["its python is older", False]),
            ("lost", 0, None),
            ("ended", 0, None),
            ("down", 2, [0, np.frombuffer(pack([SetSlots(5)]), np.uint8), [], []]),
            ("down", 2, [0, NOTHING, [a_trajectory()], [[1, 0, 1, PRIORITIES]]]),
        ]
    return found


def a_trajectory() -> list[Any]:
    """What the head sends of a trajectory for a shard here."""
    views = heap_arena(LAYOUT, 1).views(0)
    return [9, 2, 3, Attachments(LAYOUT).of(views, 3)]


@pytest.mark.usefixtures("safe")
def test_data_of_slots_that_the_head_sends_lie_there() -> None:
    async def scenario(head: Head) -> None:
        ups = encoded("down", 2, [0, NOTHING, [a_trajectory()], [[1, 0, 1, PRIORITIES]]])
        assert await head.attack([ups], opened=True) == "left"

    meet(scenario)


@pytest.mark.usefixtures("safe")
def test_a_node_that_may_get_shards_says_where_it_listens() -> None:
    async def scenario(head: Head) -> None:
        assert await head.attack([], opened=True) == "left"
        (ready,) = [found for found in head.heard if isinstance(found, NodeReady)]
        assert ready.address.startswith("tcp://127.0.0.1:")
        head.opened, head.heard = replace(head.opened, draws=None, draw_slots=0), []
        assert await head.attack([], opened=True) == "left"
        assert [NodeReady()] == [found for found in head.heard if isinstance(found, NodeReady)]

    meet(scenario)


@pytest.mark.usefixtures("safe")
def test_a_node_of_shards_that_are_saved_has_to_see_the_run(tmp_path: Path) -> None:
    """It is refused otherwise, and says which settings would be accepted."""

    async def scenario(head: Head) -> None:
        head.opened = replace(head.opened, directory=str(tmp_path))
        assert await head.attack([], opened=True) == "refused"
        (unable,) = [found for found in head.heard if isinstance(found, NodeUnable)]
        assert "checkpoint.replay = true" in unable.reason
        assert str(tmp_path) in unable.reason
        for accepted in (
            "a directory of runs that all machines see",
            "checkpoint.replay = false",
            'cluster.replay = "head"',
            "--roles actors",
        ):
            assert accepted in unable.reason
        JoinFile("r", head.listener.address, None).write(tmp_path / "join.toml")
        assert await head.attack([], opened=True) == "left"

    meet(scenario)


@pytest.mark.parametrize("roles", [("replay",), ("actors", "replay")])
@pytest.mark.usefixtures("safe")
def test_a_node_without_actors_wants_no_weights(roles: Sequence[str]) -> None:
    async def scenario(head: Head) -> None:
        head.roles = roles
        assert await head.attack([], opened=True) == "left"
        assert ("actors" in roles) == ("stored" in head.kinds)

    meet(scenario)


@st.composite
def orders(draw: st.DrawFn, head: Head) -> Frames:
    """One numbered message of the head, its contents nearly honest."""
    granted = MESSAGES.encode(Granted("actor-0", 0, Grant(9, 2, Version(0, 0))))
    sent = draw(
        st.sampled_from(
            [
                SetSlots(5),
                RequestCut(1, 9),
                ForkHost(1, "actors-0", b"payload", Version(-1, -1)),
                KillHost(1),
                ToHost(1, granted),
                ToHost(1, MESSAGES.encode(Stop())),
                ToHost(1, MESSAGES.encode(DrawPart(1, 1, 2, 3, 0))),
                SetPlaces({"b": DirectAddress("b", "tcp://127.0.0.1:9", "")}),
                CloseNode(),
                head.opened,
            ]
        )
    )
    values = draw(altered(NODE_MESSAGES.encode(sent)))
    try:
        body = msgpack.packb(values) + draw(st.just(b"") | st.binary(max_size=3))
    except (TypeError, ValueError, OverflowError):  # no peer could send it
        body = b""
    number = draw(st.sampled_from([2, 2, 3, 1]))
    return encoded("down", number, [0, np.frombuffer(body, np.uint8), [], []])


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("safe")
def test_no_frame_of_a_head_ends_a_node(caplog: pytest.LogCaptureFixture) -> None:
    """Each is handled, or ends the membership or the connection. Nothing is left of it."""
    caplog.set_level(logging.CRITICAL + 1, logger="tianflow")  # records would be retained
    with asyncio.Runner() as runner:
        head = runner.run(a_head())
        near = messages(honest_messages(head))

        @fuzz
        @given(st.lists(near | orders(head), min_size=1, max_size=A_TURN), st.booleans())
        def attack(frames: list[Frames], opened: bool) -> None:
            runner.run(head.attack(frames, opened=opened))

        runner.run(head.attack([], opened=True))
        before = memory(os.getpid()), descriptors(os.getpid())
        attack()
        grown = memory(os.getpid()) - before[0]
        runner.run(head.attack([], opened=True))
        runner.run(closed(before[1] + 6))
        head.listener.close()
        assert {"left", "lost"} <= head.outcomes.keys() <= {"left", "lost", "refused", "ended"}
        assert grown < GROWTH
        print(  # noqa: T201 - the report of a campaign
            f"{head.sent} messages, memberships: {head.outcomes}, {grown / 2**20:.1f} MiB"
        )


async def closed(few: int) -> None:
    """Wait until ``few`` descriptors are left: ZeroMQ closes its own in a thread."""

    def look() -> bool:
        gc.collect()  # as a node does
        return descriptors(os.getpid()) <= few

    async with asyncio.timeout(PATIENCE_S):
        await until(look)


async def a_head() -> Head:
    return Head()


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.usefixtures("safe")
def test_a_bomb_of_the_head_costs_a_node_its_connection_and_no_memory(bomb: Frames) -> None:
    async def scenario(head: Head) -> None:
        before = memory(os.getpid())
        assert await head.attack([bomb], opened=True) == "left"
        assert memory(os.getpid()) - before < 48 * 1024**2

    meet(scenario)
