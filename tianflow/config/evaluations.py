"""`PlannedEvaluation`: what one evaluation of a run plays, from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tianflow.config.model import Config, EnvSettings, EvaluationEnvSettings
from tianflow.errors import ConfigError

MAIN = "main"
"""Name of the evaluation that decides about the target and the best checkpoint."""
PLAYED = ("id", "kwargs", "set", "wrappers")
"""Settings of an environment that decide what a return means."""
TABLES = ("kwargs", "set")
"""Settings of an environment that are merged."""


@dataclass(frozen=True, slots=True)
class PlannedEvaluation:
    """One evaluation.

    Attributes:
        name: `MAIN`, or the name of a further one.
        path: of the settings that differ from ``env``, such as ``evaluation.env``.
        differences: those settings.
        env: settings of its environment.
        episodes: number of complete episodes.
        deterministic: True for most probable actions.
        seed: of environments and actions.
    """

    name: str
    path: str
    differences: EvaluationEnvSettings
    env: EnvSettings
    episodes: int
    deterministic: bool
    seed: int

    @property
    def difference(self) -> tuple[str, object]:
        """Path and value of the setting that differs from ``env``; of several, ``path`` and all of
        them.
        """
        found: dict[str, object] = {}
        differences = self.differences.model_dump(mode="json", exclude_defaults=True)
        for name, value in differences.items():
            if name in TABLES:
                found |= {f"{self.path}.{name}.{key}": inner for key, inner in value.items()}
            else:
                found[f"{self.path}.{name}"] = value
        return next(iter(found.items())) if len(found) == 1 else (self.path, differences)


def main_evaluation(config: Config) -> PlannedEvaluation:
    """The evaluation that decides."""
    settings = config.evaluation
    return PlannedEvaluation(
        name=MAIN,
        path="evaluation.env",
        differences=settings.env,
        env=_environment(config.env, settings.env),
        episodes=settings.episodes,
        deterministic=settings.deterministic,
        seed=config.run.seed if settings.seed is None else settings.seed,
    )


def further_evaluations(config: Config) -> tuple[PlannedEvaluation, ...]:
    """The others, in the order of the settings."""
    main = main_evaluation(config)
    return tuple(
        PlannedEvaluation(
            name=name,
            path=f"evaluation.further.{name}.env",
            differences=settings.env,
            env=_environment(config.env, settings.env),
            episodes=main.episodes if settings.episodes is None else settings.episodes,
            deterministic=main.deterministic
            if settings.deterministic is None
            else settings.deterministic,
            seed=main.seed if settings.seed is None else settings.seed,
        )
        for name, settings in config.evaluation.further.items()
    )


def all_evaluations(config: Config) -> tuple[PlannedEvaluation, ...]:
    """The main evaluation, then the others."""
    return (main_evaluation(config), *further_evaluations(config))


def evaluation_named(config: Config, name: str) -> PlannedEvaluation:
    """The evaluation called ``name``. KeyError if it does not exist."""
    return {evaluation.name: evaluation for evaluation in all_evaluations(config)}[name]


def meaning_of_returns(saved: object) -> Mapping[str, Any] | None:
    """What decides about the returns of the main evaluation under the settings ``saved``, a
    `Config` or the settings in a manifest. None if they cannot be read.
    """
    try:
        planned = main_evaluation(Config.model_validate(saved))
    except (ConfigError, ValueError):  # of another version, or damaged
        return None
    return {**played_environment(planned.env), "deterministic": planned.deterministic}


def played_environment(env: EnvSettings) -> dict[str, Any]:
    """The settings of ``env`` that decide what a return means, ready for JSON."""
    return env.model_dump(mode="json", include=set(PLAYED))


def _environment(env: EnvSettings, differences: EvaluationEnvSettings) -> EnvSettings:
    """``env`` with the ``differences``. Keyword arguments and attributes belong to an id: another
    one does not inherit them.
    """
    update = differences.model_dump(exclude_none=True)
    if differences.id in (None, env.id):
        update |= {name: {**getattr(env, name), **update[name]} for name in TABLES}
    return env.model_copy(update=update)
