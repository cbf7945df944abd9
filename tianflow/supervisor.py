"""host exits, silence, progress words -> Supervisor -> restarts, returned tickets, or the end of the run"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


from tianflow.errors import RunError
from tianflow.ledger import State
from tianflow.logs import logger
from tianflow.program import HostSpec

TICK_S = 0.5
"""Between two looks at progress."""
START_ATTEMPTS = 3
"""A host that never started so often in a row will not: the run ends instead of idling."""
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
class Patience:
    """How long a host may show nothing before it is killed, by what it is doing. Seconds."""

    step_s: float
    start_s: float
    evaluation_s: float


class Supervisor:
    """Keeps the hosts of a run alive.

    Consumes: exits, progress words in slots, silence. Produces: restarts, lost holders, the first error.
    Waits: never for one host while another needs it. Unblocked by: a host's exit; ticks.

    Args:
        start: starts a host; its second argument counts how often this host was started before.
        lost: told of every host that is gone, after it was reaped, with the reason.
        failed: told when the budget of restarts is used up.
        open_tickets: (ticket, slot, holder, state) of tickets that somebody writes.
        progress: steps so far of a ticket in a slot.
        patience: see `Patience`.
        max_restarts: more than this in ``window_s`` seconds end the run.
        grace_s: between asking hosts to stop and killing them.
    """

    def __init__(
        self,
        *,
        start: Callable[[HostSpec, int], Awaitable[HostHandle]],
        lost: Callable[[HostSpec, str], None],
        failed: Callable[[RunError], None],
        open_tickets: Callable[[], Sequence[tuple[int, int, str, State]]],
        progress: Callable[[int, int], int],
        patience: Patience,
        max_restarts: int,
        window_s: float,
        grace_s: float,
    ) -> None:
        self.name = "supervisor"
        self._start, self._lost, self._failed = start, lost, failed
        self._open_tickets, self._progress, self._patience = open_tickets, progress, patience
        self._max_restarts, self._window_s, self._grace_s = max_restarts, window_s, grace_s
        self._specs: dict[str, HostSpec] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._handles: dict[str, HostHandle] = {}
        self._killed_for: dict[str, str] = {}
        self._seen: dict[int, tuple[int, float]] = {}
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
            # If this process itself was stopped, everyone looks silent: count no more of a gap than two ticks.
            self._watched_s += min(now - last, 2 * TICK_S)
            last = now
            self._watch(self._watched_s)

    @property
    def handles(self) -> Mapping[str, HostHandle]:
        """Hosts that live now."""
        return self._handles

    def reconcile(self, specs: Sequence[HostSpec]) -> None:
        """These hosts, and no others, should live. Repeating it is harmless."""
        wanted = {spec.name: spec for spec in specs}
        for name in set(self._specs) - set(wanted):
            del self._specs[name]
            if name in self._handles:
                self._handles[name].ask_to_stop()
        for name, spec in wanted.items():
            if name in self._handles and self._specs.get(name) != spec:
                self._handles[name].reconcile(spec)
            self._specs[name] = spec
            if name not in self._keepers or self._keepers[name].done():
                self._keepers[name] = asyncio.get_running_loop().create_task(self._keep(name), name=f"keep {name}")

    def kill(self, host: str, reason: str) -> None:
        """End ``host`` now; it restarts."""
        if host in self._handles:
            self._killed_for.setdefault(host, reason)
            self._handles[host].kill()

    async def stop(self) -> None:
        """Ask all hosts to leave, wait for the grace time, kill the rest, and wait until every one is reaped."""
        self._stopping = True
        for handle in self._handles.values():
            handle.ask_to_stop()
        keepers = [task for task in self._keepers.values() if not task.done()]
        if not keepers:
            return
        _, late = await asyncio.wait(keepers, timeout=self._grace_s)
        for name, handle in list(self._handles.items()):
            log.warning("killing a host that did not leave in time", host=name, grace_s=self._grace_s)
            handle.kill()
        if late:
            await asyncio.wait(late)

    async def abandon(self) -> None:
        """Kill everything now, and wait until it is reaped."""
        self._stopping = True
        for handle in self._handles.values():
            handle.kill()
        if self._keepers:
            await asyncio.wait(self._keepers.values())

    async def _keep(self, name: str) -> None:
        """Start a host again and again, until it is no longer wanted or the budget is used up."""
        failed_starts = 0
        while self._wanted(name):
            spec = self._specs[name]
            try:
                handle = await self._start(spec, self.starts[name])
            except RunError as error:
                self._failed(error)
                return
            self.starts[name] += 1
            self._handles[name] = handle
            if not self._wanted(name):
                handle.ask_to_stop()
            ended = await handle.wait()
            failed_starts = 0 if handle.started else failed_starts + 1
            del self._handles[name]
            if not self._wanted(name):
                self._lost(spec, "stopped")
                return
            reason = self._killed_for.pop(name, "died")
            self.restarts[name, reason] += 1
            log.warning("a host is gone", host=name, reason=reason, ended=ended)
            self._lost(spec, reason)
            if failed_starts >= START_ATTEMPTS:
                self._failed(RunError(name, f"never started: {failed_starts} attempts in a row ended by {reason} ({ended})"))
                return
            if not self._within_budget(name, ended, reason):
                return
            recent = sum(1 for _, host in self._restarts if host == name)
            await asyncio.sleep(BACKOFF_S[min(recent - 1, len(BACKOFF_S) - 1)])

    def _wanted(self, name: str) -> bool:
        return not self._stopping and name in self._specs

    def _within_budget(self, name: str, ended: str, reason: str) -> bool:
        now = asyncio.get_running_loop().time()
        self._restarts.append((now, name))
        while self._restarts[0][0] < now - self._window_s:
            self._restarts.popleft()
        if len(self._restarts) <= self._max_restarts:
            return True
        summary = f"{len(self._restarts)} hosts ended within {self._window_s:g} s, the last one by {reason} ({ended})"
        self._failed(RunError(name, summary))
        return False

    def _watch(self, now: float) -> None:
        for name, handle in list(self._handles.items()):
            role = self._specs[name].components[0].role if name in self._specs and self._specs[name].components else "actor"
            if not handle.started:
                limit, reason = self._patience.start_s, "start_timeout"
            elif role == "learner":
                continue  # a slow update is not a hang: readiness tells, a person decides
            else:
                limit = self._patience.evaluation_s if role == "evaluator" else max(self._patience.step_s, 10 * TICK_S)
                reason = "silent"
            if min(handle.silent_for, now) > limit:
                self.kill(name, reason)
        self._watch_progress(now)

    def _watch_progress(self, now: float) -> None:
        seen: dict[int, tuple[int, float]] = {}
        for ticket, slot, holder, state in self._open_tickets():
            if state is not State.BEGUN:
                continue
            steps = self._progress(slot, ticket)
            before = self._seen.get(ticket)
            seen[ticket] = before if before is not None and before[0] == steps else (steps, now)
            if now - seen[ticket][1] > self._patience.step_s:
                host = next((name for name, spec in self._specs.items() if any(c.name == holder for c in spec.components)), None)
                if host is not None:
                    log.warning("an environment hangs", component=holder, host=host, step=steps, after_s=self._patience.step_s)
                    self.kill(host, "env_hang")
        self._seen = seen
