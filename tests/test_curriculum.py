"""Attributes of environments change while a run trains: a curriculum."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tianflow
from tests.support.environments import LengthEnv
from tests.support.settings import cartpole
from tianflow.api import RunHandle
from tianflow.config.loading import load_config
from tianflow.errors import ConfigError
from tianflow.rundir.audit_log import read_page
from tianflow.rundir.checkpoints import CheckpointStore, resolve

LENGTH = "tests.support.environments:LengthEnv"
ENV = {"id": LENGTH, "kwargs": {"length": 3}}
ENDLESS: dict[str, Any] = {"env": ENV, "run": {"name": "A", "max_updates": None}}
DQN: dict[str, dict[str, Any]] = {
    "algorithm": {"name": "dqn", "batch_size": 16, "epochs": None, "minibatch_size": None},
    "replay": {"min_size": 32, "capacity": 1000},
}
CENTRAL = {
    "actors": {"count": 2, "rollout_steps": 16, "inference": "central"},
    "inference": {"device": "cpu"},
}
cartpole(**DQN)  # outside a loop: plug-ins are looked for on disk


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - a run has no event for it
            await asyncio.sleep(0.01)


async def until_episodes(handle: RunHandle, length: int) -> None:
    """The last 100 episodes of training have this length."""

    def seen() -> bool:
        statistics = handle.control.statistics()
        assert statistics.state in ("starting", "running")
        return {length} == set(statistics.recent_lengths[-50:])

    await until(seen)


@pytest.mark.parametrize("more", [{}, DQN, CENTRAL], ids=["local", "replay", "central"])
async def test_a_change_reaches_training_evaluation_checkpoint_and_a_resume(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    settings = cartpole(**ENDLESS, **more)
    async with tianflow.open_run(settings, runs_dir=tmp_path) as handle:
        await until_episodes(handle, 3)
        await handle.env.set(set={"length": 7})
        await until_episodes(handle, 7)
        await handle.run.target.evaluate()
        assert 7.0 == handle.run.evaluation.newest["mean_return"]
    page = await asyncio.to_thread(read_page, tmp_path / "A" / "audit.jsonl")
    (change,) = (record for record in page.records if record["action"] == "change")
    assert ({"env.set": {}}, {"env.set": {"length": 7}}) == (change["old"], change["new"])
    stored = await asyncio.to_thread(load_config, tmp_path / "A" / "config.toml")
    found = await asyncio.to_thread(
        lambda: CheckpointStore.load(resolve("A", tmp_path)).manifest["config"]["env"]["set"]
    )
    assert ({"length": 7}, {"length": 7}) == (stored.env.set, found)
    async with tianflow.open_run(stored, resume="A", runs_dir=tmp_path) as handle:
        await until_episodes(handle, 7)
        await handle.env.set(set={"length": None})
        await until_episodes(handle, 3)


async def test_actors_that_are_added_later_have_the_newest_attributes(tmp_path: Path) -> None:
    async with tianflow.open_run(cartpole(**ENDLESS), runs_dir=tmp_path) as handle:
        await until_episodes(handle, 3)
        await handle.env.set(set={"length": 7})
        await handle.actors.set(count=2)
        await until(lambda: "actor-1" in {c.name for c in handle.control.statistics().components})
        await until_episodes(handle, 7)


async def test_an_evaluation_with_attributes_of_its_own_does_not_follow(tmp_path: Path) -> None:
    evaluation = {"env": {"set": {"length": 9}}}
    settings = cartpole(**ENDLESS, evaluation=evaluation)
    async with tianflow.open_run(settings, runs_dir=tmp_path) as handle:
        await until_episodes(handle, 3)
        await handle.env.set(set={"length": 7})
        await handle.run.target.evaluate()
        assert 9.0 == handle.run.evaluation.newest["mean_return"]


async def test_returns_before_a_change_do_not_count_for_the_best_version(tmp_path: Path) -> None:
    async with tianflow.open_run(cartpole(**ENDLESS), runs_dir=tmp_path) as handle:
        await until_episodes(handle, 3)
        for length, best in ((7, 7.0), (5, 5.0), (5, 5.0)):
            await handle.env.set(set={"length": length})
            await handle.run.target.evaluate()
            found = handle.control.statistics().checkpoint.best
            assert found is not None
            assert best == found.mean_return


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lenght": 7}, r"env\.set\.lenght = 7: is not an attribute of .*'length'"),
        ({"length": {"a": [None]}}, r"env\.set\.length\.a\.0: is null"),
    ],
    ids=["unknown", "null"],
)
async def test_a_refused_attribute_changes_nothing(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    async with tianflow.open_run(cartpole(**ENDLESS), runs_dir=tmp_path) as handle:
        await until_episodes(handle, 3)
        with pytest.raises(ConfigError, match=message):
            await handle.env.set(set=values)
        assert (0, {}) == (handle.control.generation, handle.control.config.env.set)


async def test_an_attribute_that_changes_the_spaces_is_refused(tmp_path: Path) -> None:
    env = {"id": "tests.envs.test_attributes:Resized"}
    async with tianflow.open_run(cartpole(**{**ENDLESS, "env": env}), runs_dir=tmp_path) as handle:
        await until_episodes(handle, 5)
        with pytest.raises(ConfigError, match=r"env\.set = .*changes the spaces"):
            await handle.env.set(set={"size": 6})
        await until_episodes(handle, 5)


class LimitedEnv(LengthEnv):
    """Its episodes last ``most`` steps at most."""

    def __init__(self, most: int) -> None:
        self.most = most
        super().__init__(length=3)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "length" and value > self.most:
            raise ValueError(f"{value} steps are too many")
        super().__setattr__(name, value)


async def test_a_value_that_the_environment_of_an_evaluation_refuses_changes_nothing(
    tmp_path: Path,
) -> None:
    """Evaluations follow a change, too."""
    env = {"id": f"{__name__}:LimitedEnv", "kwargs": {"most": 10}}
    evaluation = {"further": {"short": {"env": {"kwargs": {"most": 5}}}}}
    settings = cartpole(**{**ENDLESS, "env": env}, evaluation=evaluation)
    async with tianflow.open_run(settings, runs_dir=tmp_path) as handle:
        await until_episodes(handle, 3)
        await handle.env.set(set={"length": 4})
        with pytest.raises(ConfigError, match="7 steps are too many"):
            await handle.env.set(set={"length": 7})
        assert {"length": 4} == handle.control.config.env.set


async def test_a_deterministic_run_refuses_a_change(tmp_path: Path) -> None:
    settings = cartpole(
        env=ENV,
        balance={"max_staleness": 0},
        run={"name": "A", "max_updates": None, "deterministic": True},
    )
    async with tianflow.open_run(settings, runs_dir=tmp_path) as handle:
        with pytest.raises(ConfigError, match=r"env\.set: .*repetition.*deterministic = false"):
            await handle.env.set(set={"length": 7})


def test_a_deterministic_run_may_begin_with_attributes(tmp_path: Path) -> None:
    found = tianflow.train(
        cartpole(
            env={**ENV, "set": {"length": 7}},
            balance={"max_staleness": 0},
            run={"deterministic": True, "max_updates": 3},
        ),
        runs_dir=tmp_path,
    )
    assert 7.0 == found.summary["mean_return"] == found.summary["evaluation"]["mean_return"]
