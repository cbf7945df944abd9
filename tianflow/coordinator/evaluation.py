"""EvaluationSchedule, EvaluationScheduler and TargetTracker: when evaluations are due, evaluations
one at a time, and whether a run has reached its target return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tianflow.config.evaluations import MAIN
from tianflow.coordinator.counters import EpisodeTally
from tianflow.errors import BrokenChannelError, EnvironmentFailedError
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.config.model import EvaluationSettings
    from tianflow.coordinator.best_checkpoint import BestCheckpoint, Candidate
    from tianflow.coordinator.control import LiveConfig
    from tianflow.coordinator.lifecycle import Lifecycle
    from tianflow.core.payloads import Episode, Evaluation, Version
    from tianflow.interfaces import EvaluatorPort, LearnerPort

log = logger("evaluation")
T = TypeVar("T")


class EvaluationSchedule:
    """When the next evaluation is due: by time, by environment steps, or by both.

    Args:
        now: monotonic time at which the run begins.
        env_steps: steps before a resume.
    """

    def __init__(self, *, now: float, env_steps: int) -> None:
        self._next_s, self._steps = now, env_steps

    def take(self, settings: EvaluationSettings, *, now: float, env_steps: int) -> bool:
        """True if an evaluation is due; the caller begins it now. A multiple of ``every_steps``
        that was passed makes one due.
        """
        every = settings.every_steps
        by_time = settings.every_s is not None and now >= self._next_s
        by_steps = every is not None and env_steps // every > self._steps // every
        if by_time and settings.every_s is not None:
            self._next_s = now + settings.every_s
        if by_time or by_steps:
            self._steps = env_steps
        return by_time or by_steps


class EvaluationScheduler:
    """Runs evaluations, one at a time.

    Args:
        ports: the ways to learner and evaluator, None where a port is missing.
        live: settings that hold the learner.
        published: the newest published version.
        timeout_s: limit of one evaluation.
        timed_out: called when an evaluation takes longer; restarts the evaluator.
        evaluated: receives every evaluation.
        best: sees to the checkpoint of the best version.
    """

    def __init__(
        self,
        *,
        ports: Callable[[], tuple[LearnerPort | None, EvaluatorPort | None]],
        live: LiveConfig,
        published: Callable[[], Version],
        timeout_s: float,
        timed_out: Callable[[], None],
        evaluated: Callable[[Evaluation], None],
        best: BestCheckpoint,
    ) -> None:
        self._ports, self._live, self._published = ports, live, published
        self._timeout_s, self._timed_out, self._evaluated = timeout_s, timed_out, evaluated
        self._best = best
        self._lock = asyncio.Lock()
        self._loaded: Version | None = None
        self.failures = 0
        """Evaluations without a result."""
        self.newest: dict[str, float] = {}
        """``version``, ``mean_return``, ``episodes`` and metrics of the newest main evaluation;
        empty before the first.
        """
        self.further: dict[str, dict[str, float]] = {}
        """The same of each further evaluation, by name."""

    @property
    def busy(self) -> bool:
        """True while an evaluation runs."""
        return self._lock.locked()

    async def evaluate(self, *, target: float | None = None, hold: bool = False) -> bool:
        """Evaluate; True if the mean return reached ``target``. A failure is logged, counted, and
        False.

        ``hold``: evaluate exactly the learner's newest version, while the learner rests. It stays
        at rest after True, so that the checkpoint holds the version that was evaluated.
        """
        async with self._lock:
            reached = False
            # A deterministic run has a checkpoint at each barrier, and an ending one writes its
            # last checkpoint afterwards.
            write = not (self._live.config.run.deterministic or self._live.held_for_good)
            try:
                if hold:
                    self._live.hold_learner()
                async with self._best.candidate(write=write) as candidate:
                    self._loaded = await self._load(candidate, hold=hold)
                    evaluation = await self._play(self._loaded, MAIN)
                    self._record(evaluation)
                    await self._best.consider(evaluation, candidate)
                reached = target is not None and evaluation.mean_return >= target
            except (BrokenChannelError, EnvironmentFailedError) as error:
                self._count_failure(MAIN, error)
            finally:
                if hold and not reached:
                    self._live.release_learner()
            return reached

    async def evaluate_further(self, name: str) -> None:
        """Play the further evaluation ``name`` with the version of the main one before. A failure
        is logged and counted.
        """
        async with self._lock:
            try:
                self._record(await self._play(self._loaded or self._published(), name))
            except (BrokenChannelError, EnvironmentFailedError) as error:
                self._count_failure(name, error)

    async def _load(self, candidate: Candidate, *, hold: bool) -> Version:
        """The version that the evaluator has loaded. A ``candidate`` writes exactly this one."""
        learner, evaluator = self._ports()
        if learner is None or evaluator is None:
            raise BrokenChannelError("evaluator or learner is missing")
        if not hold:
            version = await self._limited(evaluator.load(self._published()))
            if not candidate.writes:
                return version
            # The learner rests for a moment only: a first load, above, may take seconds.
            self._live.hold_learner()
        try:
            version = await self._limited(evaluator.load(await learner.rest()))
            await candidate.begin(learner)
            return version
        finally:
            if not hold:
                self._live.release_learner()

    async def _play(self, version: Version, name: str) -> Evaluation:
        _, evaluator = self._ports()
        if evaluator is None:
            raise BrokenChannelError("evaluator or learner is missing")
        return await self._limited(evaluator.evaluate(version, name))

    async def _limited(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            self._timed_out()
            raise BrokenChannelError(
                f"it took longer than evaluation.timeout_s = {self._timeout_s:g} s"
            ) from None

    def _record(self, evaluation: Evaluation) -> None:
        count, mean = len(evaluation.returns), evaluation.mean_return
        found = {
            **evaluation.metrics,
            "version": evaluation.version.number,
            "mean_return": mean,
            "episodes": count,
        }
        named = {}
        if evaluation.name == MAIN:
            self.newest = found
        else:
            self.further[evaluation.name] = found
            named = {"evaluation": evaluation.name}
        log.info(
            "evaluated",
            **named,
            version=evaluation.version.number,
            mean_return=round(mean, 2),
            episodes=count,
        )
        self._evaluated(evaluation)

    def _count_failure(self, name: str, error: Exception) -> None:
        self.failures += 1
        named = {} if name == MAIN else {"evaluation": name}
        log.warning("an evaluation failed", **named, error=str(error))


class TargetTracker:
    """Finds out whether a run has reached its target return, and then ends it.

    Episodes of training, and evaluations between, are only a hint: an evaluation of exactly the
    newest version confirms it.

    Args:
        lifecycle: of the run.
        evaluation: evaluates.
        target: mean return to reach; None: the run has no target.
        further: names of the further evaluations.
        episodes: number of episodes before a resume.
    """

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        evaluation: EvaluationScheduler,
        target: Callable[[], float | None],
        further: Callable[[], Sequence[str]],
        episodes: int,
    ) -> None:
        self._lifecycle, self._evaluation, self._target = lifecycle, evaluation, target
        self._further = further
        self.episodes = EpisodeTally(count=episodes)
        """Of training."""
        self.reached = False
        """True once an evaluation has confirmed it."""
        self.time_to_target_s: float | None = None
        """Seconds of training until the target was first reached; None before."""
        self._evaluated_at = episodes

    @property
    def busy(self) -> bool:
        """True while an evaluation runs."""
        return self._evaluation.busy

    def episodes_finished(self, episodes: Sequence[Episode]) -> None:
        """Count ``episodes``. If their mean return reaches the target, start an evaluation that
        confirms it.
        """
        self.episodes.add(episodes)
        target, mean = self._target(), self.episodes.mean
        if target is None or mean is None or mean < target or self._lifecycle.state != "running":
            return
        self._note_time()
        fresh = self.episodes.count - self._evaluated_at
        if not self.busy and fresh >= len(self.episodes.returns):
            self._evaluated_at = self.episodes.count
            self._lifecycle.run_in_background(self._confirm(target))

    async def evaluate(self) -> None:
        """Evaluate the newest published version, in the main evaluation and then in the others. A
        result that reaches the target is confirmed at once: where actors explore, the returns of
        training may never reach it.
        """
        target = self._target()
        if (
            await self._evaluation.evaluate(target=target)
            and target is not None
            and self._lifecycle.state == "running"
        ):
            await self._confirm(target)
        for name in self._further():
            if self._lifecycle.state != "running" or self._lifecycle.ending.is_set():
                return
            await self._evaluation.evaluate_further(name)

    async def evaluate_last(self) -> None:
        """Evaluate the version that the run ends with, unless it was confirmed already."""
        if not self.reached:
            await self._reaches(self._target())

    async def evaluate_last_further(self, name: str) -> None:
        """Play a further evaluation with the version of `evaluate_last`."""
        await self._evaluation.evaluate_further(name)

    async def _confirm(self, target: float) -> None:
        """Evaluate exactly the newest version, and end the run if it reaches ``target``."""
        if await self._reaches(target):
            self._lifecycle.end("done", "target_return")

    async def _reaches(self, target: float | None) -> bool:
        """Evaluate exactly the newest version. True, and recorded, if its mean return reaches
        ``target``.
        """
        reached = await self._evaluation.evaluate(target=target, hold=True)
        if reached:
            self.reached = True
            self._note_time()
        return reached

    def _note_time(self) -> None:
        if self.time_to_target_s is None:
            self.time_to_target_s = self._lifecycle.training_s
