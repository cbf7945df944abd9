"""Machines for tests and benchmarks: network namespaces, each joined to one switch by a cable.

A command runs on a machine through `nsenter`, which changes the network only. ``ip netns exec``
would mount another /sys as well, which hides the memory limit of the control group. The switch is a
bridge in a namespace of its own, so the network of this machine does not change.

A cable is unplugged at the switch: a machine then sees no carrier, and retains its addresses and
connections, as with a real cable.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

PREFIX = "tianflow"
NAMESPACES = Path("/run/netns")
SWITCH = "switch"
PORT = "eth0"
"""The interface of a machine."""
SUBNET = "10.77.0"
LONGEST = 15
"""Characters of the name of an interface: a port of the switch has that of its machine."""
PACKETS = "64kb"
"""Burst of a limited link: the largest packet that a sender gives to the system at once."""
NO_IPV6 = tuple(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6" for name in ("all", "default"))
QUEUE = "100ms"
"""Longest time that a packet waits for a limited link, before it is lost."""
UNUSED_ADDRESS = "02:00:00:00:00:00"
"""A hardware address that no machine has: the switch delivers what is sent there to no process."""
CLONE_NEWNET = 0x40000000
T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
POLL_S = 0.01
END_S = 10.0
"""Seconds within which a killed process has ended."""


class MachineError(Exception):
    """A command that makes or changes a machine failed."""


def call(*command: str) -> str:
    """Return the output of ``command``. MachineError with its words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@functools.cache
def missing() -> str:
    """Return the reason why there are no machines here; "" if there are."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"{tool} (Debian: {package}) is not installed"
    try:
        with machines("probe"):
            return ""
    except MachineError as error:
        return f"the system makes no network namespaces: {error}"


@functools.cache
def cannot_limit() -> str:
    """Return the reason why no link can be limited here; "" if it can."""
    if missing():
        return missing()
    with machines("probe") as network:
        try:
            network["probe"].limit("10mbit")
        except MachineError as error:
            return f"the kernel has no token bucket (CONFIG_NET_SCH_TBF): {error}"
    return ""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that have crossed a machine's cable, with their frames. The loopback does not count."""

    sent: int
    received: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        """Traffic since an earlier moment."""
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


class Machine:
    """One network namespace with a loopback, an address, and a cable to the switch."""

    def __init__(self, name: str, *, namespace: str, switch: str, address: str) -> None:
        self.name, self.address = name, address
        self._namespace, self._switch = namespace, switch

    def command(self, *arguments: str) -> list[str]:
        """``arguments`` as a command that runs here. Its process is that of ``arguments``."""
        return ["nsenter", f"--net={NAMESPACES / self._namespace}", "--", *arguments]

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a process here. ``options``: of `subprocess.Popen`."""
        return subprocess.Popen(self.command(*arguments), **options)

    def run(self, *arguments: str, timeout: float = 60.0, **options: Any) -> str:
        """The output of a command that runs here. MachineError if it fails."""
        done = subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            **options,
        )
        if done.returncode:
            raise MachineError(f"{self.name}: {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return str(done.stdout)

    def within(self, function: Callable[[], T]) -> T:
        """Call ``function`` on this machine, in a thread of this process: what it connects to is
        reached from here.
        """

        def work() -> T:
            descriptor = os.open(NAMESPACES / self._namespace, os.O_RDONLY)
            try:
                if _libc.setns(descriptor, CLONE_NEWNET) != 0:
                    raise MachineError(f"{self.name}: setns: {os.strerror(ctypes.get_errno())}")
            finally:
                os.close(descriptor)
            return function()

        # A thread never leaves the network that it has entered, so it is not used again.
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(work).result()

    # Cable
    # ----------------------------------------------------------------------------------------------

    def unplug(self) -> None:
        """Take the cable out of the switch. Returns once the machine sees no carrier."""
        call("ip", "-n", self._switch, "link", "set", self.name, "down")
        self._await_carrier(present=False)

    def plug(self) -> None:
        """Put the cable back. Returns once packets pass."""
        call("ip", "-n", self._switch, "link", "set", self.name, "up")
        self._await_carrier(present=True)

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """Without its cable."""
        self.unplug()
        try:
            yield
        finally:
            self.plug()

    def _await_carrier(self, *, present: bool) -> None:
        deadline = time.monotonic() + END_S
        while ("LOWER_UP" in self._link()["flags"]) != present or (present and not self._forwards):
            if time.monotonic() > deadline:
                raise MachineError(
                    f"{self.name}: the carrier is not {'there' if present else 'gone'}"
                )
            time.sleep(POLL_S)

    @property
    def _forwards(self) -> bool:
        port = json.loads(
            call("bridge", "-n", self._switch, "-j", "link", "show", "dev", self.name)
        )
        return bool(port[0]["state"] == "forwarding")

    def _link(self) -> dict[str, Any]:
        shown = call("ip", "-n", self._namespace, "-s", "-j", "link", "show", "dev", PORT)
        found: dict[str, Any] = json.loads(shown)[0]
        return found

    @property
    def traffic(self) -> Traffic:
        """Since the machine was made."""
        counted = self._link()["stats64"]
        return Traffic(int(counted["tx"]["bytes"]), int(counted["rx"]["bytes"]))

    def limit(self, rate: str) -> None:
        """Limit the cable to ``rate``, such as ``10mbit``, in each direction."""
        self._shape(self._namespace, PORT, rate)
        self._shape(self._switch, self.name, rate)

    def unlimit(self) -> None:
        """Undo `limit`."""
        for namespace, port in ((self._namespace, PORT), (self._switch, self.name)):
            call("tc", "-n", namespace, "qdisc", "del", "dev", port, "root")

    @staticmethod
    def _shape(namespace: str, port: str, rate: str) -> None:
        bucket = ("tbf", "rate", rate, "burst", PACKETS, "latency", QUEUE)
        call("tc", "-n", namespace, "qdisc", "replace", "dev", port, "root", *bucket)

    def mute(self, other: Machine) -> None:
        """Lose all packets from here to ``other``; those from ``other`` still arrive. Connections
        between the two are half-open then: no end sees an error.
        """
        self._neighbour("replace", other.address, "lladdr", UNUSED_ADDRESS, "nud", "permanent")

    def unmute(self, other: Machine) -> None:
        """Undo `mute`."""
        self._neighbour("delete", other.address)

    def _neighbour(self, action: str, address: str, *arguments: str) -> None:
        call("ip", "-n", self._namespace, "neigh", action, address, *arguments, "dev", PORT)

    # Processes
    # ----------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Processes that run here."""
        return [int(pid) for pid in call("ip", "netns", "pids", self._namespace).split()]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to every process here: SIGKILL is a power failure, SIGSTOP a pause."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def machines(*names: str) -> Iterator[Mapping[str, Machine]]:
    """Machines called ``names``. Nothing of them is left afterwards, also after a failure, and
    processes that still run on them are killed.
    """
    if bad := [name for name in names if len(name) > LONGEST or name == SWITCH]:
        raise MachineError(f"not names of machines: {bad}")
    _remove_forgotten()
    own = f"{PREFIX}-{os.getpid()}-{time.monotonic_ns() % 10**9}"
    spaces = {name: f"{own}-{name}" for name in (SWITCH, *names)}
    try:
        yield _make(spaces, names)
    finally:
        _remove(*spaces.values())


def _make(spaces: Mapping[str, str], names: Sequence[str]) -> dict[str, Machine]:
    switch = spaces[SWITCH]
    for space in spaces.values():
        call("ip", "netns", "add", space)
        # A new namespace has a loopback that is down: nothing would reach 127.0.0.1.
        call("ip", "-n", space, "link", "set", "lo", "up")
        # With IPv6 the system sends packets by itself, which would count.
        for path in NO_IPV6:
            call(
                "nsenter",
                f"--net={NAMESPACES / space}",
                "--",
                "sh",
                "-c",
                f"[ ! -e {path} ] || echo 1 > {path}",
            )
    call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
    call("ip", "-n", switch, "link", "set", "bridge", "up")
    made = {}
    for number, name in enumerate(names, start=1):
        space, address = spaces[name], f"{SUBNET}.{number}"
        cable = ("type", "veth", "peer", "name", PORT, "netns", space)
        call("ip", "-n", switch, "link", "add", name, *cable)
        call("ip", "-n", switch, "link", "set", name, "master", "bridge", "up")
        call("ip", "-n", space, "link", "set", PORT, "up")
        call("ip", "-n", space, "address", "add", f"{address}/24", "dev", PORT)
        made[name] = Machine(name, namespace=space, switch=switch, address=address)
    for machine in made.values():
        machine.plug()
    return made


def _remove(*spaces: str) -> None:
    """Kill what runs in ``spaces``, and remove them with their cables."""
    there = [space for space in spaces if (NAMESPACES / space).exists()]
    deadline = time.monotonic() + END_S
    while pids := [pid for space in there for pid in call("ip", "netns", "pids", space).split()]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline or all(_is_own_zombie(int(pid)) for pid in pids):
            break
        time.sleep(POLL_S)
    for space in there:
        call("ip", "netns", "delete", space)


def _is_own_zombie(pid: int) -> bool:
    """True for a child of this process that has ended: its caller reaps it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] == "Z"


def _remove_forgotten() -> None:
    """Remove machines of processes that were killed before they could."""
    for path in NAMESPACES.glob(f"{PREFIX}-*-*"):
        owner = path.name.split("-")[1]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            _remove(path.name)
