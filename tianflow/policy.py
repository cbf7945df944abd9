"""Use of a trained policy: act on one observation, or play whole episodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tianflow import plugins
from tianflow.components.evaluator import play
from tianflow.config.imports import require_trusted
from tianflow.config.model import Config
from tianflow.config.networks import PREVIOUS_ACTION, PREVIOUS_REWARD
from tianflow.core.payloads import EnvironmentSpec
from tianflow.envs.make import environment_seed, make
from tianflow.envs.previous_step import STATE, PreviousStep
from tianflow.envs.spec import ActionCodec, ObservationCodec
from tianflow.envs.using import with_environment
from tianflow.envs.vector import flat_mask


class LoadedPolicy:
    """A policy loaded from a checkpoint. Only arrays are read from the checkpoint.

    Args:
        config: settings of the training run.
        spec: specification of its environment.
        arrays: state of the learner.
        trust: modules that the environment may be imported from; True: all, False: none.
    """

    def __init__(
        self,
        *,
        config: Config,
        spec: EnvironmentSpec,
        arrays: Mapping[str, NDArray[Any]],
        trust: bool | Collection[str] = False,
    ) -> None:
        self.config, self.spec, self._trust = config, spec, trust
        factory: Any = plugins.load(
            "tianflow.algorithms", config.algorithm.name, path="algorithm.name"
        )
        learner = factory.make_learner(config, spec, torch.device("cpu"))
        learner.load_state_dict(arrays)
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
        require_trusted({"env": self.config.env.model_dump(mode="json")}, self._trust)

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
            ValueError: the network needs ``reward``, which is missing.
        """
        arrays = {
            leaf.name: np.zeros((1, *leaf.shape), leaf.dtype) for leaf in self.spec.observation
        }
        self.observations.encode_single(observation, 0, arrays)
        leaves = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._previous is not None and state is not None:
            if reward is None:
                raise ValueError(
                    "reward is missing: the network sees the reward of the previous step "
                    "(network.previous_step); call act(observation, state, reward=...)"
                )
            learned = np.clip(reward, -1.0, 1.0) if self.spec.clips_rewards else reward
            arrays[PREVIOUS_REWARD][:] = learned
            arrays[PREVIOUS_ACTION][:] = state[STATE].numpy()
        given = self.policy.initial_state(1) if state is None else state
        memory = {name: leaf for name, leaf in given.items() if name != STATE}
        allowed = None if mask is None else torch.from_numpy(flat_mask(mask).astype(np.bool_)[None])
        with torch.inference_mode():
            step = self.policy.act(leaves, memory, None, allowed)
        action, after = step.action.numpy(), dict(step.state)
        if self._previous is not None:
            seen = np.zeros_like(arrays[PREVIOUS_ACTION])
            self._previous.encode(action, seen)
            after[STATE] = torch.from_numpy(seen)
        return self._actions.decode(action)[0], after


def evaluate(policy: LoadedPolicy, *, episodes: int) -> dict[str, Any]:
    """Play ``episodes`` complete episodes with the most probable actions.

    The environment seeds differ from those of training.

    Raises:
        ConfigError: the environment needs a module that is not trusted.
    """
    policy.require_environment()
    settings = policy.config.evaluation
    count = min(settings.num_envs, episodes)
    played = with_environment(
        lambda: make(policy.config.env, count, previous_step=policy.config.previous_step),
        lambda environment: play(
            policy.policy,
            environment,
            policy.spec,
            episodes=episodes,
            seed=environment_seed(policy.config.run.seed, 0, count, stream=1),
            deterministic=settings.deterministic,
            should_stop=lambda: False,
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
    }
