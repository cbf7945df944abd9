"""weights -> Evaluator -> returns of one version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tianflow.config.evaluations import evaluation_named
from tianflow.core.learning import LearningTally, between
from tianflow.core.payloads import NO_VERSION, NOT_METRICS, Evaluation, Version
from tianflow.core.statistics import ComponentStatistics, EvaluatorMeasures, StateClock
from tianflow.envs.make import environment_seed
from tianflow.envs.using import with_environment
from tianflow.envs.vector import StepRow, VectorEnvironment
from tianflow.errors import EnvironmentFailedError

if TYPE_CHECKING:
    from tianflow.components.weights import PolicyWeights
    from tianflow.config.model import EnvSettings
    from tianflow.core.learning import Sums
    from tianflow.core.payloads import EnvironmentSpec, Episode
    from tianflow.envs.episode_metrics import Metrics
    from tianflow.hosts.compute import Compute
    from tianflow.interfaces import Policy, SettingsReader

GROUP = "eval"
"""Group of the names of metrics."""


def play(
    policy: Policy,
    environment: VectorEnvironment,
    spec: EnvironmentSpec,
    *,
    episodes: int,
    seed: int,
    deterministic: bool,
    should_stop: Callable[[], bool],
    measured: Callable[[Metrics], None] = lambda _: None,
) -> tuple[Episode, ...] | None:
    """Play ``episodes`` complete episodes, equally many in every environment.

    Equal numbers avoid a bias towards short episodes. The result is None if ``should_stop`` ended
    the evaluation. ``measured`` receives the metrics of each of the episodes that has any.
    """
    n = environment.num_envs
    row = _row(spec, n)
    environment.reset(seed, row.observation, row.mask)
    environment.take_finished()
    state = policy.initial_state(n)
    generator = np.random.default_rng(seed)
    quota = [episodes // n + (index < episodes % n) for index in range(n)]
    ended: list[list[Episode]] = [[] for _ in range(n)]
    observation = {name: torch.from_numpy(array) for name, array in row.observation.items()}
    mask = None if row.mask is None else torch.from_numpy(row.mask)
    row.start[:] = True
    settled = {name: np.zeros((1, n), np.bool_) for name in ("terminated", "truncated", "valid")}
    settled |= {"reward": np.zeros((1, n), np.float32), "start": row.start[None]}
    while any(len(done) < wanted for done, wanted in zip(ended, quota, strict=True)):
        if should_stop():
            return None
        fresh = torch.from_numpy(row.start)
        state = {
            name: value.masked_fill(fresh.view(n, *[1] * (value.dim() - 1)), 0.0)
            for name, value in state.items()
        }
        with torch.inference_mode():  # around the policy only: an environment may use autograd
            noise = None if deterministic else policy.noise(1, n, generator)[0]
            step = policy.act(observation, state, noise, mask)
        state = step.state
        environment.step(step.action.numpy(), row)
        environment.settle(**settled)
        metrics = dict(environment.take_metrics_by_environment())
        for index, episode in zip(*environment.take_finished(), strict=True):
            if len(ended[index]) < quota[index]:
                ended[index].append(episode)
                if index in metrics:
                    measured(metrics[index])
    return tuple(episode for done in ended for episode in done)


def _row(spec: EnvironmentSpec, n: int) -> StepRow:
    def leaves() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
        return {leaf.name: np.zeros((n, *leaf.shape), leaf.dtype) for leaf in spec.observation}

    return StepRow(
        observation=leaves(),
        start=np.ones(n, np.bool_),
        mask=np.ones((n, spec.action.mask_size), np.bool_) if spec.action_mask else None,
        final=leaves() if spec.autoreset != "next_step" else {},
    )


class MetricsTally:
    """Means of the metrics of evaluated episodes. What training refuses is refused here, too.

    Args:
        source: name of the component, for warnings.
    """

    def __init__(self, source: str) -> None:
        self._tally = LearningTally(group=GROUP, source=source)
        self._before: Sums = {}

    def add(self, metrics: Metrics) -> None:
        """Count the metrics of one episode."""
        self._tally.add(self._tally.accept(metrics))

    def take(self) -> dict[str, float]:
        """The means since the last call, by names without the group ``eval/``. Names of other
        numbers of an evaluation are omitted.
        """
        before, self._before = self._before, self._tally.read()
        means = {
            name.removeprefix(f"{GROUP}/"): values.mean
            for name, values in between(before, self._before).items()
        }
        return {name: mean for name, mean in means.items() if name not in NOT_METRICS}


class _Request(NamedTuple):
    """``name``: of the evaluation to play; None: load the weights only."""

    at_least: Version
    name: str | None
    answer: asyncio.Future[Any]


class Evaluator:
    """Plays complete episodes with a single version, on request.

    Consumes: weights. Produces: evaluations. Waits: for a request. Unblocked by: `load`,
    `evaluate`.

    Args:
        name: name of the component.
        host: name of its host process.
        spec: specification of the environments of training.
        newest: waits until weights of a version or newer are readable.
        settings: live settings.
        compute: compute thread of the host.
        make_policy: builds a policy and its weights reader, on the compute thread.
        make_environment: builds a number of environments, on the compute thread.
    """

    def __init__(
        self,
        *,
        name: str,
        host: str,
        spec: EnvironmentSpec,
        newest: Callable[[Version], Awaitable[None]],
        settings: SettingsReader,
        compute: Compute,
        make_policy: Callable[[], tuple[Policy, PolicyWeights]],
        make_environment: Callable[[EnvSettings, int], VectorEnvironment],
    ) -> None:
        self.name = name
        self._host, self._spec, self._newest, self._settings, self._compute = (
            host,
            spec,
            newest,
            settings,
            compute,
        )
        self._make_policy, self._make_environment = make_policy, make_environment
        self._clock = StateClock()
        # At most one request at a time: the run waits for each.
        self._asked: asyncio.Queue[_Request] = asyncio.Queue()
        self._acting: tuple[Policy, PolicyWeights] | None = None
        self._version = NO_VERSION
        self._counters = {"evaluations": 0.0, "episodes": 0.0}
        self._metrics = MetricsTally(name)

    async def run(self, started: Callable[[], None]) -> None:
        """Run until cancelled."""
        started()
        while True:
            self._clock.enter("waiting:request")
            request = await self._asked.get()
            self._clock.enter("busy")
            await self._newest(request.at_least)
            try:
                found = await self._compute.run(partial(self._serve, request))
            except EnvironmentFailedError as error:
                # The caller decides: training may continue without an evaluation.
                if not request.answer.done():
                    request.answer.set_exception(error)
                continue
            if found is None:
                if self._compute.stopping.is_set():
                    return
                continue
            if isinstance(found, Evaluation):
                self._counters["evaluations"] += 1
                self._counters["episodes"] += len(found.returns)
            if not request.answer.done():
                request.answer.set_result(found)

    def load(self, at_least: Version) -> asyncio.Future[Version]:
        """Load the newest version, once ``at_least`` is readable."""
        return self._ask(at_least, None)

    def evaluate(self, at_least: Version, name: str) -> asyncio.Future[Evaluation]:
        """Play the evaluation ``name`` with the version that was loaded last. If that is older
        than ``at_least``, as in a new process, load the newest one first.

        Cancelling the future stops the evaluation and frees the compute thread. The future fails
        with EnvironmentFailedError if an environment fails.
        """
        return self._ask(at_least, name)

    def statistics(self) -> ComponentStatistics:
        """Times and counters."""
        return ComponentStatistics(
            name=self.name,
            role="evaluator",
            host=self._host,
            time=self._clock.read(),
            generation=self._settings.value.generation,
        ).with_measures(EvaluatorMeasures(**self._counters))

    def _ask(self, at_least: Version, name: str | None) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(_Request(at_least, name, answer))
        return answer

    # On the compute thread
    # ----------------------------------------------------------------------------------------------

    def _serve(self, request: _Request) -> Version | Evaluation | None:
        self._acting = self._acting or self._make_policy()
        policy, weights = self._acting
        if request.name is None or self._version < request.at_least:
            self._version = weights.refresh()
        if request.name is None:
            return self._version
        return self._play(policy, request.name, request.answer.cancelled)

    def _play(self, policy: Policy, name: str, given_up: Callable[[], bool]) -> Evaluation | None:
        config = self._settings.value.config
        planned, num_envs = evaluation_named(config, name), config.evaluation.num_envs
        self._metrics.take()  # of an evaluation that ended early
        # An environment that does not close must not lose the evaluation or block a shared thread.
        episodes = with_environment(
            lambda: self._make_environment(planned.env, min(num_envs, planned.episodes)),
            lambda environment: play(
                policy,
                environment,
                replace(environment.spec, action_mask=self._spec.action_mask),
                episodes=planned.episodes,
                seed=environment_seed(planned.seed, 0, num_envs, stream=1),
                deterministic=planned.deterministic,
                should_stop=lambda: self._compute.stopping.is_set() or given_up(),
                measured=self._metrics.add,
            ),
        )
        if episodes is None:
            return None
        returns = tuple(episode.episode_return for episode in episodes)
        if not np.isfinite(returns).all():
            raise EnvironmentFailedError(f"an episode's return is not finite: {returns}")
        lengths = tuple(episode.length for episode in episodes)
        return Evaluation(self._version, returns, lengths, name, self._metrics.take())
