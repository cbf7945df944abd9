"""Measures rates of a config on this machine: its own rollout and update, one after the other, on
one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Any

from tianflow import plugins
from tianflow.config.schedules import Elapsed, settings_at
from tianflow.core.payloads import Grant, Version
from tianflow.planning.validation import require_valid

if TYPE_CHECKING:
    from tianflow.config.model import Config

SECONDS = 1.0
"""Duration of each of the two measurements: trajectories, then updates."""
ROUNDS = 5
"""Minimum number of calls, after one that is not counted."""


def measure(config: Config, *, seconds: float = SECONDS) -> dict[str, object]:
    """Measure a trajectory and an update of ``config``: means, spreads and sizes, as keys of
    `MeasuredRates`.

    Nothing else runs meanwhile, so processes that share a core or its caches are slower than this.

    Raises:
        ConfigError: the config is not valid.
        EnvironmentFailedError, PoisonedTrajectoryError: the environment failed.
    """
    import torch

    from tianflow.algorithms.common.precision import set_acting_precision
    from tianflow.channels.memory import heap_arena
    from tianflow.components.rollout import Rollout
    from tianflow.planning.layouts import trajectory_layout

    spec = require_valid(config).spec
    settings = settings_at(config, Elapsed(0, 0, 0.0))
    config = config.model_copy(update={"algorithm": settings})
    assert spec is not None  # a valid config has one
    torch.set_num_threads(config.learner.threads)
    version, count = Version(1, 0), config.algorithm.batch_trajectories
    factory: Any = plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name")
    algorithm, policy = (
        factory.make_learner(config, spec, torch.device("cpu")),
        factory.make_policy(config, spec),
    )
    set_acting_precision(config, policy)
    policy.load(algorithm.flat())
    layout = trajectory_layout(config, spec)
    arena = heap_arena(layout, count)
    rollout = Rollout(
        config=config,
        spec=spec,
        policy=policy,
        load_weights=lambda: version,
        component="actor-0",
        actor_index=0,
    )
    steps: list[int] = []

    def roll() -> None:
        grant = Grant(len(steps), len(steps) % count, version)
        steps.append(rollout.run(arena.lease(grant), grant, config.actors.rollout_steps).env_steps)

    try:
        trajectory = _time(roll, seconds, at_least=max(ROUNDS, count))
    finally:
        rollout.close()
    update = _time(_updates(config, algorithm, arena, count), seconds, at_least=ROUNDS)
    return {
        "trajectory_s": fmean(trajectory),
        "trajectory_spread": pstdev(trajectory) / fmean(trajectory),
        "update_s": fmean(update),
        "update_spread": pstdev(update) / fmean(update),
        "env_steps": fmean(steps),
        "trajectory_bytes": float(layout.nbytes),
        "weights_bytes": float(policy.table.nbytes),
    }


def _updates(config: Config, algorithm: Any, arena: Any, count: int) -> Callable[[], None]:
    """One update as the learner computes it: copies out of the slots, trains, and lays out the
    weights.
    """
    import torch

    from tianflow.components.stacking import BatchStacker

    stacker = BatchStacker(layout=arena.layout, trajectories=count, device=torch.device("cpu"))

    def update() -> None:
        for index in range(count):
            stacker.fill(index, arena.views(index), config.actors.rollout_steps)
        algorithm.set_live(config.algorithm.learning_rate, config.algorithm.entropy_cost)
        algorithm.step(stacker.batch())
        algorithm.flat()

    return update


def _time(work: Callable[[], None], seconds: float, *, at_least: int) -> list[float]:
    """Seconds of each call, without the first. A call of ten times the median was interrupted, and
    counts as the median.
    """
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < at_least or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    middle = median(times)
    return [middle if value > 10 * middle else value for value in times]
