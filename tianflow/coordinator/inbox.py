"""reports of hosts -> Inbox -> registry, exchange, target and observers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tianflow.core.events import EnvironmentFailed, EpisodesFinished, Event, HostExited
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.channels.broadcast import Broadcast
    from tianflow.channels.messages import ShardAnswer
    from tianflow.coordinator.control import LiveConfig
    from tianflow.coordinator.evaluation import TargetTracker
    from tianflow.coordinator.lifecycle import Lifecycle
    from tianflow.coordinator.registry import ComponentRegistry
    from tianflow.core.payloads import Episode
    from tianflow.core.program import HostSpec
    from tianflow.core.statistics import ComponentStatistics
    from tianflow.errors import RunError
    from tianflow.exchange.exchange import Exchange
    from tianflow.interfaces import EvaluatorPort, LearnerPort, NodesView, ShardPort

log = logger("coordinator")


class Inbox:
    """`tianflow.interfaces.HostInbox`, and the ports to learner and evaluator.

    Args:
        lifecycle: of the run.
        live: its settings.
        registry: of its components.
        exchange: gets back the tickets of a lost host.
        target: counts finished episodes.
        events: for observers.
    """

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        live: LiveConfig,
        registry: ComponentRegistry,
        exchange: Exchange,
        target: TargetTracker,
        events: Broadcast,
    ) -> None:
        self._lifecycle, self._live, self._registry = lifecycle, live, registry
        self._exchange, self._target, self._events = exchange, target, events
        self.learner: LearnerPort | None = None
        """The way to the learner; None while no host has one."""
        self.evaluator: EvaluatorPort | None = None
        """The way to the evaluator; None while no host has one."""
        self.nodes: NodesView | None = None
        """The nodes of the run; None if it has none."""

    def register_learner(self, port: LearnerPort) -> None:
        """The learner is reached by ``port``, until its host is lost."""
        self.learner = port

    def register_evaluator(self, port: EvaluatorPort) -> None:
        """The evaluator is reached by ``port``, until its host is lost."""
        self.evaluator = port

    def register_nodes(self, nodes: NodesView) -> None:
        """The run has nodes, until it ends."""
        self.nodes = nodes

    def component_started(self, name: str) -> None:
        """A component works. Training begins with the learner, the inference servers and the first
        actor.
        """
        registry = self._registry
        registry.started(name)
        actors = registry.an_actor_was_started or not self._live.config.actors.count
        works = registry.was_started("learner") and actors
        works &= not registry.missing_servers(self._live.config)
        if self._lifecycle.state == "starting" and works:
            self._lifecycle.training_begins("paused" if self._live.paused else "running")

    def component_ended(self, name: str) -> None:
        """A component has ended on request, while the run continues."""
        if not self._lifecycle.ending.is_set():
            self._registry.forget(name)

    def report(self, statistics: Sequence[ComponentStatistics]) -> None:
        """The newest numbers of components."""
        for component in statistics:
            self._registry.report(component)

    def fail(self, error: RunError) -> None:
        """The run cannot continue."""
        self._lifecycle.fail(error)

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
            self._target.episodes_finished(episodes)

    def shard_opened(self, index: int, incarnation: int, port: ShardPort) -> None:
        """A replay shard works, in this incarnation of its host."""
        self._replay.shard_opened(index, incarnation, port)

    def shard_answered(self, index: int, incarnation: int, answer: ShardAnswer) -> None:
        """A replay shard has answered a request."""
        self._replay.shard_answered(index, incarnation, answer)

    def publish(self, event: Event) -> None:
        """Show ``event`` to observers."""
        if isinstance(event, EnvironmentFailed):
            log.warning(
                "an environment failed",
                component=event.component,
                reason=event.reason,
                error=event.message,
            )
        self._events.publish(event)

    def events_lost(self, count: int) -> None:
        """``count`` events were lost on their way here."""
        self._events.count_lost(count)

    def host_lost(self, host: HostSpec, reason: str) -> None:
        """A host is gone and reaped: its tickets come back."""
        for component in host.components:
            if component.role == "learner":
                self.learner, self._registry.learner_works = None, False
                self._exchange.learner_lost("stopped" if reason == "stopped" else "learner_lost")
            elif component.role == "evaluator":
                self.evaluator = None
            elif component.role == "replay":
                self._replay.shard_lost(
                    component.index, "stopped" if reason == "stopped" else "shard_lost"
                )
            elif component.role == "inference":
                self._registry.server_lost(component.name)
            elif component.role == "actor":
                self._exchange.holder_lost(component.name, reason)
            self._registry.forget(component.name)
        self.publish(HostExited(host.name, reason))

    @property
    def _replay(self) -> ReplayExchange:
        assert isinstance(self._exchange, ReplayExchange)
        return self._exchange
