"""Validation of a config before a process starts: names, combinations, environment, network.

It does not import PyTorch; a user's own network or algorithm may import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tianflow import plugins
from tianflow.config import rules as config_rules
from tianflow.config.evaluations import PlannedEvaluation, all_evaluations
from tianflow.config.loading import with_changes
from tianflow.config.model import Config
from tianflow.config.networks import PREVIOUS_ACTION
from tianflow.config.portable import unportable_settings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.errors import ConfigError, Problem
from tianflow.logs import logger
from tianflow.planning import probe
from tianflow.planning.resuming import difference

log = logger("validation")


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of `validate`. ``spec`` is None when the environment was not made."""

    problems: tuple[Problem, ...]
    advice: tuple[str, ...]
    spec: EnvironmentSpec | None


def validate(
    config: Config,
    *,
    report: Callable[[str], None] = log.warning,
    limit_s: float = math.inf,
    environments_only: bool = False,
) -> Validation:
    """Check everything that ``config`` names. The environment is made once and closed again.

    A user's own code runs in a child process, see `tianflow.planning.probe`; ``report`` is called
    while that takes long. UndecidedError if it takes longer than ``limit_s`` seconds.

    ``environments_only``: make the environments of training and evaluations, and import no network
    or algorithm of the user, which would import PyTorch.
    """
    if environments_only:
        here = not (probe.needs_child(config) and probe.has_user_environment(config))
    else:
        here = not probe.needs_child(config)
    if here:
        return make_environments_here(config) if environments_only else validate_here(config)
    if unportable := list(unportable_settings(config.model_dump())):
        return Validation(tuple(unportable), (), None)  # the child could not receive it
    try:
        answer = probe.probe(
            config, report=report, limit_s=limit_s, environments_only=environments_only
        )
    except ConfigError as error:
        return Validation(tuple(error.problems), (), None)
    problems = tuple(Problem(*fields) for fields in answer.problems)
    return Validation(problems, tuple(config_rules.advice(config)), answer.spec)


def validate_here(config: Config) -> Validation:
    """As `validate`, in this process, whatever the config names."""
    problems = config_rules.check(config)
    spec = None
    if not problems:
        try:
            spec = _probe(config)
            problems += (
                _check_against(config, spec)
                or _check_graphs(config, spec)
                or _check_own_network(config, spec)
                or _check_evaluations(config, spec)
            )
        except ConfigError as error:
            problems += error.problems
    advice = [*config_rules.advice(config), *_clipped_rewards(spec)]
    return Validation(tuple(problems), tuple(advice), spec)


def make_environments_here(config: Config) -> Validation:
    """Make the environments of training and evaluations in this process, and close them. Nothing
    else of ``config`` is checked.
    """
    try:
        spec = _probe(config)
        return Validation(tuple(_check_evaluations(config, spec)), (), spec)
    except ConfigError as error:
        return Validation(error.problems, (), None)


def require_valid(config: Config, *, report: Callable[[str], None] = log.warning) -> Validation:
    """As `validate`. Raises `ConfigError` with all problems that it found."""
    validation = validate(config, report=report)
    if validation.problems:
        raise ConfigError(validation.problems)
    return validation


def require_settable(
    config: Config, changes: Mapping[str, Mapping[str, object]], *, limit_s: float = math.inf
) -> None:
    """Try ``changes`` of ``env.set`` on new environments. They may take seconds to make, so it must
    not run on a loop. Other changes are not tried.

    Raises:
        ConfigError: an environment does not have one of the attributes, does not accept its value,
            changes its spaces, or was not made within ``limit_s`` seconds.
    """
    if "env" not in changes:
        return
    changed = with_changes(config, {"env": changes["env"]})
    try:
        problems = validate(changed, limit_s=limit_s, environments_only=True).problems
    except probe.UndecidedError as error:
        message = f"cannot be tried: {error}"
        accepted = "`tianflow stop RUN; tianflow train --resume RUN env.set.NAME=VALUE`"
        value = dict(changed.env.set)
        raise ConfigError([Problem("env.set", value, message, accepted)]) from error
    if problems:
        raise ConfigError([_of_attributes(problem, changed) for problem in problems])


def _of_attributes(problem: Problem, config: Config) -> Problem:
    """``problem`` with the value that was given, not its text from a child process. A problem of
    the environment itself is one of its attributes, because nothing else changed.
    """
    given, path = dict(config.env.set), problem.path
    if path in ("env.id", "env.set"):
        return Problem("env.set", given, problem.message, problem.accepted)
    value = given.get(path.removeprefix("env.set."), problem.value)
    return Problem(path, value, problem.message, problem.accepted, problem.nearest)


def require_environment(config: Config) -> EnvironmentSpec:
    """Make the environment once, and check ``config`` against it. Names that the environment and
    the policy do not need are not imported. Raises `ConfigError`.
    """
    spec = _probe(config)
    require_fit(config, spec)
    return spec


def require_fit(config: Config, spec: EnvironmentSpec) -> None:
    """Check ``config`` against a known environment, without making one. Raises `ConfigError`."""
    problems = _check_against(config, spec)
    sees = any(leaf.name == PREVIOUS_ACTION for leaf in spec.observation)
    if sees != config.previous_step:
        message = f"the observations of {spec.id} were recorded with previous_step = {sees}"
        given = config.network.previous_step
        problems.append(Problem("network.previous_step", given, message, str(sees).lower()))
    if problems:
        raise ConfigError(problems)


def _clipped_rewards(spec: EnvironmentSpec | None) -> list[str]:
    if spec is None or not spec.clips_rewards:
        return []
    sentence = (
        f"{spec.id} clips rewards to -1..1 for learning; returns, evaluations and "
        "run.target_return are unclipped scores"
    )
    return [sentence]


def _check_own_network(config: Config, spec: EnvironmentSpec) -> list[Problem]:
    """Make the policy of a user's own network, which tries one step of it."""
    from tianflow.config.networks import BUILT_IN

    if config.network.name in BUILT_IN:
        return []
    algorithm: Any = plugins.load(
        "tianflow.algorithms", config.algorithm.name, path="algorithm.name"
    )
    try:
        algorithm.make_policy(config, spec)
    except ConfigError as error:
        return list(error.problems)
    except Exception as error:  # noqa: BLE001 - a boundary: a user's constructor
        cause = f"{type(error).__name__}: {error}{plugins.raised_at(error)}"
        message = f"cannot be made for {spec.id}: {cause}"
        return [Problem("network.name", config.network.name, message)]
    return []


def _check_graphs(config: Config, spec: EnvironmentSpec) -> list[Problem]:
    """Only training needs them: a policy may act in environments that reset within a step."""
    if config.learner.graphs != "on" or spec.autoreset == "next_step":
        return []
    message = (
        f"{spec.id} resets within a step, so batches have different numbers of final observations, "
        "and a CUDA graph needs fixed shapes"
    )
    return [Problem("learner.graphs", "on", message, "auto, or off")]


def _check_evaluations(config: Config, spec: EnvironmentSpec) -> list[Problem]:
    """Make each environment that an evaluation has of its own. Its spaces must be those of
    training.
    """
    problems: list[Problem] = []
    for planned in all_evaluations(config):
        if planned.env == config.env:
            continue
        try:
            made = _probe(config.model_copy(update={"env": planned.env}))
        except ConfigError as error:
            problems += [_of_evaluation(problem, planned, config) for problem in error.problems]
            continue
        if differing := difference(spec, made, old_name="training", new_name="the evaluation"):
            path, value = planned.difference
            accepted = "an environment with the spaces of training"
            message = f"{differing}, so the policy cannot act there"
            problems.append(Problem(path, value, message, accepted))
    return problems


def _of_evaluation(problem: Problem, planned: PlannedEvaluation, config: Config) -> Problem:
    """``problem`` at the setting of the evaluation. The environment of training was made, so with
    the same id another setting of the evaluation is wrong.
    """
    path, value = f"{planned.path}.{problem.path.removeprefix('env.')}", problem.value
    if problem.path == "env.id" and planned.env.id == config.env.id:
        path, value = planned.difference
    return Problem(path, value, problem.message, problem.accepted, problem.nearest)


def _probe(config: Config) -> EnvironmentSpec:
    from tianflow import envs  # Gymnasium takes a while to import

    return envs.probe(config)


def _check_against(config: Config, spec: EnvironmentSpec) -> list[Problem]:
    from tianflow.config import off_policy as off_policy_settings
    from tianflow.config.networks import check_network
    from tianflow.planning.layouts import trajectory_layout
    from tianflow.planning.memory import check_memory, check_network_memory

    problems = [*check_network(config, spec), *off_policy_settings.check(config, spec)]
    if problems:
        return problems
    check_network_memory(config, spec)
    layout = trajectory_layout(config, spec)
    check_memory(config, layout)
    return []
