"""EvaluationScheduler and TargetTracker: evaluations, one at a time, and whether a run has reached
its target return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tianflow.coordinator.counters import EpisodeTally
from tianflow.errors import BrokenChannelError, EnvironmentFailedError
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.coordinator.control import LiveConfig
    from tianflow.coordinator.lifecycle import Lifecycle
    from tianflow.core.payloads import Episode, Evaluation, Version
    from tianflow.interfaces import EvaluatorPort, LearnerPort

log = logger("evaluation")


class EvaluationScheduler:
    """Runs evaluations, one at a time.

    Args:
        ports: the ways to learner and evaluator, None where a port is missing.
        live: settings that hold the learner.
        published: the newest published version.
        timeout_s: limit of one evaluation.
        timed_out: called when an evaluation takes longer; restarts the evaluator.
        evaluated: receives every evaluation.
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
    ) -> None:
        self._ports, self._live, self._published = ports, live, published
        self._timeout_s, self._timed_out, self._evaluated = timeout_s, timed_out, evaluated
        self._lock = asyncio.Lock()
        self.failures = 0
        """Evaluations without a result."""
        self.newest: dict[str, float] = {}
        """``version``, ``mean_return`` and ``episodes`` of the newest evaluation; empty before the
        first.
        """

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
            try:
                if hold:
                    self._live.hold_learner()
                self._record(await self._play(hold))
                reached = target is not None and self.newest["mean_return"] >= target
            except (BrokenChannelError, EnvironmentFailedError) as error:
                self.failures += 1
                log.warning("an evaluation failed", error=str(error))
            finally:
                if hold and not reached:
                    self._live.release_learner()
            return reached

    async def _play(self, hold: bool) -> Evaluation:
        learner, evaluator = self._ports()
        if learner is None or evaluator is None:
            raise BrokenChannelError("evaluator or learner is missing")
        at_least = await learner.rest() if hold else self._published()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await evaluator.evaluate(at_least)
        except TimeoutError:
            self._timed_out()
            raise BrokenChannelError(
                f"it took longer than evaluation.timeout_s = {self._timeout_s:g} s"
            ) from None

    def _record(self, evaluation: Evaluation) -> None:
        count = len(evaluation.returns)
        mean = sum(evaluation.returns) / count
        self.newest = {"version": evaluation.version.number, "mean_return": mean, "episodes": count}
        log.info(
            "evaluated",
            version=evaluation.version.number,
            mean_return=round(mean, 2),
            episodes=count,
        )
        self._evaluated(evaluation)


class TargetTracker:
    """Finds out whether a run has reached its target return, and then ends it.

    Episodes of training, and evaluations between, are only a hint: an evaluation of exactly the
    newest version confirms it.

    Args:
        lifecycle: of the run.
        evaluation: evaluates.
        target: mean return to reach; None: the run has no target.
        episodes: number of episodes before a resume.
    """

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        evaluation: EvaluationScheduler,
        target: Callable[[], float | None],
        episodes: int,
    ) -> None:
        self._lifecycle, self._evaluation, self._target = lifecycle, evaluation, target
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
        """Evaluate the newest published version. A result that reaches the target is confirmed at
        once: where actors explore, the returns of training may never reach it.
        """
        target = self._target()
        if (
            await self._evaluation.evaluate(target=target)
            and target is not None
            and self._lifecycle.state == "running"
        ):
            await self._confirm(target)

    async def evaluate_last(self) -> None:
        """Evaluate the version that the run ends with, unless it was confirmed already."""
        if not self.reached:
            await self._reaches(self._target())

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
