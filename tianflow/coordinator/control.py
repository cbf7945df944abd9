"""changes and actions -> Control -> settings in force, actions taken, and an audit of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tianflow.channels.latest import LatestCell
from tianflow.config import loading
from tianflow.config.rules import rate_limits
from tianflow.coordinator.lifecycle import ENDED
from tianflow.core.events import SettingsChanged
from tianflow.errors import ConfigError, StateConflictError
from tianflow.exchange.exchange import PAUSED
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.interfaces import LiveSettings
from tianflow.rundir.audit_log import NAME, AuditLog, AuditPage
from tianflow.rundir.summary import REQUESTED

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from tianflow.channels.broadcast import Broadcast
    from tianflow.config.model import Config
    from tianflow.coordinator.balancer import Balancer
    from tianflow.coordinator.checkpointing import CheckpointManager
    from tianflow.coordinator.counters import ActiveClock
    from tianflow.coordinator.hosts import HostGroup
    from tianflow.coordinator.lifecycle import Lifecycle
    from tianflow.coordinator.slot_manager import SlotManager
    from tianflow.core.statistics import RunStatistics, SinkStatistics
    from tianflow.exchange.exchange import Exchange


class LiveConfig:
    """The live settings: one cell that every host follows. Its generation grows with each change,
    except for holds of the learner.

    Args:
        config: settings at the start.
        revision: number of their changes since the run began, those before a resume included.
    """

    def __init__(self, config: Config, *, revision: int = 0) -> None:
        self.revision = revision
        self.cell: LatestCell[LiveSettings, int] = LatestCell(LiveSettings(config, config.bound), 0)
        self.changes = 0
        """Changes of the config that were put in force."""
        self.refused = 0
        """Changes of the config that were refused."""
        self._held_for_good = False

    @property
    def config(self) -> Config:
        """Settings in force."""
        return self.cell.value.config

    @property
    def paused(self) -> bool:
        """True while the run is paused."""
        return self.cell.value.paused

    @property
    def held_for_good(self) -> bool:
        """True if the learner makes no further update."""
        return self._held_for_good

    @property
    def generation(self) -> int:
        """Generation of the settings in force."""
        return self.cell.value.generation

    def put(self, config: Config, *, bound: int | None) -> None:
        """Put ``config`` in force, under ``bound``."""
        self.changes += 1
        self.revision += 1
        self._change(config=config, bound=bound)

    def pause(self, paused: bool) -> None:
        """Pause the run, or end the pause."""
        self._change(paused=paused)

    def hold_learner(self, *, for_good: bool = False) -> None:
        """The learner rests at its next boundary. ``for_good``: it is not released any more."""
        self._held_for_good |= for_good
        self._put(replace(self.cell.value, hold_learner=True))

    def release_learner(self) -> None:
        """The learner continues."""
        if not self._held_for_good:
            self._put(replace(self.cell.value, hold_learner=False))

    def set_bound(self, bound: int | None) -> None:
        """Controllers requested ``bound``."""
        if bound != self.cell.value.bound:
            self._change(bound=bound)

    def _change(self, **values: Any) -> None:
        live = self.cell.value
        self._put(replace(live, generation=live.generation + 1, **values))

    def _put(self, live: LiveSettings) -> None:
        self.cell.put(live, self.cell.key + 1)


class Control:
    """`tianflow.interfaces.RunControl`: changes and actions of people and programs, each of them
    audited, and what they see of the run.

    Args:
        run_id: name of the run.
        directory: of the run, where its config is stored.
        events: for observers.
        sinks: counts of sinks, by name.
        lifecycle: of the run.
        live: its settings.
        slots: check whether memory allows a change, and grow.
        exchange: where grants are held and released.
        balancer: says which bound a config means.
        hosts: follow the number of actors.
        checkpoints: writes and lists them.
        clock: stands still while the run is paused.
        disk: executor of what blocks on the disk.
        statistics: all numbers of the run.
        alive: whether the coordinator's tick is young.
    """

    def __init__(
        self,
        *,
        run_id: str,
        directory: Path,
        events: Broadcast,
        sinks: dict[str, SinkStatistics],
        lifecycle: Lifecycle,
        live: LiveConfig,
        slots: SlotManager,
        exchange: Exchange,
        balancer: Balancer,
        hosts: HostGroup,
        checkpoints: CheckpointManager,
        clock: ActiveClock,
        disk: Executor,
        statistics: Callable[[], RunStatistics],
        alive: Callable[[], bool],
    ) -> None:
        self.id, self.directory, self.events, self.sinks = run_id, directory, events, sinks
        self._lifecycle, self._live, self._slots, self._exchange = lifecycle, live, slots, exchange
        self._balancer, self._hosts, self._clock = balancer, hosts, clock
        self._checkpoints, self._alive = checkpoints, alive
        self.audit_log = AuditLog(path=directory / NAME, executor=disk)
        """Changes and actions, and the settings in force on disk."""
        self.statistics = statistics

    # Changes
    # ----------------------------------------------------------------------------------------------

    def change(self, changes: Mapping[str, Mapping[str, object]], *, source: str) -> int:
        """Put live settings in force: all of them, or none."""
        self._lifecycle.require_active()
        before = self._live.config
        try:
            config = loading.with_changes(before, changes)
            self._slots.check(config)
            self._slots.grow(config, self._exchange)
        except ConfigError:
            self._live.refused += 1
            raise
        paths = sorted({f"{section}.{key}" for section, keys in changes.items() for key in keys})
        old, new = ({path: _at(which, path) for path in paths} for which in (before, config))
        self._live.put(config, bound=self._balancer.bound_with(config))
        in_force = (config, self._live.revision)
        self.audit_log.add(source, "change", settings=in_force, old=old, new=new)
        if isinstance(self._exchange, ReplayExchange):
            self._exchange.set_rate(rate_limits(config))
        if config.actors.count != before.actors.count:
            self._hosts.place(config)
        self.events.publish(SettingsChanged(self._live.generation, tuple(paths)))
        return self._live.generation

    # Actions
    # ----------------------------------------------------------------------------------------------

    def pause(self, *, source: str) -> str:
        """Begin nothing new until `resume`."""
        lifecycle = self._lifecycle
        lifecycle.require_active()
        if not self._live.paused:
            self.audit_log.add(source, "pause")
            lifecycle.state = "paused" if lifecycle.state == "running" else lifecycle.state
            self._clock.pause()
            self._exchange.hold_grants(PAUSED)
            self._live.pause(True)
        return "paused"

    def resume(self, *, source: str) -> str:
        """Continue after `pause`."""
        lifecycle = self._lifecycle
        lifecycle.require_active()
        if self._live.paused:
            self.audit_log.add(source, "resume")
            lifecycle.state = "running" if lifecycle.state == "paused" else lifecycle.state
            self._clock.resume()
            self._live.pause(False)
            self._exchange.release_grants(PAUSED)
        return "running"

    def drain(self, *, source: str) -> str:
        """Begin nothing new, train on what is there as far as it fills batches, then end."""
        self._lifecycle.require_active()
        # Before a pause ends, or waiting actors would get grants.
        self._exchange.hold_grants("draining")
        self.resume(source=source)
        self.audit_log.add(source, "drain")
        self._lifecycle.state = "draining"
        self._lifecycle.end("done", "drained")
        return "draining"

    def stop(self, *, source: str) -> str:
        """End with a checkpoint; open tickets are dropped(stopped)."""
        lifecycle = self._lifecycle
        if lifecycle.state in ENDED:
            raise StateConflictError(f"the run is {lifecycle.state}")
        lifecycle.cancel_drain()
        if not lifecycle.ending.is_set():
            self.audit_log.add(source, "stop")
        lifecycle.end("stopped", REQUESTED)
        return "stopping"

    def request_checkpoint(self, *, source: str) -> str:
        """Write a checkpoint at the learner's next boundary."""
        self._lifecycle.require_active()
        self.audit_log.add(source, "checkpoint")
        if (saving := self._checkpoints.request()) is not None:
            self._lifecycle.run_in_background(saving)
        return self._lifecycle.state

    # Reading
    # ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """Settings in force."""
        return self._live.config

    @property
    def generation(self) -> int:
        """Generation of the settings in force."""
        return self._live.generation

    @property
    def state(self) -> str:
        """See `RunStatistics.state`."""
        return self._lifecycle.state

    @property
    def alive(self) -> bool:
        """True while the coordinator's own tick is young."""
        return self._alive()

    @property
    def audited(self) -> int:
        """Number of changes and actions of this process."""
        return self.audit_log.count

    def audit(self) -> Sequence[Mapping[str, object]]:
        """The newest changes and actions of this process."""
        return tuple(self.audit_log.records)

    async def read_audit(self, *, before: int | None, limit: int) -> AuditPage:
        """A page of all changes and actions, those before a resume included."""
        return await self.audit_log.read(before=before, limit=limit)

    def checkpoints(self) -> Sequence[Mapping[str, object]]:
        """Checkpoints on disk, newest first, as of the last one written."""
        return self._checkpoints.listing


def _at(config: Config, path: str) -> object:
    section, key = path.split(".", 1)
    return json.loads(getattr(config, section).model_dump_json()).get(key)
