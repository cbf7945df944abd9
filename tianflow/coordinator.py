"""A run: the one process that supervises, balances, keeps the ledger and the slots, checkpoints, and answers."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tianflow import config_loading, system
from tianflow.channels.broadcast import Broadcast
from tianflow.channels.latest import LatestCell
from tianflow.channels.replay_exchange import ReplayExchange
from tianflow.channels.replay_records import ShardPort
from tianflow.channels.shards import answers
from tianflow.checkpoint import Checkpoint
from tianflow.components.balancer import Balancer
from tianflow.config import Config
from tianflow.diagnosis import Watch
from tianflow.errors import (
    ConfigError,
    RunError,
    StateConflictError,
)
from tianflow.events import EnvironmentFailed, EpisodesFinished, EvaluationFinished, Event, HostExited, SettingsChanged
from tianflow.interfaces import LiveSettings
from tianflow.judge import EvaluatorPort, Judge
from tianflow.keeper import Base, Keeper, LearnerPort
from tianflow.logs import logger
from tianflow.payloads import EnvironmentSpec, Episode, Evaluation, SavedState, TrajectoryLayout
from tianflow.program import HostSpec
from tianflow.replay_rules import rate_limits
from tianflow.room import Room, SlotOwner
from tianflow.roster import Roster
from tianflow.statistics import ComponentStatistics, Diagnosis, Histogram, RunStatistics, SinkStatistics
from tianflow.summary import SUMMARY, summarise
from tianflow.supervisor import HostHandle, Patience, Supervisor
from tianflow.tallies import ActiveClock, EpisodeTally, Journal
from tianflow.tickets import State

TICK_S = 0.1
ENDED = ("done", "failed", "stopped")
STALE_TICK_S = 5.0

log = logger("coordinator")


class Run:
    """`tianflow.interfaces.RunControl`, and what hosts tell.

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
        self.settings: LatestCell[LiveSettings, int] = LatestCell(LiveSettings(config, config.bound), 0)
        self.events = Broadcast()
        self.sinks: dict[str, SinkStatistics] = {}
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._journal = Journal(path=directory / "audit.jsonl", executor=self._disk)
        self._active = ActiveClock()
        self._room = Room(owner=slots, layout=layout)
        self.draws = self._room.draws
        self.exchange = self._room.open(config, clock=self._active, beta=lambda: self.config.replay.beta, resumed=resumed)
        self._base = Base.of(resumed)
        self.exchange.seed_epoch = resumed.version.number if resumed and config.run.deterministic else 0
        self._roster = Roster()
        self.balancer = Balancer(
            exchange=self.exchange,
            settings=self.settings,
            set_bound=self._set_bound,
            waiting_seconds=self._roster.waiting_seconds,
            actors=lambda: self.config.actors.count,
        )
        self._episodes = EpisodeTally(count=self._base.episodes)
        self._watch = Watch()
        self._loop_lag = Histogram()
        self._state = "starting"
        self._began = time.monotonic()
        self._training_began: float | None = None
        self._to_target: float | None = None
        self._ended_at: float | None = None
        self._last_update = 0.0
        self._last_tick = time.monotonic()
        self._evaluated_at = self._base.episodes
        self._refused = 0
        self.keeper = Keeper(
            directory=directory,
            keep=config.checkpoint.keep,
            disk=self._disk,
            resumed=resumed,
            learner=lambda: self.learner_port if self._roster.learner_works else None,
            manifest=self._manifest,
            keep_replay=self._replay.keep if config.checkpoint.replay and isinstance(self.exchange, ReplayExchange) else None,
        )
        self.judge = Judge(
            ports=lambda: (self.learner_port, self.evaluator_port),
            hold=self._hold_learner,
            published=lambda: self.exchange.ledger.published,
            timeout_s=config.evaluation.timeout_s,
            give_up=self._give_up_evaluator,
            judged=self._judged,
        )
        self._ending = asyncio.Event()
        self._end_state, self._end_reason = "done", ""
        self.first_error: RunError | None = None
        self._target_reached = False
        self.learner_port: LearnerPort | None = None
        self.evaluator_port: EvaluatorPort | None = None
        self._supervisor: Supervisor | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self.exchange.on_settled(self._settled)

    # The run itself -------------------------------------------------------------------------------------------------

    async def run(self, start_host: Callable[[HostSpec, int], Awaitable[HostHandle]]) -> None:
        """From the first host to the last, until the run has ended. ``start_host`` is the launcher's."""
        config = self.config
        supervisor = Supervisor(
            start=start_host,
            lost=self.host_lost,
            failed=self.fail,
            open_tickets=lambda: [(t.number, t.slot, t.holder, t.state) for t in self.exchange.ledger.live(State.BEGUN)],
            progress=self.exchange.arena.progress,
            rebuilding=lambda: [(c.name, c.time.since) for c in self._roster.reports if c.time.current == "rebuilding"],
            patience=Patience(config.env.step_timeout_s, config.env.start_timeout_s, config.evaluation.timeout_s),
            max_restarts=config.run.max_restarts,
            window_s=config.run.restart_window_s,
            grace_s=config.run.grace_s,
        )
        self._supervisor = supervisor
        await self.keeper.open()
        watchers = [
            asyncio.create_task(supervisor.run(_nothing), name="supervisor"),
            asyncio.create_task(self.balancer.run(_nothing), name="balancer"),
            asyncio.create_task(self._tick(), name="tick"),
        ]
        supervisor.reconcile(system.build(config).placement.hosts)
        ending = asyncio.create_task(self._ending.wait())
        try:
            finished, _ = await asyncio.wait({ending, *watchers}, return_when=asyncio.FIRST_COMPLETED)
            for task in finished - {ending}:
                error = task.exception()
                self.fail(RunError(task.get_name(), f"ended: {error!r}", "".join(traceback.format_exception(error)) if error else ""))
            await self._wind_down(supervisor)
        except asyncio.CancelledError:
            await supervisor.abandon()
            self._state = "stopped"
            raise
        finally:
            ending.cancel()
            for running in (*watchers, *self._tasks):
                running.cancel()
            await asyncio.gather(ending, *watchers, *self._tasks, return_exceptions=True)
            self._ended_at = time.monotonic()
            await asyncio.get_running_loop().run_in_executor(self._disk, self._write_summary)
            self._disk.shutdown(wait=False)

    async def _wind_down(self, supervisor: Supervisor) -> None:
        """Drain or drop, save, judge, and send every host home."""
        failed = self._end_state == "failed"
        if self._state == "draining" and not failed:
            await self._while_the_learner_answers(self._drained())
        self._state = "stopping"
        self.exchange.hold_grants("ending")
        self.exchange.drop_open("stopped")
        self.exchange.close()
        if not failed:
            self._hold_learner(True)  # what it has pulled ahead would be an update more than the last checkpoint holds
            await self._while_the_learner_answers(self._last_things())
        await supervisor.stop()
        self.exchange.drop_open("stopped")
        self._state = self._end_state if self.first_error is None else "failed"

    async def _last_things(self) -> None:
        """The final checkpoint; a run that ended by itself is judged at the version it ended with."""
        if not self._target_reached and self._end_state == "done":
            self._target_reached = await self.judge.judge(target=self.config.run.target_return, hold=True)
        await self.keeper.save()

    async def _while_the_learner_answers(self, work: Coroutine[None, None, object]) -> None:
        """Do ``work``, which waits for the learner, but let a learner that has been stopped not keep the run from ending."""
        task = asyncio.get_running_loop().create_task(work)
        deadline = time.monotonic() + self.config.evaluation.timeout_s
        try:
            while not task.done():
                late = time.monotonic() > deadline
                if late or self._learner_silent_for() > self.config.run.grace_s:
                    log.warning("the run ends without its last things", reason="they take too long" if late else "the learner is silent")
                    return
                await asyncio.wait({task}, timeout=TICK_S)
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _learner_silent_for(self) -> float:
        handles = self._supervisor.handles if self._supervisor is not None else {}
        return handles["learner"].silent_for if "learner" in handles else 0.0

    async def _drained(self) -> None:
        """Until what was begun is trained on, as far as it fills batches."""
        ledger = self.exchange.ledger
        while self.learner_port is not None and not self._ending_now():
            open_ = len(ledger.live(State.GRANTED, State.BEGUN, State.TAKEN))
            if not open_ and len(ledger.live(State.COMMITTED)) < ledger.limits.batch:
                return
            await asyncio.sleep(TICK_S)

    def _ending_now(self) -> bool:
        return self._end_state in ("failed", "stopped")

    def end(self, state: str, reason: str) -> None:
        """The run is to end in ``state`` because of ``reason``; the first reason stays."""
        if not self._ending.is_set():
            self._end_state, self._end_reason = state, reason
            self._ending.set()

    def fail(self, error: RunError) -> None:
        """The run cannot go on. The first error is the one that is shown last."""
        if self.first_error is None:
            self.first_error = error
            log.error("the run failed", component=error.component, error=error.summary)
        if not self._ending.is_set() or self._state == "draining":
            self._end_state = "failed"
        self.end("failed", str(error))

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        next_save = next_evaluation = time.monotonic()
        next_save += self.config.checkpoint.every_s
        while True:
            asked = loop.time()
            await asyncio.sleep(TICK_S)
            self._loop_lag.add(max(0.0, loop.time() - asked - TICK_S))
            now = self._last_tick = time.monotonic()
            self._check_ends(now)
            if now >= next_save and not self.config.run.deterministic:
                next_save = now + self.config.checkpoint.every_s
                if not self.keeper.busy:  # one that waits for a slow learner will do
                    self._background(self.keeper.save())
            every = self.config.evaluation.every_s
            if every is not None and now >= next_evaluation and self._state == "running":
                next_evaluation = now + every
                self._background(self._evaluate_now())

    async def _evaluate_now(self) -> None:
        """A good one is confirmed at once: where actors explore, the returns of training never show that the target is reached."""
        target = self.config.run.target_return
        if await self.judge.judge(target=target) and target is not None and self._state == "running":
            await self._confirm(target)

    def _check_ends(self, now: float) -> None:
        limits = self.config.run
        if limits.max_env_steps is not None and self.env_steps >= limits.max_env_steps:
            self.end("done", "max_env_steps")
        elif limits.max_updates is not None and self.exchange.ledger.version.number >= limits.max_updates:
            self.end("done", "max_updates")
        elif limits.max_seconds is not None and self._trained_s(now) >= limits.max_seconds:
            self.end("done", "max_seconds")

    def _trained_s(self, now: float) -> float:
        """Seconds that count towards the limit: all those before a resume, and those since learner and actors were first at work."""
        return 0.0 if self._training_began is None else self._base.elapsed_s + now - self._training_began

    def _background(self, work: Coroutine[None, None, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            details = "".join(traceback.format_exception(error))
            self.fail(RunError("coordinator", f"{type(error).__name__}: {error}", details))

    # What hosts tell ------------------------------------------------------------------------------------------------

    def component_started(self, name: str) -> None:
        """A component does its work."""
        roster = self._roster
        roster.started(name)
        actors = roster.an_actor_was_started or not self.config.actors.count
        if self._state == "starting" and roster.was_started("learner") and actors:
            self._state = "paused" if self.settings.value.paused else "running"
            self._training_began = time.monotonic()

    def component_ended(self, name: str) -> None:
        """A component has ended as it was asked to, while the run goes on without it."""
        if not self._ending.is_set():
            self._roster.forget(name)

    def was_started(self, name: str) -> bool:
        """True if the component called ``name`` has ever worked in this run."""
        return self._roster.was_started(name)

    def report(self, statistics: ComponentStatistics) -> None:
        """A component's newest numbers."""
        self._roster.report(statistics)

    def episodes_finished(self, holder: str, episodes: Sequence[Episode]) -> None:
        """Episodes ended in a committed trajectory."""
        if not episodes:
            return
        self._episodes.add(episodes)
        self.publish(EpisodesFinished(holder, tuple(e.episode_return for e in episodes), tuple(e.length for e in episodes)))
        target, mean = self.config.run.target_return, self._episodes.mean
        if target is None or mean is None or mean < target or self._state != "running":
            return
        self._note_time_to_target()
        fresh = self._episodes.count - self._evaluated_at
        if not self.judge.busy and fresh >= len(self._episodes.returns):
            self._evaluated_at = self._episodes.count
            self._background(self._confirm(target))

    @property
    def _replay(self) -> ReplayExchange:
        assert isinstance(self.exchange, ReplayExchange)
        return self.exchange

    def shard_opened(self, index: int, incarnation: int, port: ShardPort) -> None:
        """A replay shard works, in this life of its host."""
        self._replay.shard_opened(index, incarnation, port)

    def shard_answers(self, index: int, incarnation: int) -> Callable[..., None]:
        """What takes the answers of replay shard ``index`` in this life of its host."""
        return answers(self._replay, index, incarnation)

    def _note_time_to_target(self) -> None:
        if self._to_target is None and self._training_began is not None:
            self._to_target = time.monotonic() - self._training_began

    def publish(self, event: Event) -> None:
        """Tell observers."""
        if isinstance(event, EnvironmentFailed):
            log.warning("an environment failed", component=event.component, reason=event.reason, error=event.message)
        self.events.publish(event)

    def host_lost(self, host: HostSpec, reason: str) -> None:
        """A host is gone and reaped: what it held comes back."""
        for component in host.components:
            if component.role == "learner":
                self.learner_port, self._roster.learner_works = None, False
                self.exchange.learner_lost("stopped" if reason == "stopped" else "learner_lost")
            elif component.role == "evaluator":
                self.evaluator_port = None
            elif component.role == "replay":
                self._replay.shard_lost(component.index, "stopped" if reason == "stopped" else "shard_lost")
            else:
                self.exchange.holder_lost(component.name, reason)
            self._roster.forget(component.name)
        self.publish(HostExited(host.name, reason))

    # Control --------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """Settings in force."""
        return self.settings.value.config

    @property
    def generation(self) -> int:
        """Generation of the settings in force."""
        return self.settings.key

    @property
    def state(self) -> str:
        """See `RunStatistics.state`."""
        return self._state

    @property
    def alive(self) -> bool:
        """True while the coordinator's own tick is young."""
        return time.monotonic() - self._last_tick < STALE_TICK_S

    def change(self, changes: Mapping[str, Mapping[str, object]], *, source: str) -> int:
        """Put live settings in force, whole or not at all."""
        self._require_going()
        before = self.config
        try:
            config = config_loading.with_changes(before, changes)
            self._room.check(config)
            self._room.grow(config, self.exchange)
        except ConfigError:
            self._refused += 1
            raise
        paths = {f"{section}.{key}" for section, keys in changes.items() for key in keys}
        old = {path: _at(before, path) for path in sorted(paths)}
        new = {path: _at(config, path) for path in sorted(paths)}
        self._journal.add(source, "change", old=old, new=new)
        self._put(replace(self.settings.value, config=config, bound=self.balancer.bound_with(config)))
        self._disk.submit(self._remember, config)
        if isinstance(self.exchange, ReplayExchange):
            self.exchange.set_rate(rate_limits(config))
        if config.actors.count != before.actors.count and self._supervisor is not None:
            self._supervisor.reconcile(system.build(config).placement.hosts)
        self.publish(SettingsChanged(self.generation, tuple(sorted(paths))))
        return self.generation

    def _remember(self, config: Config) -> None:
        """A resumed run has every change, also those that no checkpoint has seen."""
        try:
            config_loading.write_config(self.directory, config)
        except OSError as error:
            log.warning("the settings in force cannot be written", error=str(error))

    def pause(self, *, source: str) -> str:
        """Nobody begins anything until `resume`."""
        self._require_going()
        if not self.settings.value.paused:
            self._journal.add(source, "pause")
            self._state = "paused" if self._state == "running" else self._state
            self._active.pause()
            self.exchange.hold_grants("paused")
            self._put(replace(self.settings.value, paused=True))
        return "paused"

    def resume(self, *, source: str) -> str:
        """Go on after `pause`."""
        self._require_going()
        if self.settings.value.paused:
            self._journal.add(source, "resume")
            self._state = "running" if self._state == "paused" else self._state
            self._active.resume()
            self._put(replace(self.settings.value, paused=False))
            self.exchange.release_grants("paused")
        return "running"

    def drain(self, *, source: str) -> str:
        """Begin nothing new, train on what is there as far as it fills batches, then end."""
        self._require_going()
        self.resume(source=source)
        self._journal.add(source, "drain")
        self._state = "draining"
        self.exchange.hold_grants("draining")
        self.end("done", "drained")
        return "draining"

    def stop(self, *, source: str) -> str:
        """End with a checkpoint; what is open is dropped(stopped)."""
        if self._state in ENDED:
            raise StateConflictError(f"the run is {self._state}")
        if self._state == "draining":
            self._end_state = "stopped"
        if not self._ending.is_set():
            self._journal.add(source, "stop")
        self.end("stopped", source)
        return "stopping"

    def request_checkpoint(self, *, source: str) -> str:
        """Write one as soon as the learner is at a boundary."""
        self._require_going()
        self._journal.add(source, "checkpoint")
        self._background(self.keeper.save())
        return self._state

    def audit(self) -> Sequence[Mapping[str, object]]:
        """Every change and action."""
        return tuple(self._journal.records)

    def checkpoints(self) -> Sequence[Mapping[str, object]]:
        """Checkpoints on disk, newest first, as of the last one written."""
        return self.keeper.listing

    def _require_going(self) -> None:
        if self._state in ENDED or self._state == "stopping" or self._ending.is_set():
            raise StateConflictError(f"the run is {self._state if self._state in ENDED else 'ending'}")

    def _put(self, live: LiveSettings) -> None:
        self.settings.put(live, self.settings.key + 1)

    def _set_bound(self, bound: int | None) -> None:
        """Laws asked for another bound than the one in force."""
        if bound != self.settings.value.bound:
            self._put(replace(self.settings.value, bound=bound))

    # Keeping --------------------------------------------------------------------------------------------------------

    def _settled(self) -> None:
        self._last_update = time.time()
        number, run = self.exchange.ledger.version.number, self.config.run
        if run.max_updates is not None and number >= run.max_updates:
            self.exchange.hold_grants("ending")  # nobody begins what would be committed, and counted, only if the run is slow to end
            self.end("done", "max_updates")
        elif run.deterministic and number % run.barrier_updates == 0:
            self.exchange.hold_grants("barrier")
            self._background(self._barrier(number))

    async def _barrier(self, number: int) -> None:
        """Deterministic mode: everything is drained already (bound 0, nothing granted); save, re-seed, go on."""
        await self.keeper.save()
        self.exchange.seed_epoch = number
        self.exchange.release_grants("barrier")

    async def _confirm(self, target: float) -> None:
        """Training seems to have reached the target: judge exactly the newest version, and end if it has."""
        if await self.judge.judge(target=target, hold=True):
            self._target_reached = True
            self._note_time_to_target()
            self.end("done", "target_return")

    def _judged(self, evaluation: Evaluation) -> None:
        newest = self.judge.newest
        self.publish(EvaluationFinished(evaluation.version.number, len(evaluation.returns), newest["mean_return"], evaluation.returns))

    def _hold_learner(self, hold: bool) -> None:
        self._put(replace(self.settings.value, hold_learner=hold or self._state == "stopping"))

    def _give_up_evaluator(self) -> None:
        if self._supervisor is not None:
            self._supervisor.kill("evaluator", "env_hang")

    def _manifest(self, saved: SavedState) -> dict[str, object]:
        replay = {"replay": self._replay.limiter.snapshot()} if isinstance(self.exchange, ReplayExchange) else {}
        return {
            **replay,
            "run": self.id,
            "env_steps": self.env_steps,
            "samples": saved.samples,
            "episodes": self._episodes.count,
            "elapsed_s": self._base.elapsed_s + time.monotonic() - self._began,
            "config": json.loads(self.config.model_dump_json()),
            "recent_returns": list(self._episodes.returns),
            "evaluation": self.judge.newest,
        }

    def _write_summary(self) -> None:
        text = json.dumps(self.summary(), indent=2)
        try:
            (self.directory / SUMMARY).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            log.warning("the summary cannot be written", error=str(error))

    # Looking --------------------------------------------------------------------------------------------------------

    @property
    def env_steps(self) -> int:
        """Environment steps in committed trajectories, those before a resume included."""
        return self._base.env_steps + self.exchange.ledger.steps_committed

    @property
    def end_reason(self) -> str:
        """Why the run ended; "" while it goes on."""
        return self._end_reason

    @property
    def target_reached(self) -> bool:
        """True once an evaluation has confirmed it."""
        return self._target_reached

    def ready(self) -> tuple[bool, tuple[str, ...]]:
        """Whether training can proceed, and why not. Paused by a person is ready."""
        if self._state == "starting":
            there = {"learner": self._roster.was_started("learner"), "an actor": self._roster.an_actor_was_started}
            waiting = [name for name, started in there.items() if not started]
            return False, (f"starting: waiting for {' and '.join(waiting)}",) if waiting else ("starting",)
        if self._state not in ("running", "paused", "draining"):
            return False, (f"the run is {self._state}",)
        reasons = []
        if not self._roster.learner_works:
            reasons.append("the learner is gone and not yet back")
        if isinstance(self.exchange, ReplayExchange) and not self.exchange.shards_up:
            reasons.append("no replay shard is up: nothing is stored or drawn")
        handles = self._supervisor.handles if self._supervisor is not None else {}
        for name, handle in handles.items():
            if handle.silent_for > 3.0 + self.config.metrics.interval_s:
                reasons.append(f"host {name!r} has said nothing for {handle.silent_for:.0f} s")
        if self.config.actors.count and not any(c.role == "actor" for c in self._roster.reports):
            reasons.append("no actor is alive")
        elif not self.config.actors.count:
            reasons.append("there are no actors: actors.count is 0")
        return not reasons, tuple(reasons)

    def statistics(self) -> RunStatistics:
        """Everything, at one moment."""
        now = time.monotonic()
        ledger = self.exchange.ledger
        components = tuple(self._roster.reports)
        ready, reasons = self.ready()
        replay = self.exchange.replay_statistics() if isinstance(self.exchange, ReplayExchange) else None
        supervisor = self._supervisor
        statistics = RunStatistics(
            run=self.id,
            state=self._state,
            ready=ready,
            reasons=reasons,
            now=now,
            elapsed_s=self._base.elapsed_s + now - self._began,
            ledger=ledger.snapshot(),
            components=components,
            laws=self.balancer.statistics(),
            env_steps=self.env_steps,
            env_frames=self.env_steps * self.spec.frames_per_step,
            episodes=self._episodes.count,
            recent_returns=tuple(self._episodes.returns),
            recent_lengths=tuple(self._episodes.lengths),
            evaluation=dict(self.judge.newest),
            evaluation_failures=self.judge.failures,
            restarts=dict(supervisor.restarts) if supervisor else {},
            starts=dict(supervisor.starts) if supervisor else {},
            events_dropped=self.events.dropped,
            sinks=dict(self.sinks),
            events_received=self.events.published,
            generation=self.generation,
            settings_changes=self.generation,
            settings_refused=self._refused,
            checkpoint=self.keeper.statistics,
            loop_lag=self._loop_lag.read(),
            last_update_timestamp=self._last_update,
            actors_wanted=self.config.actors.count,
            diagnosis=Diagnosis(self._state, ""),
            replay=replay,
            target_return=self.config.run.target_return,
            time_to_target_s=self._to_target,
        )
        return self._watch.look(statistics, self.config)

    def summary(self) -> dict[str, object]:
        """What ``summary.json`` and ``--json`` say of the run."""
        now = time.monotonic() if self._ended_at is None else self._ended_at
        return summarise(
            self.statistics(),
            reason=self._end_reason,
            target_reached=self._target_reached,
            training_s=None if self._training_began is None else now - self._training_began,
            seed=self.config.run.seed,
            error=str(self.first_error) if self.first_error else None,
        )


def _at(config: Config, path: str) -> object:
    section, key = path.split(".", 1)
    return json.loads(getattr(config, section).model_dump_json()).get(key)


def _nothing() -> None:
    """Nobody waits for these to start."""
