"""Use of a trained policy: act on one observation, or play whole episodes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tianflow import plugins
from tianflow.components.evaluator import MetricsTally, play
from tianflow.config import spaces
from tianflow.config.evaluations import TABLES, PlannedEvaluation, all_evaluations, main_evaluation
from tianflow.config.imports import require_trusted
from tianflow.config.loading import load_config
from tianflow.config.model import Config, EnvSettings
from tianflow.config.networks import PREVIOUS_ACTION, PREVIOUS_REWARD
from tianflow.core.payloads import EnvironmentSpec
from tianflow.envs.make import environment_seed, make
from tianflow.envs.previous_step import STATE, PreviousStep
from tianflow.envs.spec import ActionCodec, ObservationCodec, form, given_array, given_mask
from tianflow.envs.using import with_environment
from tianflow.errors import CheckpointError, ConfigError, Problem
from tianflow.planning import validation
from tianflow.planning.resuming import difference, saved_settings
from tianflow.rundir.checkpoints import Checkpoint, CheckpointStore, resolve

ACCEPTED = ", ".join(
    f"env.{name}.NAME" if name in TABLES else f"env.{name}"
    for name in EnvSettings.model_fields
    if name not in {"normalisation", "num_envs"}
)
"""Settings of the environment that have an effect on an evaluation."""


class LoadedPolicy:
    """A policy loaded from a checkpoint. Only arrays are read from the checkpoint.

    Args:
        config: settings of the training run.
        spec: specification of its environment.
        checkpoint: that it was loaded from.
        trust: modules that the environment may be imported from; True: all, False: none.
    """

    def __init__(
        self,
        *,
        config: Config,
        spec: EnvironmentSpec,
        checkpoint: Checkpoint,
        trust: bool | Collection[str] = False,
    ) -> None:
        self.config, self.spec, self._trust = config, spec, trust
        self.checkpoint = checkpoint
        self._foreign: Mapping[str, Any] = {"env": config.env.model_dump(mode="json")}
        """Settings of the environment that come from the checkpoint."""
        factory: Any = plugins.load(
            "tianflow.algorithms", config.algorithm.name, path="algorithm.name"
        )
        learner = factory.make_learner(config, spec, torch.device("cpu"))
        learner.load_state_dict(checkpoint.read())
        self.policy = factory.make_policy(config, spec)
        self.policy.load(learner.flat())
        self._actions = ActionCodec(spec.action)
        self._previous = PreviousStep(spec.action) if config.previous_step else None
        self.observations = (
            ObservationCodec.from_spec(spec)
            if spec.source
            else with_environment(
                lambda: make(config.env, 1), lambda environment: environment.observations
            )
        )

    def require_environment(self) -> None:
        """Raise `ConfigError` if the environment needs a module that is not trusted."""
        require_trusted(self._foreign, self._trust)

    def for_evaluation(
        self,
        overrides: Mapping[str, object] | None = None,
        *,
        evaluation: str | None = None,
        seed: int | None = None,
        sampled: bool = False,
    ) -> LoadedPolicy:
        """The same policy with other settings for `evaluate`.

        Args:
            overrides: settings of the environment by dotted path, such as ``{"env.kwargs.size":
                8}``. The environment is made once. Modules that an override names are imported.
            evaluation: name of an evaluation of the run, whose environment, seed and choice of
                actions are used: ``main``, or that of a further one. None: the environment of
                training, with seed and choice of ``main``.
            seed: of environments and sampled actions, 0..2^32-1; None: that of evaluations.
            sampled: sampled actions instead of the most probable ones.

        Raises:
            ConfigError: an override is not a setting of the environment, the run has no such
                evaluation, the policy does not fit the spaces of the environment, or it needs a
                module that is not trusted.
        """
        given = dict(overrides or {})
        planned = evaluation_of(self.config, evaluation)
        env = self.config.env if evaluation is None else planned.env
        if problems := [
            Problem(path, value, "is not a setting of the environment", ACCEPTED)
            for path, value in given.items()
            if not path.startswith("env.") or path.startswith("env.normalisation")
        ]:
            raise ConfigError(problems)
        # Other sections are not read: they may name controllers, sinks and schedules, which would
        # be imported. An algorithm is required, and has no influence.
        document = {
            "env": env.model_dump(mode="json"),
            "evaluation": {
                **self.config.evaluation.model_dump(mode="json"),
                "episodes": planned.episodes,
                "seed": planned.seed if seed is None else seed,
                "deterministic": planned.deterministic and not sampled,
            },
            "algorithm": {"name": "ppo"},
        }
        found = load_config(document, given)
        changed = copy.copy(self)
        changed.config = self.config.model_copy(
            update={"env": found.env, "evaluation": found.evaluation}
        )
        if given or env != self.config.env:
            first = next(iter(given.items()), planned.difference)
            foreign = self._foreign if evaluation is None else {"env": document["env"]}
            changed._enter(_without(foreign, given), first)  # noqa: SLF001 - its own class
        return changed

    def _enter(self, foreign: Mapping[str, Any], first: tuple[str, object]) -> None:
        """Make the environment of changed settings, of which ``foreign`` are those of the
        checkpoint. ``first``: path and value of the first change.
        """
        self._foreign = foreign
        self.require_environment()
        self.spec = _fitting_spec(self.spec, self.config, first)
        self._actions = ActionCodec(self.spec.action)

    def act(
        self, observation: Any, state: Any = None, *, mask: Any = None, reward: float | None = None
    ) -> tuple[Any, Any]:
        """The most probable action for one ``observation``, and the state for the next call.

        Args:
            observation: element of the environment's observation space.
            state: state that the last call returned; None at the first observation of an episode.
                A state of zeros means the same.
            mask: ``info["action_mask"]`` of the environment: an array, or a tuple with one array
                per choice, of any dtype. None allows all actions.
            reward: reward of the last action, for a network that sees it
                (``network.previous_step``). It has no influence on other networks.

        Raises:
            ValueError: an argument does not fit the policy, or the network needs ``reward``, which
                is missing. The message names the part, the expected form and the given one.
        """
        arrays = {
            leaf.name: np.zeros((1, *leaf.shape), leaf.dtype) for leaf in self.spec.observation
        }
        self.observations.encode_given(observation, arrays)
        leaves = {name: torch.from_numpy(array) for name, array in arrays.items()}
        given = self._given_state(state)
        if self._previous is not None and state is not None:
            if reward is None:
                raise ValueError(
                    "reward is missing: the network sees the reward of the previous step "
                    "(network.previous_step); call act(observation, state, reward=...)"
                )
            received = _number(reward)
            learned = np.clip(received, -1.0, 1.0) if self.spec.clips_rewards else received
            arrays[PREVIOUS_REWARD][:] = learned
            arrays[PREVIOUS_ACTION][:] = given.pop(STATE).numpy()
        allowed = None
        if mask is not None:
            allowed = torch.from_numpy(given_mask(self.spec.action, mask))
        with torch.inference_mode():
            step = self.policy.act(leaves, given, None, allowed)
        action, after = step.action.numpy(), dict(step.state)
        if self._previous is not None:
            seen = np.zeros_like(arrays[PREVIOUS_ACTION])
            self._previous.encode(action, seen)
            after[STATE] = torch.from_numpy(seen)
        return self._actions.decode(action)[0], after

    def _given_state(self, state: Any) -> dict[str, torch.Tensor]:
        """The memory of the policy before a step: ``state``, or zeros for None. Raises ValueError
        if it is not what `act` returns.
        """
        expected = dict(self.policy.initial_state(1))
        if state is None:
            return expected
        if self._previous is not None:
            leaf = next(leaf for leaf in self._previous.leaves if leaf.name == PREVIOUS_ACTION)
            expected[STATE] = torch.zeros(1, *leaf.shape, dtype=getattr(torch, leaf.dtype))
        advice = "pass what the last call of act returned, or None"
        names = ", ".join(map(repr, expected)) or "no entries"
        if not isinstance(state, Mapping):
            given = f"a value of type {type(state).__name__}"
            raise ValueError(f"state: expected a dict with {names}, given {given}; {advice}")  # noqa: TRY004 - one error for every wrong argument
        if set(state) != set(expected):
            given = ", ".join(map(repr, state)) or "no entries"
            raise ValueError(f"state: expected {names}, given {given}; {advice}")
        found = {}
        for name, zeros in expected.items():
            wanted = zeros.numpy()
            words = form(str(wanted.dtype), wanted.shape)
            array = given_array(state[name], f"state {name!r}", words)
            fits = np.can_cast(array.dtype, wanted.dtype, "same_kind")
            if array.shape != wanted.shape or not fits:
                given = form(str(array.dtype), array.shape)
                raise ValueError(f"state {name!r}: expected {words}, given {given}; {advice}")
            found[name] = torch.from_numpy(array.astype(wanted.dtype))
        return found


def _number(reward: Any) -> float:
    """``reward`` as a number. ValueError if it is not one."""
    try:
        return float(reward)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward: expected a number, given {reward!r:.80}") from error


def load(
    checkpoint: str | Path, *, runs_dir: Path, trust: bool | Collection[str] = False
) -> LoadedPolicy:
    """The policy of a checkpoint; see `tianflow.load_policy`."""
    # an environment may change the working directory
    found = CheckpointStore.load(resolve(str(checkpoint), runs_dir).absolute())
    tables, described = found.manifest["config"], found.manifest.get("environment")
    if not isinstance(tables, Mapping):
        raise CheckpointError(f"the manifest of {str(found.path)!r} has no settings")
    needed = {"algorithm", "network"} if described is not None else {"algorithm", "network", "env"}
    require_trusted({name: tables.get(name) for name in needed}, trust)
    config = Config.model_validate(saved_settings(found.manifest))
    if described is None:  # written before manifests described the environment
        spec = validation.require_environment(config)
    else:
        spec = spaces.from_json(described)
        validation.require_fit(config, spec)
    return LoadedPolicy(config=config, spec=spec, checkpoint=found, trust=trust)


def _without(tables: Mapping[str, Any], paths: Collection[str], place: str = "") -> dict[str, Any]:
    """``tables`` without the values at ``paths``, which are dotted."""
    found = {}
    for key, value in tables.items():
        path = f"{place}.{key}" if place else str(key)
        if path not in paths:
            nested = isinstance(value, Mapping)
            found[key] = _without(value, paths, path) if nested else value
    return found


def _fitting_spec(
    policy: EnvironmentSpec, config: Config, first: tuple[str, object]
) -> EnvironmentSpec:
    """The specification of the environment of ``config``. Raises ConfigError, with the setting
    ``first``, if ``policy`` has other spaces.
    """
    spec = validation.require_environment(config)
    if differing := difference(policy, spec, old_name="the policy"):
        path, value = first
        accepted = "an environment with the spaces of the policy"
        raise ConfigError([Problem(path, value, f"{differing}, so it cannot act there", accepted)])
    return spec


def evaluation_of(config: Config, name: str | None) -> PlannedEvaluation:
    """The evaluation ``name`` of a run; None: the main one. ConfigError if it does not exist."""
    found = {planned.name: planned for planned in all_evaluations(config)}
    if name is None:
        return main_evaluation(config)
    if name not in found:
        accepted = ", ".join(found)
        nearest = plugins.nearest(name, tuple(found))
        message = "is not an evaluation of the run"
        raise ConfigError([Problem("evaluation", name, message, accepted, nearest)])
    return found[name]


def evaluate(policy: LoadedPolicy, *, episodes: int) -> dict[str, Any]:
    """Play ``episodes`` complete episodes as ``evaluation.deterministic`` says. Other settings are
    those of `LoadedPolicy.for_evaluation`.

    The environment seeds differ from those of training. ``metrics`` has the mean of each metric of
    the environment.

    Raises:
        ConfigError: the environment needs a module that is not trusted.
    """
    policy.require_environment()
    settings = policy.config.evaluation
    seed = main_evaluation(policy.config).seed
    count = min(settings.num_envs, episodes)
    metrics = MetricsTally("evaluation")
    played = with_environment(
        lambda: make(policy.config.env, count, previous_step=policy.config.previous_step),
        lambda environment: play(
            policy.policy,
            environment,
            policy.spec,
            episodes=episodes,
            seed=environment_seed(seed, 0, count, stream=1),
            deterministic=settings.deterministic,
            should_stop=lambda: False,
            measured=metrics.add,
        ),
    )
    assert played is not None
    returns = [episode.episode_return for episode in played]
    return {
        "episodes": len(returns),
        "mean_return": float(np.mean(returns)),
        "min_return": min(returns),
        "max_return": max(returns),
        "mean_length": float(np.mean([episode.length for episode in played])),
        "seed": seed,
        "sampled": not settings.deterministic,
        "metrics": metrics.take(),
    }
