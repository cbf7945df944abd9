"""HostGroup: the hosts of a run. It is empty before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tianflow.coordinator.supervisor import HostTimeouts, Supervisor
from tianflow.interfaces import InProcess, OnNode
from tianflow.planning import placement

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.core.program import HostSpec, LauncherCapabilities
    from tianflow.errors import RunError
    from tianflow.exchange.exchange import Exchange
    from tianflow.interfaces import HostHandle, HostStarter


class HostGroup:
    """Runs the hosts that a config describes, and knows which are alive.

    Args:
        exchange: its open tickets show the progress of actors.
        capabilities: of the launcher.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        capabilities: LauncherCapabilities,
    ) -> None:
        self._exchange, self._capabilities = exchange, capabilities
        self._supervisor: Supervisor | None = None

    def open(
        self,
        config: Config,
        *,
        start: HostStarter,
        lost: Callable[[HostSpec, str], None],
        failed: Callable[[RunError], None],
    ) -> Supervisor:
        """Make the supervisor of a run that begins with ``config``. For the other arguments see
        `Supervisor`.
        """
        self._supervisor = Supervisor(
            start=start,
            lost=lost,
            failed=failed,
            written_slots=self._exchange.ledger.written_slots,
            progress=self._exchange.arena.progress,
            timeouts=HostTimeouts(config.env.step_timeout_s, config.env.start_timeout_s),
            max_restarts=config.run.max_restarts,
            window_s=config.run.restart_window_s,
            grace_s=config.run.grace_s,
        )
        return self._supervisor

    def place(self, config: Config) -> None:
        """Run exactly the hosts of ``config``."""
        if self._supervisor is not None:
            self._supervisor.reconcile(placement.build(config, self._capabilities).hosts)

    def restart_evaluator(self) -> None:
        """Kill the evaluator's host, because an evaluation hangs; it restarts."""
        if self._supervisor is not None:
            self._supervisor.kill("evaluator", "env_hang")

    @property
    def handles(self) -> Mapping[str, HostHandle]:
        """The hosts that are alive, by name."""
        return self._supervisor.handles if self._supervisor is not None else {}

    @property
    def pids(self) -> dict[str, int]:
        """Pids of the hosts that are processes of this machine, by name."""
        return {
            name: handle.pid
            for name, handle in self.handles.items()
            if isinstance(handle, InProcess) and not isinstance(handle, OnNode)
        }

    @property
    def learner_silent_for(self) -> float:
        """Seconds since the last sign of life of the learner's host, or of one of its ranks; 0 if
        none is alive.
        """
        ranks = [
            handle for name, handle in self.handles.items() if name.partition("-")[0] == "learner"
        ]
        return max((handle.silent_for for handle in ranks), default=0.0)

    @property
    def slow_starts(self) -> Sequence[str]:
        """Hosts that have not started for a while, in words."""
        return self._supervisor.slow_starts if self._supervisor is not None else ()

    @property
    def starts(self) -> dict[str, int]:
        """How often each host was started."""
        return dict(self._supervisor.starts) if self._supervisor is not None else {}

    @property
    def restarts(self) -> dict[tuple[str, str], int]:
        """How often each host was restarted, by host and reason."""
        return dict(self._supervisor.restarts) if self._supervisor is not None else {}
