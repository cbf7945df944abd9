"""Carries out the faults of a plan on a live run."""

from __future__ import annotations

import heapq
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.lib.live_run import LiveRun, Process, held, role_of
from benchmarks.lib.storm import environment
from benchmarks.lib.storm.clock import WallClock
from benchmarks.lib.storm.disk import SmallDisk
from benchmarks.lib.storm.observers import Conditions, Tally
from benchmarks.lib.storm.plan import COORDINATOR, Fault

FOR_EVER_S = 3600.0
"""An environment that hangs does so until its process is killed."""
REFILL_S = 0.3
AWAKE_POLL_S = 0.1


@dataclass(eq=False, slots=True)
class _Active:
    """A fault that is not over. `finish` ends it once."""

    fault: Fault
    end: Callable[[], object]
    over: Callable[[_Active], None]
    finished: bool = False

    def finish(self) -> None:
        if not self.finished:
            self.finished = True
            self.end()
            self.over(self)


class Injector:
    """Strikes a run with the faults of one round at their moments.

    Args:
        live: the run.
        folder: of requests to hang.
        clock: wall clock of the run; None: the storm leaves the clock alone.
        disk: disk of the run; None: the storm leaves the disk alone.
        conditions: receives begins and ends.
        tally: counts faults.
    """

    def __init__(
        self,
        *,
        live: LiveRun,
        folder: Path,
        clock: WallClock | None,
        disk: SmallDisk | None,
        conditions: Conditions,
        tally: Tally,
    ) -> None:
        self._live, self._folder, self._clock, self._disk = live, folder, clock, disk
        self._conditions, self._tally = conditions, tally
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._open: list[_Active] = []
        self.hangs: list[tuple[Fault, str]] = []
        """Hangs of this round that were asked for, with the host."""

    def strike(self, faults: Sequence[Fault]) -> None:
        """Carry out a round. Returns when the last fault that ends by itself is over, or the run
        ended.
        """
        self.hangs = []
        began = time.monotonic()
        for fault in faults:
            self._at(began + fault.at, partial(self._begin, fault))
        try:
            while self._due and self._live.alive:
                moment, _, act = heapq.heappop(self._due)
                time.sleep(max(0.0, moment - time.monotonic()))
                act()
        finally:
            self._due.clear()
            for end in tuple(self._open):  # the run ended amid the round
                end.finish()

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (moment, next(self._order), act))

    def _begin(self, fault: Fault) -> None:
        begin = {
            "kill": self._kill,
            "stop": self._stop,
            "hang": self._hang,
            "disk": self._fill,
            "clock": self._shift,
            "pause": self._pause,
        }[fault.kind]
        if fault.kind != "pause":  # a paused run is whole
            self._conditions.begin(fault.name)
        end = begin(fault)
        self._tally.count(fault.name if end is not None else f"missed {fault.name}")
        active = _Active(fault, end or _nothing, self._over)
        self._open.append(active)
        self._at(time.monotonic() + fault.seconds, active.finish)

    def _over(self, active: _Active) -> None:
        self._open.remove(active)
        if active.fault.kind != "pause":
            self._conditions.end(active.fault.name)

    # Faults: each begins, and gives what ends it. None: there was nothing to strike.
    # ----------------------------------------------------------------------------------------------

    def _victim(self, fault: Fault) -> Process | None:
        there = [p for p in self._live.table() if p.role.startswith(fault.role)]
        there.sort(key=lambda process: process.role)
        return there[int(fault.pick * len(there))] if there else None

    def _send(self, victim: Process, number: int) -> bool:
        with held(victim.pid) as send:
            return role_of(victim.pid) == victim.role and send(number)

    def _kill(self, fault: Fault) -> Callable[[], object] | None:
        victim = self._victim(fault)
        return _nothing if victim and self._send(victim, signal.SIGKILL) else None

    def _stop(self, fault: Fault) -> Callable[[], object] | None:
        if fault.role == COORDINATOR:
            return self._stop_coordinator()
        victim = self._victim(fault)
        if victim is None or not self._send(victim, signal.SIGSTOP):
            return None
        return lambda: self._send(victim, signal.SIGCONT)

    def _stop_coordinator(self) -> Callable[[], object]:
        # no other process has its number before it is reaped
        self._conditions.sleep()
        self._live.process.send_signal(signal.SIGSTOP)

        def wake() -> None:
            self._live.process.send_signal(signal.SIGCONT)
            self._conditions.wake()

        return wake

    def _hang(self, fault: Fault) -> Callable[[], object] | None:
        victim = self._victim(fault)
        if victim is None:
            return None
        learner = fault.detail == environment.UPDATE
        seconds = fault.seconds if learner else FOR_EVER_S
        environment.request_hang(self._folder, victim.role, fault.detail, seconds)
        self.hangs.append((fault, victim.role))
        if fault.detail == "constructor":  # environments of a new process are made
            self._send(victim, signal.SIGKILL)
        return _nothing

    def _fill(self, fault: Fault) -> Callable[[], object] | None:
        disk = self._disk
        if disk is None:
            return None
        disk.fill()
        until = time.monotonic() + fault.seconds - REFILL_S

        def refill() -> None:
            """Use up what the run has freed meanwhile."""
            disk.fill()
            if time.monotonic() < until:
                self._at(time.monotonic() + REFILL_S, refill)

        self._at(time.monotonic() + REFILL_S, refill)
        return disk.empty

    def _shift(self, fault: Fault) -> Callable[[], object] | None:
        clock = self._clock
        if clock is None:
            return None
        clock.shift(fault.shift)
        return lambda: clock.shift(0.0)

    def _pause(self, _fault: Fault) -> Callable[[], object] | None:
        if (
            self._conditions.sleeps
            or self._live.request(self._live.resource("pause"), "POST").status != 202
        ):
            return None
        self._conditions.paused = True

        def go_on() -> None:
            if (
                self._conditions.sleeps and self._live.alive
            ):  # the wake is due on this thread, so a request may not wait
                self._at(time.monotonic() + AWAKE_POLL_S, go_on)
                return
            self._live.request(self._live.resource("resume"), "POST")
            self._conditions.paused = False

        return go_on


def _nothing() -> None:
    """A kill has no end."""
