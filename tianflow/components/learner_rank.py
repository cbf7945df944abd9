"""orders of rank 0, trajectories in slots -> LearnerRank -> gradients, by the group of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgpack

from tianflow.channels.messages import MESSAGES, PutSettings, TrainOnBatch
from tianflow.config.schedules import Elapsed
from tianflow.core.statistics import ComponentStatistics, StateClock

if TYPE_CHECKING:
    from tianflow.algorithms.common.ranks import Ranks
    from tianflow.components.batch_trainer import BatchTrainer
    from tianflow.config.model import Config
    from tianflow.core.payloads import Trajectory
    from tianflow.hosts.compute import Compute
    from tianflow.interfaces import LiveSettings, SettingsReader


class LearnerRank:
    """Trains on its part of each batch, beside the learner, which is rank 0.

    The learner pulls, decides whether a batch may be used, publishes and settles. It sends an
    order for each update, with the settings of that update, so all ranks compute the same one.

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

    async def run(self, started: Callable[[], None]) -> None:
        """Run until cancelled, or until another rank is gone."""
        trainer = await self._compute.run(self._make)
        started()
        await self._compute.run(lambda: self._follow(trainer))

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
                config, order.trajectories, elapsed, self._compute.stopping.is_set
            )
            trained.staged.release()


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
        self, settings: LiveSettings, trajectories: tuple[Trajectory, ...], elapsed: Elapsed
    ) -> None:
        """Order an update with ``settings`` on the batch of ``trajectories``."""
        if self._ranks.size == 1:
            return
        changed = PutSettings.of(settings, 0) if settings is not self._sent else None
        self._sent = settings
        order = TrainOnBatch(*elapsed, trajectories, changed)
        self._ranks.send(msgpack.packb(MESSAGES.encode(order)))


def receive_order(ranks: Ranks) -> TrainOnBatch:
    """The next order of rank 0."""
    order = MESSAGES.decode(msgpack.unpackb(ranks.receive(), strict_map_key=False))
    assert isinstance(order, TrainOnBatch)
    return order
