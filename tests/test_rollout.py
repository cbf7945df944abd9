import json
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests import environments
from tests.fakes import CountingPolicy, FakePolicy, FakeSlot, VersionPolicy, granted, versions
from tianflow.components.rollout import Rollout
from tianflow.config import ActorSettings, Config, EnvSettings, PPOSettings, RunSettings
from tianflow.envs import probe
from tianflow.envs.vector import VectorEnvironment
from tianflow.errors import EnvironmentFailedError, PoisonedTrajectoryError
from tianflow.interfaces import ActorStep
from tianflow.payloads import Episode, Version

MODES = {"next_step": "NextStepVector", "same_step": "SameStepVector", "disabled": "DisabledVector"}
FIELDS = ("action", "log_prob", "reward", "terminated", "truncated", "valid", "start", "version")


def make_config(env_id: str, *, num_envs: int = 2, steps: int = 8, seed: int = 1, refresh: str = "trajectory", **kwargs: object) -> Config:
    return Config(
        env=EnvSettings(id=env_id if ":" in env_id or "/" in env_id else f"tests.environments:{env_id}", num_envs=num_envs, kwargs=kwargs),
        algorithm=PPOSettings(discount=0.5),
        actors=ActorSettings(rollout_steps=steps, refresh=refresh),
        run=RunSettings(seed=seed),
    )


class Harness:
    """A rollout with a slot to fill."""

    def __init__(self, config: Config, policy=FakePolicy, *, state=None, returns=False, load=None, **rollout):
        self.config, self.spec = config, probe(config)
        self.policy = policy(self.spec.action)
        self.slot = FakeSlot(self.spec, config.actors.rollout_steps, state, returns=returns)
        arguments = {"component": "actor-0", "actor_index": 0, "load_weights": load or versions(3)} | rollout
        self.rollout = Rollout(config=config, spec=self.spec, policy=self.policy, **arguments)

    def run(self, *, epoch: int = 0, min_fragment: int = 1, begun=lambda version: None):
        self.slot.fill_with_garbage()
        return self.rollout.run(self.slot, granted(epoch), min_fragment, begun)

    def copy(self):
        return {name: array.copy() for name, array in self.slot.arrays.items()}


def transitions(arrays, length, env, autoreset):
    """Every trained transition of one environment: (obs, next obs, reward, terminated, truncated)."""
    rows = []
    for t in range(length):
        if arrays["valid"][t, env]:
            after = arrays["obs/"][t + 1, env] if autoreset == "next_step" else arrays["final_obs/"][t, env]
            rows.append(
                (
                    tuple(arrays["obs/"][t, env].tolist()),
                    tuple(after.tolist()),
                    float(arrays["reward"][t, env]),
                    bool(arrays["terminated"][t, env]),
                    bool(arrays["truncated"][t, env]),
                )
            )
    return rows


def collect(mode: str, env: str = "CounterEnv", *, steps: int = 8, trajectories: int = 6, cuts=(), **kwargs):
    harness = Harness(make_config(MODES[mode], steps=steps, env=env, **kwargs))
    assert mode == harness.spec.autoreset
    seen, episodes = [], []
    for k in range(trajectories):
        harness.slot.cut_at = cuts[k % len(cuts)] if cuts else None
        result = harness.run()
        assert result.env_steps == harness.slot.arrays["valid"].sum()
        seen += transitions(harness.slot.arrays, result.length, 1, mode)
        episodes += result.episodes
    return seen, episodes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ending", ["terminate", "truncate"])
@pytest.mark.parametrize("env", ["CounterEnv", "MutatingEnv"])
@pytest.mark.parametrize("cuts", [(), (3, None, 5)])
def test_no_trained_transition_joins_two_episodes_or_contains_a_reset(mode, ending, env, cuts):
    if env == "MutatingEnv" and mode == "same_step":
        pytest.skip("SyncVectorEnv itself hands out the array that the reset then changes")
    lengths = (3, 1, 4)
    seen, episodes = collect(mode, env, length=lengths, ending=ending, cuts=cuts)
    expected = []
    for episode in range(len(seen)):
        length = lengths[episode % 3]
        for t in range(length):
            over = t + 1 == length
            expected.append(((episode, t), (episode, t + 1), 1.0, over and ending == "terminate", over and ending == "truncate"))
    assert len(seen) >= 20
    assert expected[: len(seen)] == seen
    finished = seen[-1][0][0] + (seen[-1][3] or seen[-1][4])
    for env_index in range(2):
        assert [Episode(float(lengths[k % 3]), lengths[k % 3]) for k in range(int(finished))] == episodes[env_index::2]


def test_every_autoreset_mode_gives_the_same_transitions():
    count = 24
    first, second, third = (collect(mode, length=(2, 5), trajectories=8)[0][:count] for mode in MODES)
    assert len(first) == count
    assert first == second == third


def test_the_handed_rows_of_next_step_autoreset(estimators_autoreset):
    case = estimators_autoreset
    harness = Harness(make_config("CounterEnv", num_envs=1, steps=case["inputs"]["vector_steps"], length=3))
    result = harness.run()
    arrays = harness.slot.arrays
    rows = [
        {
            "k": k,
            "obs_in": arrays["obs/"][k, 0, 1],
            "obs_out": arrays["obs/"][k + 1, 0, 1],
            "reward": arrays["reward"][k, 0],
            "terminated": arrays["terminated"][k, 0],
            "valid": arrays["valid"][k, 0],
        }
        for k in range(8)
    ]
    expected = case["expected"]
    assert expected["rows"] == rows
    assert expected["valid_transitions"] == result.env_steps
    assert (Episode(expected["episode_return"], expected["episode_length"]),) * expected["episodes_finished"] == result.episodes
    joined = [list(map(int, (row["obs_in"], row["obs_out"]))) for row in rows if row["valid"]]
    assert expected["transitions_as_obs_action_next"] == joined


@pytest.fixture
def estimators_autoreset():
    rows = [
        {"k": k, "obs_in": k % 4, "obs_out": (k + 1) % 4, "reward": float(k % 4 < 3), "terminated": k % 4 == 2, "valid": k % 4 < 3}
        for k in range(8)
    ]
    return {
        "inputs": {"vector_steps": 8},
        "expected": {
            "rows": rows,
            "valid_transitions": 6,
            "episodes_finished": 2,
            "transitions_as_obs_action_next": [[0, 1], [1, 2], [2, 3]] * 2,
            "episode_return": 3.0,
            "episode_length": 3,
        },
    }
