"""Action and reward of the previous step: in trajectories, windows, evaluation and single use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import tianflow
from tests.support.fakes import FakeSlot, granted, versions
from tianflow.algorithms.ppo import PPO
from tianflow.algorithms.r2d2 import R2D2
from tianflow.components.rollout import Rollout
from tianflow.config.loading import load_config
from tianflow.config.model import Config
from tianflow.config.networks import PREVIOUS_ACTION, PREVIOUS_REWARD, state_spec
from tianflow.config.spaces import from_json, to_json
from tianflow.core.layout import make_layout, views
from tianflow.core.payloads import EnvironmentSpec, LeafSpec
from tianflow.envs import probe
from tianflow.envs.make import environment_seed
from tianflow.envs.spec import ObservationCodec
from tianflow.errors import CheckpointError, ConfigError, PoisonedTrajectoryError
from tianflow.hosts.shard_factory import make_shard
from tianflow.planning.validation import require_fit
from tianflow.policy import evaluate
from tianflow.replay.fragments import Fragment, StepStream

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")
ACTION, REWARD = f"obs/{PREVIOUS_ACTION}", f"obs/{PREVIOUS_REWARD}"
MODES = ("next_step", "same_step", "disabled")


class PayingEnv(gymnasium.Env[Any, Any]):
    """Rewards tell step and episode: no two of one episode are alike."""

    def __init__(
        self, action: str = "discrete", length: int = 3, poison: bool = False, mask: bool = False
    ) -> None:
        self.observation_space = spaces.Dict(
            {"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Discrete(3)}
        )
        self.action_space = {
            "discrete": spaces.Discrete(3, start=5),
            "multi": spaces.MultiDiscrete([2, 3]),
            "box": spaces.Box(-0.5, 0.25, (2,), np.float32),
        }[action]
        self.length, self.poison, self.mask, self.episode, self.t = length, poison, mask, 0, 0

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        size = int(np.sum(getattr(self.action_space, "nvec", 3)))
        info = {"action_mask": np.ones(size, bool)} if self.mask else {}
        return {"a": np.full(2, 0.1 * self.t, np.float32), "b": self.t % 3}, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._seen()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        reward = np.nan if self.poison and self.t == 2 else 10.0 * self.episode + self.t / 4
        observation, info = self._seen()
        over = self.t == self.length + self.episode % 2
        return observation, reward, over and self.episode % 2 == 0, over, info


def next_step(num_envs: int, **kwargs: Any) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: PayingEnv(**kwargs)] * num_envs, autoreset_mode="NextStep")


def same_step(num_envs: int, **kwargs: Any) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: PayingEnv(**kwargs)] * num_envs, autoreset_mode="SameStep")


def disabled(num_envs: int, **kwargs: Any) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: PayingEnv(**kwargs)] * num_envs, autoreset_mode="Disabled")


def settings(algorithm: str, env: dict[str, Any], **network: Any) -> Config:
    replay = {"burn_in": 1, "unroll": 2, "n_step": 1, "batch_size": 8}
    return load_config(
        {
            "env": {"num_envs": 2, **env},
            "algorithm": {"name": algorithm, **(replay if algorithm == "r2d2" else {})},
            "network": {"hidden": [8], "lstm": 4, **network},
            "actors": {"rollout_steps": 8},
            "run": {"seed": 3},
        }
    )


def vector(mode: str, **env: Any) -> dict[str, Any]:
    return {"id": f"{__name__}:{mode}", "kwargs": env}


class Collected:
    """Trajectories of a rollout, one after the other."""

    def __init__(self, config: Config) -> None:
        self.config, self.spec = config, probe(config)
        factory: Any = R2D2 if config.algorithm.name == "r2d2" else PPO
        policy = factory.make_policy(config, self.spec)
        self.rollout = Rollout(
            config=config,
            spec=self.spec,
            policy=policy,
            load_weights=versions(3),
            component="actor-0",
            actor_index=0,
        )
        self.layout = make_layout(
            self.spec,
            steps=8,
            state_spec=state_spec(config.network),
            return_accumulator=False,
            recorded=config.algorithm.recorded,
            replayed=config.algorithm.window is not None,
        )

    def run(self, *, cut_at: int | None = None) -> tuple[dict[str, Any], int]:
        slot = FakeSlot(self.spec, 8)
        slot.arrays = views(self.layout, np.zeros(self.layout.nbytes, np.uint8))
        slot.fill_with_garbage()
        slot.cut_at = cut_at
        result = self.rollout.run(slot, granted(0), 1)
        return {name: array.copy() for name, array in slot.arrays.items()}, result.length


def encoded(action: Any, spec: EnvironmentSpec) -> Any:
    """A stored action as the next observation holds it."""
    if spec.action.kind == "box":
        return np.clip(action, np.float32(spec.action.low), np.float32(spec.action.high))
    return action + 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "env",
    [{}, {"action": "multi"}, {"action": "box"}, {"mask": True}, {"mask": True, "action": "multi"}],
)
def test_the_next_observation_holds_action_and_reward_and_the_first_one_zeros(
    mode: str, env: dict[str, Any]
) -> None:
    collected = Collected(settings("ppo", vector(mode, **env), previous_step=True))
    spec, last, checked = collected.spec, None, 0
    assert [PREVIOUS_ACTION, PREVIOUS_REWARD] == [leaf.name for leaf in spec.observation[2:]]
    for cut_at in (None, 3, None, 1, None):
        arrays, length = collected.run(cut_at=cut_at)
        if last is not None:
            assert all(np.array_equal(last[name], arrays[name][0]) for name in (ACTION, REWARD))
        start = arrays["start"]
        assert not arrays[ACTION][: length + 1][start[: length + 1]].any()
        assert not arrays[REWARD][: length + 1][start[: length + 1]].any()
        expected = encoded(arrays["action"][:length], spec)
        after = ~start[1 : length + 1]
        assert np.array_equal(expected[after], arrays[ACTION][1 : length + 1][after])
        assert np.array_equal(
            arrays["reward"][:length][after], arrays[REWARD][1 : length + 1][after]
        )
        if mode != "next_step":
            finals = arrays[f"final_{ACTION}"][:length], arrays[f"final_{REWARD}"][:length]
            assert np.array_equal(expected, finals[0])
            assert np.array_equal(arrays["reward"][:length], finals[1])
        last = {name: arrays[name][length] for name in (ACTION, REWARD)}
        checked += int(after.sum())
    assert checked > 30


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", [False, True])
def test_windows_of_replay_hold_action_and_reward_of_the_step_before_each_row(
    mode: str, mask: bool
) -> None:
    collected = Collected(settings("r2d2", vector(mode, mask=mask, length=9)))
    shard = make_shard(collected.config, collected.spec)
    for number in range(8):
        arrays, length = collected.run()
        shard.insert(Fragment(arrays, length, StepStream(0, 0), number))
    out = shard.make_batch(200)
    shard.draw(200, np.random.default_rng(0), out)
    first, valid = out["start"][0], out["valid"]
    assert 0 < first.sum() < 200
    assert not out[ACTION][0][first].any()
    assert not out[REWARD][0][first].any()
    assert (out[ACTION][0][~first] > 0).all()
    assert (out[REWARD][0][~first] >= 10.0).all()
    # The observation after a termination is undefined.
    known = valid & ~out["terminated"]
    assert np.array_equal(out["action"][known] + 1, out[ACTION][1:][known])
    assert np.array_equal(out["reward"][known], out[REWARD][1:][known])


def test_r2d2_sees_the_previous_step_unless_it_is_switched_off_and_others_do_on_request() -> None:
    env = {"id": "CartPole-v1"}
    assert settings("r2d2", env).previous_step
    assert not settings("r2d2", env, previous_step=False).previous_step
    assert not settings("ppo", env).previous_step
    config = settings("ppo", env, previous_step=True)
    assert (
        LeafSpec(PREVIOUS_ACTION, (), "int64", (3,)),
        LeafSpec(PREVIOUS_REWARD, (), "float32"),
    ) == (probe(config).observation[1:])


def test_a_clipped_reward_is_what_the_network_sees() -> None:
    env = {
        "id": "ALE/MsPacman-v5",
        "kwargs": {"img_height": 42, "img_width": 42, "max_num_frames_per_episode": 400},
    }
    collected = Collected(settings("ppo", env, name="nature_cnn", previous_step=True))
    seen = np.concatenate([collected.run()[0][REWARD] for _ in range(12)])
    assert {0.0, 1.0} == set(np.unique(seen).tolist())


def test_a_reward_that_is_not_finite_is_named_as_the_reward() -> None:
    collected = Collected(
        settings("r2d2", {"id": f"{__name__}:PayingEnv", "kwargs": {"poison": True}})
    )
    with pytest.raises(
        PoisonedTrajectoryError, match="reward of environment 0 is nan after step 2"
    ):
        collected.run()


class ClashingEnv(PayingEnv):
    """Has an observation of its own by that name."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({PREVIOUS_REWARD: spaces.Discrete(3)})


def test_an_observation_of_the_same_name_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="network.previous_step = false"):
        probe(settings("r2d2", {"id": f"{__name__}:ClashingEnv"}))


def run_of_r2d2(directory: Any, *, resume: Any = None, **sections: Any) -> Any:
    small = {"burn_in": 2, "unroll": 4, "n_step": 2, "batch_size": 8}
    config = load_config(
        {
            "env": {"id": "CartPole-v1", "num_envs": 4},
            "algorithm": {"name": "r2d2", **small},
            "network": {"hidden": [16], "lstm": 8, **sections.pop("network", {})},
            "actors": {"rollout_steps": 16},
            "replay": {"capacity": 2000, "min_size": 8, "selector": "prioritised"},
            "placement": {"launcher": "inline"},
            "evaluation": {"episodes": 4, "num_envs": 2},
            "run": {"max_updates": 4, **sections.pop("run", {})},
        }
    )
    return tianflow.train(config, runs_dir=directory, resume=resume)


def test_a_run_resumes_and_its_policy_acts_alone_as_in_an_evaluation(tmp_path: Path) -> None:
    first = run_of_r2d2(tmp_path, run={"name": "one"})
    assert 4 == first.summary["updates"]
    finished = run_of_r2d2(tmp_path, run={"max_updates": 6}, resume="one")
    assert 6 == finished.summary["updates"]
    policy = finished.policy
    played = evaluate(policy, episodes=1)
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(
        seed=environment_seed(policy.config.run.seed, 0, 1, stream=1)
    )
    state, reward, total, over = None, None, 0.0, False
    while not over:
        action, state = policy.act(observation, state, reward=reward)
        observation, reward, terminated, truncated, _ = environment.step(action)
        total, over = total + float(reward), terminated or truncated
    assert played["mean_return"] == total
    assert {"h", "c", "previous_action"} == state.keys()
    with pytest.raises(ValueError, match=r"reward is missing: .* act\(observation, state, reward"):
        policy.act(observation, state)


def test_a_checkpoint_without_these_inputs_is_refused_with_them_and_resumed_without(
    tmp_path: Path,
) -> None:
    run_of_r2d2(tmp_path, run={"name": "one"}, network={"previous_step": False})
    with pytest.raises(ConfigError, match=r"network\.previous_step = True: .* with False"):
        run_of_r2d2(tmp_path, run={"max_updates": 6}, network={"previous_step": True}, resume="one")
    again = {"max_updates": 6}
    resumed = run_of_r2d2(tmp_path, run=again, network={"previous_step": False}, resume="one")
    assert 6 == resumed.summary["updates"]


def test_a_manifest_describes_the_added_leaves_and_refuses_others() -> None:
    config = settings("r2d2", {"id": "CartPole-v1"})
    spec = probe(config)
    assert spec == from_json(to_json(spec))
    codec = ObservationCodec.from_spec(from_json(to_json(spec)))
    assert [""] == [leaf.name for leaf in codec.leaves]
    for observation in (spec.observation[:2], (*spec.observation, LeafSpec("x", (), "float32"))):
        with pytest.raises(CheckpointError, match="do not fit their sources"):
            from_json(to_json(replace(spec, observation=observation)))
    require_fit(config, spec)
    with pytest.raises(ConfigError, match=r"network\.previous_step = False: .*accepted: true"):
        require_fit(settings("r2d2", {"id": "CartPole-v1"}, previous_step=False), spec)
