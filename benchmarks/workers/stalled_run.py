"""Worker: a run with many actors, here or on a node. It measures the memory of all processes while
an update of the learner does not end. (A process that is stopped would be replaced.)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.harness import Values
from benchmarks.lib.live_run import role_of
from benchmarks.lib.nodes import NodeProcess, nodes
from benchmarks.workers import paused_run, training
from tianflow import open_run
from tianflow.hosts import event_loop as loops
from tianflow.rundir import join_file

SETTLE_S = 10.0
RUN = "stalled"
SLOWDOWN = 1e6
"""An update of 0.1 s sleeps for a day."""


async def stalled(
    config: Path,
    overrides: Sequence[str],
    *,
    train_s: float,
    seconds: float,
    samples: int,
    runs: Path,
    on_node: bool = False,
) -> Values:
    """Measure memory during an update that does not end: after data in flight have settled, and
    ``samples`` times over ``seconds``. With ``on_node``, the actors are on a node, which is
    measured beside the rest.
    """
    with contextlib.ExitStack() as stack:
        node = None
        settings = [*overrides, f"run.name={RUN}"]
        if on_node:
            node = NodeProcess(runs / RUN / join_file.NAME, "node", runs / "node.log")
            stack.enter_context(nodes(node))
            settings += ["placement.launcher=nodes", "cluster.expect=1"]
        async with open_run(config, settings, runs_dir=runs) as run:
            await training.until_started(run)
            await training.until_every_actor_started(run)
            await asyncio.sleep(train_s)
            run.control.change({"learner": {"slowdown": SLOWDOWN}}, source="api")
            await asyncio.sleep(SETTLE_S)
            updates, found = run.control.statistics().ledger.updates, [memory(node)]
            for _ in range(samples):
                await asyncio.sleep(seconds / samples)
                found.append(memory(node))
            if run.control.statistics().ledger.updates != updates:
                raise RuntimeError("an update has ended")
            run.control.change({"learner": {"slowdown": 0.0}}, source="api")
            for pid in paused_run.tree():  # its successor can end the run
                if role_of(pid) == "learner":
                    os.kill(pid, signal.SIGKILL)
            values: Values = {
                f"{side}{when}": value
                for side in found[0]
                for when, value in (
                    ("first", found[0][side]),
                    ("last", found[-1][side]),
                    ("highest", max(each[side] for each in found[1:])),
                )
            }
            return {**values, "processes": float(len(paused_run.tree()))}


def memory(node: NodeProcess | None) -> dict[str, float]:
    """Return the memory of all processes, and of those of ``node`` as ``node_``. Pages of files do
    not count: their share of a process depends on programs outside the run.
    """
    kinds = ("Pss_Anon", "Pss_Shmem")
    if node is None:
        return {"": paused_run.pss_mib(paused_run.tree(), kinds)}
    there = paused_run.tree(node.process.pid)
    here = [pid for pid in paused_run.tree() if pid not in there]
    return {"": paused_run.pss_mib(here, kinds), "node_": paused_run.pss_mib(there, kinds)}


def main() -> None:
    """Arguments: ``CONFIG TRAIN_S SECONDS RUNS [--on-node] [section.key=value ...]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("train_s", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--on-node", action="store_true")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    samples = max(1, round(given.seconds / 60.0))
    work = stalled(
        given.config,
        given.overrides,
        train_s=given.train_s,
        seconds=given.seconds,
        samples=samples,
        runs=given.runs,
        on_node=given.on_node,
    )
    child.report(loops.run(work))


if __name__ == "__main__":
    main()
