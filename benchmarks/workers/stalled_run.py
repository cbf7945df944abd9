"""Worker: a run with many actors. It measures the memory of all processes while the learner is
stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.harness import Values
from benchmarks.workers import paused_run, training
from tianflow import open_run
from tianflow.hosts import event_loop as loops

SETTLE_S = 10.0


async def stalled(
    config: Path,
    overrides: Sequence[str],
    *,
    train_s: float,
    seconds: float,
    samples: int,
    runs: Path,
) -> Values:
    """Measure memory while the learner is stopped: after data in flight have settled, and
    ``samples`` times over ``seconds``.
    """
    async with open_run(config, overrides, runs_dir=runs) as run:
        await training.until_started(run)
        await asyncio.sleep(train_s)
        learner = next(pid for pid in paused_run.tree() if _name(pid) == "learner")
        os.kill(learner, signal.SIGSTOP)
        try:
            await asyncio.sleep(SETTLE_S)
            first = paused_run.pss_mib(paused_run.tree())
            found = []
            for _ in range(samples):
                await asyncio.sleep(seconds / samples)
                found.append(paused_run.pss_mib(paused_run.tree()))
        finally:
            os.kill(learner, signal.SIGCONT)
        return {
            "first": first,
            "last": found[-1],
            "highest": max(found),
            "processes": float(len(paused_run.tree())),
        }


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()


def main() -> None:
    """Arguments: ``CONFIG TRAIN_S SECONDS RUNS [section.key=value ...]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("train_s", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("runs", type=Path)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    samples = max(1, round(given.seconds / 60.0))
    work = stalled(
        given.config,
        given.overrides,
        train_s=given.train_s,
        seconds=given.seconds,
        samples=samples,
        runs=given.runs,
    )
    child.report(loops.run(work))


if __name__ == "__main__":
    main()
