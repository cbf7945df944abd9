"""Worker: the halves of a run, in stages that each add one part, and that take turns in one
process.

``actor``    the environments alone, with inference, and with inference and slots as in the shipped
             rollout
``learner``  the step on a resident batch, and with the batch copied out of slots and the weights
             laid out flat
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.lib import child
from benchmarks.workers import bare_loops

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.interfaces import AlgorithmFactory

TURN_S = 0.1
"""Length of a turn: long enough that the caches hold the stage's own data."""


def take_turns(works: Mapping[str, bare_loops.Work], seconds: float) -> dict[str, float]:
    """Return units per second of each work, in turns of at least `TURN_S`, until each had
    ``seconds``. The first round does not count.
    """
    done, spent = dict.fromkeys(works, 0), dict.fromkeys(works, 0.0)

    def turn(work: bare_loops.Work) -> tuple[int, float]:
        units, began = work(), time.perf_counter()
        units = 0  # the first call runs on the caches of another stage
        while not units or time.perf_counter() - began < TURN_S:
            units += work()
        return units, time.perf_counter() - began

    for work in works.values():
        turn(work)
    while min(spent.values()) < seconds:
        for name, work in works.items():
            units, took = turn(work)
            done[name], spent[name] = done[name] + units, spent[name] + took
    return {name: done[name] / spent[name] for name in works}


def actor(config: Config) -> dict[str, bare_loops.Work]:
    """Return the stages of the actor's half. A unit is an environment step."""
    vector = make_vector(config)
    observation, _ = vector.reset(seed=config.run.seed)
    return {
        "environment": _stepping(config, vector),
        "inference": _acting(config, vector, observation),
        "slots": _rolling(config),
    }


def make_vector(config: Config) -> Any:
    """Make the environment vector without the wrappers of `tianflow.envs.make`."""
    import gymnasium

    from tianflow import plugins

    settings = config.env
    if ":" in settings.id:
        found = cast(
            "Callable[[], gymnasium.Env[Any, Any]]", plugins.load_object(settings.id, path="env.id")
        )
        return gymnasium.vector.SyncVectorEnv([found] * settings.num_envs, copy=False)
    kwargs = dict(settings.kwargs)
    if settings.id.startswith("ALE/"):
        import ale_py  # noqa: F401 - the import registers its ids

        kwargs["num_threads"] = 1
    return gymnasium.make_vec(
        settings.id, num_envs=settings.num_envs, vectorization_mode="vector_entry_point", **kwargs
    )


def _stepping(config: Config, vector: Any) -> bare_loops.Work:
    """Step with actions that were drawn beforehand."""
    import numpy as np

    steps = config.actors.rollout_steps
    choices = int(vector.single_action_space.n)
    actions = list(
        np.random.default_rng(config.run.seed).integers(0, choices, (steps, config.env.num_envs))
    )

    def work() -> int:
        for action in actions:
            vector.step(action)
        return steps * config.env.num_envs

    return work


def _acting(config: Config, vector: Any, observation: Any) -> bare_loops.Work:
    """Step with the shipped policy's actions, and store nothing."""
    import numpy as np
    import torch

    from tianflow import envs

    steps, environments = config.actors.rollout_steps, config.env.num_envs
    policy, generator = (
        _factory(config).make_policy(config, envs.probe(config)),
        np.random.default_rng(config.run.seed),
    )
    rows, act = bare_loops.acting(policy, steps, environments)

    def work() -> int:
        nonlocal observation
        noise = policy.noise(steps, environments, generator)
        with torch.inference_mode():
            for row in rows(noise):
                observation, *_ = vector.step(act(observation, row))
        return steps * environments

    return work


def _rolling(config: Config) -> bare_loops.Work:
    """Run the shipped rollout into two alternating slots."""
    from tianflow import envs
    from tianflow.channels.memory import heap_arena
    from tianflow.components.rollout import Rollout
    from tianflow.core.payloads import Grant, Version
    from tianflow.planning.layouts import trajectory_layout

    spec, version = envs.probe(config), Version(1, 0)
    arena = heap_arena(trajectory_layout(config, spec), 2)
    policy = _factory(config).make_policy(config, spec)
    rollout = Rollout(
        config=config,
        spec=spec,
        policy=policy,
        load_weights=lambda: version,
        component="actor-0",
        actor_index=0,
    )
    number = 0

    def work() -> int:
        nonlocal number
        grant, number = Grant(number, number % 2, version), number + 1
        return (
            rollout.run(arena.lease(grant), grant, config.actors.rollout_steps).length
            * config.env.num_envs
        )

    return work


def learner(config: Config) -> dict[str, bare_loops.Work]:
    """Return the stages of the learner's half. The learning rate is 0, so that real trajectories
    stay on-policy. A unit is a sample.
    """
    import torch

    from tianflow import envs
    from tianflow.channels.memory import heap_arena
    from tianflow.components.rollout import Rollout
    from tianflow.components.stacking import BatchStacker
    from tianflow.core.payloads import Grant, Version
    from tianflow.planning.layouts import trajectory_layout

    spec, version, count = envs.probe(config), Version(1, 0), config.algorithm.batch_trajectories
    layout, device = trajectory_layout(config, spec), torch.device("cpu")
    arena, factory = heap_arena(layout, 2 * count), _factory(config)
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
    for slot in range(2 * count):
        grant = Grant(slot, slot, version)
        lengths.append(rollout.run(arena.lease(grant), grant, config.actors.rollout_steps).length)
    rollout.close()
    algorithm, first = factory.make_learner(config, spec, device), 0
    algorithm.set_live(0.0, config.algorithm.entropy_cost)
    stackers = [BatchStacker(layout=layout, trajectories=count, device=device) for _ in range(2)]

    def fill(stacker: BatchStacker) -> None:
        nonlocal first
        for index in range(count):
            stacker.fill(index, arena.views(first + index), lengths[first + index])
        first = count - first

    def step(batch: Any) -> int:
        result = algorithm.step(batch)
        if not result.finite:
            raise RuntimeError("the update was not finite and was undone, which is different work")
        return int(result.samples)

    def from_slots() -> int:
        fill(stackers[1])
        algorithm.set_live(0.0, config.algorithm.entropy_cost)
        samples = step(stackers[1].batch())
        algorithm.flat()
        return samples

    fill(stackers[0])
    resident = stackers[0].batch()
    return {"resident": lambda: step(resident), "slots": from_slots}


def _factory(config: Config) -> AlgorithmFactory:
    from tianflow import plugins

    return cast(
        "AlgorithmFactory",
        plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name"),
    )


HALVES: dict[str, Callable[[Config], dict[str, bare_loops.Work]]] = {
    "actor": actor,
    "learner": learner,
}


def measure(
    half: str, config: Path, overrides: Sequence[str], seconds: float
) -> dict[str, float | None]:
    """Return the rates of ``half`` from a child process on the core that this half has in a run."""
    core = bare_loops.cores()[half]
    pinned = () if core is None else ("--core", core)
    return child.run(
        "benchmarks.workers.halves",
        half,
        config,
        seconds,
        *pinned,
        *overrides,
        timeout_s=120.0 + 10.0 * seconds,
    ).answer


def main() -> None:
    """Arguments: ``actor|learner CONFIG SECONDS [--core N] [section.key=value ...]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("half", choices=sorted(HALVES))
    parser.add_argument("config", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--core", type=int)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    import torch

    from tianflow.config.loading import load_config

    torch.set_num_threads(1)
    child.report(
        take_turns(HALVES[given.half](load_config(given.config, given.overrides)), given.seconds)
    )


if __name__ == "__main__":
    main()
