from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import gymnasium
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.environments import CounterEnv, MaskedEnv
from tests.support.paths import ROOT
from tianflow.cli import main as cli
from tianflow.config.model import EnvSettings
from tianflow.envs import using
from tianflow.envs.checking import Report, check
from tianflow.envs.vector import THREADS


def checked(name: str, **kwargs: Any) -> Report:
    return check(EnvSettings(id=name, kwargs=kwargs), steps=30)


def test_a_sound_environment_is_usable_and_timed() -> None:
    report = checked("CartPole-v1")
    assert [] == report.problems
    assert report.usable
    assert report.deterministic is True
    assert report.steps == 30
    assert report.step_mean_us is not None
    assert report.step_mean_us > 0.0
    assert report.spec["observation"] == {"observation": "float32[4]"}
    assert report.spec["action"] == "discrete"


@pytest.mark.parametrize(
    ("what", "problem"),
    [("observation", "an observation is not finite"), ("reward", "a reward is not finite")],
)
def test_a_value_that_is_not_finite_is_a_problem_reported_once(what: str, problem: str) -> None:
    assert [problem] == checked("tests.support.environments:NaNEnv", what=what).problems


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_an_exception_of_an_environment_is_a_problem(where: str) -> None:
    report = checked("tests.support.environments:RaisingEnv", where=where)
    assert not report.usable
    assert "EnvironmentBrokeError" in report.problems[0]


class ThreadedEnv(CounterEnv):
    """Needs the main thread at one moment, as some libraries do."""

    def __init__(self, where: str, what: str) -> None:
        self._where, self._what = where, what
        self._fail("constructor")
        super().__init__()

    def _fail(self, where: str) -> None:
        if where == self._where:
            if self._what == "signal":
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
            else:
                asyncio.get_event_loop()

    def reset(self, **kwargs: Any) -> Any:
        self._fail("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._fail("step")
        return super().step(action)


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
@pytest.mark.parametrize("what", ["signal", "asyncio"])
def test_an_environment_that_needs_the_main_thread_is_referred_to_the_documentation(
    where: str, what: str
) -> None:
    (problem,) = checked(f"{__name__}:ThreadedEnv", where=where, what=what).problems
    assert f"failed in {'its constructor' if where == 'constructor' else where}" in problem
    assert problem.endswith(THREADS)
    assert "'Threads'" in THREADS
    assert "\n## Threads\n" in (ROOT / "docs" / "own-environment.md").read_text()


class OutsideEnv(CounterEnv):
    """Every observation after the first is outside of its space."""

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return np.full_like(observation, self.observation_space.high + 1), *rest


class UnseededEnv(CounterEnv):
    """Starts in a different state each time, for any seed."""

    begun = 0

    def reset(self, **kwargs: Any) -> Any:
        UnseededEnv.begun += 1
        observation, info = super().reset(**kwargs)
        return np.full_like(observation, UnseededEnv.begun), info


@pytest.mark.parametrize("name", ["MaskedEnv", "MaskedMultiDiscreteEnv"])
@pytest.mark.parametrize("autoreset", ["NextStep", "SameStep", "Disabled"])
def test_an_environment_that_refuses_masked_actions_is_usable(name: str, autoreset: str) -> None:
    report = checked(
        f"tests.support.environments:{name}", vector_kwargs={"autoreset_mode": autoreset}
    )
    assert ([], [], 30) == (report.problems, report.warnings, report.steps)


def test_observations_outside_of_their_space_are_a_warning_reported_once() -> None:
    report = checked("tests.envs.test_checking:OutsideEnv", length=20)
    assert report.usable
    assert 1 == report.warnings.count(
        "an observation is outside of the observation space, or has another dtype"
    )


def limited(environment: Any) -> Any:
    return gymnasium.wrappers.TimeLimit(environment, 1000)


def test_episodes_that_may_never_end_are_a_warning_unless_they_are_limited() -> None:
    """An evaluation plays complete episodes, and would use its full time limit."""
    settings = EnvSettings(id="tests.support.environments:CounterEnv", kwargs={"length": 1_000_000})
    report = check(settings, steps=30)
    assert report.usable
    assert 0 == report.episodes
    assert ["no episode ended in 30 steps"] == [
        sentence.partition(",")[0] for sentence in report.warnings if "episode" in sentence
    ]
    wrapped = settings.model_copy(update={"wrappers": ("tests.envs.test_checking:limited",)})
    for limits in (
        wrapped,
        EnvSettings(id="Pendulum-v1"),
    ):  # registered with a limit of 200 steps
        assert not any("episode" in sentence for sentence in check(limits, steps=30).warnings)


def test_warnings_of_gymnasium_are_reported_without_colour_codes() -> None:
    told = check(EnvSettings(id="Pendulum-v1"), steps=30).warnings
    assert told
    assert not any("\x1b" in sentence for sentence in told)
    # 5 steps each, and one for the reset, in two copies
    counter = EnvSettings(id="tests.support.environments:CounterEnv")
    assert 12 == check(counter, steps=36).episodes


def test_an_environment_that_ignores_its_seed_is_reported() -> None:
    report = checked("tests.envs.test_checking:UnseededEnv")
    assert report.deterministic is False
    assert any(
        sentence.startswith("Gymnasium's check_env: AssertionError") for sentence in report.warnings
    )


def test_an_environment_that_does_not_close_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        using.with_environment,
        "__kwdefaults__",
        using.with_environment.__kwdefaults__ | {"close_s": 0.05},
    )
    gymnasium.register("Unclosable-v0", "tests.support.environments:UnclosableEnv")
    report = checked("Unclosable-v0")  # Gymnasium's check_env closes a registered environment, too
    assert report.usable
    assert 30 == report.steps
    assert any("did not close within 0.05 s" in sentence for sentence in report.warnings)


def test_an_unknown_environment_is_a_problem() -> None:
    assert not checked("NoSuchEnvironment-v0").usable


def test_the_command_prints_the_report_and_exits_with_its_verdict() -> None:
    usable = CliRunner().invoke(
        cli.app,
        [
            "check-env",
            "tests.support.environments:CounterEnv",
            "length=3",
            "--steps",
            "20",
            "--json",
        ],
    )
    assert usable.exit_code == 0
    assert json.loads(usable.stdout)["usable"] is True
    refused = CliRunner().invoke(cli.app, ["check-env", "tests.support.environments:NaNEnv"])
    assert refused.exit_code == 1
    assert "problem: an observation is not finite" in refused.stdout


@pytest.mark.parametrize(
    "arguments", [[], ["CartPole-v1", "--config", "ppo"], ["CartPole-v1", "no_assignment"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.app, ["check-env", *arguments]).exit_code == 2


class ClosedEnv(MaskedEnv):
    """Allows no action at one step before the end."""

    def mask(self) -> Any:
        return super().mask() * (self.t != 3)

    def step(self, action: Any) -> Any:
        if self.t == 3:
            return *CounterEnv.step(self, action)[:4], {"action_mask": self.mask()}
        return super().step(action)


def test_masks_and_the_number_of_actions_are_reported() -> None:
    masked, plain, box, several = (
        checked("tests.support.environments:MaskedEnv"),
        checked("CartPole-v1"),
        checked("Pendulum-v1"),
        checked("tests.support.environments:MaskedMultiDiscreteEnv"),
    )
    assert (True, "4") == (masked.masks, masked.spec["actions"])
    assert (False, "2") == (plain.masks, plain.spec["actions"])
    assert (False, "1 number in a Box") == (box.masks, box.spec["actions"])
    assert (True, "2 x 3") == (several.masks, several.spec["actions"])
    line = "action masks in info['action_mask']: "
    assert f"{line}yes, and the random steps respected them" in masked.lines()
    assert f"{line}no" in plain.lines()


def test_a_mask_without_an_action_is_a_warning_reported_once() -> None:
    report = checked(f"{__name__}:ClosedEnv", length=10)
    assert report.usable
    (warning,) = report.warnings
    assert "info['action_mask'] allows no action before the end of an episode" in warning
