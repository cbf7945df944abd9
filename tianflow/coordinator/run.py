"""The parts of a run, put together, and its life from the first host to the last."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tianflow.channels.broadcast import Broadcast
from tianflow.config.model import Config
from tianflow.coordinator.balancer import Balancer
from tianflow.coordinator.checkpointing import CheckpointManager, ResumePoint
from tianflow.coordinator.control import Control, LiveConfig
from tianflow.coordinator.counters import ActiveClock
from tianflow.coordinator.evaluation import EvaluationScheduler, TargetTracker
from tianflow.coordinator.hosts import HostGroup
from tianflow.coordinator.inbox import Inbox
from tianflow.coordinator.lifecycle import Lifecycle, PeriodicTasks, Shutdown
from tianflow.coordinator.registry import ComponentRegistry
from tianflow.coordinator.slot_manager import SlotManager, SlotOwner
from tianflow.coordinator.snapshot import RunSnapshot
from tianflow.coordinator.supervisor import HostHandle, Supervisor
from tianflow.core.events import EvaluationFinished
from tianflow.core.payloads import EnvironmentSpec, Evaluation, SavedState, TrajectoryLayout
from tianflow.core.program import HostSpec
from tianflow.core.statistics import RunStatistics, SinkStatistics
from tianflow.errors import RunError
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.rundir.audit_log import AuditPage
from tianflow.rundir.checkpoints import Checkpoint


class Run:
    """`tianflow.interfaces.RunControl`. Its launcher brings what hosts tell to `reception`.

    Args:
        run_id: its name.
        directory: where it keeps what outlives it; exists.
        config: settings at the start.
        spec: of the environments.
        layout: of a trajectory.
        slots: owner of the slots' memory.
        resumed: the checkpoint to go on from.
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
        resumed: Checkpoint | None = None,
    ) -> None:
        self.id, self.directory, self.spec, self.layout = run_id, directory, spec, layout
        self.events = Broadcast()
        self.sinks: dict[str, SinkStatistics] = {}
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        base, clock, room = (
            ResumePoint.of(resumed),
            ActiveClock(),
            SlotManager(owner=slots, layout=layout),
        )
        self.draws = room.draws
        self.era = resumed.version.lineage if resumed and not config.run.deterministic else 0
        """The lineage that the run goes on from: its actors meet other seeds than before. A
        deterministic run seeds from the version.
        """
        self.life = life = Lifecycle(before_s=base.elapsed_s, trained_before_s=base.trained_s)
        self._in_force = in_force = LiveConfig(config)
        self.settings = in_force.cell
        self.roster = ComponentRegistry()
        self.exchange = exchange = room.open(
            config, clock=clock, beta=lambda: self.config.replay.beta, resumed=resumed
        )
        exchange.seed_epoch = resumed.version.number if resumed and config.run.deterministic else 0
        exchange.on_settled(self._settled)
        self.balancer = self._make_balancer()
        self.staff = HostGroup(exchange=exchange, roster=self.roster)
        self.keeper = self._make_keeper(resumed)
        self._control = self._make_control(room, clock)
        self.judge = self._make_judge()
        self._goal = goal = TargetTracker(
            life=life,
            judge=self.judge,
            target=lambda: self.config.run.target_return,
            episodes=base.episodes,
        )
        self.reception = Inbox(
            life=life,
            in_force=in_force,
            roster=self.roster,
            exchange=exchange,
            goal=goal,
            events=self.events,
        )
        """Where hosts tell what they have to."""
        self.rounds = self._make_rounds()
        self._readings = self._make_readings(base)
        self._ending = self._make_ending()

    # Parts
    # ----------------------------------------------------------------------------------------------

    def _make_balancer(self) -> Balancer:
        return Balancer(
            exchange=self.exchange,
            settings=self.settings,
            set_bound=self._in_force.set_bound,
            waiting_seconds=self.roster.waiting_seconds,
            actors=lambda: self.config.actors.count,
        )

    def _make_keeper(self, resumed: Checkpoint | None) -> CheckpointManager:
        return CheckpointManager(
            directory=self.directory,
            keep=self.config.checkpoint.keep,
            disk=self._disk,
            resumed=resumed,
            learner=lambda: self.reception.learner_port if self.roster.learner_works else None,
            manifest=self._manifest,
            keep_replay=self.exchange.keep
            if isinstance(self.exchange, ReplayExchange) and self.config.checkpoint.replay
            else None,
        )

    def _make_control(self, room: SlotManager, clock: ActiveClock) -> Control:
        return Control(
            life=self.life,
            in_force=self._in_force,
            room=room,
            exchange=self.exchange,
            balancer=self.balancer,
            staff=self.staff,
            keeper=self.keeper,
            clock=clock,
            directory=self.directory,
            disk=self._disk,
            publish=self.events.publish,
        )

    def _make_judge(self) -> EvaluationScheduler:
        return EvaluationScheduler(
            ports=lambda: (self.reception.learner_port, self.reception.evaluator_port),
            hold=self._control.hold_learner,
            published=lambda: self.exchange.ledger.published,
            timeout_s=self.config.evaluation.timeout_s,
            give_up=self.staff.give_up_evaluator,
            judged=self._judged,
        )

    def _make_rounds(self) -> PeriodicTasks:
        return PeriodicTasks(
            life=self.life,
            in_force=self._in_force,
            keeper=self.keeper,
            goal=self._goal,
            env_steps=lambda: self.env_steps,
            updates=lambda: self.exchange.ledger.version.number,
        )

    def _make_readings(self, base: ResumePoint) -> RunSnapshot:
        return RunSnapshot(
            run_id=self.id,
            spec=self.spec,
            base=base,
            life=self.life,
            in_force=self._in_force,
            exchange=self.exchange,
            roster=self.roster,
            balancer=self.balancer,
            control=self._control,
            keeper=self.keeper,
            judge=self.judge,
            goal=self._goal,
            staff=self.staff,
            rounds=self.rounds,
            events=self.events,
            sinks=self.sinks,
        )

    def _make_ending(self) -> Shutdown:
        return Shutdown(
            life=self.life,
            in_force=self._in_force,
            exchange=self.exchange,
            control=self._control,
            staff=self.staff,
            keeper=self.keeper,
            goal=self._goal,
            has_learner=lambda: self.reception.learner_port is not None,
        )

    # Lifecycle
    # ----------------------------------------------------------------------------------------------

    async def run(self, start_host: Callable[[HostSpec, int], Awaitable[HostHandle]]) -> None:
        """From the first host to the last, until the run has ended. ``start_host`` is the
        launcher's.
        """
        config, life = self.config, self.life
        supervisor = self.staff.open(
            config, start=start_host, lost=self.reception.host_lost, failed=life.fail
        )
        await self.keeper.open()
        watchers = [
            asyncio.create_task(supervisor.run(_nothing), name="supervisor"),
            asyncio.create_task(self.balancer.run(_nothing), name="balancer"),
            asyncio.create_task(self.rounds.run(), name="tick"),
        ]
        self.staff.place(self.config)  # there may have been a change meanwhile
        ending = asyncio.create_task(life.ending.wait())
        try:
            await self._until_it_ends(ending, watchers, supervisor)
        finally:
            ending.cancel()
            for running in (*watchers, *life.background):
                running.cancel()
            await asyncio.gather(ending, *watchers, *life.background, return_exceptions=True)
            life.over()
            await self._readings.keep_summary(self.directory, self._disk)
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
                    self.fail(
                        RunError(
                            task.get_name(),
                            f"ended: {error!r}",
                            "".join(traceback.format_exception(error)) if error else "",
                        )
                    )
            await self._ending.wind_down(supervisor)
        except asyncio.CancelledError:
            await supervisor.abandon()
            self.life.state = "stopped"
            raise

    def end(self, state: str, reason: str) -> None:
        """The run is to end in ``state`` because of ``reason``; the first reason stays."""
        self.life.end(state, reason)

    def fail(self, error: RunError) -> None:
        """The run cannot go on. The first error is the one that is shown last."""
        self.life.fail(error)

    def _settled(self) -> None:
        self._readings.last_update = time.time()
        number, run = self.exchange.ledger.version.number, self.config.run
        if run.max_updates is not None and number >= run.max_updates:
            self.exchange.hold_grants(
                "ending"
            )  # nobody begins what would be committed, and counted, only if the run is slow to end
            self.end("done", "max_updates")
        elif run.deterministic and number % run.barrier_updates == 0:
            self.exchange.hold_grants("barrier")
            self.life.go_on_with(self._barrier(number))

    async def _barrier(self, number: int) -> None:
        """Deterministic mode: everything is drained already (bound 0, nothing granted); save,
        re-seed, go on.
        """
        await self.keeper.save()
        self.exchange.seed_epoch = number
        self.exchange.release_grants("barrier")

    def _manifest(self, saved: SavedState) -> Mapping[str, object]:
        return self._readings.manifest(saved)

    def _judged(self, evaluation: Evaluation) -> None:
        mean = self.judge.newest["mean_return"]
        self.events.publish(
            EvaluationFinished(
                evaluation.version.number, len(evaluation.returns), mean, evaluation.returns
            )
        )

    # Control
    # ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """Settings in force."""
        return self._in_force.config

    @property
    def generation(self) -> int:
        """Generation of the settings in force."""
        return self._in_force.generation

    def change(self, changes: Mapping[str, Mapping[str, object]], *, source: str) -> int:
        """Put live settings in force, whole or not at all."""
        return self._control.change(changes, source=source)

    def pause(self, *, source: str) -> str:
        """Nobody begins anything until `resume`."""
        return self._control.pause(source=source)

    def resume(self, *, source: str) -> str:
        """Go on after `pause`."""
        return self._control.resume(source=source)

    def drain(self, *, source: str) -> str:
        """Begin nothing new, train on what is there as far as it fills batches, then end."""
        return self._control.drain(source=source)

    def stop(self, *, source: str) -> str:
        """End with a checkpoint; what is open is dropped(stopped)."""
        return self._control.stop(source=source)

    def request_checkpoint(self, *, source: str) -> str:
        """Write one as soon as the learner is at a boundary."""
        return self._control.request_checkpoint(source=source)

    # Looking
    # ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """See `RunStatistics.state`."""
        return self.life.state

    @property
    def alive(self) -> bool:
        """True while the coordinator's own tick is young."""
        return self.rounds.alive

    @property
    def env_steps(self) -> int:
        """Environment steps in committed trajectories, those before a resume included."""
        return self._readings.env_steps

    @property
    def end_reason(self) -> str:
        """Why the run ended; "" while it goes on."""
        return self.life.end_reason

    @property
    def first_error(self) -> RunError | None:
        """Why the run failed."""
        return self.life.first_error

    @property
    def target_reached(self) -> bool:
        """True once an evaluation has confirmed it."""
        return self._goal.reached

    @property
    def audited(self) -> int:
        """Changes and actions of this process so far."""
        return self._control.audited

    def audit(self) -> Sequence[Mapping[str, object]]:
        """The newest changes and actions of this process."""
        return self._control.audit()

    async def read_audit(self, *, before: int | None, limit: int) -> AuditPage:
        """A page of all changes and actions, those before a resume included."""
        return await self._control.read_audit(before=before, limit=limit)

    def checkpoints(self) -> Sequence[Mapping[str, object]]:
        """Checkpoints on disk, newest first, as of the last one written."""
        return self.keeper.listing

    def ready(self) -> tuple[bool, tuple[str, ...]]:
        """Whether training can proceed, and why not. Paused by a person is ready."""
        return self._readings.ready()

    def statistics(self) -> RunStatistics:
        """Everything, at one moment."""
        return self._readings.statistics()

    def summary(self) -> dict[str, object]:
        """What ``summary.json`` and ``--json`` say of the run."""
        return self._readings.summary()


def _nothing() -> None:
    """Nobody waits for these to start."""
