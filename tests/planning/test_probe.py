"""A user's own code is validated in a child process, which is killed with all that it started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from tianflow.config.loading import load_config
from tianflow.config.model import Config, NetworkSettings
from tianflow.core.process_table import carries, processes
from tianflow.planning import probe
from tianflow.planning.validation import validate

pytestmark = pytest.mark.e2e

MARK = "TIANFLOW_TEST_PROBE"
HELPER = [sys.executable, "-c", "import time; time.sleep(600)"]


class Quick(gymnasium.Env[Any, Any]):
    """Starts a process of its own session, and leaves the working directory."""

    observation_space: Any = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        subprocess.Popen(HELPER, start_new_session=True)
        os.chdir("/")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}


class Hanging(Quick):
    """Never made."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(600)


class HangingReset(Quick):
    """Never reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        time.sleep(600)
        raise AssertionError


class Ending(Quick):
    """Ends its process."""

    def __init__(self) -> None:
        super().__init__()
        os._exit(3)


def config(name: str, **env: object) -> Config:
    return load_config(
        {
            "env": {"id": f"{__name__}:{name}", "num_envs": 2, **env},
            "algorithm": {"name": "ppo"},
        }
    )


@pytest.fixture(autouse=True)
def _in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "needs_child", probe.runs_user_code)
    monkeypatch.setenv(MARK, str(os.getpid()))


def left() -> list[int]:
    """Processes that a probe of this test has left."""
    return [
        entry.pid
        for entry in processes()
        if entry.pid != os.getpid() and carries(entry.pid, MARK, str(os.getpid()))
    ]


def test_the_specification_comes_from_the_child_and_nothing_of_it_is_left() -> None:
    before = os.getcwd()  # noqa: PTH109 - a Path would not show a change
    validation = validate(config("Quick"))
    assert () == validation.problems
    assert validation.spec is not None
    assert ((2,), 2) == (validation.spec.observation[0].shape, validation.spec.num_envs)
    assert [] == left()
    assert before == os.getcwd()  # noqa: PTH109 - as above


@pytest.mark.parametrize("name", ["Hanging", pytest.param("HangingReset", marks=pytest.mark.e2e)])
def test_an_environment_that_hangs_is_refused_in_time_and_named_while_it_is_waited_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "REPORT_S", 0.5)
    said: list[str] = []
    (problem,) = validate(config(name, start_timeout_s=4.0), report=said.append).problems
    assert "env.id" == problem.path
    assert "was not made and reset within env.start_timeout_s = 4 s" == problem.message
    assert said
    assert name in said[0]
    assert [] == left()


def test_a_trial_of_attributes_imports_no_network_or_algorithm_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has four seconds, and PyTorch takes longer on a busy machine."""
    (tmp_path / "slow_network.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = config("Quick").model_copy(update={"network": NetworkSettings(name="slow_network:Net")})
    validation = validate(mine, limit_s=20.0, environments_only=True)
    assert (True, ()) == (validation.spec is not None, validation.problems)
    (problem,) = validate(config("Ending"), environments_only=True).problems
    assert "ended the process that made it (exit status 3)" == problem.message
    assert [] == left()


def test_an_environment_that_ends_its_process_is_refused() -> None:
    (problem,) = validate(config("Ending")).problems
    assert "ended the process that made it (exit status 3)" == problem.message
    assert [] == left()


def test_a_problem_keeps_its_path_value_and_nearest_name() -> None:
    (problem,) = validate(config("Quikc")).problems
    assert ("env.id", f"{__name__}:Quick") == (problem.path, problem.nearest)


@pytest.mark.parametrize(
    ("overrides", "child"),
    [
        ((), False),
        (("env.id=ALE/Pong-v5",), False),
        (("env.id=my_package:Env",), True),
        (("network.name=tianflow.networks:Mlp",), True),
        (("env.wrappers=['tianflow.errors:Problem']",), True),
    ],
)
def test_only_code_of_a_user_runs_in_a_child(overrides: tuple[str, ...], child: bool) -> None:
    tables = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}
    assert child == probe.runs_user_code(load_config(tables, overrides))
