"""The settings of a run that names only an algorithm and an environment: those of a shipped preset,
or else defaults for this kind of environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tianflow.config.defaults import default_tables, kind_of
from tianflow.config.loading import load_config, parse_overrides, read_tables, shipped
from tianflow.config.model import Config, algorithm_names, algorithm_settings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.errors import ConfigError, Problem
from tianflow.planning import validation

Overrides = Sequence[str] | Mapping[str, object]
PAIR = ("env", "id"), ("algorithm", "name")
"""Settings by which a preset is found."""


def start_config(
    algorithm: str,
    env: str,
    overrides: Overrides = (),
    *,
    presets: bool = True,
    report: Callable[[str], None] = validation.log.warning,
) -> Config:
    """The settings of a run of ``algorithm`` on environment ``env``. Overrides win.

    ``run.preset`` names their origin. Without a preset, or with ``presets`` False, the environment
    is made once to see its kind; ``report`` is called while that takes long.

    Raises:
        ConfigError: a name does not exist, or settings are refused. It names every problem.
    """
    _require_algorithm(algorithm, env)
    given = _flat(overrides if isinstance(overrides, Mapping) else parse_overrides(overrides))
    for path, value in (("env.id", env), ("algorithm.name", algorithm)):
        if given.get(path, value) != value:
            message = f"contradicts {value!r}, which the command names"
            raise ConfigError([Problem(path, given[path], message, "one of the two, once")])
    preset = preset_of(algorithm, env) if presets else None
    if preset is not None:
        tables: dict[str, Any] = read_tables(shipped()[preset])
        origin = f"preset {preset}"
    else:
        kind = kind_of(_specification(env, given, report))
        tables = dict(default_tables(algorithm, algorithm_settings(algorithm), kind, given))
        tables["env"] = {**tables.get("env", {}), "id": env}
        origin = f"defaults of {algorithm} for {kind}"
    tables["run"] = {**tables.get("run", {}), "preset": origin}
    return load_config(tables, overrides)


def preset_of(algorithm: str, env: str) -> str | None:
    """Name of the shipped config for ``algorithm`` on ``env``; None without one.

    Of several, it is the one with the name of the algorithm: cartpole_impala, not cartpole_seed.
    """
    found = []
    for name, path in shipped().items():
        tables = read_tables(path)
        pair = (tables.get(section, {}).get(key) for section, key in PAIR)
        if tuple(pair) == (env, algorithm):
            found.append(name)
    return min(found, key=lambda name: (not name.endswith(f"_{algorithm}"), name), default=None)


def origin(config: Config) -> str:
    """The origin of the settings of `start_config`, as a line."""
    return f"settings: {config.run.preset}"


def _require_algorithm(algorithm: str, env: str) -> None:
    """Refuse a config in the place of the algorithm, with the way to use it."""
    if algorithm in algorithm_names():
        return
    if algorithm in shipped() or Path(algorithm).is_file():
        accepted = (
            f"an algorithm ({', '.join(algorithm_names())}, or module:attribute); or the config "
            f"without --env, and the override env.id={env}"
        )
        message = "is a config; with an environment beside it, an algorithm is expected"
        raise ConfigError([Problem(algorithm, None, message, accepted)])
    algorithm_settings(algorithm)


def _flat(overrides: Mapping[str, object]) -> dict[str, object]:
    """Overrides by dotted path, those in tables too."""
    found: dict[str, object] = {}
    for path, value in overrides.items():
        if isinstance(value, Mapping):
            found |= {f"{path}.{key}": inner for key, inner in _flat(value).items()}
        else:
            found[path] = value
    return found


def _specification(
    env: str, given: Mapping[str, object], report: Callable[[str], None]
) -> EnvironmentSpec:
    """Make the environment once. Its kind does not depend on the algorithm."""
    settings = {
        path: value
        for path, value in given.items()
        if path.startswith("env.") and path != "env.num_envs"
    }
    tables = {"env": {"id": env, "num_envs": 1}, "algorithm": {"name": "ppo"}}
    found = validation.validate(load_config(tables, settings), report=report)
    if found.spec is None:
        raise ConfigError(found.problems)
    return found.spec
