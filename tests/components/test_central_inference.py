"""Central inference computes what local inference computes: actions, rewards, starts, versions,
recorded fields and recurrent states, for every kind of policy.

Everything runs on one thread here: a rollout continues when a batch has answered it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.effort import grid
from tianflow import plugins
from tianflow.channels.arena import Arena, ArenaSlot, SlotRequests, row_of
from tianflow.channels.doorbell import Doorbell
from tianflow.channels.memory import HeapSlots
from tianflow.components.inference_batch import PolicyBatch
from tianflow.components.requesting import RequestSelector
from tianflow.components.rollout import Rollout, RolloutResult
from tianflow.config.loading import load_config
from tianflow.config.model import Config
from tianflow.core.payloads import Grant, Version
from tianflow.envs import probe
from tianflow.interfaces import SlotOwner
from tianflow.ops.exploration import apex_epsilons
from tianflow.planning.layouts import trajectory_layout

Arrays = dict[str, NDArray[Any]]
OWN = "tests.support.environments:"
SEED = Version(0, 0)


def pixels(**kwargs: Any) -> Any:
    """Random images, as Atari has them."""
    import gymnasium

    class Pixels(gymnasium.Env[NDArray[Any], Any]):
        observation_space = gymnasium.spaces.Box(0, 255, (4, 44, 44), np.uint8)
        action_space = gymnasium.spaces.Discrete(6)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            super().reset(seed=seed)
            self._steps = 0
            return self._image(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self._steps += 1
            return self._image(), float(action), self._steps >= 9, False, {}

        def _image(self) -> Any:
            return self.np_random.integers(0, 256, (4, 44, 44), dtype=np.uint8)

    return Pixels(**kwargs)


KINDS: dict[str, dict[str, Any]] = {
    "mlp": {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}},
    "normalised": {
        "env": {"id": "CartPole-v1", "normalisation": {"observations": True}},
        "algorithm": {"name": "impala"},
    },
    "cnn": {
        "env": {"id": "tests.components.test_central_inference:pixels", "num_envs": 2},
        "algorithm": {"name": "impala"},
        "network": {"name": "nature_cnn"},
        "actors": {"rollout_steps": 6},
    },
    "lstm": {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "ppo"},
        "network": {"lstm": 16, "previous_step": True},
    },
    "dict": {"env": {"id": f"{OWN}DictEnv"}, "algorithm": {"name": "ppo"}},
    "masks": {"env": {"id": f"{OWN}MaskedEnv"}, "algorithm": {"name": "a2c"}},
    "continuous": {"env": {"id": "Pendulum-v1"}, "algorithm": {"name": "ppo"}},
    "sac": {"env": {"id": "Pendulum-v1"}, "algorithm": {"name": "sac"}},
    "td3": {"env": {"id": "Pendulum-v1"}, "algorithm": {"name": "td3"}},
    "dqn": {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "dqn", "epsilon_start": 0.3},
    },
    "apex": {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "dqn", "epsilon_base": 0.4, "epsilon_alpha": 7.0},
    },
    "r2d2": {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "r2d2"},
        "network": {"lstm": 16},
    },
}


STEPS = 15
"""Rows of a trajectory that is compared: three of them are longer than a first episode."""
COMPARED = int(os.environ.get("TIANFLOW_INFERENCE_STEPS", "45"))
"""Rows of each actor that are compared; more of them for a long look. 1,000 take four minutes."""

ENDLESS = {"continuous", "sac", "td3"}
"""Episodes of these are longer than what is played here."""


def config_of(kind: str, *, actors: int, central: bool, steps: int = 25) -> Config:
    """The settings of ``kind``; small, and with the same seed."""
    data = {section: dict(values) for section, values in KINDS[kind].items()}
    data["env"] = {"num_envs": 4} | data["env"]
    data["actors"] = {"rollout_steps": steps, "count": actors} | data.get("actors", {})
    if central:
        data["actors"]["inference"] = "central"
    return load_config(data)


@dataclass
class Weights:
    """The weights of a policy, which a test replaces."""

    policy: Any
    version: Version = SEED
    loaded: Version | None = None
    sets: list[NDArray[np.uint8]] = field(default_factory=list)

    def refresh(self) -> Version:
        if self.loaded != self.version:
            self.policy.load(self.sets[self.version.number % len(self.sets)])
            self.loaded = self.version
        return self.version


def weight_sets(config: Config, policies: Any) -> list[NDArray[np.uint8]]:
    """Two sets of weights: those of two new learners, times three. At its start a policy is so
    nearly uniform that another observation gives the same log-probabilities.
    """
    spec, found = probe(config), []
    for seed in (1, 2):
        seeded = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        learner = policies.make_learner(seeded, spec, torch.device("cpu"))
        learner.model.buffer.parameters.mul_(3.0)
        if config.env.normalisation.observations:  # the statistics differ, too
            draw = np.random.default_rng(seed)
            seen = {
                leaf.name: torch.from_numpy(draw.normal(size=(9, 4, *leaf.shape)) * seed)
                for leaf in spec.observation
            }
            learner.model.observations.update(seen, torch.ones(9, 4, dtype=torch.bool))
        found.append(learner.flat().copy())
    return found


class Stage:
    """Actors that fill one slot each, with local or central inference.

    Args:
        kind: of the policy, in `KINDS`.
        actors: number of actors.
        servers: number of inference servers; 0: local inference.
        steps: rows of a trajectory.
        slots: of the actors, with as many slots as actors; None: in ordinary memory.
        head: where servers find requests; None: the slots of the actors.
    """

    def __init__(
        self,
        kind: str,
        *,
        actors: int,
        servers: int,
        steps: int = 25,
        slots: SlotOwner | None = None,
        head: Arena | None = None,
    ) -> None:
        config = config_of(kind, actors=actors, central=servers > 0, steps=steps)
        self.config, self.spec = config, probe(config)
        if slots is None:
            layout = trajectory_layout(config, self.spec)
            slots = HeapSlots(layout=layout, capacity=actors, bells=servers + 1)
            slots.add_slots(actors)
        self.slots, self.head = slots, head or slots.arena
        policies: Any = plugins.load("tianflow.algorithms", config.algorithm.name, path="")
        sets = weight_sets(config, policies)
        self.weights = [Weights(policies.make_policy(config, self.spec), sets=sets)]
        self.rollouts = [
            Rollout(
                config=config,
                spec=self.spec,
                policy=self.weights[0].policy,
                load_weights=self.weights[0].refresh,
                component=f"actor-{index}",
                actor_index=index,
                actors=lambda: actors,
                requests=RequestSelector(place=servers, bells=self.slots.bells[:servers])
                if servers
                else None,
            )
            for index in range(actors)
        ]
        self.servers = []
        for index in range(servers):
            weights = Weights(policies.make_policy(config, self.spec), sets=sets)
            self.weights.append(weights)
            requests = SlotRequests(self.head, index=index, servers=servers)
            self.servers.append((requests, PolicyBatch(weights.policy, self.head), weights))
        self.ticket = 0

    def publish(self, number: int) -> None:
        for weights in self.weights:
            weights.version = Version(0, number)

    def lease(self, actor: int) -> tuple[ArenaSlot, Grant]:
        self.ticket += 1
        grant = Grant(self.ticket, actor, self.weights[0].version)
        return self.slots.arena.lease(grant), grant

    def answer(self, at_most: int = 64) -> int:
        """Let every server answer what is open. The number of answers."""
        count = 0
        for requests, batch, weights in self.servers:
            found = requests.open()[:at_most]
            if not found:
                continue
            version = weights.refresh()
            batch.answer([(slot, row_of(request)) for slot, request in found])
            for slot, request in found:
                requests.answer(slot, request, version)
            count += len(found)
        return count

    def trajectories(self) -> list[tuple[RolloutResult, Arrays]]:
        """One trajectory of every actor."""
        leased = [self.lease(index) for index in range(len(self.rollouts))]
        going = {
            index: rollout.turns(*leased[index], 1) for index, rollout in enumerate(self.rollouts)
        }
        results: dict[int, RolloutResult] = {}
        while going:
            for index, turns in list(going.items()):
                try:
                    next(turns)
                except StopIteration as end:
                    results[index] = end.value
                    del going[index]
            assert self.answer() or not going
        return [
            (results[index], copies(self.slots.arena, index)) for index in range(len(self.rollouts))
        ]

    def close(self) -> None:
        for rollout in self.rollouts:
            rollout.close()
        self.slots.close()


class CutAfterTen(ArenaSlot):
    """A slot whose trajectory is cut after ten steps."""

    steps = 0

    def progress(self, step: int) -> None:
        super().progress(step)
        self.steps = step

    def cut_requested(self) -> bool:
        return self.steps == 10


def copies(arena: Arena, slot: int) -> Arrays:
    return {name: array.copy() for name, array in arena.views(slot).items()}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a host: several threads in each of several processes hold each other up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    opened: list[Stage] = []
    yield opened
    for stage in opened:
        stage.close()


def play(stage: Stage, trajectories: int) -> list[list[tuple[RolloutResult, Arrays]]]:
    """Trajectories of every actor; the weights change after each."""
    played = []
    for number in range(trajectories):
        stage.publish(number)
        played.append(stage.trajectories())
    return played


def trajectories_of(stage: Stage, rows: int = COMPARED) -> int:
    """Trajectories that have so many ``rows``."""
    return math.ceil(rows / stage.config.actors.rollout_steps)


def compared(kind: str, actors: int) -> int:
    """Rows in which two runs are compared. The pendulum enlarges the rounding of its actions, so
    with several actors later rows are compared one by one.
    """
    return min(COMPARED, 45) if kind in ENDLESS and actors > 1 else COMPARED


@cache
def played_locally(kind: str, actors: int) -> list[list[tuple[RolloutResult, Arrays]]]:
    """What local inference gives, which does not depend on the number of servers."""
    stage = Stage(kind, actors=actors, servers=0, steps=STEPS)
    try:
        return play(stage, trajectories_of(stage, compared(kind, actors)))
    finally:
        stage.close()


def assert_same(ours: Arrays, theirs: Arrays, *, exact: bool) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        if exact or array.dtype.kind != "f":
            np.testing.assert_array_equal(array, theirs[name], err_msg=name)
        else:
            np.testing.assert_allclose(array, theirs[name], atol=1e-5, rtol=1e-5, err_msg=name)


@grid(kind=list(KINDS), places=[(1, 1), (4, 1), (4, 2)])
def test_central_inference_gives_what_local_inference_gives(
    stages: list[Stage], kind: str, places: tuple[int, int]
) -> None:
    actors, servers = places
    local = played_locally(kind, actors)
    stages.append(stage := Stage(kind, actors=actors, servers=servers, steps=STEPS))
    central = play(stage, trajectories_of(stage, compared(kind, actors)))
    for ours, theirs in zip(central, local, strict=True):
        for (result, arrays), (expected, wanted) in zip(ours, theirs, strict=True):
            assert result == expected
            # One row is one batch then, so that nothing is rounded in another order.
            assert_same(arrays, wanted, exact=actors == 1)
    began = [arrays["start"].any() for played in local[1:] for _, arrays in played]
    assert kind in ENDLESS or any(began)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("kind", sorted(ENDLESS))
def test_continuous_actions_are_those_that_local_inference_gives_for_the_row(
    stages: list[Stage], kind: str, servers: int
) -> None:
    stages.append(stage := Stage(kind, actors=4, servers=servers, steps=STEPS))
    policy, sets = stage.weights[0].policy, stage.weights[0].sets
    for number in range(trajectories_of(stage)):
        stage.publish(number)
        for index, (_, arrays) in enumerate(stage.trajectories()):
            policy.load(sets[number % 2])
            stage.weights[0].loaded = None
            noise = stage.slots.arena.request_views(index)["noise"]
            for t in range(STEPS):
                observation = {"": torch.from_numpy(arrays["obs/"][t])}
                alone = policy.act(observation, {}, torch.from_numpy(noise[t].copy()))
                wanted = {
                    "action": alone.action,
                    **policy.record(alone.parameters[None], alone.action[None]),
                }
                for name, column in wanted.items():
                    np.testing.assert_allclose(
                        arrays[name][t], column.reshape(arrays[name][t].shape), atol=1e-5
                    )


def test_fields_of_requests_are_not_those_of_a_trajectory() -> None:
    layouts = [
        trajectory_layout(config := config_of("lstm", actors=1, central=central), probe(config))
        for central in (False, True)
    ]
    assert layouts[0].fields == layouts[1].fields
    assert layouts[0].request == ()
    assert {
        "noise",
        "asked/at",
        "state/h",
        "state/c",
        "action",
        "log_prob",
        "next_state/h",
        "next_state/c",
    } == {found.name for found in layouts[1].request}


def test_weights_are_loaded_between_two_rows_and_every_row_has_its_own_version(
    stages: list[Stage],
) -> None:
    stages.append(stage := Stage("mlp", actors=1, servers=1))
    slot, grant = stage.lease(0)
    turns = stage.rollouts[0].turns(slot, grant, 1)
    with pytest.raises(StopIteration) as end:  # noqa: PT012 - the generator ends inside
        for number in range(100):
            next(turns)
            stage.publish(number // 10)
            assert 1 == stage.answer()
    result: RolloutResult = end.value.value
    # the servers alone loaded the newer versions
    assert [t // 10 for t in range(25)] == slot.arrays["version"].tolist()
    assert Version(0, 0) == result.version


def test_every_row_has_the_weights_and_the_normaliser_of_its_version(stages: list[Stage]) -> None:
    """Weights and statistics change between two batches, so within each trajectory."""
    stages.append(stage := Stage("normalised", actors=4, servers=2))
    leased = [stage.lease(index) for index in range(4)]
    going = [
        rollout.turns(*lease, 1) for rollout, lease in zip(stage.rollouts, leased, strict=True)
    ]
    for number in range(25):
        stage.publish(number)
        for turns in going:
            next(turns)
        assert 4 == stage.answer()
    policy, sets = stage.weights[0].policy, stage.weights[0].sets
    for slot, _ in leased:
        versions = slot.arrays["version"][:24]  # the last answer was not taken
        assert list(range(24)) == versions.tolist()
        for t in range(24):
            found, other = (
                log_prob(policy, sets[chosen % 2], slot.arrays, t)
                for chosen in (versions[t], versions[t] + 1)
            )
            np.testing.assert_allclose(slot.arrays["log_prob"][t], found, atol=1e-5)
            assert not np.allclose(slot.arrays["log_prob"][t], other, atol=1e-3)


def log_prob(policy: Any, flat: NDArray[np.uint8], arrays: Any, t: int) -> NDArray[Any]:
    """Log-probabilities of the actions of row ``t`` with the weights ``flat``."""
    policy.load(flat)
    observation = {
        name.removeprefix("obs/"): torch.from_numpy(array[t].copy())
        for name, array in arrays.items()
        if name.startswith("obs/")
    }
    parameters = policy.act(observation, {}, None).parameters
    found: NDArray[Any] = policy.log_prob(parameters, torch.from_numpy(arrays["action"][t])).numpy()
    return found


def test_masks_that_change_each_step_are_those_of_the_row(stages: list[Stage]) -> None:
    stages.append(stage := Stage("masks", actors=4, servers=2))
    for played in play(stage, 3):
        for _, arrays in played:
            masks, actions, starts = arrays["action_mask"][:-1], arrays["action"], arrays["start"]
            allowed = np.take_along_axis(masks, actions[..., None], -1)[..., 0]
            acts = masks.any(-1)  # the last observation of an episode allows nothing
            assert allowed[acts].all()
            assert (masks[1:] != masks[:-1]).any(-1)[~starts[1:-1]].all()


@pytest.mark.parametrize("count", [4, 40])
def test_every_environment_explores_with_the_epsilon_of_its_place_among_all_actors(
    stages: list[Stage], count: int
) -> None:
    """Which no server knows. ``count`` changes while the run continues."""
    stages.append(stage := Stage("apex", actors=4, servers=2))
    for rollout in stage.rollouts:
        rollout._actors = lambda: count
    played = play(stage, 30)
    epsilons = apex_epsilons(0, 16, 4 * count, epsilon=0.4, alpha=7.0).reshape(4, 4)
    for index in range(4):
        arrays = [trajectory[index][1] for trajectory in played]
        acted = np.concatenate([found["valid"] for found in arrays])
        worse = np.concatenate([found["q_taken"] < found["q_max"] for found in arrays])
        share = (worse & acted).sum(0) / acted.sum(0)
        # half of the random actions are the best one
        np.testing.assert_allclose(share, epsilons[index] / 2.0, atol=0.08)


def test_a_cut_ends_the_wait_and_the_rest_continues_as_if_nothing_had_been_asked(
    stages: list[Stage],
) -> None:
    stages += [Stage("lstm", actors=1, servers=count) for count in (0, 1)]
    local, central = stages
    slot, grant = central.lease(0)
    turns = central.rollouts[0].turns(slot, grant, 8)
    for _ in range(10):
        next(turns)
        central.answer()
    next(turns)  # row 10 is asked for
    central.slots.arena.request_cut(0, grant.ticket)
    with pytest.raises(StopIteration) as end:
        next(turns)
    cut: RolloutResult = end.value.value
    assert 10 == cut.length
    assert 1 == central.answer()  # the answer comes too late
    other = CutAfterTen(local.slots.arena, grant)
    assert 10 == local.rollouts[0].run(other, grant, 8).length
    for (_, ours), (_, theirs) in zip(central.trajectories(), local.trajectories(), strict=True):
        assert_same(ours, theirs, exact=True)


def test_a_request_is_answered_again_with_the_same_result(stages: list[Stage]) -> None:
    """A server that dies before its answer is complete changes nothing that the next one needs."""
    stages += [Stage("r2d2", actors=2, servers=1) for _ in range(2)]
    once, twice = stages
    answer, batch = twice.answer, twice.servers[0][1]

    def again(at_most: int = 64) -> int:
        if found := twice.servers[0][0].open():
            batch.answer([(slot, row_of(request)) for slot, request in found])
        return answer(at_most)

    twice.answer = again  # type: ignore[method-assign]
    for ours, theirs in zip(play(once, 2), play(twice, 2), strict=True):
        for (_, arrays), (_, wanted) in zip(ours, theirs, strict=True):
            assert_same(arrays, wanted, exact=True)


def test_a_stopped_rollout_does_not_wait(stages: list[Stage]) -> None:
    stages.append(stage := Stage("mlp", actors=1, servers=1))
    slot, grant = stage.lease(0)
    turns = stage.rollouts[0].turns(slot, grant, 1)
    wait = next(turns)
    assert not wait.ready()
    stage.rollouts[0].stop()
    assert wait.ready()
    with pytest.raises(StopIteration) as end:
        next(turns)
    assert 0 == end.value.value.length


def test_a_rollout_with_servers_cannot_run_at_once(stages: list[Stage]) -> None:
    stages.append(stage := Stage("mlp", actors=1, servers=1))
    with pytest.raises(RuntimeError, match="waits for another process"):
        stage.rollouts[0].run(*stage.lease(0), 1)


def test_a_late_answer_is_no_answer_to_another_request() -> None:
    config = config_of("mlp", actors=1, central=True)
    slots = HeapSlots(layout=trajectory_layout(config, probe(config)), capacity=1)
    slots.add_slots(1)
    requests = SlotRequests(slots.arena, index=0, servers=1)
    first = slots.arena.lease(Grant(1, 0, SEED))
    first.ask(3, 0)
    ((slot, late),) = requests.open()
    second = slots.arena.lease(Grant(2, 0, SEED))
    second.ask(3, 0)
    requests.answer(slot, late, Version(1, 5))
    assert not second.answered()
    ((slot, request),) = requests.open()
    assert (3, request) == (row_of(request), request)
    requests.answer(slot, request, Version(1, 6))
    assert second.answered()
    assert Version(1, 6) == second.answer_version()
    assert [] == requests.open()


def test_a_doorbell_remembers_a_ring_and_has_a_limit_of_time() -> None:
    bell = Doorbell.create()
    for _ in range(3):
        bell.ring()
    bell.wait()
    bell.wait(0.0)  # a time that has passed
    bell.close()
    bell.close()
    bell.ring()
    bell.wait()
