"""What environments do to a run, and what a run makes of it. Each test is a run in processes."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.e2e import harness
from tests.e2e.harness import LiveRun, until
from tianflow.rundir.checkpoints import CheckpointStore

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
ENVIRONMENTS, TROUBLES = "tests.support.environments", "tests.e2e.troubles"


def dropped(live: LiveRun, reason: str) -> float:
    return live.metric("trajectories_dropped_total", reason)


def last_lines(live: LiveRun, number: int) -> str:
    return "\n".join(live.stderr.splitlines()[-number:])


def test_a_run_goes_on_through_everything_that_happens_once(tmp_path: Path) -> None:
    """It raises, ends its process with exit code 0, is killed, hangs, and gives what is not
    finite.
    """
    ways = ["raise", "exit 0", "nan observation", "kill", "infinite reward", "hang"]
    kwargs = {"folder": str(tmp_path), "ways": ways}
    settings = {
        "env__num_envs": 1,
        "algorithm__minibatch_size": 16,
        "env__step_timeout_s": 3.0,
        "balance__max_staleness": 2,
    }
    with harness.run(
        tmp_path / "runs", env__id=f"{TROUBLES}:TroubleEnv", env__kwargs=kwargs, **settings
    ) as live:
        live.until("the last way", (tmp_path / ways[-1]).exists)
        live.until("three restarts", lambda: live.restarts() == 3.0)
        live.until_training(more=20)
        metrics = live.metrics()
        assert {1.0} == {
            metrics["trajectories_dropped_total", reason] for reason in ("env_error", "env_hang")
        }
        assert 2.0 == metrics["trajectories_dropped_total", "poisoned"]
        assert 2.0 == sum(
            value
            for key, value in metrics.items()
            if key[:1] == ("component_restarts_total",) and "died" in key
        )
        assert 0.0 == metrics["staleness_violations_total",]
        assert "once in a thousand" in live.stderr
        assert "env_hang" in live.stderr
        checkpoint = CheckpointStore.load(live.until_checkpoint())
        assert all(np.isfinite(array).all() for array in checkpoint.read().values())
        assert 130 == live.interrupt()


def test_an_environment_that_always_raises_ends_the_run_with_its_traceback_last(
    tmp_path: Path,
) -> None:
    with harness.run(
        tmp_path, env__id=f"{ENVIRONMENTS}:RaisingEnv", env__kwargs={"at": 9}, env__max_failures=3
    ) as live:
        assert 1 == live.end()
        assert "EnvironmentBrokeError: step broke\ntianflow: actor-" in last_lines(live, 2)
        assert "the environment failed 4 times in 60 s" in last_lines(live, 1)
        assert ("failed", 0) == (live.result["state"], live.result["trajectories"]["open"])


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_what_is_never_finite_ends_the_run_and_is_named(tmp_path: Path, what: str) -> None:
    kwargs = {"at": 5, "what": what}
    with harness.run(
        tmp_path, env__id=f"{ENVIRONMENTS}:NaNEnv", env__kwargs=kwargs, env__max_failures=2
    ) as live:
        assert 1 == live.end()
        named = (
            "obs of environment 0 is nan"
            if what == "observation"
            else "reward of environment 0 is nan"
        )
        assert f"{named} after step 5 of its trajectory" in last_lines(live, 1)
        assert 0 == live.result["trajectories"]["trained"]


def test_a_constructor_that_raises_is_found_before_anything_starts(tmp_path: Path) -> None:
    with harness.run(
        tmp_path, env__id=f"{ENVIRONMENTS}:RaisingEnv", env__kwargs={"where": "constructor"}
    ) as live:
        assert 2 == live.end()
        assert "the constructor broke" in live.stderr
        assert not live.directory.exists()


@pytest.mark.parametrize(
    ("where", "why"),
    [("constructor", "no display in this process"), ("reset", "no level in this process")],
)
def test_what_breaks_only_in_hosts_ends_the_run_soon_and_it_was_never_ready(
    tmp_path: Path, where: str, why: str
) -> None:
    with harness.run(
        tmp_path, env__id=f"{TROUBLES}:HostsOnlyEnv", env__kwargs={"where": where}
    ) as live:
        was_ready = []

        def ended() -> bool:
            was_ready.append(live.ready())
            return live.process.poll() is not None

        until("it has ended", ended, tell=live.told)
        assert 1 == live.end()
        assert not any(was_ready)
        assert f"EnvironmentBrokeError: {why}\ntianflow: actor-" in last_lines(live, 2)


def test_a_constructor_that_hangs_is_given_up_and_tried_again(tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path)}
    with harness.run(
        tmp_path / "runs",
        env__id=f"{TROUBLES}:LateEnv",
        env__kwargs=kwargs,
        env__start_timeout_s=4.0,
    ) as live:
        live.until("a restart", lambda: live.restarts() >= 1.0)
        live.until("both actors", lambda: 2.0 == live.metric("actors"))
        assert "start_timeout" in live.stderr
        live.until_training(more=3)


def test_slow_environments_are_neither_killed_nor_starved(tmp_path: Path) -> None:
    settings = {
        "env__num_envs": 1,
        "actors__rollout_steps": 4,
        "balance__min_fragment_steps": 2,
        "algorithm__minibatch_size": 4,
    }
    kwargs = {"seconds": 1.0, "length": 3}
    with harness.run(
        tmp_path,
        env__id=f"{ENVIRONMENTS}:SlowEnv",
        env__kwargs=kwargs,
        env__step_timeout_s=5.0,
        **settings,
    ) as live:
        for actor in ("actor-0", "actor-1"):
            live.until(
                f"two trajectories of {actor}",
                lambda actor=actor: live.metric("steps_trained_total", actor) > 4,
            )
        assert 0.0 == live.restarts()
        assert 143 == live.interrupt(signal.SIGTERM)


def test_a_learner_that_refuses_its_settings_ends_the_run_at_its_first_batch(
    tmp_path: Path,
) -> None:
    with harness.run(
        tmp_path, algorithm__name=f"{TROUBLES}:TroubledPPO", algorithm__trouble="refuses"
    ) as live:
        assert 1 == live.end()
        assert "AssertionError: a minibatch of 7 does not divide 32" in last_lines(live, 2)
        assert "tianflow: learner: AssertionError" in last_lines(live, 1)


def test_a_loss_that_is_never_finite_ends_the_run(tmp_path: Path) -> None:
    settings = {"algorithm__trouble": "nan", "learner__max_nonfinite_updates": 3}
    with harness.run(tmp_path, algorithm__name=f"{TROUBLES}:TroubledPPO", **settings) as live:
        assert 1 == live.end()
        assert "tianflow: learner: 4 consecutive updates were not finite" in last_lines(live, 1)
