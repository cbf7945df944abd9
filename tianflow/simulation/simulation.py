"""`Simulation`: one run in virtual time (config, rates → result)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVarTuple

import numpy as np

from tianflow.components.learner import admissible
from tianflow.components.weights import publish_due
from tianflow.config.rules import largest_publish_lag
from tianflow.coordinator.balancer import TICK_S, Balancer
from tianflow.core.limits import Limits
from tianflow.core.payloads import NO_VERSION, Batch, Settlement, Version
from tianflow.errors import ConfigError, Problem
from tianflow.interfaces import LiveSettings
from tianflow.ledger.ledger import Ledger
from tianflow.planning.memory import MOST_SLOTS, slots_wanted
from tianflow.simulation.actors import ActorContext, SimulatedActor, SimulatedHost
from tianflow.simulation.clock import Clock, StateTimes
from tianflow.simulation.durations import Durations
from tianflow.simulation.outcome import SimulationResult, TimeMark, between
from tianflow.simulation.patience import Patience, require_an_end
from tianflow.simulation.progress import ProgressState
from tianflow.simulation.virtual_exchange import VirtualExchange

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.simulation.rates import MeasuredRates

Ts = TypeVarTuple("Ts")
MASK = 2**64 - 1
"""Maps a seed to the non-negative seeds that NumPy accepts."""
QUIET_TICKS = 400
"""Balancer ticks in a row without any other event: then the simulation has stalled."""


@dataclass(frozen=True, slots=True)
class FixedSettings:
    """A `SettingsReader` whose settings do not change."""

    value: LiveSettings
    key: int = 0

    def on_change(self, _: Callable[[], None]) -> Callable[[], None]:
        """Never call it; the settings do not change."""
        return lambda: None


class Simulation:
    """One run in virtual time. The same config, rates and seed give the same outcome.

    The ledger, the exchange, the balancer, its controllers, publishing and `admissible` are those
    of a run. Simulated are durations, and the messages of actors and learner.

    Args:
        config: as for a run. ``actors.hosts`` None: every actor has a compute thread of its own.
        rates: durations of everything that is simulated.
        actors: number of actors, without the limit of a config; None: ``actors.count``.
        seed: of every duration that is drawn.

    Raises:
        ConfigError: the config learns from replay, or has no actors.
    """

    def __init__(
        self, config: Config, rates: MeasuredRates, *, actors: int | None = None, seed: int = 0
    ) -> None:
        if actors is not None:  # copied unchecked: the limits of a run do not apply here
            config = config.model_copy(
                update={"actors": config.actors.model_copy(update={"count": actors})}
            )
        refuse(config, actors)
        self.config, self.rates = config, rates
        self.clock = Clock()
        self._random = random.Random(seed)  # noqa: S311 - times, not secrets
        trajectories, updates, hosts = (
            np.random.default_rng((seed & MASK, part)) for part in range(3)
        )
        self._draw_trajectory = Durations(
            mean=rates.trajectory_s,
            spread=rates.trajectory_spread,
            skew=rates.trajectory_skew,
            random=trajectories,
        ).draw
        self._draw_update = Durations(
            mean=rates.update_s, spread=rates.update_spread, skew=rates.update_skew, random=updates
        ).draw
        self._draw_pace = Durations(
            mean=1.0, spread=rates.actor_spread, skew=0.0, random=hosts
        ).draw
        batch, slots = config.algorithm.batch_trajectories, min(MOST_SLOTS, slots_wanted(config))
        self.ledger = Ledger(
            limits=Limits(batch=batch, max_staleness=config.bound, credits=max(batch, slots)),
            slots=slots,
        )
        self.exchange = VirtualExchange(ledger=self.ledger, clock=self.clock)
        self._actor_times = StateTimes(self.clock)
        self._learner_times = StateTimes(self.clock)
        self.visible = NO_VERSION
        self._waiting_for_weights: list[tuple[SimulatedActor, int]] = []
        self._version, self._published = Version(1, 0), Version(1, 0)
        self._bound = config.bound
        self._updating: Batch | None = None
        self._prefetched: Batch | None = None
        self._requested = False
        self._state = self._learner_times.join("waiting:batch")
        self._balancer = Balancer(
            exchange=self.exchange,
            settings=FixedSettings(LiveSettings(config, config.bound)),
            set_bound=self._set_bound,
            waiting_seconds=lambda: (
                self._learner_times.seconds("waiting:batch"),
                self._actor_times.seconds("waiting:grant"),
            ),
            actors=lambda: config.actors.count,
            clock=lambda: self.clock.now,
        )
        self.exchange.on_settled(self.clock.interrupt)
        self.actors = self._make_actors()

    def run(
        self,
        *,
        updates: int,
        warmup: int = 0,
        seconds: float = math.inf,
        report: Callable[[Callable[[], ProgressState]], None] = lambda _: None,
    ) -> SimulationResult:
        """Simulate ``warmup`` and then ``updates`` updates, or ``seconds`` of virtual time.

        The result excludes the warm-up. ``report`` is called now and then with a function that
        returns the progress.

        Raises:
            ConfigError: it would take too long.
        """
        require_an_end(self.config, self.rates, updates=warmup + updates, seconds=seconds)
        for actor in self.actors:
            actor.start()
        self.exchange.open_lineage(self._version)
        self._show(self._version)
        self._pull()
        before = self._mark() if warmup == 0 else None
        last, tick, quiet = warmup + updates, TICK_S, 0
        patience = Patience(self.config, self.rates)
        stalled = False
        while (number := self.ledger.version.number) < last:
            report(lambda: self._progress(last, seconds))
            if stalled := quiet >= QUIET_TICKS or patience.is_over(
                updates=number, now=self.clock.now, events=self.clock.events
            ):
                break
            if self.clock.advance(
                min(tick, seconds)
            ):  # an update was settled, or after many events
                if before is None and self.ledger.version.number >= warmup:
                    before = self._mark()
                continue
            if tick > seconds:
                break
            self.clock.now, tick, quiet = (
                tick,
                tick + TICK_S,
                quiet + 1 if self.clock.next is None else 0,
            )
            self._balancer.update()
        return between(before or self._mark(), self._mark(), config=self.config, stalled=stalled)

    # Weights
    # ----------------------------------------------------------------------------------------------

    def call_when_newer(self, actor: SimulatedActor, incarnation: int) -> None:
        """Call `SimulatedHost.start` when a newer version is visible."""
        self._waiting_for_weights.append((actor, incarnation))

    def _show(self, version: Version) -> None:
        self.visible = max(self.visible, version)
        waiting, self._waiting_for_weights = self._waiting_for_weights, []
        for actor, incarnation in waiting:
            actor.host.start(actor, incarnation)

    # Learner
    # ----------------------------------------------------------------------------------------------

    def _set_bound(self, bound: int | None) -> None:
        self._bound = bound

    def _enter(self, state: str) -> None:
        self._state = self._learner_times.move(self._state, state)

    def _pull(self) -> None:
        ahead = self._updating is not None
        self._requested = True
        version = Version(1, self._version.number + ahead)
        self._send(self.exchange.request_batch, version, self._deliver)

    def _send(self, act: Callable[[*Ts], None], *arguments: *Ts) -> None:
        self.clock.at(self.rates.learner_latency_s, act, *arguments)

    def _deliver(self, batch: Batch | None) -> None:
        assert batch is not None  # None is the end of a run, and a simulation just stops
        self.clock.at(self.rates.learner_latency_s, self._receive, batch)

    def _receive(self, batch: Batch) -> None:
        self._requested = False
        if self._updating is None:
            self._use(batch)
        else:
            self._prefetched = batch

    def _use(self, batch: Batch) -> None:
        tickets = tuple(trajectory.ticket for trajectory in batch.trajectories)
        if not admissible(batch, self._version, self._bound):
            self._send(self.exchange.give_back, tickets)
            self._pull()
            return
        self._updating = batch
        self._enter("busy")
        if self.config.learner.prefetch and self._bound != 0 and not self.config.run.deterministic:
            self._pull()
        update_s = self._draw_update() * (1 + self.config.learner.slowdown)
        # No policy is computed here: every version counts as far enough from the published one.
        publishes = publish_due(
            version=self._version.number + 1,
            published=self._published.number,
            interval=self.config.weights.publish_interval_updates,
            bound=largest_publish_lag(self.config, self._bound),
        )
        self.clock.at(
            update_s + (self.rates.publish_s if publishes else 0.0),
            self._finish_update,
            tickets,
            self._bound,
            publishes,
        )

    def _finish_update(self, tickets: tuple[int, ...], bound: int | None, publishes: bool) -> None:
        self._version = Version(1, self._version.number + 1)
        self._updating = None
        if publishes:
            self._published = self._version
            self.clock.at(
                self.rates.transfer_s(self.rates.weights_bytes), self._show, self._version
            )
        self._enter("waiting:batch")
        self._send(self.exchange.settle, Settlement(self._version, tickets, bound, publishes))
        batch, self._prefetched = self._prefetched, None
        if batch is not None:
            self._use(batch)
        elif not self._requested:
            self._pull()

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _progress(self, last: int, seconds: float) -> ProgressState:
        number, now = self.ledger.version.number, self.clock.now
        return ProgressState(number, now, max(number / last, now / seconds))

    def _make_actors(self) -> list[SimulatedActor]:
        count, hosts = self.config.actors.count, self.config.actors.hosts
        context = ActorContext(
            config=self.config,
            rates=self.rates,
            clock=self.clock,
            exchange=self.exchange,
            times=self._actor_times,
            weights=self,
            draw=self._draw_trajectory,
            random_=self._random,
        )
        threads = [SimulatedHost(context) for _ in range(min(count, hosts or count))]
        slow = set(self._random.sample(range(count), round(self.rates.straggler_share * count)))
        return [
            SimulatedActor(
                f"actor-{index}",
                host=threads[index % len(threads)],
                slowness=self._draw_pace()
                * (self.rates.straggler_factor if index in slow else 1.0),
            )
            for index in range(count)
        ]

    def _mark(self) -> TimeMark:
        return TimeMark(
            now=self.clock.now,
            ledger=self.ledger.snapshot(),
            learner=self._learner_times.read(),
            actors=self._actor_times.read(),
            requests=self.exchange.requests,
            delayed=self.exchange.delayed,
            events=self.clock.events,
        )


def refuse(config: Config, actors: int | None) -> None:
    """Raise `ConfigError` if ``config`` cannot be simulated with ``actors`` (None: its own
    count).
    """
    if config.algorithm.window is not None:
        message = "learns from replay; a simulation has no replay shards and no rate limiter"
        accepted = "an algorithm that trains on each trajectory once"
        raise ConfigError([Problem("algorithm.name", config.algorithm.name, message, accepted)])
    if (config.actors.count if actors is None else actors) < 1:
        raise ConfigError(
            [
                Problem(
                    "actors.count",
                    0,
                    "without actors no trajectory is sampled",
                    "at least 1",
                )
            ]
        )
