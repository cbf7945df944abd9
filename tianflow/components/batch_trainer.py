"""BatchTrainer: from the slots of a batch to one update of an algorithm, on this rank's part."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tianflow.algorithms.common.ranks import ALONE, Ranks
from tianflow.components.staging import StagedBatch
from tianflow.config.schedules import settings_at
from tianflow.interfaces import FollowsSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tianflow.components.stacking import BatchStacker, DrawStacker
    from tianflow.components.staging import SlotStager
    from tianflow.config.model import AlgorithmSettings, Config
    from tianflow.config.schedules import Elapsed
    from tianflow.core.payloads import Trajectory
    from tianflow.interfaces import Algorithm, LearnerBatch, StepResult

View = Callable[["Trajectory"], "Mapping[str, NDArray[Any]]"]
"""The arrays of a taken trajectory, or draw, in its slot."""


class TrainedBatch(NamedTuple):
    """What one update was made of, and its result.

    ``staged``: this rank's part of the batch, which the caller releases. ``settings``: those in
    force.
    """

    result: StepResult
    staged: StagedBatch
    settings: AlgorithmSettings

    @property
    def arrays(self) -> LearnerBatch:
        """This rank's part of the batch."""
        return self.staged.batch


class BatchTrainer:
    """Copies this rank's part of a batch out of its slots, and trains on it. Called on the compute
    thread.

    Args:
        algorithm: restored to the version that training continues from.
        make_stacker: makes the copier of some trajectories out of their slots.
        view: see `View`.
        ranks: this learner's processes.
        draws: whether batches are draws from replay, with priorities.
        stager: copies instead of stackers, as long as it can pin the slots.
    """

    def __init__(
        self,
        *,
        algorithm: Algorithm,
        make_stacker: Callable[[int], BatchStacker | DrawStacker],
        view: View,
        ranks: Ranks = ALONE,
        draws: bool = False,
        stager: SlotStager | None = None,
    ) -> None:
        self.algorithm, self.ranks, self._stager = algorithm, ranks, stager
        follows: object = algorithm
        self._follows = follows if isinstance(follows, FollowsSettings) else None
        self._make_stacker, self._view, self._draws = make_stacker, view, draws
        self._stacker: BatchStacker | DrawStacker | None = None

    @property
    def stages_ahead(self) -> bool:
        """True if `stage` is to be called on another thread, during the update before."""
        return self._stager is not None

    def own(self, trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        """Those that this rank trains on. All ranks share the columns of a draw, or the
        trajectories of a batch.
        """
        return tuple(
            trajectories if self._draws else trajectories[self.ranks.share(len(trajectories))]
        )

    def stage(self, trajectories: Sequence[Trajectory]) -> StagedBatch:
        """This rank's part of a batch on the learner's device."""
        own = self.own(trajectories)
        if self._stager is not None and self._stager.follow():
            return self._stager.stage(own)
        began = time.monotonic()
        if self._stacker is None or self._stacker.trajectories != len(own):
            self._stacker = self._make_stacker(len(own))
        for index, trajectory in enumerate(own):
            self._stacker.fill(index, self._view(trajectory), trajectory.length)
        batch = self._stacker.batch()
        return StagedBatch(own, batch, time.monotonic() - began)

    def train(
        self,
        config: Config,
        trajectories: Sequence[Trajectory],
        elapsed: Elapsed,
        should_stop: Callable[[], bool],
        staged: StagedBatch | None = None,
    ) -> TrainedBatch:
        """One update with the settings that are in force at ``elapsed``.

        Args:
            config: of this update.
            trajectories: of the whole batch.
            elapsed: how far the run is.
            should_stop: asked once a step or minibatch; not asked by one of several ranks, because
                all would have to stop at the same place.
            staged: the result of `stage` for these ``trajectories``; None: they are staged now.
        """
        staged = self.stage(trajectories) if staged is None else staged
        settings = settings_at(config, elapsed)
        self.algorithm.set_live(settings.learning_rate, settings.entropy_cost)
        if self._follows is not None:
            self._follows.set_settings(settings, int(elapsed.updates))
        if self.ranks.size > 1:
            result = self.algorithm.step(staged.batch)
        else:
            result = self.algorithm.step(staged.batch, should_stop)
        if result.priorities is not None and result.finite:
            new = self._view(trajectories[0])["priority"]
            new[self.ranks.share(len(new))] = result.priorities
        if self._draws:
            self.ranks.wait_for_all()
        return TrainedBatch(result, staged, settings)
