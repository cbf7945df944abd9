"""When a run has recovered from a fault, by looks at its metrics. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.lib.live_run import Scrape

WINDOW_S = 2.0
"""A run has its pace again once it has had it for so long."""
SHARE = 0.8
"""Part of the rate of steps before the fault that counts as the same pace."""
_LABEL = re.compile(r"(\w+)=([^,}]*)")


@dataclass(frozen=True, slots=True)
class Look:
    """What one scrape shows.

    Attributes:
        at: monotonic time.
        life: number of the coordinator, from 1.
        steps: environment steps of the run.
        hosts: number of hosts by node, of the nodes that work.
        actors: number of actors that report.
        dropped: trajectories dropped so far, by reason.
        restarts: hosts that were started again so far, by reason.
        shards: number of replay shards that work.
    """

    at: float
    life: int
    steps: float
    hosts: Mapping[str, float]
    actors: int
    dropped: Mapping[str, float]
    restarts: Mapping[str, float]
    shards: int = 0


def look_at(scrape: Scrape, *, life: int, actors: int) -> Look:
    """Return what ``scrape`` shows."""
    ready = _by_label(scrape, "node_ready", "node")
    hosts = _by_label(scrape, "node_hosts", "node")
    return Look(
        at=scrape.at,
        life=life,
        steps=scrape.value("run_env_steps"),
        hosts={name: hosts[name] for name, works in ready.items() if works},
        actors=actors,
        dropped=_by_label(scrape, "trajectories_dropped_total", "reason"),
        restarts=_by_label(scrape, "component_restarts_total", "reason"),
        shards=int(scrape.series.get("replay_shards", 0.0)),
    )


def _by_label(scrape: Scrape, name: str, label: str) -> dict[str, float]:
    """Return the series ``name``, summed up by one of their labels."""
    found: Counter[str] = Counter()
    for key, value in scrape.series.items():
        if key.startswith(f"{name}{{"):
            found[dict(_LABEL.findall(key))[label]] += value  # type: ignore[assignment]  # sums of floats
    return dict(found)


def is_whole(look: Look, nodes: Iterable[str], hosts: int, shards: int = 0) -> bool:
    """Return whether exactly ``nodes`` work, share all ``hosts`` of actors and ``shards`` evenly,
    and each host of actors has its actor.
    """
    counts = look.hosts.values()
    return (
        set(look.hosts) == set(nodes)
        and (sum(counts), look.actors, look.shards) == (hosts + shards, hosts, shards)
        and max(counts, default=0.0) - min(counts, default=0.0) <= 1.0
    )


def pace(looks: Sequence[Look], since: float) -> float:
    """Return the environment steps a second of all looks from ``since`` on; 0 without two."""
    seen = [look for look in looks if look.at >= since]
    if len(seen) < 2:
        return 0.0
    return (seen[-1].steps - seen[0].steps) / (seen[-1].at - seen[0].at)


def paced_again(looks: Sequence[Look], since: float, before: float) -> float | None:
    """Return the seconds from ``since`` to the begin of the first `WINDOW_S` in which the run made
    at least `SHARE` of ``before`` steps a second. None if there is no such window yet.
    """
    seen = [look for look in looks if look.at >= since]
    for index, first in enumerate(seen):
        last = next((look for look in seen[index:] if look.at >= first.at + WINDOW_S), None)
        if last is None:
            return None
        if last.steps - first.steps >= SHARE * before * (last.at - first.at):
            return first.at - since
    return None


def gained(before: Look, after: Look, name: str) -> dict[str, float]:
    """Return by how much the counters ``dropped`` or ``restarts`` have grown, by reason. The
    counters of a later coordinator begin at 0.
    """
    first: Mapping[str, float] = getattr(before, name) if before.life == after.life else {}
    last: Mapping[str, float] = getattr(after, name)
    found = {reason: value - first.get(reason, 0.0) for reason, value in last.items()}
    return {reason: value for reason, value in found.items() if value}
