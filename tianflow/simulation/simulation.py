"""config, rates -> Simulation -> outcome. Learner, actors, desk and balancer on one heap of
events.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVarTuple

import numpy as np

from tianflow.components.learner import admissible
from tianflow.components.weights import publish_due
from tianflow.coordinator.balancer import TICK_S, Balancer
from tianflow.core.limits import Limits
from tianflow.core.payloads import NO_VERSION, Batch, Settlement, Version
from tianflow.errors import ConfigError, Problem
from tianflow.interfaces import LiveSettings
from tianflow.ledger.ledger import Ledger
from tianflow.planning.memory import MOST_SLOTS, slots_wanted
from tianflow.simulation.actors import ActorContext, SimulatedActor, SimulatedHost
from tianflow.simulation.clock import Clock, Times
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
"""A seed may be negative; those of NumPy may not."""
QUIET_TICKS = 400
"""So many looks of the controllers in a row with nothing else due: nothing ever will be."""


@dataclass(frozen=True, slots=True)
class FixedSettings:
    """One value of the settings, as `SettingsReader` holds it. It does not change."""

    value: LiveSettings
    key: int = 0

    def on_change(self, _: Callable[[], None]) -> Callable[[], None]:
        """Nothing changes."""
        return lambda: None


class Simulation:
    """One run in virtual time. The same config, rates and seed give the same outcome.

    The ledger, the controllers, their merging, publishing and the check at use are those of a run.
    Its own are times, and the small talk of actors and learner with the ledger.

    Args:
        config: as for a run. ``actors.hosts`` None: every actor computes by itself.
        rates: how long everything takes.
        actors: how many there are; None: as the config says, which may not be as many.
        seed: of every time that is drawn.

    Raises:
        ConfigError: the config learns from replay, or can feed no update.
    """

    def __init__(
        self, config: Config, rates: MeasuredRates, *, actors: int | None = None, seed: int = 0
    ) -> None:
        if actors is not None:  # a copy is not judged again: what limits a run is no limit here
            config = config.model_copy(
                update={"actors": config.actors.model_copy(update={"count": actors})}
            )
        refuse(config, actors)
        self.config, self.rates = config, rates
        self.clock = Clock()
        self._random = random.Random(seed)  # noqa: S311 - times, not secrets
        trajectories, updates, places = (
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
            mean=1.0, spread=rates.actor_spread, skew=0.0, random=places
        ).draw
        batch, slots = config.algorithm.batch_trajectories, min(MOST_SLOTS, slots_wanted(config))
        self.ledger = Ledger(
            limits=Limits(batch=batch, max_staleness=config.bound, credits=max(batch, slots)),
            slots=slots,
        )
        self.desk = VirtualExchange(
            ledger=self.ledger, clock=self.clock, holders=config.actors.count
        )
        self._actor_times, self._learner_times = Times(self.clock), Times(self.clock)
        self.visible = NO_VERSION
        self._held_up: list[tuple[SimulatedActor, int]] = []
        self._version, self._published = Version(1, 0), Version(1, 0)
        self._bound = config.bound
        self._updating: Batch | None = None
        self._ahead: Batch | None = None
        self._pulled = False
        self._stay = self._learner_times.join("waiting:batch")
        self._balancer = Balancer(
            exchange=self.desk,  # type: ignore[arg-type]  # the part of an exchange that it uses
            settings=FixedSettings(LiveSettings(config, config.bound)),
            set_bound=self._set_bound,
            waiting_seconds=lambda: (
                self._learner_times.seconds("waiting:batch"),
                self._actor_times.seconds("waiting:grant"),
            ),
            actors=lambda: config.actors.count,
            clock=lambda: self.clock.now,
        )
        self.desk.on_settled(self.clock.interrupt)
        self.actors = self._make_actors()

    def run(
        self,
        *,
        updates: int,
        warmup: int = 0,
        seconds: float = math.inf,
        tell: Callable[[Callable[[], ProgressState]], None] = lambda _: None,
    ) -> SimulationResult:
        """Go on until ``updates`` after the first ``warmup`` are done, or ``seconds`` of virtual
        time are over.

        What happens before ``warmup`` updates are done is left out of the outcome. ``tell`` is
        called now and then, with what says where it stands.

        Raises:
            ConfigError: it would go on for too long.
        """
        require_an_end(self.config, self.rates, updates=warmup + updates, seconds=seconds)
        for actor in self.actors:
            actor.live()
        self.desk.open_lineage(self._version)
        self._seen(self._version)
        self._pull()
        before = self._mark() if warmup == 0 else None
        whole, tick, quiet, patience = (
            warmup + updates,
            TICK_S,
            0,
            Patience(self.config, self.rates),
        )
        stalled = False
        while (number := self.ledger.version.number) < whole:
            tell(lambda: self._standing(whole, seconds))
            if stalled := quiet >= QUIET_TICKS or patience.is_over(
                updates=number, now=self.clock.now, events=self.clock.events
            ):
                break
            if self.clock.work(min(tick, seconds)):  # an update was settled, or it has been a while
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
            self._balancer.look()
        return between(before or self._mark(), self._mark(), config=self.config, stalled=stalled)

    # Weights
    # ----------------------------------------------------------------------------------------------

    def call_when_newer(self, actor: SimulatedActor, life: int) -> None:
        """`SimulatedHost.start` once a newer version can be seen."""
        self._held_up.append((actor, life))

    def _seen(self, version: Version) -> None:
        self.visible = max(self.visible, version)
        held_up, self._held_up = self._held_up, []
        for actor, life in held_up:
            actor.host.start(actor, life)

    # Learner
    # ----------------------------------------------------------------------------------------------

    def _set_bound(self, bound: int | None) -> None:
        self._bound = bound

    def _enter(self, state: str) -> None:
        self._stay = self._learner_times.move(self._stay, state)

    def _pull(self) -> None:
        ahead = self._updating is not None
        self._pulled = True
        self._tell(self.desk.request_batch, Version(1, self._version.number + ahead), self._hear)

    def _tell(self, act: Callable[[*Ts], None], *arguments: *Ts) -> None:
        self.clock.at(self.rates.learner_latency_s, act, *arguments)

    def _hear(self, batch: Batch) -> None:
        self.clock.at(self.rates.learner_latency_s, self._received, batch)

    def _received(self, batch: Batch) -> None:
        self._pulled = False
        if self._updating is None:
            self._use(batch)
        else:
            self._ahead = batch

    def _use(self, batch: Batch) -> None:
        tickets = tuple(trajectory.ticket for trajectory in batch.trajectories)
        if not admissible(batch, self._version, self._bound):
            self._tell(self.desk.give_back, tickets)
            self._pull()
            return
        self._updating = batch
        self._enter("busy")
        if self.config.learner.prefetch and self._bound != 0 and not self.config.run.deterministic:
            self._pull()
        update_s = self._draw_update() * (1 + self.config.learner.slowdown)
        interval, number = self.config.weights.publish_interval_updates, self._version.number + 1
        publishes = publish_due(
            version=number, published=self._published.number, interval=interval, bound=self._bound
        )
        self.clock.at(
            update_s + (self.rates.publish_s if publishes else 0.0),
            self._updated,
            tickets,
            self._bound,
            publishes,
        )

    def _updated(self, tickets: tuple[int, ...], bound: int | None, publishes: bool) -> None:
        self._version = Version(1, self._version.number + 1)
        self._updating = None
        if publishes:
            self._published = self._version
            self.clock.at(
                self.rates.transfer_s(self.rates.weights_bytes), self._seen, self._version
            )
        self._enter("waiting:batch")
        self._tell(self.desk.settle, Settlement(self._version, tickets, bound, publishes))
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._use(ahead)
        elif not self._pulled:
            self._pull()

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _standing(self, whole: int, seconds: float) -> ProgressState:
        number, now = self.ledger.version.number, self.clock.now
        return ProgressState(number, now, max(number / whole, now / seconds))

    def _make_actors(self) -> list[SimulatedActor]:
        count, hosts = self.config.actors.count, self.config.actors.hosts
        around = ActorContext(
            config=self.config,
            rates=self.rates,
            clock=self.clock,
            desk=self.desk,
            times=self._actor_times,
            weights=self,
            draw=self._draw_trajectory,
            random_=self._random,
        )
        places = [SimulatedHost(around) for _ in range(min(count, hosts or count))]
        slow = set(self._random.sample(range(count), round(self.rates.straggler_share * count)))
        return [
            SimulatedActor(
                f"actor-{index}",
                host=places[index % len(places)],
                slow=self._draw_pace() * (self.rates.straggler_factor if index in slow else 1.0),
            )
            for index in range(count)
        ]

    def _mark(self) -> TimeMark:
        return TimeMark(
            now=self.clock.now,
            ledger=self.ledger.snapshot(),
            learner=self._learner_times.read(),
            actors=self._actor_times.read(),
            asks=self.desk.asks,
            refused=self.desk.refused,
            events=self.clock.events,
        )


def refuse(config: Config, actors: int | None) -> None:
    """Raise `ConfigError` for a config that cannot be simulated with so many actors (None: as many
    as it says).
    """
    if config.algorithm.window is not None:
        message = (
            "learns from replay: only algorithms that use each trajectory once are "
            "simulated (no shards, no limiter)"
        )
        raise ConfigError([Problem("algorithm.name", config.algorithm.name, message)])
    if (config.actors.count if actors is None else actors) < 1:
        raise ConfigError(
            [
                Problem(
                    "actors.count",
                    0,
                    "nobody would sample, so there is nothing to simulate",
                    "at least 1",
                )
            ]
        )
