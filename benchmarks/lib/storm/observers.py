"""Threads that observe one life of a run and hand what they see to the judges."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

from benchmarks.lib.live_run import Answer, LiveRun, Scrape, waited_for_cpu
from benchmarks.lib.storm.judges import (
    Findings,
    MetricsJudge,
    Patch,
    ReadinessJudge,
    RoleWatch,
    judge_pair,
)

CHANGED = (200, 412)
"""The answers to a change: it is in force, or another client was first."""
LIVE_LIMIT_S = 1.0
"""Longest time that an answer of ``/livez`` may take."""
LIVE_EVERY_S, READY_EVERY_S, SCRAPE_EVERY_S, TABLE_EVERY_S = 0.2, 0.25, 0.4, 0.25
METRONOME_S = 0.01
WAKING_S = 1.0
"""Time in which a coordinator that was stopped may still answer that it is stuck."""
BOUNDS, ACTORS = (0, 16), (1, 64)
PATIENCE_S = (0.2, 3.0)
"""Shortest and longest pause between two pairs of changes."""
RESOURCES: Mapping[str, tuple[str, tuple[int, int]]] = {
    "balance": ("max_staleness", BOUNDS),
    "actors": ("count", ACTORS),
}
"""The setting of each resource that two clients change at once, and its two values."""


def changes() -> list[tuple[str, int]]:
    """Return each setting that clients change, with each of its values."""
    return [(name, value) for name, pair in RESOURCES.values() for value in pair]


class Conditions:
    """What is going on: active faults, a pause, a start or an end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: Counter[str] = Counter()
        self._quiet_since: float | None = time.monotonic()
        self._sleeps: list[tuple[float, float]] = []
        self.paused = False
        self.life = 0

    def begin(self, fault: str) -> None:
        """A fault begins."""
        with self._lock:
            self._active[fault] += 1
            self._quiet_since = None

    def end(self, fault: str) -> None:
        """A fault is over."""
        with self._lock:
            self._active[fault] -= 1
            self._active = +self._active
            if not self._active:
                self._quiet_since = time.monotonic()

    def sleep(self) -> None:
        """The coordinator is about to be stopped."""
        with self._lock:
            self._sleeps.append((time.monotonic(), math.inf))

    def wake(self) -> None:
        """The coordinator was continued."""
        with self._lock:
            began, _ = self._sleeps.pop()
            self._sleeps.append((began, time.monotonic()))

    @property
    def sleeps(self) -> bool:
        """True while the coordinator is stopped."""
        with self._lock:
            return bool(self._sleeps) and self._sleeps[-1][1] == math.inf

    def slept(self, since: float) -> float:
        """Return for how many seconds from ``since`` until now the coordinator was stopped."""
        now = time.monotonic()
        with self._lock:
            return sum(max(0.0, min(end, now) - max(begin, since)) for begin, end in self._sleeps)

    @property
    def quiet_since(self) -> float | None:
        """The end of the last fault; None while one is active."""
        with self._lock:
            return self._quiet_since

    def describe(self) -> str:
        """Return what is going on, in words."""
        with self._lock:
            active = ", ".join(sorted(self._active)) or "calm"
        return f"life {self.life}, {active}{', paused' if self.paused else ''}"


@dataclass(slots=True)
class Tally:
    """Counts and worst times of a whole storm."""

    worst: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, what: str, seconds: float) -> None:
        """Count an answer, and retain the longest time of all."""
        self.measured(what, seconds)
        self.count(what)

    def measured(self, what: str, value: float) -> None:
        """Retain the greatest value of ``what``."""
        with self._lock:
            self.worst[what] = max(self.worst.get(what, value), value)

    def count(self, what: str, times: int = 1) -> None:
        """Count ``what``."""
        with self._lock:
            self.counts[what] += times


class Metronome:
    """Measures by how much this process itself is late, as a control for latencies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while True:
            asked = time.monotonic()
            if self._over.wait(METRONOME_S):
                return
            late = time.monotonic() - asked - METRONOME_S
            with self._lock:
                self._late = max(self._late, late)

    def take(self) -> float:
        """Return the greatest lateness since the last call."""
        with self._lock:
            late, self._late = self._late, 0.0
            return late

    def close(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join()


class Observers:
    """Observes one life of a run from its first update to its end. Use as a context.

    Args:
        live: the run.
        replay_shards: number of replay shards; 0 without replay.
        findings: where judges report.
        tally: where counts and times go.
        conditions: what is going on.
        readiness: judges ``/readyz``.
        seed: of the changes of the two clients.
    """

    def __init__(
        self,
        *,
        live: LiveRun,
        replay_shards: int,
        findings: Findings,
        tally: Tally,
        conditions: Conditions,
        readiness: ReadinessJudge,
        seed: int,
    ) -> None:
        self._live, self._findings, self._tally = live, findings, tally
        self._conditions, self._readiness = conditions, readiness
        self._metrics = MetricsJudge(replay=replay_shards > 0)
        self._watch = RoleWatch(replay_shards)
        self._watch_lock = threading.Lock()
        self._dice = random.Random(seed)
        self._over, self._no_patches = threading.Event(), threading.Event()
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self._updates, self.updated = -1.0, 0.0
        self.patches: list[Patch] = []
        """All changes, in the order of their pairs. Status 0: no answer."""
        self.generations: list[tuple[float, int]] = []
        """(time, generation of the settings in force at the learner) of every scrape."""
        self.acknowledged: dict[str, int] = {}
        """The newest acknowledged value of each setting."""
        self.unknown: set[str] = set()
        """Settings whose last change was not answered."""

    def __enter__(self) -> Self:
        for work in (
            self._scrapes,
            self._live_probes,
            self._ready_probes,
            self._looks,
        ):
            self._threads.append(self._begun(work))
        self._clients = self._begun(self._pairs)
        self._threads.append(self._clients)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._no_patches.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def stop_changes(self) -> None:
        """Let the two clients change nothing more, and wait until they are done."""
        self._no_patches.set()
        self._clients.join()

    def change(self, resource: str, value: int) -> Patch | None:
        """Let one client change the setting of ``resource``. Call it after :meth:`stop_changes`.

        Returns:
            The change; None if the run did not answer.
        """
        seen = self._live.request(self._live.resource(resource))
        if not self._answered(f"GET {resource}", seen, (200,)):
            return None
        patch = self._change(threading.Barrier(1), resource, value, seen.etag)
        self._changed(resource, [patch])
        return patch if patch.status == 200 else None

    def expect_end(self) -> None:
        """From now on the coordinator may end, so no answer is expected."""
        self._ending.set()

    def _begun(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
        thread.start()
        return thread

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the context ends
            self._errors.append(error)

    def _every(self, seconds: float) -> Iterator[None]:
        while not self._over.wait(seconds):
            yield

    def _answered(self, path: str, answer: Answer, expected: tuple[int, ...]) -> bool:
        """Report an answer that no living run may give."""
        if answer.status in expected:
            return True
        asked = time.monotonic() - answer.seconds
        stopped = self._conditions.slept(asked - WAKING_S) > 0
        if self._live.alive and not self._ending.is_set() and not stopped:
            detail = f"{answer.status or 'no answer'}: {answer.body[:300].decode(errors='replace')}"
            self._findings.report("answer", path, detail)
        return False

    def _took(self, answer: Answer) -> float:
        """Return the seconds of an answer without those in which the coordinator was stopped."""
        slept = self._conditions.slept(time.monotonic() - answer.seconds)
        return max(0.0, answer.seconds - slept)

    # Metrics
    # ----------------------------------------------------------------------------------------------

    def scrape(self) -> Scrape | None:
        """Read and judge ``/metrics``. None if it did not answer."""
        answer, scrape = self._live.scrape()
        self._tally.answered("/metrics", self._took(answer))
        self._answered("/metrics", answer, (200,))
        return scrape

    def _scrapes(self) -> None:
        for _ in self._every(SCRAPE_EVERY_S):
            scrape = self.scrape()
            if scrape is None:
                continue
            self._findings.add(self._metrics.judge(scrape))
            updates = scrape.value("learner_updates_total")
            if updates != self._updates:
                self._updates, self.updated = updates, scrape.at
            with contextlib.suppress(KeyError):  # the learner is gone and not yet back
                generation = scrape.value("component_settings_generation", component="learner")
                self.generations.append((scrape.at, int(generation)))

    # Liveness and readiness
    # ----------------------------------------------------------------------------------------------

    def _live_probes(self) -> None:
        metronome = Metronome()
        try:
            for _ in self._every(LIVE_EVERY_S):
                metronome.take()
                waited = waited_for_cpu(self._live.process.pid)
                answer = self._live.request("/livez")
                late = metronome.take()
                waited = max(0.0, waited_for_cpu(self._live.process.pid) - waited)
                took = self._took(answer)
                if not self._answered("/livez", answer, (200,)):
                    continue
                own = max(0.0, took - late - waited)
                self._tally.answered("/livez", took)
                self._tally.measured("/livez without waits for a core", own)
                if own > LIVE_LIMIT_S:
                    detail = (
                        f"took {took:.2f} s; the prober was {late:.2f} s late, and the "
                        f"coordinator waited {waited:.2f} s for a core"
                    )
                    self._findings.report("slow", "/livez", detail)
        finally:
            metronome.close()

    def _looks(self) -> None:
        for _ in self._every(TABLE_EVERY_S):
            self._look()

    def _look(self) -> None:
        with self._watch_lock:
            self._watch.look(self._live.table(), time.monotonic())

    @property
    def whole(self) -> bool:
        """True if every role exists and no process is stopped."""
        with self._watch_lock:
            return self._watch.whole is not None

    def last_seen(self, pid: int) -> float | None:
        """Return the last look at which a process existed; None if it was never seen."""
        with self._watch_lock:
            return self._watch.seen.get(pid)

    def _ready_probes(self) -> None:
        for _ in self._every(READY_EVERY_S):
            asked = time.monotonic()
            before = asked - self._readiness.unready_after_s
            quiet, paused = self._conditions.quiet_since, self._conditions.paused
            with self._watch_lock:
                broken, whole = self._watch.broken(before), self._watch.whole
            answer = self._live.request("/readyz")
            self._tally.answered("/readyz", self._took(answer))
            if not self._answered("/readyz", answer, (200, 503)):
                continue
            if self._conditions.slept(before) > 0:  # it could not look at its hosts
                continue
            self._look()  # what was broken before the request and is so now was so meanwhile
            with self._watch_lock:
                still, still_whole = self._watch.broken(before), self._watch.whole
            same = quiet == self._conditions.quiet_since and paused == self._conditions.paused
            reasons = answer.json().get("reasons", [])
            self._findings.add(
                self._readiness.judge(
                    asked=asked,
                    answered=time.monotonic(),
                    status=answer.status,
                    reasons="; ".join(map(str, reasons)),
                    broken=[reason for reason in broken if reason in still],
                    whole_since=whole if whole == still_whole else None,
                    quiet_since=quiet if same else None,
                    updated=self.updated,
                    paused=paused,
                )
            )

    # Two clients
    # ----------------------------------------------------------------------------------------------

    def _pairs(self) -> None:
        with ThreadPoolExecutor(2) as clients:
            while not self._no_patches.is_set():
                resource = self._dice.choice(tuple(RESOURCES))
                self._pair(clients, resource, *self._dice.sample(RESOURCES[resource][1], 2))
                self._no_patches.wait(self._dice.uniform(*PATIENCE_S))

    def _pair(self, clients: ThreadPoolExecutor, resource: str, one: int, other: int) -> None:
        """Let two clients read one generation, and change it at once."""
        seen = self._live.request(self._live.resource(resource))
        if not self._answered(f"GET {resource}", seen, (200,)):
            return
        line = threading.Barrier(2)
        asked = [
            clients.submit(self._change, line, resource, value, seen.etag) for value in (one, other)
        ]
        patches = sorted((future.result() for future in asked), key=lambda patch: patch.sent)
        if all(patch.status in CHANGED for patch in patches):
            self._findings.add(judge_pair(*patches))
            self._tally.count("pairs of changes")
        self._changed(resource, patches)

    def _changed(self, resource: str, patches: Sequence[Patch]) -> None:
        """Note changes that were made at once, and compare the setting in force with them."""
        self.patches += patches
        name = RESOURCES[resource][0]
        if any(patch.status not in CHANGED for patch in patches):
            self.acknowledged.pop(name, None)  # the change may be in force without an answer
            self.unknown.add(name)
            return
        for patch in patches:
            if patch.status == 200:
                self.acknowledged[name] = patch.value
                self.unknown.discard(name)
                self._tally.count(f"{name} = {patch.value}")
        now = self._live.request(self._live.resource(resource))
        if now.status == 200 and name in self.acknowledged:
            found = now.json().get(name)
            if found != self.acknowledged[name]:
                detail = f"{name} is {found}, acknowledged was {self.acknowledged[name]}"
                self._findings.report("two clients", f"{resource} in force", detail)

    def _change(self, line: threading.Barrier, resource: str, value: int, etag: str) -> Patch:
        line.wait()
        sent = time.monotonic()
        body: dict[str, Any] = {RESOURCES[resource][0]: value}
        path = self._live.resource(resource)
        answer = self._live.request(path, "PATCH", body, if_match=etag)
        if self._answered(f"PATCH {resource}", answer, CHANGED):
            self._tally.measured("change", self._took(answer))
        generation = int(answer.etag.strip('"') or 0)
        return Patch(sent, time.monotonic(), resource, value, answer.status, generation)
