"""Strikes a run on several machines with one fault after the other, and times its recoveries."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.lib.harness import Values
from benchmarks.lib.live_run import until
from benchmarks.lib.node_faults.cluster import Cluster
from benchmarks.lib.node_faults.faults import CLOCK, Fault, rounds
from benchmarks.lib.node_faults.recovery import Look, gained, pace, paced_again

CALM_S = 4.0
"""Seconds before a fault in which the rate of steps is measured."""
RECOVER_S = 180.0
"""Longest time from the end of a fault to the recovery, on a loaded machine."""
LOST = ("node_lost", "shard_lost", "died", "silent", "env_hang", "start_timeout")
"""Reasons for which hosts start again, or trajectories are dropped, because something was lost."""
WATCHERS = ("silent", "env_hang", "start_timeout")
"""Reasons that no fault here causes."""


@dataclass(slots=True)
class Recoveries:
    """What the repetitions of one kind of fault have shown."""

    paced: list[float] = field(default_factory=list)
    """Seconds from the begin of a fault until steps are made at the rate of before."""
    whole: list[float] = field(default_factory=list)
    """Seconds from the end of a fault until all nodes work, with all hosts evenly on them. A kill
    ends when it begins.
    """
    dropped: Counter[str] = field(default_factory=Counter)
    """Trajectories by reason."""
    restarts: Counter[str] = field(default_factory=Counter)
    """Hosts that started again, by reason."""

    def values(self) -> Values:
        """Return the row of the table."""
        return {
            "times": float(len(self.paced)),
            "median time to pace": statistics.median(self.paced) if self.paced else None,
            "longest time to pace": max(self.paced, default=None),
            "median time to whole": statistics.median(self.whole) if self.whole else None,
            "longest time to whole": max(self.whole, default=None),
            "dropped": float(sum(self.dropped.values())),
            "dropped as node_lost": float(self.dropped["node_lost"]),
            "hosts started again": float(sum(self.restarts.values())),
        }


class Striker:
    """A sequence of faults on one run.

    Args:
        cluster: the run.
        faults: kinds of faults.
        quick: each kind of fault once, without the slow ones.
        seconds: no fault begins later than so many seconds after the first one.
        log: called with each step.
        only: text in the names of the faults to strike with; "": all.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        faults: Sequence[Fault],
        quick: bool,
        seconds: float,
        log: Callable[[str], None],
        only: str = "",
    ) -> None:
        self._cluster, self._seconds, self._log = cluster, seconds, log
        self._plan = [
            (fault, number)
            for fault, number in rounds(faults, quick=quick)
            if only in fault.name and (cluster.clock is not None or fault.name != CLOCK)
        ]
        self.found = {fault.name: Recoveries() for fault, _ in self._plan}
        """By name of the fault."""
        self.doing = "calm"
        """The fault that is active, for messages."""

    def run(self) -> None:
        """Strike until the plan or the time is at its end."""
        deadline = time.monotonic() + self._seconds
        for fault, number in self._plan:
            if time.monotonic() > deadline:
                self._log("the time is over")
                return
            self._strike(fault, number)

    def _strike(self, fault: Fault, number: int) -> None:
        cluster, found = self._cluster, self.found[fault.name]
        fault.prepare(cluster)
        calm_since = time.monotonic()
        time.sleep(CALM_S)
        before = cluster.watcher.wait_for_look(RECOVER_S)
        rate = pace(cluster.watcher.looks, calm_since)
        self.doing = f"{fault.name}, {number + 1}"
        since = time.monotonic()
        after = fault.act(cluster, number)
        over = time.monotonic() if fault.lasts else since
        paced, whole = self._recovered(since, rate)
        seen = cluster.watcher.wait_for_look(RECOVER_S)
        dropped, restarts = gained(before, seen, "dropped"), gained(before, seen, "restarts")
        found.paced.append(paced)
        found.whole.append(max(0.0, whole - over))
        found.dropped.update(dropped)
        found.restarts.update(restarts)
        self._judge(fault, dropped, restarts)
        self._log(
            f"{self.doing}: {rate:.0f} steps/s, pace after {paced:.1f} s, whole "
            f"{found.whole[-1]:.1f} s after its end, dropped {dropped}, restarts {restarts}"
        )
        if after is not None:
            after()
            self._recovered(time.monotonic(), 0.0)
        self.doing = "calm"
        cluster.judge_record()

    def _recovered(self, since: float, rate: float) -> tuple[float, float]:
        """Wait until the run has its pace again, and is whole. Return the seconds from ``since``
        to the pace, and the moment at which it is whole.
        """
        cluster, paced, whole = self._cluster, -1.0, 0.0
        asked = time.monotonic()

        def look() -> bool:
            nonlocal paced, whole
            cluster.require_alive()
            cluster.require_nodes()
            newest: Look | None = cluster.watcher.newest(asked)
            if newest is None:
                return False
            if not cluster.is_whole(newest):
                whole = 0.0
            elif not whole:
                whole = newest.at
            if paced < 0:
                again = paced_again(cluster.watcher.looks, since, rate)
                paced = -1.0 if again is None else again
            return bool(whole) and paced >= 0

        try:
            until("paced and whole", look, within_s=RECOVER_S, poll_s=0.1)
        except TimeoutError as error:
            newest, now = cluster.watcher.looks[-1:], pace(cluster.watcher.looks, asked)
            state = f"whole {bool(whole)}, {now:.0f} of {rate:.0f} steps/s, {newest}"
            cluster.give_up(self.doing, f"{error}; {state}")
        return paced, whole

    def _judge(self, fault: Fault, dropped: dict[str, float], restarts: dict[str, float]) -> None:
        """Judge what a fault may cost."""
        costs = LOST if fault.spares else WATCHERS
        for what, counts in (("trajectories dropped", dropped), ("hosts started again", restarts)):
            bad = {reason: count for reason, count in counts.items() if reason in costs}
            if bad:
                self._cluster.report("loss", f"{fault.name}: {what}", str(bad))
