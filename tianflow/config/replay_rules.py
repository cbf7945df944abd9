"""What the settings of replay come to: the limits of the one limiter, and what cannot work. Pure
functions of a `Config`.
"""

from __future__ import annotations

from math import ceil, inf

from tianflow.config.model import Config, ReplaySettings
from tianflow.errors import Problem
from tianflow.replay.rate_limiter import RateLimits


def insert_size(config: Config) -> int:
    """The most items that one trajectory is expected to bring: a window begins every ``period``
    steps of each environment, and one that began in the trajectory before may end in this one.
    """
    assert config.algorithm.window is not None
    length, period = config.algorithm.window
    return (ceil((config.actors.rollout_steps + length) / period) + 1) * config.env.num_envs


def shard_capacity(config: Config) -> int:
    """Observations that one shard holds."""
    return -(-config.replay.capacity // config.replay.shards)


def most_items(config: Config) -> int:
    """Items that are sure to be there once all shards are full, if episodes are long and end by
    themselves.

    A shard holds observations. Of each environment the last ``length`` ones belong to windows in
    the making, and ``period`` of the oldest to one whose beginning has gone. Fewer actors than
    shards visit them all.
    """
    assert config.algorithm.window is not None
    length, period = config.algorithm.window
    actors, shards = max(1, config.actors.count), config.replay.shards
    visitors = actors if actors < shards else ceil(actors / shards)
    return shards * max(
        0, (shard_capacity(config) - visitors * config.env.num_envs * (length + period)) // period
    )


def rate_limits(config: Config) -> RateLimits:
    """The limiter's. Without ``samples_per_insert`` neither side ever waits for the other.

    Raises:
        ValueError: one side would block for ever; says which.
    """
    replay, inserts, draws = config.replay, insert_size(config), config.algorithm.items
    assert config.algorithm.window is not None
    sizes = {
        "capacity": max(1, replay.capacity // config.algorithm.window[1]),
        "insert_size": inserts,
        "draw_size": draws,
    }
    if replay.samples_per_insert is None:
        return RateLimits(1.0, replay.min_size, -inf, inf, **sizes)
    spi = replay.samples_per_insert
    buffer = replay.error_buffer or max(2.0 * max(1.0, spi), spi * inserts + draws)
    return RateLimits.around(
        samples_per_insert=spi, min_size=replay.min_size, error_buffer=buffer, **sizes
    )


def check(config: Config) -> list[Problem]:
    """Everything about replay that cannot work, each with its consequence."""
    if config.algorithm.window is None:
        if config.replay == ReplaySettings():
            return []
        message = f"{config.algorithm.name} uses each trajectory once: nothing would ever be kept"
        return [
            Problem(
                "replay",
                config.replay.model_dump(exclude_defaults=True),
                message,
                "an algorithm with replay, or no such section",
            )
        ]
    problems = [
        *_check_deterministic(config),
        *_check_capacity(config),
        *_check_max_samples(config),
    ]
    if problems:
        return problems
    try:
        rate_limits(config)
    except ValueError as error:
        return [
            Problem(
                "replay",
                config.replay.samples_per_insert,
                str(error),
                "a wider error_buffer, or another ratio or size",
            )
        ]
    return []


def _check_deterministic(config: Config) -> list[Problem]:
    if not config.run.deterministic:
        return []
    message = (
        "which items are there when the learner draws is chance, so a run with replay does "
        "not repeat bit for bit"
    )
    return [Problem("run.deterministic", True, message, "false")]


def _check_capacity(config: Config) -> list[Problem]:
    replay, envs = config.replay, config.env.num_envs
    assert config.algorithm.window is not None
    length, period = config.algorithm.window
    # Where an episode is cut off its last observation is stored, too: at worst at every step.
    trajectory = (2 * config.actors.rollout_steps + 1) * envs
    if shard_capacity(config) < max(length, trajectory):
        what = (
            f"the {trajectory} observations that one trajectory may bring"
            if trajectory >= length
            else f"the {length} steps of one item"
        )
        message = (
            f"each of {replay.shards} shards would hold {shard_capacity(config)} "
            f"observations, fewer than {what}"
        )
        return [
            Problem(
                "replay.capacity",
                replay.capacity,
                message,
                f"at least {max(length, trajectory) * replay.shards}",
            )
        ]
    if most_items(config) < replay.min_size:
        message = (
            f"with {replay.capacity} observations in {replay.shards} shards, windows of {length} "
            f"steps that begin every {period} and "
            f"{envs} environments an actor, {most_items(config)} items are sure to be there at "
            "once, so the learner might wait for ever"
        )
        return [
            Problem(
                "replay.min_size",
                replay.min_size,
                message,
                f"at most {most_items(config)}, or more replay.capacity",
            )
        ]
    return []


def _check_max_samples(config: Config) -> list[Problem]:
    most, ratio = config.replay.max_samples, config.replay.samples_per_insert
    if most is None or ratio is None or ratio <= most:
        return []
    message = (
        f"an item goes after {most} draws, so samples_per_insert = {ratio:g} could never be reached"
    )
    return [
        Problem(
            "replay.max_samples",
            most,
            message,
            f"at least {ceil(ratio)}, or fewer samples_per_insert",
        )
    ]
