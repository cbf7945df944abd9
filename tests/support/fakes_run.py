"""A `RunControl` without processes: a real ledger driven by hand, and real statistics of made-up
components.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tianflow.channels.broadcast import Broadcast
from tianflow.config.loading import with_changes
from tianflow.config.model import Config, EnvSettings, PPOSettings, RunSettings
from tianflow.core.learning import LearningTally
from tianflow.core.limits import Limits, RateLimits
from tianflow.core.payloads import Batch, Holdings, Settlement, Trajectory, Version
from tianflow.core.statistics import (
    ROWS_BUCKETS,
    CheckpointStatistics,
    ComponentStatistics,
    ControllerStatistics,
    Diagnosis,
    HistogramBuilder,
    InferenceMeasures,
    NodeStatistics,
    ProcessStatistics,
    ReplayStatistics,
    RunStatistics,
    SinkStatistics,
    TimeShares,
)
from tianflow.errors import ConfigError, StateConflictError
from tianflow.ledger.ledger import Ledger
from tianflow.ledger.tickets import State
from tianflow.replay.rate_limiter import Limiter
from tianflow.rundir.audit_log import RECORDS_IN_MEMORY, AuditPage

ENDED = ("done", "failed", "stopped")
BATCH = 2
STEPS = 32


def make_config() -> Config:
    return Config(
        env=EnvSettings(id="CartPole-v1"),
        algorithm=PPOSettings(batch_trajectories=BATCH, minibatch_size=64),
        run=RunSettings(target_return=475.0, max_env_steps=10_000),
    )


class FakeReplay:
    """Two shards without data under a real limiter: 2 samples per insert, from 64 items on.

    The side ``held_back`` is held back for ``share`` of the time.
    """

    def __init__(self) -> None:
        limits = RateLimits.around(
            samples_per_insert=2.0,
            min_size=64,
            error_buffer=200.0,
            capacity=1000,
            insert_size=32,
            draw_size=64,
        )
        self.limiter = Limiter(limits=limits)
        self.shards = {0: Holdings(nbytes=4096), 1: Holdings(nbytes=4096)}
        self.inserted_steps = {0: 0, 1: 0}
        self.trained = self.held = 0
        self.discarded: Counter[str] = Counter()
        self.held_back, self.share = "draw", 1.0

    def insert(self, items: int, *, shard: int = 0) -> None:
        """``items`` steps came in, each of which completed an item of mass 0.5."""
        old = self.shards[shard]
        self.limiter.inserted(items)
        self.inserted_steps[shard] += items
        self.shards[shard] = old._replace(
            items=old.items + items,
            steps=old.steps + items,
            inserted_steps=old.inserted_steps + items,
            mass=old.mass + 0.5 * items,
        )

    def draw(self, items: int) -> None:
        """They are held from now on."""
        self.limiter.drawn(items)
        self.held += items

    def train(self, items: int) -> None:
        """What was held is trained on."""
        self.held -= items
        self.trained += items

    def discard(self, items: int, reason: str) -> None:
        """What was held is not used."""
        self.held -= items
        self.discarded[reason] += items

    def lose(self, shard: int) -> None:
        """A shard is gone with what it held."""
        self.limiter.deleted(self.shards.pop(shard).items)

    def statistics(self, seconds: float) -> ReplayStatistics:
        """As they are after so many seconds."""
        limiter = self.limiter.statistics()
        return ReplayStatistics(
            shards=dict(self.shards),
            inserts=limiter.inserts,
            deletes=limiter.deletes,
            drawn=limiter.samples,
            trained=self.trained,
            discarded=dict(self.discarded),
            held=self.held,
            diff=limiter.diff,
            limits=self.limiter.limits,
            samples_per_insert=limiter.samples / limiter.inserts if limiter.inserts else 0.0,
            blocked_s={"insert": 0.0, "draw": 0.0, self.held_back: self.share * seconds},
            inserted_steps=dict(self.inserted_steps),
        )


class FakeRun:
    """Implements `tianflow.interfaces.RunControl`. ``now`` is its clock; `train` makes updates.

    With ``replay`` it has what a run with replay has, too, and `train` moves items through it.
    """

    def __init__(
        self,
        *,
        directory: Path = Path("runs/fake"),
        name: str = "fake",
        slots: int = 16,
        replay: bool = False,
    ) -> None:
        self.id, self.directory = name, directory
        self.events = Broadcast()
        self.config = make_config()
        self.generation = 1
        self.state = "running"
        self.alive = True
        self.ready = True
        self.reasons: tuple[str, ...] = ()
        self.now = 100.0
        self.began = 0.0
        self.returns: list[float] = []
        self.evaluation: dict[str, float] = {}
        self.further_evaluations: dict[str, dict[str, float]] = {}
        self.restarts: dict[tuple[str, str], int] = {}
        self.checkpoint = CheckpointStatistics(attempts=1, last_success=time.time())
        self.last_update = 0.0
        self.events_dropped = 0
        self.sinks: dict[str, SinkStatistics] = {}
        self.refused = 0
        self.diagnosis = Diagnosis(
            "learning-bound", "a faster learner would help", waits={"learner": 0.1, "actors": 0.6}
        )
        self.waiting = 10.0
        self.update_seconds = HistogramBuilder()
        self.learning = LearningTally(group="train", source="algorithm")
        """Of the learner; filled by `train`."""
        self.metrics = LearningTally(group="rollout", source="actor-0")
        """Of the first actor."""
        self.loop_lag = HistogramBuilder()
        self.ledger = Ledger(
            limits=Limits(batch=BATCH, max_staleness=1, credits=4, patience=10.0), slots=slots
        )
        self.ledger.open_lineage(Version(1, 0))
        self.replay = FakeReplay() if replay else None
        self.servers = 0
        """Number of inference servers."""
        self._audit: list[Mapping[str, object]] = []
        with_changes(self.config, {})  # reads the installed entry points once, before any loop runs

    # Driving
    # ----------------------------------------------------------------------------------------------

    def commit(self, count: int = 1) -> None:
        """``count`` trajectories of 32 steps, made with the newest published version."""
        for _ in range(count):
            grant = self.ledger.grant(f"actor-{self.ledger.snapshot().granted % 2}")
            assert grant is not None
            assert self.ledger.begin(grant.ticket, self.ledger.published)
            trajectory = Trajectory(grant.ticket, grant.slot, STEPS, STEPS, self.ledger.published)
            assert self.ledger.commit(grant.ticket, trajectory, self.now)

    def train(self, updates: int = 1, *, seconds: float = 1.0, bound: int | None = 1) -> None:
        """``updates`` updates of ``seconds`` each, on trajectories made just before."""
        for _ in range(updates):
            self.commit(BATCH)
            batch = self.ledger.take(self.ledger.version, self.now)
            assert isinstance(batch, Batch)
            numbers = tuple(t.ticket for t in batch.trajectories)
            made = Version(self.ledger.version.lineage, self.ledger.version.number + 1)
            self.ledger.settle(Settlement(made, numbers, bound, published=True))
            if self.replay is not None:
                self.insert(self.replay)
            self.now += seconds
            self.update_seconds.add(seconds)
            loss = 1.0 / made.number
            statistics = {"loss": loss, "policy_loss": -loss, "value_loss": 2.0 * loss}
            statistics |= {"entropy": 0.5, "approx_kl": 0.01, "kl": 0.01, "grad_norm": 0.25}
            self.learning.add(self.learning.accept({**statistics, "learning_rate": 2.5e-4}))
            self.metrics.add(self.metrics.accept({"success": 1.0}))
            self.loop_lag.add(0.001)
            self.returns.append(float(made.number))
            self.last_update = time.time()

    def insert(self, replay: FakeReplay, items: int = STEPS) -> None:
        """A trajectory went into replay, and two draws were made: one trained on, one discarded."""
        self.commit(1)
        ticket = self.ledger.live(State.COMMITTED)[-1]
        self.ledger.take_one(ticket.number)
        self.ledger.inserted(ticket.number)
        replay.insert(items)
        replay.draw(2 * items)
        replay.train(items)
        replay.discard(items, "expired")

    # RunControl
    # ----------------------------------------------------------------------------------------------

    def statistics(self) -> RunStatistics:
        ledger = self.ledger.snapshot()
        return RunStatistics(
            run=self.id,
            state=self.state,
            ready=self.ready,
            reasons=self.reasons,
            now=self.now,
            elapsed_s=self.now - self.began,
            ledger=ledger,
            components=self._components(),
            controllers=(
                ControllerStatistics("staleness", ledger.updates, 4, winning=True),
                ControllerStatistics("freshest", 0, 8, winning=False),
            ),
            env_steps=ledger.steps_committed,
            env_frames=ledger.steps_committed,
            episodes=len(self.returns),
            recent_returns=tuple(self.returns[-100:]),
            recent_lengths=tuple(int(value) for value in self.returns[-100:]),
            evaluation=self.evaluation,
            further_evaluations=self.further_evaluations,
            evaluation_failures=0,
            replay=None if self.replay is None else self.replay.statistics(self.now - self.began),
            restarts=self.restarts,
            starts={"learner": 1, "actors-0": 1 + sum(self.restarts.values())},
            events_dropped=self.events_dropped,
            sinks=dict(self.sinks),
            processes={
                "coordinator": ProcessStatistics(0.1 * (self.now - self.began), 2**26),
                "learner": ProcessStatistics(0.9 * (self.now - self.began), 2**28),
                "actors-0": ProcessStatistics(2.0, None),
            },
            nodes={
                "far": NodeStatistics(
                    up=True,
                    ready=True,
                    cores=4,
                    roles=("actors", "replay"),
                    hosts=3,
                    shards=("replay-0",),
                    actors=("actor-0", "actor-1"),
                    late=(),
                    silent_s=0.25,
                    round_trip_s=0.002,
                    weights_lag=1,
                    unacknowledged=3,
                    sent_bytes={"messages": 2**10, "weights": 2**20},
                    received_bytes={"messages": 2**11, "trajectories": 2**21},
                    direct_sent_bytes=2**19,
                    direct_received_bytes=2**18,
                )
            },
            events_received=ledger.committed,
            generation=self.generation,
            settings_changes=self.generation - 1,
            settings_refused=self.refused,
            settings_pending=0,
            checkpoint=self.checkpoint,
            loop_lag=self.loop_lag.read(),
            last_update_timestamp=self.last_update,
            actors_wanted=self.config.actors.count,
            diagnosis=self.diagnosis,
            target_return=self.config.run.target_return,
            time_to_target_s=None,
        )

    def _components(self) -> tuple[ComponentStatistics, ...]:
        learner = ComponentStatistics(
            name="learner",
            role="learner",
            host="learner",
            time=TimeShares(
                {"starting": 1.0, "waiting:batch": self.waiting},
                "busy",
                self.began + 1.0 + self.waiting,
            ),
            generation=self.generation,
            counters={
                "samples": float(self.ledger.snapshot().steps_trained),
                "given_back": 0.0,
                "refused_statistics": float(self.learning.refused),
                "weights_bytes": 4096.0,
            },
            gauges={"kl": 0.01, "ess_ratio": 0.9, "divergence": 0.002},
            distributions={
                "update_seconds": self.update_seconds.read(),
                "publish_seconds": HistogramBuilder().read(),
            },
            learning=self.learning.read(),
        )
        actors = tuple(
            ComponentStatistics(
                name=f"actor-{place}",
                role="actor",
                host="actors-0",
                time=TimeShares({"busy": 40.0}, "waiting:grant", self.began + 40.0),
                generation=self.generation,
                counters={
                    "trajectories": 5.0,
                    "env_failures": 1.0,
                    "poisoned": 0.0,
                    "refused_metrics": 0.0,
                },
                learning={} if place else self.metrics.read(),
            )
            for place in range(2)
        )
        shards = () if self.replay is None else tuple(self._shard(index) for index in range(2))
        servers = tuple(self._server(index) for index in range(self.servers))
        return (learner, *shards, *servers, *actors)

    def _server(self, index: int) -> ComponentStatistics:
        rows, seconds = HistogramBuilder(ROWS_BUCKETS), HistogramBuilder()
        rows.add(2)
        seconds.add(0.001)
        counted = float(self.ledger.snapshot().committed)
        return ComponentStatistics(
            name=f"inference-{index}",
            role="inference",
            host=f"inference-{index}",
            time=TimeShares({"busy": 1.0}, "waiting:requests", self.began + 1.0),
        ).with_measures(
            InferenceMeasures(
                requests=counted,
                padding=0.0,
                weight_loads=1.0,
                failures=0.0,
                batch_rows=rows.read(),
                wait_seconds=seconds.read(),
                compute_seconds=seconds.read(),
            )
        )

    def _shard(self, index: int) -> ComponentStatistics:
        seconds = HistogramBuilder()
        seconds.add(0.001)
        return ComponentStatistics(
            name=f"replay-{index}",
            role="replay",
            host=f"replay-{index}",
            time=TimeShares({"busy": 1.0}, "waiting:request", self.began + 1.0),
            counters=dict.fromkeys(("inserted_items", "drawn_items", "refused_priorities"), 1.0),
            distributions={
                name: seconds.read()
                for name in ("insert_seconds", "draw_seconds", "prioritise_seconds")
            },
        )

    def change(self, changes: Mapping[str, Mapping[str, object]], *, source: str) -> int:
        if self.state in ENDED:
            raise StateConflictError(f"the run is {self.state}")
        old = self.config
        try:
            self.config = with_changes(self.config, changes)
        except ConfigError:
            self.refused += 1
            raise
        self.generation += 1
        bound = self.config.bound
        limits = replace(self.ledger.limits, max_staleness=bound)
        self.ledger.set_limits(limits)
        self._record(
            source, "change", {name: dict(getattr(old, name)) for name in changes}, dict(changes)
        )
        return self.generation

    def pause(self, *, source: str) -> str:
        return self._act("pause", "paused", source)

    def resume(self, *, source: str) -> str:
        return self._act("resume", "running", source)

    def drain(self, *, source: str) -> str:
        return self._act("drain", "draining", source)

    def stop(self, *, source: str) -> str:
        return self._act("stop", "stopping", source)

    def request_checkpoint(self, *, source: str) -> str:
        return self._act("checkpoint", self.state, source)

    @property
    def audited(self) -> int:
        return len(self._audit)

    def audit(self) -> Sequence[Mapping[str, object]]:
        return tuple(self._audit)[-RECORDS_IN_MEMORY:]

    async def read_audit(self, *, before: int | None, limit: int) -> AuditPage:
        end = len(self._audit) if before is None else min(before, len(self._audit))
        start = max(0, end - limit)
        return AuditPage(self._audit[start:end], start or None)

    def checkpoints(self) -> Sequence[Mapping[str, object]]:
        return (
            {
                "name": "0000000100",
                "version": [1, 100],
                "env_steps": 6400,
                "bytes": 81920,
                "created": "2024-05-01T12:00:00+00:00",
                "best": True,
                "regular": False,
            },
        )

    def _act(self, action: str, state: str, source: str) -> str:
        if self.state in ENDED:
            raise StateConflictError(f"the run is {self.state}: only a running one can {action}")
        self._record(source, action, self.state, state)
        self.state = state
        return state

    def _record(self, source: str, action: str, old: object, new: object) -> None:
        self._audit.append(
            {
                "time": "2024-05-01T12:00:00+00:00",
                "source": source,
                "action": action,
                "old": old,
                "new": new,
            }
        )
