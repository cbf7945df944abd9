"""The faults of nodes, links, replay shards, gateway and coordinator: how each is brought about and
undone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.lib.live_run import role_of, until
from benchmarks.lib.node_faults.cluster import (
    LEASE_S,
    NAMES,
    SPARE,
    WITH_CLOCK,
    Cluster,
)
from benchmarks.lib.nodes import END_S

T = TypeVar("T")
HOUR = 3600.0
SHORT_S = 2.0
"""Length of an outage that is shorter than the lease, with time to connect again."""
RESTART_S = 1.0
"""Seconds after which a killed node is started again, as systemd does."""
STOP_S = 30.0
PAUSE_S = 2 * LEASE_S
"""Length of a pause after which the other machines have given a node up."""
MARGIN_S = 2.0
FOUND_S = 20.0
GATEWAY = "gateway"
CLOCK = "clock of a node an hour off"
After = Callable[[], None]
"""Restores the nodes once the run has recovered."""


def _nothing(_cluster: Cluster) -> None:
    """Most faults need no preparation."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: for tables and messages.
        times: how often it happens in a whole benchmark.
        act: brings it about, and returns when it is over. It is given the cluster and the number
            of the repetition. It may return what restores the nodes after the recovery.
        spares: nothing may be lost: no trajectory is dropped as lost, and no host starts again.
        lasts: it has a length; its end is when ``act`` returns, and not its begin.
        prepare: comes before the calm time in front of the fault.
        slow: a quick benchmark omits it.
    """

    name: str
    times: int
    act: Callable[[Cluster, int], After | None]
    spares: bool = False
    lasts: bool = False
    prepare: Callable[[Cluster], None] = _nothing
    slow: bool = False


def _node(number: int) -> str:
    return NAMES[number % len(NAMES)]


def _cable_out(seconds: float) -> Callable[[Cluster, int], None]:
    def act(cluster: Cluster, number: int) -> None:
        with cluster.machines[_node(number)].unplugged():
            time.sleep(seconds)

    return act


def _half_open(cluster: Cluster, number: int) -> None:
    """Lose the packets of one direction for twice the lease; the directions take turns."""
    node = cluster.machines[_node(number // 2)]
    speaker, hearer = (node, cluster.head) if number % 2 == 0 else (cluster.head, node)
    speaker.mute(hearer)
    try:
        time.sleep(2 * LEASE_S)
    finally:
        speaker.unmute(hearer)


def _power_failure(cluster: Cluster, number: int) -> After:
    """A machine goes without a word, and does not come back before the run has recovered."""
    return _switch_off(cluster, _node(number))


def _switch_off(cluster: Cluster, name: str) -> After:
    machine = cluster.machines[name]
    machine.unplug()
    machine.kill()
    cluster.nodes.pop(name).kill()

    def replace() -> None:
        machine.plug()
        cluster.add_node(name)

    return replace


def _paused(cluster: Cluster, number: int) -> None:
    _pause(cluster, _node(number), STOP_S)


def _pause(cluster: Cluster, name: str, seconds: float) -> None:
    machine = cluster.machines[name]
    machine.kill(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        machine.kill(signal.SIGCONT)


def _node_killed(cluster: Cluster, number: int) -> None:
    node = cluster.nodes[_node(number)]
    node.kill()
    time.sleep(RESTART_S)
    node.start()


def _host_killed(cluster: Cluster, number: int) -> None:
    machine = cluster.machines[_node(number)]
    _kill(cluster, "a host", lambda: cluster.hosts_of(machine))


def _gateway_killed(cluster: Cluster, _number: int) -> None:
    def found() -> list[int]:
        return [pid for pid in cluster.head.pids if role_of(pid) == GATEWAY]

    (victim,) = _kill(cluster, "the gateway", found)
    _wait(cluster, "another gateway", lambda: set(found()) - {victim})


def _kill(cluster: Cluster, what: str, find: Callable[[], Sequence[int]]) -> Sequence[int]:
    """Kill the first process that ``find`` finds, and return its pid."""
    pids = _wait(cluster, what, find)
    with suppress(ProcessLookupError):
        os.kill(pids[0], signal.SIGKILL)
    return pids[:1]


def _wait(cluster: Cluster, what: str, find: Callable[[], T]) -> T:
    """Return what ``find`` finds. Give the run up if there is nothing in time."""
    try:
        return until(what, find, within_s=FOUND_S)
    except TimeoutError as error:
        cluster.give_up(what, str(error))


def _coordinator_killed(cluster: Cluster, _number: int) -> After:
    cluster.kill_coordinator()
    cluster.resume()
    return cluster.watch_again


def _clock(cluster: Cluster, number: int) -> After | None:
    """A node works for longer than the lease, leaves and joins while its clock is an hour off."""
    clock = cluster.clock
    assert clock is not None
    before = cluster.watcher.wait_for_look(FOUND_S)
    clock.shift(HOUR if number % 2 == 0 else -HOUR)
    time.sleep(LEASE_S + MARGIN_S)
    after = cluster.watcher.wait_for_look(FOUND_S)
    if after.restarts != before.restarts or set(after.hosts) != set(NAMES):
        detail = f"{dict(before.restarts)} restarts, then {dict(after.restarts)} on {after.hosts}"
        cluster.report("clock", "a node with another clock", detail)
    cluster.remove_node(WITH_CLOCK)
    cluster.add_node(WITH_CLOCK)
    return lambda: clock.shift(0.0)


def _come_and_go(cluster: Cluster, number: int) -> After:
    """Two nodes join while one leaves."""
    leaving = _node(number)
    node = cluster.nodes.pop(leaving)
    node.process.terminate()
    for name in SPARE:
        cluster.add_node(name)
    if (code := node.process.wait(END_S)) != 0:
        cluster.report("end", "a node that leaves", f"{leaving} ended with exit code {code}")

    def restore() -> None:
        cluster.add_node(leaving)
        for name in SPARE:
            cluster.remove_node(name)

    return restore


# Of a run with replay shards
# --------------------------------------------------------------------------------------------------


def _with_shard(cluster: Cluster) -> str:
    """Return the name of a node that has a shard."""
    return _wait(cluster, "a node with a shard", cluster.nodes_of_shards)[0]


def _store_paused(cluster: Cluster, _number: int) -> None:
    """Its shards are lost, and start elsewhere. When it is continued, it sends what is too late."""
    _pause(cluster, _with_shard(cluster), PAUSE_S)


def _store_gone(cluster: Cluster, _number: int) -> After:
    return _switch_off(cluster, _with_shard(cluster))


def _shard_killed(cluster: Cluster, _number: int) -> None:
    machine = cluster.machines[_with_shard(cluster)]
    _kill(cluster, "a shard", lambda: cluster.hosts_of(machine, "replay"))


def _direct_link_out(cluster: Cluster, _number: int) -> None:
    """Two nodes do not hear each other. Trajectories go over the head meanwhile."""
    store = _with_shard(cluster)
    one = cluster.machines[store]
    other = cluster.machines[next(name for name in NAMES if name != store)]
    one.mute(other)
    other.mute(one)
    try:
        time.sleep(2 * LEASE_S)
    finally:
        one.unmute(other)
        other.unmute(one)


FAULTS = (
    Fault(f"cable out for {SHORT_S:g} s", 10, _cable_out(SHORT_S), spares=True, lasts=True),
    Fault("cable out for 10 s", 5, _cable_out(10.0), lasts=True),
    Fault("cable out for 60 s", 2, _cable_out(60.0), lasts=True, slow=True),
    Fault("machine gone for good", 3, _power_failure),
    Fault(f"machine paused for {STOP_S:g} s", 3, _paused, lasts=True),
    Fault("process of a node killed", 10, _node_killed),
    Fault("host on a node killed", 10, _host_killed),
    Fault("gateway killed", 10, _gateway_killed, spares=True),
    Fault("coordinator killed, run resumed", 10, _coordinator_killed, prepare=Cluster.compare),
    Fault("half-open link for 10 s", 6, _half_open, lasts=True),
    Fault(CLOCK, 4, _clock, lasts=True),
    Fault("two nodes join, one leaves", 10, _come_and_go),
)
"""All kinds of faults of a run without replay, in the order of the table."""
SHARD_FAULTS = (
    Fault(f"machine of a shard paused for {PAUSE_S:g} s", 5, _store_paused, lasts=True),
    Fault("machine of a shard gone for good", 5, _store_gone),
    Fault("process of a shard killed", 10, _shard_killed),
    Fault("link between two nodes out for 10 s", 10, _direct_link_out, spares=True, lasts=True),
)
"""Those of a run with replay shards on its nodes."""
RUN, STORED_RUN = "run", "run with replay shards on nodes"
RUNS: Mapping[str, Sequence[Fault]] = {RUN: FAULTS, STORED_RUN: SHARD_FAULTS}
"""The faults of each run."""


def rounds(faults: Sequence[Fault], *, quick: bool) -> list[tuple[Fault, int]]:
    """Return ``faults`` with the numbers of their repetitions: each kind once, then again. A quick
    benchmark has each kind once, without the slow ones.
    """
    counts = {fault.name: fault.times for fault in faults}
    if quick:
        counts = {fault.name: int(not fault.slow) for fault in faults}
    return [
        (fault, number)
        for number in range(max(counts.values()))
        for fault in faults
        if number < counts[fault.name]
    ]
