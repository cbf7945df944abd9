"""128 actors in eight host processes: everyone gets its share, the bound is kept, and the
coordinator's loop stays free.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.oracle import Witness, oracle_config, until_true
from tianflow import api
from tianflow.coordinator import Run
from tianflow.launchers.remote import RemoteHost

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ACTORS, HOSTS, BATCH, BOUND = 128, 8, 32, 4
EACH = 30
"""Trajectories of everyone that are counted."""
TURN_S = 0.1
"""Processor time of one callback of the coordinator's loop. They take up to some milliseconds; what
copies, packs or computes over all actors at once takes a multiple of this. How late the loop is by
the clock is for ``benchmarks/many_actors.py`` to say.
"""


@contextmanager
def turns() -> Iterator[list[float]]:
    """Processor seconds of each callback that this thread's event loop runs meanwhile: what others
    do on the same cores is not in them.
    """
    handle, me = asyncio.events.Handle, threading.get_ident()
    found: list[float] = []
    plain = handle._run  # nothing public stands where every callback passes

    def timed(self: asyncio.Handle) -> None:
        if threading.get_ident() != me:
            plain(self)
            return
        began = time.thread_time()
        plain(self)
        found.append(time.thread_time() - began)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "_run", timed)
        yield found


def commits(run: Run) -> dict[str, int]:
    return {
        holder: share.trajectories
        for holder, share in run.exchange.ledger.snapshot().shares.items()
    }


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

    async def whole() -> tuple[dict[str, int], list[float]]:
        async with api.open_run(config, runs_dir=tmp_path) as handle:
            run = handle.run
            witness = Witness(run, lambda: learner_pid(run))
            await until_everyone_has(run, {}, 1)
            with turns() as seconds:
                made = await until_everyone_has(run, commits(run), EACH)
            run.lifecycle.end("done", "test")
            await handle.wait()
            histogram = witness.check(tmp_path / "record")
            assert 0 <= min(histogram) <= max(histogram) <= BOUND
            assert 0 == run.exchange.ledger.snapshot().violations
        return made, seconds

    made, seconds = asyncio.run(whole())
    assert ACTORS == len(made)
    assert max(made.values()) <= 2 * min(made.values())
    assert len(seconds) >= sum(made.values())  # a trajectory makes several turns
    assert max(seconds) <= TURN_S


def learner_pid(run: Run) -> int:
    handle = run.hosts.handles["learner"]
    assert isinstance(handle, RemoteHost)
    return handle.pid
