"""An evaluator plays the version that was loaded, in the environment of the evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from tests.support.environments import LengthEnv
from tests.support.settings import cartpole
from tianflow.channels.latest import LatestCell
from tianflow.components.evaluator import Evaluator
from tianflow.config.model import Config
from tianflow.core.payloads import EnvironmentSpec, Version
from tianflow.envs.make import make
from tianflow.errors import EnvironmentFailedError
from tianflow.hosts.compute import Compute
from tianflow.interfaces import LiveSettings

CONFIG = cartpole(
    env={"id": "tests.support.environments:LengthEnv"},
    evaluation={
        "env": {"kwargs": {"length": 7}},
        "further": {
            "large": {"env": {"kwargs": {"length": 10}}, "episodes": 3},
            "broken": {"env": {"kwargs": {"length": "seven"}}},
        },
    },
)


class MeasuredEnv(LengthEnv):
    """Success in every second copy, and metrics that are not accepted."""

    made = 0

    def __init__(self, length: int = 7) -> None:
        super().__init__(length)
        self.place, MeasuredEnv.made = MeasuredEnv.made, MeasuredEnv.made + 1
        self.played = 0

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            self.played += 1
            metrics = {
                "success": float(self.place % 2),
                "mine/episode": self.played,
                "eval/length": 7,
                "episodes": 1e6,
                "words": "none",
                "infinite": float("inf"),
            }
            info = {**info, "metrics": metrics}
        return observation, reward, terminated, truncated, info


class Weights:
    """Every refresh has a newer version."""

    def __init__(self) -> None:
        self.version = Version(1, 0)

    def refresh(self) -> Version:
        self.version = Version(1, self.version.number + 1)
        return self.version


class AlwaysLeft:
    """A policy."""

    def initial_state(self, _count: int) -> dict[str, Any]:
        return {}

    def act(self, observation: Any, state: Any, _noise: Any, _mask: Any) -> Any:
        count = len(observation[""])
        return type("Step", (), {"action": torch.zeros(count, dtype=torch.int64), "state": state})


async def _at_once(_version: Version) -> None:
    """Every version is readable."""


@asynccontextmanager
async def evaluator(
    config: Config = CONFIG, spec: EnvironmentSpec | None = None
) -> AsyncIterator[Evaluator]:
    compute = Compute(name="compute", on_orphan=lambda _: None, on_end=lambda: None, bell=None)
    policy: Any = AlwaysLeft()
    weights: Any = Weights()
    spec = spec or await asyncio.to_thread(lambda: make(config.env, 1).spec)
    found = Evaluator(
        name="evaluator",
        host="host",
        spec=spec,
        newest=_at_once,
        settings=LatestCell(LiveSettings(config, config.bound), 0),
        compute=compute,
        make_policy=lambda: (policy, weights),
        make_environment=make,
    )
    task = asyncio.create_task(found.run(lambda: None))
    try:
        yield found
    finally:
        compute.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_evaluations_play_the_version_that_was_loaded_last() -> None:
    async with asyncio.timeout(10.0), evaluator() as asked:
        assert Version(1, 1) == await asked.load(Version(1, 0))
        played = [await asked.evaluate(Version(1, 1), name) for name in ("main", "large", "main")]
        assert [Version(1, 1)] * 3 == [found.version for found in played]
        assert Version(1, 2) == await asked.load(Version(1, 0))
        assert Version(1, 2) == (await asked.evaluate(Version(1, 2), "large")).version


async def test_a_new_evaluator_loads_the_newest_version_by_itself() -> None:
    async with asyncio.timeout(10.0), evaluator() as asked:
        assert Version(1, 1) == (await asked.evaluate(Version(1, 0), "main")).version


async def test_each_evaluation_has_its_environment_its_number_of_episodes_and_its_name() -> None:
    async with asyncio.timeout(10.0), evaluator() as asked:
        main, large = [await asked.evaluate(Version(1, 0), name) for name in ("main", "large")]
        assert ("main", (7.0,) * 4, (7,) * 4) == (main.name, main.returns, main.lengths)
        assert ("large", (10.0,) * 3, 10.0) == (large.name, large.returns, large.mean_return)
        assert (2.0, 7.0) == tuple(
            asked.statistics().counters[name] for name in ("evaluations", "episodes")
        )


async def test_an_evaluation_has_the_means_of_the_metrics_of_its_own_episodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two copies play three episodes: two of the first one, one of the second one. What is refused
    is logged once.
    """
    config = cartpole(
        env={"id": f"{__name__}:MeasuredEnv"},
        evaluation={"episodes": 3, "num_envs": 2, "further": {"one": {"episodes": 1}}},
    )
    spec = await asyncio.to_thread(lambda: make(config.env, 1).spec)
    MeasuredEnv.made = 0
    async with asyncio.timeout(10.0), evaluator(config, spec) as asked:
        for _ in range(2):
            found = await asked.evaluate(Version(1, 0), "main")
            expected = {"success": 1 / 3, "mine/episode": 4 / 3, "length": 7.0}
            assert pytest.approx(expected) == dict(found.metrics)
        one = await asked.evaluate(Version(1, 0), "one")
        assert {"success": 0.0, "mine/episode": 1.0, "length": 7.0} == dict(one.metrics)
    assert 1 == caplog.text.count("a statistic is not recorded")


async def test_an_environment_without_metrics_has_none_in_its_evaluations() -> None:
    async with asyncio.timeout(10.0), evaluator() as asked:
        assert {} == (await asked.evaluate(Version(1, 0), "main")).metrics


async def test_an_environment_that_fails_costs_one_evaluation() -> None:
    async with asyncio.timeout(10.0), evaluator() as asked:
        with pytest.raises(EnvironmentFailedError):
            await asked.evaluate(Version(1, 0), "broken")
        assert (7.0,) * 4 == (await asked.evaluate(Version(1, 0), "main")).returns
