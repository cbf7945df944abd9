"""A head that strangers attack: its run goes on, each refusal is counted, and nothing grows."""

from __future__ import annotations

import json
import pickle
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import LiveRun
from tests.support.fuzz_frames import GREETING, Canary, raw
from tests.support.hostile_frames import BOMBS
from tests.support.nodes import NodeProcess, nodes
from tests.support.remote_worlds import Relay
from tianflow.channels.frames import MAX_FRAME, encode
from tianflow.channels.keys import Keys
from tianflow.channels.tcp import OVERHEAD, Context, TcpConnection, new_context, wait
from tianflow.errors import TianflowError, WouldBlock
from tianflow.rundir.join_file import NAME, JoinFile

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SILENT = 1000
CURVE = GREETING.replace(b"NULL" + bytes(16), b"CURVE" + bytes(15))
LONG = (2**32).to_bytes(8, "big") + bytes(200)
GROWTH = 16 * 2**20
SHELL = 1024
"""Open files that shells permit."""


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def private(pid: int) -> int:
    """Bytes of memory that a process has to itself."""
    fields = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in fields if line.startswith("Private"))


class Attack:
    """Everything that a stranger can do to the ports of a run, and a process with its keys."""

    def __init__(self, live: LiveRun, folder: Path, context: Context) -> None:
        self.live, self._context = live, context
        self.join = JoinFile.read(live.directory / NAME)
        self.port = int(self.join.address.rpartition(":")[2])
        self.canary = folder / "unpickled"
        self.strangers = 0
        """Connections so far that were not to get past the handshake."""

    @property
    def ports(self) -> set[tuple[str, int]]:
        return harness.listening({self.live.process.pid, *self.live.descendants()})

    def other_protocols(self) -> None:
        """A pickle, a request of HTTP, and bytes, to every port."""
        for host, port in self.ports:
            for data in (
                pickle.dumps(Canary(self.canary)) + b"\r\n\r\n",
                b"POST /api/v1/runs HTTP/1.1\r\nConnection: close\r\n\r\n",
                b"\xff" * 200,
            ):
                with (
                    socket.create_connection((host, port), timeout=30.0) as end,
                    suppress(OSError),  # it is closed at any moment
                ):
                    end.sendall(data)
                    end.shutdown(socket.SHUT_WR)
                    while end.recv(4096):
                        pass
                self.strangers += port == self.port

    def long_lengths(self) -> None:
        """A command and a message that claim 4 GiB, before the handshake is over."""
        for flag in (b"\x06", b"\x02"):
            raw(self.join.address, CURVE, flag + LONG)
            raw(self.join.address, GREETING, flag + LONG)
            self.strangers += 2

    def other_keys(self) -> None:
        own = self.join.keys
        assert own is not None
        other = Keys.generate()
        mixed = Keys(own.server_public, b"", other.client_public, other.client_secret)
        for keys in (None, other, mixed):
            self._send([[b"x"]], keys)
            self.strangers += 1

    def replay(self, recordings: Sequence[bytes]) -> None:
        """The bytes of connections of a node, once more."""
        for recording in recordings:
            assert len(recording) > 1000
            raw(self.join.address, recording)
            self.strangers += 1

    def known(self) -> int:
        """What a process with the keys may not send. How many messages that cannot be read."""
        unreadable = [[pickle.dumps(Canary(self.canary))], [b"nonsense"], *BOMBS.values()]
        for frames in unreadable:
            self._send([frames], self.join.keys)
        self._send([encode("up", 1, None)], self.join.keys)
        self._send([encode("hello", 0, {3: 4})], self.join.keys)
        large = [encode("noop", 0, None)[0], bytes(MAX_FRAME + OVERHEAD + 1)]
        self._send([large], self.join.keys)
        self.strangers += 1  # no message of it was read
        return len(unreadable)

    def _send(self, messages: Sequence[Sequence[bytes]], keys: Keys | None) -> None:
        """Send ``messages``, and wait until the connection is closed."""
        connection = TcpConnection(self._context, self.join.address, keys=keys)
        deadline = time.monotonic() + 30.0
        try:
            for frames in messages:
                connection.send(frames)
            while time.monotonic() < deadline:
                try:
                    connection.receive_nowait()
                except WouldBlock:
                    wait([connection], 0.2)
            pytest.fail("the connection stays open")
        except TianflowError:
            return
        finally:
            connection.close()

    @contextmanager
    def silent(self, count: int) -> Iterator[Callable[[], bool]]:
        """So many connections at once that say nothing, and whether all of them are closed."""
        ends = [socket.socket() for _ in range(count)]
        try:
            for end in ends:
                end.setblocking(False)
                end.connect_ex(("127.0.0.1", self.port))
            self.strangers += count
            yield lambda: all(map(closed, ends))
        finally:
            for end in ends:
                end.close()

    @contextmanager
    def slow(self) -> Iterator[None]:
        """A connection that sends one byte each second, until it is closed."""

        ended: list[bool] = []

        def talk() -> None:
            with socket.create_connection(("127.0.0.1", self.port), timeout=60.0) as end:
                for byte in CURVE:
                    try:
                        end.sendall(bytes([byte]))
                    except OSError:
                        ended.append(True)
                        return
                    if over.wait(1.0):
                        return

        over, thread = threading.Event(), threading.Thread(target=talk)
        thread.start()
        self.strangers += 1
        try:
            yield
            thread.join(60.0)
            assert ended == [True]
        finally:
            over.set()
            thread.join()


def closed(end: socket.socket) -> bool:
    try:
        while end.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Readiness:
    """Asks a run whether it is ready, again and again."""

    def __init__(self, live: LiveRun) -> None:
        self._live, self._over = live, threading.Event()
        self.answers: list[tuple[int, str]] = []
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._over.wait(0.2):
            self.answers.append(self._live.request("/readyz"))

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()
        assert len(self.answers) > 20
        assert [] == [answer for answer in self.answers if answer[0] != 200]


def test_a_run_with_nodes_goes_on_whatever_strangers_send(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with open_files(SHELL):
            live = stack.enter_context(
                harness.run(
                    tmp_path,
                    placement__launcher="nodes",
                    cluster__listen="tcp://127.0.0.1:*",
                    run__max_restarts=1,
                )
            )
        live.until("the join file", (live.directory / NAME).exists)
        context = stack.enter_context(_context())
        attack = Attack(live, tmp_path, context)
        relay = stack.enter_context(Relay(attack.join.address))
        relayed = tmp_path / "join.toml"
        JoinFile(attack.join.run, relay.address, attack.join.keys).write(relayed)
        pair = [NodeProcess(relayed, "one", tmp_path / "one.log")]
        stack.enter_context(nodes(*pair))
        live.until_training(more=5)
        watched = (live.process.pid, live.wait_for_pid("gateway"))
        assert {("127.0.0.1", attack.port)} < attack.ports
        assert len(attack.ports) == 2

        def refused(reason: str) -> float:
            return live.metric("nodes_connections_refused_total", reason)

        def everything(meanwhile: Callable[[], None]) -> int:
            with attack.slow(), attack.silent(SILENT) as all_closed:
                attack.other_protocols()
                attack.long_lengths()
                attack.other_keys()
                attack.replay([bytes(recording) for recording in relay.recordings])
                unreadable = attack.known()
                meanwhile()
                live.until("the silent ones are closed", all_closed)
            return unreadable

        def join() -> None:
            """A node joins between the strangers, and its trajectories arrive."""
            pair.append(NodeProcess(live.directory / NAME, "two", tmp_path / "two.log"))
            stack.enter_context(nodes(pair[-1]))
            live.until(
                "a trajectory of it",
                lambda: live.metric("node_received_bytes_total", "trajectories", "two"),
            )

        with Readiness(live).watched():
            unreadable = everything(join)  # memory that it needs is there after this
            before = list(map(private, watched))
            everything(lambda: None)
            live.until("each is counted", lambda: refused("stranger") >= attack.strangers)
            grown = [now - then for now, then in zip(map(private, watched), before, strict=True)]
        assert max(grown) < GROWTH, grown
        assert refused("stranger") == attack.strangers
        assert refused("undecodable") == 2 * unreadable
        assert refused("not_allowed") == 4
        assert refused("lost") == refused("broken_rule") == 0
        assert live.metric("nodes_connections_total") >= attack.strangers
        assert live.metric("nodes_arrived_total") == 2
        assert not attack.canary.exists()
        assert live.metric("staleness_violations_total") == 0
        assert live.metric("trajectories_dropped_total", "node_lost") == 0
        live.until_training(more=5)
        assert json.loads(live.request(f"/api/v1/runs/{live.name}/nodes")[1])["nodes"][1]["ready"]
        for node in pair:
            assert node.leave() == 0, node.output
        live.interrupt()
        assert "Traceback" not in live.stderr


@contextmanager
def _context() -> Iterator[Context]:
    made = new_context()
    try:
        yield made
    finally:
        made.destroy(linger=0)
