"""Suite: sleeping actors on four nodes, over as many on the head. A simulation extrapolates the
measured costs to a thousand nodes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lib import child, head_cores, namespaces
from benchmarks.lib.harness import (
    Benchmark,
    BenchmarkError,
    Plan,
    Ratio,
    RoundValues,
    Side,
    Values,
    quotient,
)
from benchmarks.lib.head_cores import Head, Load, ProcessCost
from benchmarks.lib.machine import clean_environment
from benchmarks.lib.nodes import NodeProcess, nodes
from benchmarks.workers import training
from tianflow.rundir import join_file

CONFIG = training.CONFIGS / "sleeping.toml"
HEAD, NAMES = "head", ("one", "two", "three", "four")
RUN = "nodes"
ACTORS, STEPS, BATCH, BOUND = 64, 16, 16, 4
assert BOUND * BATCH >= ACTORS  # no actor idles for its credit
START_S = 300.0
"""Longest time in which 64 hosts on four nodes start, on a loaded machine."""
MANY = 1000
PACE_AIM, CPU_AIM = 0.95, 1.3
PONG_STEPS_PER_CORE, PONG_CORES, PONG_STEPS, PONG_ENVS = 1500.0, 16, 20, 16
"""A node with Pong. Steps/s as in ``results/actors.md``; cores, T and environments of an actor as
in ``results/pong_gpu_actors.md``.
"""
PONG_BYTES = 0.29 * (PONG_STEPS + 1) * PONG_ENVS * 84 * 84 * 4
"""A trajectory with ``cluster.encoding = "stacks"``."""
GATEWAY_S_A_BYTE = 1.16e-9
"""CPU time of the gateway with CURVE beyond that of a small trajectory, from 4 MiB and 64 KiB of
`network` on an Intel Xeon. On an AMD EPYC it was 0.75e-9.
"""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Actors that are measured on one machine, and then on nodes.

    Attributes:
        hosts: processes of all actors. Actors of a host take turns.
        step_s: for which an environment sleeps.
        steps: of a trajectory.
    """

    hosts: int
    step_s: float
    steps: int = STEPS

    @property
    def name(self) -> str:
        """Part of the names of sides."""
        return f"{self.hosts} hosts, T = {self.steps}"

    @property
    def batch(self) -> int:
        """Trajectories of a batch, which has as many steps for all crowds."""
        return BATCH * STEPS // self.steps


TURNS, AT_ONCE = Crowd(len(NAMES), 0.005), Crowd(ACTORS, 0.04)
SHORT = replace(AT_ONCE, steps=STEPS // 4)
CROWDS = (TURNS, AT_ONCE, SHORT)
SLEEPING, PONG = f"simulated: nodes as those with {SHORT.name}", "simulated: nodes with Pong"
NOTES = (
    (
        "CPU time a trajectory is that of a whole window, with everything that does not depend on "
        "trajectories."
    ),
    (
        "Simulated sides have the costs of their round: for each trajectory, for each node and "
        "second (from the paused run), and of the coordinator itself (from the paused run on one "
        f"machine with {TURNS.name}). A core is full at (1 - own) / (node + rate * trajectory) "
        "nodes."
    ),
    (
        "The simulation has a queue before gateway and coordinator. Its batch grows with the "
        "nodes, its learner keeps up, and its actors request grants ahead. 0 of the steps/s: the "
        "nodes fill a core before they send a trajectory."
    ),
    (
        "A busy process handles several messages after each wake-up, which lowers its cost of a "
        f"trajectory. So the simulated costs are those with {SHORT.name}, and still higher than "
        "those of a full core."
    ),
    (
        f"Pong: {PONG_STEPS_PER_CORE:,.0f} steps/s a core, {PONG_CORES} cores a node, "
        f"trajectories of {PONG_STEPS} steps of {PONG_ENVS} environments. For each of "
        f"{PONG_BYTES / 1e6:.2g} MB the gateway takes {1e9 * GATEWAY_S_A_BYTE:.3g} ms more "
        "(`network`)."
    ),
    "A run has at most 4,096 actors. More exist in the simulation only.",
)


def one_of(crowd: Crowd) -> str:
    """Return the name of the side on one machine."""
    return f"one machine, {crowd.name}"


def four_of(crowd: Crowd) -> str:
    """Return the name of the side on nodes."""
    return f"{len(NAMES)} nodes, {crowd.name}"


def overrides(crowd: Crowd) -> tuple[str, ...]:
    """Return the settings of both sides."""
    return (
        f"run.name={RUN}",
        f"env.kwargs.seconds={crowd.step_s}",
        f"actors.count={ACTORS}",
        f"actors.hosts={crowd.hosts}",
        f"actors.rollout_steps={crowd.steps}",
        f"algorithm.batch_trajectories={crowd.batch}",
        f"balance.max_staleness={BOUND}",
        "placement.affinity=none",
        "run.max_seconds=10000",
    )


def on_one_machine(crowd: Crowd, seed: int, window: training.Window, scratch: Path) -> Values:
    """Measure all actors on the head."""
    with tempfile.TemporaryDirectory(dir=scratch) as runs:
        return _measured(crowd, seed, window, Path(runs))


def on_nodes(crowd: Crowd, seed: int, window: training.Window, scratch: Path) -> Values:
    """Measure the actors on nodes, which are network namespaces, as is the head."""
    if reason := namespaces.missing():
        raise BenchmarkError(f"there are no machines: {reason}")
    with (
        tempfile.TemporaryDirectory(dir=scratch) as runs,
        namespaces.machines(HEAD, *NAMES) as network,
    ):
        made = [
            NodeProcess(
                Path(runs) / RUN / join_file.NAME,
                name,
                Path(runs) / f"{name}.log",
                wrap=network[name].command,
                environment=clean_environment(os.environ),
            )
            for name in NAMES
        ]
        with nodes(*made):
            settings = ("placement.launcher=nodes", f"cluster.expect={len(NAMES)}")
            try:
                return _measured(crowd, seed, window, Path(runs), *settings, machine=network[HEAD])
            except BenchmarkError as error:
                outputs = "\n".join(f"{node.name}: {node.output[-1000:]}" for node in made)
                raise BenchmarkError(f"{error}\n{outputs}") from error


def _measured(
    crowd: Crowd,
    seed: int,
    window: training.Window,
    runs: Path,
    *settings: str,
    machine: namespaces.Machine | None = None,
) -> Values:
    arguments = (window.warm_s, window.seconds, runs, f"run.seed={seed}")
    return child.run(
        "benchmarks.workers.nodes",
        *(CONFIG, *arguments, *overrides(crowd), *settings),
        timeout_s=START_S + 4.0 * (window.warm_s + 2.0 * window.seconds),
        machine=machine,
    ).answer


def costs(one: Values, four: Values) -> Head:
    """Return the costs of the head's processes.

    Args:
        one: of the run on one machine with few hosts. Paused, it has the coordinator's own cost.
        four: of the run on nodes.
    """

    def cost(process: str) -> ProcessCost:
        own, paused = (values.get(f"{process}_paused") or 0.0 for values in (one, four))
        rate, spent = four["trajectories_per_s"] or 0.0, four[f"{process}_us"] or 0.0
        return ProcessCost(
            trajectory_s=max(0.0, 1e-6 * spent - (quotient(paused, rate) or 0.0)),
            node_s=max(0.0, paused - own) / len(NAMES),
            own_s=own,
        )

    return Head(coordinator=cost("coordinator"), gateway=cost("gateway"))


def extrapolated(load: Load, head: Head, many: int = MANY) -> Values:
    """Return the numbers of nodes at which a core of the head is full, by arithmetic and by
    simulation. No simulation has more than twice as many nodes as ``many``.
    """

    def share(nodes: int) -> float:
        return head_cores.share_of_steps(CONFIG, load, nodes, head)

    simulated = head_cores.most_nodes(
        lambda nodes: share(nodes) >= head_cores.ENOUGH, head.most_nodes(load.rate), 2 * many
    )
    return {
        "trajectories_per_s": load.rate,
        "coordinator_us": 1e6 * head.coordinator.trajectory_s,
        "gateway_us": 1e6 * head.gateway.trajectory_s,
        "coordinator_node": head.coordinator.node_s,
        "gateway_node": head.gateway.node_s,
        "coordinator_nodes": head.coordinator.most_nodes(load.rate),
        "gateway_nodes": head.gateway.most_nodes(load.rate),
        "simulated_nodes": float(simulated),
        "share_of_many": share(many),
    }


def pong(head: Head) -> tuple[Load, Head]:
    """Return what a node with Pong does, and the costs with its larger trajectories."""
    rate = PONG_STEPS_PER_CORE * PONG_CORES / (PONG_STEPS * PONG_ENVS)
    larger = head.gateway.trajectory_s + GATEWAY_S_A_BYTE * PONG_BYTES
    return Load(PONG_CORES, rate), replace(head, gateway=replace(head.gateway, trajectory_s=larger))


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    window = training.Window(1.0, 1.0) if plan.quick else training.Window(5.0, 20.0)
    seeds = tuple(range(1, plan.rounds + 1))
    crowds, many = ((TURNS,), 8) if plan.quick else (CROWDS, MANY)
    seen: dict[tuple[str, int], Values] = {}

    def side(
        name: str, measure: Callable[[Crowd, int, training.Window, Path], Values], crowd: Crowd
    ) -> Side:
        def remembered(number: int) -> Values:
            seen[name, number] = measure(crowd, seeds[number], window, plan.scratch)
            return seen[name, number]

        return Side(name, remembered)

    def simulate(number: int, *, images: bool) -> Values:
        try:
            one, four = (seen[name, number] for name in (one_of(TURNS), four_of(crowds[-1])))
        except KeyError as error:
            raise BenchmarkError(f"the simulation needs the side {error.args[0][0]!r}") from None
        rate = (four["trajectories_per_s"] or 1.0) / len(NAMES)
        load, head = Load(ACTORS // len(NAMES), rate), costs(one, four)
        return extrapolated(*(pong(head) if images else (load, head)), many)

    return Benchmark(
        name="nodes",
        title=f"{ACTORS} sleeping actors on {len(NAMES)} nodes over as many on one machine",
        sides=(
            *(
                made
                for crowd in crowds
                for made in (
                    side(one_of(crowd), on_one_machine, crowd),
                    side(four_of(crowd), on_nodes, crowd),
                )
            ),
            Side(SLEEPING, lambda number: simulate(number, images=False)),
            Side(PONG, lambda number: simulate(number, images=True)),
        ),
        ratios=tuple(ratio for crowd in crowds for ratio in ratios_of(crowd)),
        units=units(many),
        settings=settings(window),
        seeds=seeds,
        notes=NOTES,
    )


def ratios_of(crowd: Crowd) -> tuple[Ratio, ...]:
    """Return the comparisons of one machine and nodes."""
    one, four = one_of(crowd), four_of(crowd)

    def of(name: str, numerator: str, denominator: str) -> Callable[[RoundValues], float | None]:
        return lambda values: quotient(values[numerator][name], values[denominator][name])

    return (
        Ratio(
            f"{crowd.name}: steps/s of nodes over one machine",
            of("committed_per_s", four, one),
            aim=PACE_AIM,
            sides=(one, four),
        ),
        Ratio(
            f"{crowd.name}: coordinator's CPU a trajectory, one machine over nodes",
            of("coordinator_us", one, four),
            aim=1.0 / CPU_AIM,
            sides=(one, four),
        ),
    )


def units(many: int) -> dict[str, str]:
    """Return the unit of each value, in the order of the table. ``many``: nodes of a simulation."""
    return {
        **{
            name: training.UNITS[name]
            for name in (
                "committed_per_s",
                "staleness_mean",
                "staleness_max",
                "dropped",
                "violations",
                "learner_waits",
                "actors_wait",
            )
        },
        "trajectories_per_s": "trajectories/s, simulated: of a node",
        "coordinator_us": "µs of CPU a trajectory",
        "gateway_us": "µs of CPU a trajectory",
        "coordinator_paused": "cores while the run is paused",
        "gateway_paused": "cores while the run is paused",
        "coordinator_node": "cores a node, whatever it does",
        "gateway_node": "cores a node, whatever it does",
        "coordinator_nodes": "nodes at which its core is full",
        "gateway_nodes": "nodes at which its core is full",
        "simulated_nodes": f"nodes that make {head_cores.ENOUGH:g} of their steps/s",
        "share_of_many": f"of the steps/s of {many:,} nodes",
    }


def settings(window: training.Window) -> dict[str, object]:
    """Return what a reader needs to repeat the benchmark."""
    return {
        "run": f"benchmarks/configs/{CONFIG.name}: {ACTORS} actors of one environment, "
        f"max_staleness = {BOUND}, 60 ms an update, "
        + ", ".join(f"B = {crowd.batch} with T = {crowd.steps}" for crowd in CROWDS[1:]),
        "steps": f"sleep {1e3 * TURNS.step_s:g} ms with {TURNS.hosts} hosts, "
        f"{1e3 * AT_ONCE.step_s:g} ms with {AT_ONCE.hosts}. Actors of a host take turns, so with "
        f"{TURNS.hosts} hosts {TURNS.hosts} of them sleep at once",
        "machines": f"a head and {len(NAMES)} nodes, network namespaces of one machine, CURVE on",
        "window": f"{window.seconds:g} s, {window.warm_s:g} s after the start of the last actor; "
        "then the run is paused and measured as long",
        "threads": "1 a process",
    }
