"""Simulated actors, and the compute threads that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tianflow.core.payloads import Grant, Trajectory, Version

if TYPE_CHECKING:
    import random

    from tianflow.config.model import Config
    from tianflow.simulation.clock import Clock, StateTimes
    from tianflow.simulation.rates import MeasuredRates
    from tianflow.simulation.virtual_exchange import VirtualExchange


class Weights(Protocol):
    """The weights as actors see them."""

    visible: Version

    def call_when_newer(self, actor: SimulatedActor, incarnation: int) -> None:
        """Call `SimulatedHost.start` when a newer version is visible."""


class ActorContext:
    """State and settings that all actors share."""

    __slots__ = ("at", "begin", "clock", "commit", "draw", "env_steps", "exchange", "latency_s",
                 "minimum", "owed_steps",
                 "random", "rates",
                 "request", "sent_s", "steps", "times", "turn_s", "weights")  # fmt: skip

    def __init__(
        self,
        *,
        config: Config,
        rates: MeasuredRates,
        clock: Clock,
        exchange: VirtualExchange,
        times: StateTimes,
        weights: Weights,
        draw: Callable[[], float],
        random_: random.Random,
    ) -> None:
        self.draw = draw
        self.rates, self.clock, self.exchange, self.times = rates, clock, exchange, times
        self.weights, self.random = weights, random_
        self.at, self.request, self.begin, self.commit = (
            clock.at,
            exchange.request_for,
            exchange.begin_for,
            exchange.commit,
        )
        self.steps, self.minimum = config.actors.rollout_steps, config.balance.min_fragment_steps
        self.env_steps = rates.env_steps or config.actors.rollout_steps * config.env.num_envs
        self.owed_steps = 0.0
        self.latency_s, self.turn_s, self.sent_s = (
            rates.latency_s,
            rates.turn_s,
            rates.transfer_s(rates.trajectory_bytes),
        )
        for delay in (self.latency_s, self.turn_s, self.sent_s):
            clock.expect(delay)

    def valid_steps(self, length: int) -> int:
        """Valid environment steps of a trajectory of ``length``.

        These are whole numbers whose mean is the rate; the remainder goes to the next trajectory.
        """
        self.owed_steps += (
            self.env_steps if length == self.steps else self.env_steps * length / self.steps
        )
        found = max(1, int(self.owed_steps))
        self.owed_steps -= found
        return found


class SimulatedHost:
    """A compute thread: its actors roll out one at a time."""

    __slots__ = ("context", "queue", "running")

    def __init__(self, context: ActorContext) -> None:
        self.context = context
        self.queue: list[
            tuple[SimulatedActor, int]
            # short and mostly empty, and ten thousand of them exist: a deque takes ten times the
            # memory
        ] = []
        self.running: SimulatedActor | None = None

    def start_next(self) -> None:
        """Start the next actor of the queue if the thread is free."""
        queue = self.queue
        while queue and self.running is None:
            actor, incarnation = queue.pop(0)
            if actor.incarnation == incarnation and actor.ready:
                self.running = actor
                self.start(actor, incarnation)

    def start(self, actor: SimulatedActor, incarnation: int) -> None:
        """Start ``actor``, which has the thread, once the weights of its grant have arrived."""
        if actor.incarnation != incarnation:  # it failed while it waited
            return
        if self.context.weights.visible < actor.ready[0].version:
            actor.enter("waiting:weights")
            self.context.weights.call_when_newer(actor, incarnation)
        else:
            actor.begin()


class SimulatedActor:
    """Requests grants, rolls out and commits; fails and restarts. Follows
    `tianflow.components.actor.Actor`.
    """

    __slots__ = ("_began", "_finish", "_grant", "_length", "_requested", "_slowness", "_state",
                 "_step_s", "_version",
                 "context", "host",
                 "incarnation", "name", "ready")  # fmt: skip

    def __init__(self, name: str, *, host: SimulatedHost, slowness: float) -> None:
        self.name, self.host, self.context, self._slowness = name, host, host.context, slowness
        self.incarnation = 0
        self.ready: list[Grant] = []  # two at most
        self._grant: Grant | None = None
        self._requested = False
        self._finish = 0
        self._length, self._step_s, self._began = 0, 0.0, 0.0
        self._version = self.context.weights.visible
        self._state = self.context.times.join("waiting:grant")

    def enter(self, state: str) -> None:
        """Count the time from now on as ``state``."""
        self._state = self.context.times.move(self._state, state)

    def request(self) -> None:
        """Request a grant, unless one is requested already."""
        if not self._requested:
            self._requested = True
            context = self.context
            context.at(context.latency_s, context.request, self, self.incarnation)

    def granted(self, grant: Grant | None, incarnation: int) -> None:
        """The exchange grants; the grant arrives after the latency."""
        assert grant is not None  # None is the end of a run, and a simulation just stops
        context = self.context
        context.at(context.latency_s, self._receive_grant, grant, incarnation)

    def _receive_grant(self, grant: Grant, incarnation: int) -> None:
        if incarnation != self.incarnation:
            return
        self._requested = False
        self.ready.append(grant)
        if self._grant is None and len(self.ready) == 1:
            self.enter("waiting:turn")
            if grant.ahead:
                self.request()
        context = self.context
        if context.turn_s:
            context.at(context.turn_s, self._enqueue, incarnation)
        else:
            self._enqueue(incarnation)

    def _enqueue(self, incarnation: int) -> None:
        host = self.host
        if host.running is None and not host.queue and incarnation == self.incarnation:
            host.running = self
            host.start(self, incarnation)
            return
        host.queue.append((self, incarnation))  # skipped later if this incarnation has failed
        host.start_next()

    def begin(self) -> None:
        """Take the first step now, with the newest weights."""
        context = self.context
        grant = self._grant = self.ready.pop(0)
        self._began, self._version, self._length = (
            context.clock.now,
            context.weights.visible,
            context.steps,
        )
        self._step_s = self._slowness * context.draw() / context.steps
        self._state = context.times.move(self._state, "busy")
        context.at(context.latency_s, context.begin, self, self.incarnation, grant, self._version)
        if grant.ahead and not self.ready:
            self.request()
        self._finish += 1
        context.at(self._length * self._step_s, self._commit, self._finish, self.incarnation)

    def cut(self, ticket: int, incarnation: int) -> None:
        """The exchange wants the steps made so far; the actor sees this after the latency, at its
        next step.
        """
        self.context.at(self.context.latency_s, self._receive_cut, ticket, incarnation)

    def _receive_cut(self, ticket: int, incarnation: int) -> None:
        if (
            incarnation == self.incarnation
            and self._grant is not None
            and self._grant.ticket == ticket
        ):
            context = self.context
            steps = int((context.clock.now - self._began) / self._step_s) + 1
            self._length = min(self._length, max(context.minimum, steps))
            self._finish += 1
            context.at(
                max(0.0, self._began + self._length * self._step_s - context.clock.now),
                self._commit,
                self._finish,
                self.incarnation,
            )

    def _commit(self, finish: int, incarnation: int) -> None:
        grant, context = self._grant, self.context
        if finish != self._finish or incarnation != self.incarnation or grant is None:
            return
        trajectory = Trajectory(
            grant.ticket,
            grant.slot,
            self._length,
            context.valid_steps(self._length),
            self._version,
        )
        context.at(context.sent_s, context.commit, trajectory)
        self._grant = self.host.running = None
        self._state = context.times.move(
            self._state, "waiting:turn" if self.ready else "waiting:grant"
        )
        if not self.ready:
            self.request()
        if self.host.queue:
            self.host.start_next()

    # Failures
    # ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start or restart, and draw the time of the next failure."""
        self.enter("waiting:grant")
        self.request()
        rate = self.context.rates.failures_per_hour
        if rate:
            self.context.at(self.context.random.expovariate(rate / 3600.0), self._fail)

    def _fail(self) -> None:
        context = self.context
        self.incarnation += 1
        self.ready.clear()
        self._grant, self._requested = None, False
        self.enter("down")
        # Trajectories that were sent before the failure arrive before it is noticed.
        context.at(context.sent_s, context.exchange.holder_lost, self.name, "died")
        context.at(max(context.sent_s, context.rates.restart_s), self.start)
        if self.host.running is self:
            self.host.running = None
            self.host.start_next()
