"""host exits, silence, progress words -> Supervisor -> restarts, returned tickets, or the end of
the run.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tianflow.core.program import ComponentSpec, HostSpec
from tianflow.errors import RunError
from tianflow.logs import logger

TICK_S = 0.5
"""Between two looks at progress."""
START_ATTEMPTS = 3
"""A host that could not be started so often in a row will not be: the run ends instead of idling.
"""
BACKOFF_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Waited before a restart, by how many restarts of this host lie in the window."""

log = logger("supervisor")


class HostHandle(Protocol):
    """A running host, as its launcher knows it."""

    async def wait(self) -> str:
        """Wait until it is gone and nothing of it can write any more; say how it ended."""

    def ask_to_stop(self) -> None:
        """It should flush and leave."""

    def kill(self) -> None:
        """End it now."""

    def reconcile(self, spec: HostSpec) -> None:
        """Run exactly the components of ``spec``."""

    @property
    def started(self) -> bool:
        """True once all its components do their work."""

    @property
    def silent_for(self) -> float:
        """Seconds since it was last heard of."""


@dataclass(frozen=True, slots=True)
class HostTimeouts:
    """How long a host may show nothing before it is killed, by what it is doing. Seconds."""

    step_s: float
    start_s: float
    evaluation_s: float


@dataclass(slots=True)
class _Life:
    """One life of a host, from its start to its end.

    ``components``: all that it ever had, because one that was retired may still hold a ticket.
    ``leaving``: it was asked to. ``unstarted_since``: on the watch's clock, while a component of it
    does not work yet. ``looked`` (by the machine's clock) and ``heard`` (by the watch's): when it
    was last looked at, and found to have been heard of.
    """

    handle: HostHandle
    components: dict[str, ComponentSpec]
    leaving: bool = False
    killed_for: str = ""
    ever_started: bool = False
    unstarted_since: float | None = None
    looked: float = field(default_factory=time.monotonic)
    heard: float = 0.0

    def silent_for(self, now: float) -> float:
        """Seconds of silence by the watch's clock: a gap in the coordinator's own time makes nobody
        silent.
        """
        looked, self.looked = self.looked, time.monotonic()
        if self.handle.silent_for <= self.looked - looked:
            self.heard = now
        return now - self.heard


class Supervisor:
    """Keeps the hosts of a run alive.

    Consumes: exits, progress words in slots, silence. Produces: restarts, lost holders, the first
    error.
    Waits: never for one host while another needs it. Unblocked by: a host's exit; ticks.

    Args:
        start: starts a host; its second argument counts how often this host was started before.
        lost: told of every host that is gone, after it was reaped, with all components that it ever
            had, and the reason.
        failed: told when the budget of restarts is used up, or a host cannot be started.
        open_tickets: (ticket, slot, holder) of those that were begun and are not committed.
        progress: steps so far of a ticket in a slot.
        rebuilding: (component, since when) of those that make their environments anew.
        patience: see `HostTimeouts`.
        max_restarts: more than this in ``window_s`` seconds end the run.
        grace_s: between asking hosts to stop and killing them.
    """

    def __init__(
        self,
        *,
        start: Callable[[HostSpec, int], Awaitable[HostHandle]],
        lost: Callable[[HostSpec, str], None],
        failed: Callable[[RunError], None],
        open_tickets: Callable[[], Sequence[tuple[int, int, str]]],
        progress: Callable[[int, int], int],
        rebuilding: Callable[[], Sequence[tuple[str, float]]],
        patience: HostTimeouts,
        max_restarts: int,
        window_s: float,
        grace_s: float,
    ) -> None:
        self.name = "supervisor"
        self._start, self._lost, self._failed = start, lost, failed
        self._open_tickets, self._progress, self._rebuilding, self._patience = (
            open_tickets,
            progress,
            rebuilding,
            patience,
        )
        self._max_restarts, self._window_s, self._grace_s = max_restarts, window_s, grace_s
        self._specs: dict[str, HostSpec] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._lives: dict[str, _Life] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        self._rebuilds: dict[tuple[str, float], float] = {}
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
            # If this process itself was stopped, everyone looks silent: count no more of a gap than
            # two ticks.
            self._watched_s += min(now - last, 2 * TICK_S)
            last = now
            self._watch(self._watched_s)

    @property
    def handles(self) -> Mapping[str, HostHandle]:
        """Hosts that live now."""
        return {name: life.handle for name, life in self._lives.items()}

    def reconcile(self, specs: Sequence[HostSpec]) -> None:
        """These hosts, and no others, should live. Repeating it is harmless."""
        wanted = {spec.name: spec for spec in specs}
        for name in set(self._specs) - set(wanted):
            del self._specs[name]
            self._dismiss(name)
        for name, spec in wanted.items():
            if self._specs.get(name) != spec:
                self._specs[name] = spec
                self._tell(name)
            if name not in self._keepers or self._keepers[name].done():
                self._keepers[name] = asyncio.get_running_loop().create_task(
                    self._keep(name), name=f"keep {name}"
                )

    def kill(self, host: str, reason: str) -> None:
        """End ``host`` now; it restarts."""
        if host in self._lives:
            self._lives[host].killed_for = self._lives[host].killed_for or reason
            self._lives[host].handle.kill()

    async def stop(self) -> None:
        """Ask all hosts to leave, wait for the grace time, kill the rest, and wait as long again
        until every one is reaped.
        """
        for name in self._end_all():
            self._dismiss(name)
        await self._reaped()
        for name, life in self._lives.items():
            log.warning(
                "killing a host that did not leave in time", host=name, grace_s=self._grace_s
            )
            life.handle.kill()
        await self._last_reaped()

    async def abandon(self) -> None:
        """Kill everything now, and wait for the grace time until it is reaped."""
        for name in self._end_all():
            self._lives[name].handle.kill()
        await self._last_reaped()

    async def _reaped(self) -> None:
        """Until every host is gone, or the grace time is over."""
        keepers = [task for task in self._keepers.values() if not task.done()]
        if keepers:
            await asyncio.wait(keepers, timeout=self._grace_s)

    async def _last_reaped(self) -> None:
        """As `_reaped`. Whoever is left then, because who would kill it is stopped itself, is left
        to the launcher.
        """
        await self._reaped()
        for name, life in self._lives.items():
            log.error(
                "a host cannot be killed, the launcher has to", host=name, grace_s=self._grace_s
            )
            self._keepers[name].cancel()
            self._lost(HostSpec(name, tuple(life.components.values())), "stopped")

    def _end_all(self) -> Sequence[str]:
        """No host is started any more. Those that live; the others need not be waited for."""
        self._stopping = True
        for name, keeper in self._keepers.items():
            if name not in self._lives:
                keeper.cancel()
        return tuple(self._lives)

    def _dismiss(self, name: str) -> None:
        if name in self._lives:
            self._lives[name].leaving = True
            self._lives[name].handle.ask_to_stop()

    def _tell(self, name: str) -> None:
        """Tell a living host which components it should run; one that leaves learns it in its next
        life.
        """
        life = self._lives.get(name)
        if life is not None and not life.leaving:
            life.components |= {
                component.name: component for component in self._specs[name].components
            }
            life.handle.reconcile(self._specs[name])

    async def _keep(self, name: str) -> None:
        """Keep a host alive. Nothing that goes wrong here may stay unsaid: the run would wait for
        the host for ever.
        """
        try:
            await self._live_again_and_again(name)
        except RunError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - a boundary: without its host a run cannot go on
            self._failed(RunError(name, f"cannot be started: {error}", traceback.format_exc()))

    async def _live_again_and_again(self, name: str) -> None:
        """Until the host is no longer wanted, or the budget is used up."""
        failed_starts, able = 0, False
        while self._wanted(name):
            spec = self._specs[name]
            handle = await self._start(spec, self.starts[name])
            life = _Life(
                handle,
                {component.name: component for component in spec.components},
                heard=self._watched_s,
            )
            self.starts[name] += 1
            self._lives[name] = life
            if not self._wanted(name):
                self._dismiss(name)
            elif self._specs[name] != spec:
                self._tell(name)
            ended = await life.handle.wait()
            del self._lives[name]
            gone = replace(spec, components=tuple(life.components.values()))
            if life.leaving or not self._wanted(name):
                self._lost(gone, "stopped")
                continue
            reason = life.killed_for or "died"
            able = able or life.ever_started or life.handle.started
            # One that has worked in this run and dies while it starts was ended from outside; the
            # budget counts that.
            failed_starts = failed_starts + 1 if not able or reason == "start_timeout" else 0
            self._bury(gone, reason, ended, failed_starts)
            recent = sum(1 for _, host in self._restarts if host == name)
            await asyncio.sleep(BACKOFF_S[min(recent - 1, len(BACKOFF_S) - 1)])

    def _wanted(self, name: str) -> bool:
        return not self._stopping and name in self._specs

    def _bury(self, host: HostSpec, reason: str, ended: str, failed_starts: int) -> None:
        """Tell of a host's unwanted end. RunError when it should not be tried again."""
        name = host.name
        self.restarts[name, reason] += 1
        log.warning("a host is gone", host=name, reason=reason, ended=ended)
        self._lost(host, reason)
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
        for name, life in list(self._lives.items()):
            if life.handle.started:
                life.ever_started, life.unstarted_since = True, None
            elif life.unstarted_since is None:
                life.unstarted_since = now
            limit, reason, shown_nothing_for = self._patience_with(life, now)
            if shown_nothing_for > limit:
                self.kill(name, reason)
        self._watch_progress(now)
        self._rebuilds = {
            rebuild: self._rebuilds.get(rebuild, now) for rebuild in self._rebuilding()
        }
        for (component, _), since in self._rebuilds.items():
            if now - since > self._patience.start_s:
                self._hung(component, after_s=self._patience.start_s)

    def _patience_with(self, life: _Life, now: float) -> tuple[float, str, float]:
        """(limit, reason, seconds) for the host: it may show nothing for so long, and has for so
        many seconds.
        """
        if life.unstarted_since is not None:
            # Whether it talks says nothing: a constructor that hangs leaves the host's loop free to
            # report.
            return self._patience.start_s, "start_timeout", now - life.unstarted_since
        silent = life.silent_for(now)
        match next((component.role for component in life.components.values()), "actor"):
            case "learner":
                return (
                    float("inf"),
                    "",
                    silent,
                )  # a slow update is not a hang: readiness tells, a person decides
            case "evaluator":
                return self._patience.evaluation_s, "silent", silent
        return max(self._patience.step_s, 10 * TICK_S), "silent", silent

    def _watch_progress(self, now: float) -> None:
        seen: dict[int, tuple[int, float]] = {}
        for ticket, slot, holder in self._open_tickets():
            steps = self._progress(slot, ticket)
            before = self._seen.get(ticket)
            seen[ticket] = before if before is not None and before[0] == steps else (steps, now)
            if now - seen[ticket][1] > self._patience.step_s:
                self._hung(holder, after_s=self._patience.step_s, step=steps)
        self._seen = seen

    def _hung(self, component: str, **details: float) -> None:
        host = next(
            (name for name, life in self._lives.items() if component in life.components), None
        )
        if host is not None and not self._lives[host].killed_for:
            log.warning("an environment hangs", component=component, host=host, **details)
            self.kill(host, "env_hang")
