"""From a config to an empty replay shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tianflow.checkpoint import CheckpointStore, read_arrays
from tianflow.errors import CheckpointError
from tianflow.logs import logger
from tianflow.network_rules import state_spec
from tianflow.off_policy_settings import R2D2Settings
from tianflow.payloads import shard_file
from tianflow.replay.selection import Fifo, Lifo, Prioritised, Uniform
from tianflow.replay.sequences import ActorError, InitialPriority, SequenceError
from tianflow.replay.settings import ShardSettings
from tianflow.replay.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tianflow.config import Config
    from tianflow.payloads import EnvironmentSpec
    from tianflow.replay.selection import Selector


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
        stacks=frozenset(leaf.name for leaf in spec.observation if leaf.dtype == "uint8" and len(leaf.shape) == 3 and leaf.shape[0] > 1),
        state=tuple(state_spec(config.network).items()),
        mask_size=spec.action.mask_size if spec.action_mask else 0,
        max_samples=config.replay.max_samples,
    )
    return Shard(settings=settings, selector=_selector(config), initial_priority=_initial_priority(config))


def restored_shard(config: Config, spec: EnvironmentSpec, checkpoint: Path | None, index: int) -> Shard:
    """Shard ``index`` as it was kept in ``checkpoint``; empty if it was not, or if what was kept is of no use any more."""
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
        return lambda capacity: Prioritised(capacity, alpha=config.replay.alpha)
    others: dict[str, Callable[[int], Selector]] = {"uniform": Uniform, "fifo": Fifo, "lifo": Lifo}
    return others[config.replay.selector]


def _initial_priority(config: Config) -> InitialPriority | None:
    """What the actors' own values say, where they are recorded; else the greatest priority so far."""
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
