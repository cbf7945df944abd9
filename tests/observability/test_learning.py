"""Learning statistics of a run: means of a span over restarts of its components, and curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import tianflow
from tests.support.fakes_run import FakeRun
from tests.support.settings import cartpole
from tianflow.config.loading import load_config
from tianflow.config.model import Config
from tianflow.config.schedules import Schedule
from tianflow.core.learning import MOST_NAMES, LearningTally, StatisticSum, between
from tianflow.core.statistics import ComponentStatistics, RunStatistics
from tianflow.observability.learning import LearningTotals, loss_in, newest
from tianflow.observability.rates import RunRates
from tianflow.observability.run_document import describe
from tianflow.rundir.history import NAME, read_rows


def learner(run: FakeRun, *values: float) -> ComponentStatistics:
    """A learner whose updates had these losses."""
    tally = LearningTally(group="train", source="algorithm")
    for value in values:
        tally.add(tally.accept({"loss": value}))
    return replace(run.statistics().components[0], learning=tally.read())


def of(run: FakeRun, *components: ComponentStatistics, **fields: Any) -> RunStatistics:
    return replace(run.statistics(), components=components, **fields)


@pytest.fixture
def run() -> FakeRun:
    return FakeRun()


def means(before: Any, now: Any) -> dict[str, tuple[int, float]]:
    return {name: (sum_.number, sum_.mean) for name, sum_ in between(before, now).items()}


def test_a_restarted_learner_counts_on_where_the_lost_one_ended(run: FakeRun) -> None:
    totals = LearningTotals()
    first = learner(run, 1.0, 3.0)
    before = totals.update(of(run, first))
    assert {"train/loss": (2, 2.0)} == means({}, before)
    last = learner(run, 1.0, 3.0, 8.0)
    gone = totals.update(of(run, gone=(last,)))
    assert {"train/loss": (1, 8.0)} == means(before, gone), "what it reported last counts"
    # A new lineage: it may report more updates than were seen of the lost one.
    again = totals.update(of(run, learner(run, 5.0, 7.0, 9.0), earlier={"learner": last}))
    assert {"train/loss": (3, 7.0)} == means(gone, again)
    more = totals.update(of(run, learner(run, 5.0, 7.0, 9.0, 11.0), earlier={"learner": last}))
    assert {"train/loss": (1, 11.0)} == means(again, more)


def test_actors_that_come_and_go_add_up(run: FakeRun) -> None:
    def actor(name: str, *values: float) -> ComponentStatistics:
        return replace(learner(run, *values), name=name, role="actor")

    totals = LearningTotals()
    before = totals.update(of(run, actor("actor-0", 1.0), actor("actor-1", 2.0)))
    now = totals.update(of(run, actor("actor-1", 2.0, 4.0)))
    assert ({"train/loss": (2, 1.5)}, {"train/loss": (1, 4.0)}) == (
        means({}, before),
        means(before, now),
    )


def test_a_run_has_no_more_names_than_the_cap_whatever_its_actors_report(run: FakeRun) -> None:
    one = StatisticSum(1, 1.0, 0.0, 1.0)
    actors = [
        replace(
            run.statistics().components[1],
            name=f"actor-{place}",
            learning={f"rollout/m{place}_{number}": one for number in range(MOST_NAMES)},
        )
        for place in range(3)
    ]
    shown = of(run, *actors)
    assert MOST_NAMES == len(LearningTotals().update(shown))
    assert MOST_NAMES == len(newest(shown, "actor"))


def test_a_newest_metric_is_the_mean_over_actors(run: FakeRun) -> None:
    actors = [
        replace(component, learning={"rollout/success": StatisticSum(3, 2.0, 0.0, last)})
        for component, last in zip(run.statistics().components[1:3], (0.0, 1.0), strict=True)
    ]
    assert {"rollout/success": 0.5} == newest(of(run, *actors), "actor")
    assert {} == newest(of(run, *actors), "learner")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train/policy_loss", "train/loss"], "train/loss"),
        (["train/entropy", "train/actor_loss"], "train/actor_loss"),
        (["train/entropy"], None),
    ],
)
def test_the_loss_of_an_algorithm_is_found_by_its_name(
    names: list[str], expected: str | None
) -> None:
    assert expected == loss_in(names)


def test_the_document_has_means_of_the_last_seconds_and_the_newest_value_without_any(
    run: FakeRun,
) -> None:
    rates = RunRates(read=run.statistics)
    run.train(1)
    first = describe(rates.sample(), run.config, rates).learning
    assert (1.0, {}) == (first.values["train/loss"], first.curves)
    run.train(3)
    now = describe(rates.sample(), run.config, rates)
    assert now.learning.values["train/loss"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert {"rollout/success"} <= set(now.learning.values)
    assert 2.5 == now.returns.mean_length
    run.now += 60.0
    rates.sample()
    run.now += 60.0
    later = describe(rates.sample(), run.config, rates).learning
    assert 0.25 == later.values["train/loss"]


def test_the_document_has_schedules_with_their_values_in_force(run: FakeRun) -> None:
    rates = RunRates(read=run.statistics)
    assert {} == describe(rates.sample(), run.config, rates).settings.schedules
    schedule = {"schedule": "linear", "start": 1e-3, "end": 0.0, "over": 10.0}
    algorithm = run.config.algorithm.model_copy(
        update={"learning_rate": Schedule.model_validate(schedule)}
    )
    run.config = run.config.model_copy(update={"algorithm": algorithm})
    document = describe(rates.sample(), run.config, rates)
    [(path, found)] = document.settings.schedules.items()
    assert ("algorithm.learning_rate", schedule, None) == (path, found.schedule, found.value)
    run.train(2)
    found = describe(rates.sample(), run.config, rates).settings.schedules[path]
    assert 2.5e-4 == found.value, "of the newest update"


def test_curves_have_their_values_in_order_and_gaps_where_nothing_was_trained(
    run: FakeRun,
) -> None:
    rates = RunRates(read=run.statistics)
    rates.sample()
    for updates in (1, 1, 0, 2):
        run.train(updates)
        run.now += 1.0 if updates == 0 else 0.0
        rates.sample()
    curves = rates.curves(24)
    assert [1.0, 0.5, None, pytest.approx((1 / 3 + 1 / 4) / 2)] == curves["loss"]
    assert [1.0, 1.5, 1.5, 2.5] == curves["return"]
    assert [1.5, 2.5] == rates.curves(2)["return"]
    assert 2 == len(rates.curves(2)["loss"])


def test_there_are_no_curves_of_a_run_that_has_nothing_to_show(run: FakeRun) -> None:
    rates = RunRates(read=run.statistics)
    assert ({}, {}) == (rates.curves(24), rates.learning(10.0))
    rates.sample()
    run.now += 1.0
    rates.sample()
    assert ({}, {}) == (rates.curves(24), rates.learning(10.0))


# Runs
# --------------------------------------------------------------------------------------------------


class Measured(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that says at the end of an episode how long it was."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.steps = 0

    def reset(self, **given: Any) -> Any:
        self.steps = 0
        return super().reset(**given)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.steps += 1
        metrics = {"steps": self.steps, "bad name": 1.0}
        return observation, reward, terminated, truncated, {**info, "metrics": metrics}


def total(rows: list[dict[str, Any]], name: str) -> tuple[int, float]:
    """Number of all values in ``rows``, and their mean."""
    found = [row["learning"][name] for row in rows if name in row["learning"]]
    number = sum(values["count"] for values in found)
    return number, sum(values["count"] * values["mean"] for values in found) / max(1, number)


@pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")
@pytest.mark.parametrize("interval", [0.05, 3600.0])
def test_every_update_of_a_run_and_of_its_resumed_part_is_in_its_history(
    tmp_path: Path, interval: float
) -> None:
    """Also of a run that ends before the second report of its components."""

    def config(updates: int) -> Config:
        return cartpole(
            env={"id": f"{__name__}:Measured"},
            run={"name": "one", "max_updates": updates},
            metrics={"interval_s": interval},
        )

    first = tianflow.train(config(4), runs_dir=tmp_path)
    rows = read_rows(first.directory / NAME)
    for name in ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "learning_rate"):
        assert first.summary["updates"] == total(rows, f"train/{name}")[0]
    episodes, steps = total(rows, "rollout/steps")
    assert first.summary["episodes"] <= episodes, "those of the last trajectories are more"
    assert rows[-1]["mean_length"] == pytest.approx(steps, rel=0.5)
    assert "rollout/bad name" not in rows[-1]["learning"]
    second = tianflow.train(config(7), runs_dir=tmp_path, resume="one")
    assert 7 == second.summary["updates"]
    assert 7 == total(read_rows(first.directory / NAME), "train/loss")[0]


@pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")
def test_a_run_with_replay_has_exploration_and_beta_beside_its_loss(tmp_path: Path) -> None:
    settings = load_config(
        {
            "env": {"id": "CartPole-v1", "num_envs": 4},
            "algorithm": {"name": "dqn", "batch_size": 8, "epsilon_updates": 10},
            "network": {"hidden": [8]},
            "actors": {"count": 1, "rollout_steps": 16},
            "replay": {"min_size": 32, "capacity": 1000, "selector": "prioritised"},
            "placement": {"launcher": "inline"},
            "evaluation": {"episodes": 2},
            "run": {"max_updates": 10},
        }
    )
    finished = tianflow.train(settings, runs_dir=tmp_path)
    rows = read_rows(finished.directory / NAME)
    # beta grows from 0.4 to 1 over the limit of the run
    assert (10, pytest.approx(0.4 + 0.06 * 4.5)) == total(rows, "train/beta")
    assert 10 == total(rows, "train/loss")[0] == total(rows, "train/q_value")[0]
    # the mean of 1.0, 0.905, ..., 0.145
    assert (10, pytest.approx(1.0 - 0.095 * 4.5)) == total(rows, "rollout/exploration_rate")
