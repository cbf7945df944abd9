"""What the settings of replay come to: the limits of the one limiter, and what cannot work. Pure functions of a `Config`."""

from __future__ import annotations

from math import ceil, inf

from tianflow.config import Config, ReplaySettings
from tianflow.errors import Problem
from tianflow.limiter import RateLimits


def insert_size(config: Config) -> int:
    """The most items that one trajectory is expected to bring: a window begins every ``period`` steps of each environment, and one
    that began in the trajectory before may end in this one.
    """
    assert config.algorithm.window is not None
    length, period = config.algorithm.window
    return (ceil((config.actors.rollout_steps + length) / period) + 1) * config.env.num_envs


def rate_limits(config: Config) -> RateLimits:
    """The limiter's. Without ``samples_per_insert`` neither side ever waits for the other.

    Raises:
        ValueError: one side would block for ever; says which.
    """
    replay, inserts, draws = config.replay, insert_size(config), config.algorithm.items
    assert config.algorithm.window is not None
    capacity = max(1, replay.capacity // config.algorithm.window[1])
    sizes = {"capacity": capacity, "insert_size": inserts, "draw_size": draws}
    if replay.samples_per_insert is None:
        return RateLimits(1.0, replay.min_size, -inf, inf, **sizes)
    spi = replay.samples_per_insert
    buffer = replay.error_buffer or max(2.0 * max(1.0, spi), spi * inserts + draws)
    return RateLimits.around(samples_per_insert=spi, min_size=replay.min_size, error_buffer=buffer, **sizes)


def check(config: Config) -> list[Problem]:
    """Everything about replay that cannot work, each with its consequence."""
    if config.algorithm.window is None:
        if config.replay == ReplaySettings():
            return []
        message = f"{config.algorithm.name} uses each trajectory once: nothing would ever be kept"
        return [Problem("replay", config.replay.model_dump(exclude_defaults=True), message, "an algorithm with replay, or no such section")]
    length, _ = config.algorithm.window
    if config.replay.capacity // config.replay.shards < length:
        message = f"each of {config.replay.shards} shards would hold fewer steps than the {length} of one item"
        return [Problem("replay.capacity", config.replay.capacity, message, f"at least {length * config.replay.shards}")]
    try:
        rate_limits(config)
    except ValueError as error:
        return [Problem("replay", config.replay.samples_per_insert, str(error), "a wider error_buffer, or another ratio or size")]
    return []
