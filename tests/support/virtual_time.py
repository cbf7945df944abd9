"""The real ledger, the real controllers and the real merging, in virtual time: actors, hosts, learner and
coordinator on a heap of events.

Messages travel with random delays, in order per sender. What was trained on is judged by an oracle:
every step that a simulated actor writes into its slot carries the lineage and version that the
learner had truly published when the step was taken, and the learner reads that from the slot, not
from a label.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Any

from tianflow.config.model import BalanceSettings, Config, EnvSettings, PPOSettings
from tianflow.coordinator.balancer import ControllerRequests, merge
from tianflow.core.events import Observed
from tianflow.core.limits import Limits
from tianflow.core.payloads import NO_VERSION, Batch, Grant, Settlement, Trajectory, Version
from tianflow.interfaces import Controller
from tianflow.ledger.ledger import Ledger
from tianflow.ledger.tickets import Blocked, State

Steps = tuple[Version, ...]
"""For each step of a trajectory, the version whose policy truly took it (runs of equal ones are
stored once).
"""


@dataclass(frozen=True)
class Settings:
    """Times in seconds of virtual time. ``delay`` bounds the uniformly random delay of a
    message.
    """

    batch: int = 8
    bound: int | None = 1
    credits: int | None = None
    slots: int = 256
    patience: float = 1e9
    rollout_steps: int = 32
    min_fragment: int = 1
    prefetch: int = 1
    publish_every: int = 1
    update_s: float = 1.0
    delay: float = 0.0
    check_at_use: bool = True
    force_publish: bool = True
    cutting: bool = True
    label_ahead: bool = False
    """A bug to be found: weights are loaded when the grant comes, the label is read when the first
    step is taken.
    """

    def config(self) -> Config:
        """The part of it that the balancer reads, as a run's configuration."""
        return Config(
            env=EnvSettings(id="none"),
            algorithm=PPOSettings(batch_trajectories=self.batch),
            balance=BalanceSettings(
                max_staleness="unbounded" if self.bound is None else self.bound,
                credits=self.credits,
                straggler_patience=self.patience,
                min_fragment_steps=self.min_fragment,
            ),
        )


@dataclass
class Actor:
    """``step_s`` seconds a step, give or take ``jitter`` of it, ``slow`` times that in one of
    ``slow_odds`` trajectories.
    """

    name: str
    host: Host
    step_s: float
    jitter: float = 0.1
    slow_odds: float = 0.0
    slow: float = 1.0
    refreshes: bool = False
    """Takes newer weights before any step, not only at the start of a trajectory."""
    grant: Grant | None = None
    loaded: Version = NO_VERSION
    label: Version = NO_VERSION
    steps: list[Version] = field(default_factory=list)
    began: float = 0.0
    pace: float = 0.0
    cut: int = -1
    finish: int = 0
    asked: float | None = None
    waited: float = 0.0
    parked: bool = False
    steps_begun: int = 0


@dataclass
class Host:
    """Actors that take turns on one compute thread. ``life`` counts incarnations; messages of an
    earlier one are void.
    """

    index: int
    life: int = 0
    alive: bool = True
    frozen: bool = False
    asleep: list[Callable[[], None]] = field(default_factory=list)
    running: Actor | None = None
    queue: deque[Actor] = field(default_factory=deque)


@dataclass(frozen=True)
class Trained:
    """What the oracle saw of one trained trajectory."""

    ticket: int
    staleness: int
    bound: int | None
    same_lineage: bool


class World:
    """One run. Drive it with `run`, change it with `change` and the failures below."""

    def __init__(
        self,
        *,
        settings: Settings,
        controllers: Sequence[Controller],
        seed: int = 0,
        ledger: type[Ledger] = Ledger,
    ) -> None:
        self.random, self.now, self._heap, self._sequence = random.Random(seed), 0.0, [], 0
        self._heap: list[tuple[float, int, Callable[[], None]]]
        self._sent: dict[object, float] = {}
        self.settings, self.controllers = settings, list(controllers)
        self.config, self.wishes = (
            settings.config(),
            {str(index): ControllerRequests() for index in range(len(controllers))},
        )
        self.ledger = ledger(
            limits=Limits(
                batch=settings.batch, max_staleness=settings.bound, credits=settings.batch
            ),
            slots=settings.slots,
        )
        self.hosts: list[Host] = []
        self.actors: list[Actor] = []
        self.memory: dict[int, tuple[int, Steps]] = {}
        self.waiting: deque[tuple[Actor, int]] = deque()
        self.pulling: tuple[Version, int] | None = None
        self._woken = 0
        self.check: Callable[[], None] = lambda: None
        # The learner, as it knows itself:
        self.version, self.published = NO_VERSION, NO_VERSION
        self.learner_life, self.learner_alive = 0, False
        self.bound: int | None = settings.bound
        self.using: tuple[Batch, list[Steps], int | None] | None = None
        self.ahead: Batch | None = None
        self.pulled_ahead = False
        self.idle_since: float | None = None
        self.idle = 0.0
        # What was seen:
        self.trained: list[Trained] = []
        self.settled: list[Trained] = []
        """The part of it whose settlement reached the ledger while its learner lived."""
        self.bounds: list[tuple[float, int | None]] = []
        self.corrupt = 0
        self.updates = 0
        self.lineages = 0
        self.history: list[tuple[float, int, int]] = []
        self.mixups: list[str] = []

    # Time and messages
    # ----------------------------------------------------------------------------------------------

    def at(self, delay: float, act: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, act))

    def send(self, sender: object, act: Callable[[], None]) -> None:
        """To the coordinator or from it, in order per sender; every message is followed by a look
        at what it made possible.
        """
        due = max(
            self._sent.get(sender, 0.0), self.now + self.random.random() * self.settings.delay
        )
        self._sent[sender] = due
        self.at(due - self.now, act)

    def tell(self, sender: object, act: Callable[[], object]) -> None:
        def deliver() -> None:
            act()
            self._pump()
            self.check()

        self.send(sender, deliver)

    def run(self, seconds: float = float("inf"), updates: int | None = None) -> int:
        """Go on for so long, or until so many more updates are done. Returns how many were."""
        end, before = self.now + seconds, self.updates
        while (
            self._heap
            and self._heap[0][0] <= end
            and (updates is None or self.updates - before < updates)
        ):
            self.now, _, act = heapq.heappop(self._heap)
            act()
        if updates is None:
            self.now = end
        return self.updates - before

    # Coordinator
    # ----------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._take()
        while self.waiting:
            actor, life = self.waiting[0]
            if actor.host.life != life:
                self.waiting.popleft()
                continue
            grant = self.ledger.grant(actor.name)
            if grant is None:
                return
            if self.ledger.credits_in_use > self.ledger.credits_limit:
                self.mixups.append("a grant beyond the limit")
            self.waiting.popleft()
            self.send(("to", actor.name), lambda a=actor, g=grant, n=life: self._granted(a, g, n))

    def _take(self) -> None:
        if self.pulling is None or self.pulling[0].lineage != self.ledger.version.lineage:
            return
        for_version, life = self.pulling
        answer = self.ledger.take(for_version, self.now)
        if isinstance(answer, Batch):
            self.pulling = None
            self.send("to learner", lambda: self._received(answer, life))
            return
        self._straggle(answer)

    def _straggle(self, blocked: Blocked) -> None:
        for number in blocked.cut if self.settings.cutting else ():
            for actor in self.actors:
                if actor.grant is not None and actor.grant.ticket == number and actor.cut != number:
                    actor.cut = number
                    self._reschedule(actor)
        if blocked.until is not None:
            self._woken += 1
            wake = self._woken
            self.at(
                max(0.0, blocked.until - self.now) + 1e-6,
                lambda: self._pump() if wake == self._woken else None,
            )

    def balance(self) -> None:
        """Let the controllers look, merge what they say, put it in force."""
        ledger, settings = self.ledger, self.settings
        waiting_since = [
            actor.asked for actor in self.actors if actor.asked is not None and actor.host.alive
        ]
        observed = Observed(
            now=self.now,
            version=ledger.version.number,
            publish_lag=ledger.publish_lag,
            batch=settings.batch,
            max_staleness=settings.bound,
            credits_limit=ledger.credits_limit,
            credits_in_use=ledger.credits_in_use,
            credits_ceiling=ledger.credits_ceiling,
            slots=ledger.slots,
            actors=len([actor for actor in self.actors if actor.host.alive and not actor.parked]),
            learner_waiting_s=self.idle
            + (self.now - self.idle_since if self.idle_since is not None else 0.0),
            actors_waiting_s=sum(actor.waited for actor in self.actors)
            + sum(self.now - since for since in waiting_since),
        )
        for name, controller in zip(self.wishes, self.controllers, strict=True):
            for directive in controller.handle(observed):
                self.wishes[name] = self.wishes[name].after(directive)
        limits, _ = merge(self.wishes, self.config, slots=ledger.slots)
        if limits != ledger.limits:
            ledger.set_limits(limits)
        if not self.bounds or self.bounds[-1][1] != limits.max_staleness:
            self.bounds.append((self.now, limits.max_staleness))
            self.send("settings", lambda: self._learn_bound(limits.max_staleness))
        self._pump()

    def change(self, *, controllers: Sequence[Controller] | None = None, **settings: Any) -> None:
        """A live change of settings or controllers."""
        self.settings = replace(self.settings, **settings)
        self.config = self.settings.config()
        if controllers is not None:
            self.controllers, self.wishes = (
                list(controllers),
                {str(index): ControllerRequests() for index in range(len(controllers))},
            )
        self.balance()
        self.check()

    # Actors
    # ----------------------------------------------------------------------------------------------

    def park(self, actors: Sequence[Actor], parked: bool = True) -> None:
        """Parked actors end what they have begun and ask for nothing more."""
        for actor in actors:
            was, actor.parked = actor.parked, parked
            if was and not parked and actor.grant is None and actor.asked is None:
                self._ask(actor)

    def add_host(self, *step_s: float, **actor: Any) -> Host:
        host = Host(len(self.hosts))
        self.hosts.append(host)
        for seconds in step_s:
            self.actors.append(Actor(f"actor-{len(self.actors)}", host, seconds, **actor))
            self._ask(self.actors[-1])
        return host

    def _on(self, host: Host, act: Callable[[], None]) -> Callable[[], None]:
        """``act``, if the host still lives when its time comes; later, if the host is
        stopped then.
        """
        life = host.life

        def later() -> None:
            if host.life == life:
                if host.frozen:
                    host.asleep.append(later)
                else:
                    act()

        return later

    def _ask(self, actor: Actor) -> None:
        if actor.parked:
            return
        actor.asked, life = self.now, actor.host.life
        self.tell(
            actor.name,
            lambda: self.waiting.append((actor, life)) if actor.host.life == life else None,
        )

    def _granted(self, actor: Actor, grant: Grant, life: int) -> None:
        if actor.host.life != life:
            return
        if actor.asked is not None:
            actor.waited, actor.asked = actor.waited + self.now - actor.asked, None
        if any(other.grant is not None and other.grant.slot == grant.slot for other in self.actors):
            self.mixups.append("two writers of one slot")
        actor.grant, actor.loaded = grant, self.published
        actor.host.queue.append(actor)
        self._on(actor.host, lambda: self._turn(actor.host))()

    def _turn(self, host: Host) -> None:
        if host.running is not None or not host.queue:
            return
        actor = host.running = host.queue.popleft()
        grant = actor.grant
        assert grant is not None
        version = actor.label = self.published
        if version < grant.version:
            self.mixups.append("a grant that names what was not published")
        actor.steps, actor.began = (
            [actor.loaded if self.settings.label_ahead else version],
            self.now,
        )
        odd = self.random.random() < actor.slow_odds
        actor.pace = (
            actor.step_s
            * (1 + actor.jitter * self.random.uniform(-1, 1))
            * (actor.slow if odd else 1)
        )
        self.tell(actor.name, lambda: self.ledger.begin(grant.ticket, version))
        self._reschedule(actor)

    def _reschedule(self, actor: Actor) -> None:
        """It ends after its last step; if it was told to cut, after the step that runs now, but not
        below the least length.
        """
        if actor.host.running is not actor or actor.grant is None:
            return
        length = self.settings.rollout_steps
        if actor.cut == actor.grant.ticket:
            length = min(
                length,
                max(self.settings.min_fragment, int((self.now - actor.began) / actor.pace) + 1),
            )
        actor.finish += 1
        finish = actor.finish
        end = max(0.0, actor.began + length * actor.pace - self.now)
        self.at(
            end,
            self._on(
                actor.host, lambda: self._finish(actor, length) if finish == actor.finish else None
            ),
        )

    def _finish(self, actor: Actor, length: int) -> None:
        grant, host = actor.grant, actor.host
        assert grant is not None
        steps = tuple(actor.steps)
        if host.frozen:
            self.mixups.append("a stopped process computed")
        self.memory[grant.slot] = (grant.ticket, steps)
        trajectory = Trajectory(grant.ticket, grant.slot, length, length, actor.label)
        actor.steps_begun += length
        self.tell(actor.name, lambda: self.ledger.commit(grant.ticket, trajectory, self.now))
        actor.grant, host.running = None, None
        self._ask(actor)
        self._turn(host)

    # Learner
    # ----------------------------------------------------------------------------------------------

    def start_learner(self, number: int = 0) -> None:
        """A learner, fresh or restarted from the checkpoint of version ``number``: publishes first,
        then pulls.
        """
        self.lineages += 1
        self.learner_alive, version = True, Version(self.lineages, number)
        self.version = version
        self.using, self.ahead, self.idle_since = None, None, None
        self._publish()
        self.tell("learner", lambda: (self.ledger.open_lineage(version), self.balance()))
        self._pull(self.version)

    def _alive(self, act: Callable[[], None]) -> Callable[[], None]:
        life = self.learner_life
        return lambda: act() if self.learner_life == life else None

    def _publish(self) -> None:
        self.published = self.version
        for actor in self.actors:
            if actor.refreshes and actor.host.running is actor and not actor.host.frozen:
                actor.steps.append(self.version)

    def _pull(self, for_version: Version) -> None:
        if self.using is None and self.idle_since is None:
            self.idle_since = self.now
        life = self.learner_life
        self.tell(
            "learner",
            lambda: (
                setattr(self, "pulling", (for_version, life)) if life == self.learner_life else None
            ),
        )

    def _received(self, batch: Batch, life: int) -> None:
        if life != self.learner_life:
            return
        if self.using is None:
            self._use(batch)
        else:
            self.ahead = batch

    def _use(self, batch: Batch) -> None:
        """The check at use, then the copy, then the update; the next batch is pulled for the
        version that it will meet.
        """
        bound = self.bound
        stale = [
            t
            for t in batch.trajectories
            if bound is not None and self.version.number - t.version.number > bound
        ]
        if self.settings.check_at_use and (stale or batch.for_version != self.version):
            tickets = [t.ticket for t in batch.trajectories]
            self.tell("learner", lambda: self.ledger.give_back(tickets))
            self._pull(self.version)
            return
        if not self._in_force(bound):
            self.mixups.append(f"bound {bound} used after it was changed")
        if self.idle_since is not None:
            self.idle, self.idle_since = self.idle + self.now - self.idle_since, None
        data = []
        for trajectory in batch.trajectories:
            ticket, steps = self.memory[trajectory.slot]
            self.corrupt += ticket != trajectory.ticket
            data.append(steps)
        self.using = (batch, data, bound)
        self.pulled_ahead = bool(self.settings.prefetch) and bound != 0
        if self.pulled_ahead:
            self._pull(Version(self.version.lineage, self.version.number + 1))
        self.at(self.settings.update_s * self.random.uniform(0.9, 1.1), self._alive(self._updated))

    def _in_force(self, bound: int | None) -> bool:
        """True if ``bound`` has been the bound at some moment since the longest delay of a
        message.
        """
        ends = [*(time for time, _ in self.bounds[1:]), float("inf")]
        return any(
            known == bound and end >= self.now - self.settings.delay
            for (_, known), end in zip(self.bounds, ends, strict=True)
        )

    def _updated(self) -> None:
        assert self.using is not None
        batch, data, bound = self.using
        used_at, self.using = self.version, None
        records = [
            Trained(
                trajectory.ticket,
                used_at.number - min(steps).number,
                bound,
                {used_at.lineage} == {step.lineage for step in steps},
            )
            for trajectory, steps in zip(batch.trajectories, data, strict=True)
        ]
        self.trained += records
        self.version = Version(used_at.lineage, used_at.number + 1)
        self.updates += 1
        lag = self.version.number - self.published.number
        publishes = lag >= self.settings.publish_every or self._overdue(lag)
        if publishes:
            self._publish()
        settlement = Settlement(
            self.version, tuple(t.ticket for t in batch.trajectories), bound, publishes
        )
        self.tell("learner", lambda: self._settled(settlement, records))
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            self._use(ahead)
        elif self.pulled_ahead:
            self.idle_since = self.now
        else:
            self._pull(self.version)

    def _settled(self, settlement: Settlement, records: list[Trained]) -> None:
        self.ledger.settle(settlement)
        if self.ledger.version != settlement.version:
            return
        self.settled += records
        self.history.append((self.now, settlement.version.number, self.ledger.credits_limit))
        self.balance()

    def _overdue(self, lag: int) -> bool:
        return self.settings.force_publish and self.bound is not None and lag > self.bound

    def _learn_bound(self, bound: int | None) -> None:
        """Settings are read at boundaries; a bound that the lag breaks is met by publishing at
        once.
        """
        self.bound = bound
        if (
            self.learner_alive
            and self.using is None
            and self._overdue(self.version.number - self.published.number)
        ):
            self._publish()
            version = self.version
            self.tell("learner", lambda: self.ledger.publish(version))

    # Failures
    # ----------------------------------------------------------------------------------------------

    def kill_host(self, host: Host) -> None:
        """SIGKILL; reaped a little later, restarted a little after that. What it had sent still
        arrives.
        """
        host.life += 1
        host.alive, host.frozen = False, False
        host.asleep, host.queue, host.running = [], deque(), None
        mine = [actor for actor in self.actors if actor.host is host]
        for actor in mine:
            actor.grant, actor.asked, actor.cut = None, None, -1

        def reaped() -> None:
            for actor in mine:
                self.ledger.holder_lost(actor.name, "env_hang")
            self._pump()
            self.check()
            self.at(self.random.random() * 2, restarted)

        def restarted() -> None:
            host.alive = True
            for actor in mine:
                self._ask(actor)

        self.at(self.random.random(), reaped)

    def stop_host(self, host: Host, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after ``seconds``: what it was about to do it does then, late."""
        if host.alive and not host.frozen:
            host.frozen, life = True, host.life
            self.at(seconds, lambda: self._thaw(host) if host.life == life else None)

    def _thaw(self, host: Host) -> None:
        host.frozen, asleep = False, host.asleep
        host.asleep = []
        for act in asleep:
            act()

    def kill_learner(self, checkpoint: int) -> None:
        """SIGKILL; what it had sent arrives before or after it is reaped; a new lineage from
        version ``checkpoint``.
        """
        if not self.learner_alive:
            return
        self.learner_life += 1
        self.learner_alive, self.using, self.ahead, self.idle_since = False, None, None, None

        def reaped() -> None:
            self.pulling = None
            self.ledger.learner_lost()
            self.check()
            self.at(self.random.random(), lambda: self.start_learner(checkpoint))

        self.at(self.random.random() * max(0.1, self.settings.delay), reaped)

    # Looking
    # ----------------------------------------------------------------------------------------------

    def violations(self) -> list[Trained]:
        """What was trained on against the promise, as the data say."""
        return [
            t
            for t in self.trained
            if not t.same_lineage
            or t.staleness < 0
            or (t.bound is not None and t.staleness > t.bound)
        ]

    def trained_share(self, actor: Actor) -> float:
        """Trained steps of all steps that ``actor`` has made."""
        return self.ledger.snapshot().shares[actor.name].trained_steps / actor.steps_begun


def _total(histogram: Mapping[int, int]) -> int:
    return sum(map(mul, histogram.keys(), histogram.values()))


def broken_identity(ledger: Ledger) -> str:
    """The first identity that does not hold now; "" when all do."""
    seen, live = ledger.snapshot(), ledger.live()
    unbegun = sum(ticket.state is State.GRANTED for ticket in live)
    slots = ledger._slots.without_ticket()
    slots += [ticket.slot for ticket in live if ticket.state is not State.TAKEN]
    identities = {
        "begun = trained + dropped + open": seen.begun
        == seen.trained + sum(seen.dropped.values()) + seen.open,
        "granted = begun + returned + not yet begun": seen.granted
        == seen.begun + seen.returned + unbegun,
        "in use = open + not yet begun": seen.in_use == seen.open + unbegun,
        "every slot is in exactly one place": len(slots) == len(set(slots)) == seen.slots,
        "every trained one has a staleness": seen.trained == sum(seen.staleness.values()),
        "in flight and in queue make up staleness": _total(seen.staleness)
        == _total(seen.in_flight) + _total(seen.in_queue),
    }
    return next((name for name, holds in identities.items() if not holds), "")
