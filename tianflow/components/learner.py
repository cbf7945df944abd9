"""batches (pulled), settings -> Learner -> weights, settled versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from tianflow.components.agreement import PolicyAgreement
from tianflow.components.learner_rank import OrderSender
from tianflow.components.schedules import schedules_in_force, settings_in_force
from tianflow.components.weights import WeightPublisher, diverged, publish_due
from tianflow.config.rules import largest_publish_lag
from tianflow.config.schedules import Elapsed
from tianflow.core.events import UpdateFinished
from tianflow.core.learning import LearningTally
from tianflow.core.payloads import Batch, Settlement, Version
from tianflow.core.statistics import (
    ComponentStatistics,
    HistogramBuilder,
    LearnerMeasures,
    StateClock,
    WeightsMeasures,
)
from tianflow.errors import EndOfChannel, RunError
from tianflow.interfaces import MeasuresDivergence, TransfersParameters

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tianflow.components.batch_trainer import BatchTrainer
    from tianflow.components.staging import StagedBatch
    from tianflow.config.model import Config
    from tianflow.core.payloads import WeightsTable
    from tianflow.hosts.compute import Compute
    from tianflow.interfaces import (
        Algorithm,
        BatchSource,
        EventPublisher,
        LearnerBatch,
        SettingsReader,
        StepResult,
        WeightsWriter,
    )


def admissible(batch: Batch, version: Version, bound: int | None) -> bool:
    """THE GUARANTEE: a trajectory whose staleness exceeds the bound is never trained on.

    The check is made immediately before use, at the learner's own version, against the bound in
    force. Admission and expiry in the ledger only avoid wasted work.
    """
    return all(
        trajectory.version.lineage == version.lineage
        and (bound is None or version.number - trajectory.version.number <= bound)
        for trajectory in batch.trajectories
    )


@dataclass(frozen=True, slots=True)
class LearnerState:
    """State of the learner in a checkpoint, at one version."""

    version: Version
    arrays: Mapping[str, NDArray[Any]]
    samples: int
    tables: Mapping[str, WeightsTable] = field(default_factory=dict)
    """Names of the parameters in ``arrays``."""


class Learner:
    """Turns each batch into one update, which creates the next version.

    Consumes: batches, settings. Produces: weights, settled versions, states for checkpoints.
    Waits: for an admissible batch; while paused or held. Unblocked by: committed trajectories;
    `SettingsReader` changes.

    Args:
        name: name of the component.
        host: name of its host process.
        source: end of the trajectories channel.
        settings: live settings.
        events: publisher of update events.
        compute: compute thread of the host.
        start: version and samples to continue from.
        trained_s: seconds of training before ``start``.
        make_trainer: builds the trainer, whose algorithm is restored to that version, on the
            compute thread.
        open_weights: opens the writer for flat weights of a number of bytes.
    """

    def __init__(
        self,
        *,
        name: str,
        host: str,
        source: BatchSource,
        settings: SettingsReader,
        events: EventPublisher,
        compute: Compute,
        start: tuple[Version, int],
        trained_s: float = 0.0,
        make_trainer: Callable[[], BatchTrainer],
        open_weights: Callable[[int], WeightsWriter],
    ) -> None:
        self.name = name
        self._host, self._source, self._settings, self._events, self._compute = (
            host,
            source,
            settings,
            events,
            compute,
        )
        self._make_trainer, self._open_weights = make_trainer, open_weights
        self._version, self._samples = start
        self._restored_samples = self._samples
        self._trained_before_s = trained_s
        self._first_batch: float | None = None
        self._learning_rate: float | None = None
        self._clock = StateClock()
        self._wake = asyncio.Event()
        self._prefetched: asyncio.Task[Batch] | None = None
        self._staging: Compute | None = None
        """The thread that stages the next batch during an update; None if the learner does not."""
        self._staged: StagedBatch | None = None
        """`_prefetched` on the learner's device."""
        self._states: list[asyncio.Future[LearnerState]] = []
        self._rests: list[asyncio.Future[Version]] = []
        self._update_seconds, self._copy_seconds = HistogramBuilder(), HistogramBuilder()
        self._gauges: dict[str, float] = {}
        self._learning = LearningTally(group="train", source="algorithm")
        self._agreement = PolicyAgreement()
        self._measures: MeasuresDivergence | None = None
        self._divergence: float | None = None
        self._consecutive_skips = 0
        self._given_back = 0
        self._trained = 0
        self._ended = False
        self._algorithm: Algorithm
        self._trainer: BatchTrainer
        self._orders: OrderSender
        self._publisher: WeightPublisher

    async def run(self, started: Callable[[], None]) -> None:
        """Run until cancelled."""
        self._trainer = await self._compute.run(self._make_trainer)
        self._algorithm = self._trainer.algorithm
        self._orders = OrderSender(self._trainer.ranks)
        if self._trainer.stages_ahead:
            self._staging = self._compute.beside("staging")
        if self._settings.value.config.weights.publish == "divergence":
            self._measures = self._require_measuring()
        flat = await self._compute.run(self._newest_flat)
        self._publisher = WeightPublisher(writer=self._open_weights(flat.nbytes))
        self._publisher.publish(self._version, flat)
        self._source.opened(self._version)
        started()
        unsubscribe = self._settings.on_change(self._wake.set)
        try:
            while True:
                await self._update(await self._next_batch())
        finally:
            unsubscribe()
            if self._prefetched is not None:
                self._prefetched.cancel()
            if self._staging is not None:
                self._staging.close()

    def state(self) -> asyncio.Future[LearnerState]:
        """State of the learner, taken at the next boundary between two updates."""
        future: asyncio.Future[LearnerState] = asyncio.get_running_loop().create_future()
        self._states.append(future)
        self._wake.set()
        return future

    def rest(self) -> asyncio.Future[Version]:
        """The newest version, published at the next boundary.

        There `LiveSettings.hold_learner` holds the learner.
        """
        future: asyncio.Future[Version] = asyncio.get_running_loop().create_future()
        self._rests.append(future)
        self._wake.set()
        return future

    def statistics(self) -> ComponentStatistics:
        """Times, counters, and statistics of the last update."""
        found = ComponentStatistics(
            name=self.name,
            role="learner",
            host=self._host,
            time=self._clock.read(),
            generation=self._settings.value.generation,
            gauges=dict(self._gauges),
            learning=self._learning.read(),
        ).with_measures(
            LearnerMeasures(
                samples=float(self._samples - self._restored_samples),
                given_back=float(self._given_back),
                refused_statistics=float(self._learning.refused),
                update_seconds=self._update_seconds.read(),
                copy_seconds=self._copy_seconds.read(),
                learning_rate=self._learning_rate,
                kl=self._gauges.get("kl"),
                ess_ratio=self._gauges.get("ess_ratio"),
                fresh_log_ratio=self._agreement.newest,
            )
        )
        if not hasattr(self, "_publisher"):
            return found
        publisher = self._publisher
        return found.with_measures(
            WeightsMeasures(
                published=float(publisher.published),
                skipped=float(publisher.skipped),
                weights_bytes=float(publisher.nbytes),
                divergence=self._divergence,
                publish_seconds=publisher.seconds.read(),
            )
        )

    # Waiting
    # ----------------------------------------------------------------------------------------------

    async def _next_batch(self) -> Batch:
        """The next admissible batch. Pulled one update in advance if the bound permits it."""
        while True:
            # cleared before the check, so that a later event repeats the check
            self._wake.clear()
            await self._boundary()
            if self._prefetched is None and not self._ended and not self._updates_done():
                self._prefetched = self._pull(self._version)
            if self._prefetched is None or not self._prefetched.done():
                self._clock.enter(self._waiting_for())
                await self._wake.wait()
                continue
            try:
                batch = self._prefetched.result()
            except EndOfChannel:
                self._ended, self._prefetched = True, None
                continue
            if self._is_paused():
                self._clock.enter("paused")
                await self._wake.wait()
                continue
            self._prefetched = None
            if admissible(batch, self._version, self._settings.value.bound):
                return batch
            self._given_back += 1
            if (staged := self._take_staged()) is not None:
                staged.release()
            self._source.give_back(batch)

    def _is_paused(self) -> bool:
        return self._settings.value.paused or self._settings.value.hold_learner

    def _waiting_for(self) -> str:
        if self._ended or self._updates_done():
            return "ended"
        return "paused" if self._is_paused() else "waiting:batch"

    def _updates_done(self) -> bool:
        limit = self._settings.value.config.run.max_updates
        return limit is not None and self._version.number >= limit

    def _pull(self, for_version: Version) -> asyncio.Task[Batch]:
        """Request the batch for ``for_version``. `_wake` is set when it has arrived."""
        pulled = asyncio.create_task(self._source.next_batch(for_version))
        if self._staging is not None:
            arrived, pulled = pulled, asyncio.create_task(self._stage(pulled, self._staging))
            # where the wait is cancelled before it began, too
            pulled.add_done_callback(lambda _: arrived.cancel())
        pulled.add_done_callback(lambda _: self._wake.set())
        return pulled

    async def _stage(self, pulled: asyncio.Task[Batch], staging: Compute) -> Batch:
        """The batch that is ``pulled``, after it was copied to the learner's device. It may still
        be refused.
        """
        batch = await pulled
        self._staged = await staging.run(lambda: self._stage_on_all_ranks(batch))
        return batch

    def _stage_on_all_ranks(self, batch: Batch) -> StagedBatch:
        """Runs on the thread that stages."""
        self._orders.send_ahead(batch.trajectories)
        return self._trainer.stage(batch.trajectories)

    def _take_staged(self) -> StagedBatch | None:
        staged, self._staged = self._staged, None
        return staged

    async def _boundary(self) -> None:
        """Serve requests for the state, and publish at once if a changed bound requires it."""
        while self._states:
            future = self._states.pop(0)
            self._clock.enter("checkpoint")
            arrays = await self._compute.run(self._algorithm.state_dict)
            named = isinstance(self._algorithm, TransfersParameters)
            tables = cast("TransfersParameters", self._algorithm).tables if named else {}
            if not future.done():
                future.set_result(LearnerState(self._version, arrays, self._samples, tables))
        bound = largest_publish_lag(self._settings.value.config, self._settings.value.bound)
        behind = self._version.number - self._publisher.version.number
        if (self._rests and behind) or (bound is not None and behind > bound):
            self._publisher.publish(self._version, await self._compute.run(self._newest_flat))
            self._source.published(self._version)
        while self._rests:
            future_version = self._rests.pop()
            if not future_version.done():
                future_version.set_result(self._version)

    # Computing
    # ----------------------------------------------------------------------------------------------

    async def _update(self, batch: Batch) -> None:
        staged = self._take_staged()  # the next batch may be staged during this update
        config = self._settings.value.config
        bound = self._settings.value.bound
        if self._may_pull_ahead(config, bound):
            self._prefetched = self._pull(Version(self._version.lineage, self._version.number + 1))
        self._clock.enter("busy")
        began = time.monotonic()
        result, flat = await self._compute.run(lambda: self._compute_update(batch, staged, bound))
        if self._compute.stopping.is_set():
            raise asyncio.CancelledError
        if config.learner.slowdown:
            await asyncio.sleep((time.monotonic() - began) * config.learner.slowdown)
        seconds = time.monotonic() - began
        self._version = Version(self._version.lineage, self._version.number + 1)
        self._samples += result.samples
        self._count_skipped(result)
        published = self._publisher.offer(self._version, flat)
        tickets = tuple(trajectory.ticket for trajectory in batch.trajectories)
        self._source.settle(Settlement(self._version, tickets, bound, published, not result.finite))
        self._trained += len(tickets)
        self._update_seconds.add(seconds)
        self._gauges = dict(result.statistics)
        self._events.publish(
            UpdateFinished(self._version.number, seconds, result.samples, dict(result.statistics))
        )

    def _may_pull_ahead(self, config: Config, bound: int | None) -> bool:
        """False at bound 0, because a prefetched batch is one version older at its use.

        It is also False in deterministic runs, and before the last update.
        """
        last = (
            config.run.max_updates is not None
            and self._version.number + 1 >= config.run.max_updates
        )
        return (
            config.learner.prefetch > 0 and bound != 0 and not config.run.deterministic and not last
        )

    def _compute_update(
        self, batch: Batch, staged: StagedBatch | None, bound: int | None
    ) -> tuple[StepResult, NDArray[np.uint8] | None]:
        """Train on the batch, with all ranks. Runs on the compute thread.

        Returns the result, and the new weights if they must be published under ``bound``.
        """
        live = self._settings.value
        config, elapsed = live.config, self._elapsed(batch, time.monotonic())
        self._orders.send(live, batch.trajectories, elapsed, staged=staged is not None)
        trained = self._trainer.train(
            config, batch.trajectories, elapsed, self._compute.stopping.is_set, staged
        )
        result, staged, settings = trained
        self._copy_seconds.add(staged.copy_s)
        self._learning_rate = settings.learning_rate
        self._agreement.check(
            config=config,
            algorithm=self._algorithm,
            version=self._version,
            batch=batch,
            arrays=staged.batch,
            result=result,
        )
        in_force = {
            **settings_in_force(settings),
            **schedules_in_force(config, self._version.number, batch.beta),
        }
        result = self._recorded(result, in_force)
        due = self._is_due(config, staged.batch, bound)
        staged.release()
        return result, self._newest_flat() if due else None

    def _recorded(self, result: StepResult, in_force: Mapping[str, float]) -> StepResult:
        """``result`` with numbers as statistics, which count towards the means of the run.
        ``in_force`` has those of schedules.

        Those of an undone update do not count: they describe a step that was not taken.
        """
        if not result.statistics:
            return result
        numbers = self._learning.accept({**in_force, **result.statistics})
        if result.finite:
            self._learning.add(numbers)
        return replace(result, statistics=numbers)

    def _is_due(self, config: Config, batch: LearnerBatch, bound: int | None) -> bool:
        """True if the version after the update on ``batch`` must be published."""
        version, published = self._version.number + 1, self._publisher.version.number
        weights, moved = config.weights, True
        if self._measures is not None and version - published >= weights.publish_interval_updates:
            self._divergence = self._measures.divergence(batch, weights.divergence_states)
            moved = diverged(self._divergence, weights.divergence_nats)
        return publish_due(
            version=version,
            published=published,
            interval=weights.publish_interval_updates,
            bound=largest_publish_lag(config, bound),
            moved=moved,
        )

    def _newest_flat(self) -> NDArray[np.uint8]:
        """The weights of a version that is published now. Runs on the compute thread."""
        if self._measures is not None:
            self._measures.retain_policy()
        return self._algorithm.flat()

    def _require_measuring(self) -> MeasuresDivergence:
        algorithm: object = self._algorithm
        if isinstance(algorithm, MeasuresDivergence):
            return algorithm
        raise RunError(
            self.name,
            f"weights.publish = divergence is not supported by {type(algorithm).__name__}",
            "it has no retain_policy() and divergence(); interval is accepted",
        )

    def _elapsed(self, batch: Batch, now: float) -> Elapsed:
        """How far the run is at an update on ``batch`` that begins at ``now``."""
        if self._first_batch is None:
            self._first_batch = now
        # replay trains on each step many times
        steps = self._samples if batch.env_steps is None else batch.env_steps
        seconds = self._trained_before_s + now - self._first_batch
        return Elapsed(steps, self._version.number, seconds)

    def _count_skipped(self, result: StepResult) -> None:
        self._consecutive_skips = 0 if result.finite else self._consecutive_skips + 1
        limit = self._settings.value.config.learner.max_nonfinite_updates
        if self._consecutive_skips > limit:
            raise RunError(
                self.name,
                f"{self._consecutive_skips} consecutive updates were not finite",
                "the loss or its gradient was NaN or infinite",
            )
