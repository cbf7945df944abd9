"""``tianflow node`` refuses what it cannot use, waits for what is to come, and ends when it is asked
to.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.settings import cartpole
from tianflow.channels.frames import encode
from tianflow.channels.keys import Keys
from tianflow.channels.node_messages import NodeReady
from tianflow.channels.tcp import Peer, TcpListener
from tianflow.cli.node import parse_cores
from tianflow.config.loading import load_config
from tianflow.core.process_table import carries, processes
from tianflow.errors import ConfigError
from tianflow.launchers import node as nodes
from tianflow.launchers.node import Membership, NodeProcess, RefusedNodeError
from tianflow.launchers.nodes import NodeLauncher, advertised
from tianflow.planning import placement
from tianflow.planning.probe import UndecidedError
from tianflow.rundir.join_file import JoinFile

PATIENCE_S = 20.0
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
