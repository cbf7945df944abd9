import sys
import tomllib
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.support import environments
from tests.support.paths import ROOT
from tianflow.config.model import Config, EnvSettings, PPOSettings
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.envs import probe
from tianflow.envs.make import EXTRAS, environment_seed, make
from tianflow.envs.spec import UnexpectedShapeError
from tianflow.envs.vector import StepRow, VectorEnvironment, autoreset_of, failures_named
from tianflow.errors import ConfigError, EnvironmentFailedError
from tianflow.planning.validation import validate

HERE = "tests.envs.test_make"


def config(env_id: str, **env: object) -> Config:
    return Config(env=EnvSettings(id=env_id, **{"num_envs": 3, **env}), algorithm=PPOSettings())


def problem(env_id: str, **env: object):
    with pytest.raises(ConfigError) as caught:
        probe(config(env_id, **env))
    assert len(caught.value.problems) == 1
    return caught.value.problems[0]


def vector_of(env_id: str, **env: object):
    environment = make(config(env_id, **env).env)
    environment.close()
    return environment._vector


def test_a_probe_returns_the_specification():
    expected = EnvironmentSpec(
        "tests.support.environments:Dict-v0",
        (
            LeafSpec("arm/joints", (3,), "float32"),
            LeafSpec("arm/mode", (), "int64", (8,)),
            LeafSpec("camera", (1, 6, 6), "uint8"),
        ),
        ActionSpec("discrete", (), "int64", (2,), (0,)),
        3,
        "next_step",
    )
    assert expected == probe(config("tests.support.environments:Dict-v0"))


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("tests.support.environments:CounterEnv", "next_step"),
        ("tests.support.environments:NextStepVector", "next_step"),
        ("tests.support.environments:SameStepVector", "same_step"),
        ("tests.support.environments:DisabledVector", "disabled"),
        ("CartPole-v1", "next_step"),
    ],
)
def test_the_autoreset_mode_is_that_of_the_vector(env_id, expected):
    assert expected == probe(config(env_id)).autoreset


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, "next_step"),
        ({"autoreset_mode": AutoresetMode.SAME_STEP}, "same_step"),
        ({"autoreset_mode": "Disabled"}, "disabled"),
        ({"autoreset_mode": "same_step"}, "same_step"),
    ],
)
def test_a_mode_may_be_missing_or_a_string(metadata, expected):
    assert expected == autoreset_of(metadata)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="NextStep, SameStep and Disabled"):
        autoreset_of({"autoreset_mode": "sometimes"})


def test_a_native_vector_environment_is_used_by_default():
    own = "CartPoleVectorEnv"
    assert own == type(vector_of("CartPole-v1")).__name__
    assert own == type(vector_of("CartPole-v1", vectorization="native")).__name__
    assert type(vector_of("CartPole-v1", vectorization="sync")) is SyncVectorEnv
    assert type(vector_of("Acrobot-v1")) is SyncVectorEnv


def test_arguments_reach_the_environment():
    assert vector_of("CartPole-v1", kwargs={"max_episode_steps": 7}).max_episode_steps == 7
    assert [9, 9, 9] == [
        env._lengths[0]
        for env in vector_of("tests.support.environments:CounterEnv", kwargs={"length": 9}).envs
    ]
    assert [9, 9, 9] == [
        env.unwrapped._lengths[0]
        for env in vector_of("tests.support.environments:Counter-v0", kwargs={"length": 9}).envs
    ]
    same_step = {"vector_kwargs": {"autoreset_mode": "SameStep"}}
    assert (
        probe(config("tests.support.environments:Counter-v0", kwargs=same_step)).autoreset
        == "same_step"
    )
    assert (
        probe(config("tests.support.environments:CounterEnv", kwargs=same_step)).autoreset
        == "same_step"
    )


def make_counter(length=4):
    return environments.CounterEnv(length=length)


def make_counters(num_envs, length=4):
    return SyncVectorEnv([lambda: environments.CounterEnv(length=length)] * num_envs)


def make_nothing():
    return None


def make_too_few(num_envs):
    return make_counters(num_envs + 1)


NOT_CALLABLE = 3


def test_factories_of_one_and_of_many_environments_are_distinguished():
    assert len(vector_of(f"{HERE}:make_counter").envs) == 3
    assert len(vector_of(f"{HERE}:make_counters", kwargs={"length": 2}).envs) == 3


class Scaled(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 10 * reward


def scaled(env):
    return Scaled(env)


def test_wrappers_apply_to_each_environment():
    wrappers = (f"{HERE}:scaled", f"{HERE}:Scaled")
    for env_id in (
        "tests.support.environments:Counter-v0",
        "tests.support.environments:CounterEnv",
    ):
        vector = vector_of(env_id, wrappers=wrappers)
        vector.reset(seed=0)
        assert [100, 100, 100] == vector.step(np.zeros(3, np.int64))[1].tolist()


def test_wrappers_of_a_native_vector_are_refused():
    found = problem("CartPole-v1", wrappers=(f"{HERE}:scaled",))
    assert found.path == "env.wrappers"
    assert "env.vectorization = 'sync'" in found.accepted
    assert (
        problem("tests.support.environments:SameStepVector", wrappers=(f"{HERE}:scaled",)).path
        == "env.wrappers"
    )


@pytest.mark.parametrize(
    ("env_id", "nearest"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("ALE/Pongg-v5", "ALE/Pong-v5"),
        ("tests.support.environments:CounterEn", "tests.support.environments:CounterEnv"),
        ("tests.support.environments:Countr-v0", "tests.support.environments:Counter-v0"),
    ],
)
def test_an_unknown_id_names_the_nearest(env_id, nearest):
    found = problem(env_id)
    assert ("env.id", env_id, nearest) == (found.path, found.value, found.nearest)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("no_such_module_at_all:Env", "cannot import 'no_such_module_at_all'"),
        ("__main__:Env", "other processes cannot import it: move it to a module of its own"),
        (f"{HERE}:NOT_CALLABLE", "is not callable"),
        (f"{HERE}:make_nothing", "created NoneType, not a gymnasium.Env"),
        (f"{HERE}:make_too_few", "not a gymnasium.vector.VectorEnv of 1 environments"),
        ("tests.support.environments:SequenceEnv", "sub-space 'words'"),
    ],
)
def test_an_object_that_cannot_be_an_environment_is_refused(env_id, message):
    found = problem(env_id)
    assert found.path == "env.id"
    assert message in found.message


class Closing(SyncVectorEnv):
    closed = 0

    def close_extras(self, **_):
        Closing.closed += 1


def make_strange(num_envs):
    return Closing([environments.SequenceEnv] * num_envs)


def make_one_more(num_envs):
    return Closing([lambda: environments.CounterEnv(length=4)] * (num_envs + 1))


@pytest.mark.parametrize("name", ["make_strange", "make_one_more"])
def test_a_vector_that_is_refused_is_closed(name, monkeypatch):
    """It may have processes, and the process that checks configs continues to run."""
    monkeypatch.setattr(Closing, "closed", 0)
    problem(f"{HERE}:{name}")
    assert 1 == Closing.closed


@pytest.mark.parametrize("where", ["constructor", "reset"])
def test_a_constructor_or_reset_that_raises_fails_the_probe(where):
    found = problem("tests.support.environments:RaisingEnv", kwargs={"where": where})
    assert found.path == "env.id"
    assert (
        f"EnvironmentBrokeError: {'the constructor' if where == 'constructor' else 'reset'} broke"
        in found.message
    )


@pytest.mark.parametrize(
    "env_id",
    [
        "CartPole-v1",
        "tests.support.environments:Counter-v0",
        "tests.support.environments:CounterEnv",
    ],
)
def test_an_unknown_argument_is_named(env_id):
    found = problem(env_id, kwargs={"lenght": 3})
    assert found.path == "env.kwargs"
    assert "'lenght'" in found.message
    assert "\n" not in found.message


def test_arguments_with_a_setting_of_their_own_are_refused():
    assert "set env.num_envs" in problem("CartPole-v1", kwargs={"num_envs": 4}).message
    assert (
        problem("tests.support.environments:CounterEnv", kwargs={"vector_kwargs": 3}).path
        == "env.kwargs.vector_kwargs"
    )


@pytest.mark.parametrize(
    ("env_id", "vectorization", "message"),
    [
        ("Acrobot-v1", "native", "has no vector environment of its own"),
        ("tests.support.environments:CounterEnv", "native", "creates single environments"),
        ("tests.support.environments:SameStepVector", "sync", "creates a native vector"),
    ],
)
def test_an_impossible_vectorization_is_refused(env_id, vectorization, message):
    found = problem(env_id, vectorization=vectorization)
    assert found.path == "env.vectorization"
    assert message in found.message


def test_action_masks_are_detected_at_the_first_reset():
    assert probe(config("tests.support.environments:MaskedEnv")).action_mask
    assert probe(config("tests.support.environments:MaskedMultiDiscreteEnv")).action_mask
    assert not probe(config("tests.support.environments:CounterEnv")).action_mask


class WronglyMasked(environments.MaskedEnv):
    def mask(self):
        return np.ones(3, np.int8)


def test_a_mask_of_the_wrong_size_is_refused():
    assert "(3,) instead of (4,)" in problem(f"{HERE}:WronglyMasked").message


class WrongObservation(environments.CounterEnv):
    def observation(self):
        return np.zeros(3, np.float32)


def test_a_first_observation_of_the_wrong_shape_is_refused():
    assert problem(f"{HERE}:WrongObservation").path == "env.id"


@pytest.mark.parametrize(
    ("env_id", "package", "extra"),
    [
        ("HalfCheetah-v5", "mujoco", "mujoco"),
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("ale_py:ALE/Pong-v5", "ale_py", "atari"),
    ],
)
def test_a_missing_package_is_reported_with_its_extra(monkeypatch, env_id, package, extra):
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ConfigError) as caught:
        probe(config(env_id))
    told = (
        f"env.id = {env_id!r}: {package} is not installed; accepted: pip install "
        f'-c constraints.txt -e ".[{extra}]" first'
    )
    assert told == str(caught.value)


def test_every_reported_extra_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert set(EXTRAS.values()) <= set(extras)


def test_warnings_of_gymnasium_are_suppressed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert probe(config("CartPole-v0")).action.categories == (2,)


def test_an_episode_that_ends_without_its_last_observation_is_a_failure():
    class Silent(SyncVectorEnv):
        def step(self, actions):
            return *super().step(actions)[:4], {}

    environment = VectorEnvironment(
        Silent([lambda: environments.CounterEnv(1)], autoreset_mode="SameStep"), "silent"
    )
    from tests.support.fakes import FakeSlot
    from tianflow.components.rows import split_rows

    slot = FakeSlot(environment.spec, 2)
    environment.reset(0, {"": slot.arrays["obs/"][0]}, None)
    with pytest.raises(EnvironmentFailedError, match="final_obs"):
        environment.step(np.zeros(1, np.int64), split_rows(slot.arrays)[0].outcome)


class Listing(SyncVectorEnv):
    """Returns lists where Gymnasium returns arrays, with one flag too many if ``wrong``."""

    wrong = False

    def step(self, actions):
        observation, *given, info = super().step(actions)
        reward, terminated, truncated = (array.tolist() for array in given)
        return observation.tolist(), reward, terminated + [False] * self.wrong, truncated, info


def test_a_vector_may_return_lists_and_their_lengths_are_checked():
    from tests.support.fakes import FakeSlot
    from tianflow.components.rows import split_rows

    vector = Listing([lambda: environments.CounterEnv(3)] * 2, autoreset_mode="NextStep")
    environment = VectorEnvironment(vector, "listing")
    slot = FakeSlot(environment.spec, 3)
    arrays, rows = slot.arrays, split_rows(slot.arrays)
    environment.reset(0, {"": arrays["obs/"][0]}, None)
    for row in rows:
        environment.step(np.zeros(2, np.int64), row.outcome)
    environment.settle(
        **{name: arrays[name] for name in ("reward", "terminated", "truncated", "valid")},
        start=arrays["start"][1:],
    )
    assert [[1.0, 1.0]] * 3 == arrays["reward"].tolist()
    assert [[False, False], [False, False], [True, True]] == arrays["terminated"].tolist()

    vector.wrong = True
    with pytest.raises(
        UnexpectedShapeError, match=r"shapes \(2,\), \(3,\) and \(2,\) instead of \(2,\)"
    ):
        environment.step(np.zeros(2, np.int64), rows[0].outcome)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_return_is_the_sum_of_its_episode_in_the_order_of_the_steps_bit_for_bit(mode):
    """Over fragments of all lengths; an infinite return ends with its episode."""
    from tests.support.fakes import FakeSlot
    from tianflow.components.rows import split_rows

    draw = np.random.default_rng(0)
    rewards, over = (
        draw.standard_normal((150, 3)) * 10.0 ** draw.integers(-9, 9, (150, 3)),
        draw.random((150, 3)) < 0.2,
    )
    rewards[40, 1] = np.inf
    script = zip(rewards, over, strict=True)

    class Scripted(SyncVectorEnv):
        def step(self, actions):
            observation = np.zeros(self.observation_space.shape, self.observation_space.dtype)
            reward, ends = next(script)
            final = {"final_obs": observation} if mode == "SameStep" else {}
            return observation, reward, ends, np.zeros_like(ends), final

    environment = VectorEnvironment(
        Scripted([lambda: environments.CounterEnv(1)] * 3, autoreset_mode=mode), "scripted"
    )
    slot = FakeSlot(environment.spec, 50)
    environment.reset(0, {"": slot.arrays["obs/"][0]}, None)
    for count in (1, 2, 50, 7, 40, 50):
        for row in split_rows(slot.arrays)[:count]:
            environment.step(np.zeros(3, np.int64), row.outcome)
        given = {
            name: slot.arrays[name][:count]
            for name in ("reward", "terminated", "truncated", "valid")
        }
        environment.settle(**given, start=slot.arrays["start"][1 : count + 1])

    expected, total, length = [], [0.0] * 3, [0] * 3
    resets = [False] * 3
    for t, index in np.ndindex(150, 3):
        if resets[index]:
            resets[index] = False
            continue
        total[index], length[index] = total[index] + rewards[t, index], length[index] + 1
        if over[t, index]:
            expected.append((index, (total[index], length[index])))
            total[index], length[index], resets[index] = 0.0, 0, mode == "NextStep"
    assert expected == list(zip(*environment.take_finished(), strict=True))
    assert 1 == sum(np.isinf(total) for _, (total, _) in expected)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_atari_uses_its_own_vector_with_one_thread_and_bytes(mode, monkeypatch):
    import ale_py.vector_env as atari

    threads = []
    real = atari.ale_py.ALEVectorInterface
    monkeypatch.setattr(
        atari.ale_py,
        "ALEVectorInterface",
        lambda **kwargs: threads.append(kwargs["num_threads"]) or real(**kwargs),
    )
    spec = probe(
        config("ALE/Pong-v5", kwargs={"autoreset_mode": mode, "img_height": 42, "img_width": 42})
    )
    assert (LeafSpec("", (4, 42, 42), "uint8"),) == spec.observation
    assert ("next_step" if mode == "NextStep" else "same_step", 4, (6,)) == (
        spec.autoreset,
        spec.frames_per_step,
        spec.action.categories,
    )
    assert [1] == threads


def played(environment, steps):
    """Learning rewards [T, N] of cyclic actions, and the finished episodes."""
    n = environment.num_envs
    leaves = environment.spec.observation
    observation = {leaf.name: np.zeros((n, *leaf.shape), leaf.dtype) for leaf in leaves}
    final = {} if environment.spec.autoreset == "next_step" else observation
    row = StepRow(observation, np.zeros(n, np.bool_), None, final)
    environment.reset(3, observation, None)
    settled = {
        name: np.zeros((steps, n), np.bool_)
        for name in ("terminated", "truncated", "valid", "start")
    }
    reward = np.zeros((steps, n), np.float32)
    for t in range(steps):
        action = np.full((n, *environment.spec.action.stored_shape), t // 5 % 5, np.int64)
        environment.step(action, row)
        settled["start"][t] = row.start
    environment.settle(reward=reward, **settled)
    environment.close()
    return reward, environment.take_finished()[1]


@pytest.mark.parametrize("clipping", [None, True, False])
def test_returns_of_atari_are_scores_and_only_rewards_for_learning_are_clipped(clipping):
    limit = {"max_num_frames_per_episode": 400, "img_height": 42, "img_width": 42}
    given = {} if clipping is None else {"reward_clipping": clipping}
    environment = make(config("ALE/MsPacman-v5", kwargs={**limit, **given}, num_envs=1).env)
    clips = clipping is not False
    assert clips == environment.spec.clips_rewards
    reward, episodes = played(environment, 102)
    assert len(episodes) == environment.num_envs
    assert {0.0, 1.0 if clips else 10.0} == set(np.unique(reward).tolist())
    scores = [episode.episode_return for episode in episodes]
    assert scores == (reward[:100] * (10.0 if clips else 1.0)).sum(0).tolist()
    assert min(scores) >= 10.0


class Paying(gymnasium.Env):
    """Pays -3, -2, ... 3 and ends."""

    observation_space, action_space = Box(-9, 9, (1,), np.float32), Discrete(5)

    def reset(self, *, seed=None, options=None):
        self.now = -4
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.now += 1
        return np.zeros(1, np.float32), float(self.now), self.now == 3, False, {}


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_return_is_not_clipped_in_any_mode(mode):
    vector = SyncVectorEnv([Paying] * 3, autoreset_mode=mode)
    reward, episodes = played(VectorEnvironment(vector, "Paying", clips_rewards=True), 16)
    assert [-1.0, -1.0, -1.0, 0.0, 1.0, 1.0, 1.0] == reward[:7, 0].tolist()
    assert {(0.0, 7)} == set(episodes)
    assert len(episodes) == 6


def test_validation_says_that_rewards_are_clipped_for_learning_only():
    image = {"img_height": 42, "img_width": 42}
    settings = config("ALE/MsPacman-v5", kwargs=image, num_envs=8)
    (note,) = [note for note in validate(settings).advice if "clips rewards" in note]
    assert "returns, evaluations and run.target_return are unclipped scores" in note
    plain = validate(config("CartPole-v1", num_envs=8))
    assert plain.spec is not None
    assert not [note for note in plain.advice if "clips" in note]


def test_seeds_of_a_run_are_distinct_within_an_incarnation():
    for era in ({}, {"incarnation": 1}, {"epoch": 5}, {"failures": 2}, {"stream": 1}):
        firsts = sorted(environment_seed(1, actor, 64, **era) for actor in range(128))
        assert [64] * 127 == np.diff(firsts).tolist()
        assert firsts[0] >= 0
        assert firsts[-1] + 64 < 2**31


def test_incarnations_streams_and_runs_have_different_seeds():
    eras = [{}, {"incarnation": 1}, {"epoch": 1}, {"failures": 1}, {"stream": 1}]
    seeds = [environment_seed(run, 0, 64, **era) for run in (1, 2) for era in eras]
    assert len(seeds) == len(set(seeds))
    assert seeds == [environment_seed(run, 0, 64, **era) for run in (1, 2) for era in eras]


class UntellableError(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize("error", [ValueError("\udcff"), UntellableError()])
def test_an_exception_of_an_environment_becomes_valid_text(error):
    with pytest.raises(EnvironmentFailedError) as caught, failures_named("step"):
        raise error
    assert f"in step: {type(error).__name__}: " in caught.value.summary
    assert caught.value.summary.encode()
    assert caught.value.details.encode()
