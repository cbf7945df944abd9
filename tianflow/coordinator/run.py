"""Run: the parts of a run, put together, and their life from the first host to the last."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tianflow.channels.broadcast import Broadcast
from tianflow.config.evaluations import meaning_of_returns
from tianflow.config.schedules import Elapsed, value_at
from tianflow.coordinator.balancer import Balancer
from tianflow.coordinator.checkpointing import CheckpointManager, ResumePoint
from tianflow.coordinator.control import Control, LiveConfig
from tianflow.coordinator.counters import ActiveClock
from tianflow.coordinator.evaluation import EvaluationScheduler, TargetTracker
from tianflow.coordinator.hosts import HostGroup
from tianflow.coordinator.inbox import Inbox
from tianflow.coordinator.lifecycle import Lifecycle, PeriodicTasks, Shutdown
from tianflow.coordinator.process_usage import ProcessUsage
from tianflow.coordinator.registry import ComponentRegistry
from tianflow.coordinator.rendezvous import Rendezvous
from tianflow.coordinator.slot_manager import SlotManager
from tianflow.coordinator.snapshot import RunSnapshot
from tianflow.core.events import EvaluationFinished
from tianflow.core.program import HostPlan, LauncherCapabilities
from tianflow.errors import RunError
from tianflow.exchange.replay_exchange import ReplayExchange

if TYPE_CHECKING:
    from pathlib import Path

    from tianflow.config.model import Config
    from tianflow.coordinator.supervisor import Supervisor
    from tianflow.core.payloads import EnvironmentSpec, Evaluation, TrajectoryLayout
    from tianflow.core.program import HostSpec
    from tianflow.core.statistics import SinkStatistics
    from tianflow.interfaces import HostStarter, SlotOwner
    from tianflow.rundir.checkpoints import Checkpoint


class Run:
    """The parts of a run; launchers see it as `tianflow.interfaces.RunView`. People and programs
    steer it through `control`.

    Args:
        run_id: its name.
        directory: where it stores what outlives it; exists.
        config: settings at the start.
        spec: of the environments.
        layout: of a trajectory.
        slots: owner of the slots' memory.
        capabilities: of the launcher.
        resumed: the checkpoint that the run continues.
        revision: number of changes of the settings so far.
        settings_stored: False: ``config`` is not on disk yet. It is written after the first update,
            which shows that the learner could load the checkpoint.
    """

    def __init__(
        self,
        *,
        run_id: str,
        directory: Path,
        config: Config,
        spec: EnvironmentSpec,
        layout: TrajectoryLayout,
        slots: SlotOwner,
        capabilities: LauncherCapabilities,
        resumed: Checkpoint | None = None,
        revision: int = 0,
        settings_stored: bool = True,
    ) -> None:
        self._settings_stored = settings_stored
        self.id, self.directory, self.spec, self._layout = run_id, directory, spec, layout
        self._draws = None if slots.draws is None else slots.draws.layout
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        events, sinks = Broadcast(), dict[str, "SinkStatistics"]()
        base, clock = ResumePoint.of(resumed), ActiveClock()
        deterministic = config.run.deterministic
        # A resumed run has other seeds than before; a deterministic run seeds from the version.
        self._lineage = resumed.version.lineage if resumed and not deterministic else 0
        self.lifecycle = lifecycle = Lifecycle(
            before_s=base.elapsed_s, trained_before_s=base.trained_s
        )
        self._live = live = LiveConfig(config, revision=revision)
        self.settings = live.cell
        self.registry = registry = ComponentRegistry()
        slot_manager = SlotManager(owner=slots, layout=layout)
        self.exchange = exchange = slot_manager.open(
            config,
            clock=clock,
            schedule=self._replay_schedule,
            resumed=resumed,
            remote=capabilities.nodes,
        )
        exchange.seed_epoch = resumed.version.number if resumed and deterministic else 0
        exchange.on_settled(self._settled)
        self.balancer = Balancer(
            exchange=exchange,
            settings=self.settings,
            set_bound=live.set_bound,
            waiting_seconds=registry.waiting_seconds,
            actors=lambda: live.config.actors.count,
        )
        self.hosts = HostGroup(exchange=exchange, capabilities=capabilities)
        self._usage = ProcessUsage(pids=lambda: {"coordinator": os.getpid(), **self.hosts.pids})
        replay = exchange if isinstance(exchange, ReplayExchange) else None
        self.checkpoints = CheckpointManager(
            directory=directory,
            keep=config.checkpoint.keep,
            disk=self._disk,
            resumed=resumed,
            learner=lambda: self.inbox.learner if registry.learner_works else None,
            manifest=lambda saved: self.snapshot.manifest(saved),  # noqa: PLW0108 - made below
            save_replay=replay.save if replay and config.checkpoint.replay else None,
            best=config.checkpoint.best,
            meaning=lambda saved: meaning_of_returns(live.config if saved is None else saved),
        )
        self.evaluation = EvaluationScheduler(
            ports=lambda: (self.inbox.learner, self.inbox.evaluator),
            live=live,
            published=lambda: exchange.ledger.published,
            timeout_s=config.evaluation.timeout_s,
            timed_out=self.hosts.restart_evaluator,
            evaluated=self._evaluated,
            best=self.checkpoints.best,
        )
        self.target = TargetTracker(
            lifecycle=lifecycle,
            evaluation=self.evaluation,
            target=lambda: live.config.run.target_return,
            further=lambda: tuple(live.config.evaluation.further),
            episodes=base.episodes,
        )
        self.inbox = Inbox(
            lifecycle=lifecycle,
            live=live,
            registry=registry,
            exchange=exchange,
            target=self.target,
            events=events,
        )
        self.periodic = PeriodicTasks(
            lifecycle=lifecycle,
            live=live,
            checkpoints=self.checkpoints,
            target=self.target,
            env_steps=lambda: self.snapshot.env_steps,
            updates=lambda: exchange.ledger.version.number,
            earlier_steps=base.env_steps,
        )
        self.snapshot = RunSnapshot(
            run_id=run_id,
            spec=spec,
            base=base,
            lifecycle=lifecycle,
            live=live,
            exchange=exchange,
            registry=registry,
            balancer=self.balancer,
            checkpoints=self.checkpoints,
            evaluation=self.evaluation,
            target=self.target,
            hosts=self.hosts,
            usage=self._usage,
            nodes=lambda: self.inbox.nodes,
            periodic=self.periodic,
            events=events,
            sinks=sinks,
            settings_pending=lambda: self.control.audit_log.pending,
        )
        self._ranks = Rendezvous()
        self.control = Control(
            run_id=run_id,
            directory=directory,
            events=events,
            sinks=sinks,
            lifecycle=lifecycle,
            live=live,
            slots=slot_manager,
            exchange=exchange,
            balancer=self.balancer,
            hosts=self.hosts,
            checkpoints=self.checkpoints,
            clock=clock,
            disk=self._disk,
            statistics=self.snapshot.statistics,
            alive=lambda: self.periodic.alive,
        )
        self._shutdown = Shutdown(
            lifecycle=lifecycle,
            live=live,
            exchange=exchange,
            hosts=self.hosts,
            checkpoints=self.checkpoints,
            target=self.target,
            inbox=self.inbox,
        )

    # For launchers
    # ----------------------------------------------------------------------------------------------

    async def plan_host(self, host: HostSpec, incarnation: int) -> HostPlan:
        """Plan from which ``host`` builds its components, if it starts now."""
        roles, ledger = {component.role for component in host.components}, self.exchange.ledger
        start, samples, checkpoint = ledger.version, 0, None
        if "learner" in roles:
            start, samples, checkpoint = await self.checkpoints.next_start()
        elif "replay" in roles:
            checkpoint = self.checkpoints.resumed
        return HostPlan(
            host=host,
            spec=self.spec,
            layout=self._layout,
            start=start,
            samples=samples,
            draws=self._draws,
            incarnation=incarnation,
            lineage=self._lineage,
            published=ledger.published,
            checkpoint=checkpoint,
            trained_s=self.lifecycle.trained_s(time.monotonic()),
            rendezvous=self._ranks.file(incarnation) if host.group else None,
        )

    async def run(self, start_host: HostStarter) -> None:
        """From the first host to the last, until the run has ended."""
        lifecycle, live = self.lifecycle, self._live
        supervisor = self.hosts.open(
            live.config, start=start_host, lost=self.inbox.host_lost, failed=lifecycle.fail
        )
        await self.checkpoints.open()
        watchers = [
            asyncio.create_task(supervisor.run(_ignore_start), name="supervisor"),
            asyncio.create_task(self.balancer.run(_ignore_start), name="balancer"),
            asyncio.create_task(self.periodic.run(), name="tick"),
            asyncio.create_task(self.control.audit_log.retry(), name="audit"),
            asyncio.create_task(self._usage.run(), name="usage"),
        ]
        self.hosts.place(live.config)  # of now: it may have changed while checkpoints were listed
        ending = asyncio.create_task(lifecycle.ending.wait())
        try:
            await self._until_it_ends(ending, watchers, supervisor)
        finally:
            ending.cancel()
            for running in (*watchers, *lifecycle.background):
                running.cancel()
            await asyncio.gather(ending, *watchers, *lifecycle.background, return_exceptions=True)
            lifecycle.close()
            await self.control.audit_log.flush()
            await self.snapshot.write_summary(self.directory, self._disk)
            self._ranks.close()
            self._disk.shutdown(wait=False)

    async def _until_it_ends(
        self,
        ending: asyncio.Task[bool],
        watchers: Sequence[asyncio.Task[None]],
        supervisor: Supervisor,
    ) -> None:
        try:
            finished, _ = await asyncio.wait(
                {ending, *watchers}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in watchers:
                if task in finished:
                    error = task.exception()
                    details = "".join(traceback.format_exception(error)) if error else ""
                    self.lifecycle.fail(RunError(task.get_name(), f"ended: {error!r}", details))
            await self._shutdown.run(supervisor)
        except asyncio.CancelledError:
            await supervisor.abandon()
            self.lifecycle.state = "stopped"
            raise

    # Observing
    # ----------------------------------------------------------------------------------------------

    def _replay_schedule(self, updates: int) -> tuple[int, float]:
        """Environment steps so far, and the exponent of importance weights for the draw after
        ``updates`` updates.
        """
        steps = self.snapshot.env_steps
        elapsed = Elapsed(steps, updates, self.lifecycle.trained_s(time.monotonic()))
        try:
            beta = value_at(self._live.config, "replay.beta", elapsed)
        except RunError as error:
            self.lifecycle.fail(error)
            beta = None
        return steps, 1.0 if beta is None else beta

    def _settled(self) -> None:
        self.snapshot.last_update = time.time()
        if not self._settings_stored:
            self._settings_stored = True
            self.control.audit_log.store((self._live.config, self._live.revision))
        number, run = self.exchange.ledger.version.number, self._live.config.run
        if run.max_updates is not None and number >= run.max_updates:
            # A trajectory that begins now would be counted only if the run is slow to end.
            self.exchange.hold_grants("ending")
            self.lifecycle.end("done", "max_updates")
        elif run.deterministic and number % run.barrier_updates == 0:
            self.exchange.hold_grants("barrier")
            self.lifecycle.run_in_background(self._barrier(number))

    async def _barrier(self, number: int) -> None:
        """Deterministic mode: everything is drained already (bound 0, no grant is out). Save,
        evaluate if it is time, re-seed, continue.

        An evaluation here is of the version that was saved, whatever the time of the machine.
        """
        await self.checkpoints.save()
        if self.periodic.evaluation_begins(time.monotonic()):
            await self.target.evaluate()
        self.exchange.seed_epoch = number
        self.exchange.release_grants("barrier")

    def _evaluated(self, evaluation: Evaluation) -> None:
        self.control.events.publish(
            EvaluationFinished(
                evaluation.version.number,
                len(evaluation.returns),
                evaluation.mean_return,
                evaluation.returns,
                evaluation.name,
                evaluation.metrics,
            )
        )


def _ignore_start() -> None:
    """Called when a watcher starts; the run does not wait for that."""
