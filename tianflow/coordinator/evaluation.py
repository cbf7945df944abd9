"""finished episodes, evaluations -> TargetTracker -> whether the target is reached, and
since when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from tianflow.coordinator.checkpointing import LearnerPort
from tianflow.coordinator.counters import EpisodeTally
from tianflow.coordinator.lifecycle import Lifecycle
from tianflow.core.payloads import Episode, Evaluation, Version
from tianflow.errors import BrokenChannelError, EnvironmentFailedError
from tianflow.logs import logger


class TargetTracker:
    """Finds out whether a run has reached its target return, and ends it then.

    Episodes of training, and evaluations, only say that it seems so: `confirm` has exactly the
    newest version judged.

    Args:
        life: of the run.
        judge: evaluates.
        target: mean return to reach; None: there is no target.
        episodes: finished before a resume.
    """

    def __init__(
        self,
        *,
        life: Lifecycle,
        judge: EvaluationScheduler,
        target: Callable[[], float | None],
        episodes: int,
    ) -> None:
        self._life, self._judge, self._target = life, judge, target
        self.episodes = EpisodeTally(count=episodes)
        """Of training."""
        self.reached = False
        """True once an evaluation has confirmed it."""
        self.time_to_target_s: float | None = None
        """Seconds of training until the target was first seen; None: not yet."""
        self._evaluated_at = episodes

    @property
    def busy(self) -> bool:
        """True while an evaluation goes on."""
        return self._judge.busy

    def episodes_finished(self, episodes: Sequence[Episode]) -> None:
        """Count ``episodes``; where their mean return reaches the target, have that confirmed."""
        self.episodes.add(episodes)
        target, mean = self._target(), self.episodes.mean
        if target is None or mean is None or mean < target or self._life.state != "running":
            return
        self._note_time()
        fresh = self.episodes.count - self._evaluated_at
        if not self.busy and fresh >= len(self.episodes.returns):
            self._evaluated_at = self.episodes.count
            self._life.go_on_with(self._confirm(target))

    async def evaluate(self) -> None:
        """A good one is confirmed at once: where actors explore, the returns of training never show
        that the target is reached.
        """
        target = self._target()
        if (
            await self._judge.judge(target=target)
            and target is not None
            and self._life.state == "running"
        ):
            await self._confirm(target)

    async def evaluate_last(self) -> None:
        """EvaluationScheduler the version that the run ends with, unless it was confirmed
        already.
        """
        if not self.reached:
            await self._judged_to_reach(self._target())

    async def _confirm(self, target: float) -> None:
        """Training seems to have reached the target: judge exactly the newest version, and end if
        it has.
        """
        if await self._judged_to_reach(target):
            self._life.end("done", "target_return")

    async def _judged_to_reach(self, target: float | None) -> bool:
        """EvaluationScheduler the newest version; True, and noted, if its mean return reached
        ``target``.
        """
        reached = await self._judge.judge(target=target, hold=True)
        if reached:
            self.reached = True
            self._note_time()
        return reached

    def _note_time(self) -> None:
        if self.time_to_target_s is None:
            self.time_to_target_s = self._life.training_s


log = logger("judge")


class EvaluatorPort(Protocol):
    """The way to the evaluator, wherever it runs."""

    async def evaluate(self, at_least: Version) -> Evaluation:
        """Play with the newest version, which is ``at_least`` this one."""


class EvaluationScheduler:
    """Asks for evaluations, one at a time.

    Args:
        ports: the ways to learner and evaluator, None where one is not there.
        hold: holds the learner at its next boundary, or lets it go.
        published: the newest published version.
        timeout_s: how long an evaluation may take; the evaluator is given up then.
        give_up: ends the evaluator.
        judged: told of every evaluation.
    """

    def __init__(
        self,
        *,
        ports: Callable[[], tuple[LearnerPort | None, EvaluatorPort | None]],
        hold: Callable[[bool], None],
        published: Callable[[], Version],
        timeout_s: float,
        give_up: Callable[[], None],
        judged: Callable[[Evaluation], None],
    ) -> None:
        self._ports, self._hold, self._published = ports, hold, published
        self._timeout_s, self._give_up, self._judged = timeout_s, give_up, judged
        self._judging = asyncio.Lock()
        self.failures = 0
        """Evaluations that came to nothing."""
        self.newest: dict[str, float] = {}
        """``version``, ``mean_return`` and ``episodes`` of the newest evaluation; empty before the
        first.
        """

    @property
    def busy(self) -> bool:
        """True while an evaluation goes on."""
        return self._judging.locked()

    async def judge(self, *, target: float | None = None, hold: bool = False) -> bool:
        """Evaluate; True if the mean return reached ``target``. A failure is logged and counted,
        and is no success.

        With ``hold`` it is exactly the learner's newest version, which rests meanwhile; it goes on
        resting after a success, so that what is saved then is what was judged.
        """
        async with self._judging:
            reached = False
            try:
                if hold:
                    self._hold(True)
                self._record(await self._evaluate(hold))
                reached = target is not None and self.newest["mean_return"] >= target
            except (BrokenChannelError, EnvironmentFailedError) as error:
                self.failures += 1
                log.warning("an evaluation failed", error=str(error))
            finally:
                if hold and not reached:
                    self._hold(False)
            return reached

    async def _evaluate(self, hold: bool) -> Evaluation:
        learner, evaluator = self._ports()
        if learner is None or evaluator is None:
            raise BrokenChannelError("evaluator or learner is not there")
        at_least = await learner.rest() if hold else self._published()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await evaluator.evaluate(at_least)
        except TimeoutError:
            self._give_up()
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
        self._judged(evaluation)
