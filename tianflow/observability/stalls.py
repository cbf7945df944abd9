"""Detection of stalls: the component that is stuck, for how long, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence

from tianflow.config.model import Config
from tianflow.core.statistics import ComponentStatistics, Diagnosis, RunStatistics

STUCK_S = 3.0
"""Minimum seconds before a component counts as stuck."""
TIMES = 5.0
"""Minimum multiple of its usual time before a component counts as stuck."""
FIRST_S = 10.0
"""Seconds that a first trajectory may take."""
FIRST_UPDATE_S = 30.0
"""Seconds that a first update may take: libraries load and compile with it."""


def stalled(samples: Sequence[RunStatistics], config: Config) -> Diagnosis | None:
    """The diagnosis of a stall in the last of ``samples``; None without one. A stuck component is a
    stall even if others work.
    """
    run = samples[-1]
    still = _seconds_without_update(samples)
    for found in (
        _absent(run, still),
        _learner(run, config, still),
        _actor(run, config, still),
        _each_other(run, still),
    ):
        if found is not None:
            return found
    return None


def _seconds_without_update(samples: Sequence[RunStatistics]) -> float:
    """Seconds since the last update, as far back as the samples go."""
    run = samples[-1]
    same = [sample.now for sample in samples if sample.ledger.updates == run.ledger.updates]
    return run.now - min(same)


def _absent(run: RunStatistics, still: float) -> Diagnosis | None:
    """A component is gone or silent."""
    if run.ready:
        return None
    reason = "; ".join(run.reasons) or "training cannot proceed"
    roles = {component.role for component in run.components}
    silent = [component.name for component in run.components if repr(component.host) in reason]
    if silent:
        name = ", ".join(silent)
    elif "learner is gone" in reason or "learner" not in roles:
        name = "learner"
    elif run.replay is not None and not run.replay.shards:
        name = "replay"
    else:
        name = "actors"
    suggested: dict[str, float] = {} if run.actors_wanted else {"actors.count": 1}
    return Diagnosis("stalled", reason, component=name, for_s=still, suggested=suggested)


def _learner(run: RunStatistics, config: Config, still: float) -> Diagnosis | None:
    for component in run.components:
        if component.role != "learner" or component.time.current not in ("busy", "checkpoint"):
            continue
        lasted, usual = run.now - component.time.since, _usual([component], "update_seconds")
        longest = (
            FIRST_UPDATE_S if usual is None else TIMES * usual * (1.0 + config.learner.slowdown)
        )
        if lasted > max(STUCK_S, longest) and still > 0.0:
            work = "one update" if component.time.current == "busy" else "writing a checkpoint"
            return Diagnosis(
                "stalled",
                f"{component.name} has been at {work} for {lasted:.0f} s{_usually(usual)}",
                component.name,
                lasted,
            )
    return None


def _actor(run: RunStatistics, config: Config, still: float) -> Diagnosis | None:
    """The actor that has been in one trajectory, or rebuilding its environments, for the longest
    time beyond the usual.
    """
    actors = [component for component in run.components if component.role == "actor"]
    stuck = []
    for component in actors:
        lasted = run.now - component.time.since
        own = _usual([component], "rollout_seconds")
        usual = _usual(actors, "rollout_seconds") if own is None else own
        longest = (
            FIRST_S if usual is None or component.time.current == "rebuilding" else TIMES * usual
        )
        if component.time.current in ("busy", "rebuilding") and lasted > max(STUCK_S, longest):
            stuck.append((lasted, component, usual))
    if not stuck:
        return None
    lasted, component, usual = max(stuck, key=lambda found: found[0])
    others = f"no update for {still:.0f} s" if still >= STUCK_S else "the other actors work"
    if component.time.current == "rebuilding":
        text = f"{component.name} has been rebuilding its environments for {lasted:.0f} s; {others}"
    else:
        text = (
            f"{component.name} waits for a step of its environments: it has been in one "
            f"trajectory for {lasted:.0f} s{_usually(usual)}; "
            f"{others}; its host is replaced when a step takes longer than env.step_timeout_s = "
            f"{config.env.step_timeout_s:g} s"
        )
    return Diagnosis("stalled", text, component.name, lasted)


def _each_other(run: RunStatistics, still: float) -> Diagnosis | None:
    """Learner and actors wait for each other, with nothing in transit between them."""
    learners = [component for component in run.components if component.role == "learner"]
    actors = [component for component in run.components if component.role == "actor"]
    waiting = {"learner": "waiting:batch", "actor": "waiting:grant"}
    if (
        not learners
        or not actors
        or any(
            component.time.current != waiting[component.role] for component in (*learners, *actors)
        )
    ):
        return None
    lasted = run.now - max(component.time.since for component in (*learners, *actors))
    if min(lasted, still) < STUCK_S:
        return None
    ledger = run.ledger
    text = (
        f"the learner waits for a batch and every actor for a credit, for {lasted:.0f} s: "
        f"{ledger.in_use} of {ledger.credits_limit} "
        f"credits are in use, {ledger.queue} trajectories queued, {ledger.free_slots} of "
        f"{ledger.slots} slots free"
    )
    return Diagnosis("stalled", text, component="learner", for_s=lasted)


def _usual(components: Sequence[ComponentStatistics], name: str) -> float | None:
    """Mean of the distribution ``name`` in seconds; None while it is empty."""
    found = [
        component.distributions[name] for component in components if name in component.distributions
    ]
    count = sum(distribution.count for distribution in found)
    return sum(distribution.total for distribution in found) / count if count else None


def _usually(usual: float | None) -> str:
    return "" if usual is None else f" (usually {usual:.2g} s)"
