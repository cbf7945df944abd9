"""what hosts tell -> Inbox -> roster, exchange, goal and observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tianflow.channels.broadcast import Broadcast
from tianflow.coordinator.checkpointing import LearnerPort
from tianflow.coordinator.control import LiveConfig
from tianflow.coordinator.evaluation import EvaluatorPort, TargetTracker
from tianflow.coordinator.lifecycle import Lifecycle
from tianflow.coordinator.registry import ComponentRegistry
from tianflow.core.events import EnvironmentFailed, EpisodesFinished, Event, HostExited
from tianflow.core.payloads import Episode
from tianflow.core.program import HostSpec
from tianflow.core.statistics import ComponentStatistics
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.exchange.shards import ShardPort, answers
from tianflow.logs import logger

log = logger("coordinator")


class Inbox:
    """Where a launcher brings what its hosts say, and how learner and evaluator can be reached.

    Args:
        life: of the run.
        in_force: its settings.
        roster: who works.
        exchange: what a lost host held comes back there.
        goal: looks at finished episodes.
        events: for observers.
    """

    def __init__(
        self,
        *,
        life: Lifecycle,
        in_force: LiveConfig,
        roster: ComponentRegistry,
        exchange: Exchange,
        goal: TargetTracker,
        events: Broadcast,
    ) -> None:
        self._life, self._in_force, self._roster = life, in_force, roster
        self._exchange, self._goal, self._events = exchange, goal, events
        self.learner_port: LearnerPort | None = None
        """The way to the learner, set by the launcher when it makes one."""
        self.evaluator_port: EvaluatorPort | None = None
        """The way to the evaluator, likewise."""

    def component_started(self, name: str) -> None:
        """A component does its work."""
        roster = self._roster
        roster.started(name)
        actors = roster.an_actor_was_started or not self._in_force.config.actors.count
        if self._life.state == "starting" and roster.was_started("learner") and actors:
            self._life.training_begins("paused" if self._in_force.paused else "running")

    def component_ended(self, name: str) -> None:
        """A component has ended as it was asked to, while the run goes on without it."""
        if not self._life.ending.is_set():
            self._roster.forget(name)

    def report(self, statistics: ComponentStatistics) -> None:
        """A component's newest numbers."""
        self._roster.report(statistics)

    def episodes_finished(self, holder: str, episodes: Sequence[Episode]) -> None:
        """Episodes ended in a committed trajectory."""
        if episodes:
            self.publish(
                EpisodesFinished(
                    holder,
                    tuple(e.episode_return for e in episodes),
                    tuple(e.length for e in episodes),
                )
            )
            self._goal.episodes_finished(episodes)

    def shard_opened(self, index: int, incarnation: int, port: ShardPort) -> None:
        """A replay shard works, in this life of its host."""
        self._replay.shard_opened(index, incarnation, port)

    def shard_answers(self, index: int, incarnation: int) -> Callable[..., None]:
        """What takes the answers of replay shard ``index`` in this life of its host."""
        return answers(self._replay, index, incarnation)

    def publish(self, event: Event) -> None:
        """Tell observers."""
        if isinstance(event, EnvironmentFailed):
            log.warning(
                "an environment failed",
                component=event.component,
                reason=event.reason,
                error=event.message,
            )
        self._events.publish(event)

    def host_lost(self, host: HostSpec, reason: str) -> None:
        """A host is gone and reaped: what it held comes back."""
        for component in host.components:
            if component.role == "learner":
                self.learner_port, self._roster.learner_works = None, False
                self._exchange.learner_lost("stopped" if reason == "stopped" else "learner_lost")
            elif component.role == "evaluator":
                self.evaluator_port = None
            elif component.role == "replay":
                self._replay.shard_lost(
                    component.index, "stopped" if reason == "stopped" else "shard_lost"
                )
            else:
                self._exchange.holder_lost(component.name, reason)
            self._roster.forget(component.name)
        self.publish(HostExited(host.name, reason))

    @property
    def _replay(self) -> ReplayExchange:
        assert isinstance(self._exchange, ReplayExchange)
        return self._exchange
