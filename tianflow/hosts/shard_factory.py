"""The factory of replay shards: from a config to an empty or restored shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tianflow.components.rows import split_rows
from tianflow.config.networks import is_image, state_spec
from tianflow.config.off_policy import R2D2Settings
from tianflow.core.layout import make_layout, views
from tianflow.core.payloads import shard_file
from tianflow.envs.make import environment_seed, make
from tianflow.envs.spec import UnexpectedShapeError, allowed_at_random
from tianflow.envs.using import with_environment
from tianflow.errors import CheckpointError, EnvironmentFailedError
from tianflow.logs import logger
from tianflow.replay.observations import find_stacks
from tianflow.replay.selection import Fifo, Lifo, PrioritisedSelector, Uniform
from tianflow.replay.sequences import ActorError, InitialPriority, SequenceError
from tianflow.replay.settings import ShardSettings
from tianflow.replay.shard import Shard
from tianflow.rundir.checkpoints import CheckpointStore, read_arrays

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tianflow.config.model import Config
    from tianflow.core.payloads import EnvironmentSpec
    from tianflow.envs.vector import VectorEnvironment
    from tianflow.replay.selection import Selector


LOOK_STEPS = 8
"""Steps after which a stack of four has been replaced twice."""
log = logger("replay")


def make_shard(config: Config, spec: EnvironmentSpec) -> Shard:
    """One of ``replay.shards`` equal parts of the memory. Allocates all of it."""
    window = config.algorithm.window
    assert window is not None
    length, period = window
    settings = ShardSettings(
        observation=spec.observation,
        action=(spec.action.stored_shape, spec.action.stored_dtype),
        capacity=-(-config.replay.capacity // config.replay.shards),
        length=length,
        period=period,
        stacks=stacks_of(config, spec),
        state=tuple(state_spec(config.network).items()),
        mask_size=spec.action.mask_size if spec.action_mask else 0,
        max_samples=config.replay.max_samples,
        ends_only=config.algorithm.ends_only,
    )
    return Shard(
        settings=settings, selector=_selector(config), initial_priority=_initial_priority(config)
    )


def stacks_of(config: Config, spec: EnvironmentSpec) -> frozenset[str]:
    """Names of the image leaves that are stacks of frames. A space does not show that, so a few
    steps of the environments are made.

    Another image (RGB, say) must not be stored as a stack: all its frames are new at every step, so
    few steps would fit.
    """
    if not any(is_image(leaf) for leaf in spec.observation):
        return frozenset()
    layout = make_layout(spec, steps=LOOK_STEPS, state_spec={}, return_accumulator=False)
    arrays = views(layout, np.zeros(layout.nbytes, np.uint8))
    first = {leaf.name: arrays[f"obs/{leaf.name}"][0] for leaf in spec.observation}
    generator = np.random.default_rng(config.run.seed)

    def play(environment: VectorEnvironment) -> None:
        environment.reset(
            environment_seed(config.run.seed, 0, spec.num_envs),
            first,
            arrays.get("action_mask", [None])[0],
        )
        for t, row in enumerate(split_rows(arrays)):
            if spec.action_mask:
                row.action[...] = allowed_at_random(
                    spec.action, arrays["action_mask"][t], generator
                )
            environment.step(row.action, row.outcome)

    try:
        with_environment(
            lambda: make(config.env, spec.num_envs, previous_step=config.previous_step), play
        )
    except (EnvironmentFailedError, UnexpectedShapeError) as error:
        log.warning(
            "whether images are stacks of frames cannot be seen; they are stored whole",
            reason=str(error),
        )
        return frozenset()
    return find_stacks(spec.observation, arrays, LOOK_STEPS)


def restored_shard(
    config: Config, spec: EnvironmentSpec, checkpoint: Path | None, index: int
) -> Shard:
    """Shard ``index`` of ``checkpoint``; an empty shard if the checkpoint does not have it, or has
    it in another form.
    """
    shard = make_shard(config, spec)
    if checkpoint is None:
        return shard
    try:
        arrays = read_arrays(CheckpointStore.load(checkpoint), shard_file(index))
        if arrays is not None:
            shard.restore(arrays)
    except (CheckpointError, ValueError, KeyError) as error:
        log.warning("a replay shard begins empty", shard=index, reason=str(error))
        return make_shard(config, spec)
    return shard


def _selector(config: Config) -> Callable[[int], Selector]:
    if config.replay.selector == "prioritised":
        alpha, _ = config.priority_exponents
        return lambda capacity: PrioritisedSelector(capacity, alpha=alpha)
    others: dict[str, Callable[[int], Selector]] = {"uniform": Uniform, "fifo": Fifo, "lifo": Lifo}
    return others[config.replay.selector]


def _initial_priority(config: Config) -> InitialPriority | None:
    """The error of the actors' own values, where they are recorded; else the greatest priority so
    far.
    """
    algorithm = config.algorithm
    if config.replay.selector != "prioritised" or "q_taken" not in algorithm.recorded:
        return None
    if not isinstance(algorithm, R2D2Settings):
        return ActorError(algorithm.discount)
    return SequenceError(
        algorithm.discount,
        n=algorithm.n_step,
        eta=algorithm.priority_eta,
        burn_in=algorithm.burn_in,
        rescaling=algorithm.value_rescaling,
    )
