"""Rules over combinations of settings: derived quantities, refusals, and advice.

All functions are pure and take a `Config`; none needs an environment.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from tianflow import plugins
from tianflow.config.engines import check_job
from tianflow.config.evaluations import MAIN
from tianflow.config.model import (
    BUILT_IN_ALGORITHMS,
    ON_ONE_MACHINE,
    Config,
    PPOSettings,
    ReplaySettings,
)
from tianflow.config.networks import BUILT_IN, OF_BUILT_IN
from tianflow.config.portable import unportable_settings
from tianflow.config.schedules import LIMITS, Schedule, check_schedules, schedule_limit
from tianflow.core.devices import on_gpu
from tianflow.core.formatting import number
from tianflow.core.limits import RateLimits
from tianflow.core.payloads import MOST_ROWS, credits_ceiling
from tianflow.core.program import LauncherCapabilities
from tianflow.errors import ConfigError, Problem
from tianflow.interfaces import MeasuresDivergence, SplitsOverRanks

if TYPE_CHECKING:
    from tianflow.interfaces import Controller

# Derived quantities: balance
# --------------------------------------------------------------------------------------------------


MOST_DOORBELLS = 248
"""Descriptors that a new process inherits (253 on Linux), less those of slots, weights and link."""
RESERVED = frozenset({"service.json"})
"""Names that no run may have."""


def controllers(config: Config) -> tuple[str, ...]:
    """Names of the active controllers."""
    controller = config.balance.controller
    return (controller,) if isinstance(controller, str) else controller


def make_controllers(config: Config) -> dict[str, Controller]:
    """The controllers named by ``balance.controller``, each with those of ``balance.parameters``
    that are keywords of its constructor.

    Raises:
        ConfigError: a name is unknown, or a parameter is refused.
    """
    found: dict[str, Controller] = {}
    for name in controllers(config):
        factory: Any = plugins.load("tianflow.controllers", name, path="balance.controller")
        given = config.balance.parameters
        # to read a signature takes as long as many other checks together
        known = inspect.signature(factory).parameters if given else ()
        own = {key: value for key, value in given.items() if key in known}
        try:
            found[name] = factory(**own)
        except (TypeError, ValueError) as error:
            raise ConfigError([Problem("balance.parameters", own, f"{name}: {error}")]) from error
    return found


def capabilities_of(launcher: str) -> LauncherCapabilities:
    """What the launcher of this name can do. ConfigError if it is not a launcher."""
    path = "placement.launcher"
    found: Any = plugins.load("tianflow.launchers", launcher, path=path)
    capabilities = getattr(found, "capabilities", None)
    if not isinstance(capabilities, LauncherCapabilities):
        message = "is not a launcher: it has no capabilities"
        accepted = "a class that implements tianflow.interfaces.Launcher"
        raise ConfigError([Problem(path, launcher, message, accepted)])
    return capabilities


def bound_in_force(config: Config) -> int | None:
    """The staleness bound in force: 0 under ``lockstep``, None under ``open_loop`` alone."""
    if "lockstep" in controllers(config):
        return 0
    return None if set(controllers(config)) == {"open_loop"} else config.bound


def is_paced(config: Config) -> bool:
    """True if a controller limits credits to what the staleness bound can use."""
    return not set(controllers(config)) <= {"open_loop", "consume_only"}


def max_credits(config: Config) -> int | None:
    """The smaller of C_max at publish lag 0 and ``balance.credits``; None without either limit."""
    batch, bound = (
        config.algorithm.batch_trajectories,
        bound_in_force(config) if is_paced(config) else None,
    )
    ceiling = None if bound is None else credits_ceiling(bound, publish_lag=0, batch=batch)
    limits = [limit for limit in (config.balance.credits, ceiling) if limit is not None]
    return min(limits, default=None)


def largest_publish_lag(config: Config, bound: int | None) -> int | None:
    """The largest publish lag that the learner may cause under the ``bound`` in force; None without
    a limit.

    A lag of L takes L * B credits. The largest one leaves B, so that training continues. With
    ``weights.publish = "divergence"`` it also leaves one for each actor, as far as
    ``balance.credits`` would grant it, so that skipped versions idle no actor.
    """
    if bound is None or config.weights.publish == "interval" or not is_paced(config):
        return bound
    return max(0, bound + 1 - _batches_out(config))


def _batches_out(config: Config) -> int:
    """Credits of one batch in training and of one trajectory for each actor, at most
    ``balance.credits``, in batches.
    """
    batch, limit = config.algorithm.batch_trajectories, config.balance.credits
    used = batch + config.actors.count
    return ceil((used if limit is None else min(used, limit)) / batch)


def cores_of_learner(config: Config) -> int:
    """Number of cores of the learner; 0 on GPUs."""
    learner = config.learner
    return 0 if on_gpu(learner.device, learner.ranks) else learner.threads * learner.ranks


def samples_per_update(config: Config) -> int:
    """Steps in one batch: T * N * B."""
    return config.actors.rollout_steps * config.env.num_envs * config.algorithm.batch_trajectories


# Derived quantities: replay
# --------------------------------------------------------------------------------------------------


def insert_size(config: Config) -> int:
    """Largest expected number of items that one trajectory completes.

    A window begins every ``period`` steps of each environment. A window that began in the previous
    trajectory may end in this one.
    """
    assert config.algorithm.window is not None
    length, period = config.algorithm.window
    return (ceil((config.actors.rollout_steps + length) / period) + 1) * config.env.num_envs


def shard_capacity(config: Config) -> int:
    """Capacity of one shard, in observations."""
    return -(-config.replay.capacity // config.replay.shards)


def guaranteed_items(config: Config) -> int:
    """Items that full shards hold at least, with long episodes that are not truncated.

    A shard stores observations. For each environment, the last ``length`` of them belong to
    windows in progress, and ``period`` of the oldest to a window whose beginning was evicted. Every
    shard gets trajectories of all actors if there are fewer actors than shards.
    """
    assert config.algorithm.window is not None
    length, period = config.algorithm.window
    actors, shards = max(1, config.actors.count), config.replay.shards
    visitors = actors if actors < shards else ceil(actors / shards)
    return shards * max(
        0, (shard_capacity(config) - visitors * config.env.num_envs * (length + period)) // period
    )


def rate_limits(config: Config) -> RateLimits:
    """Settings of the rate limiter. Without ``samples_per_insert``, neither side ever waits.

    Raises:
        ValueError: one side would wait for ever; the message names it.
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


# Refusals
# --------------------------------------------------------------------------------------------------


def check(config: Config) -> list[Problem]:
    """Problems of the combination of settings, each with its consequence."""
    if problems := list(unportable_settings(config.model_dump())):
        return problems
    return [
        *_check_run_name(config),
        *_check_names(config),
        *_check_balance(config),
        *_check_minibatch(config),
        *_check_deterministic(config),
        *(_check_schedule(config) or check_schedules(config)),
        *_check_sinks(config),
        *_check_replay(config),
        *_check_inference(config),
        *_check_divergence(config),
        *_check_ranks(config),
        *_check_graphs(config),
        *_check_nodes(config),
        *_check_evaluation_names(config),
        *check_job(config.slurm),
    ]


def _check_evaluation_names(config: Config) -> list[Problem]:
    if MAIN not in config.evaluation.further:
        return []
    message = "is the name of the evaluation that decides about the target"
    return [Problem(f"evaluation.further.{MAIN}", None, message, "another name")]


def _check_run_name(config: Config) -> list[Problem]:
    name = config.run.name
    if name is None or name.lower() not in RESERVED:
        return []
    message = "is reserved: a service has a file of this name in the directory of the runs"
    return [Problem("run.name", name, message, "another name")]


def _check_names(config: Config) -> list[Problem]:
    problems = []
    named = [
        ("network", config.network.name, "network.name"),
        ("launcher", config.placement.launcher, "placement.launcher"),
    ]
    for kind, name, path in named:
        group, known = f"tianflow.{kind}s", plugins.names(f"tianflow.{kind}s")
        # Installed plug-ins are not imported here, because networks import PyTorch.
        if name not in known:
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
                "without a controller no credits would be granted, so no rollout would begin",
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
                    f"{name} is named twice, and would receive every row twice",
                )
            )
        if name not in known:  # importing an installed sink may be slow
            problems += _load_problems("tianflow.sinks", name, "metrics.sinks")
    return problems + [
        Problem(
            f"metrics.kwargs.{name}",
            None,
            "is not the name of a sink in metrics.sinks",
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
    """Every entry of ``balance.parameters`` must be a keyword of one of the controllers, and every
    controller must accept its value.
    """
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
        if config.balance.parameters:
            known |= set(inspect.signature(factory).parameters)
    accepted = (
        "one of " + ", ".join(sorted(known))
        if known
        else f"no parameters, for the controllers in force ({', '.join(controllers(config))})"
    )
    if problems := [
        Problem(
            f"balance.parameters.{key}",
            value,
            "is not a parameter",
            accepted,
            plugins.nearest(key, tuple(known)),
        )
        for key, value in config.balance.parameters.items()
        if key not in known
    ]:
        return problems
    try:
        make_controllers(config)
    except ConfigError as error:
        return list(error.problems)
    return []


def _check_balance(config: Config) -> list[Problem]:
    problems = []
    batch, balance = config.algorithm.batch_trajectories, config.balance
    if balance.credits is not None and balance.credits < batch:
        message = (
            f"{balance.credits} credits can never feed the learner, which needs {batch} "
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
            f"a trajectory has at most {config.actors.rollout_steps} steps, so a straggler could "
            "never be cut"
        )
        accepted = f"1 to actors.rollout_steps = {config.actors.rollout_steps}"
        problems.append(
            Problem("balance.min_fragment_steps", balance.min_fragment_steps, message, accepted)
        )
    return problems


def _check_minibatch(config: Config) -> list[Problem]:
    size, samples = getattr(config.algorithm, "minibatch_size", 0), samples_per_update(config)
    if not isinstance(config.algorithm, PPOSettings) or size <= samples:
        return []
    message = (
        f"one update has rollout_steps * num_envs * batch_trajectories = {samples} samples, so a "
        "minibatch would never be full"
    )
    return [Problem("algorithm.minibatch_size", size, message, f"1 to {samples}")]


def _check_deterministic(config: Config) -> list[Problem]:
    if not config.run.deterministic:
        return []
    problems = []
    if config.actors.count != 1:
        message = (
            "run.deterministic = true requires a single actor, because several actors finish in "
            "random order"
        )
        problems.append(Problem("actors.count", config.actors.count, message, "1"))
    if bound_in_force(config) != 0:
        message = "run.deterministic = true requires that the learner and the actor alternate"
        problems.append(
            Problem(
                "balance.max_staleness",
                config.balance.max_staleness,
                message,
                "0, with a controller that respects the bound",
            )
        )
    return problems


def _check_ranks(config: Config) -> list[Problem]:
    ranks, algorithm = config.learner.ranks, config.algorithm
    if ranks == 1:
        return []
    problems, path = [], "learner.ranks"
    name = "batch_size" if algorithm.items else "batch_trajectories"
    whole = algorithm.items or algorithm.batch_trajectories
    if whole % ranks:
        message = f"learner.ranks = {ranks} ranks get equal parts of each batch"
        accepted = f"a multiple of {ranks}, or another number of ranks"
        problems.append(Problem(f"algorithm.{name}", whole, message, accepted))
    if config.run.deterministic:
        message = "sums over several ranks are not those of a deterministic run"
        problems.append(Problem(path, ranks, message, "1, or run.deterministic = false"))
    if re.fullmatch(r"cuda:\d+", config.learner.device):
        message = "one GPU is named, and each rank needs its own"
        problems.append(Problem("learner.device", config.learner.device, message, "cuda, or cpu"))
    if not capabilities_of(config.placement.launcher).processes:
        message = f"the launcher {config.placement.launcher} runs every component in one process"
        problems.append(Problem(path, ranks, message, "1, or placement.launcher = processes"))
    return problems + _check_splitting(config)


def _check_nodes(config: Config) -> list[Problem]:
    """What actors on other machines cannot do."""
    name, problems, cluster = config.placement.launcher, list[Problem](), config.cluster
    if name in ON_ONE_MACHINE:
        return []
    if not capabilities_of(name).nodes:
        return []
    if config.run.deterministic:
        message = f"with the launcher {name}, the order of trajectories depends on the network"
        accepted = "false, or placement.launcher = inline"
        problems.append(Problem("run.deterministic", True, message, accepted))
    if cluster.lease_s >= config.env.step_timeout_s:
        message = (
            f"while a connection is lost, steps of environments are not seen, and after "
            f"env.step_timeout_s = {config.env.step_timeout_s:g} s they count as hanging"
        )
        accepted = "less than env.step_timeout_s"
        problems.append(Problem("cluster.lease_s", cluster.lease_s, message, accepted))
    return problems


def _check_graphs(config: Config) -> list[Problem]:
    """CUDA graphs are possible where they are asked for."""
    if config.learner.graphs != "on":
        return []
    path, name, accepted = "learner.graphs", config.algorithm.name, "auto, or off"
    if not config.algorithm.fixed_shapes:
        message = f"the update of {name} has no fixed shapes"
    elif config.learner.device == "cpu":
        message = "a CUDA graph needs a GPU, and learner.device is cpu"
    elif config.learner.ranks > 1:
        message = f"the updates of {config.learner.ranks} ranks wait for each other"
    else:
        return []
    return [Problem(path, "on", message, accepted)]


def _check_splitting(config: Config) -> list[Problem]:
    """The algorithm can be computed by several ranks."""
    algorithm, path = config.algorithm, "learner.ranks"
    known = sorted(name for name, model in BUILT_IN_ALGORITHMS.items() if model.splits_over_ranks)
    accepted = f"1, or an algorithm that several ranks can compute ({', '.join(known)}, a plug-in)"
    if not algorithm.splits_over_ranks:
        message = f"the settings of {algorithm.name} do not declare splits_over_ranks"
        return [Problem(path, config.learner.ranks, message, accepted)]
    message = _false_declaration(config, SplitsOverRanks, "splits_over_ranks", "join()")
    return [Problem(path, config.learner.ranks, message, accepted)] if message else []


def _false_declaration(config: Config, protocol: type, declared: str, methods: str) -> str:
    """Why the learner of a plug-in cannot do what its settings declare; "" if it can."""
    name = config.algorithm.name
    algorithm = plugins.load("tianflow.algorithms", name, path="algorithm.name")
    learner = getattr(algorithm, "make_learner", None)
    if not isinstance(learner, type) or issubclass(learner, protocol):
        return ""
    return (
        f"the settings of {name} declare {declared}, but its learner {learner.__name__} has no "
        f"{methods}"
    )


def _check_schedule(config: Config) -> list[Problem]:
    """The older form of a schedule. A table in ``learning_rate`` takes precedence."""
    rate: object = config.algorithm.learning_rate
    if config.algorithm.learning_rate_schedule != "linear" or isinstance(rate, Schedule):
        return []
    path, limit = "algorithm.learning_rate_schedule", schedule_limit(config)
    limits = ", ".join(f"run.{name}" for name in LIMITS.values())
    if limit is None:
        message = f"the rate falls to 0 over a limit of the run, and none is set of {limits}"
        return [Problem(path, "linear", message, "constant, or a run with one of these limits")]
    if config.run.deterministic and limit[0] == "seconds":
        message = (
            "the rate would fall with the time of run.max_seconds, so a deterministic run could "
            "not repeat bit for bit"
        )
        accepted = "constant, or run.max_env_steps or run.max_updates"
        return [Problem(path, "linear", message, accepted)]
    return []


def _check_inference(config: Config) -> list[Problem]:
    if not config.central:
        return []
    problems, actors = [], config.actors
    if actors.refresh == "trajectory":
        message = (
            "inference servers load new weights between two batches, so a trajectory has several "
            "versions"
        )
        problems.append(Problem("actors.refresh", actors.refresh, message, "step, or null"))
    if actors.precision != "fp32":
        message = "with central inference the servers compute the actions"
        problems.append(
            Problem("actors.precision", actors.precision, message, "inference.precision")
        )
    if actors.rollout_steps > MOST_ROWS:
        message = f"a request to an inference server has room for {MOST_ROWS} rows"
        problems.append(
            Problem("actors.rollout_steps", actors.rollout_steps, message, f"1 to {MOST_ROWS}")
        )
    if (actors.hosts or 0) + config.inference.servers > MOST_DOORBELLS:
        message = (
            f"every host and every inference server has a doorbell, and a process inherits "
            f"{MOST_DOORBELLS} of them at most"
        )
        accepted = f"at most {MOST_DOORBELLS - config.inference.servers}"
        problems.append(Problem("actors.hosts", actors.hosts, message, accepted))
    return problems


def _check_divergence(config: Config) -> list[Problem]:
    algorithm = config.algorithm
    if config.weights.publish != "divergence":
        return []
    path, known = (
        "weights.publish",
        sorted(name for name, model in BUILT_IN_ALGORITHMS.items() if model.measures_divergence),
    )
    accepted = f"interval, or an algorithm that measures it ({', '.join(known)}, or a plug-in)"
    if not algorithm.measures_divergence:
        message = (
            f"{algorithm.name} does not measure the divergence of two policies, so no version "
            "would ever exceed weights.divergence_nats"
        )
        return [Problem(path, "divergence", message, accepted)]
    if algorithm.name in BUILT_IN_ALGORITHMS:
        return []
    methods = "retain_policy() and divergence()"
    message = _false_declaration(config, MeasuresDivergence, "measures_divergence", methods)
    return [Problem(path, "divergence", message, accepted)] if message else []


def _check_replay(config: Config) -> list[Problem]:
    if config.algorithm.window is None:
        # Older versions wrote the exponents that are the defaults now.
        older = {"alpha": 0.6, "beta": 0.4}
        same = {
            name: None for name, value in older.items() if getattr(config.replay, name) == value
        }
        if config.replay.model_copy(update=same) == ReplaySettings():
            return []
        message = f"{config.algorithm.name} uses each trajectory once and stores nothing in replay"
        return [
            Problem(
                "replay",
                config.replay.model_dump(exclude_defaults=True),
                message,
                "an algorithm with replay, or a config without this section",
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
        "the items in replay at a draw depend on timing, so a run with replay cannot repeat bit "
        "for bit"
    )
    return [Problem("run.deterministic", True, message, "false")]


def _check_capacity(config: Config) -> list[Problem]:
    replay, envs = config.replay, config.env.num_envs
    assert config.algorithm.window is not None
    length, period = config.algorithm.window
    # A truncated episode stores its last observation, too; in the worst case, every step truncates.
    trajectory = (2 * config.actors.rollout_steps + 1) * envs
    if shard_capacity(config) < max(length, trajectory):
        what = (
            f"the {trajectory} observations of one trajectory in the worst case"
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
    items = guaranteed_items(config)
    if items < replay.min_size:
        message = (
            f"with {replay.capacity} observations in {replay.shards} shards, windows of {length} "
            f"steps every {period} steps and {envs} environments per actor, the table is "
            f"guaranteed to hold {items} items, so the learner might wait for ever"
        )
        return [
            Problem(
                "replay.min_size",
                replay.min_size,
                message,
                f"at most {items}, or a larger replay.capacity",
            )
        ]
    return []


def _check_max_samples(config: Config) -> list[Problem]:
    most, ratio = config.replay.max_samples, config.replay.samples_per_insert
    if most is None or ratio is None or ratio <= most:
        return []
    message = (
        f"an item is removed after {most} draws, so samples_per_insert = {ratio:g} can never be "
        "reached"
    )
    return [
        Problem(
            "replay.max_samples",
            most,
            message,
            f"at least {ceil(ratio)}, or a lower samples_per_insert",
        )
    ]


# Advice
# --------------------------------------------------------------------------------------------------


def advice(config: Config) -> list[str]:
    """Sentences about valid settings that have a cost, or perhaps no effect."""
    sentences = [
        *_idle_actors(config),
        *_forced_publishing(config),
        *_never_skipping(config),
        *_idle_hosts(config),
        *_for_built_in_networks(config),
    ]
    run = config.run
    if (
        run.target_return is None
        and run.max_env_steps is None
        and run.max_updates is None
        and run.max_seconds is None
    ):
        sentences.append(
            "this run ends only when it is stopped: it has no run.target_return, max_env_steps, "
            "max_updates or max_seconds"
        )
    if config.actors.count == 0:
        sentences.append("with actors.count = 0 nothing is sampled until actors are added")
    return sentences


def used_up(config: Config, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Limits that a run resumed from the checkpoint of ``manifest`` has reached: a sentence for
    each name.
    """
    run = config.run
    reached = {
        "max_env_steps": manifest["env_steps"],
        "max_updates": manifest["version"][1],
        "max_seconds": manifest.get("trained_s", manifest["elapsed_s"]),
    }
    limits = {name: getattr(run, name) for name in reached}
    return {
        name: f"run.{name} = {number(limit)} is used up ({number(reached[name])} before), so "
        "nothing will be trained: increase it, or set it to null"
        for name, limit in limits.items()
        if limit is not None and reached[name] >= limit
    }


def _for_built_in_networks(config: Config) -> list[str]:
    """Another network receives all settings, and may read them or derive from a built-in one. So
    they are not refused.
    """
    network = config.network
    changed = network.model_dump(include=set(OF_BUILT_IN), exclude_defaults=True)
    if network.name in BUILT_IN or not changed:
        return []
    paths = ", ".join(f"network.{name}" for name in changed)
    sentence = (
        f"the built-in networks use {paths}; {network.name} does only if it reads them from its "
        "settings or derives from a built-in network"
    )
    return [sentence]


def _idle_actors(config: Config) -> list[str]:
    ceiling, actors, batch = (
        max_credits(config),
        config.actors.count,
        config.algorithm.batch_trajectories,
    )
    if ceiling is None or actors <= ceiling - batch or actors == 0:
        return []
    busy, bound = ceiling - batch, bound_in_force(config)
    sentence = (
        f"with A = {actors} actors, B = {batch} trajectories per update and max_staleness = "
        f"{'unbounded' if bound is None else bound}, C = {ceiling} credits are granted: B of them "
        f"are in the update, so at most C - B = {busy} trajectories roll out at the same time, and "
        f"{actors - busy} of {actors} actors are idle because of the bound; when both halves are "
        "equally fast, throughput is at most C/(A + B) = "
        f"{min(1.0, ceiling / (actors + batch)):.2f} of open loop; "
    )
    if bound == 0:
        return [sentence + "that is the price of synchronous training"]
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
        + (f", or actors.count <= {busy}, avoids this" if busy else " avoids this")
    ]


def _idle_hosts(config: Config) -> list[str]:
    hosts, actors = config.actors.hosts, config.actors.count
    if not config.central or not actors or (hosts is not None and actors > hosts):
        return []
    if hosts is None and actors > max(1, (os.cpu_count() or 1) - cores_of_learner(config)):
        return []
    sentence = (
        f"with one actor a host ({actors} actors) a host is idle while its actor waits for an "
        "inference server; two or more actors a host step in turn"
    )
    return [sentence]


def _forced_publishing(config: Config) -> list[str]:
    interval, bound = config.weights.publish_interval_updates, bound_in_force(config)
    if bound is None or interval <= bound + 1:
        return []
    setting = (
        f"weights.publish_interval_updates = {interval} is more than max_staleness + 1 = "
        f"{bound + 1}"
    )
    return [f"{setting}: versions are published sooner, whenever the bound needs it"]


def _never_skipping(config: Config) -> list[str]:
    bound = bound_in_force(config)
    if config.weights.publish == "interval" or largest_publish_lag(config, bound) != 0:
        return []
    actors, batch = config.actors.count, config.algorithm.batch_trajectories
    sentence = (
        f"weights.publish = divergence skips no version: with max_staleness = {bound}, A = "
        f"{actors} actors and B = {batch} trajectories per update, any publish lag would idle "
        "actors or exceed the bound"
    )
    remedy = f"max_staleness >= {_batches_out(config)}"
    if "lockstep" in controllers(config):
        remedy = "another controller than lockstep"
    return [f"{sentence}; {remedy} avoids this"]
