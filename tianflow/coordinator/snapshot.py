"""What can be seen of a run at one moment: its statistics, whether it is ready, its manifest and
its summary.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from tianflow.channels.broadcast import Broadcast
from tianflow.coordinator.balancer import Balancer
from tianflow.coordinator.checkpointing import CheckpointManager, ResumePoint
from tianflow.coordinator.control import Control, LiveConfig
from tianflow.coordinator.evaluation import EvaluationScheduler, TargetTracker
from tianflow.coordinator.hosts import HostGroup
from tianflow.coordinator.lifecycle import Lifecycle, PeriodicTasks
from tianflow.coordinator.registry import ComponentRegistry
from tianflow.core.payloads import EnvironmentSpec, SavedState
from tianflow.core.statistics import Diagnosis, LedgerSnapshot, RunStatistics, SinkStatistics
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.logs import logger
from tianflow.observability.diagnosis import DiagnosisWindow
from tianflow.rundir.summary import SUMMARY, summarise

log = logger("coordinator")


class RunSnapshot:
    """Reads the parts of a run and changes none of them.

    Args:
        run_id: its name.
        spec: of the environments.
        base: what a resumed run goes on from.
        sinks: what sinks counted, by name.
        others: the parts.
    """

    def __init__(
        self,
        *,
        run_id: str,
        spec: EnvironmentSpec,
        base: ResumePoint,
        life: Lifecycle,
        in_force: LiveConfig,
        exchange: Exchange,
        roster: ComponentRegistry,
        balancer: Balancer,
        control: Control,
        keeper: CheckpointManager,
        judge: EvaluationScheduler,
        goal: TargetTracker,
        staff: HostGroup,
        rounds: PeriodicTasks,
        events: Broadcast,
        sinks: Mapping[str, SinkStatistics],
    ) -> None:
        self._id, self._spec, self._base, self._life, self._in_force = (
            run_id,
            spec,
            base,
            life,
            in_force,
        )
        self._exchange, self._roster, self._balancer, self._control = (
            exchange,
            roster,
            balancer,
            control,
        )
        self._keeper, self._judge, self._goal, self._staff, self._rounds = (
            keeper,
            judge,
            goal,
            staff,
            rounds,
        )
        self._events, self._sinks = events, sinks
        self._watch = DiagnosisWindow()
        self.last_update = 0.0
        """When the last update was settled: seconds since the epoch."""

    @property
    def env_steps(self) -> int:
        """Environment steps in committed trajectories, those before a resume included."""
        return self._base.env_steps + self._exchange.ledger.steps_committed

    def ready(self) -> tuple[bool, tuple[str, ...]]:
        """Whether training can proceed, and why not. Paused by a person is ready."""
        state, roster, config = self._life.state, self._roster, self._in_force.config
        if state == "starting":
            there = {
                "learner": roster.was_started("learner"),
                "an actor": roster.an_actor_was_started,
            }
            waiting = [name for name, started in there.items() if not started]
            return False, (f"starting: waiting for {' and '.join(waiting)}",) if waiting else (
                "starting",
            )
        if state not in ("running", "paused", "draining"):
            return False, (f"the run is {state}",)
        reasons = []
        if not roster.learner_works:
            reasons.append("the learner is gone and not yet back")
        if isinstance(self._exchange, ReplayExchange) and not self._exchange.shards_up:
            reasons.append("no replay shard is up: nothing is stored or drawn")
        for name, handle in self._staff.handles.items():
            if handle.silent_for > 3.0 + config.metrics.interval_s:
                reasons.append(f"host {name!r} has said nothing for {handle.silent_for:.0f} s")
        if config.actors.count and not any(c.role == "actor" for c in roster.reports):
            reasons.append("no actor is alive")
        elif not config.actors.count:
            reasons.append("there are no actors: actors.count is 0")
        return not reasons, tuple(reasons)

    def statistics(self) -> RunStatistics:
        """Everything, at one moment."""
        now, config, goal = time.monotonic(), self._in_force.config, self._goal
        ready, reasons = self.ready()
        env_steps = self.env_steps
        statistics = RunStatistics(
            run=self._id,
            state=self._life.state,
            ready=ready,
            reasons=reasons,
            now=now,
            elapsed_s=self._life.elapsed_s(now),
            ledger=self._ledger(),
            components=tuple(self._roster.reports),
            controllers=self._balancer.statistics(),
            env_steps=env_steps,
            env_frames=env_steps * self._spec.frames_per_step,
            episodes=goal.episodes.count,
            recent_returns=tuple(goal.episodes.returns),
            recent_lengths=tuple(goal.episodes.lengths),
            evaluation=dict(self._judge.newest),
            evaluation_failures=self._judge.failures,
            restarts=self._staff.restarts,
            starts=self._staff.starts,
            events_dropped=self._events.dropped,
            sinks=dict(self._sinks),
            events_received=self._events.published,
            generation=self._in_force.generation,
            settings_changes=self._control.changed,
            settings_refused=self._control.refused,
            checkpoint=self._keeper.statistics,
            loop_lag=self._rounds.loop_lag.read(),
            last_update_timestamp=self.last_update,
            actors_wanted=config.actors.count,
            diagnosis=Diagnosis(self._life.state, ""),
            replay=self._exchange.replay_statistics()
            if isinstance(self._exchange, ReplayExchange)
            else None,
            target_return=config.run.target_return,
            time_to_target_s=goal.time_to_target_s,
            trained_s=self._life.trained_s(now),
            evaluating=self._judge.busy,
            evaluation_left_s=None
            if self._life.evaluates_until is None
            else max(0.0, self._life.evaluates_until - now),
        )
        return self._watch.diagnosed(statistics, config)

    def _ledger(self) -> LedgerSnapshot:
        """As it is; until a first learner works, a resumed run stands at the version of its
        checkpoint.
        """
        found = self._exchange.ledger.snapshot()
        return (
            found
            if found.version >= self._base.version
            else replace(found, version=self._base.version)
        )

    def manifest(self, saved: SavedState) -> dict[str, object]:
        """What a checkpoint keeps beside the state that the learner ``saved``."""
        replay = (
            {"replay": self._exchange.limiter.snapshot()}
            if isinstance(self._exchange, ReplayExchange)
            else {}
        )
        return {
            **replay,
            "run": self._id,
            "env_steps": self.env_steps,
            "samples": saved.samples,
            "episodes": self._goal.episodes.count,
            "elapsed_s": self._life.elapsed_s(time.monotonic()),
            "trained_s": self._life.trained_s(time.monotonic()),
            "config": json.loads(self._in_force.config.model_dump_json()),
            "recent_returns": list(self._goal.episodes.returns),
            "evaluation": self._judge.newest,
        }

    def summary(self) -> dict[str, object]:
        """What ``summary.json`` and ``--json`` say of the run."""
        life = self._life
        return summarise(
            self.statistics(),
            reason=life.end_reason,
            target_reached=self._goal.reached,
            training_s=life.training_s,
            seed=self._in_force.config.run.seed,
            error=str(life.first_error) if life.first_error else None,
            checkpoint=self._keeper.kept,
        )

    async def keep_summary(self, directory: Path, disk: Executor) -> None:
        """Keep the summary in ``directory``; a disk that takes none is told of and no error."""
        text = json.dumps(self.summary(), indent=2) + "\n"
        try:
            await asyncio.get_running_loop().run_in_executor(
                disk, (directory / SUMMARY).write_text, text, "utf-8"
            )
        except OSError as error:
            log.warning("the summary cannot be written", error=str(error))
