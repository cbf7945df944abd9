"""The hosts of a run, as the one who employs them sees them: there are none before the run has
begun.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from tianflow.config.model import Config
from tianflow.coordinator.registry import ComponentRegistry
from tianflow.coordinator.supervisor import HostHandle, HostTimeouts, Supervisor
from tianflow.core.program import HostSpec
from tianflow.errors import RunError
from tianflow.exchange.exchange import Exchange
from tianflow.ledger.tickets import State
from tianflow.planning import placement as system


class HostGroup:
    """Has the hosts that a config asks for started, and knows those that live.

    Args:
        exchange: whose open tickets show whether an actor gets on.
        roster: who rebuilds its environments.
    """

    def __init__(self, *, exchange: Exchange, roster: ComponentRegistry) -> None:
        self._exchange, self._roster = exchange, roster
        self._supervisor: Supervisor | None = None

    def open(
        self,
        config: Config,
        *,
        start: Callable[[HostSpec, int], Awaitable[HostHandle]],
        lost: Callable[[HostSpec, str], None],
        failed: Callable[[RunError], None],
    ) -> Supervisor:
        """The supervisor of a run that begins with ``config``. For the other arguments see
        `Supervisor`.
        """
        self._supervisor = Supervisor(
            start=start,
            lost=lost,
            failed=failed,
            open_tickets=lambda: [
                (t.number, t.slot, t.holder) for t in self._exchange.ledger.live(State.BEGUN)
            ],
            progress=self._exchange.arena.progress,
            rebuilding=lambda: [
                (c.name, c.time.since)
                for c in self._roster.reports
                if c.time.current == "rebuilding"
            ],
            patience=HostTimeouts(
                config.env.step_timeout_s, config.env.start_timeout_s, config.evaluation.timeout_s
            ),
            max_restarts=config.run.max_restarts,
            window_s=config.run.restart_window_s,
            grace_s=config.run.grace_s,
        )
        return self._supervisor

    def place(self, config: Config) -> None:
        """The hosts of ``config``, and no others, should live."""
        if self._supervisor is not None:
            self._supervisor.reconcile(system.build(config).placement.hosts)

    def give_up_evaluator(self) -> None:
        """It takes too long: it is ended, and starts again."""
        if self._supervisor is not None:
            self._supervisor.kill("evaluator", "env_hang")

    @property
    def handles(self) -> Mapping[str, HostHandle]:
        """Hosts that live now."""
        return self._supervisor.handles if self._supervisor is not None else {}

    @property
    def learner_silent_for(self) -> float:
        """Seconds since the learner's host was last heard of; 0 if there is none."""
        handles = self.handles
        return handles["learner"].silent_for if "learner" in handles else 0.0

    @property
    def starts(self) -> dict[str, int]:
        """How often each host was started."""
        return dict(self._supervisor.starts) if self._supervisor is not None else {}

    @property
    def restarts(self) -> dict[tuple[str, str], int]:
        """How often each host was started again, by host and reason."""
        return dict(self._supervisor.restarts) if self._supervisor is not None else {}
