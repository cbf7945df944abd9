"""However often hosts are lost and started again, as many series are exposed: nothing is labelled
by what a restart makes anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.coordinator.test_run import World, config, going, until
from tianflow.coordinator import supervisor as supervising
from tianflow.observability.prometheus.prometheus import Exporter

RESTARTS = 200


async def test_two_hundred_restarts_of_actors_leave_the_number_of_series_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "BACKOFF_S", (0.0,))
    world = World(tmp_path, config(run={"max_restarts": 10 * RESTARTS}))
    exporter = Exporter(runs=lambda: [world.run.control.statistics()], requests={200: 1})

    def series() -> set[str]:
        page, _ = exporter.exposition("")
        return {
            line.rpartition(" ")[0]
            for line in page.decode().splitlines()
            if not line.startswith("#")
        }

    def reporting() -> set[str]:
        return {component.name for component in world.run.control.statistics().components}

    async def lose(name: str) -> None:
        before, host = (
            world.run.control.statistics().restarts.get((name, "died"), 0),
            world.hosts[name],
        )
        host.kill()
        await until(lambda: world.run.control.statistics().restarts.get((name, "died"), 0) > before)
        await until(lambda: world.hosts[name] is not host and reporting() == everyone)

    async with going(world):
        await until(
            lambda: (
                {"learner", "actor-0", "actor-1"} <= reporting()
                and len(reporting()) == len(world.hosts)
            )
        )
        everyone = reporting()
        for name in ("actors-0", "actors-1"):
            await lose(name)  # that a host was lost at all is a series
        await until(
            lambda: world.run.control.statistics().diagnosis.waits
        )  # known once a little time has passed
        before = series()
        for turn in range(RESTARTS):
            await lose(f"actors-{turn % 2}")
        await until(lambda: world.run.control.statistics().diagnosis.waits)  # as before
        assert before == series()
        assert {
            ("actors-0", "died"): 1 + RESTARTS // 2,
            ("actors-1", "died"): 1 + RESTARTS // 2,
        } == world.run.control.statistics().restarts
