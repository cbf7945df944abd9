"""The nodes of a run, as the coordinator sees them: who is admitted, where hosts go, and what comes
back when a node is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.hostile_frames import A_TURN, TIMEOUT_S, altered, fuzz
from tests.support.replay_exchange_worlds import DRAWS
from tests.support.settings import SMALL, cartpole
from tests.support.worlds import small_layout
from tianflow import __version__
from tianflow.channels.latest import LatestCell
from tianflow.channels.messages import (
    MESSAGES,
    AdmitNode,
    ConnectionsCounted,
    ForgetNode,
    Granted,
    Heartbeat,
    NodeArrived,
    NodeDisconnected,
    NodeSent,
    NodeTraffic,
    RefuseNode,
    SendToNode,
    SendWeights,
    Stop,
)
from tianflow.channels.node_messages import (
    NODE_MESSAGES,
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
from tianflow.channels.shm import SharedTransport
from tianflow.config.loading import load_config
from tianflow.core.payloads import (
    NO_VERSION,
    EnvironmentSpec,
    Grant,
    Prioritise,
    StoreTrajectory,
    Version,
)
from tianflow.core.program import (
    MOVED,
    NODE_LEFT,
    NODE_LOST,
    NODE_ROLES,
    ComponentSpec,
    HostPlan,
    HostSpec,
)
from tianflow.errors import RunError
from tianflow.interfaces import LiveSettings, MessageLink, RunView
from tianflow.launchers import hub as hubs
from tianflow.launchers.hub import NodeHub, NodeSeat, python_version
from tianflow.launchers.nodes import NodeHost
from tianflow.planning.validation import require_valid

T = TypeVar("T")
LEASE_S = 15.0


class FakeNode:
    """The other end of a node's stream, behind a gateway that only relays."""

    def __init__(
        self,
        world: World,
        name: str,
        *,
        cores: int = 1,
        incarnation: str = "",
        roles: Sequence[str] = NODE_ROLES,
    ) -> None:
        self.world, self.name, self.cores, self.roles = world, name, cores, roles
        self.incarnation = incarnation or f"{name}-1"
        self.connection = name.encode()
        self.received, self.sent = 0, 0
        self.messages: list[Any] = []
        self.carried: list[Any] = []
        """Slots whose data came with messages."""

    def hello(self, **changes: Any) -> None:
        hello = {
            "protocol": PROTOCOL,
            "run": "r",
            "tianflow": __version__,
            "python": python_version(),
            "name": self.name,
            "incarnation": self.incarnation,
            "before": "",
            "received": self.received,
            "cores": self.cores,
            "roles": list(self.roles),
            **changes,
        }
        self.world.hub.handle(NodeArrived(self.connection, hello))

    async def joins(self) -> FakeNode:
        self.hello()
        await self.world.turn()
        self.says(NodeReady())
        return self

    def says(self, *messages: object, number: int | None = None) -> None:
        self.sent = self.sent + 1 if number is None else number
        self.world.hub.handle(NodeSent(self.name, self.sent, self.received, pack(messages)))

    def acknowledges(self) -> None:
        self.world.hub.handle(NodeSent(self.name, 0, self.received, b""))

    def hears(self, message: SendToNode) -> None:
        if message.number == self.received + 1:
            self.received = message.number
            self.messages += unpack(message.body)
            self.carried += [part for part in (message.store, message.prioritise) if part]

    def of(self, kind: type[T]) -> list[T]:
        return [message for message in self.messages if isinstance(message, kind)]


class World:
    """A hub, its gateway, and a run as far as the hub uses it."""

    def __init__(self, *, expect: int = 1, replay: str = "", keep_replay: bool = False) -> None:
        """``replay``: with replay shards there (``cluster.replay``)."""
        config = cartpole()
        if replay:
            sections = {
                "algorithm": {"name": "dqn"},
                "cluster": {"replay": replay},
                "checkpoint": {"replay": keep_replay},
            }
            config = load_config({**SMALL, **sections})
        spec = require_valid(config).spec
        assert spec is not None
        draws = DRAWS if replay else None
        self.slots = SharedTransport(layout=small_layout(), capacity=8, draws=draws, draw_slots=2)
        self.slots.add_slots(4)
        self.late = set[str]()
        self.ledger = SimpleNamespace(
            published=Version(0, 0), lateness=SimpleNamespace(late=self.late)
        )
        self.settled: list[Callable[[], None]] = []
        self.run = SimpleNamespace(
            id="r",
            settings=LatestCell(LiveSettings(config, 1, paused=False, hold_learner=False), 0),
            exchange=SimpleNamespace(ledger=self.ledger, on_settled=self.settled.append),
            spec=cast("EnvironmentSpec", spec),
            directory=Path("/runs/r"),
        )
        self.hub = NodeHub(
            run=cast("RunView", self.run), slots=self.slots, expect=expect, lease_s=LEASE_S
        )
        self.nodes: dict[str, FakeNode] = {}
        self.sent: list[Any] = []
        self.open()

    def open(self) -> None:
        self.hub.open(cast("MessageLink", SimpleNamespace(send=self.to_gateway)))

    def to_gateway(self, message: object) -> None:
        self.sent.append(message)
        if isinstance(message, SendToNode) and message.name in self.nodes:
            self.nodes[message.name].hears(message)

    def node(self, name: str, **properties: Any) -> FakeNode:
        self.nodes[name] = FakeNode(self, name, **properties)
        return self.nodes[name]

    async def turn(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    def of(self, kind: type[T]) -> list[T]:
        return [message for message in self.sent if isinstance(message, kind)]

    async def starts(self, host: str) -> tuple[NodeSeat, asyncio.Task[Any]]:
        """A host that is being started, on the node that the hub picks."""
        placed = await (self.hub.place_shard if "replay" in host else self.hub.place)(host)
        assert placed is not None
        seat = placed
        starting = asyncio.create_task(seat.start(host, b"payload", ()))
        await self.turn()
        return seat, starting


def play(scenario: Callable[[World], Coroutine[Any, Any, None]], **arguments: Any) -> None:
    async def run() -> None:
        world = World(**arguments)
        try:
            async with asyncio.timeout(20.0):
                await scenario(world)
        finally:
            world.slots.close()

    asyncio.run(run())


# Joining
# --------------------------------------------------------------------------------------------------


def test_a_node_gets_what_it_needs_first() -> None:
    async def scenario(world: World) -> None:
        node = world.node("n", cores=3)
        node.hello()
        await world.turn()
        assert world.of(AdmitNode) == [AdmitNode(b"n", "n", 0, True, LEASE_S)]
        (opened,) = node.of(OpenNode)
        assert (opened.run, opened.capacity, opened.slots) == ("r", 8, 4)
        assert opened.layout == small_layout()
        assert opened.spec == world.run.spec
        assert world.hub.statistics()["n"].cores == 3
        assert not world.hub.statistics()["n"].ready
        node.says(NodeReady())
        assert world.hub.statistics()["n"].ready

    play(scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "other"}, "its run is 'other', and the run of the head is 'r'"),
        ({"tianflow": "0.0.1"}, "its tianflow is '0.0.1'"),
        ({"python": "2.7"}, "its python is '2.7'"),
        ({"protocol": 99}, "its protocol is 99"),
        ({"cores": 0}, "it offers 0 cores; at least 1 is needed"),
        ({"cores": "4"}, "its first message is not complete: '4' is not of type int"),
        ({"name": 3}, "its first message is not complete: 3 is not of type str"),
        ({"name": ""}, "'' is not a name of a node"),
        ({"name": "a\x1b[2J"}, "'a\\x1b[2J' is not a name of a node"),
        ({"name": "a" * 65}, "is not a name of a node"),
        ({"incarnation": ""}, "its incarnation has no name"),
        ({"roles": []}, "its roles are []; accepted: actors, replay"),
        ({"roles": ["actors", "learner"]}, "its roles are ['actors', 'learner']; accepted: actors"),
        ({"roles": [3]}, "3 is not of type str"),
        ({"roles": "actors"}, "'actors' is not of type list"),
        ({"roles": ["replay"]}, "no node offers the role 'actors', and the run has the 1 nodes"),
    ],
)
def test_a_process_that_does_not_fit_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    async def scenario(world: World) -> None:
        world.node("n").hello(**changes)
        (refused,) = world.of(RefuseNode)
        assert reason in refused.reason
        assert not refused.again
        assert (world.hub.arrived, world.hub.refused) == (1, 1)
        assert world.hub.statistics() == {}

    play(scenario)


def test_a_name_is_taken_while_its_node_speaks() -> None:
    async def scenario(world: World) -> None:
        await world.node("n").joins()
        world.node("n", incarnation="another").hello()
        (refused,) = world.of(RefuseNode)
        assert "the name 'n' is taken" in refused.reason
        assert world.hub.statistics()["n"].ready

    play(scenario)


def test_a_node_that_was_started_again_takes_the_place_of_the_old_one() -> None:
    async def scenario(world: World) -> None:
        await world.node("n").joins()
        seat, starting = await world.starts("actors-0")
        world.hub.handle(NodeDisconnected("n", b"n"))
        await (again := world.node("n", incarnation="another")).joins()
        with pytest.raises(RunError, match="the node is gone"):
            await starting
        assert seat.process.cause == NODE_LOST
        assert again.of(OpenNode)
        assert world.hub.statistics()["n"].hosts == 0

    play(scenario)


def test_a_lost_node_that_comes_back_is_refused_until_it_is_a_new_one() -> None:
    async def scenario(world: World) -> None:
        node = world.node("n")
        node.received = 3
        node.hello()
        (refused,) = world.of(RefuseNode)
        assert refused.reason == "it was lost"
        assert refused.again

    play(scenario)


def test_a_node_that_cannot_make_the_environment_gets_no_host() -> None:
    async def scenario(world: World) -> None:
        node = world.node("n")
        node.hello()
        await world.turn()
        node.says(NodeUnable("env.id = 'my:env': no module my"))
        assert world.hub.statistics() == {}
        assert world.of(ForgetNode) == [ForgetNode("n", False)]
        assert world.hub.refused == 1

    play(scenario)


# Messages
# --------------------------------------------------------------------------------------------------


def test_nothing_is_lost_and_nothing_repeated_when_the_connection_or_the_gateway_is_lost() -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        seat, starting = await world.starts("actors-0")
        (fork,) = node.of(ForkHost)
        node.says(HostForked(fork.number, 77))
        await starting
        heard: list[Any] = []
        link = seat.connect().open_link(
            handle=heard.append, closed=lambda: None, failed=pytest.fail
        )
        world.hub.handle(NodeDisconnected("n", b"n"))
        link.send(Stop())
        await world.turn()
        assert node.of(ToHost) == []
        world.hub.shut()
        world.open()
        beat = FromHost(fork.number, MESSAGES.encode(Heartbeat(())))
        node.hello()
        await world.turn()
        assert [message.message for message in node.of(ToHost)] == [["Stop", []]]
        assert world.of(AdmitNode)[-1] == AdmitNode(b"n", "n", node.sent, False, LEASE_S)
        node.says(beat)
        node.says(beat, number=node.sent)
        assert heard == [Heartbeat(())]

    play(scenario)


def test_the_end_of_an_earlier_connection_does_not_end_the_present_one() -> None:
    """A gateway may notice it after the node has connected again."""

    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        node.connection = b"another"
        node.hello()
        world.hub.handle(NodeDisconnected("n", b"n"))
        assert world.hub.statistics()["n"].up
        await world.starts("actors-0")
        assert node.of(ForkHost)
        world.hub.handle(NodeDisconnected("n", b"another"))
        assert not world.hub.statistics()["n"].up

    play(scenario)


def test_a_gap_in_the_messages_of_a_node_loses_the_node() -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        node.says(NodeReady(), number=5)
        assert world.hub.statistics() == {}

    play(scenario)


def test_a_message_that_its_host_may_not_send_is_reported_with_the_error() -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        seat, starting = await world.starts("actors-0")
        (fork,) = node.of(ForkHost)
        node.says(HostForked(fork.number, 77))
        await starting
        errors: list[Exception] = []
        seat.connect().open_link(handle=lambda _: None, closed=lambda: None, failed=errors.append)
        node.says(FromHost(fork.number, ["Unknown", []]))
        assert "not the name of a known message" in str(errors[0])
        assert world.hub.statistics()["n"].ready

    play(scenario)


NODE_SAYS: list[Any] = [
    NodeReady(),
    NodeReady("tcp://10.0.0.1:5", "0" * 40),
    DirectTraffic(1, 2, 3, {"stranger": 1}),
    NodeLeaves(),
    NodeUnable("no module my"),
    HostForked(1, 77),
    HostRefused(1, "too many processes"),
    HostGone(1, -9),
    FromHost(1, MESSAGES.encode(Heartbeat(()))),
]


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\xdd\x00\x0f\xff\xff" * 2000,
        b"\x81\x90\x01",
        pack([CloseNode()]),
        pack([NodeReady()])[:-1],
        pack([NodeReady("tcp://10.0.0.1:5", "too short")]),
        pack([NodeReady("10.0.0.1:5", "0" * 40)]),
    ],
)
def test_a_message_that_a_node_may_not_send_loses_the_node_and_is_counted(body: bytes) -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        seat = await a_started_host(world, "actors-0")
        world.hub.handle(NodeSent("n", node.sent + 1, node.received, body))
        assert world.hub.statistics() == {}
        assert world.of(ForgetNode) == [ForgetNode("n", False)]
        assert seat.process.cause == NODE_LOST
        assert world.hub.connections_refused == {"broken_rule": 1}
        await world.node("m").joins()
        assert world.hub.statistics()["m"].ready

    play(scenario)


def test_a_message_that_a_host_may_not_send_loses_its_node_and_not_the_run() -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        seat = await a_started_host(world, "actors-0")
        listen_to(world, seat)
        node.says(FromHost(node.of(ForkHost)[0].number, ["Unknown", []]))
        assert seat.process.cause == NODE_LOST
        assert world.hub.statistics() == {}
        assert world.hub.connections_refused == {"broken_rule": 1}

    play(scenario)


def test_a_host_is_silent_once_it_works_and_only_while_its_node_is_heard() -> None:
    """Before that its node may fetch weights, over any link."""

    async def scenario(world: World) -> None:
        await world.node("n").joins()
        host = listen_to(world, await a_started_host(world, "actors-0"))
        host._last_message -= 100.0
        assert host.silent_for == 0.0
        host._pending.clear()
        assert host.silent_for >= 100.0
        world.hub.handle(NodeDisconnected("n", b"n"))
        assert host.silent_for == 0.0

    play(scenario)


def listen_to(world: World, seat: NodeSeat) -> NodeHost:
    """Receive the messages of a host, as a run does."""
    actor = ComponentSpec("actor-0", "actor")
    plan = SimpleNamespace(host=HostSpec("actors-0", (actor,)), incarnation=0)
    host = NodeHost(
        run=cast("RunView", world.run),
        plan=cast("HostPlan", plan),
        learner_started=asyncio.Event(),
        process=seat.process,
    )
    seat.connect().open_link(
        handle=lambda _: None, closed=lambda: None, failed=host._message_failed
    )
    return host


def test_a_message_is_acknowledged_once_and_by_the_next_message_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hubs, "ACKNOWLEDGE_S", 0.0)

    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        await asyncio.sleep(0.01)
        world.sent.clear()
        node.says(NodeReady())
        await asyncio.sleep(0.01)
        (alone,) = world.of(SendToNode)
        assert (0, node.sent, b"") == (alone.number, alone.received, alone.body)
        world.sent.clear()
        node.says(NodeReady())
        world.hub._nodes["n"].post(SetSlots(5))
        world.hub._nodes["n"].push()
        await asyncio.sleep(0.01)
        (carried,) = world.of(SendToNode)
        assert node.sent == carried.received
        assert carried.number > 0

    play(scenario)


def test_a_lost_node_is_sent_nothing_under_its_name() -> None:
    """Another process may have its name by then, and would take an acknowledgement for its own."""

    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        lost = world.hub._nodes["n"]
        world.hub.handle(NodeSent("n", node.sent + 2, 0, b""))
        world.sent.clear()
        lost._acknowledge()
        lost.post(SetSlots(5))
        await world.turn()
        assert world.sent == []

    play(scenario)


@pytest.mark.timeout(TIMEOUT_S)
def test_whatever_a_node_sends_the_run_goes_on() -> None:
    """It is handled, or the node is lost."""
    with asyncio.Runner() as runner:
        world = runner.run(a_world())
        lost = 0

        async def attack(turns: list[list[Any]], more: bytes) -> None:
            nonlocal lost
            world.hub._numbers = itertools.count(1)  # of the host in the messages
            node = await world.node("n", incarnation=f"{time.monotonic_ns()}").joins()
            listen_to(world, await a_started_host(world, "actors-0"))
            for message in turns:
                try:
                    body = b"".join(map(msgpack.packb, message)) + more
                except (TypeError, ValueError, OverflowError):  # no peer could send it
                    continue
                world.hub.handle(NodeSent("n", node.sent + 1, node.received, body))
                node.sent += 1
            await world.turn()
            lost += "n" not in world.hub.statistics()
            world.hub.handle(NodeDisconnected("n", b"n"))
            world.sent.clear()

        bodies = st.lists(
            st.sampled_from(NODE_SAYS).map(NODE_MESSAGES.encode).flatmap(altered), max_size=3
        )

        @fuzz
        @given(st.lists(bodies, min_size=1, max_size=A_TURN), st.just(b"") | st.binary(max_size=20))
        def fuzzed(turns: list[list[Any]], more: bytes) -> None:
            runner.run(attack(turns, more))

        fuzzed()
        assert lost > 0
        assert world.hub.connections_refused["broken_rule"] > 0
        world.slots.close()


async def a_world() -> World:
    return World()


def test_refused_connections_are_counted_over_all_gateways() -> None:
    async def scenario(world: World) -> None:
        world.hub.handle(ConnectionsCounted(5, {"stranger": 3}))
        world.hub.handle(ConnectionsCounted(7, {"stranger": 4, "undecodable": 1}))
        assert world.hub.connections == 7
        world.hub.shut()
        world.open()
        world.hub.handle(ConnectionsCounted(1, {"stranger": 1}))
        assert world.hub.connections == 8
        assert world.hub.connections_refused == {"stranger": 5, "undecodable": 1}

    play(scenario)


def test_a_cut_reaches_the_node_that_has_the_ticket() -> None:
    async def scenario(world: World) -> None:
        one, two = await world.node("a").joins(), await world.node("b").joins()
        seat, starting = await world.starts("actors-0")
        holder = {"a": one, "b": two}[seat.node]
        other = two if holder is one else one
        (fork,) = holder.of(ForkHost)
        holder.says(HostForked(fork.number, 77))
        await starting
        link = seat.connect().open_link(
            handle=lambda _: None, closed=lambda: None, failed=pytest.fail
        )
        link.send(Granted("actor-0", 0, Grant(9, 2, Version(0, 0))))
        world.slots.arena.request_cut(2, 9)
        world.slots.arena.request_cut(2, 8)
        await world.turn()
        assert holder.of(RequestCut) == [RequestCut(2, 9)]
        assert other.of(RequestCut) == []

    play(scenario)


def test_a_grant_has_the_weights_that_it_names_sent_first() -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        seat, starting = await world.starts("actors-0")
        node.says(HostForked(node.of(ForkHost)[0].number, 77))
        await starting
        link = seat.connect().open_link(
            handle=lambda _: None, closed=lambda: None, failed=pytest.fail
        )
        world.sent.clear()
        world.ledger.published = Version(0, 4)
        link.send(Granted("actor-0", 0, Grant(9, 2, Version(0, 4))))
        await world.turn()
        kinds = [type(message) for message in world.sent]
        assert kinds == [SendWeights, SendToNode]
        assert world.of(SendWeights) == [SendWeights(Version(0, 4))]

    play(scenario)


def test_a_settled_update_has_its_weights_sent_at_once() -> None:
    async def scenario(world: World) -> None:
        world.ledger.published = Version(0, 4)
        for observe in world.settled:
            observe()
            observe()
        assert world.of(SendWeights) == [SendWeights(Version(0, 0)), SendWeights(Version(0, 4))]

    play(scenario)


def test_more_slots_are_announced_before_a_grant_may_name_them() -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        world.slots.add_slots(2)
        await world.turn()
        assert node.of(SetSlots) == [SetSlots(6)]

    play(scenario)


# Placing
# --------------------------------------------------------------------------------------------------


def test_hosts_go_where_the_most_cores_are_free() -> None:
    async def scenario(world: World) -> None:
        await world.node("small", cores=1).joins()
        await world.node("large", cores=3).joins()
        places = [(await world.hub.place(f"actors-{index}")).node for index in range(4)]
        assert sorted(places) == ["large", "large", "large", "small"]

    play(scenario)


def test_no_host_is_placed_before_as_many_nodes_work_as_expected() -> None:
    async def scenario(world: World) -> None:
        await world.node("a").joins()
        placing = asyncio.create_task(world.hub.place("actors-0"))
        await world.turn()
        assert not placing.done()
        await world.node("b").joins()
        await placing
        world.hub.handle(NodeDisconnected("a", b"a"))
        assert (await world.hub.place("actors-1")).node == "b"

    play(scenario, expect=2)


async def a_started_host(world: World, host: str) -> NodeSeat:
    seat, starting = await world.starts(host)
    node = world.nodes[seat.node]
    node.says(HostForked(node.of(ForkHost)[-1].number, 77))
    await starting
    return seat


def test_a_node_that_joins_takes_hosts_of_a_full_one_and_none_moves_back() -> None:
    async def scenario(world: World) -> None:
        await world.node("a", cores=2).joins()
        seats = [await a_started_host(world, f"actors-{index}") for index in range(5)]
        asked: list[int] = []
        for number, seat in enumerate(seats):
            seat.process.leave = lambda number=number: asked.append(number)
        await world.node("b", cores=2).joins()
        assert len(asked) == 2
        assert [seats[number].process.cause for number in asked] == [MOVED, MOVED]
        world.hub.changed()
        assert len(asked) == 2

    play(scenario)


def test_a_host_that_cannot_be_forked_is_an_error_with_the_name_of_its_node() -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        _, starting = await world.starts("actors-0")
        node.says(HostRefused(node.of(ForkHost)[0].number, "too many processes"))
        with pytest.raises(RunError, match="node 'n': too many processes"):
            await starting

    play(scenario)


# Replay shards
# --------------------------------------------------------------------------------------------------

ACTORS, REPLAY = ("actors",), ("replay",)
KEY = "0" * 40
ADDRESS = "tcp://10.0.0.1:5"


async def a_shards_node(world: World, name: str, **properties: Any) -> FakeNode:
    node = world.node(name, **{"roles": REPLAY, **properties})
    node.hello()
    await world.turn()
    node.says(NodeReady(ADDRESS, KEY))
    await world.turn()
    return node


def test_shards_belong_on_the_head_unless_the_settings_say_otherwise() -> None:
    async def scenario(world: World) -> None:
        await world.node("n").joins()
        assert await world.hub.place_shard("replay-0") is None
        (opened,) = world.nodes["n"].of(OpenNode)
        assert (opened.draws, opened.draw_slots) == (None, 0)

    play(scenario, replay="head")


def test_shards_are_spread_over_the_nodes_that_offer_the_role() -> None:
    async def scenario(world: World) -> None:
        await a_shards_node(world, "a")
        await a_shards_node(world, "b", cores=4, roles=("actors", "replay"))
        await world.node("c", cores=8, roles=ACTORS).joins()
        seats = [await world.hub.place_shard(f"replay-{index}") for index in range(4)]
        assert ["a", "a", "b", "b"] == sorted(seat.node for seat in seats if seat is not None)
        assert [True] * 4 == [seat.has_draws for seat in seats if seat is not None]
        assert {"a": (), "b": ACTORS, "c": ACTORS} == {
            name: tuple(role for role in node.roles if role == "actors")
            for name, node in world.hub.statistics().items()
        }
        found = world.hub.statistics()
        assert {2} == {len(found[name].shards) for name in "ab"}
        assert () == found["c"].shards

    play(scenario, replay="nodes", expect=3)


def test_actors_go_to_nodes_that_offer_their_role_only() -> None:
    async def scenario(world: World) -> None:
        await a_shards_node(world, "a", cores=8)
        await world.node("b", roles=ACTORS).joins()
        seats = [await world.hub.place(f"actors-{index}") for index in range(3)]
        assert ["b", "b", "b"] == [seat.node for seat in seats]
        assert not any(seat.has_draws for seat in seats)
        world.hub.changed()
        assert ["", "", ""] == [seat.process.cause for seat in seats]

    play(scenario, replay="nodes", expect=2)


def test_only_nodes_that_may_get_shards_have_slots_of_draws() -> None:
    async def scenario(world: World) -> None:
        shards, actors = await a_shards_node(world, "a"), world.node("b", roles=ACTORS)
        await actors.joins()
        await world.turn()
        (opened,) = shards.of(OpenNode)
        assert (opened.draws, opened.draw_slots, opened.directory) == (DRAWS, 2, "")
        (opened,) = actors.of(OpenNode)
        assert (opened.draws, opened.draw_slots, opened.directory) == (None, 0, "")

    play(scenario, replay="nodes", expect=2)


def test_a_node_of_shards_that_are_saved_hears_where() -> None:
    async def scenario(world: World) -> None:
        shards = await a_shards_node(world, "a")
        assert ["/runs/r"] == [opened.directory for opened in shards.of(OpenNode)]

    play(scenario, replay="nodes", expect=2, keep_replay=True)


@pytest.mark.parametrize("missing", ["actors", "replay"])
def test_a_run_does_not_begin_without_a_node_for_each_role(missing: str) -> None:
    """The node that would be the last one is refused, and the run waits for another."""
    other = REPLAY if missing == "actors" else ACTORS

    async def scenario(world: World) -> None:
        first = world.node("a", roles=other)
        await first.joins()
        world.node("b", roles=other).hello()
        (refused,) = world.of(RefuseNode)
        assert f"no node offers the role {missing!r}" in refused.reason
        assert "the 2 nodes of cluster.expect" in refused.reason
        assert ('set cluster.replay = "head"' in refused.reason) == (missing == "replay")
        assert (world.hub.refused, refused.again) == (1, False)
        await world.node("c", roles=(missing,)).joins()
        assert world.hub.statistics()["c"].ready
        await world.node("d", roles=other).joins()
        assert world.hub.statistics()["d"].ready

    play(scenario, replay="nodes", expect=2)


def test_a_shard_waits_for_the_first_nodes_and_later_for_none() -> None:
    async def scenario(world: World) -> None:
        placing = asyncio.create_task(world.hub.place_shard("replay-0"))
        await world.turn()
        assert not placing.done()
        await world.node("b", roles=ACTORS).joins()
        await a_shards_node(world, "a")
        seat = await placing
        assert seat is not None
        assert "a" == seat.node
        world.hub.handle(NodeDisconnected("a", b"a"))
        assert await world.hub.place_shard("replay-0") is None

    play(scenario, replay="nodes", expect=2)


def test_a_shard_starts_without_weights_and_stays_where_it_is() -> None:
    """It would lose its items, and it has no use for weights."""

    async def scenario(world: World) -> None:
        world.ledger.published = Version(1, 3)
        first = await a_shards_node(world, "a", roles=("actors", "replay"))
        seats = [(await world.starts(f"replay-{index}"))[0] for index in range(3)]
        seats.append((await world.starts("actors-0"))[0])
        assert [NO_VERSION] * 3 + [Version(1, 3)] == [fork.version for fork in first.of(ForkHost)]
        await world.node("b", cores=4).joins()
        assert ["", "", "", MOVED] == [seat.process.cause for seat in seats]

    play(scenario, replay="nodes")


async def a_shard(world: World) -> tuple[FakeNode, NodeSeat, MessageLink]:
    node = await a_shards_node(world, "a", roles=("actors", "replay"))
    seat = await a_started_host(world, "replay-0")
    link = seat.connect().open_link(handle=lambda _: None, closed=lambda: None, failed=pytest.fail)
    return node, seat, link


def test_data_on_the_head_go_with_the_request_to_store_them_and_priorities_with_theirs() -> None:
    async def scenario(world: World) -> None:
        node, seat, link = await a_shard(world)
        assert node.incarnation == seat.process.place
        here, there = StoreTrajectory(7, 2, 4, ""), StoreTrajectory(8, 3, 4, node.incarnation)
        priorities = Prioritise(1, 0, 3, 2)
        for message in (there, here, priorities):
            link.send(message)
        await world.turn()
        assert [here, priorities] == node.carried
        assert ["StoreTrajectory", "StoreTrajectory", "Prioritise"] == [
            relayed.message[0] for relayed in node.of(ToHost)
        ]
        carrying = [sent for sent in world.of(SendToNode) if sent.store or sent.prioritise]
        assert [1, 1] == [len(unpack(sent.body)[-1:]) for sent in carrying]

    play(scenario, replay="nodes")


def test_data_of_a_slot_are_sent_again_with_their_message() -> None:
    async def scenario(world: World) -> None:
        node, _, link = await a_shard(world)
        node.acknowledges()
        world.hub.handle(NodeDisconnected("a", b"a"))
        link.send(StoreTrajectory(7, 2, 4, ""))
        await world.turn()
        assert [] == node.carried
        node.hello()
        await world.turn()
        assert [StoreTrajectory(7, 2, 4, "")] == node.carried

    play(scenario, replay="nodes")


def test_all_nodes_hear_where_to_send_trajectories_and_when_no_more() -> None:
    async def scenario(world: World) -> None:
        early = await world.node("b", roles=ACTORS).joins()
        shards = await a_shards_node(world, "a")
        places = {shards.incarnation: DirectAddress("a", ADDRESS, KEY)}
        assert [SetPlaces(places)] == early.of(SetPlaces)
        late = await world.node("c", roles=ACTORS).joins()
        await world.turn()
        assert [SetPlaces(places)] == late.of(SetPlaces)
        world.hub.handle(NodeDisconnected("a", b"a"))
        await world.turn()
        assert [SetPlaces(places)] == early.of(SetPlaces)
        world.hub.handle(NodeSent("a", shards.sent + 1, shards.received, b"\xc1"))
        await world.turn()
        for node in (early, late):
            assert [SetPlaces(places), SetPlaces({})] == node.of(SetPlaces)

    play(scenario, replay="nodes", expect=2)


def test_nothing_more_is_sent_to_a_node_that_leaves() -> None:
    async def scenario(world: World) -> None:
        other = await world.node("b", roles=ACTORS).joins()
        shards = await a_shards_node(world, "a")
        seat = await a_started_host(world, "replay-0")
        shards.says(NodeLeaves())
        await world.turn()
        assert SetPlaces({}) == other.of(SetPlaces)[-1]
        assert NODE_LEFT == seat.process.cause
        assert await world.hub.place_shard("replay-0") is None

    play(scenario, replay="nodes", expect=2)


def test_links_between_nodes_are_counted_over_all_incarnations() -> None:
    async def scenario(world: World) -> None:
        def counted() -> tuple[Any, ...]:
            found = world.hub.statistics()["n"]
            return (
                found.direct_sent_bytes,
                found.direct_received_bytes,
                world.hub.connections,
            )

        node = await world.node("n").joins()
        assert (0, 0, 0) == counted()
        node.says(DirectTraffic(5, 7, 1, {"stranger": 0}))
        node.says(DirectTraffic(6, 9, 3, {"stranger": 2}))
        assert (6, 9, 3) == counted()
        world.hub.handle(NodeDisconnected("n", b"n"))
        again = await world.node("n", incarnation="another").joins()
        again.says(DirectTraffic(1, 1, 1, {"stranger": 1}))
        assert (7, 10, 4) == counted()
        assert {"stranger": 3} == world.hub.connections_refused

    play(scenario)


# Ends
# --------------------------------------------------------------------------------------------------


def test_a_host_is_killed_by_a_message_and_is_gone_when_the_node_says_so() -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        seat = await a_started_host(world, "actors-0")
        seat.process.kill()
        await world.turn()
        (kill,) = node.of(KillHost)
        assert not seat.process.ended.done()
        node.says(HostGone(kill.number, -9))
        assert await seat.process.wait() == -9
        assert seat.process.cause == ""

    play(scenario)


def test_a_node_that_leaves_hands_over_its_hosts_and_then_is_closed() -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        seat = await a_started_host(world, "actors-0")
        asked: list[str] = []
        seat.process.leave = lambda: asked.append("stop")
        node.says(NodeLeaves())
        await world.turn()
        assert asked == ["stop"]
        assert node.of(CloseNode) == []
        assert not world.hub.statistics()["n"].ready
        node.says(HostGone(node.of(ForkHost)[0].number, 0))
        await world.turn()
        assert node.of(CloseNode) == [CloseNode()]
        assert await seat.process.wait() == 0
        assert seat.process.cause == NODE_LEFT
        world.hub.handle(NodeDisconnected("n", b"n"))
        assert world.hub.statistics() == {}

    play(scenario)


@pytest.mark.parametrize(("silence_s", "lost"), [(LEASE_S - 1.0, False), (LEASE_S + 0.1, True)])
def test_a_node_is_lost_when_its_lease_is_over(*, silence_s: float, lost: bool) -> None:
    async def scenario(world: World) -> None:
        await world.node("n").joins()
        seat = await a_started_host(world, "actors-0")
        world.hub.find_lost(time.monotonic() + silence_s)
        assert seat.process.ended.done() == lost
        assert ("n" not in world.hub.statistics()) == lost
        if lost:
            assert seat.process.cause == NODE_LOST
            assert world.of(ForgetNode) == [ForgetNode("n", False)]

    play(scenario)


def test_the_end_of_the_run_reaches_every_node() -> None:
    async def scenario(world: World) -> None:
        await world.node("a").joins()
        await world.node("b").joins()
        world.hub.close()
        assert world.of(ForgetNode) == [ForgetNode("a", True), ForgetNode("b", True)]

    play(scenario)


def test_bytes_of_a_node_never_decrease() -> None:
    """A gateway that was started again counts from 0, as for a node that joins again."""

    async def scenario(world: World) -> None:
        def counted() -> int:
            return world.hub.statistics()["n"].sent_bytes["weights"]

        await world.node("n").joins()
        world.hub.handle(NodeTraffic("n", {"weights": 5}, {}, Version(0, 6), 0.0))
        world.hub.handle(NodeTraffic("n", {"weights": 7}, {}, Version(0, 6), 0.0))
        assert counted() == 7
        world.hub.handle(NodeTraffic("n", {"weights": 2}, {}, Version(0, 6), 0.0))
        assert counted() == 9
        world.hub.handle(NodeDisconnected("n", b"n"))
        await world.node("n", incarnation="another").joins()
        world.hub.handle(NodeTraffic("n", {"weights": 3}, {}, Version(0, 6), 0.0))
        assert counted() == 12

    play(scenario)


def test_statistics_say_what_the_gateway_counted() -> None:
    async def scenario(world: World) -> None:
        await world.node("n").joins()
        world.ledger.published = Version(0, 9)
        sent, received = {"weights": 5}, {"trajectories": 7}
        world.hub.handle(NodeTraffic("n", sent, received, Version(0, 6), 0.25))
        found = world.hub.statistics()["n"]
        assert (found.sent_bytes, found.received_bytes) == (sent, received)
        assert (found.weights_lag, found.round_trip_s, found.up) == (3, 0.25, True)

    play(scenario)


def test_statistics_name_the_actors_of_a_node_and_those_that_rest() -> None:
    async def scenario(world: World) -> None:
        node = await world.node("n").joins()
        await world.node("m").joins()
        seat, starting = await world.starts("actors-0")
        fork = node.of(ForkHost) or world.nodes["m"].of(ForkHost)
        world.nodes[seat.node].says(HostForked(fork[0].number, 77))
        await starting
        link = seat.connect().open_link(
            handle=lambda _: None, closed=lambda: None, failed=pytest.fail
        )
        for slot, name in enumerate(("actor-1", "actor-0", "actor-1")):
            link.send(Granted(name, 0, Grant(slot, slot, Version(0, 0))))
        world.late |= {"actor-1", "actor-5"}
        found = world.hub.statistics()
        other = found.pop("m" if seat.node == "n" else "n")
        assert (found[seat.node].actors, found[seat.node].late) == (
            ("actor-0", "actor-1"),
            ("actor-1",),
        )
        assert (other.actors, other.late) == ((), ())
        world.nodes[seat.node].says(HostGone(fork[0].number, 0))
        assert world.hub.statistics()[seat.node].actors == ()

    play(scenario)
