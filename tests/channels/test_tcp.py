"""Connections over TCP: what arrives, what is refused, and that a refusal costs nothing."""

from __future__ import annotations

import os
import random
import resource
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.harness import until
from tests.support.effort import FACTOR
from tests.support.fuzz_frames import (
    announced,
    descriptors,
    fuzzed,
    memory,
    raw,
    send_each,
)
from tests.support.remote_worlds import EchoEnv, Relay, serving
from tianflow.channels.frames import Message, encode
from tianflow.channels.keys import Keys, read_or_make_keys
from tianflow.channels.tcp import (
    BYE,
    ListenerStatistics,
    Peer,
    RefusedConnectionError,
    TcpConnection,
    TcpListener,
    new_context,
    wait,
)
from tianflow.envs.remote import RemoteVectorEnv
from tianflow.envs.remote_protocol import REFUSAL, WELCOME
from tianflow.errors import BrokenChannelError, ConfigError, WouldBlock

PATIENCE_S = 20.0
OLD = b"\x01\x00" + b"\x04\x00abc" * 50
"""Messages of ZMTP 1, which knows no handshake."""
Open = Callable[..., TcpConnection]


@contextmanager
def ends(keys: Keys | None = None, **arguments: Any) -> Iterator[tuple[TcpListener, Open]]:
    """A listener, and a function that connects to it."""
    with ExitStack() as stack:
        listener = TcpListener("tcp://127.0.0.1:*", keys=keys, **arguments)
        stack.callback(listener.close)
        context = new_context()
        stack.callback(context.term)

        def connect(**more: Any) -> TcpConnection:
            made = TcpConnection(context, listener.address, **{"keys": keys, **more})
            stack.callback(made.close)
            return made

        yield listener, connect


def heard(listener: TcpListener) -> tuple[Peer, Message]:
    """The next message that is not a farewell."""

    def look() -> tuple[Peer, Message] | None:
        found = listener.receive(0.05)
        return found if found is not None and found[1].kind != BYE else None

    return until("a message arrives", look)


def received(connection: TcpConnection, listener: TcpListener) -> Message:
    def look() -> Message | None:
        listener.receive(0.0)  # it answers handshakes
        try:
            return connection.receive_nowait()
        except WouldBlock:
            wait([connection], 0.01)
            return None

    return until("a message arrives", look)


def ended(connection: TcpConnection, listener: TcpListener) -> bool:
    try:
        received(connection, listener)
    except BrokenChannelError:
        return True
    return False


def counted(listener: TcpListener, condition: Callable[[ListenerStatistics], bool]) -> None:
    def look() -> bool:
        listener.receive(0.01)
        return condition(listener.statistics())

    until("it is counted", look, tell=lambda: str(listener.statistics()))


@pytest.mark.parametrize("encrypted", [False, True])
def test_messages_go_both_ways(encrypted: bool) -> None:
    with ends(Keys.generate() if encrypted else None) as (listener, connect):
        connection = connect()
        image = np.arange(100_000, dtype=np.float32)
        connection.send(encode("ask", 1, {"image": image}))
        peer, message = heard(listener)
        assert ("ask", 1) == message[:2]
        assert np.array_equal(image, message.body["image"])
        assert listener.reachable(peer)
        assert listener.send(peer, encode("answer", 1, [image]))
        answer = received(connection, listener)
        assert ("answer", 1) == answer[:2]
        assert np.array_equal(image, answer.body[0])
        connection.close(farewell=True)
        counted(listener, lambda found: found.ended == 1)
        assert ListenerStatistics(1, 1, 1, 1, 0, 0) == listener.statistics()
        assert 0 == listener.statistics().cut


@pytest.mark.parametrize(("dead_after_s", "milliseconds"), [(None, 0), (1.5, 1500)])
def test_data_without_an_acknowledgement_end_a_connection_if_that_is_wanted(
    dead_after_s: float | None, milliseconds: int
) -> None:
    with ends(dead_after_s=dead_after_s) as (listener, connect):
        connection = connect(dead_after_s=dead_after_s)
        connection.send(encode("ask", 1, None))
        peer, _ = heard(listener)
        ours = [peer.descriptor, *connected_to(listener.address)]
        assert len(ours) == 2
        for descriptor in ours:
            with socket.socket(fileno=os.dup(descriptor)) as end:
                found = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert milliseconds == found


def connected_to(address: str) -> list[int]:
    """Descriptors of this process whose sockets are connected to ``address``."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers are wanted
        with suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as end:
                if end.family != socket.AF_INET:
                    continue
                host, port = end.getpeername()
                if f"tcp://{host}:{port}" == address:
                    found.append(descriptor)
    return found


def test_each_connection_that_ends_is_counted_by_how_it_ended() -> None:
    with ends() as (listener, connect):

        def spoken() -> TcpConnection:
            connection = connect()
            connection.send(encode("ask", 1, None))
            heard(listener)
            return connection

        def count(wordless: int, lost: int, ended: int) -> None:
            counted(listener, lambda found: found.ended == ended)
            listener.receive(0.0)
            found = listener.statistics()
            assert (wordless, lost) == (found.wordless, found.lost)

        for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 200):
            with socket.create_connection(("127.0.0.1", port_of(listener))) as end:
                end.sendall(data)
        count(3, 0, ended=3)
        spoken().close()
        count(3, 1, ended=4)
        spoken().close(farewell=True)
        count(3, 1, ended=5)
        bad = spoken()
        bad.send([b"nonsense"])
        assert ended(bad, listener)
        count(3, 1, ended=6)


def port_of(listener: TcpListener) -> int:
    return int(listener.address.rpartition(":")[2])


def test_a_listener_without_open_files_serves_those_it_has_and_takes_others_later() -> None:
    """ZeroMQ reports a failed accept again and again."""
    strangers = [socket.socket() for _ in range(40)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with ends() as (listener, connect):
            connection = connect()
            connection.send(encode("ask", 1, None))
            peer, _ = heard(listener)
            probe = os.dup(0)
            os.close(probe)
            resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 10, limits[1]))
            for stranger in strangers:
                stranger.setblocking(False)
                stranger.connect_ex(("127.0.0.1", port_of(listener)))
            counted(listener, lambda found: found.accepted > 1)
            for number in range(20):
                assert listener.send(peer, encode("answer", number, None))
                assert number == received(connection, listener).number
            assert 1 < listener.statistics().accepted <= 11
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            counted(listener, lambda found: found.accepted == 41)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for stranger in strangers:
            stranger.close()


def test_a_connection_that_is_gone_is_not_reachable() -> None:
    with ends() as (listener, connect):
        connection = connect()
        connection.send(encode("ask", 1, None))
        peer, _ = heard(listener)
        connection.close()
        counted(listener, lambda found: found.ended == 1)
        until("it is not reachable", lambda: not listener.reachable(peer))
        assert listener.changed
        assert 1 == listener.statistics().cut


def test_a_malformed_message_closes_its_connection_and_no_other() -> None:
    with ends() as (listener, connect):
        good, bad = connect(), connect()
        good.send(encode("ask", 1, None))
        peer, _ = heard(listener)
        bad.send([b"\x80\x04nonsense"])
        assert ended(bad, listener)
        counted(listener, lambda found: found.ended == 1)
        assert listener.send(peer, encode("answer", 1, None))
        assert "answer" == received(good, listener).kind
        found = listener.statistics()
        assert ({"undecodable": 1}, 1, 0) == (found.malformed, found.closed, found.cut)


def test_a_malformed_message_of_a_connection_that_is_gone_closes_nothing() -> None:
    """Its descriptor may belong to the next connection by then."""
    with ends() as (listener, connect):
        before = connect()
        before.send(encode("ask", 1, None))
        peer, _ = heard(listener)
        before.send([b"nonsense"])
        before.close(farewell=True)
        after = connect()
        after.send(encode("ask", 2, None))
        until("it is gone", lambda: not listener.reachable(peer))
        assert 2 == heard(listener)[1].number
        listener.close_peer(peer, "late", "")
        assert {} == listener.statistics().malformed
        assert listener.reachable(heard_again(after, listener))


def heard_again(connection: TcpConnection, listener: TcpListener) -> Peer:
    connection.send(encode("ask", 3, None))
    return heard(listener)[0]


def test_a_frame_above_the_limit_closes_its_connection() -> None:
    with ends(max_frame=10_000) as (listener, connect):
        connection = connect()
        connection.send(encode("ask", 1, np.zeros(10_000, np.uint8)))
        assert "ask" == heard(listener)[1].kind
        connection.send(encode("ask", 2, np.zeros(11_000, np.uint8)))
        assert ended(connection, listener)
        counted(listener, lambda found: found.cut == 1)


@pytest.mark.parametrize("more", [False, True])
def test_a_length_of_4_gib_reserves_nothing(more: bool) -> None:
    with ends() as (listener, _):
        before = memory(os.getpid())
        talk = threading.Thread(target=raw, args=(listener.address, *announced(2**32, more=more)))
        talk.start()
        counted(listener, lambda found: found.cut == 1)
        talk.join(PATIENCE_S)
        assert not talk.is_alive()
        assert memory(os.getpid()) - before < 64 * 1024**2
        assert 1 == listener.statistics().admitted


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\x80\x04\x95" + b"pickle" * 50, b"\xff" * 200, OLD]
)
def test_another_protocol_is_a_stranger(data: bytes) -> None:
    with ends() as (listener, _):
        talk = threading.Thread(target=raw, args=(listener.address, data))
        talk.start()
        counted(listener, lambda found: found.ended == 1)
        talk.join(PATIENCE_S)
        found = listener.statistics()
        assert (1, 0, 1, 0) == (found.accepted, found.admitted, found.strangers, found.cut)
        assert {} == found.malformed


def test_without_the_key_no_message_arrives(tmp_path: Path) -> None:
    keys, other = read_or_make_keys(tmp_path / "keys"), Keys.generate()
    clients = (
        None,
        other,
        Keys(keys.server_public, keys.server_secret, other.client_public, other.client_secret),
    )
    with ends(keys) as (listener, connect):
        for given in clients:
            connection = connect(keys=given)
            with suppress(BrokenChannelError):  # it may be refused by now
                connection.send(encode("ask", 1, None))
            with pytest.raises(RefusedConnectionError, match="keys do not match") as found:
                received(connection, listener)
            assert listener.address in str(found.value)
            connection.close()
        counted(listener, lambda found: found.ended == 3)
        statistics = listener.statistics()
        assert (3, 0, 3) == (statistics.accepted, statistics.admitted, statistics.strangers)
        assert 1 == statistics.refused_keys


def test_the_bytes_of_a_connection_that_are_sent_again_are_a_stranger() -> None:
    """The keys of a connection are made in its handshake."""
    keys = Keys.generate()
    with ends(keys) as (listener, _), Relay(listener.address) as relay:
        context = new_context()
        connection = TcpConnection(context, relay.address, keys=keys)
        connection.send(encode("ask", 1, np.zeros(5000)))
        assert "ask" == heard(listener)[1].kind
        (recording,) = relay.recordings
        assert len(recording) > 40_000
        talk = threading.Thread(target=raw, args=(listener.address, bytes(recording)))
        talk.start()
        counted(listener, lambda found: found.wordless == 1)
        talk.join(PATIENCE_S)
        assert not talk.is_alive()
        assert listener.receive(0.1) is None
        connection.close()
        context.term()


def test_a_key_that_the_listener_does_not_have_is_refused() -> None:
    with ends() as (listener, connect):
        connection = connect(keys=Keys.generate())
        with pytest.raises(RefusedConnectionError, match="has none|has no key"):
            received(connection, listener)


def test_an_address_in_use_is_refused() -> None:
    with ends() as (listener, _), pytest.raises(ConfigError, match="Address already in use"):
        TcpListener(listener.address)


def test_an_address_without_a_listener_is_not_a_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = new_context()
    connection = TcpConnection(context, f"tcp://127.0.0.1:{port}")

    def look() -> bool:
        try:
            connection.receive_nowait()
        except WouldBlock:
            wait([connection], 0.05)
        except BrokenChannelError as error:
            return "does not accept connections" in str(error)
        return False

    until("it is noticed", look)
    connection.close()
    context.term()


def test_a_listener_can_be_woken() -> None:
    with ends() as (listener, _):
        timer = threading.Timer(0.05, listener.wake)
        timer.start()
        assert listener.receive(PATIENCE_S) is None
        timer.join()


def test_a_peer_that_does_not_read_is_not_waited_for() -> None:
    with ends() as (listener, connect):
        connection = connect()
        connection.send(encode("ask", 1, None))
        peer, _ = heard(listener)
        large = encode("answer", 1, np.zeros(2**20, np.uint8))
        sent = 0
        while listener.send(peer, large):
            sent += 1
            assert sent < 5000
        assert not listener.reachable(peer)


def test_fuzzed_frames_are_counted_and_cost_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "unpickled"
    messages = fuzzed(random.Random(1), canary)
    with serving(num_envs=2) as server:
        send_each(server.address, messages, 300)  # caches are warm after these
        earlier = server.statistics()
        before = memory(os.getpid()), descriptors(os.getpid())
        outcomes = send_each(server.address, messages, count := max(800, 400 * FACTOR))
        until(
            "all connections are over", lambda: server.statistics().connections.ended == 300 + count
        )
        found = server.statistics()
        assert {"closed", WELCOME, REFUSAL} >= set(outcomes)
        malformed = [sum(one.connections.malformed.values()) for one in (earlier, found)]
        assert outcomes["closed"] == malformed[1] - malformed[0]
        assert outcomes["closed"] == found.connections.closed - earlier.connections.closed
        assert outcomes[WELCOME] == found.welcomed - earlier.welcomed
        assert outcomes[REFUSAL] == found.refused - earlier.refused
        assert min(outcomes.values()) > 5
        assert not canary.exists()
        assert memory(os.getpid()) - before[0] < 16 * 1024**2
        assert abs(descriptors(os.getpid()) - before[1]) < 10
        until("nothing is lent", lambda: server.free == 2)
        vector = RemoteVectorEnv(2, [server.address])
        expected = [EchoEnv().reset(seed=row)[0][0] for row in range(2)]
        assert expected == vector.reset(seed=0)[0][:, 0].tolist()
        vector.close()
