"""Worker: a training run, on one machine or as the head of nodes. It measures a window of training,
and one of a pause, with the CPU time of coordinator and gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.harness import Values, quotient
from benchmarks.lib.live_run import role_of
from benchmarks.workers import training
from tianflow import open_run
from tianflow.api import OpenRun
from tianflow.coordinator import ENDED
from tianflow.core.process_table import carries, processes
from tianflow.core.statistics import RunStatistics
from tianflow.hosts import event_loop as loops

GATEWAY = "gateway"
SETTLE_S = 2.0
"""Seconds from a pause until the trajectories in progress are over, and all is still."""


async def watch(
    config: Path, overrides: Sequence[str], window: training.Window, runs: Path
) -> Values:
    """Train, pause, and stop. The window begins when every actor has started."""
    async with open_run(config, overrides, runs_dir=runs) as run:
        await training.until_started(run)
        await training.until_every_actor_started(run)
        await asyncio.sleep(window.warm_s)
        gateways = gateways_of(run)
        before, spent = run.control.statistics(), cpu_of(gateways)
        await asyncio.sleep(window.seconds)
        after, later = run.control.statistics(), cpu_of(gateways)
        require_even(after)
        await run.pause()
        await asyncio.sleep(SETTLE_S)
        resting = cpu_of(gateways)
        await asyncio.sleep(window.seconds)
        rested = cpu_of(gateways)
        if run.control.state in ENDED:
            raise RuntimeError(
                f"the run ended before the window did: {run.run.lifecycle.end_reason}"
            )
        if gateways != gateways_of(run):
            raise RuntimeError("the gateway was restarted in the window")
    trajectories = after.ledger.committed - before.ledger.committed
    return {
        **training.between(before, after),
        "trajectories_per_s": trajectories / (after.now - before.now),
        **{
            f"{role}_us": quotient(1e6 * (later[role] - spent[role]), trajectories)
            for role in later
        },
        **{f"{role}_paused": (rested[role] - resting[role]) / window.seconds for role in later},
    }


def require_even(seen: RunStatistics) -> None:
    """Raise RuntimeError unless all nodes have equally many actors."""
    actors = {name: len(node.actors) for name, node in seen.nodes.items()}
    if len(set(actors.values())) > 1:
        raise RuntimeError(f"nodes have unequal numbers of actors: {actors}")


def gateways_of(run: OpenRun) -> list[int]:
    """Return the pid of the run's gateway; nothing without nodes."""
    return [
        entry.pid
        for entry in processes()
        if role_of(entry.pid) == GATEWAY and carries(entry.pid, "TIANFLOW_RUN", run.run.id)
    ]


def cpu_of(gateways: Sequence[int]) -> dict[str, float]:
    """Return the CPU seconds so far of the coordinator, which is this process, and of the
    gateway.
    """
    found = {"coordinator": time.process_time()}
    if gateways:
        found[GATEWAY] = sum(map(exact_cpu_seconds, gateways))
    return found


def exact_cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process. It has no steps, unlike that of its
    ``stat``.
    """
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text(encoding="ascii").split()[0]) for thread in threads) / 1e9


def main() -> None:
    """Arguments: those of `training.arguments`, then ``[section.key=value ...]``."""
    parser = training.arguments()
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    window = training.Window(given.warm_s, given.seconds, every_actor=True)
    child.report(loops.run(watch(given.config, given.overrides, window, given.runs)))


if __name__ == "__main__":
    main()
