"""`SimulationResult`: measurements between two times of a simulation, as JSON and as lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

from tianflow.core.statistics import LedgerSnapshot, quantile
from tianflow.observability.window import NOTICEABLE

if TYPE_CHECKING:
    from tianflow.config.model import Config

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class TimeMark:
    """Totals of a simulation at one virtual time. Seconds are by state, over all components of a
    role.
    """

    now: float
    ledger: LedgerSnapshot
    learner: Mapping[str, float]
    actors: Mapping[str, float]
    requests: int
    delayed: int
    events: int


@dataclass(frozen=True, slots=True)
class StalenessResult:
    """Staleness of the trajectories trained on, in versions. ``bound`` None: unbounded. The other
    values are None if there were none.
    """

    bound: int | None
    min: int | None
    mean: float | None
    p50: int | None
    p99: int | None
    max: int | None
    violations: int


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Measurements after the warm-up. ``dropped`` counts trajectories; shares are fractions of time
    by state.
    """

    actors: int
    seconds: float
    updates: int
    steps_per_s: float
    """Environment steps committed."""
    trained_steps_per_s: float
    updates_per_s: float
    staleness: StalenessResult
    histogram: dict[int, int]
    trained: int
    dropped: dict[str, int]
    cuts: int
    learner: dict[str, float]
    shares_of_actors: dict[str, float]
    bottleneck: str
    why: str
    events: int

    def document(self) -> dict[str, object]:
        """The result as JSON data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The result as text."""
        s, bound = (
            self.staleness,
            "unbounded" if self.staleness.bound is None else self.staleness.bound,
        )
        spread = (
            "no trajectory was trained on"
            if s.mean is None
            else f"min {s.min}, mean {s.mean:.2f}, p50 {s.p50}, p99 {s.p99}, max {s.max}"
        )
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
        speeds = (
            f"{self.steps_per_s:.4g} steps/s sampled, {self.trained_steps_per_s:.4g} "
            "trained "
            f"on; {self.updates_per_s:.4g} updates/s"
        )
        return [
            (
                f"actors: {self.actors}; {self.updates} updates in {self.seconds:.4g} s of virtual "
                "time"
            ),
            f"throughput: {speeds}",
            f"staleness: {spread}; bound {bound}",
            (
                f"trajectories: {self.trained} trained on; dropped: {dropped or 'none'}; "
                f"{self.cuts} "
                "cut short"
            ),
            f"learner: {_percent(self.learner)}",
            f"actors: {_percent(self.shares_of_actors)}",
            f"{self.bottleneck}: {self.why}",
        ]


def between(
    before: TimeMark, after: TimeMark, *, config: Config, stalled: bool
) -> SimulationResult:
    """The result between two marks."""
    passed, old, new = after.now - before.now, before.ledger, after.ledger
    histogram = _difference(new.staleness, old.staleness)
    learner, actors = _shares(before.learner, after.learner), _shares(before.actors, after.actors)
    delayed = (after.delayed - before.delayed) / max(1, after.requests - before.requests)
    name, why = _diagnosis(learner, actors, delayed=delayed)
    if new.updates == old.updates:
        name, why = (
            "starting",
            "the simulation ended during the warm-up; use more --seconds or less --warmup",
        )
    if stalled:
        name, why = (
            "stalled",
            "the run would never continue; learner: "
            + _percent(learner)
            + "; actors: "
            + _percent(actors),
        )

    def speed(count: int) -> float:
        return count / passed if passed else 0.0

    return SimulationResult(
        actors=config.actors.count,
        seconds=passed,
        updates=new.updates - old.updates,
        steps_per_s=speed(new.steps_committed - old.steps_committed),
        trained_steps_per_s=speed(new.steps_trained - old.steps_trained),
        updates_per_s=speed(new.updates - old.updates),
        staleness=_staleness(histogram, new.max_staleness, new.violations),
        histogram=histogram,
        trained=new.trained - old.trained,
        dropped=_difference(new.dropped, old.dropped),
        cuts=new.cuts - old.cuts,
        learner=learner,
        shares_of_actors=actors,
        bottleneck=name,
        why=why,
        events=after.events,
    )


def _diagnosis(
    learner: Mapping[str, float], actors: Mapping[str, float], *, delayed: float
) -> tuple[str, str]:
    """The verdict that a run would give (`tianflow.observability.diagnosis`), and what would change
    it.

    ``delayed``: fraction of the requests for a grant that had to wait.
    """
    waits, wait = (
        learner.get("waiting:batch", 0.0),
        actors.get("waiting:grant", 0.0) + actors.get("waiting:weights", 0.0),
    )
    both = f"the learner waits {waits:.0%} and the actors {wait:.0%} of the time"
    if waits > NOTICEABLE and wait > NOTICEABLE:
        if delayed > 0.5:
            return (
                "balance-bound",
                f"{both}: the bound holds both back; a higher balance.max_staleness would help",
            )
        return (
            "transport-bound",
            f"{both}, for transfers; less latency or a faster link would help",
        )
    if waits > NOTICEABLE:
        return (
            "sampling-bound",
            (
                f"the learner waits {waits:.0%} of the time; {1 / max(1 - waits, 1e-9):.1f}x the "
                "actors would saturate it"
            ),
        )
    if wait > NOTICEABLE:
        return (
            "learning-bound",
            (
                f"the actors wait {wait:.0%} of the time; {max(0.0, 1 - wait):.0%} of them would "
                "keep "
                "the learner as busy"
            ),
        )
    return "balanced", both


def _staleness(counts: Mapping[int, int], bound: int | None, violations: int) -> StalenessResult:
    if not counts:
        return StalenessResult(bound, None, None, None, None, None, violations)
    total = sum(counts.values())
    mean = sum(staleness * count for staleness, count in counts.items()) / total
    return StalenessResult(
        bound,
        min(counts),
        mean,
        quantile(counts, 0.5),
        quantile(counts, 0.99),
        max(counts),
        violations,
    )


def _difference(new: Mapping[K, int], old: Mapping[K, int]) -> dict[K, int]:
    return {key: count - old.get(key, 0) for key, count in new.items() if count > old.get(key, 0)}


def _shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    spent = {state: seconds - before.get(state, 0.0) for state, seconds in after.items()}
    total = sum(spent.values())
    return {
        state: value / total
        for state, value in sorted(spent.items())
        if total > 0 and value > 1e-12 * total
    }


def _percent(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.0%} {state}" for state, share in shares.items()) or "none"
