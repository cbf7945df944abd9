"""Worker: one training run, measured over a window in which nothing starts and nothing ends."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.harness import Values
from benchmarks.lib.machine import ROOT
from tianflow import open_run
from tianflow.api import OpenRun
from tianflow.coordinator import ENDED
from tianflow.coordinator.counters import waiting_seconds
from tianflow.core.statistics import RunStatistics
from tianflow.hosts import event_loop as loops
from tianflow.launchers.remote import RemoteHost

CONFIGS = ROOT / "benchmarks" / "configs"
UNITS = {
    "committed_per_s": "env steps/s",
    "trained_per_s": "env steps/s",
    "return": "mean of the last 100 training episodes",
    "staleness_mean": "updates",
    "staleness_max": "updates",
    "dropped": "trajectories",
    "violations": "trajectories",
    "learner_waits": "of the time",
    "actors_wait": "of the time",
    "batch_requests": "requests, mean",
    "batch_seconds": "s, mean",
    "batch_p99": "s",
    "wait_p50": "s, from request to answer",
    "wait_p99": "s, from request to answer",
    "cores_learner": "cores",
    "cores_actors": "cores",
    "cores_inference": "cores",
    "cores_replay": "cores",
    "cores_evaluator": "cores",
    "cores_coordinator": "cores",
}
"""Units of the values of `measure`. Beside these there is ``updates_per_s``, which is meaningful
only if all updates are alike.
"""


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of training before the measurement, and seconds of the measurement.

    ``every_actor``: the seconds before the measurement begin when every actor has started. Without
    it they begin with the first one.
    """

    warm_s: float
    seconds: float
    every_actor: bool = False


def measure(
    config: str,
    overrides: Sequence[str],
    window: Window,
    scratch: Path,
    cores: Sequence[int] = (),
) -> Values:
    """Train ``config`` (a file in ``configs``, or a whole path) in a child process. Return rates
    and shares over ``window``. The whole run stays on ``cores``, by default on all.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as runs:
        arguments = (
            *(("--every-actor",) if window.every_actor else ()),
            *(("--cores", ",".join(map(str, cores))) if cores else ()),
            *(CONFIGS / config, window.warm_s, window.seconds, runs, *overrides),
        )
        return child.run(
            "benchmarks.workers.training",
            *arguments,
            timeout_s=120.0 + 4.0 * (window.warm_s + window.seconds),
        ).answer


async def until_started(run: OpenRun) -> None:
    """Wait until learner and actors work, or the run has ended."""
    while run.control.state == "starting":  # noqa: ASYNC110 - a run has no event for it, and this wait is not timed
        await asyncio.sleep(0.02)


async def until_every_actor_started(run: OpenRun) -> None:
    """Wait until every actor has started, or the run has ended."""
    names = [f"actor-{index}" for index in range(run.control.config.actors.count)]
    while run.control.state not in ENDED and not all(map(run.run.registry.was_started, names)):  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.02)


async def watch(config: Path, overrides: Sequence[str], window: Window, runs: Path) -> Values:
    """Run in the child: train, and stop after the window."""
    async with open_run(config, overrides, runs_dir=runs) as run:
        await until_started(run)
        if window.every_actor:
            await until_every_actor_started(run)
        await asyncio.sleep(window.warm_s)
        before, spent = run.control.statistics(), processor_seconds(run)
        await asyncio.sleep(window.seconds)
        after, later = run.control.statistics(), processor_seconds(run)
        if run.control.state in ENDED:
            raise RuntimeError(
                f"the run ended before the window did: {run.run.lifecycle.end_reason}"
            )
    return {
        **between(before, after),
        **inference_between(before, after),
        **{
            f"cores_{role}": (later[role] - spent.get(role, 0.0)) / window.seconds for role in later
        },
    }


def processor_seconds(run: OpenRun) -> dict[str, float]:
    """Processor time so far of the hosts, by role, and of the coordinator."""
    found = {"coordinator": time.process_time()}
    for name, handle in run.run.hosts.handles.items():
        if isinstance(handle, RemoteHost):
            role = name.partition("-")[0]
            found[role] = found.get(role, 0.0) + _processor_seconds(handle.pid)
    return found


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def inference_between(before: RunStatistics, after: RunStatistics) -> Values:
    """Return what inference servers did between two snapshots; nothing without servers."""
    old = {component.name: component for component in before.components}
    servers = [component for component in after.components if component.role == "inference"]
    if not servers:
        return {}
    counts: dict[str, Counter[float]] = {"wait_seconds": Counter(), "compute_seconds": Counter()}
    requests = batches = computing = 0.0
    for server in servers:
        earlier = old.get(server.name, server)
        for name in ("batch_rows", "compute_seconds", "wait_seconds"):
            new, last = server.distributions[name], earlier.distributions[name]
            if name == "batch_rows":
                requests += new.total - last.total
                batches += new.count - last.count
                continue
            edges = (*new.edges, float("inf"))
            for edge, many, few in zip(edges, new.counts, last.counts, strict=True):
                counts[name][edge] += many - few
            if name == "compute_seconds":
                computing += new.total - last.total
    return {
        "batch_requests": requests / batches if batches else None,
        "batch_seconds": computing / batches if batches else None,
        "batch_p99": quantile(counts["compute_seconds"], 0.99),
        "wait_p50": quantile(counts["wait_seconds"], 0.5),
        "wait_p99": quantile(counts["wait_seconds"], 0.99),
    }


def quantile(counts: Mapping[float, float], part: float) -> float | None:
    """Return the value that ``part`` of all values do not exceed. ``counts`` holds the number of
    values up to each edge and above the edge before. Between two edges it interpolates, as
    Prometheus does.
    """
    wanted, seen, below = part * sum(counts.values()), 0.0, 0.0
    for edge in sorted(counts):
        if counts[edge] and seen + counts[edge] >= wanted:
            inside = (wanted - seen) / counts[edge]
            return below if edge == float("inf") else below + inside * (edge - below)
        seen, below = seen + counts[edge], edge
    return None


def between(before: RunStatistics, after: RunStatistics) -> Values:
    """Return rates, staleness and shares between two snapshots."""
    seconds = after.now - before.now
    first, last = before.ledger, after.ledger
    staleness = Counter(last.staleness)
    staleness.subtract(first.staleness)
    trained = staleness.total()
    actors = max(1, sum(component.role == "actor" for component in after.components))
    (learner_before, actors_before), (learner_after, actors_after) = (
        waiting_seconds(s.components, s.now) for s in (before, after)
    )
    returns = after.recent_returns
    return {
        "committed_per_s": (last.steps_committed - first.steps_committed) / seconds,
        "updates_per_s": (last.updates - first.updates) / seconds,
        "trained_per_s": (last.steps_trained - first.steps_trained) / seconds,
        "return": sum(returns) / len(returns) if returns else None,
        "staleness_mean": sum(updates * count for updates, count in staleness.items()) / trained
        if trained
        else None,
        "staleness_max": float(max(+staleness)) if trained else None,
        "dropped": float(sum(last.dropped.values()) - sum(first.dropped.values())),
        "violations": float(last.violations - first.violations),
        "learner_waits": (learner_after - learner_before) / seconds,
        "actors_wait": (actors_after - actors_before) / seconds / actors,
    }


def arguments() -> argparse.ArgumentParser:
    """Return the parser of ``CONFIG WARM_S SECONDS RUNS``, of a worker that measures a run over a
    window.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("warm_s", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("runs", type=Path)
    return parser


def main() -> None:
    """Arguments: ``[--every-actor] [--cores N,N...]``, those of `arguments`, then
    ``[section.key=value ...]``.
    """
    parser = arguments()
    parser.add_argument("--every-actor", action="store_true")
    parser.add_argument("--cores")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    if given.cores is not None:
        os.sched_setaffinity(0, set(map(int, given.cores.split(","))))
    window = Window(given.warm_s, given.seconds, given.every_actor)
    child.report(loops.run(watch(given.config, given.overrides, window, given.runs)))


if __name__ == "__main__":
    main()
