"""Worker: loops of single parts, each in a process on a core of its own. They give the limits of
the parts.

``rollout``   the shipped policy on the bare Gymnasium vector, without slots, messages and
             log-probabilities
``environments``  steps of the config's environments, without a policy
``act``       the same policy on one observation, without an environment
``step``      the shipped learner's ``step`` on one resident batch
``torch_act`` ``torch_step``  plain PyTorch code for the same network sizes, as the reference for
             the two loops above
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.lib import child

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from tianflow.config.model import Config
    from tianflow.core.payloads import EnvironmentSpec
    from tianflow.interfaces import Algorithm, AlgorithmFactory, ArrayStep, LearnerBatch, Policy

    Array = NDArray[Any]

WARM_S = 0.5
Work = Callable[[], int]
"""Does a piece of work and returns its number of environment steps, observations or samples."""


def acting(
    policy: Policy, steps: int, environments: int
) -> tuple[Callable[[torch.Tensor], Sequence[Any]], Callable[[Array, Any], Array]]:
    """Return two functions that query ``policy`` as a rollout does.

    The first splits noise [T, N, K] into the rows of the steps. The second maps an observation [N,
    ...] and a row to actions [N].
    """
    import numpy as np
    import torch

    offered = getattr(policy, "on_arrays", None)
    on_arrays: ArrayStep | None = None if offered is None else offered(environments)

    def act(observation: Array, noise: torch.Tensor) -> Array:
        return policy.act({"": torch.from_numpy(observation)}, {}, noise).action.numpy()

    if on_arrays is None:
        return lambda noise: noise.unbind(0), act
    step = on_arrays
    parameters, actions = (
        np.empty((steps, environments, step.size), np.float32),
        np.empty((steps, environments), np.int64),
    )

    def act_on_arrays(observation: Array, row: tuple[Array, Array, Array]) -> Array:
        step({"": observation}, *row)
        return row[2]

    return lambda noise: list(zip(noise.numpy(), parameters, actions, strict=True)), act_on_arrays


def rollout(config: Config) -> Work:
    """Act and step for ``actors.rollout_steps`` at a time, with noise drawn once."""
    import gymnasium
    import numpy as np
    import torch

    from tianflow import envs

    environments, steps = config.env.num_envs, config.actors.rollout_steps
    vector = gymnasium.make_vec(
        config.env.id, num_envs=environments, vectorization_mode="vector_entry_point"
    )
    policy, generator = (
        _factory(config).make_policy(config, envs.probe(config)),
        np.random.default_rng(config.run.seed),
    )
    rows, act = acting(policy, steps, environments)
    observation, _ = vector.reset(seed=config.run.seed)

    def work() -> int:
        nonlocal observation
        noise = policy.noise(steps, environments, generator)
        with torch.inference_mode():
            for row in rows(noise):
                observation, *_ = vector.step(act(observation, row))
        return steps * environments

    return work


def environments(config: Config) -> Work:
    """Step the environment vector of one actor."""
    from benchmarks.workers import halves

    return halves.actor(config)["environment"]


def act(config: Config) -> Work:
    """Choose actions for the same observation repeatedly."""
    import numpy as np
    import torch

    from tianflow import envs

    environments, steps = config.env.num_envs, config.actors.rollout_steps
    policy, generator = (
        _factory(config).make_policy(config, envs.probe(config)),
        np.random.default_rng(config.run.seed),
    )
    rows, choose = acting(policy, steps, environments)
    observation = generator.standard_normal((environments, 4), np.float32)

    def work() -> int:
        noise = policy.noise(steps, environments, generator)
        with torch.inference_mode():
            for row in rows(noise):
                choose(observation, row)
        return steps * environments

    return work


def step(config: Config) -> Work:
    """Update on one batch of real trajectories."""
    learner, batch = learning(config)

    def work() -> int:
        result = learner.step(batch)
        if not result.finite:
            raise RuntimeError("the update was not finite and was undone, which is different work")
        return int(result.samples)

    return work


def learning(config: Config) -> tuple[Algorithm, LearnerBatch]:
    """Return the shipped learner and a batch for it. The learning rate is 0, so that the batch
    stays on-policy.
    """
    import torch

    from tianflow import envs

    spec = envs.probe(config)
    batch = _batch(config, spec)
    learner = _factory(config).make_learner(config, spec, torch.device("cpu"))
    learner.set_live(0.0, config.algorithm.entropy_cost)
    return learner, batch


def _batch(config: Config, spec: EnvironmentSpec) -> LearnerBatch:
    """Return a learner's batch, filled by the shipped rollout and stacker."""
    import torch

    from tianflow.channels.memory import heap_arena
    from tianflow.components.rollout import Rollout
    from tianflow.components.stacking import BatchStacker
    from tianflow.core.layout import make_layout
    from tianflow.core.payloads import Grant, Version

    count = config.algorithm.batch_trajectories
    layout = make_layout(
        spec, steps=config.actors.rollout_steps, state_spec={}, return_accumulator=False
    )
    arena = heap_arena(layout, 1)
    policy = _factory(config).make_policy(config, spec)
    version = Version(1, 0)
    rollout = Rollout(
        config=config,
        spec=spec,
        policy=policy,
        load_weights=lambda: version,
        component="actor-0",
        actor_index=0,
    )
    stacker = BatchStacker(layout=layout, trajectories=count, device=torch.device("cpu"))
    for index in range(count):
        grant = Grant(index, 0, version)
        result = rollout.run(arena.lease(grant), grant, config.actors.rollout_steps)
        stacker.fill(index, arena.views(0), result.length)
    rollout.close()
    return stacker.batch()


def torch_act(config: Config) -> Work:
    """Evaluate two networks of two layers, and return a sampled action, its log-probability and the
    value as arrays.
    """
    import torch

    policy, value = _plain_networks()
    observation = torch.randn(config.env.num_envs, 4)

    def work() -> int:
        with torch.inference_mode():
            for _ in range(20):
                logits = policy(observation)
                action = torch.multinomial(torch.softmax(logits, -1), 1)
                log_prob = torch.log_softmax(logits, -1).gather(1, action)
                for result in (action, log_prob, value(observation)):
                    result.numpy()
        return 20 * config.env.num_envs

    return work


def torch_step(config: Config) -> Work:
    """Update with V-trace, as a loop over time, and PyTorch's own Adam."""
    import torch
    from torch.nn import functional, utils

    steps, columns = (
        config.actors.rollout_steps,
        config.env.num_envs * config.algorithm.batch_trajectories,
    )
    policy, value = _plain_networks()
    parameters = [*policy.parameters(), *value.parameters()]
    optimiser = torch.optim.Adam(parameters, 1e-4)
    observation, action = torch.randn(steps * columns, 4), torch.randint(0, 2, (steps * columns,))
    behaviour, reward, discount = (
        torch.full((steps * columns,), -0.69),
        torch.randn(steps, columns),
        torch.full((steps, columns), 0.99),
    )

    def targets(log_ratio: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rho, last = log_ratio.exp().clamp(max=1.0).view(steps, columns), v[-1]
        delta = rho * (reward + discount * torch.cat([v[1:], last[None]]) - v)
        carried, vs = torch.zeros(columns), torch.empty(steps, columns)
        for t in reversed(range(steps)):
            carried = delta[t] + discount[t] * rho[t] * carried
            vs[t] = v[t] + carried
        return rho * (reward + discount * torch.cat([vs[1:], last[None]]) - v), vs

    def work() -> int:
        log_probs = functional.log_softmax(policy(observation), -1)
        chosen, values = (
            log_probs.gather(1, action[:, None]).squeeze(1),
            value(observation).squeeze(-1),
        )
        with torch.no_grad():
            advantage, target = targets(chosen - behaviour, values.detach().view(steps, columns))
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        loss = (
            -(advantage.view(-1) * chosen).mean()
            + 0.5 * functional.mse_loss(values, target.view(-1))
            - 0.01 * entropy
        )
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        utils.clip_grad_norm_(parameters, 0.5)
        optimiser.step()
        return steps * columns

    return work


def _plain_networks() -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    from torch import nn

    def make(outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
        )

    return make(2), make(1)


def _factory(config: Config) -> AlgorithmFactory:
    from tianflow import plugins

    return cast(
        "AlgorithmFactory",
        plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name"),
    )


LOOPS: dict[str, Callable[[Config], Work]] = {
    "rollout": rollout,
    "environments": environments,
    "act": act,
    "step": step,
    "torch_act": torch_act,
    "torch_step": torch_step,
}


def cores() -> dict[str, int | None]:
    """Return the core that each half has in a run: the learner the first, actors the next. None if
    there is only one core.
    """
    ours = sorted(os.sched_getaffinity(0))
    return (
        {"learner": ours[0], "actor": ours[1]}
        if len(ours) > 1
        else {"learner": None, "actor": None}
    )


def command(loop: str, config: Path, half: str, seconds: float) -> tuple[str, tuple[object, ...]]:
    """Return the command with which `benchmarks.lib.child.run_together` times ``loop`` on the core
    of ``half``.
    """
    core = cores()[half]
    return "benchmarks.workers.bare_loops", (
        loop,
        config,
        seconds,
        *(() if core is None else ("--core", core)),
    )


def rate(work: Work, seconds: float) -> float:
    """Return units per second over ``seconds``, after a warm-up."""
    for _ in _during(WARM_S):
        work()
    began = time.perf_counter()
    done = sum(work() for _ in _during(seconds))
    return done / (time.perf_counter() - began)


def _during(seconds: float) -> Iterator[None]:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield


def main() -> None:
    """Arguments: ``LOOP CONFIG SECONDS [section.key=value ...] [--core N] [--turns]``.

    With ``--turns`` it measures once for each line of its input.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=sorted(LOOPS))
    parser.add_argument("config", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--core", type=int)
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    import torch

    from tianflow.config.loading import load_config

    torch.set_num_threads(1)
    work = LOOPS[given.loop](load_config(given.config, given.overrides))
    work()
    if not given.turns:
        child.wait_for_start()
    for _ in sys.stdin if given.turns else (None,):
        child.report({"per_s": rate(work, given.seconds)})


if __name__ == "__main__":
    main()
