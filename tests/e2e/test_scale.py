"""128 actors in eight host processes: everyone gets its share, the bound is kept, and the coordinator's loop stays free."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.oracle import Witness, oracle_config, until_true
from tianflow import api
from tianflow.coordinator import Run
from tianflow.launchers.processes import ProcessHost
from tianflow.statistics import Histogram

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
ACTORS, HOSTS, BATCH, BOUND = 128, 8, 32, 4
TURNS_S = 0.02
"""What nine processes on few cores may take before it is anybody's turn; work on the loop would take longer."""
BARE_LOOP = """
import asyncio, sys

async def main():
    loop, late = asyncio.get_running_loop(), []
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    ended = asyncio.create_task(reader.read())
    while not ended.done():
        asked = loop.time()
        await asyncio.sleep(0.1)
        late.append(loop.time() - asked - 0.1)
    print(*late)

asyncio.run(main())
"""
"""Measures its lag as the coordinator does, until its input ends."""


class Lags(Histogram):
    """Takes the place of the coordinator's histogram of loop lags and keeps every one."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def add(self, value: float) -> None:
        super().add(value)
        self.seconds.append(value)


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def commits(run: Run) -> dict[str, int]:
    return {holder: share.trajectories for holder, share in run.exchange.ledger.snapshot().shares.items()}


async def until_everyone_has(run: Run, before: dict[str, int], more: int) -> dict[str, int]:
    """Wait for ``more`` trajectories of every actor; how many each has made since ``before``."""

    def made() -> dict[str, int]:
        since = {holder: count - before.get(holder, 0) for holder, count in commits(run).items()}
        return since if len(since) == ACTORS and min(since.values()) >= more else {}

    return await until_true(run, made, every_s=0.25)


def test_128_actors_in_8_hosts_share_fairly_and_leave_the_coordinator_free(tmp_path: Path) -> None:
    assert (BOUND + 1) * BATCH >= ACTORS + BATCH
    config = oracle_config(
        tmp_path / "record",
        env={"seconds": 0.001},
        algorithm={"batch_trajectories": BATCH},
        actors={"count": ACTORS, "hosts": HOSTS, "rollout_steps": 8},
        balance={"max_staleness": BOUND, "min_fragment_steps": 1},
        placement={"launcher": "processes"},
        metrics={"interval_s": 1.0},
    )

    async def whole() -> tuple[dict[str, int], list[float], list[float]]:
        async with api.open_run(config, runs_dir=tmp_path) as handle:
            run = handle.control
            witness = Witness(run, lambda: learner_pid(run))
            await until_everyone_has(run, {}, 1)
            bare = await asyncio.create_subprocess_exec(
                sys.executable, "-c", BARE_LOOP, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            await until_everyone_has(run, commits(run), 1)  # starting a process is no part of what is measured
            run.rounds.loop_lag = lags = Lags()
            made = await until_everyone_has(run, commits(run), 90)  # long enough for a 99th percentile that is not the worst of all
            seconds = list(lags.seconds)
            out, _ = await bare.communicate(b"")
            run.end("done", "test")
            await handle.wait()
            histogram = witness.check(tmp_path / "record")
            assert 0 <= min(histogram) <= max(histogram) <= BOUND
            assert 0 == run.exchange.ledger.snapshot().violations
        return made, seconds, [float(value) for value in out.split()]

    made, seconds, bare = asyncio.run(whole())
    assert ACTORS == len(made)
    assert max(made.values()) <= 2 * min(made.values())
    assert median(seconds) <= 3 * median(bare)
    assert p99(seconds) <= max(3 * p99(bare), TURNS_S)


def learner_pid(run: Run) -> int:
    handle = run.staff.handles["learner"]
    assert isinstance(handle, ProcessHost)
    return handle.pid
