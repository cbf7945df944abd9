"""changes and actions -> Control -> settings in force, actions taken, and an audit of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from tianflow.channels.latest import LatestCell
from tianflow.config import loading as config_loading
from tianflow.config.model import Config
from tianflow.config.rules import rate_limits
from tianflow.coordinator.balancer import Balancer
from tianflow.coordinator.checkpointing import CheckpointManager
from tianflow.coordinator.counters import ActiveClock
from tianflow.coordinator.hosts import HostGroup
from tianflow.coordinator.lifecycle import ENDED, Lifecycle
from tianflow.coordinator.slot_manager import SlotManager
from tianflow.core.events import Event, SettingsChanged
from tianflow.errors import ConfigError, StateConflictError
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.interfaces import LiveSettings
from tianflow.logs import logger
from tianflow.rundir.audit_log import NAME, AuditLog, AuditPage

log = logger("coordinator")


class LiveConfig:
    """The live settings: one cell that every host follows, with a generation that grows with each
    change.

    Args:
        config: settings at the start.
    """

    def __init__(self, config: Config) -> None:
        self.cell: LatestCell[LiveSettings, int] = LatestCell(LiveSettings(config, config.bound), 0)

    @property
    def config(self) -> Config:
        """Settings in force."""
        return self.cell.value.config

    @property
    def paused(self) -> bool:
        """True if nobody is to begin anything."""
        return self.cell.value.paused

    @property
    def generation(self) -> int:
        """Generation of the settings in force."""
        return self.cell.key

    def put(self, config: Config, *, bound: int | None) -> None:
        """``config`` is in force, under ``bound``."""
        self._put(replace(self.cell.value, config=config, bound=bound))

    def pause(self, paused: bool) -> None:
        """Whether nobody is to begin anything."""
        self._put(replace(self.cell.value, paused=paused))

    def hold_learner(self, hold: bool) -> None:
        """Whether the learner is to rest at its next boundary."""
        self._put(replace(self.cell.value, hold_learner=hold))

    def set_bound(self, bound: int | None) -> None:
        """Controllers asked for another bound than the one in force."""
        if bound != self.cell.value.bound:
            self._put(replace(self.cell.value, bound=bound))

    def _put(self, live: LiveSettings) -> None:
        self.cell.put(live, self.cell.key + 1)


class Control:
    """Changes and actions of people and programs, each of them audited.

    Args:
        life: of the run.
        in_force: its settings.
        room: says whether slots allow a change, and makes them.
        exchange: where grants are held and let go.
        balancer: says which bound a config means.
        staff: whose number follows the config.
        keeper: writes checkpoints.
        clock: stands still while the run is paused.
        directory: of the run, where its config is kept.
        disk: what blocks on the disk runs here.
        publish: tells observers.
    """

    def __init__(
        self,
        *,
        life: Lifecycle,
        in_force: LiveConfig,
        room: SlotManager,
        exchange: Exchange,
        balancer: Balancer,
        staff: HostGroup,
        keeper: CheckpointManager,
        clock: ActiveClock,
        directory: Path,
        disk: Executor,
        publish: Callable[[Event], None],
    ) -> None:
        self._life, self._in_force, self._room, self._exchange = life, in_force, room, exchange
        self._balancer, self._staff, self._keeper, self._clock = balancer, staff, keeper, clock
        self._directory, self._disk, self._publish = directory, disk, publish
        self._journal = AuditLog(path=directory / NAME, executor=disk)
        self.changed = 0
        """Changes that were put in force."""
        self.refused = 0
        """Changes that were refused."""

    def change(self, changes: Mapping[str, Mapping[str, object]], *, source: str) -> int:
        """Put live settings in force, whole or not at all."""
        self._life.require_going()
        before = self._in_force.config
        try:
            config = config_loading.with_changes(before, changes)
            self._room.check(config)
            self._room.grow(config, self._exchange)
        except ConfigError:
            self.refused += 1
            raise
        paths = sorted({f"{section}.{key}" for section, keys in changes.items() for key in keys})
        old, new = ({path: _at(which, path) for path in paths} for which in (before, config))
        self._journal.add(source, "change", old=old, new=new)
        self.changed += 1
        self._in_force.put(config, bound=self._balancer.bound_with(config))
        self._disk.submit(self._remember, config)
        if isinstance(self._exchange, ReplayExchange):
            self._exchange.set_rate(rate_limits(config))
        if config.actors.count != before.actors.count:
            self._staff.place(config)
        self._publish(SettingsChanged(self._in_force.generation, tuple(paths)))
        return self._in_force.generation

    def _remember(self, config: Config) -> None:
        """A resumed run has every change, also those that no checkpoint has seen."""
        try:
            config_loading.write_config(self._directory, config)
        except OSError as error:
            log.warning("the settings in force cannot be written", error=str(error))

    def pause(self, *, source: str) -> str:
        """Nobody begins anything until `resume`."""
        life = self._life
        life.require_going()
        if not self._in_force.paused:
            self._journal.add(source, "pause")
            life.state = "paused" if life.state == "running" else life.state
            self._clock.pause()
            self._exchange.hold_grants("paused")
            self._in_force.pause(True)
        return "paused"

    def resume(self, *, source: str) -> str:
        """Go on after `pause`."""
        life = self._life
        life.require_going()
        if self._in_force.paused:
            self._journal.add(source, "resume")
            life.state = "running" if life.state == "paused" else life.state
            self._clock.resume()
            self._in_force.pause(False)
            self._exchange.release_grants("paused")
        return "running"

    def drain(self, *, source: str) -> str:
        """Begin nothing new, train on what is there as far as it fills batches, then end."""
        self._life.require_going()
        self._exchange.hold_grants(
            "draining"
        )  # before a pause is lifted, for whoever waits would be let in
        self.resume(source=source)
        self._journal.add(source, "drain")
        self._life.state = "draining"
        self._life.end("done", "drained")
        return "draining"

    def stop(self, *, source: str) -> str:
        """End with a checkpoint; what is open is dropped(stopped)."""
        life = self._life
        if life.state in ENDED:
            raise StateConflictError(f"the run is {life.state}")
        life.drop_the_drain()
        if not life.ending.is_set():
            self._journal.add(source, "stop")
        life.end("stopped", source)
        return "stopping"

    def request_checkpoint(self, *, source: str) -> str:
        """Write one as soon as the learner is at a boundary."""
        self._life.require_going()
        self._journal.add(source, "checkpoint")
        if (saving := self._keeper.ask()) is not None:
            self._life.go_on_with(saving)
        return self._life.state

    def hold_learner(self, hold: bool) -> None:
        """The learner rests at its next boundary, or goes on; while the run stops it is never let
        go.
        """
        self._in_force.hold_learner(hold or self._life.state == "stopping")

    @property
    def audited(self) -> int:
        """Changes and actions of this process so far."""
        return self._journal.count

    def audit(self) -> Sequence[Mapping[str, object]]:
        """The newest changes and actions of this process."""
        return tuple(self._journal.records)

    async def read_audit(self, *, before: int | None, limit: int) -> AuditPage:
        """A page of all changes and actions, those before a resume included."""
        return await self._journal.read(before=before, limit=limit)


def _at(config: Config, path: str) -> object:
    section, key = path.split(".", 1)
    return json.loads(getattr(config, section).model_dump_json()).get(key)
