"""What no single setting can say: combinations that cannot work, and combinations that cost
something. Pure functions of a `Config`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import ceil, inf
from typing import Any

from tianflow import plugins
from tianflow.config.model import Config, PPOSettings, ReplaySettings
from tianflow.core.formatting import number
from tianflow.core.limits import RateLimits
from tianflow.errors import ConfigError, Problem


def controllers(config: Config) -> tuple[str, ...]:
    """Names of the controllers that run."""
    controller = config.balance.controller
    return (controller,) if isinstance(controller, str) else controller


def bound_in_force(config: Config) -> int | None:
    """The staleness bound that the controllers leave: 0 under ``lockstep``, none under
    ``open_loop`` alone.
    """
    if "lockstep" in controllers(config):
        return 0
    return None if controllers(config) == ("open_loop",) else config.bound


def is_paced(config: Config) -> bool:
    """False where no controller holds actors back for the bound's sake: they begin whatever memory
    has room for.
    """
    return not set(controllers(config)) <= {"open_loop", "consume_only"}


def credits_ceiling(config: Config) -> int | None:
    """C at publish lag 0: the smaller of (max_staleness + 1) * B and ``balance.credits``; None when
    nothing limits it.
    """
    batch, bound = (
        config.algorithm.batch_trajectories,
        bound_in_force(config) if is_paced(config) else None,
    )
    limits = [
        limit
        for limit in (config.balance.credits, None if bound is None else (bound + 1) * batch)
        if limit is not None
    ]
    return min(limits, default=None)


def check(config: Config) -> list[Problem]:
    """Everything that is wrong with the combination of settings, each with its consequence. Needs
    no environment.
    """
    return [
        *_check_names(config),
        *_check_balance(config),
        *_check_minibatch(config),
        *_check_deterministic(config),
        *_check_sinks(config),
        *check_replay(config),
    ]


def _check_names(config: Config) -> list[Problem]:
    problems = []
    named = [
        ("network", config.network.name, "network.name"),
        ("launcher", config.placement.launcher, "placement.launcher"),
    ]
    for kind, name, path in named:
        group, known = f"tianflow.{kind}s", plugins.names(f"tianflow.{kind}s")
        if (
            name not in known
        ):  # an installed one is not imported here: networks bring PyTorch with them
            problems += _load_problems(group, name, path)
    loaded = [
        (controller, _load_problems("tianflow.controllers", controller, "balance.controller"))
        for controller in controllers(config)
    ]
    problems += [problem for _, found in loaded for problem in found]
    if not controllers(config):
        problems.append(
            Problem(
                "balance.controller",
                (),
                "no controller: nobody would hand out credits, so no rollout would begin",
                "at least one",
            )
        )
    elif not any(found for _, found in loaded):
        problems += _check_parameters(config)
    return problems


def _check_sinks(config: Config) -> list[Problem]:
    metrics, known, problems = config.metrics, plugins.names("tianflow.sinks"), []
    for name in sorted(set(metrics.sinks)):
        if metrics.sinks.count(name) > 1:
            problems.append(
                Problem(
                    "metrics.sinks",
                    list(metrics.sinks),
                    f"{name} is named twice, and would get everything twice",
                )
            )
        if name not in known:  # an installed one may bring much with it
            problems += _load_problems("tianflow.sinks", name, "metrics.sinks")
    return problems + [
        Problem(
            f"metrics.kwargs.{name}",
            None,
            "no sink of that name is in metrics.sinks",
            "",
            plugins.nearest(name, metrics.sinks),
        )
        for name in metrics.kwargs
        if name not in metrics.sinks
    ]


def _load_problems(group: str, name: str, path: str) -> list[Problem]:
    try:
        plugins.load(group, name, path=path)
    except ConfigError as error:
        return list(error.problems)
    return []


def _check_parameters(config: Config) -> list[Problem]:
    """Every entry of ``balance.parameters`` is a keyword of one of the controllers."""
    known: set[str] = set()
    for controller in controllers(config):
        factory = plugins.load("tianflow.controllers", controller, path="balance.controller")
        if not callable(factory) or not hasattr(factory, "handle"):
            return [
                Problem(
                    "balance.controller",
                    controller,
                    "is not a controller: it has no handle(event)",
                    "a class with handle(event) -> directives",
                )
            ]
        known |= set(inspect.signature(factory).parameters)
    accepted = (
        "one of " + ", ".join(sorted(known))
        if known
        else f"nothing: no controller in force has parameters ({', '.join(controllers(config))})"
    )
    return [
        Problem(
            f"balance.parameters.{key}",
            value,
            "no such parameter",
            accepted,
            plugins.nearest(key, tuple(known)),
        )
        for key, value in config.balance.parameters.items()
        if key not in known
    ]


def _check_balance(config: Config) -> list[Problem]:
    problems = []
    batch, balance = config.algorithm.batch_trajectories, config.balance
    if balance.credits is not None and balance.credits < batch:
        message = (
            f"{balance.credits} credits can never feed the learner, which takes {batch} "
            "trajectories for one update"
        )
        problems.append(
            Problem(
                "balance.credits",
                balance.credits,
                message,
                f"at least algorithm.batch_trajectories = {batch}",
            )
        )
    if balance.min_fragment_steps > config.actors.rollout_steps:
        message = (
            f"a trajectory has {config.actors.rollout_steps} steps at most, so no "
            "straggler "
            "could ever be cut"
        )
        accepted = f"1 to actors.rollout_steps = {config.actors.rollout_steps}"
        problems.append(
            Problem("balance.min_fragment_steps", balance.min_fragment_steps, message, accepted)
        )
    return problems


def samples_per_update(config: Config) -> int:
    """T * N * B."""
    return config.actors.rollout_steps * config.env.num_envs * config.algorithm.batch_trajectories


def _check_minibatch(config: Config) -> list[Problem]:
    size, samples = getattr(config.algorithm, "minibatch_size", 0), samples_per_update(config)
    if not isinstance(config.algorithm, PPOSettings) or size <= samples:
        return []
    message = (
        f"one update has rollout_steps * num_envs * batch_trajectories = {samples} "
        "samples, "
        "so no minibatch would ever be full"
    )
    return [Problem("algorithm.minibatch_size", size, message, f"1 to {samples}")]


def _check_deterministic(config: Config) -> list[Problem]:
    if not config.run.deterministic:
        return []
    problems = []
    if config.actors.count != 1:
        message = (
            "run.deterministic = true repeats bit for bit only with one actor: the order "
            "in "
            "which several finish is chance"
        )
        problems.append(Problem("actors.count", config.actors.count, message, "1"))
    if bound_in_force(config) != 0:
        message = (
            "run.deterministic = true repeats bit for bit only when the learner and the "
            "actor take turns"
        )
        problems.append(
            Problem(
                "balance.max_staleness",
                config.balance.max_staleness,
                message,
                "0, with a controller that keeps the bound",
            )
        )
    return problems


def advice(config: Config) -> list[str]:
    """What is legal but costs something, in sentences."""
    sentences = [*_idle_actors(config), *_forced_publishing(config)]
    run = config.run
    if (
        run.target_return is None
        and run.max_env_steps is None
        and run.max_updates is None
        and run.max_seconds is None
    ):
        sentences.append(
            "nothing ends this run but a stop: it has no run.target_return, max_env_steps, "
            "max_updates or max_seconds"
        )
    if config.actors.count == 0:
        sentences.append("with actors.count = 0 nothing is sampled until actors are added")
    return sentences


def used_up(config: Config, manifest: Mapping[str, Any]) -> list[str]:
    """Limits that a run has reached before it goes on from the checkpoint of ``manifest``, in
    sentences: it would end at once.
    """
    run = config.run
    seconds = manifest.get("trained_s", manifest["elapsed_s"])
    reached = {
        "max_env_steps": manifest["env_steps"],
        "max_updates": manifest["version"][1],
        "max_seconds": seconds,
    }
    limits = {name: getattr(run, name) for name in reached}
    return [
        f"run.{name} = {number(limit)} is used up ({number(reached[name])} before), so nothing "
        "will be trained: give it more, or null"
        for name, limit in limits.items()
        if limit is not None and reached[name] >= limit
    ]


def _idle_actors(config: Config) -> list[str]:
    ceiling, actors, batch = (
        credits_ceiling(config),
        config.actors.count,
        config.algorithm.batch_trajectories,
    )
    if ceiling is None or actors <= ceiling - batch or actors == 0:
        return []
    rolling, bound = ceiling - batch, bound_in_force(config)
    sentence = (
        f"with A = {actors} actors, B = {batch} trajectories an update and max_staleness = "
        f"{'unbounded' if bound is None else bound}, "
        f"C = {ceiling} credits: B of them sit in the update, so at most C - B = {rolling} "
        "trajectories roll out meanwhile and "
        f"{actors - rolling} of {actors} actors are idle because of the bound; when both halves "
        "are equally "
        "fast, throughput is at most "
        f"C/(A + B) = {min(1.0, ceiling / (actors + batch)):.2f} of open loop; "
    )
    if bound == 0:
        return [sentence + "that is the price of training synchronously"]
    remedies = (
        []
        if bound is None or bound * batch >= actors
        else [f"max_staleness >= {-(-actors // batch)}"]
    )
    remedies += (
        [f"credits >= {actors + batch}"]
        if (config.balance.credits or actors + batch) < actors + batch
        else []
    )
    return [
        sentence
        + " and ".join(remedies)
        + (f", or actors.count <= {rolling}, costs nothing" if rolling else " costs nothing")
    ]


def _forced_publishing(config: Config) -> list[str]:
    interval, bound = config.weights.publish_interval_updates, bound_in_force(config)
    if bound is None or interval <= bound + 1:
        return []
    setting = (
        f"weights.publish_interval_updates = {interval} is more than max_staleness + 1 = "
        f"{bound + 1}"
    )
    return [f"{setting}: versions are published sooner, whenever the bound needs it"]


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


def check_replay(config: Config) -> list[Problem]:
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
        *_check_replay_deterministic(config),
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


def _check_replay_deterministic(config: Config) -> list[Problem]:
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
