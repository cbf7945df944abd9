"""host exits, silence, progress words -> Supervisor -> restarts, returned tickets, or the end of
the run.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tianflow.core.payloads import HEARTBEAT_S, Activity
from tianflow.core.program import MOVED, NODE_LEFT, NODE_LOST, ComponentSpec, HostSpec
from tianflow.errors import RunError
from tianflow.interfaces import OnNode
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.interfaces import HostHandle, HostStarter

TICK_S = 0.5
"""Seconds between two checks of progress."""
START_ATTEMPTS = 3
"""Failed starts of a host in a row after which the run ends, instead of trying for ever."""
BACKOFF_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before a restart, by the number of restarts of this host in the window."""
LEARNER_SILENCE_S = 20.0
"""Seconds without a heartbeat after which a learner is stopped, not slow: an update runs on another
thread than its heartbeats.
"""
MIN_SILENCE_S = 5.0
"""Minimum limit for the silence of a host with environments: a busy machine delays heartbeats."""
NODE_GONE = (NODE_LOST, NODE_LEFT, MOVED)
"""Reasons for the end of a host on another machine that do not count as failures of the host."""
RANK_LOST = "rank_lost"
"""Reason for the end of a host whose group has lost another one."""
SLOW_START_S = 10.0
"""Seconds between two reports of a host that has not started."""

log = logger("supervisor")


@dataclass(frozen=True, slots=True)
class HostTimeouts:
    """Seconds after which a host is killed, for ONE environment: a vector's sum has no limit.

    ``step_s``: of a step, with the reset in it. ``start_s``: of a constructor, or the first reset.
    """

    step_s: float
    start_s: float


@dataclass(slots=True)
class _Incarnation:
    """One incarnation of a host, from its start to its end.

    ``components``: all that it ever had, because a retired actor may still hold a ticket.
    ``leaving``: it was asked to stop. ``unstarted_since``: on the watch's clock, while one of its
    components does not work yet; ``waits_since``: the same, or the last time that one of its
    environments was created or reset since. ``reported``: the last report of that. ``activities``:
    those in progress, with the look that first found them. ``looked`` (machine's clock): the last
    look at it. ``heard`` (watch's clock): the last look that found a new sign of life.
    """

    handle: HostHandle
    components: dict[str, ComponentSpec]
    leaving: bool = False
    killed_for: str = ""
    ever_started: bool = False
    unstarted_since: float | None = None
    waits_since: float = 0.0
    reported: float = 0.0
    activities: dict[str, tuple[Activity, float]] = field(default_factory=dict)
    looked: float = field(default_factory=time.monotonic)
    heard: float = 0.0

    def silent_for(self, now: float) -> float:
        """Seconds of silence on the watch's clock: a pause of the coordinator itself makes no host
        silent.
        """
        looked, self.looked = self.looked, time.monotonic()
        if self.handle.silent_for <= self.looked - looked:
            self.heard = now
        return now - self.heard

    def follow(self, now: float) -> None:
        """Look at what its components do, and whether all of them work."""
        before, self.activities = self.activities, {}
        for activity in self.handle.activities:
            last, since = before.get(activity.component, (None, now))
            self.activities[activity.component] = activity, since if activity == last else now
        moved = any(since == now for _, since in self.activities.values())
        if self.handle.started:
            self.ever_started, self.unstarted_since = True, None
        elif self.unstarted_since is None:
            self.unstarted_since = self.waits_since = self.reported = now
        elif moved:
            self.waits_since = now

    @property
    def doing(self) -> str:
        """The operations in progress, in words."""
        words = [
            f"{activity.component}: {activity.operation}"
            + (f" of environment {activity.environment}" if activity.environment >= 0 else "")
            for activity, _ in self.activities.values()
        ]
        return ", ".join(words) or "no environment is at work"


def _cause(handle: HostHandle) -> str:
    """Why a host ended, if its node is the reason; else empty."""
    return handle.cause if isinstance(handle, OnNode) else ""


class Supervisor:
    """Starts and restarts the hosts of a run.

    Consumes: exits, progress words in slots, silence. Produces: restarts, lost holders, the first
    error.
    Waits: never for one host while another needs it. Unblocked by: a host's exit; ticks.

    Args:
        start: starts a host.
        lost: called for every host that is gone, after it was reaped, with all components that it
            ever had, and the reason.
        failed: called when the budget of restarts is used up, or a host cannot be started.
        written_slots: (ticket, slot, holder) of slots that a holder writes to, whether their ticket
            is open or abandoned.
        progress: steps so far of a ticket in a slot.
        timeouts: see `HostTimeouts`.
        max_restarts: more restarts than this in ``window_s`` seconds end the run.
        grace_s: seconds between a request to stop and a kill.
    """

    def __init__(
        self,
        *,
        start: HostStarter,
        lost: Callable[[HostSpec, str], None],
        failed: Callable[[RunError], None],
        written_slots: Callable[[], Sequence[tuple[int, int, str]]],
        progress: Callable[[int, int], int],
        timeouts: HostTimeouts,
        max_restarts: int,
        window_s: float,
        grace_s: float,
    ) -> None:
        self.name = "supervisor"
        self._start, self._lost, self._failed = start, lost, failed
        self._written_slots, self._progress = written_slots, progress
        self._timeouts = timeouts
        self._max_restarts, self._window_s, self._grace_s = max_restarts, window_s, grace_s
        self._specs: dict[str, HostSpec] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._alive: dict[str, _Incarnation] = {}
        self._seen: dict[int, tuple[tuple[int, Activity | None], float]] = {}
        self._watched_s = 0.0
        self._restarts: deque[tuple[float, str]] = deque()
        self._stopping = False
        self.starts: Counter[str] = Counter()
        self.restarts: Counter[tuple[str, str]] = Counter()

    async def run(self, started: Callable[[], None]) -> None:
        """Watch until cancelled."""
        started()
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            # If this process itself was stopped, every host looks silent: a gap counts as two ticks
            # at most.
            self._watched_s += min(now - last, 2 * TICK_S)
            last = now
            self._watch(self._watched_s)

    @property
    def handles(self) -> Mapping[str, HostHandle]:
        """The hosts that are alive, by name."""
        return {name: incarnation.handle for name, incarnation in self._alive.items()}

    @property
    def slow_starts(self) -> Sequence[str]:
        """Hosts that have not started for a while, in words."""
        return [
            f"host {name!r} has not started for {self._watched_s - since:.0f} s "
            f"({incarnation.doing})"
            for name, incarnation in self._alive.items()
            if (since := incarnation.unstarted_since) is not None
            and self._watched_s - since >= SLOW_START_S
        ]

    def reconcile(self, specs: Sequence[HostSpec]) -> None:
        """Run exactly these hosts. Repeating it is harmless."""
        wanted = {spec.name: spec for spec in specs}
        for name in set(self._specs) - set(wanted):
            del self._specs[name]
            self._dismiss(name)
        for name, spec in wanted.items():
            if self._specs.get(name) != spec:
                self._specs[name] = spec
                self._reconcile(name)
        for name, spec in wanted.items():
            if name not in self._tasks or self._tasks[name].done():
                together = [
                    other.name for other in specs if other.group == spec.group and spec.group
                ] or [name]
                keeper = asyncio.get_running_loop().create_task(
                    self._keep_alive(together), name=f"keep {name} alive"
                )
                self._tasks |= dict.fromkeys(together, keeper)

    def kill(self, host: str, reason: str) -> None:
        """Kill ``host`` because of ``reason``; it restarts."""
        if host in self._alive:
            self._alive[host].killed_for = self._alive[host].killed_for or reason
            self._alive[host].handle.kill()

    async def stop(self) -> None:
        """Ask all hosts to stop, wait for the grace time, kill the rest, and wait as long again
        until every one is reaped.
        """
        for name in self._end_all():
            self._dismiss(name)
        await self._reaped()
        for name, incarnation in self._alive.items():
            log.warning(
                "killing a host that did not leave in time", host=name, grace_s=self._grace_s
            )
            incarnation.handle.kill()
        await self._last_reaped()

    async def abandon(self) -> None:
        """Kill every host now, and wait for the grace time until each is reaped."""
        for name in self._end_all():
            self._alive[name].handle.kill()
        await self._last_reaped()

    async def _reaped(self) -> None:
        """Wait until every host is gone, or the grace time is over."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=self._grace_s)

    async def _last_reaped(self) -> None:
        """As `_reaped`. The launcher ends the remaining hosts, because the process that would kill
        them is stopped itself.
        """
        await self._reaped()
        for name, incarnation in self._alive.items():
            log.error(
                "a host cannot be killed, the launcher has to", host=name, grace_s=self._grace_s
            )
            self._tasks[name].cancel()
            self._lost(HostSpec(name, tuple(incarnation.components.values())), "stopped")

    def _end_all(self) -> Sequence[str]:
        """Start no host any more. The names of those that are alive."""
        self._stopping = True
        working = {self._tasks[name] for name in self._alive}
        for keeper in set(self._tasks.values()) - working:
            keeper.cancel()
        return tuple(self._alive)

    def _dismiss(self, name: str) -> None:
        if name in self._alive:
            self._alive[name].leaving = True
            self._alive[name].handle.ask_to_stop()

    def _reconcile(self, name: str) -> None:
        """Send a host its components; a host that is leaving gets them in its next incarnation."""
        incarnation = self._alive.get(name)
        if incarnation is not None and not incarnation.leaving:
            incarnation.components |= {
                component.name: component for component in self._specs[name].components
            }
            incarnation.handle.reconcile(self._specs[name])

    async def _keep_alive(self, names: Sequence[str]) -> None:
        """Start a host, or a group of hosts, and restart it when it dies. Every error is reported;
        otherwise the run would wait for the host for ever.
        """
        try:
            await self._restart_until_unwanted(names)
        except RunError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - a boundary: without its host a run cannot go on
            self._failed(RunError(names[0], f"cannot be started: {error}", traceback.format_exc()))

    async def _restart_until_unwanted(self, names: Sequence[str]) -> None:
        """Restart the hosts, all together, until the run does not need them, or the budget is used
        up.
        """
        failed_starts, able = 0, False
        while self._wanted(names):
            group = await self._start_group(names)
            ended = await self._first_end(group)
            first = next(iter(ended))
            if group[first].leaving or not self._wanted(names):
                for name in ended:
                    self._lost(self._gone(name, group), "stopped")
                continue
            incarnation = group[first]
            reason = _cause(incarnation.handle) or incarnation.killed_for or "died"
            able = able or incarnation.ever_started or incarnation.handle.started
            # A host that has worked in this run and dies while it starts was ended from outside.
            # The budget of restarts counts that.
            if reason not in NODE_GONE:
                failed = not able or reason == "start_timeout"
                failed_starts = failed_starts + 1 if failed else 0
            for name in list(ended)[1:]:
                self.restarts[name, RANK_LOST] += 1
                self._lost(self._gone(name, group), RANK_LOST)
            self._report_loss(self._gone(first, group), reason, ended[first], failed_starts)
            recent = sum(1 for _, host in self._restarts if host == first)
            await asyncio.sleep(BACKOFF_S[max(0, min(recent, len(BACKOFF_S)) - 1)])

    async def _start_group(self, names: Sequence[str]) -> dict[str, _Incarnation]:
        """Start hosts, one after the other. If one cannot be started, the others are ended."""
        group: dict[str, _Incarnation] = {}
        try:
            for name in names:
                spec = self._specs[name]
                handle = await self._start(spec, self.starts[name])
                incarnation = group[name] = self._alive[name] = _Incarnation(
                    handle,
                    {component.name: component for component in spec.components},
                    heard=self._watched_s,
                )
                self.starts[name] += 1
                if not self._wanted(names):
                    self._dismiss(name)
                elif self._specs[name] != spec:
                    self._reconcile(name)
        except BaseException:
            for name, incarnation in group.items():
                incarnation.handle.kill()
                del self._alive[name]
            raise
        return group

    async def _first_end(self, group: Mapping[str, _Incarnation]) -> dict[str, str]:
        """Wait until a host ends, and kill the others, unless all are leaving. How each has ended,
        in order.
        """
        waiting = {
            asyncio.ensure_future(incarnation.handle.wait()): name
            for name, incarnation in group.items()
        }
        ended: dict[str, str] = {}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: not group[waiting[task]].killed_for):
                    name = waiting.pop(task)
                    del self._alive[name]
                    ended[name] = task.result()
                for name in waiting.values():
                    if not group[name].leaving:
                        group[name].handle.kill()
        finally:
            for task in waiting:
                task.cancel()
        return ended

    def _gone(self, name: str, group: Mapping[str, _Incarnation]) -> HostSpec:
        """The host ``name`` with all components that it ever had."""
        components = tuple(group[name].components.values())
        return replace(self._specs.get(name, HostSpec(name, ())), components=components)

    def _wanted(self, names: Sequence[str]) -> bool:
        return not self._stopping and all(name in self._specs for name in names)

    def _report_loss(self, host: HostSpec, reason: str, ended: str, failed_starts: int) -> None:
        """Report a host's unwanted end. RunError when the host must not be restarted."""
        name = host.name
        self.restarts[name, reason] += 1
        log.warning("a host is gone", host=name, reason=reason, ended=ended)
        self._lost(host, reason)
        if reason in NODE_GONE:
            return  # machines come and go
        if failed_starts >= START_ATTEMPTS:
            raise RunError(
                name,
                f"does not start: {failed_starts} attempts in a row ended by {reason} ({ended})",
            )
        now = asyncio.get_running_loop().time()
        self._restarts.append((now, name))
        while self._restarts[0][0] < now - self._window_s:
            self._restarts.popleft()
        if len(self._restarts) > self._max_restarts:
            summary = (
                f"{len(self._restarts)} hosts ended within {self._window_s:g} s, the last "
                f"one by {reason} ({ended})"
            )
            raise RunError(name, summary)

    def _watch(self, now: float) -> None:
        for incarnation in self._alive.values():
            incarnation.follow(now)
        # First: the cause has a better name than the silence that it may bring.
        self._watch_environments(now)
        self._watch_slots(now)
        for name, incarnation in list(self._alive.items()):
            limit, reason, shown_nothing_for = self._timeout_of(incarnation, now)
            if shown_nothing_for > limit:
                self.kill(name, reason)
            elif incarnation.unstarted_since is not None:
                self._report_slow_start(name, incarnation, now)

    def _timeout_of(self, incarnation: _Incarnation, now: float) -> tuple[float, str, float]:
        """(limit, reason, seconds): after ``limit`` seconds without a sign of life the host is
        killed for ``reason``, and it has shown none for ``seconds``.
        """
        if incarnation.unstarted_since is not None:
            # Heartbeats do not prove a start: the host's loop works while a constructor hangs.
            return self._timeouts.start_s, "start_timeout", now - incarnation.waits_since
        silent = incarnation.silent_for(now)
        if any(c.role in ("learner", "rank") for c in incarnation.components.values()):
            # A slow update is not a hang: readiness shows it, and an operator decides.
            return LEARNER_SILENCE_S, "silent", silent
        if all(component.role == "inference" for component in incarnation.components.values()):
            return MIN_SILENCE_S, "silent", silent  # no environment delays its heartbeats
        # A step may hold the interpreter lock, and with it the heartbeats. The heartbeats before
        # and after it belong to the silence.
        step_s = self._timeouts.step_s + 2 * HEARTBEAT_S
        return max(step_s, MIN_SILENCE_S), "silent", silent

    def _watch_environments(self, now: float) -> None:
        """Find calls into environments that do not return, whatever happened to the ticket."""
        for incarnation in list(self._alive.values()):
            for activity, since in incarnation.activities.values():
                if activity.operation == "inference":
                    continue  # it waits for a server, which is watched itself
                in_step = activity.operation == "step"
                if incarnation.unstarted_since is not None and not in_step:
                    continue  # a failed start, which counts as one
                limit = self._timeouts.step_s if in_step else self._timeouts.start_s
                if now - since > limit:
                    self._hung(
                        activity.component,
                        after_s=limit,
                        operation=activity.operation,
                        environment=activity.environment,
                    )

    def _watch_slots(self, now: float) -> None:
        """Find writers without progress. Their progress words need no heartbeat, which a step that
        holds the interpreter lock prevents.
        """
        activities = {
            component: activity
            for incarnation in self._alive.values()
            for component, (activity, _) in incarnation.activities.items()
        }
        seen: dict[int, tuple[tuple[int, Activity | None], float]] = {}
        for ticket, slot, holder in self._written_slots():
            progress = self._progress(slot, ticket), activities.get(holder)
            before, activity = self._seen.get(ticket), progress[1]
            if activity is not None and activity.operation == "inference":
                before = None  # it waits for a server, which is watched itself
            seen[ticket] = (
                before if before is not None and before[0] == progress else (progress, now)
            )
            if now - seen[ticket][1] > self._timeouts.step_s:
                self._hung(holder, after_s=self._timeouts.step_s, step=progress[0])
        self._seen = seen

    def _report_slow_start(self, name: str, incarnation: _Incarnation, now: float) -> None:
        since = incarnation.unstarted_since
        if since is not None and now - incarnation.reported >= SLOW_START_S:
            incarnation.reported = now
            log.info(
                "a host has not started yet",
                host=name,
                after_s=round(now - since),
                doing=incarnation.doing,
            )

    def _hung(self, component: str, **details: float | str) -> None:
        host = next(
            (
                name
                for name, incarnation in self._alive.items()
                if component in incarnation.components
            ),
            None,
        )
        if host is not None and not self._alive[host].killed_for:
            log.warning("an environment hangs", component=component, host=host, **details)
            self.kill(host, "env_hang")
