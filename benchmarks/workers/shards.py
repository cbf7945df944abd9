"""Worker: one replay shard alone, and a learner on one resident draw.

``rates``    transitions inserted and items drawn, in turns with copying the same number of rows in
             order, and picking the same number at random
``limits``   updates/s that the shard's draws with their priorities would allow, and that the
             learner's steps on a resident draw would allow
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from benchmarks.lib import child
from benchmarks.workers import bare_loops, halves

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.interfaces import AlgorithmFactory, ReplayAlgorithm
    from tianflow.replay.fragments import Fragment
    from tianflow.replay.shard import Shard

FRAGMENTS = 16
"""Real trajectories that are inserted repeatedly, each time as another incarnation of their
actor.
"""


def fragments(config: Config) -> Iterator[Fragment]:
    """Yield fragments without end. The shipped rollout fills them before the first is yielded."""
    from tianflow import envs, plugins
    from tianflow.channels.memory import heap_arena
    from tianflow.components.rollout import Rollout
    from tianflow.core.payloads import Grant, Version
    from tianflow.planning.layouts import trajectory_layout
    from tianflow.replay.fragments import Fragment, StepStream

    spec, version = envs.probe(config), Version(1, 0)
    arena = heap_arena(trajectory_layout(config, spec), FRAGMENTS)
    factory = cast(
        "AlgorithmFactory",
        plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name"),
    )
    policy = factory.make_policy(config, spec)
    rollout = Rollout(
        config=config,
        spec=spec,
        policy=policy,
        load_weights=lambda: version,
        component="actor-0",
        actor_index=0,
    )
    lengths = []
    for slot in range(FRAGMENTS):
        grant = Grant(slot, slot, version)
        lengths.append(rollout.run(arena.lease(grant), grant, config.actors.rollout_steps).length)
    rollout.close()
    for incarnation in itertools.count():
        for number, length in enumerate(lengths):
            yield Fragment(arena.views(number), length, StepStream(0, incarnation), number)


def filled(config: Config, source: Iterator[Fragment]) -> Shard:
    """Return a shard that has begun to evict its oldest steps."""
    from tianflow import envs
    from tianflow.hosts.shard_factory import make_shard

    shard = make_shard(config, envs.probe(config))
    while not sum(shard.statistics().steps.removed.values()):
        shard.insert(next(source))
    return shard


def rates(config: Config) -> dict[str, bare_loops.Work]:
    """Return inserting, drawing, and their limits. A transition counts as one unit in all four."""
    source, generator, n = (
        fragments(config),
        np.random.default_rng(config.run.seed),
        config.algorithm.items,
    )
    shard = filled(config, source)
    batch, first = shard.make_batch(n), next(source)
    copies = {name: array.copy() for name, array in first.arrays.items()}
    rows = int(np.count_nonzero(first.rows("valid")))
    picked = {
        name: array for name, array in first.arrays.items() if array.ndim > 1 and name in batch
    }
    table = {
        name: np.repeat(array.reshape(-1, *array.shape[2:]), 8, axis=0)
        for name, array in picked.items()
    }
    transitions = int(n * shard.settings.length)

    def insert() -> int:
        return shard.insert(next(source)).steps

    def draw() -> int:
        shard.draw(n, generator, batch)
        return transitions

    def copy() -> int:
        for name, array in first.arrays.items():
            np.copyto(copies[name], array)
        return rows

    def pick() -> int:
        for name, array in table.items():
            indices = generator.integers(0, len(array), batch[name].shape[0] * n)
            np.take(
                array, indices, axis=0, out=batch[name].reshape(-1, *array.shape[1:]), mode="clip"
            )
        return transitions

    return {"insert": insert, "copy": copy, "draw": draw, "pick": pick}


def limits(config: Config, where: str = "cpu") -> dict[str, bare_loops.Work]:
    """Return one shard's and the learner's work for an update. A unit is an update. The learner
    works on the device ``where``.
    """
    import torch

    from tianflow import envs, plugins
    from tianflow.channels.memory import heap_arena
    from tianflow.components.stacking import DrawStacker
    from tianflow.hosts.factory import opened
    from tianflow.planning.layouts import draw_layout

    device = opened(torch.device(where))
    spec, generator = envs.probe(config), np.random.default_rng(config.run.seed)
    shard, layout = filled(config, fragments(config)), draw_layout(config, spec)
    assert layout is not None
    views, n = heap_arena(layout, 1).views(0), config.algorithm.items
    shard.draw(n, generator, {name: views[name] for name in shard.make_batch(1)})
    views["weight"][:] = 1.0
    stacker = DrawStacker(layout=layout, device=device)
    stacker.fill(0, views, layout.steps)
    factory = cast(
        "AlgorithmFactory",
        plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name"),
    )
    algorithm = cast("ReplayAlgorithm", factory.make_learner(config, spec, device))
    algorithm.set_settings(config.algorithm, 0)
    algorithm.set_live(0.0, config.algorithm.entropy_cost)
    resident, part = stacker.batch(), -(-n // config.replay.shards)
    out = shard.make_batch(part)

    def draw() -> int:
        keys = shard.draw(part, generator, out).keys
        shard.update_priorities(keys, generator.random(part))
        return 1

    def step() -> int:
        if not algorithm.step(resident).finite:
            raise RuntimeError("the update was not finite and was undone, which is different work")
        return 1

    return {"draws": draw, "steps": step}


def measure(
    what: str, config: Path, overrides: tuple[str, ...], seconds: float, device: str = "cpu"
) -> dict[str, float | None]:
    """Run `rates` or `limits` in a child process on a core of its own. The learner of `limits`
    works on ``device``.
    """
    core = bare_loops.cores()["actor"]
    pinned = () if core is None else ("--core", core)
    return child.run(
        "benchmarks.workers.shards",
        what,
        config,
        seconds,
        *("--device", device),
        *pinned,
        *overrides,
        timeout_s=120.0 + 10.0 * seconds,
    ).answer


def main() -> None:
    """Arguments: ``rates|limits CONFIG SECONDS [--core N] [--device D] [section.key=value ...]``.

    Only the learner of `limits` uses a device.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("rates", "limits"))
    parser.add_argument("config", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--core", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    import torch

    from tianflow.config.loading import load_config

    torch.set_num_threads(1)
    config = load_config(given.config, given.overrides)
    works = rates(config) if given.what == "rates" else limits(config, given.device)
    child.report(halves.take_turns(works, given.seconds))


if __name__ == "__main__":
    main()
