"""Simulated actors, and the compute threads that they take turns on."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import TYPE_CHECKING, Protocol

from tianflow.payloads import Grant, Trajectory, Version

if TYPE_CHECKING:
    from tianflow.config import Config
    from tianflow.simulation.clock import Clock, Times
    from tianflow.simulation.desk import Desk
    from tianflow.simulation.rates import Rates


class Weights(Protocol):
    """What actors see of the learner."""

    visible: Version

    def call_when_newer(self, actor: Actor, life: int) -> None:
        """`Host.start` once a newer version can be seen."""


def lognormal(random_: random.Random, mean: float, spread: float) -> float:
    """A positive number of this mean; ``spread`` is its standard deviation over the mean."""
    if not spread:
        return mean
    variance = math.log1p(spread * spread)
    return mean * random_.lognormvariate(-variance / 2, math.sqrt(variance))


class Surroundings:
    """What all actors share."""

    __slots__ = ("clock", "desk", "env_steps", "minimum", "random", "rates", "steps", "times", "weights")

    def __init__(
        self, *, config: Config, rates: Rates, clock: Clock, desk: Desk, times: Times, weights: Weights, random_: random.Random
    ) -> None:
        self.rates, self.clock, self.desk, self.times, self.weights, self.random = rates, clock, desk, times, weights, random_
        self.steps, self.minimum = config.actors.rollout_steps, config.balance.min_fragment_steps
        self.env_steps = rates.env_steps or config.actors.rollout_steps * config.env.num_envs


class Host:
    """Actors whose trajectories take turns."""

    __slots__ = ("around", "queue", "running")

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.queue: deque[tuple[Actor, int]] = deque()
        self.running: Actor | None = None

    def turn(self) -> None:
        """Whoever is next begins, if nobody runs."""
        while self.running is None and self.queue:
            actor, life = self.queue.popleft()
            if actor.life == life and actor.ready:
                self.running = actor
                self.start(actor, life)

    def start(self, actor: Actor, life: int) -> None:
        """``actor``, whose turn it is, begins, unless the weights that its grant names are still on their way."""
        if actor.life != life:  # it failed while it waited
            return
        if self.around.weights.visible < actor.ready[0].version:
            actor.enter("waiting:weights")
            self.around.weights.call_when_newer(actor, life)
        else:
            actor.begin()


class Actor:
    """Asks, rolls out, commits; fails and starts again. Follows `tianflow.components.actor.Actor`."""

    __slots__ = ("_asked", "_began", "_finish", "_grant", "_length", "_since", "_slow", "_state", "_step_s", "_version", "around", "host",
                 "life", "name", "ready")  # fmt: skip

    def __init__(self, name: str, *, host: Host, slow: float) -> None:
        self.name, self.host, self.around, self._slow = name, host, host.around, slow
        self.life = 0
        self.ready: deque[Grant] = deque()
        self._grant: Grant | None = None
        self._asked = False
        self._finish = 0
        self._length, self._step_s, self._began = 0, 0.0, 0.0
        self._version = self.around.weights.visible
        self._state, self._since = "waiting:grant", self.around.clock.now
        self.around.times.join(self._state)

    def enter(self, state: str) -> None:
        """From now on the time belongs to ``state``."""
        if state != self._state:
            self.around.times.move(self._state, state, self._since)
            self._state, self._since = state, self.around.clock.now

    def ask(self) -> None:
        """Ask for a grant, unless that was done."""
        if not self._asked:
            self._asked = True
            around = self.around
            around.clock.at(around.rates.latency_s, around.desk.request_grant, self, self.life)

    def granted(self, grant: Grant, life: int) -> None:
        """The desk grants: it takes a moment to hear of it."""
        self.around.clock.at(self.around.rates.latency_s, self._heard, grant, life)

    def _heard(self, grant: Grant, life: int) -> None:
        if life != self.life:
            return
        self._asked = False
        self.ready.append(grant)
        if self._grant is None and len(self.ready) == 1:
            self.enter("waiting:turn")
        if grant.plenty and len(self.ready) + (self._grant is not None) < 2:
            self.ask()
        self.around.clock.at(self.around.rates.turn_s, self._line_up, life)

    def _line_up(self, life: int) -> None:
        self.host.queue.append((self, life))  # one that has failed meanwhile is passed over
        self.host.turn()

    def begin(self) -> None:
        """The first step is taken now, with the newest weights."""
        around = self.around
        grant = self._grant = self.ready.popleft()
        self._began, self._version, self._length = around.clock.now, around.weights.visible, around.steps
        self._step_s = self._slow * lognormal(around.random, around.rates.trajectory_s, around.rates.trajectory_spread) / around.steps
        self.enter("busy")
        around.clock.at(around.rates.latency_s, around.desk.begin, self, self.life, grant.ticket, self._version)
        if grant.plenty and not self.ready:
            self.ask()
        self._schedule()

    def cut(self, ticket: int, life: int) -> None:
        """The desk wants the steps that are there: the actor sees it a moment later, at its next step."""
        self.around.clock.at(self.around.rates.latency_s, self._seen, ticket, life)

    def _seen(self, ticket: int, life: int) -> None:
        if life == self.life and self._grant is not None and self._grant.ticket == ticket:
            around = self.around
            made = int((around.clock.now - self._began) / self._step_s) + 1
            self._length = min(self._length, max(around.minimum, made))
            self._schedule()

    def _schedule(self) -> None:
        self._finish += 1
        clock = self.around.clock
        clock.at(max(0.0, self._began + self._length * self._step_s - clock.now), self._done, self._finish, self.life)

    def _done(self, finish: int, life: int) -> None:
        grant, around = self._grant, self.around
        if finish != self._finish or life != self.life or grant is None:
            return
        env_steps = max(1, round(around.env_steps * self._length / around.steps))
        trajectory = Trajectory(grant.ticket, grant.slot, self._length, env_steps, self._version)
        around.clock.at(around.rates.transfer_s(around.rates.trajectory_bytes), around.desk.commit, trajectory)
        self._grant = self.host.running = None
        self.enter("waiting:turn" if self.ready else "waiting:grant")
        if not self.ready:
            self.ask()
        self.host.turn()

    # Failures -------------------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Begin, for the first time or again; the next failure is drawn."""
        self.enter("waiting:grant")
        self.ask()
        rate = self.around.rates.failures_per_hour
        if rate:
            self.around.clock.at(self.around.random.expovariate(rate / 3600.0), self._fail)

    def _fail(self) -> None:
        around = self.around
        held = [grant.ticket for grant in (*self.ready, *((self._grant,) if self._grant else ()))]
        self.life += 1
        self.ready.clear()
        self._grant, self._asked = None, False
        self.enter("down")
        # What it had sent still arrives before it is missed.
        sent_s = around.rates.transfer_s(around.rates.trajectory_bytes)
        around.clock.at(sent_s, around.desk.holder_lost, self, held, "died")
        around.clock.at(max(sent_s, around.rates.restart_s), self.live)
        if self.host.running is self:
            self.host.running = None
            self.host.turn()
