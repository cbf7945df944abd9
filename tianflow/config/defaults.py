"""Default settings of a run that has no config: by algorithm and by kind of environment.

The values begin with the published defaults of Stable-Baselines3, in tianflow's terms. Overrides
replace them. A default that depends on an overridden setting follows it: an update has the
same number of steps when ``env.num_envs`` is given. This module does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from tianflow.config.networks import SMALLEST_IMAGE, image_size, is_image
from tianflow.config.off_policy import (
    DQNSettings,
    OffPolicySettings,
    R2D2Settings,
    SACSettings,
    TD3Settings,
)
from tianflow.config.on_policy import (
    A2CSettings,
    AlgorithmSettings,
    ImpalaSettings,
    PPOSettings,
)
from tianflow.core.payloads import EnvironmentSpec

Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties of an environment that decide about default settings.

    Attributes:
        continuous: the actions are numbers, not choices.
        smallest_image: shortest side of an image, in pixels; None without an image.
        states: every observation is a choice, such as the cell of a grid. The network sees it as
            one input for each value, so states share no inputs.
    """

    continuous: bool
    smallest_image: int | None = None
    states: bool = False

    @property
    def images(self) -> bool:
        """True if the network needs convolutions."""
        return self.smallest_image is not None

    def __str__(self) -> str:
        actions = f"{'continuous' if self.continuous else 'discrete'} actions"
        seen = "images" if self.images else "states" if self.states else None
        return f"{actions} and {seen}" if seen else actions


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default settings of one algorithm.

    Attributes:
        samples: steps in one update with one trajectory, T * N. None: T is in ``tables``.
        state_samples: the same where all observations are choices, if it differs.
        tables: settings for every environment.
        continuous: settings that differ with continuous actions.
        states: settings that differ where all observations are choices.
        images: settings that differ with images, and ``image_samples`` instead of ``samples``.
    """

    tables: Mapping[str, Mapping[str, Any]]
    samples: int | None = None
    state_samples: int | None = None
    continuous: Mapping[str, Mapping[str, Any]] | None = None
    states: Mapping[str, Mapping[str, Any]] | None = None
    images: Mapping[str, Mapping[str, Any]] | None = None
    image_samples: int | None = None


PPO = Defaults(
    samples=2048,
    state_samples=1024,
    tables={
        "env": {"num_envs": 16, "normalisation": {"returns": True}},
        "algorithm": {
            "learning_rate": 3e-4,
            "epochs": 10,
            "minibatch_size": 64,
            "entropy_cost": 0.01,
            "value_cost": 1.0,
        },
        "network": {"activation": "tanh"},
    },
    continuous={
        "env": {"num_envs": 8, "normalisation": {"observations": True, "returns": True}},
        "algorithm": {"entropy_cost": 0.0},
    },
    states={"algorithm": {"learning_rate": 1e-3}},
    images={
        "env": {"num_envs": 8, "normalisation": {"returns": False}},
        "algorithm": {
            "learning_rate": 2.5e-4,
            "clip": 0.1,
            "epochs": 4,
            "minibatch_size": 256,
            "entropy_cost": 0.01,
            "value_cost": 0.5,
        },
    },
    image_samples=1024,
)
A2C = Defaults(
    samples=32,
    state_samples=64,
    tables={
        "env": {"num_envs": 8},
        "algorithm": {"learning_rate": 1e-3, "entropy_cost": 0.0},
        "network": {"activation": "tanh"},
    },
    continuous={  # long rollouts of few environments: their targets bootstrap less
        "env": {"num_envs": 2, "normalisation": {"observations": True, "returns": True}},
    },
    images={"env": {"num_envs": 16}, "algorithm": {"learning_rate": 7e-4, "entropy_cost": 0.01}},
    image_samples=320,
)
IMPALA = Defaults(
    samples=256,
    tables={
        "env": {"num_envs": 16},
        "algorithm": {"learning_rate": 1e-3, "entropy_cost": 0.01},
        "network": {"activation": "tanh"},
    },
    continuous={
        "env": {"normalisation": {"observations": True, "returns": True}},
        "algorithm": {"entropy_cost": 0.0},
    },
    images={"algorithm": {"learning_rate": 6e-4}},
    image_samples=320,
)
DQN = Defaults(
    tables={
        "env": {"num_envs": 4},
        "algorithm": {
            "learning_rate": 5e-4,
            "batch_size": 128,
            "n_step": 3,
            "target_update_updates": 250,
            "epsilon_updates": 2_000,
        },
        "network": {"hidden": [128, 128]},
        "actors": {"rollout_steps": 8},
        "replay": {"min_size": 500, "samples_per_insert": 32.0},
    },
    images={
        "algorithm": {
            "learning_rate": 1e-4,
            "batch_size": 32,
            "target_update_updates": 2_000,
            "epsilon_updates": 50_000,
        },
        "replay": {"min_size": 10_000, "samples_per_insert": 8.0},
    },
)
R2D2 = Defaults(
    tables={
        "env": {"num_envs": 8},
        "algorithm": {
            "learning_rate": 5e-4,
            "discount": 0.99,
            "batch_size": 32,
            "n_step": 3,
            "burn_in": 8,
            "unroll": 16,
            "target_update_updates": 200,
            "epsilon_updates": 2_000,
        },
        "network": {"hidden": [64], "lstm": 64},
        "actors": {"rollout_steps": 16},
        "replay": {"min_size": 100, "samples_per_insert": 32.0, "selector": "prioritised"},
    },
    images={
        "algorithm": {
            "learning_rate": 1e-4,
            "discount": 0.997,
            "burn_in": 20,
            "unroll": 40,
            "target_update_updates": 2_000,
            "epsilon_updates": 20_000,
        },
        "network": {"lstm": 256},
        "replay": {"min_size": 500, "samples_per_insert": 8.0},
    },
)
_OFF_POLICY_CONTROL: Mapping[str, Mapping[str, Any]] = {
    "env": {"num_envs": 2},
    "network": {"hidden": [256, 256]},
    "actors": {"rollout_steps": 8},
    "replay": {"capacity": 1_000_000, "min_size": 100, "samples_per_insert": 256.0},
}
SAC = Defaults(
    tables={**_OFF_POLICY_CONTROL, "algorithm": {"learning_rate": 3e-4, "batch_size": 256}},
    images={"replay": {"capacity": 50_000}},
)
TD3 = Defaults(
    tables={**_OFF_POLICY_CONTROL, "algorithm": {"learning_rate": 1e-3, "batch_size": 256}},
    images={"replay": {"capacity": 50_000}},
)
BY_SETTINGS: tuple[tuple[type[AlgorithmSettings], Defaults], ...] = (
    (PPOSettings, PPO),
    (A2CSettings, A2C),
    (ImpalaSettings, IMPALA),
    (DQNSettings, DQN),
    (R2D2Settings, R2D2),
    (SACSettings, SAC),
    (TD3Settings, TD3),
)
"""Defaults of each family. A plug-in that derives from its settings has the same ones."""


def kind_of(spec: EnvironmentSpec) -> Kind:
    """The kind of an environment."""
    sides = [min(image_size(leaf.shape)[1:]) for leaf in spec.observation if is_image(leaf)]
    return Kind(
        continuous=spec.action.kind == "box",
        smallest_image=min(sides, default=None),
        states=all(leaf.categories for leaf in spec.observation),
    )


def default_tables(
    algorithm: str,
    settings: type[AlgorithmSettings],
    kind: Kind,
    given: Mapping[str, object],
) -> Tables:
    """Settings of ``algorithm`` for environments of ``kind``, without ``env.id``.

    Args:
        algorithm: its name.
        settings: its settings model.
        kind: of the environment.
        given: overrides by dotted path. They are not applied, but other defaults follow them.
    """
    found = next((each for base, each in BY_SETTINGS if issubclass(settings, base)), Defaults({}))
    tables: Tables = {"algorithm": {"name": algorithm}}
    parts = [found.tables]
    if kind.continuous and found.continuous:
        parts.append(found.continuous)
    if kind.states and found.states:
        parts.append(found.states)
    if kind.images and found.images:
        parts.append(found.images)
    for part in parts:
        _merge(tables, part)
    if kind.smallest_image is not None:
        small = kind.smallest_image < SMALLEST_IMAGE["nature_cnn"]
        tables.setdefault("network", {})["name"] = "impala_resnet" if small else "nature_cnn"
    samples = found.samples
    if kind.images:
        samples = found.image_samples
    elif kind.states and found.state_samples is not None:
        samples = found.state_samples
    if samples is not None:
        _fit_rollout(tables, samples, given)
    if issubclass(settings, PPOSettings):
        _fit_minibatch(tables, given)
    if issubclass(settings, OffPolicySettings):
        _fit_replay(tables, given)
    return tables


def _merge(into: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = deepcopy(value)


def _fit_rollout(tables: Tables, samples: int, given: Mapping[str, object]) -> None:
    """Set T so that one update has ``samples`` steps, with the number of environments in force."""
    environments = _number(tables, given, "env.num_envs", 8)
    steps = max(1, samples // max(1, environments))
    tables.setdefault("actors", {})["rollout_steps"] = steps


def _fit_minibatch(tables: Tables, given: Mapping[str, object]) -> None:
    """Limit the minibatch to the steps of one update in force."""
    batch = (
        _number(tables, given, "env.num_envs", 8)
        * _number(tables, given, "actors.rollout_steps", 32)
        * _number(tables, given, "algorithm.batch_trajectories", 1)
    )
    algorithm = tables["algorithm"]
    algorithm["minibatch_size"] = max(1, min(algorithm["minibatch_size"], batch))


def _fit_replay(tables: Tables, given: Mapping[str, object]) -> None:
    """Let the draws of a step follow the batch size in force, and learning begin before the table
    is full.
    """
    replay, algorithm = tables.get("replay", {}), tables["algorithm"]
    if "samples_per_insert" in replay:
        batch = _number(tables, given, "algorithm.batch_size", 256)
        per_step = replay["samples_per_insert"] / algorithm["batch_size"]
        replay["samples_per_insert"] = per_step * batch
    if "min_size" in replay:
        capacity = _number(tables, given, "replay.capacity", 100_000)
        replay["min_size"] = max(1, min(replay["min_size"], capacity // 4))


def _number(tables: Tables, given: Mapping[str, object], path: str, default: int) -> int:
    """The whole number in force at ``path``; ``default`` for a value that validation refuses."""
    section, key = path.split(".")
    value = given.get(path, tables.get(section, {}).get(key))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else default
