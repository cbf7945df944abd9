"""Everything that may change while a run goes on is changed by the command line, and the run goes
on.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.e2e.harness import START_S, LiveRun, resumed, run
from tests.support.oracle import Use, uses
from tianflow.cli.main import app
from tianflow.rundir.history import NAME, read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
STANDSTILL_ROWS = 10
"""Successive lines of the history, one every 0.2 s of its writer, that show no update more:
training stands still.

Lines are late on a busy machine, as updates are.
"""
COMPONENTS = 6
"""Learner, evaluator and four actors."""


def tianflow(live: LiveRun, *arguments: str) -> Result:
    """The command line, as a person calls it, but in this process: each start of Python costs more
    than the command.
    """
    return CliRunner().invoke(app, [*arguments, "--runs-dir", str(live.folder)])


def test_attributes_of_environments_change_and_survive_a_lost_host_and_a_resume(
    tmp_path: Path,
) -> None:
    settings = {
        "env__id": "tests.support.environments:LengthEnv",
        "env__kwargs": {"length": 5},
        "env__wrappers": ["tests.support.environments:Paced"],
    }

    def returns(live: LiveRun, mean: float) -> None:
        """The last 100 episodes of training have this return."""

        def seen() -> bool:
            return {mean} == {live.metric(f"episode_return_{end}") for end in ("min", "max")}

        live.until(f"every return is {mean}", seen)

    with run(tmp_path, **settings) as live:
        live.until("it is ready", live.ready, within_s=START_S)
        live.until_training(more=5)
        returns(live, 5.0)
        answer = tianflow(live, "set", live.name, "env.set.lenght=9")
        assert 2 == answer.exit_code
        assert "env.set.lenght = 9: is not an attribute" in answer.stderr
        answer = tianflow(live, "set", live.name, "env.set.length=9")
        assert 0 == answer.exit_code, answer.stderr
        returns(live, 9.0)
        before = live.restarts()
        live.kill("actors-0")
        live.until("the host is back", lambda: live.restarts() > before)
        live.until_training(more=50)
        returns(live, 9.0)
    with resumed(live) as again:
        again.until("it is ready", again.ready, within_s=START_S)
        again.until_training(more=50)
        returns(again, 9.0)


@pytest.fixture(name="live", scope="module")
def _live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """A run of the oracle with updates of 30 ms, training already. Every test leaves it with bound
    4 and four actors. They are the last ones, because it goes on until all tests have ended.
    """
    folder = tmp_path_factory.mktemp("live")
    settings: dict[str, object] = {
        "env__id": "tests.support.oracle:EchoEnv",
        "env__kwargs": {"seconds": 0.002},
        "algorithm__name": "tests.support.oracle:Oracle",
        "algorithm__record": str(folder / "record"),
        "algorithm__update_s": 0.03,
        "algorithm__batch_trajectories": 2,
        "actors__count": 4,
        "actors__rollout_steps": 8,
        "balance__min_fragment_steps": 1,
        "balance__max_staleness": 4,
        "evaluation__episodes": 1,
        "evaluation__num_envs": 1,
    }
    config = folder / "oracle.toml"
    config.write_text(
        "[env]\nid = 'tests.support.oracle:EchoEnv'\n[algorithm]\nname = "
        "'tests.support.oracle:Oracle'\n"
    )
    with run(
        folder / "runs",
        str(config),
        algorithm__epochs=None,
        algorithm__minibatch_size=None,
        **settings,
    ) as live:
        live.until("it is ready", live.ready, within_s=START_S)
        live.until_training(more=10)
        yield live


def recorded(live: LiveRun) -> list[Use]:
    return uses(live.folder.parent / "record")


def wait_until_in_force(live: LiveRun, components: int = COMPONENTS) -> None:
    """Until every component has the newest generation in force."""
    wanted = live.metric("balance_settings_generation")

    def everywhere() -> bool:
        found = [
            value
            for key, value in live.metrics().items()
            if key[0] == "component_settings_generation"
        ]
        return len(found) == components and min(found) >= wanted

    live.until(f"generation {wanted} is in force everywhere", everywhere)


def set_live(live: LiveRun, *assignments: str, components: int = COMPONENTS) -> None:
    """Change settings by the command line; in force everywhere soon, and training goes on with
    them.
    """
    before = live.metric("balance_settings_generation")
    answer = tianflow(live, "set", live.name, *assignments)
    assert 0 == answer.exit_code, answer.stderr
    assert before < live.metric("balance_settings_generation")
    wait_until_in_force(live, components)
    live.until_training(more=5)


def written(live: LiveRun) -> list[int]:
    """Updates at each line of the history."""
    return [int(row["updates"]) for row in read_rows(live.directory / NAME)]


def longest_standstill(updates: list[int]) -> int:
    """The most lines in succession that tell of the same number of updates."""
    return max(len(list(lines)) for _, lines in itertools.groupby(updates))


def test_the_bound_goes_to_0_to_8_and_to_0_and_updates_never_stand_still(live: LiveRun) -> None:
    began = len(written(live))
    for bound in (0, 8, 0):
        set_live(live, f"balance.max_staleness={bound}")
        assert bound == live.metric("staleness_bound_updates")
        at = len(recorded(live))
        live.until_training(more=12)
        ages = [age for use in recorded(live)[at:] for age in use.ages]
        assert max(ages) <= bound
    set_live(live, "balance.max_staleness=4")
    assert longest_standstill(written(live)[began:]) < STANDSTILL_ROWS
    assert 0 == live.metric("staleness_violations_total")


def test_everything_else_that_may_change_does_and_the_oracle_sees_no_violation(
    live: LiveRun,
) -> None:
    began = len(written(live))
    set_live(live, "algorithm.batch_trajectories=4")
    assert {4} == {len(use.ages) for use in recorded(live)[-3:]}
    set_live(live, "algorithm.batch_trajectories=2", "algorithm.learning_rate=1e-4")
    set_live(
        live, 'algorithm.learning_rate={schedule="linear", start=1e-4, end=5e-5, over=100_000}'
    )
    set_live(live, "algorithm.learning_rate=1e-4")
    set_live(live, "balance.credits=3")
    assert 3 >= live.metric("credits_limit")
    set_live(
        live,
        "balance.credits=null",
        "balance.straggler_patience=1.5",
        "balance.min_fragment_steps=1",
    )
    for controller in ("freshest", "open_loop", "lockstep", "staleness"):
        set_live(live, f"balance.controller={controller}")
        assert 1 == live.metric("balance_controller_winning", controller)
    assert 4 == live.metric("staleness_bound_updates")
    set_live(live, "weights.publish_interval_updates=2")
    assert longest_standstill(written(live)[began:]) < STANDSTILL_ROWS
    assert 0 == tianflow(live, "scale", live.name, "actors=2").exit_code
    wait_until_in_force(live, COMPONENTS - 2)
    assert 0 == tianflow(live, "scale", live.name, "actors=5").exit_code
    wait_until_in_force(live, COMPONENTS + 1)
    live.until_training(more=5)
    assert 0 == tianflow(live, "scale", live.name, "actors=4").exit_code
    wait_until_in_force(live)
    assert 0 == live.metric("staleness_violations_total")
    assert 0 <= min(age for use in recorded(live) for age in use.ages)


def test_a_paused_run_stands_still_and_goes_on_where_it_was(live: LiveRun) -> None:
    assert 0 == tianflow(live, "pause", live.name).exit_code
    wait_until_in_force(live)
    before = len(recorded(live))
    time.sleep(0.5)  # that nothing happens meanwhile is what is to be seen
    assert before == len(recorded(live))
    assert live.ready()
    assert "paused" == live.status()["state"]
    assert 0 == tianflow(live, "resume", live.name).exit_code
    live.until_training(more=10)
    seen = recorded(live)
    assert [use.number for use in seen] == list(range(len(seen)))
    assert max(age for use in seen[before:] for age in use.ages) <= 4


def test_a_bad_value_is_a_422_that_names_the_field_and_changes_nothing(live: LiveRun) -> None:
    for resource, field, value in (
        ("balance", "balance.max_staleness", -1),
        ("balance", "balance.controller", "nobody"),
        ("balance", "balance.credits", 1),
        ("learner", "algorithm.batch_trajectories", 0),
        ("learner", "algorithm.learning_rate", "fast"),
        ("actors", "actors.count", -3),
    ):
        before, document = (
            live.metric("balance_settings_generation"),
            live.request(f"/api/v1/runs/{live.name}/{resource}"),
        )
        code, body = live.request(
            f"/api/v1/runs/{live.name}/{resource}", "PATCH", {field.partition(".")[2]: value}
        )
        assert 422 == code, body
        assert [field] == [error["path"] for error in json.loads(body)["errors"]]
        assert before == live.metric("balance_settings_generation")
        assert document == live.request(f"/api/v1/runs/{live.name}/{resource}")
    answer = tianflow(live, "set", live.name, "balance.max_staleness=-1")
    assert 2 == answer.exit_code
    assert "balance.max_staleness" in answer.stderr
    live.until_training(more=5)
