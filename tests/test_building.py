"""What the components of a host share."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from tests.settings import cartpole
from tianflow import envs
from tianflow.algorithms.ppo import PPO
from tianflow.building import Blueprint, Builder
from tianflow.channels.latest import LatestCell
from tianflow.interfaces import LiveSettings
from tianflow.layouts import trajectory_layout
from tianflow.payloads import Version
from tianflow.program import ComponentSpec


class Weights:
    """A reader that counts how often it is read."""

    version = Version(1, 0)

    def __init__(self, flat):
        self.flat, self.reads = flat, 0

    def read_into(self, flat):
        flat[:] = self.flat
        self.reads += 1
        return self.version


def test_actors_of_a_host_read_each_version_once_between_them():
    config = cartpole(actors={"count": 3})
    spec = envs.probe(config)
    weights = Weights(np.zeros(PPO.make_policy(config, spec).table.nbytes, np.uint8))
    ends = SimpleNamespace(settings=LatestCell(LiveSettings(config, config.bound), 0), weights_reader=lambda _nbytes: weights)
    blueprint = Blueprint(host="host", spec=spec, layout=trajectory_layout(config, spec), start=(Version(1, 0), 0))
    builder = Builder(blueprint=blueprint, ends=ends, compute=None)
    rollouts = [builder._rollout(ComponentSpec(f"actor-{index}", "actor", index)) for index in range(3)]
    assert [Version(1, 0)] * 3 == [rollout._load_weights() for rollout in rollouts]
    assert 1 == weights.reads
    for rollout in rollouts:
        rollout.close()
