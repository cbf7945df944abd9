"""Simulations of many nodes whose head has one core for the coordinator and one for the gateway.

`tianflow.simulation` has ledger, exchange, credits and actors of a run, and takes no time for the
processes of the head. Here every message of an actor goes through two queues with one server each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVarTuple

from tianflow.config.loading import load_config
from tianflow.core.payloads import Trajectory
from tianflow.simulation.clock import Clock
from tianflow.simulation.rates import MeasuredRates
from tianflow.simulation.simulation import Simulation

Ts = TypeVarTuple("Ts")
BATCHES = 4
"""Batches that all actors together make while each of them makes one trajectory."""
MAX_STALENESS = 2 * BATCHES
"""With it, eta * B >= A: no actor idles for its credit."""
LEARNER_SHARE = 0.25
"""Of the time in which the actors make a batch, the share that an update takes."""
LATENCY_S = 5e-4
"""One way between a node and the head."""
WARM, COUNTED = 2, 3
"""Trajectories of each actor before and in the measurement."""
ENOUGH = 0.95
"""Of the steps/s that the nodes would make with a head that takes no time."""
STEP = 1.05
"""Factor between two numbers of nodes of a search."""


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """CPU time of one process of the head, in seconds.

    Attributes:
        trajectory_s: for each trajectory, with all its messages and its share of an update.
        node_s: in each second, for each node, whatever it does.
        own_s: in each second, without any node.
    """

    trajectory_s: float
    node_s: float = 0.0
    own_s: float = 0.0

    def most_nodes(self, rate: float) -> float:
        """Return the number of nodes with ``rate`` trajectories a second each that take one core:
        ``(1 - own) / (node + rate * trajectory)``.
        """
        needed = self.node_s + rate * self.trajectory_s
        return (1.0 - self.own_s) / needed if needed > 0.0 else math.inf

    def busy_s(self, nodes: int) -> float:
        """Return the seconds for which a trajectory of one of ``nodes`` occupies the core, beside
        the work that does not depend on trajectories. Infinite if that work takes the whole core.
        """
        left = 1.0 - self.own_s - nodes * self.node_s
        return self.trajectory_s / left if left > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class Head:
    """Costs of the two processes of the head that every trajectory passes."""

    coordinator: ProcessCost
    gateway: ProcessCost

    def most_nodes(self, rate: float) -> float:
        """Return the number of nodes at which the first of both takes one core."""
        return min(self.coordinator.most_nodes(rate), self.gateway.most_nodes(rate))


@dataclass(frozen=True, slots=True)
class Load:
    """What each node does.

    Attributes:
        actors: on a node, each with a compute thread of its own.
        rate: trajectories a second of a node.
    """

    actors: int
    rate: float


class OneCore:
    """A process in virtual time that does one thing after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free_at = clock, 0.0

    def handle(self, seconds: float, act: Callable[[*Ts], object], *arguments: *Ts) -> None:
        """Call ``act`` after ``seconds`` of work, and after everything that came before."""
        now = self._clock.now
        self._free_at = max(self._free_at, now) + seconds
        self._clock.at(self._free_at - now, act, *arguments)


def share_of_steps(config: Path, load: Load, nodes: int, head: Head) -> float:
    """Return the simulated steps/s of ``nodes``, over those with a head that takes no time.

    The batch grows with the number of nodes, and the learner is fast enough.
    """
    costs = head.gateway.busy_s(nodes), head.coordinator.busy_s(nodes)
    if math.inf in costs:
        return 0.0
    return _steps_per_s(config, load, nodes, *costs) / _steps_per_s(config, load, nodes, 0.0, 0.0)


def _steps_per_s(
    config: Path, load: Load, nodes: int, gateway_s: float, coordinator_s: float
) -> float:
    """Simulate the steps/s of a head whose processes take these times for a trajectory."""
    actors, batch = nodes * load.actors, max(1, nodes * load.actors // BATCHES)
    settings = (
        f"algorithm.batch_trajectories={batch}",
        f"balance.max_staleness={MAX_STALENESS}",
        "actors.hosts=null",
    )
    rates = MeasuredRates(
        trajectory_s=load.actors / load.rate,
        update_s=LEARNER_SHARE * batch / (nodes * load.rate),
        latency_s=LATENCY_S,
    )
    simulation = Simulation(load_config(config, settings), rates, actors=actors)
    _occupy(simulation, gateway_s, coordinator_s)
    return simulation.run(updates=COUNTED * BATCHES, warmup=WARM * BATCHES).steps_per_s


def _occupy(simulation: Simulation, gateway_s: float, coordinator_s: float) -> None:
    """Let the messages of all actors queue for the gateway, then for the coordinator.

    The message that commits a trajectory occupies them for the whole cost of the trajectory. Its
    other messages only have their place in the queues. Answers do not queue.
    """
    gateway, coordinator = OneCore(simulation.clock), OneCore(simulation.clock)
    context = simulation.actors[0].context  # all actors share it
    request, begin, commit = context.request, context.begin, context.commit

    def commit_later(trajectory: Trajectory, place: str = "") -> bool:
        gateway.handle(gateway_s, coordinator.handle, coordinator_s, commit, trajectory, place)
        return True  # simulated actors do not read it

    context.commit = commit_later
    context.request = lambda *message: gateway.handle(
        0.0, coordinator.handle, 0.0, request, *message
    )
    context.begin = lambda *message: gateway.handle(0.0, coordinator.handle, 0.0, begin, *message)


def most_nodes(enough: Callable[[int], bool], guess: float, most: int) -> int:
    """Return the largest number of nodes that are ``enough``, within 5 %. 0: not even one is.

    Args:
        enough: true up to some number of nodes.
        guess: where to begin, close to the result.
        most: number of nodes that is never exceeded.
    """
    found = max(1, round(min(guess, most)))
    if not enough(found):
        while found := int(found / STEP):
            if enough(found):
                break
        return found
    while found < most and enough(larger := min(most, math.ceil(STEP * found))):
        found = larger
    return found
