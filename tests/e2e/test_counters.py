"""Counters of real runs: none decreases while its coordinator lives, whatever is lost and restarted,
and all begin again with the next process of the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e import harness
from tests.e2e.harness import LiveRun
from tests.e2e.test_failures import MANY
from tests.e2e.test_replay import apex
from tianflow.rundir.checkpoints import CheckpointStore

pytestmark = [pytest.mark.e2e, pytest.mark.beside(lanes=2), pytest.mark.timeout(600)]
SCRAPE_S = 0.1


@dataclass
class Watcher:
    """Scrapes a run again and again, and compares each counter with the scrape before."""

    live: LiveRun
    highest: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    decreases: list[str] = field(default_factory=list)
    scrapes: int = 0

    def look(self) -> None:
        """One scrape."""
        body = self.live.request("/metrics")[1]
        counted = {
            f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for family in text_string_to_metric_families(body)
            if family.type in {"counter", "histogram"}
            for sample in family.samples
        }
        self.first = self.first or counted
        self.scrapes += bool(counted)
        for key, value in counted.items():
            if value < self.highest.get(key, 0.0):
                self.decreases.append(f"{key}: {self.highest[key]:.15g} to {value:.15g}")
            self.highest[key] = max(value, self.highest.get(key, 0.0))

    def total(self, name: str) -> float:
        """Sum of the highest values of all series of ``name``."""
        return sum(v for key, v in self.highest.items() if key.startswith(f"tianflow_{name}["))


@contextmanager
def watched(live: LiveRun) -> Iterator[Watcher]:
    """Scrapes while the context is open; afterwards no counter may have decreased."""
    watcher, over = Watcher(live), threading.Event()

    def watch() -> None:
        while not over.wait(SCRAPE_S):
            watcher.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield watcher
        live.until("ten scrapes", lambda: watcher.scrapes >= 10)
    finally:
        over.set()
        thread.join()
    assert [] == watcher.decreases


def lose(live: LiveRun, host: str, *, learner: int = 0) -> None:
    """Kill a host, and wait until its successor works and has reported."""
    before = live.restarts()
    live.kill(host)
    live.until(f"a new {host}", lambda: live.restarts() > before and live.ready())
    live.until_training(more=10)
    time.sleep(2.5)  # two reports of the new process: its own numbers are small and would show


def test_no_counter_decreases_although_every_kind_of_process_is_lost(tmp_path: Path) -> None:
    with apex(
        tmp_path,
        actors__count=2,
        actors__hosts=2,
        checkpoint__replay=True,
        replay__min_size=100,
        **MANY | {"checkpoint__keep": 2},
    ) as live:
        live.until_training(more=20)
        live.until_checkpoint()
        with watched(live) as first:
            time.sleep(3.0)  # enough reports that a restart from 0 is a decrease
            for host in ("actors-0", "learner", "replay-0"):
                lose(live, host)
            live.patch("actors", count=1)
            live.until("one actor", lambda: live.metric("actors") == 1.0)
            live.patch("actors", count=2)
            live.until("two actors", lambda: live.metric("actors") == 2.0)
            live.patch("balance", controller=["sample_ratio", "open_loop"])
            live.until_training(more=10)
            live.patch("balance", controller="sample_ratio")
            live.until_training(more=10)
            live.until_checkpoint()
            time.sleep(2.5)
        assert 130 == live.interrupt(), live.output()
    saved = CheckpointStore.load(live.checkpoints()[-1])
    with harness.resumed(live) as again:
        again.until_training(more=1)
        with watched(again) as second:
            again.until_training(more=20)
            time.sleep(2.5)
        steps = saved.manifest["env_steps"]
        metrics = again.metrics()
        assert steps + metrics["env_steps_total",] == metrics["run_env_steps",]
        for name in (
            "env_steps_total",
            "env_frames_total",
            "episodes_total",
            "learner_updates_total",
            "samples_trained_total",
            "trajectories_begun_total",
            "replay_items_drawn_total",
            "replay_steps_inserted_total",
            "weights_published_total",
            "component_starts_total",
        ):
            began = sum(v for key, v in second.first.items() if f"tianflow_{name}[" in key)
            assert began < first.total(name), name
        assert 130 == again.interrupt(), again.output()


def every_process_is_measured(live: LiveRun) -> None:
    """The coordinator and the hosts have used CPU time, and hold the interpreter in memory."""
    metrics = live.metrics()
    for name, least in (("cpu_seconds_total", 0.02), ("resident_memory_bytes", 2**23)):
        found = {key[1]: value for key, value in metrics.items() if key[0] == f"process_{name}"}
        assert {"coordinator", "learner", "actors-0", "actors-1", "evaluator"} == set(found)
        assert min(found.values()) > least, found


def test_staleness_of_use_once_data_never_decreases_over_lineages(tmp_path: Path) -> None:
    with harness.run(tmp_path, balance__max_staleness=2, **MANY) as live:
        live.until_training(more=20)
        live.until_checkpoint()
        with watched(live) as watcher:
            lose(live, "learner")
            lose(live, "actors-1")
            lose(live, "evaluator")
        assert watcher.total("staleness_in_flight_updates_count") > 0
        every_process_is_measured(live)
        live.until("the run is ready", live.ready)
        live.until_training(more=5)
        assert 130 == live.interrupt(), live.output()
