"""What holds a run back, by how much, and what would change it: from where the time of its components went lately."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tianflow.config import Config
from tianflow.stalls import stalled
from tianflow.statistics import Diagnosis, RunStatistics, TimeShares

NOTICEABLE = 0.15
"""A share of waiting below this is noise of scheduling, not a bottleneck."""
WINDOW_S = 5.0
SPACING_S = 0.5
LEAST_S = 0.5
"""Less time than this says nothing yet."""
IDLE = ("starting", "paused", "ended")
"""States in which a component neither works nor waits for another."""
MOST = 0.97
"""A learner that waits for more than this is told to have more actors as if it waited for so much: 33 times as many are a guess already."""


class Watch:
    """Keeps what a diagnosis looks back at: statistics of the last seconds of an unbroken stretch of training."""

    def __init__(self) -> None:
        self._kept: deque[RunStatistics] = deque()
        self._verdict, self._since = "", 0.0

    def look(self, run: RunStatistics, config: Config) -> RunStatistics:
        """``run`` with its diagnosis."""
        kept = self._kept
        if run.state != "running":
            kept.clear()
        while len(kept) > 1 and kept[1].now <= run.now - WINDOW_S:
            kept.popleft()
        found = diagnose([*kept, run], config)
        if run.state == "running" and (not kept or run.now - kept[-1].now >= SPACING_S):
            kept.append(run)
        if found.verdict != self._verdict:
            self._verdict, self._since = found.verdict, run.now
        return replace(run, diagnosis=replace(found, for_s=max(found.for_s, run.now - self._since)))


def diagnose(looks: Sequence[RunStatistics], config: Config) -> Diagnosis:
    """The verdict on the time from the first to the last of ``looks``, oldest first.

    The shares are of that time alone. What lies between the two ends only says how many trajectories were on their way.
    """
    run = looks[-1]
    if run.state != "running":
        return Diagnosis(run.state, f"the run is {run.state}")
    stall = stalled(looks, config)
    if stall is not None:
        return stall
    window = Window(looks, config)
    if window.passed < LEAST_S or not window.actors or "learner" not in window.shares:
        return Diagnosis("starting", "there is too little to compare yet", window_s=window.passed)
    verdict = _verdict(window)
    sentence, suggested, foretold = ADVICE[verdict](window)
    return Diagnosis(
        verdict,
        sentence,
        window_s=window.passed,
        waits={"learner": window.learner_waits, "actors": window.actors_wait},
        shares=window.shares,
        suggested=suggested,
        steps_per_s=window.pace,
        foretold_steps_per_s=foretold,
    )


@dataclass(frozen=True)
class Window:
    """What happened between the first and the last look."""

    looks: Sequence[RunStatistics]
    config: Config

    @property
    def run(self) -> RunStatistics:
        """As it is now."""
        return self.looks[-1]

    @property
    def passed(self) -> float:
        """Seconds."""
        return self.run.now - self.looks[0].now

    @cached_property
    def shares(self) -> dict[str, dict[str, float]]:
        """Mean share of each state by role, over the components that worked or waited."""
        before = {component.name: component.time for component in self.looks[0].components}
        found: dict[str, list[dict[str, float]]] = {}
        for component in self.run.components:
            seconds = time_between(before.get(component.name), component.time, self.looks[0].now, self.run.now)
            counted = {state: value for state, value in seconds.items() if state not in IDLE and value > 0.0}
            if total := sum(counted.values()):
                found.setdefault(component.role, []).append({state: value / total for state, value in counted.items()})
        return {role: _mean(shares) for role, shares in found.items()}

    @property
    def actors(self) -> int:
        """That report, if any of them worked or waited."""
        return sum(component.role == "actor" for component in self.run.components) if "actor" in self.shares else 0

    @property
    def learner_waits(self) -> float:
        """Share of its time."""
        return self.shares["learner"].get("waiting:batch", 0.0)

    @property
    def actors_wait(self) -> float:
        """Mean share of their time."""
        return self.shares["actor"].get("waiting:grant", 0.0)

    @property
    def stepping(self) -> float:
        """Mean number of actors that step their environments at once."""
        return self.actors * self.shares["actor"].get("busy", 0.0)

    @property
    def pace(self) -> float:
        """Environment steps per second."""
        return (self.run.env_steps - self.looks[0].env_steps) / self.passed

    @property
    def enough(self) -> int:
        """Actors whose environments step without a break and make what the learner would take without a break.

        The learner is busy for ``1 - w`` of the time with what ``stepping`` actors make, so it takes what ``stepping / (1 - w)`` make.
        """
        return max(1, math.ceil(self.stepping / (1.0 - min(MOST, self.learner_waits)) - 0.1))

    @property
    def hosts(self) -> int:
        """Actors that can step at once: those of one host take turns."""
        if self.config.placement.launcher == "inline":
            return 1
        return self.config.actors.hosts or max(1, len(os.sched_getaffinity(0)) - self.config.learner.threads)

    def held(self, side: str) -> bool:
        """Whether replay held back ``side`` noticeably."""
        old, new = self.looks[0].replay, self.run.replay
        if old is None or new is None:
            return False
        return (new.blocked_s.get(side, 0.0) - old.blocked_s.get(side, 0.0)) / self.passed > NOTICEABLE

    @property
    def credits_spent(self) -> bool:
        """Whether the bound was what kept actors: mostly every credit was out, and with trajectories in the making, queued or in use.

        Credits that are out beyond those are on trajectories and grants on their way.
        """
        ledgers = [look.ledger for look in self.looks]
        spent = sum(ledger.in_use >= ledger.credits_limit for ledger in ledgers) / len(ledgers)
        out = sum(ledger.in_use - ledger.queue for ledger in ledgers) / len(ledgers)
        learning = self.config.algorithm.batch_trajectories * (1.0 - self.learner_waits)
        making = self.actors * (1.0 - self.actors_wait)
        return spent > 0.5 and out - learning - making <= 0.5 * out


def time_between(before: TimeShares | None, after: TimeShares, began: float, now: float) -> dict[str, float]:
    """Seconds in each state between two looks at one component.

    Reports are up to a second old, and the state in which one was made need not have lasted until now. So only states that
    have ended count where they cover about the time; where one state lasts and lasts, it does.
    """
    old = {} if before is None else dict(before.seconds)
    if sum(after.at(now).values()) < sum(old.values()):  # a restarted component counts from 0 again
        before, old = None, {}
    ended = {state: max(0.0, seconds - old.get(state, 0.0)) for state, seconds in after.seconds.items()}
    if 0.5 <= sum(ended.values()) / max(1e-9, now - began) <= 1.5:
        return ended
    start = {} if before is None else before.at(began)
    return {state: max(0.0, seconds - start.get(state, 0.0)) for state, seconds in after.at(now).items()}


def _mean(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    states = {state for share in shares for state in share}
    return {state: sum(share.get(state, 0.0) for share in shares) / len(shares) for state in sorted(states)}


def _verdict(window: Window) -> str:
    """Who waits names what holds the run back.

    With replay: a learner asks ahead, and actors go on while there are slots, so a side that is held back without waiting loses
    nothing; whoever waits though nobody holds it back waits for the shards.
    """
    learner, actors = window.learner_waits > NOTICEABLE, window.actors_wait > NOTICEABLE
    if not learner and not actors:
        return "balanced"
    if window.run.replay is not None:
        learner, actors = learner and window.held("draw"), actors and window.held("insert")
        if not learner and not actors:
            return "transport-bound"
    elif learner and actors and not window.credits_spent:
        return "transport-bound"
    if learner and actors:
        return "balance-bound"
    return "sampling-bound" if learner else "learning-bound"


# Advice: a sentence, settings that would help, and steps per second that they would bring ---------------------------------

Advice = tuple[str, dict[str, float], float | None]


def _waiting(window: Window) -> str:
    return f"the learner waits {window.learner_waits:.0%} of the time, actors {window.actors_wait:.0%}"


def _sampling(window: Window) -> Advice:
    """What is foretold takes both sides for steady: where updates or trajectories vary much, few of them in the window misjudge the
    learner's share, and where both sides are equally fast they wait for each other now and then.
    """
    count, enough, waits = window.actors, window.enough, min(MOST, window.learner_waits)
    suggested: dict[str, float] = {} if enough <= count else {"actors.count": enough}
    if enough > window.hosts:
        suggested["actors.hosts"] = enough
    bound = window.run.ledger.max_staleness
    batch = window.config.algorithm.batch_trajectories
    if window.run.replay is None and bound is not None and bound * batch < enough:
        suggested["balance.max_staleness"] = -(-enough // batch)
    at_most = window.pace / (1.0 - waits)
    foretold = min(at_most, window.pace * enough / max(1e-9, window.stepping))
    sentence = (
        f"{_waiting(window)}; about {1.0 / (1.0 - waits):.1f}x the actors that step at once ({enough} instead of {window.stepping:.1f}) "
        f"would saturate it, at about {foretold:,.0f} steps/s instead of {window.pace:,.0f}, where there are cores for them"
    )
    if "actors.hosts" in suggested:
        sentence += f"; actors of one host take turns, so they need actors.hosts = {enough}, in a new run"
    if "balance.max_staleness" in suggested:
        sentence += f"; max_staleness = {bound} would keep some idle, {suggested['balance.max_staleness']:.0f} would not"
    return sentence, suggested, foretold


def _learning(window: Window) -> Advice:
    slowdown, busy = window.config.learner.slowdown, max(1e-9, 1.0 - window.actors_wait)
    supply = window.pace / busy
    if slowdown > 0.0:
        foretold = min(supply, window.pace * (1.0 + slowdown))
        sentence = (
            f"{_waiting(window)}; learner.slowdown = {slowdown:g} makes each update {1.0 + slowdown:g}x as long: "
            f"without it about {foretold:,.0f} steps/s instead of {window.pace:,.0f}"
        )
        return sentence, {"learner.slowdown": 0.0}, foretold
    sentence = f"{_waiting(window)}; a faster learner would be worth up to {1.0 / busy:.1f}x the steps"
    if window.enough >= window.actors:
        return sentence, {}, None
    return (
        f"{sentence}; {window.enough} of {window.actors} actors would feed this one as well",
        {"actors.count": window.enough},
        window.pace,
    )


def _transport(window: Window) -> Advice:
    if window.run.replay is not None:
        shards = len(window.run.replay.shards)
        return f"{_waiting(window)}, though nobody is held back: they wait for {shards} replay shards", {"replay.shards": shards + 1}, None
    ledger = window.run.ledger
    sentence = (
        f"{_waiting(window)}, both while trajectories or grants are on their way ({ledger.in_use} of {ledger.credits_limit} credits out, "
        f"{ledger.queue} queued, {window.stepping:.1f} actors stepping): longer trajectories (actors.rollout_steps) cross less often"
    )
    return sentence, {}, None


def _balance(window: Window) -> Advice:
    waits = _waiting(window)
    foretold = window.pace / max(1e-9, 1.0 - min(MOST, window.learner_waits, window.actors_wait))
    gain = f"both going on would make about {foretold:,.0f} steps/s instead of {window.pace:,.0f}"
    replay, config = window.run.replay, window.config
    if replay is not None:
        buffer = replay.limits.max_diff - replay.limits.min_diff
        return f"{waits}, each held back in turn; {gain} with a wider replay.error_buffer", {"replay.error_buffer": round(buffer)}, foretold
    bound, batch, actors = window.run.ledger.max_staleness, config.algorithm.batch_trajectories, window.actors
    if bound is not None and bound * batch < actors:
        wide = -(-actors // batch)
        cause = f"{actors} actors are more than max_staleness * B = {bound} * {batch} lets work during an update"
        remedy = f"max_staleness = {wide}" + (f", or {bound * batch} actors," if bound else "")
        return f"{waits}: {cause}; {gain} with {remedy} for the price of older data", {"balance.max_staleness": wide}, foretold
    if config.balance.credits is not None and config.balance.credits < actors + batch:
        wide = actors + batch
        return f"{waits}: {config.balance.credits} credits are too few; {gain} with {wide}", {"balance.credits": wide}, foretold
    suggested: dict[str, float] = {} if bound is None else {"balance.max_staleness": bound + 1}
    return f"{waits}: the slowest, {_slowest(window)}, keeps the others; {gain} with a wider bound", suggested, foretold


def _slowest(window: Window) -> str:
    means = {}
    for component in window.run.components:
        rollouts = component.distributions.get("rollout_seconds")
        if rollouts is not None and rollouts.count:
            means[component.name] = rollouts.total / rollouts.count
    if not means:
        return "some actor"
    name = max(means, key=lambda name: means[name])
    return f"{name} with {means[name]:.2g} s a trajectory ({sum(means.values()) / len(means):.2g} s on average)"


def _balanced(window: Window) -> Advice:
    return f"{_waiting(window)}: neither holds the other back", {}, None


ADVICE = {
    "sampling-bound": _sampling,
    "learning-bound": _learning,
    "transport-bound": _transport,
    "balance-bound": _balance,
    "balanced": _balanced,
}
