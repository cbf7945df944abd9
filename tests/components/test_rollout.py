from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.support import environments
from tests.support.fakes import (
    CountingPolicy,
    FakePolicy,
    FakeSlot,
    VersionPolicy,
    granted,
    versions,
)
from tianflow.algorithms.common.actor_critic import ActorCriticPolicy
from tianflow.components.rollout import Rollout
from tianflow.config.model import ActorSettings, Config, EnvSettings, PPOSettings, RunSettings
from tianflow.core.payloads import Episode, Version
from tianflow.envs import probe
from tianflow.envs.vector import VectorEnvironment
from tianflow.errors import EnvironmentFailedError, PoisonedTrajectoryError

MODES = {"next_step": "NextStepVector", "same_step": "SameStepVector", "disabled": "DisabledVector"}


def make_config(
    env_id: str,
    *,
    num_envs: int = 2,
    steps: int = 8,
    seed: int = 1,
    refresh: str = "trajectory",
    **kwargs: object,
) -> Config:
    return Config(
        env=EnvSettings(
            id=env_id if ":" in env_id or "/" in env_id else f"tests.support.environments:{env_id}",
            num_envs=num_envs,
            kwargs=kwargs,
        ),
        algorithm=PPOSettings(discount=0.5),
        actors=ActorSettings(rollout_steps=steps, refresh=refresh),
        run=RunSettings(seed=seed),
    )


class Harness:
    """A rollout with a slot."""

    def __init__(
        self, config: Config, policy=FakePolicy, *, state=None, returns=False, load=None, **rollout
    ):
        self.config, self.spec = config, probe(config)
        self.policy = policy(self.spec.action)
        self.slot = FakeSlot(self.spec, config.actors.rollout_steps, state, returns=returns)
        arguments = {
            "component": "actor-0",
            "actor_index": 0,
            "load_weights": load or versions(3),
        } | rollout
        self.rollout = Rollout(config=config, spec=self.spec, policy=self.policy, **arguments)

    def run(self, *, epoch: int = 0, min_fragment: int = 1, begun=lambda version: None):
        self.slot.fill_with_garbage()
        return self.rollout.run(self.slot, granted(epoch), min_fragment, begun)

    def copy(self):
        return {name: array.copy() for name, array in self.slot.arrays.items()}


def transitions(arrays, length, env, autoreset):
    """Every trained transition of one environment: (obs, next obs, reward, terminated,
    truncated).
    """
    rows = []
    for t in range(length):
        if arrays["valid"][t, env]:
            after = (
                arrays["obs/"][t + 1, env]
                if autoreset == "next_step"
                else arrays["final_obs/"][t, env]
            )
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


def collect(
    mode: str, env: str = "CounterEnv", *, steps: int = 8, trajectories: int = 6, cuts=(), **kwargs
):
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


# MutatingEnv under SAME_STEP is excluded: SyncVectorEnv returns the array that its reset changes.
@pytest.mark.parametrize(
    ("mode", "env"),
    [
        *((mode, "CounterEnv") for mode in MODES),
        ("next_step", "MutatingEnv"),
        ("disabled", "MutatingEnv"),
    ],
)
@pytest.mark.parametrize("ending", ["terminate", "truncate"])
@pytest.mark.parametrize("cuts", [(), (3, None, 5)])
def test_no_trained_transition_joins_two_episodes_or_contains_a_reset(mode, ending, env, cuts):
    lengths = (3, 1, 4)
    seen, episodes = collect(mode, env, length=lengths, ending=ending, cuts=cuts)
    expected = []
    for episode in range(len(seen)):
        length = lengths[episode % 3]
        for t in range(length):
            over = t + 1 == length
            expected.append(
                (
                    (episode, t),
                    (episode, t + 1),
                    1.0,
                    over and ending == "terminate",
                    over and ending == "truncate",
                )
            )
    assert len(seen) >= 20
    assert expected[: len(seen)] == seen
    finished = seen[-1][0][0] + (seen[-1][3] or seen[-1][4])
    for env_index in range(2):
        assert [
            Episode(float(lengths[k % 3]), lengths[k % 3]) for k in range(int(finished))
        ] == episodes[env_index::2]


def test_every_autoreset_mode_gives_the_same_transitions():
    count = 24
    first, second, third = (
        collect(mode, length=(2, 5), trajectories=8)[0][:count] for mode in MODES
    )
    assert len(first) == count
    assert first == second == third


def test_the_handed_rows_of_next_step_autoreset():
    """Handed reference: obs counts 0..3, reward 1, terminated at 3; the next step only resets, and
    is not a transition.
    """
    harness = Harness(make_config("CounterEnv", num_envs=1, steps=8, length=3))
    result = harness.run()
    arrays = harness.slot.arrays
    rows = [
        (
            arrays["obs/"][k, 0, 1],
            arrays["obs/"][k + 1, 0, 1],
            arrays["reward"][k, 0],
            arrays["terminated"][k, 0],
            arrays["valid"][k, 0],
        )
        for k in range(8)
    ]
    expected = [
        (0, 1, 1.0, False, True),
        (1, 2, 1.0, False, True),
        (2, 3, 1.0, True, True),
        (3, 0, 0.0, False, False),
    ]
    assert 2 * expected == rows
    assert result.env_steps == 6
    assert (Episode(3.0, 3),) * 2 == result.episodes


class Stubborn(SyncVectorEnv):
    """Reports an episode end and a reward for a step that only reset an environment."""

    over = np.zeros(1, bool)

    def step(self, actions):
        observation, reward, terminated, truncated, info = super().step(actions)
        before, self.over = self.over, terminated.copy()
        return observation, np.where(before, 9.0, reward), terminated | before, truncated, info


def test_reports_of_a_step_that_only_resets_do_not_count():
    lengths, steps = (3, 1, 2), 10
    harness = Harness(
        make_config("CounterEnv", num_envs=1, steps=steps),
        make_environment=lambda: VectorEnvironment(
            Stubborn([lambda: environments.CounterEnv(lengths)]), "stubborn"
        ),
    )
    valid = [1, 1, 1, 0, 1, 0, 1, 1, 0, 1]
    for expected in (valid, [1, 1, 0, 1, 0, 1, 1, 0, 1, 1]):
        result, arrays = harness.run(), harness.slot.arrays
        np.testing.assert_array_equal(arrays["valid"][:, 0], np.array(expected, bool))
        np.testing.assert_array_equal(arrays["reward"][:, 0], np.array(expected, np.float32))
        assert not (arrays["terminated"] & ~arrays["valid"]).any()
        assert [(e.episode_return, e.length) for e in result.episodes] == ([(3, 3), (1, 1), (2, 2)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", ["DictEnv", "TupleEnv"])
def test_structured_observations_are_exact_in_every_mode(mode, env):
    harness = Harness(make_config(MODES[mode], steps=12, env=env, length=4))
    harness.run()
    arrays = harness.slot.arrays
    time = (np.arange(13) % 5 if mode == "next_step" else np.arange(13) % 4)[:, None]
    if env == "DictEnv":
        assert arrays["obs/camera"].dtype == np.uint8
        clocks = {
            "camera": arrays["obs/camera"][..., 0, 0, 0],
            "joints": 2 * arrays["obs/arm/joints"][..., 1],
            "mode": arrays["obs/arm/mode"],
        }
    else:
        clocks = {
            "vector": arrays["obs/0"][..., 1],
            "first": arrays["obs/1"][..., 0],
            "second": arrays["obs/1"][..., 1],
        }
    for name, clock in clocks.items():
        np.testing.assert_array_equal(np.broadcast_to(time, clock.shape), clock, err_msg=name)
    if mode != "next_step":
        final = (
            arrays["final_obs/camera"][..., 0, 0, 0]
            if env == "DictEnv"
            else arrays["final_obs/1"][..., 0]
        )
        np.testing.assert_array_equal(np.broadcast_to(1 + np.arange(12) % 4, (2, 12)).T, final)


@pytest.mark.parametrize("mode", MODES)
def test_returns_are_sums_of_the_rewards_as_given(mode):
    """0.1 is not a float32 number; the return is that of its float64 value."""
    _, episodes = collect(mode, length=7, reward=0.1)
    assert {Episode(sum([0.1] * 7), 7)} == set(episodes)


def test_float64_rewards_too_large_for_float32_are_refused_by_name():
    harness = Harness(make_config("CounterEnv", reward=1e200))
    with pytest.raises(
        PoisonedTrajectoryError,
        match=r"^actor-0: reward of environment 0 is inf after step 1 of its trajectory$",
    ):
        harness.run()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["observation", "reward"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_with_environment_and_step(mode, what, value):
    def make():
        makers = [
            lambda: environments.CounterEnv(length=4),
            lambda: environments.NaNEnv(length=4, at=4, what=what, value=value),
        ]
        kinds = {
            "next_step": AutoresetMode.NEXT_STEP,
            "same_step": AutoresetMode.SAME_STEP,
            "disabled": AutoresetMode.DISABLED,
        }
        return VectorEnvironment(SyncVectorEnv(makers, autoreset_mode=kinds[mode]), "nan")

    harness = Harness(make_config(MODES[mode], env="CounterEnv"), make_environment=make)
    with pytest.raises(
        PoisonedTrajectoryError, match=f"environment 1 is {value} after step 4"
    ) as caught:
        harness.run()
    assert (1, 4) == (caught.value.environment, caught.value.step)


def test_a_first_observation_that_is_not_finite_is_refused_at_step_0():
    class Broken(environments.CounterEnv):
        def observation(self):
            return np.array([np.nan, 0], np.float32)

    harness = Harness(
        make_config("CounterEnv"),
        make_environment=lambda: VectorEnvironment(SyncVectorEnv([Broken, Broken]), "broken"),
    )
    with pytest.raises(PoisonedTrajectoryError, match="obs of environment 0 is nan after step 0"):
        harness.run()


def test_log_probabilities_that_are_not_finite_are_refused():
    class Broken(FakePolicy):
        def log_prob(self, parameters, action):
            broken = super().log_prob(parameters, action)
            broken[2, 1] = torch.nan
            return broken

    with pytest.raises(
        PoisonedTrajectoryError, match="log_prob of environment 1 is nan after step 2"
    ):
        Harness(make_config("CounterEnv"), Broken).run()


class WrongShape(SyncVectorEnv):
    """From its third step on, a shape is wrong."""

    def __init__(self, num_envs: int = 1, what: str = "reward") -> None:
        super().__init__([environments.CounterEnv] * num_envs)
        self._what, self._count = what, 0

    def step(self, actions):
        observation, reward, terminated, truncated, info = super().step(actions)
        self._count += 1
        if self._count >= 3:
            reward = reward[:1] if self._what == "reward" else reward
            observation = observation[0] if self._what == "observation" else observation
            terminated = terminated[:, None] if self._what == "terminated" else terminated
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize("what", ["observation", "reward", "terminated"])
def test_wrong_shapes_are_refused_and_not_broadcast(what):
    harness = Harness(make_config("tests.components.test_rollout:WrongShape", what=what))
    with pytest.raises(
        PoisonedTrajectoryError, match=rf"{what}.* shapes? .*instead of \(2,.* after step 3"
    ):
        harness.run()


@pytest.mark.parametrize(
    "env",
    [
        "CounterEnv",
        "DiscreteStartEnv",
        "MultiDiscreteEnv",
        "MultiBinaryEnv",
        "BoxActionEnv",
        "UnboundedBoxActionEnv",
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_actions_are_inside_the_space_and_stored_as_sampled(mode, env):
    """`PickyEnv` asserts the bounds; its reward is the sum of the action."""
    harness = Harness(make_config(MODES[mode], env=env, steps=16))
    harness.run()
    arrays, spec = harness.slot.arrays, harness.spec.action
    stored = arrays["action"].reshape(16, 2, -1)
    if spec.kind == "box":
        given = np.clip(stored, spec.low, spec.high)
        assert np.abs(stored).max() > 1, "the sampled action is stored, not the clipped one"
        assert not np.array_equal(stored, given) or env == "UnboundedBoxActionEnv"
    else:
        assert stored.min() == 0
        given = stored + np.array(spec.start)
    if env != "CounterEnv":
        np.testing.assert_allclose((given.sum(-1) * arrays["valid"]), arrays["reward"], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", ["MaskedEnv", "MaskedMultiDiscreteEnv"])
def test_masked_actions_are_never_taken(mode, env):
    """The environments assert it, across ends of episodes and trajectories."""
    harness = Harness(make_config(MODES[mode], env=env, length=3, steps=10))
    assert harness.spec.action_mask
    for _ in range(4):
        harness.run()
        assert np.isfinite(harness.slot.arrays["log_prob"]).all()
    arrays = harness.slot.arrays
    allowed = arrays["action_mask"].sum(-1)
    if env == "MaskedEnv":
        # An observation that allows no action is the last of its episode: its action is ignored, so
        # any is valid.
        np.testing.assert_array_equal(np.where(arrays["obs/"][..., 1] == 3, 4, 2), allowed)
    else:
        np.testing.assert_array_equal(np.where(arrays["obs/"][..., 1] == 3, 5, 2), allowed)


class Forgetful(environments.MaskedEnv):
    def step(self, action):
        return *super().step(action)[:4], {}


@pytest.mark.parametrize("kinds", [[Forgetful, Forgetful], [environments.MaskedEnv, Forgetful]])
def test_a_mask_that_disappears_is_refused(kinds):
    """Also for a single environment; otherwise the mask of an earlier trajectory would be used."""
    harness = Harness(
        make_config("MaskedEnv"),
        make_environment=lambda: VectorEnvironment(SyncVectorEnv(kinds), "forgetful"),
    )
    with pytest.raises(
        PoisonedTrajectoryError,
        match=f"action_mask.*environment {kinds.index(Forgetful)} .*missing",
    ):
        harness.run()


class SilentAtTheEnd(environments.MaskedEnv):
    def step(self, action):
        *outcome, info = super().step(action)
        return *outcome, info if info["action_mask"].any() else {}


@pytest.mark.parametrize("autoreset", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("silent", [[True, True], [False, True]])
def test_a_final_observation_may_come_without_a_mask(silent, autoreset):
    kinds = [SilentAtTheEnd if quiet else environments.MaskedEnv for quiet in silent]
    makers = [partial(kind, length=length) for kind, length in zip(kinds, (3, 4), strict=True)]
    config, mode = (
        make_config("MaskedEnv", vector_kwargs={"autoreset_mode": autoreset}),
        AutoresetMode(autoreset),
    )
    harness = Harness(
        config,
        make_environment=lambda: VectorEnvironment(
            SyncVectorEnv(makers, autoreset_mode=mode), "silent"
        ),
    )
    for _ in range(4):
        harness.run()
        assert harness.slot.arrays["action_mask"].any(-1).all()


def test_log_probabilities_are_those_of_the_sampled_actions():
    harness = Harness(make_config("BoxActionEnv"))
    harness.run()
    action = torch.from_numpy(harness.slot.arrays["action"])
    expected = torch.distributions.Normal(0.0, 3.0).log_prob(action).sum(-1).numpy()
    np.testing.assert_allclose(expected, harness.slot.arrays["log_prob"], rtol=1e-6)


def test_the_policy_gets_the_stored_observations():
    harness = Harness(make_config("DictEnv"))
    harness.run()
    for name in ("camera", "arm/joints", "arm/mode"):
        shown = np.stack([shown[name] for shown in harness.policy.shown])
        assert shown.dtype == harness.slot.arrays[f"obs/{name}"].dtype
        np.testing.assert_array_equal(harness.slot.arrays[f"obs/{name}"][:8], shown)


@pytest.mark.parametrize("mode", MODES)
def test_recurrent_state_is_zero_before_an_episode_and_continues_within_it(mode):
    """The state counts the observations of the episode so far, also in the second trajectory."""
    harness = Harness(
        make_config(MODES[mode], steps=5, env="CounterEnv", length=7),
        CountingPolicy,
        state={"count": (1,)},
    )
    for cut in (None, 3, None, None):
        harness.slot.cut_at = cut
        length = harness.run().length
        arrays, counts = harness.slot.arrays, np.stack(harness.policy.counts[-length:])
        np.testing.assert_array_equal(arrays["obs/"][:length, :, 1], counts)
        np.testing.assert_array_equal(arrays["obs/"][0, :, 1], arrays["state/count"][:, 0])
        np.testing.assert_array_equal(
            arrays["obs/"][: length + 1, :, 1] == 0, arrays["start"][: length + 1]
        )


@pytest.mark.parametrize("mode", MODES)
def test_discounted_returns_continue_over_trajectories_and_restart_with_episodes(mode):
    harness = Harness(make_config(MODES[mode], steps=5, env="CounterEnv", length=7), returns=True)
    for _ in range(4):
        harness.run()
        arrays = harness.slot.arrays
        t = arrays["obs/"][:5, :, 1]
        expected = np.where(arrays["valid"], 2.0 - 0.5**t, 0.0)
        np.testing.assert_allclose(expected, arrays["return_so_far"])


def test_a_cut_is_honoured_once_the_fragment_is_long_enough():
    harness = Harness(make_config("CounterEnv", length=100))
    harness.slot.cut_at = 1
    assert harness.run(min_fragment=5).length == 5
    harness.slot.cut_at = 6
    assert harness.run(min_fragment=5).length == 6
    assert [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6] == harness.slot.steps
    assert harness.slot.arrays["obs/"][0, 0, 1] == 5


@pytest.mark.parametrize("mode", MODES)
def test_rows_past_the_length_are_not_valid_and_finite(mode):
    harness = Harness(
        make_config(MODES[mode], env="MaskedEnv"),
        CountingPolicy,
        state={"count": (1,)},
        returns=True,
    )
    harness.slot.cut_at = 3
    result = harness.run()
    arrays = harness.slot.arrays
    assert result.length == 3
    assert result.env_steps == arrays["valid"][:3].sum()
    assert not arrays["valid"][3:].any()
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert (arrays["version"] == 3).all()
    assert arrays["action_mask"][4:].all()
    for name in ("terminated", "truncated", "action"):
        assert not arrays[name][3:].any(), name


def test_every_row_of_a_full_trajectory_is_written():
    for vector in MODES.values():
        harness = Harness(
            make_config(vector, env="MaskedEnv"),
            CountingPolicy,
            state={"count": (1,)},
            returns=True,
        )
        harness.run()
        for name, array in harness.slot.arrays.items():
            assert np.isfinite(array).all(), name
            assert not (array == 99).any(), name


@pytest.mark.parametrize(
    ("refresh", "expected"), [("trajectory", [4] * 8), ("step", [4, 5, 6, 6, 7, 7, 7, 7])]
)
def test_every_step_records_the_version_that_chose_it(refresh, expected):
    told = []
    numbers = versions(4, 5, 6, 6, 7)
    harness = Harness(make_config("VersionEchoEnv", refresh=refresh, length=100), VersionPolicy)

    def load():
        harness.policy.version = numbers().number
        return Version(1, harness.policy.version)

    harness.rollout._load_weights = load
    result = harness.run(begun=told.append)
    assert expected == harness.slot.arrays["version"].tolist()
    assert expected == harness.slot.arrays["reward"][:, 0].tolist(), "the data prove their own age"
    assert Version(1, 4) == result.version
    assert [Version(1, 4)] == told


def test_a_new_lineage_in_the_middle_leaves_the_trajectory_with_the_old_one():
    left = [Version(1, 40), Version(2, 38)]
    harness = Harness(
        make_config("CounterEnv", refresh="step"),
        load=lambda: left.pop(0) if len(left) > 1 else left[0],
    )
    assert Version(1, 40) == harness.run().version


def test_stopping_ends_this_and_later_trajectories_before_the_next_step():
    harness = Harness(make_config("CounterEnv", length=100))
    progress = harness.slot.progress

    def stop_at_3(step):
        progress(step)
        if step == 3:
            harness.rollout.stop()

    harness.slot.progress = stop_at_3
    assert harness.run().length == 0
    assert [0, 1, 2, 3] == harness.slot.steps
    assert harness.run().length == 0
    assert [0, 1, 2, 3, 0] == harness.slot.steps


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_raises_is_created_again_and_the_run_continues(mode, tmp_path):
    marker = str(tmp_path / "raised")
    harness = Harness(make_config(MODES[mode], env="RaisingEnv", at=4, marker=marker, length=3))
    with pytest.raises(
        EnvironmentFailedError, match=r"failed in step: EnvironmentBrokeError: step broke"
    ) as caught:
        harness.run()
    assert "environments.py" in caught.value.details
    assert caught.value.details.rstrip().endswith("EnvironmentBrokeError: step broke")
    harness.rollout.rebuild()
    result = harness.run()
    assert result.length == 8
    assert harness.slot.arrays["start"][0].all(), "nothing is carried over from before the failure"
    assert {Episode(3.0, 3)} == set(result.episodes)


def test_an_environment_that_always_raises_fails_every_time():
    harness = Harness(make_config("RaisingEnv", at=2, length=3))
    for _ in range(3):
        with pytest.raises(EnvironmentFailedError):
            harness.run()


@pytest.mark.parametrize("mode", MODES)
def test_raising_in_a_later_reset_is_a_failure_too(mode, tmp_path):
    harness = Harness(make_config(MODES[mode], env="CounterEnv", length=3))
    harness.rollout.prepare()
    for env in harness.rollout._environment._vector.envs:
        env.reset = lambda **_: (_ for _ in ()).throw(
            environments.EnvironmentBrokeError("reset broke")
        )
    with pytest.raises(EnvironmentFailedError, match="reset broke"):
        harness.run()
    assert harness.run().length == 8


def test_an_environment_that_exits_is_a_failure_only():
    class Quitting(environments.CounterEnv):
        def step(self, action):
            raise SystemExit(0)

    harness = Harness(
        make_config("CounterEnv"),
        make_environment=lambda: VectorEnvironment(SyncVectorEnv([Quitting, Quitting]), "quitting"),
    )
    with pytest.raises(EnvironmentFailedError, match="SystemExit"):
        harness.run()


@pytest.mark.parametrize("where", ["constructor", "reset"])
def test_a_constructor_or_first_reset_that_raises_is_a_failure(where, tmp_path):
    marker = tmp_path / "raised"
    marker.touch()
    harness = Harness(make_config("RaisingEnv", where=where, marker=str(marker)))
    marker.unlink()
    with pytest.raises(EnvironmentFailedError, match=f"{where} broke"):
        harness.rollout.prepare()
    harness.rollout.rebuild()
    assert harness.run().length == 8


def test_spaces_that_changed_since_the_check_are_a_failure():
    harness = Harness(make_config("CounterEnv"))
    harness.rollout._spec = replace(
        harness.spec, action=replace(harness.spec.action, categories=(3,))
    )
    with pytest.raises(EnvironmentFailedError, match="spaces"):
        harness.run()


def seeds_of(**rollout: object) -> set[int]:
    harness = Harness(make_config("SeedEnv", num_envs=4), **rollout)
    harness.run()
    return set(harness.slot.arrays["obs/"][0, :, 0].tolist())


def test_all_seeds_differ_between_actors_members_and_incarnations():
    sets = [
        seeds_of(actor_index=actor, incarnation=incarnation)
        for actor in range(3)
        for incarnation in range(3)
    ]
    assert 3 * 3 * 4 == len(set.union(*sets))
    assert seeds_of(actor_index=1, incarnation=2) == sets[5]


def test_seeds_after_a_failure_are_new():
    harness = Harness(make_config("SeedEnv", num_envs=4, seed=7))
    harness.run()
    before = set(harness.slot.arrays["obs/"][0, :, 0].tolist())
    harness.rollout._environment._vector.step = lambda actions: 1 / 0
    with pytest.raises(EnvironmentFailedError, match="ZeroDivisionError"):
        harness.run()
    harness.run()
    assert not before & set(harness.slot.arrays["obs/"][0, :, 0].tolist())


def equal(first, second):
    return all(np.array_equal(first[name], second[name]) for name in first)


def test_the_same_seed_gives_the_same_trajectories_bit_for_bit():
    first, second, other = (Harness(make_config("SeedEnv", seed=seed)) for seed in (5, 5, 6))
    for _ in range(3):
        for harness in (first, second, other):
            harness.run()
        assert equal(first.copy(), second.copy())
        assert not equal(first.copy(), other.copy())


@pytest.mark.parametrize("mode", MODES)
def test_a_new_epoch_begins_as_a_new_process_would(mode):
    """Independent of its past: other trajectories, a failure, another incarnation, hidden
    environment state.
    """
    config = make_config(MODES[mode], env="SeedEnv", length=(3, 4), steps=5)
    old = Harness(config, CountingPolicy, state={"count": (1,)}, returns=True, incarnation=3)
    for _ in range(3):
        old.run()
    fresh = Harness(config, CountingPolicy, state={"count": (1,)}, returns=True)
    for _ in range(3):
        old.run(epoch=2)
        fresh.run(epoch=2)
        assert equal(old.copy(), fresh.copy())
    before = fresh.copy()
    fresh.run(epoch=3)
    assert not equal(before, fresh.copy())


def test_native_cartpole_episodes_have_the_lengths_that_it_reports():
    """The reward is 1 per step, so return and length agree, and valid steps add up."""
    config = Config(
        env=EnvSettings(id="CartPole-v1", num_envs=8),
        algorithm=PPOSettings(),
        actors=ActorSettings(rollout_steps=32),
    )
    harness = Harness(config)
    episodes, steps = [], 0
    for _ in range(10):
        result = harness.run()
        episodes += result.episodes
        steps += result.env_steps
    assert len(episodes) > 20
    assert all(episode.episode_return == episode.length >= 8 for episode in episodes)
    assert steps - 8 * 100 <= sum(episode.length for episode in episodes) <= steps


def slot_of(steps: int) -> FakeSlot:
    return FakeSlot(probe(make_config("NextStepVector")), steps)


def test_slots_written_in_turn_equal_one_slot():
    config = make_config("NextStepVector", steps=100)
    alone, turning = Harness(config), Harness(config)
    slots = [slot_of(100) for _ in range(2)]
    for number in range(5):
        alone.run()
        turning.slot = slots[number % 2]
        turning.run()
        assert equal(alone.copy(), turning.copy())


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_that_acts_on_arrays_writes_the_same_as_with_tensors(mode):
    """Also with a `refresh` between steps: the arrays use the loaded weights."""
    config = make_config(
        MODES[mode], num_envs=3, steps=12, env="CounterEnv", length=5, refresh="step"
    )
    written = []
    for hidden in (False, True):
        policy = ActorCriticPolicy(config, probe(config))
        flat, loads = (
            ActorCriticPolicy(
                config.model_copy(update={"run": RunSettings(seed=7)}), probe(config)
            ),
            count(),
        )
        if hidden:
            policy.on_arrays = lambda num_envs: None

        def load(policy=policy, flat=flat, loads=loads):
            if next(loads) == 5:
                policy.load(flat._model.buffer.bytes.numpy())
            return Version(1, 3)

        harness = Harness(config, lambda action, policy=policy: policy, load=load)
        harness.run()
        written.append([harness.copy(), (harness.run(), harness.copy())[1]])
    for arrays, tensors in zip(*written, strict=True):
        assert set(arrays) == set(tensors)
        for name, array in arrays.items():
            np.testing.assert_allclose(array, tensors[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert len(np.unique(written[0][0]["action"])) > 1
