"""Data that prove their own age agree with the ledger, exactly, in runs of many processes, through
kills and live changes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.oracle import Witness, oracle_config, until, until_true, uses
from tianflow import api
from tianflow.coordinator import Run
from tianflow.launchers.processes import ProcessLauncher
from tianflow.launchers.remote import RemoteHost
from tianflow.ledger.tickets import State
from tianflow.planning import placement
from tianflow.rundir.control_file import ControlFile

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
LOOK_S = 0.1
"""Seconds between two looks that are not cheap, such as a scrape. A look takes up to tens of
milliseconds of a core, and runs need it, too.
"""


def pid_of(run: Run, host: str) -> int:
    handle = run.hosts.handles.get(host)
    return handle.pid if isinstance(handle, RemoteHost) else 0


class Scraper:
    """Reads ``/metrics`` again and again, and checks at every look what must hold."""

    def __init__(self, run: Run) -> None:
        control = ControlFile.read(run.control.directory)
        assert control is not None
        self._url = f"{control.address}/metrics"
        self.looks = 0

    async def run(self) -> None:
        while True:
            body = await asyncio.to_thread(
                lambda: urllib.request.urlopen(self._url, timeout=10).read().decode()
            )
            self.check(body)
            self.looks += 1
            await asyncio.sleep(LOOK_S)

    def check(self, body: str) -> None:
        values: dict[str, float] = {}
        dropped = 0.0
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                name = sample.name.removeprefix("tianflow_")
                dropped += sample.value if name == "trajectories_dropped_total" else 0.0
                values[name] = sample.value
        get = values.__getitem__
        assert get("trajectories_begun_total") == get("trajectories_trained_total") + dropped + get(
            "trajectories_open"
        )
        assert get("trajectories_granted_total") >= get("trajectories_begun_total") + get(
            "trajectories_returned_total"
        )
        assert get("staleness_updates_count") == get("trajectories_trained_total")
        assert 0 == get("staleness_violations_total")


async def kill(run: Run, host: str) -> None:
    """SIGKILL as soon as it lives, and wait until it is reaped."""
    victim = await until_true(run, lambda: pid_of(run, host))
    if host.startswith(
        "actors"
    ):  # while one of its trajectories is in the making, so that something is lost
        mine = {
            component.name
            for spec in placement.build(run.control.config, ProcessLauncher.capabilities).hosts
            if spec.name == host
            for component in spec.components
        }
        await until_true(
            run,
            lambda: any(ticket.holder in mine for ticket in run.exchange.ledger.live(State.BEGUN)),
        )
    os.kill(victim, signal.SIGKILL)
    await until_true(run, lambda: pid_of(run, host) != victim)


def change(run: Run, dice: random.Random) -> None:
    options: list[Mapping[str, Mapping[str, object]]] = [
        {"balance": {"max_staleness": dice.choice([0, 1, 2, 8])}},
        {"weights": {"publish_interval_updates": dice.choice([1, 2, 5])}},
        {"balance": {"min_fragment_steps": dice.choice([1, 4])}},
        {"algorithm": {"batch_trajectories": dice.choice([1, 2, 4])}},
    ]
    run.control.change(dice.choice(options), source="test")


async def shaken(
    folder: Path,
    config: Mapping[str, Any],
    victims: Sequence[str],
    dice: random.Random,
    change: Callable[[Run, random.Random], None],
    *,
    trajectories: int = 0,
) -> Run:
    """A run of the oracle that is changed three times before each of ``victims`` is killed, again
    and again until it has trained on so many ``trajectories``. Its record in ``folder`` and the
    ledger agree exactly.
    """
    apart = 25 * max(1, trajectories // 2000)
    killed: list[str] = []
    async with api.open_run(config, runs_dir=folder, http=True) as handle:
        run = handle.run
        witness = Witness(run, lambda: pid_of(run, "learner"))
        await until(run, 5)
        scraper = Scraper(run)
        scraping = asyncio.create_task(scraper.run())
        while len(killed) < len(victims) or run.exchange.ledger.snapshot().trained < trajectories:
            victim = victims[len(killed) % len(victims)]
            for _ in range(3):
                await until(run, run.exchange.ledger.snapshot().updates + dice.randrange(apart))
                change(run, dice)
            await asyncio.sleep(dice.random() * 0.05)  # the moment of the kill is the experiment
            await kill(run, victim)
            killed.append(victim)
        await until(run, run.exchange.ledger.snapshot().updates + 50)
        await until_true(run, lambda: scraper.looks > 10 or scraping.done())
        if scraping.done():
            scraping.result()
        scraping.cancel()
        run.lifecycle.end("done", "test")
        await handle.wait()
        histogram = witness.check(folder / "record", kills=killed.count("learner"))
        assert min(histogram) >= 0
        return run


def test_oracle_and_ledger_agree_over_kills_cuts_and_live_changes(tmp_path: Path) -> None:
    dice = random.Random(1)
    config = oracle_config(
        tmp_path / "record",
        env={"seconds": 0.001, "slow_share": 0.05, "factor": 20.0, "length": 12},
        algorithm={"update_s": 0.004},
        actors={"count": 4, "hosts": 2, "rollout_steps": 8, "refresh": "step"},
        balance={"max_staleness": 2, "min_fragment_steps": 1},
        placement={"launcher": "processes", "affinity": "none"},
        checkpoint={"every_s": 1.0},
        run={"max_restarts": 100},
    )
    victims = ["actors-0", "learner", "actors-1", "learner"]

    run = asyncio.run(shaken(tmp_path, config, victims, dice, change))
    ledger = run.exchange.ledger.snapshot()
    assert 0 == ledger.violations
    assert ledger.cuts > 0
    assert ledger.dropped["learner_lost"] > 0
    assert ledger.dropped["died"] > 0
    assert 1 + victims.count("learner") == len({use.pid for use in uses(tmp_path / "record")})
