"""What environments do to a run, and what a run makes of it. Each test is a run in processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e import harness
from tests.e2e.harness import LiveRun, until
from tianflow.rundir.checkpoints import CheckpointStore

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
ENVIRONMENTS, TROUBLES = "tests.support.environments", "tests.e2e.troubles"
TROUBLED = "tests.e2e.troubled_ppo:TroubledPPO"


def dropped(live: LiveRun, reason: str) -> float:
    return live.metric("trajectories_dropped_total", reason)


def last_lines(live: LiveRun, number: int) -> str:
    return "\n".join(live.stderr.splitlines()[-number:])


WANDERING = '''
import os

import gymnasium
import numpy as np


class Env(gymnasium.Env):
    """Leaves the working directory whenever it is made, reset or stepped."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, elsewhere, render_mode=None):
        self.elsewhere, self.render_mode, self.t = elsewhere, render_mode, 0
        os.chdir(elsewhere)

    def reset(self, *, seed=None, options=None):
        os.chdir(self.elsewhere)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        os.chdir(self.elsewhere)
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t >= 10, False, {}

    def render(self):
        return np.zeros((32, 32, 3), np.uint8)
'''


@pytest.mark.parametrize("launcher", ["processes", "inline"])
def test_an_environment_that_leaves_the_working_directory_moves_nothing_of_its_run(
    launcher: str, tmp_path: Path
) -> None:
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    start.mkdir()
    elsewhere.mkdir()
    (start / "wandering.py").write_text(WANDERING)
    (start / "w.toml").write_text(
        f"""
        [env]
        id = "wandering:Env"
        num_envs = 2
        kwargs = {{ elsewhere = "{elsewhere}" }}
        [algorithm]
        name = "ppo"
        [placement]
        launcher = "{launcher}"
        [evaluation]
        every_s = 0.5
        episodes = 2
        [checkpoint]
        every_s = 0.5
        [metrics]
        sinks = ["tensorboard"]
        kwargs = {{ tensorboard = {{ directory = "boards" }} }}
        [run]
        name = "w"
        """
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(harness.ROOT), str(harness.ROOT / "controllers"))),
    }

    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "tianflow", *arguments]

    def tell(*arguments: str) -> str:
        done = subprocess.run(
            command(*arguments),
            cwd=start,
            env=environment,
            text=True,
            capture_output=True,
            timeout=120.0,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
        return done.stdout

    log = tmp_path / "log"
    with log.open("w") as out:
        live = subprocess.Popen(
            command("train", "w.toml", "--plain"),
            cwd=start,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        checkpoints = start / "runs" / "w" / "checkpoints"
        until(
            "two checkpoints",
            lambda: live.poll() is not None or len(list(checkpoints.glob("v*-*"))) >= 2,
            within_s=harness.START_S,
            tell=log.read_text,
        )
        assert ["w", "running"] == tell("status", "w").splitlines()[1].split()[:2]
        tell("stop", "w")
        assert 0 == live.wait(60.0), log.read_text()
    finally:
        live.kill()
        live.wait()
    written = {"boards", "runs", "w.toml", "wandering.py"}
    if launcher == "processes":  # what follows only reads the files of the run
        recorded = tell("eval", "w", "--episodes", "2", "--trust", "--video", "videos")
        assert "mean return 10.00" in recorded
        tell("export", "w", "-o", "w.pt2")
        tell("report", "w")
        shown = [line.partition(": return")[0] for line in recorded.splitlines() if ".mp4" in line]
        assert shown
        assert [True] * len(shown) == [(start / path).is_file() for path in shown]
        written |= {"videos", "w.pt2"}
    assert written == {path.name for path in start.iterdir()} - {"__pycache__"}
    assert {"audit.jsonl", "checkpoints", "config.toml", "history.jsonl", "summary.json"} <= {
        path.name for path in (start / "runs" / "w").iterdir()
    }
    assert list((start / "boards").iterdir())
    assert [] == list(elsewhere.iterdir())
    assert {"start", "elsewhere", "log"} == {path.name for path in tmp_path.iterdir()}


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


def test_what_is_never_finite_ends_the_run_and_is_named(tmp_path: Path) -> None:
    kwargs = {"at": 5, "what": "reward"}
    with harness.run(
        tmp_path, env__id=f"{ENVIRONMENTS}:NaNEnv", env__kwargs=kwargs, env__max_failures=2
    ) as live:
        assert 1 == live.end()
        named = "reward of environment 0 is nan after step 5 of its trajectory"
        assert named in last_lines(live, 1)
        assert 0 == live.result["trajectories"]["trained"]


def test_a_constructor_that_raises_is_found_before_anything_starts(tmp_path: Path) -> None:
    with harness.run(
        tmp_path, env__id=f"{ENVIRONMENTS}:RaisingEnv", env__kwargs={"where": "constructor"}
    ) as live:
        assert 2 == live.end()
        assert "the constructor broke" in live.stderr
        assert not live.directory.exists()


def test_what_breaks_only_in_hosts_ends_the_run_soon_and_it_was_never_ready(
    tmp_path: Path,
) -> None:
    with harness.run(tmp_path, env__id=f"{TROUBLES}:HostsOnlyEnv") as live:
        was_ready = []

        def ended() -> bool:
            was_ready.append(live.ready())
            return live.process.poll() is not None

        until("it has ended", ended, tell=live.output)
        assert 1 == live.end()
        assert not any(was_ready)
        why = "EnvironmentBrokeError: no display in this process"
        assert f"{why}\ntianflow: actor-" in last_lines(live, 2)


@pytest.mark.beside
def test_a_constructor_that_hangs_is_given_up_and_tried_again(tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path)}
    with harness.run(
        tmp_path / "runs",
        env__id=f"{TROUBLES}:LateEnv",
        env__kwargs=kwargs,
        env__start_timeout_s=8.0,
    ) as live:
        live.until("a restart", lambda: live.restarts() >= 1.0)
        live.until("both actors", lambda: 2.0 == live.metric("actors"))
        assert "start_timeout" in live.stderr
        live.until_training(more=3)


@pytest.mark.beside
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


@pytest.mark.beside
def test_a_learner_that_refuses_its_settings_ends_the_run_at_its_first_batch(
    tmp_path: Path,
) -> None:
    with harness.run(tmp_path, algorithm__name=TROUBLED, algorithm__trouble="refuses") as live:
        assert 1 == live.end()
        assert "AssertionError: a minibatch of 7 does not divide 32" in last_lines(live, 2)
        assert "tianflow: learner: AssertionError" in last_lines(live, 1)
