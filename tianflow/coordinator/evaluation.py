"""finished episodes, evaluations -> TargetTracker -> whether the target is reached, and
since when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tianflow.coordinator.counters import EpisodeTally
from tianflow.coordinator.judge import EvaluationScheduler
from tianflow.coordinator.lifecycle import Lifecycle
from tianflow.core.payloads import Episode


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
