"""RunSnapshot: a run at one moment, as statistics, readiness, manifest and summary."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tianflow.config import spaces
from tianflow.core.payloads import HEARTBEAT_S
from tianflow.core.statistics import Diagnosis, LedgerSnapshot, RunStatistics
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.logs import logger
from tianflow.observability.diagnosis import DiagnosisWindow
from tianflow.rundir.summary import SUMMARY, summarise

if TYPE_CHECKING:
    from tianflow.channels.broadcast import Broadcast
    from tianflow.coordinator.balancer import Balancer
    from tianflow.coordinator.checkpointing import CheckpointManager, ResumePoint
    from tianflow.coordinator.control import LiveConfig
    from tianflow.coordinator.evaluation import EvaluationScheduler, TargetTracker
    from tianflow.coordinator.hosts import HostGroup
    from tianflow.coordinator.lifecycle import Lifecycle, PeriodicTasks
    from tianflow.coordinator.process_usage import ProcessUsage
    from tianflow.coordinator.registry import ComponentRegistry
    from tianflow.core.payloads import EnvironmentSpec, SavedState
    from tianflow.core.statistics import SinkStatistics
    from tianflow.exchange.exchange import Exchange
    from tianflow.interfaces import NodesView

SILENT_S = 3.0 * HEARTBEAT_S
"""A host that is silent for longer makes a run unready."""

log = logger("coordinator")


class RunSnapshot:
    """Reads the parts of a run and changes none of them.

    Args:
        run_id: its name.
        spec: of the environments.
        base: what a resumed run continues.
        sinks: counts of sinks, by name.
        settings_pending: number of audit records and settings that wait for the disk.
        others: the parts.
    """

    def __init__(
        self,
        *,
        run_id: str,
        spec: EnvironmentSpec,
        base: ResumePoint,
        lifecycle: Lifecycle,
        live: LiveConfig,
        exchange: Exchange,
        registry: ComponentRegistry,
        balancer: Balancer,
        checkpoints: CheckpointManager,
        evaluation: EvaluationScheduler,
        target: TargetTracker,
        hosts: HostGroup,
        usage: ProcessUsage,
        nodes: Callable[[], NodesView | None],
        periodic: PeriodicTasks,
        events: Broadcast,
        sinks: Mapping[str, SinkStatistics],
        settings_pending: Callable[[], int],
    ) -> None:
        self._settings_pending = settings_pending
        self._id, self._spec, self._base = run_id, spec, base
        self._lifecycle, self._live, self._exchange = lifecycle, live, exchange
        self._registry, self._balancer, self._checkpoints = registry, balancer, checkpoints
        self._evaluation, self._target, self._hosts = evaluation, target, hosts
        self._usage, self._nodes = usage, nodes
        self._periodic, self._events, self._sinks = periodic, events, sinks
        self._diagnosis = DiagnosisWindow()
        self.last_update = 0.0
        """Unix time of the last settled update; 0 before."""

    @property
    def env_steps(self) -> int:
        """Environment steps in committed trajectories, those before a resume included."""
        return self._base.env_steps + self._exchange.ledger.steps_committed

    def ready(self) -> tuple[bool, tuple[str, ...]]:
        """Whether training can proceed, and why not. A paused run is ready."""
        state, registry, config = self._lifecycle.state, self._registry, self._live.config
        if state == "starting":
            started = {
                "learner": registry.was_started("learner"),
                "an actor": registry.an_actor_was_started,
                **dict.fromkeys(registry.missing_servers(config), False),
            }
            waiting = [name for name, works in started.items() if not works]
            first = f"starting: waiting for {' and '.join(waiting)}" if waiting else "starting"
            return False, (first, *self._hosts.slow_starts)
        if state not in ("running", "paused", "draining"):
            return False, (f"the run is {state}",)
        reasons = []
        if not registry.learner_works:
            reasons.append("the learner is gone and not yet back")
        if missing := registry.missing_servers(config):
            reasons.append(f"inference servers are gone and not yet back: {', '.join(missing)}")
        if isinstance(self._exchange, ReplayExchange) and not self._exchange.shards_up:
            reasons.append("no replay shard is up: nothing is stored or drawn")
        for name, handle in self._hosts.handles.items():
            if handle.silent_for > SILENT_S:
                reasons.append(f"host {name!r} has said nothing for {handle.silent_for:.0f} s")
        if config.actors.count and not any(c.role == "actor" for c in registry.reports):
            reasons.append("no actor is alive")
        elif not config.actors.count:
            reasons.append("there are no actors: actors.count is 0")
        return not reasons, tuple(reasons)

    def statistics(self) -> RunStatistics:
        """All numbers, at one moment."""
        now, config, target = time.monotonic(), self._live.config, self._target
        ready, reasons = self.ready()
        env_steps, nodes = self.env_steps, self._nodes()
        statistics = RunStatistics(
            run=self._id,
            state=self._lifecycle.state,
            ready=ready,
            reasons=reasons,
            now=now,
            elapsed_s=self._lifecycle.elapsed_s(now),
            ledger=self._ledger(),
            components=tuple(self._registry.reports),
            controllers=self._balancer.statistics(),
            env_steps=env_steps,
            env_frames=env_steps * self._spec.frames_per_step,
            episodes=target.episodes.count,
            recent_returns=tuple(target.episodes.returns),
            recent_lengths=tuple(target.episodes.lengths),
            evaluation=dict(self._evaluation.newest),
            further_evaluations=dict(self._evaluation.further),
            evaluation_failures=self._evaluation.failures,
            restarts=self._hosts.restarts,
            starts=self._hosts.starts,
            events_dropped=self._events.dropped,
            sinks=dict(self._sinks),
            processes=self._usage.statistics,
            nodes={} if nodes is None else nodes.statistics(),
            nodes_arrived=0 if nodes is None else nodes.arrived,
            nodes_refused=0 if nodes is None else nodes.refused,
            nodes_connections=0 if nodes is None else nodes.connections,
            nodes_connections_refused={} if nodes is None else dict(nodes.connections_refused),
            events_received=self._events.published,
            generation=self._live.generation,
            settings_changes=self._live.changes,
            settings_refused=self._live.refused,
            settings_pending=self._settings_pending(),
            checkpoint=self._checkpoints.statistics,
            loop_lag=self._periodic.loop_lag.read(),
            last_update_timestamp=self.last_update,
            actors_wanted=config.actors.count,
            diagnosis=Diagnosis(self._lifecycle.state, ""),
            replay=self._exchange.replay_statistics()
            if isinstance(self._exchange, ReplayExchange)
            else None,
            target_return=config.run.target_return,
            time_to_target_s=target.time_to_target_s,
            trained_s=self._lifecycle.trained_s(now),
            evaluating=self._evaluation.busy,
            earlier_episodes=self._base.episodes,
            earlier=self._registry.earlier,
            gone=self._registry.gone,
            evaluation_left_s=None
            if self._lifecycle.evaluation_deadline is None
            else max(0.0, self._lifecycle.evaluation_deadline - now),
        )
        return self._diagnosis.diagnosed(statistics, config)

    def _ledger(self) -> LedgerSnapshot:
        """Of the ledger. Until a first learner works, a resumed run is at the version of its
        checkpoint.
        """
        found = self._exchange.ledger.snapshot()
        return (
            found
            if found.version >= self._base.version
            else replace(found, version=self._base.version)
        )

    def manifest(self, saved: SavedState) -> dict[str, object]:
        """The manifest of a checkpoint, beside the state that the learner ``saved``."""
        replay = (
            {"replay": self._exchange.limiter.snapshot()}
            if isinstance(self._exchange, ReplayExchange)
            else {}
        )
        return {
            **replay,
            "run": self._id,
            "revision": self._live.revision,
            "env_steps": self.env_steps,
            "samples": saved.samples,
            "episodes": self._target.episodes.count,
            "elapsed_s": self._lifecycle.elapsed_s(time.monotonic()),
            "trained_s": self._lifecycle.trained_s(time.monotonic()),
            "config": json.loads(self._live.config.model_dump_json()),
            "environment": spaces.to_json(self._spec),
            "recent_returns": list(self._target.episodes.returns),
            "evaluation": self._evaluation.newest,
        }

    def summary(self) -> dict[str, object]:
        """The contents of ``summary.json`` and of ``--json``."""
        lifecycle = self._lifecycle
        return summarise(
            self.statistics(),
            reason=lifecycle.end_reason,
            target_reached=self._target.reached,
            training_s=lifecycle.training_s,
            seed=self._live.config.run.seed,
            error=str(lifecycle.first_error) if lifecycle.first_error else None,
            checkpoint=self._checkpoints.newest_updates,
            clipped_rewards=self._spec.clips_rewards,
        )

    async def write_summary(self, directory: Path, disk: Executor) -> None:
        """Write the summary into ``directory``. A disk that refuses it is logged, not an error."""
        text = json.dumps(self.summary(), indent=2) + "\n"
        try:
            await asyncio.get_running_loop().run_in_executor(
                disk, (directory / SUMMARY).write_text, text, "utf-8"
            )
        except OSError as error:
            log.warning("the summary cannot be written", error=str(error))
