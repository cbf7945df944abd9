"""Simulated actors, and the compute threads that they take turns on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tianflow.core.payloads import Grant, Trajectory, Version

if TYPE_CHECKING:
    import random

    from tianflow.config.model import Config
    from tianflow.simulation.clock import Clock, Times
    from tianflow.simulation.rates import MeasuredRates
    from tianflow.simulation.virtual_exchange import VirtualExchange


class Weights(Protocol):
    """What actors see of the learner."""

    visible: Version

    def call_when_newer(self, actor: SimulatedActor, life: int) -> None:
        """`SimulatedHost.start` once a newer version can be seen."""


class ActorContext:
    """What all actors share."""

    __slots__ = ("at", "begin", "clock", "commit", "desk", "draw", "env_steps", "latency_s",
                 "minimum", "owed",
                 "random", "rates",
                 "request_grant", "sent_s", "steps", "times", "turn_s", "weights")  # fmt: skip

    def __init__(
        self,
        *,
        config: Config,
        rates: MeasuredRates,
        clock: Clock,
        desk: VirtualExchange,
        times: Times,
        weights: Weights,
        draw: Callable[[], float],
        random_: random.Random,
    ) -> None:
        self.draw = draw
        self.rates, self.clock, self.desk, self.times, self.weights, self.random = (
            rates,
            clock,
            desk,
            times,
            weights,
            random_,
        )
        self.at, self.request_grant, self.begin, self.commit = (
            clock.at,
            desk.request_grant,
            desk.begin,
            desk.commit,
        )
        self.steps, self.minimum = config.actors.rollout_steps, config.balance.min_fragment_steps
        self.env_steps = rates.env_steps or config.actors.rollout_steps * config.env.num_envs
        self.owed = 0.0
        self.latency_s, self.turn_s, self.sent_s = (
            rates.latency_s,
            rates.turn_s,
            rates.transfer_s(rates.trajectory_bytes),
        )
        for delay in (self.latency_s, self.turn_s, self.sent_s):
            clock.expect(delay)

    def valid(self, length: int) -> int:
        """Environment steps in a trajectory of ``length``: whole numbers, whose mean is what a rate
        says.
        """
        self.owed += (
            self.env_steps if length == self.steps else self.env_steps * length / self.steps
        )
        found = max(1, int(self.owed))
        self.owed -= found
        return found


class SimulatedHost:
    """Actors whose trajectories take turns."""

    __slots__ = ("around", "queue", "running")

    def __init__(self, around: ActorContext) -> None:
        self.around = around
        self.queue: list[
            tuple[SimulatedActor, int]
            # short, mostly empty, and there may be ten thousand: a deque takes ten times the memory
        ] = []
        self.running: SimulatedActor | None = None

    def turn(self) -> None:
        """Whoever is next begins, if nobody runs."""
        queue = self.queue
        while queue and self.running is None:
            actor, life = queue.pop(0)
            if actor.life == life and actor.ready:
                self.running = actor
                self.start(actor, life)

    def start(self, actor: SimulatedActor, life: int) -> None:
        """``actor``, whose turn it is, begins, unless the weights that its grant names are still on
        their way.
        """
        if actor.life != life:  # it failed while it waited
            return
        if self.around.weights.visible < actor.ready[0].version:
            actor.enter("waiting:weights")
            self.around.weights.call_when_newer(actor, life)
        else:
            actor.begin()


class SimulatedActor:
    """Asks, rolls out, commits; fails and starts again. Follows
    `tianflow.components.actor.Actor`.
    """

    __slots__ = ("_asked", "_began", "_finish", "_grant", "_length", "_slow", "_stay", "_step_s",
                 "_version",
                 "around", "host",
                 "life", "name", "ready")  # fmt: skip

    def __init__(self, name: str, *, host: SimulatedHost, slow: float) -> None:
        self.name, self.host, self.around, self._slow = name, host, host.around, slow
        self.life = 0
        self.ready: list[Grant] = []  # two at most
        self._grant: Grant | None = None
        self._asked = False
        self._finish = 0
        self._length, self._step_s, self._began = 0, 0.0, 0.0
        self._version = self.around.weights.visible
        self._stay = self.around.times.join("waiting:grant")

    def enter(self, state: str) -> None:
        """From now on the time belongs to ``state``."""
        self._stay = self.around.times.move(self._stay, state)

    def ask(self) -> None:
        """Ask for a grant, unless that was done."""
        if not self._asked:
            self._asked = True
            around = self.around
            around.at(around.latency_s, around.request_grant, self, self.life)

    def granted(self, grant: Grant, life: int) -> None:
        """The desk grants: it takes a moment to hear of it."""
        around = self.around
        around.at(around.latency_s, self._heard, grant, life)

    def _heard(self, grant: Grant, life: int) -> None:
        if life != self.life:
            return
        self._asked = False
        self.ready.append(grant)
        if self._grant is None and len(self.ready) == 1:
            self.enter("waiting:turn")
            if grant.ahead:
                self.ask()
        around = self.around
        if around.turn_s:
            around.at(around.turn_s, self._line_up, life)
        else:
            self._line_up(life)

    def _line_up(self, life: int) -> None:
        host = self.host
        if host.running is None and not host.queue and life == self.life:
            host.running = self
            host.start(self, life)
            return
        host.queue.append((self, life))  # one that has failed meanwhile is passed over
        host.turn()

    def begin(self) -> None:
        """The first step is taken now, with the newest weights."""
        around = self.around
        grant = self._grant = self.ready.pop(0)
        self._began, self._version, self._length = (
            around.clock.now,
            around.weights.visible,
            around.steps,
        )
        self._step_s = self._slow * around.draw() / around.steps
        self._stay = around.times.move(self._stay, "busy")
        around.at(around.latency_s, around.begin, self, self.life, grant.ticket, self._version)
        if grant.ahead and not self.ready:
            self.ask()
        self._finish += 1
        around.at(self._length * self._step_s, self._done, self._finish, self.life)

    def cut(self, ticket: int, life: int) -> None:
        """The desk wants the steps that are there: the actor sees it a moment later, at its next
        step.
        """
        self.around.at(self.around.latency_s, self._seen, ticket, life)

    def _seen(self, ticket: int, life: int) -> None:
        if life == self.life and self._grant is not None and self._grant.ticket == ticket:
            around = self.around
            made = int((around.clock.now - self._began) / self._step_s) + 1
            self._length = min(self._length, max(around.minimum, made))
            self._finish += 1
            around.at(
                max(0.0, self._began + self._length * self._step_s - around.clock.now),
                self._done,
                self._finish,
                self.life,
            )

    def _done(self, finish: int, life: int) -> None:
        grant, around = self._grant, self.around
        if finish != self._finish or life != self.life or grant is None:
            return
        trajectory = Trajectory(
            grant.ticket, grant.slot, self._length, around.valid(self._length), self._version
        )
        around.at(around.sent_s, around.commit, trajectory)
        self._grant = self.host.running = None
        self._stay = around.times.move(
            self._stay, "waiting:turn" if self.ready else "waiting:grant"
        )
        if not self.ready:
            self.ask()
        if self.host.queue:
            self.host.turn()

    # Failures
    # ----------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Begin, for the first time or again; the next failure is drawn."""
        self.enter("waiting:grant")
        self.ask()
        rate = self.around.rates.failures_per_hour
        if rate:
            self.around.at(self.around.random.expovariate(rate / 3600.0), self._fail)

    def _fail(self) -> None:
        around = self.around
        held = [grant.ticket for grant in (*self.ready, *((self._grant,) if self._grant else ()))]
        self.life += 1
        self.ready.clear()
        self._grant, self._asked = None, False
        self.enter("down")
        # What it had sent still arrives before it is missed.
        around.at(around.sent_s, around.desk.holder_lost, self, held, "died")
        around.at(max(around.sent_s, around.rates.restart_s), self.live)
        if self.host.running is self:
            self.host.running = None
            self.host.turn()
