"""Judging: evaluations of exactly one version, and whether the target is reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from tianflow.coordinator.checkpointing import LearnerPort
from tianflow.core.payloads import Evaluation, Version
from tianflow.errors import BrokenChannelError, EnvironmentFailedError
from tianflow.logs import logger

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
