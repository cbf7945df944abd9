"""What the components of a host share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.settings import cartpole
from tianflow import envs
from tianflow.algorithms.ppo import PPO
from tianflow.channels.latest import LatestCell
from tianflow.config.loading import load_config
from tianflow.core.payloads import Version
from tianflow.core.program import ComponentSpec, HostPlan, HostSpec
from tianflow.hosts import factory
from tianflow.hosts import shard_factory as shard_making
from tianflow.hosts.factory import Builder, Incarnation
from tianflow.interfaces import LiveSettings
from tianflow.planning.layouts import trajectory_layout


class Weights:
    """A reader that counts how often it is read."""

    version = Version(1, 0)

    def __init__(self, flat):
        self.flat, self.reads = flat, 0

    def read_into(self, flat):
        flat[:] = self.flat
        self.reads += 1
        return self.version


def builder_of(config):
    spec = envs.probe(config)
    weights = Weights(np.zeros(PPO.make_policy(config, spec).table.nbytes, np.uint8))
    ends = SimpleNamespace(
        settings=LatestCell(LiveSettings(config, config.bound), 0),
        weights_reader=lambda _nbytes: weights,
    )
    plan = HostPlan(
        host=HostSpec("host", ()),
        spec=spec,
        layout=trajectory_layout(config, spec),
        start=Version(1, 0),
    )
    return Builder(plan=plan, ends=ends, compute=None), weights


def test_actors_of_a_host_read_each_version_once_between_them():
    builder, weights = builder_of(cartpole(actors={"count": 3}))
    rollouts = [
        builder._rollout(ComponentSpec(f"actor-{index}", "actor", index)) for index in range(3)
    ]
    assert [Version(1, 0)] * 3 == [rollout._load_weights() for rollout in rollouts]
    assert 1 == weights.reads
    for rollout in rollouts:
        rollout.close()


def test_actors_compute_as_they_are_told_and_evaluation_in_float32():
    builder, _ = builder_of(cartpole(actors={"count": 1, "precision": "bf16"}))
    rollout = builder._rollout(ComponentSpec("actor-0", "actor", 0))
    evaluating, _ = builder._policy()
    found = [
        {leaf.dtype for leaf in policy._acting.network.parameters()}
        for policy in (rollout._policy, evaluating)
    ]
    assert [{torch.bfloat16}, {torch.float32}] == found
    rollout.close()


def first_observation(config, spec, *, lineage=0, incarnation=0, times=0):
    """Of an actor that was there so many times before, on this host."""
    weights = Weights(np.zeros(PPO.make_policy(config, spec).table.nbytes, np.uint8))
    ends = SimpleNamespace(
        settings=LatestCell(LiveSettings(config, config.bound), 0),
        weights_reader=lambda _nbytes: weights,
    )
    layout = trajectory_layout(config, spec)
    plan = HostPlan(
        host=HostSpec("host", ()),
        spec=spec,
        layout=layout,
        start=Version(1, 0),
        lineage=lineage,
        incarnation=incarnation,
    )
    builder = Builder(plan=plan, ends=ends, compute=None)
    for _ in range(times + 1):
        rollout = builder._rollout(ComponentSpec("actor-0", "actor", 0))
        rollout.close()
    return rollout._carry.observation[""].tobytes()


def test_an_actor_meets_other_seeds_after_a_resume_after_a_restart_and_when_it_comes_again():
    config = cartpole()
    spec = envs.probe(config)
    incarnations = [
        {},
        {"lineage": 1},
        {"lineage": 2},
        {"incarnation": 1},
        {"times": 1},
        {"times": 2},
        {"lineage": 1, "incarnation": 1},
    ]
    met = [first_observation(config, spec, **incarnation) for incarnation in incarnations]
    assert len(incarnations) == len(set(met))
    assert met[0] == first_observation(config, spec)


def test_incarnations_of_actors_have_numbers_of_31_bits_that_differ():
    numbers = {
        Incarnation(lineage, host, actor).number
        for lineage in (0, 1, 1023)
        for host in (0, 1, 2047)
        for actor in (0, 1, 1023)
    }
    assert (27, 0) == (len(numbers), min(numbers))
    assert max(numbers) < 2**31


@pytest.mark.parametrize(("incarnation", "kept"), [(0, Path("v1-7")), (1, None)])
async def test_a_replay_shard_that_was_lost_begins_empty(monkeypatch, incarnation, kept):
    """What it held is counted as gone, so nothing of it may come back."""
    config = load_config(
        {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "dqn"}, "checkpoint": {"replay": True}}
    )
    asked = []
    monkeypatch.setattr(
        shard_making,
        "restored_shard",
        lambda _config, _spec, checkpoint, index: asked.append((checkpoint, index)),
    )
    ends = SimpleNamespace(
        settings=LatestCell(LiveSettings(config, config.bound), 0), shard_end=lambda _index: None
    )
    plan = HostPlan(
        host=HostSpec("host", ()),
        spec=None,
        layout=None,
        start=Version(1, 7),
        incarnation=incarnation,
        checkpoint=Path("v1-7"),
    )
    shard = Builder(plan=plan, ends=ends, compute=None).build(
        ComponentSpec("replay-1", "replay", 1)
    )
    shard._make_shard()
    assert [(kept, 1)] == asked


@pytest.mark.parametrize(("index", "name"), [(0, "cuda"), (0, "cuda:0"), (1, "cuda:1")])
def test_a_thread_computes_on_the_gpu_of_its_component_only(
    index: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps while it waits for it, from the first operation on."""
    done: list[tuple[str, object]] = []
    monkeypatch.setattr(
        factory.devices, "sleep_in_waits", lambda number: done.append(("sleep", number))
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(("use", device)))
    device = torch.device("cuda", index)
    assert device == factory.opened(torch.device(name))
    assert [("sleep", index), ("use", device)] == done


def test_a_component_on_a_cpu_opens_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("a device was opened"))
    assert torch.device("cpu") == factory.opened(torch.device("cpu"))
