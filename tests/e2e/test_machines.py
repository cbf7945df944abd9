"""Machines of tests: they reach each other, and only each other, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import pytest

from tests.support import machines as support
from tests.support.machines import Machine, MachineError, Traffic, machines, require_machines

pytestmark = pytest.mark.e2e
MIB = 2**20
SERVER = """
import socket, sys
listener = socket.create_server(("", 5000))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(65536):
            if data == b"?":
                connection.sendall(b"!")
        print("end", flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=10) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
ASK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
print("there", flush=True)
sys.stdin.readline()
connection.sendall(b"?")
print("asked", flush=True)
print(connection.recv(1), flush=True)
"""


def namespaces() -> set[str]:
    return {path.name for path in support.NAMESPACES.glob(f"{support.PREFIX}-*")}


@pytest.fixture
def network() -> Iterator[Mapping[str, Machine]]:
    require_machines()
    with machines("head", "node-1") as found:
        yield found


class Server:
    """A server on ``machine``; it answers ``?`` and prints a line when a connection has ended."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __enter__(self) -> Self:
        command = (sys.executable, "-c", SERVER)
        self.process = self._machine.start(*command, stdout=subprocess.PIPE, text=True)
        assert "ready\n" == self.line()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        assert self.process.stdout is not None
        return str(self.process.stdout.readline())


def test_machines_reach_each_other_and_their_own_loopback(network: Mapping[str, Machine]) -> None:
    head = network["head"]
    with Server(head) as server:
        for machine, address in (("node-1", head.address), ("head", "127.0.0.1")):
            network[machine].run(sys.executable, "-c", SEND, address, "1")
            assert "end\n" == server.line()
        with pytest.raises(MachineError, match="refused"):
            network["node-1"].run(sys.executable, "-c", SEND, "127.0.0.1", "1")


def test_a_machine_can_lose_all_its_processes_at_once(network: Mapping[str, Machine]) -> None:
    with Server(network["head"]) as server:
        assert [server.process.pid] == network["head"].pids
        network["head"].kill()
        assert -signal.SIGKILL == server.process.wait(10)
    assert [] == network["head"].pids


def test_this_machine_has_no_way_to_a_machine_of_a_test(network: Mapping[str, Machine]) -> None:
    shown = subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout
    assert support.SUBNET not in shown
    assert support.SUBNET in network["head"].run("ip", "address")


def test_a_command_sees_the_control_groups_of_this_machine(network: Mapping[str, Machine]) -> None:
    here = sorted(os.listdir("/sys/fs/cgroup"))  # noqa: PTH208 - names are compared
    assert here == sorted(network["head"].run("ls", "/sys/fs/cgroup").split())
    assert here


def test_the_bytes_of_a_cable_are_those_that_were_sent(network: Mapping[str, Machine]) -> None:
    with Server(network["head"]) as server:
        before = {name: machine.traffic for name, machine in network.items()}
        network["node-1"].run(sys.executable, "-c", SEND, network["head"].address, str(8 * MIB))
        assert "end\n" == server.line()
        node, head = (network[name].traffic - before[name] for name in ("node-1", "head"))
    assert 8 * MIB <= node.sent <= 1.1 * 8 * MIB
    assert node.received <= 0.1 * 8 * MIB
    assert (node.sent, node.received) == (head.received, head.sent)


def test_an_idle_cable_carries_nothing(network: Mapping[str, Machine]) -> None:
    before = network["head"].traffic
    time.sleep(0.5)  # the absence of traffic is the experiment
    assert Traffic(0, 0) == network["head"].traffic - before


def test_a_connection_survives_a_cable_that_was_unplugged(network: Mapping[str, Machine]) -> None:
    head, node = network["head"], network["node-1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        Server(head),
        node.start(sys.executable, "-c", ASK, head.address, **pipes) as client,
    ):
        assert client.stdin is not None
        assert client.stdout is not None
        assert "there\n" == client.stdout.readline()
        with head.unplugged():
            client.stdin.write("\n")
            client.stdin.flush()
            assert "asked\n" == client.stdout.readline()
            with pytest.raises(MachineError, match=r"timed out|unreachable|No route"):
                node.run(sys.executable, "-c", SEND.replace("=10", "=0.5"), head.address, "1")
            assert client.poll() is None
        assert "b'!'\n" == client.stdout.readline()
        assert 0 == client.wait(10)


def test_a_mute_machine_hears_and_is_not_heard(network: Mapping[str, Machine]) -> None:
    """A connection is half-open then: it waits, and goes on afterwards."""
    head, node = network["head"], network["node-1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Server(head), node.start(sys.executable, "-c", ASK, head.address, **pipes) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert "there\n" == client.stdout.readline()
        before = node.traffic.received
        node.mute(head)
        client.stdin.write("\n")
        client.stdin.flush()
        assert "asked\n" == client.stdout.readline()
        with pytest.raises(MachineError, match="timed out"):
            head.run(sys.executable, "-c", SEND.replace("=10", "=0.5"), node.address, "1")
        assert before < node.traffic.received
        assert client.poll() is None
        node.unmute(head)
        assert "b'!'\n" == client.stdout.readline()
        assert 0 == client.wait(10)


def test_a_limited_cable_carries_its_rate_in_each_direction(network: Mapping[str, Machine]) -> None:
    if reason := support.cannot_limit():
        pytest.skip(reason)
    network["node-1"].limit("10mbit")
    expected_s = 2 * MIB * 8 / 10e6
    for receiver, sender in (("head", "node-1"), ("node-1", "head")):
        with Server(network[receiver]) as server:
            begin = time.monotonic()
            network[sender].run(sys.executable, "-c", SEND, network[receiver].address, str(2 * MIB))
            assert "end\n" == server.line()
            assert 0.9 * expected_s <= time.monotonic() - begin <= 2 * expected_s
    network["node-1"].unlimit()


def test_nothing_is_left_after_a_failure(network: Mapping[str, Machine]) -> None:
    before = namespaces()
    started: list[subprocess.Popen[str]] = []

    def fail() -> None:
        with machines("other") as found:
            assert before < namespaces()
            started.append(found["other"].start("sleep", "600"))
            raise KeyError("in the test")

    with pytest.raises(KeyError, match="in the test"):
        fail()
    assert before == namespaces()
    assert -signal.SIGKILL == started[0].wait(1)


def test_machines_that_cannot_be_made_leave_nothing(network: Mapping[str, Machine]) -> None:
    before = namespaces()
    with pytest.raises(MachineError, match="File exists"), machines("twice", "twice"):
        pass
    assert before == namespaces()


def test_machines_of_a_killed_process_are_removed_by_the_next_one() -> None:
    require_machines()
    program = (
        "import sys, time\nfrom tests.support.machines import machines\n"
        'with machines("lost") as found:\n'
        '    found["lost"].start("sleep", "600")\n    print("made", flush=True)\n    time.sleep(600)'
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert "made\n" == other.stdout.readline()
        mine = {name for name in namespaces() if f"-{other.pid}-" in name}
        assert 2 == len(mine)
        other.kill()
    with machines("next"):
        assert set() == mine & namespaces()


def test_machines_end_with_a_process_that_exits_in_between() -> None:
    require_machines()
    program = (
        "import sys\nfrom tests.support.machines import machines\n"
        'context = machines("open")\ncontext.__enter__()\nsys.exit(3)'
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert 3 == done.returncode
    assert [] == [name for name in namespaces() if not Path(f"/proc/{name.split('-')[1]}").exists()]


def test_without_root_tests_are_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    support.missing.cache_clear()
    try:
        with pytest.raises(pytest.skip.Exception, match="only root"):
            require_machines()
    finally:
        support.missing.cache_clear()
