"""Shares of time of a run's components over the last seconds, and the speeds that they imply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tianflow.config.model import Config
from tianflow.config.rules import cores_of_learner
from tianflow.core.devices import cores
from tianflow.core.moments import Moments, moments
from tianflow.core.statistics import (
    ComponentStatistics,
    NodeStatistics,
    RunStatistics,
    TimeShares,
)
from tianflow.observability.throughput_model import Forecast, Side, forecast

NOTICEABLE = 0.15
"""A smaller share of waiting is noise of scheduling, not a bottleneck."""
IDLE = ("starting", "paused", "ended")
"""States in which a component neither works nor waits for another."""
MOST = 0.97
"""Largest share of waiting that the advice assumes: it means 33 times as many actors, which is a
guess already.
"""
ENDLESS = 1e9
"""Room in batches between two sides that never block each other."""
LEAST_COUNT = 8
"""Minimum number of trajectories or updates for an estimate of their spread."""


@dataclass(frozen=True)
class Window:
    """The time between the first and the last sample."""

    samples: Sequence[RunStatistics]
    config: Config
    earlier: Sequence[ComponentStatistics] = ()
    """Components at an earlier time under the same settings. The longer ago, the better is the
    estimate of how much times vary.
    """

    @property
    def run(self) -> RunStatistics:
        """The newest sample."""
        return self.samples[-1]

    @property
    def passed(self) -> float:
        """Length in seconds."""
        return self.run.now - self.samples[0].now

    @cached_property
    def shares(self) -> dict[str, dict[str, float]]:
        """Mean share of each state by role, over the components that worked or waited."""
        found: dict[str, list[dict[str, float]]] = {}
        for component in self.run.components:
            if component.name in self._shares:
                found.setdefault(component.role, []).append(self._shares[component.name])
        return {role: _mean(shares) for role, shares in found.items()}

    @cached_property
    def _shares(self) -> dict[str, dict[str, float]]:
        """Share of each state, of the components that worked or waited, by name."""
        before = {component.name: component.time for component in self.samples[0].components}
        found = {}
        for component in self.run.components:
            seconds = time_between(
                before.get(component.name), component.time, self.samples[0].now, self.run.now
            )
            counted = {
                state: value
                for state, value in seconds.items()
                if state not in IDLE and value > 0.0
            }
            if total := sum(counted.values()):
                found[component.name] = {state: value / total for state, value in counted.items()}
        return found

    @property
    def actors(self) -> int:
        """Number of actors that report; 0 if none of them worked or waited."""
        return (
            sum(component.role == "actor" for component in self.run.components)
            if "actor" in self.shares
            else 0
        )

    @property
    def learner_waits(self) -> float:
        """Share of the learner's time in which it waited for a batch."""
        return self.shares["learner"].get("waiting:batch", 0.0)

    @property
    def actors_wait(self) -> float:
        """Mean share of the actors' time in which they waited for a credit."""
        return self.shares["actor"].get("waiting:grant", 0.0)

    def waits_of(self, node: NodeStatistics) -> float:
        """Mean share of time in which the actors of ``node`` waited for a credit."""
        shares = [self._shares[name] for name in node.actors if name in self._shares]
        return sum(share.get("waiting:grant", 0.0) for share in shares) / max(1, len(shares))

    def bytes_per_s(self, name: str) -> dict[str, float]:
        """Bytes that the head has received from node ``name``, and sent to it, and that other nodes
        have sent to it directly, a second.
        """

        def counted(sample: RunStatistics) -> dict[str, int]:
            node = sample.nodes.get(name)
            if node is None:
                return dict.fromkeys(("received", "sent", "direct"), 0)
            return {
                "received": sum(node.received_bytes.values()),
                "sent": sum(node.sent_bytes.values()),
                "direct": node.direct_received_bytes,
            }

        before = next((sample for sample in self.samples if name in sample.nodes), self.run)
        passed, first = max(1e-9, self.run.now - before.now), counted(before)
        return {way: (last - first[way]) / passed for way, last in counted(self.run).items()}

    @cached_property
    def held_up(self) -> str:
        """The node whose link holds its actors up the most; "" if none does noticeably.

        They wait for grants although credits are free, or rest because they were late. An actor
        whose environments are slow is late by itself.
        """
        spent, found = self.credits_spent, [(NOTICEABLE, 0.0, "")]
        for name, node in self.run.nodes.items():
            if not spent or self._rests(name):
                found.append((self.waits_of(node), node.round_trip_s, name))
        return max(found)[2]

    def _rests(self, name: str) -> bool:
        """True if actors of node ``name`` rested noticeably, although their environments are as
        fast as others.
        """
        late = [
            any(actor not in self._slow for actor in sample.nodes[name].late)
            for sample in self.samples
            if name in sample.nodes
        ]
        return sum(late) > NOTICEABLE * len(late)

    @cached_property
    def _slow(self) -> set[str]:
        """Actors whose trajectories take twice as long as those of the others on average."""
        means = {
            component.name: times.total / times.count
            for component in self.run.components
            if (times := component.distributions.get("trajectory_seconds")) and times.count
        }
        total = sum(means.values())
        return {
            name
            for name, mean in means.items()
            if len(means) > 1 and mean > 2.0 * (total - mean) / (len(means) - 1)
        }

    @property
    def stepping(self) -> float:
        """Mean number of actors that step their environments at the same time."""
        return self.actors * self.shares["actor"].get("busy", 0.0)

    @property
    def pace(self) -> float:
        """Environment steps per second."""
        return (self.run.env_steps - self.samples[0].env_steps) / self.passed

    @property
    def enough(self) -> int:
        """Number of actors that would saturate the learner, if their environments never paused.

        The learner is busy for a share ``w`` of the time with the steps of ``stepping`` actors, so
        ``stepping / w`` actors saturate it.
        """
        return max(1, math.ceil(self.stepping / self.learner_works - 0.1))

    @property
    def learner_works(self) -> float:
        """Share of the learner's time in which it works, with updates of average length: a few
        seconds hold few updates.
        """
        lately, long = (
            self._durations(self.samples[0].components)["learner"],
            self.varied["learner"],
        )
        usual = (
            long.mean / lately.mean
            if min(lately.count, long.count) >= LEAST_COUNT and lately.mean > 0.0
            else 1.0
        )
        return min(1.0, max(1.0 - MOST, (1.0 - self.learner_waits) * usual))

    @cached_property
    def varied(self) -> dict[str, Moments]:
        """Durations of trajectories and updates since `earlier`, by role."""
        return self._durations(self.earlier or self.samples[0].components)

    def _durations(self, before: Sequence[ComponentStatistics]) -> dict[str, Moments]:
        old = {component.name: moments(component) or Moments() for component in before}
        found = {"actor": Moments(), "learner": Moments()}
        for component in self.run.components:
            if component.role in found and (own := moments(component)) is not None:
                found[component.role] += own.since(old.get(component.name, Moments()))
        return found

    def side(self, role: str, pace: float) -> Side:
        """Actors or learner that make or take ``pace`` without waiting."""
        varied = self.varied[role]
        if varied.count < LEAST_COUNT:
            return Side(pace)
        return Side(pace, varied.spread, varied.spread / math.sqrt(varied.count))

    def forecast(self, supply: float, demand: float, *, actors: int, bound: int | None) -> Forecast:
        """Forecast for ``actors`` that make ``supply`` and a learner that takes ``demand``, under
        ``bound``; all in steps per second.

        Every credit beyond one per actor is room between the sides. One more batch is with the
        learner.
        """
        sides = self.side("actor", supply), self.side("learner", demand)
        batch, limit = self.config.algorithm.batch_trajectories, self.config.balance.credits
        if bound is None or self.run.replay is not None:
            return forecast(*sides, ENDLESS)
        out = (bound + 1) * batch if limit is None else min(limit, (bound + 1) * batch)
        return forecast(*sides, max(1.0, (out - actors) / batch + 1.0))

    @property
    def hosts(self) -> int:
        """Number of actors that can step at the same time: those of one host take turns."""
        if len({component.host for component in self.run.components}) == 1:
            return 1  # one process runs every component
        return self.config.actors.hosts or max(1, cores() - cores_of_learner(self.config))

    @property
    def inference_waits(self) -> float:
        """Mean share of the actors' time in which they waited for an inference server."""
        return self.shares["actor"].get("waiting:inference", 0.0)

    @property
    def servers_busy(self) -> float:
        """Mean share of time in which inference servers compute."""
        return self.shares.get("inference", {}).get("busy", 0.0)

    @property
    def hosts_busy(self) -> float:
        """Mean share of time in which an actor of a host steps its environments."""
        return min(1.0, self.stepping / self.hosts)

    @property
    def actors_work(self) -> float:
        """Steps that the actors make, over those that they could make without waiting for grants.
        Actors of one host take turns, so together they make no more than one of them could.
        """
        return max(1e-9, 1.0 - self.actors_wait, min(1.0, self.stepping / self.hosts))

    def blocked(self, side: str) -> bool:
        """True if replay blocked ``side`` noticeably."""
        old, new = self.samples[0].replay, self.run.replay
        if old is None or new is None:
            return False
        return (
            new.blocked_s.get(side, 0.0) - old.blocked_s.get(side, 0.0)
        ) / self.passed > NOTICEABLE

    @property
    def credits_spent(self) -> bool:
        """True if the bound held actors up: most of the time every credit was in use, for
        trajectories that are rolled out, queued or trained on.

        Further credits in use belong to trajectories and grants in transit.
        """
        ledgers = [sample.ledger for sample in self.samples]
        spent = sum(ledger.in_use >= ledger.credits_limit for ledger in ledgers) / len(ledgers)
        out = sum(ledger.in_use - ledger.queue for ledger in ledgers) / len(ledgers)
        learning = self.config.algorithm.batch_trajectories * (1.0 - self.learner_waits)
        making = self.actors * (1.0 - self.actors_wait)
        return spent > 0.5 and out - learning - making <= 0.5 * out


def time_between(
    before: TimeShares | None, after: TimeShares, began: float, now: float
) -> dict[str, float]:
    """Seconds in each state between two samples of one component.

    Reports are up to a second old, and the state of a report may have ended since. So only states
    that have ended count if they cover about the whole time; otherwise the current state counts,
    too.
    """
    old = {} if before is None else dict(before.seconds)
    if sum(after.at(now).values()) < sum(old.values()):  # a restarted component counts from 0 again
        before, old = None, {}
    ended = {
        state: max(0.0, seconds - old.get(state, 0.0)) for state, seconds in after.seconds.items()
    }
    if 0.5 <= sum(ended.values()) / max(1e-9, now - began) <= 1.5:
        return ended
    start = {} if before is None else before.at(began)
    return {
        state: max(0.0, seconds - start.get(state, 0.0)) for state, seconds in after.at(now).items()
    }


def _mean(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    states = {state for share in shares for state in share}
    return {
        state: sum(share.get(state, 0.0) for share in shares) / len(shares)
        for state in sorted(states)
    }
