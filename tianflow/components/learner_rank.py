"""orders of rank 0, trajectories in slots -> LearnerRank -> gradients, by the group of ranks."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgpack

from tianflow.channels.messages import MESSAGES, PutSettings, StageBatch, TrainOnBatch
from tianflow.config.schedules import Elapsed
from tianflow.core.statistics import ComponentStatistics, StateClock
from tianflow.errors import RankLostError

if TYPE_CHECKING:
    from tianflow.algorithms.common.ranks import Ranks
    from tianflow.components.batch_trainer import BatchTrainer
    from tianflow.components.staging import StagedBatch
    from tianflow.config.model import Config
    from tianflow.core.payloads import Trajectory
    from tianflow.hosts.compute import Compute
    from tianflow.interfaces import LiveSettings, SettingsReader


class LearnerRank:
    """Trains on its part of each batch, beside the learner, which is rank 0.

    The learner pulls, decides whether a batch may be used, publishes and settles. It sends an
    order for each update, with the settings of that update, so all ranks compute the same one. The
    next batch may come ahead of its order, so that all ranks stage it during an update.

    Consumes: orders, trajectories. Produces: gradients and priorities of its part.
    Waits: for an order. Unblocked by: the learner; the end of its process.

    Args:
        name: name of the component, e.g. ``"learner-1"``.
        host: name of its host process.
        settings: live settings, for statistics only.
        compute: compute thread of the host.
        make: joins the ranks, and builds the trainer with the state of rank 0. Runs on the compute
            thread.
    """

    def __init__(
        self,
        *,
        name: str,
        host: str,
        settings: SettingsReader,
        compute: Compute,
        make: Callable[[], BatchTrainer],
    ) -> None:
        self.name = name
        self._host, self._settings, self._compute, self._make = host, settings, compute, make
        self._clock = StateClock()
        # The batch of the next order, and those before it that the learner has refused. None: the
        # thread that stages has ended.
        self._staged: queue.SimpleQueue[StagedBatch | None] = queue.SimpleQueue()

    async def run(self, started: Callable[[], None]) -> None:
        """Run until cancelled, or until another rank is gone."""
        trainer = await self._compute.run(self._make)
        staging = self._compute.beside("staging")
        started()
        try:
            await asyncio.gather(
                self._compute.run(lambda: self._follow(trainer)),
                staging.run(lambda: self._stage(trainer)),
            )
        finally:
            staging.close()

    def statistics(self) -> ComponentStatistics:
        """Times."""
        return ComponentStatistics(
            name=self.name,
            role="rank",
            host=self._host,
            time=self._clock.read(),
            generation=self._settings.value.generation,
        )

    def _follow(self, trainer: BatchTrainer) -> None:
        config: Config | None = None
        while not self._compute.stopping.is_set():
            self._clock.enter("waiting:order")
            order = receive_order(trainer.ranks)
            if order.settings is not None:
                config = order.settings.live.config
            assert config is not None
            self._clock.enter("busy")
            elapsed = Elapsed(order.steps, order.updates, order.seconds)
            trained = trainer.train(
                config,
                order.trajectories,
                elapsed,
                self._compute.stopping.is_set,
                self._staged_batch(trainer, order) if order.staged else None,
            )
            trained.staged.release()

    def _stage(self, trainer: BatchTrainer) -> None:
        """Stage the batches that rank 0 has pulled. Runs on a thread of its own."""
        try:
            while not self._compute.stopping.is_set():
                self._staged.put(trainer.stage(receive_batch(trainer.ranks.ahead)))
        finally:
            self._staged.put(None)

    def _staged_batch(self, trainer: BatchTrainer, order: TrainOnBatch) -> StagedBatch:
        """This rank's part of the batch of ``order``. Batches before it were refused."""
        wanted = trainer.own(order.trajectories)
        while (staged := self._staged.get()) is not None:
            if staged.trajectories == wanted:
                return staged
            staged.release()
        raise RankLostError("the thread that stages batches has ended")


class OrderSender:
    """Sends the orders of rank 0. The settings go with an order if they have changed since the last
    one.

    Args:
        ranks: that receive them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sent: LiveSettings | None = None

    def send(
        self,
        settings: LiveSettings,
        trajectories: tuple[Trajectory, ...],
        elapsed: Elapsed,
        *,
        staged: bool = False,
    ) -> None:
        """Order an update with ``settings`` on the batch of ``trajectories``. ``staged``: it was
        sent ahead.
        """
        if self._ranks.size == 1:
            return
        changed = PutSettings.of(settings, 0) if settings is not self._sent else None
        self._sent = settings
        order = TrainOnBatch(*elapsed, trajectories, changed, staged)
        self._ranks.send(msgpack.packb(MESSAGES.encode(order)))

    def send_ahead(self, trajectories: tuple[Trajectory, ...]) -> None:
        """Let the other ranks stage the batch of ``trajectories``. Called on another thread than
        `send`.
        """
        if self._ranks.size > 1:
            self._ranks.ahead.send(msgpack.packb(MESSAGES.encode(StageBatch(trajectories))))


def receive_order(ranks: Ranks) -> TrainOnBatch:
    """The next order of rank 0."""
    order = MESSAGES.decode(msgpack.unpackb(ranks.receive(), strict_map_key=False))
    assert isinstance(order, TrainOnBatch)
    return order


def receive_batch(ranks: Ranks) -> tuple[Trajectory, ...]:
    """The next batch that rank 0 has sent ahead."""
    found = MESSAGES.decode(msgpack.unpackb(ranks.receive(), strict_map_key=False))
    assert isinstance(found, StageBatch)
    return found.trajectories
