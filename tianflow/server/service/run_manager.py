"""Submitted runs -> queue -> at most so many processes at once. What was going when the service was
killed goes on when it is back.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from tianflow.errors import StateConflictError
from tianflow.logs import logger
from tianflow.rundir.control_file import ControlFile
from tianflow.server.service.run_client import NoAnswerError, RunClient
from tianflow.server.service.run_process import RunFiles, RunOutcome, RunProcess
from tianflow.server.service.store import RunRecord, RunStore, StoreError

P = ParamSpec("P")
T = TypeVar("T")
LOOK_S = 1.0
"""Seconds between two looks at a run."""
LOOKS_A_TRIM = 600
"""Looks between two at how long its log has become."""
LEAVE_S = 60.0
"""Seconds in which a run that is let go of must end; it has its own grace time for its hosts, and a
checkpoint to write.
"""
DEATHS, WINDOW_S = 3, 600.0
"""More deaths from outside than this within the window end a run."""
BACKOFF_S = 1.0
AGAIN_S = 5.0
"""Seconds after which a disk that refused is asked again."""

log = logger("serve")


class ManagedRun:
    """A run from the moment when it has a place until it has ended.

    Attributes:
        record: what the store knew when it began.
        document: what it said of itself at the last look; None before the first.
        silence: why there was no answer at the last look, or ``""``.
    """

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.child: RunProcess | None = None
        self.contact: ControlFile | None = None
        self.document: Mapping[str, Any] | None = None
        self.silence = "it is starting"
        self.stop_source = ""
        self.deaths: deque[float] = deque()


class RunManager:
    """Holds the runs.

    Consumes: submissions, exits of processes. Produces: processes. Waits: for a place, for a
    process. Unblocked by: a submission, an end, an action.

    Args:
        store: what is remembered; used from one thread.
        files: where runs lie.
        limit: how many may go on at once.
        asker: asks a run.
        overrides: settings by path that every run gets.
        start: starts a run's process.
    """

    def __init__(
        self,
        *,
        store: RunStore,
        files: RunFiles,
        limit: int,
        asker: RunClient,
        overrides: Mapping[str, object],
        start: Callable[
            [str, Mapping[str, Any], RunFiles, Mapping[str, object]], Awaitable[RunProcess]
        ] = RunProcess.start,
    ) -> None:
        self._store, self.files, self._limit, self._asker, self._overrides = (
            store,
            files,
            limit,
            asker,
            overrides,
        )
        self._start = start
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._changed = asyncio.Event()
        self._lives: dict[str, ManagedRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.leaving = asyncio.Event()
        self.restarts = 0

    async def remember(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Ask the store, off the loop."""
        return await asyncio.get_running_loop().run_in_executor(
            self._disk, lambda: method(*args, **kwargs)
        )

    async def run(self, started: Callable[[], None]) -> None:
        """Give places to those that wait, until cancelled; then let go of every run, and wait for
        them.
        """
        started()
        try:
            while True:
                self._changed.clear()
                await self._fill()
                await self._changed.wait()
        finally:
            self.leaving.set()
            await self._let_go()

    def close(self) -> None:
        """Nothing can be remembered afterwards. Waits for the disk."""
        self._disk.shutdown()
        self._store.close()

    async def _fill(self) -> None:
        """Give a place to whoever waits for one; a disk that refuses is asked again later."""
        if len(self._lives) >= self._limit:
            return
        try:
            # as many as there are places beside those that have one: thousands may wait
            wanted = await self.remember(self._store.wanted, self._limit + len(self._lives))
        except StoreError as error:
            log.warning("no run can be started for now", error=str(error))
            asyncio.get_running_loop().call_later(AGAIN_S, self.wake)
            return
        for record in wanted:
            if record.id not in self._lives and len(self._lives) < self._limit:
                self._begin(record)

    @property
    def lives(self) -> Mapping[str, ManagedRun]:
        """Runs that have a place, by id."""
        return self._lives

    def wake(self) -> None:
        """There may be something to start."""
        self._changed.set()

    def hurry(self) -> None:
        """End every process now."""
        for life in self._lives.values():
            if life.child is not None:
                life.child.kill()

    async def stop(self, record: RunRecord, source: str) -> str:
        """End a run that does not answer for itself: one that waits, or starts, or hangs; the state
        it leads to.
        """
        life = self._lives.get(record.id)
        if life is not None:
            life.stop_source = source
            if life.child is not None:
                _end(life.child)
            return "stopped"
        if record.state in {"pending", "running"}:
            await self.remember(
                self._store.end, record.id, state="stopped", reason=source, now=time.time()
            )
            return "stopped"
        return record.state

    async def resume(self, record: RunRecord) -> str:
        """Queue a run that has ended again; the state it leads to.

        Raises:
            StateConflictError: it is done.
        """
        if record.state == "done":
            raise StateConflictError(f"run {record.id!r} is done; submit a new one")
        if record.state in {"failed", "stopped"}:
            await self.remember(self._store.queue, record.id)
            self.wake()
            return "pending"
        return record.state

    def _begin(self, record: RunRecord) -> None:
        life = self._lives[record.id] = ManagedRun(record)
        task = asyncio.create_task(self._lead(life), name=f"run {record.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _lead(self, life: ManagedRun) -> None:
        """One run from its place to its end. Whatever goes wrong here is that run's failure, and of
        no other.
        """
        name = life.record.id
        try:
            # a person may have stopped it while it was being given its place
            begun = await self._kept(life, self._store.begin, name, now=time.time())
            outcome = await self._live_again_and_again(life) if begun else None
        except StoreError:  # it never began: it waits for the next service
            outcome = None
        except Exception as error:  # the boundary between one run and the service
            log.exception("a run cannot be held", run=name)
            outcome = RunOutcome("failed", f"{type(error).__name__}: {error}")
        try:
            if outcome is not None:
                await self._kept(
                    life,
                    self._store.end,
                    name,
                    state=outcome.state,
                    reason=outcome.reason,
                    now=time.time(),
                )
                log.info("a run has ended", run=name, state=outcome.state, reason=outcome.reason)
        except StoreError as error:
            log.warning(
                "how a run ended cannot be kept, so the next service goes on with it",
                run=name,
                error=str(error),
            )
        finally:
            del self._lives[name]
            self.wake()

    async def _kept(
        self, life: ManagedRun, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Ask the store until the disk does as it is told: a run is not failed by a disk that is
        full or busy, nor tried again after its end. Raises StoreError once the service ends.
        """
        while True:
            try:
                found = await self.remember(method, *args, **kwargs)
            except StoreError as error:
                if self.leaving.is_set():
                    raise
                life.silence = str(error)
                log.warning(
                    "the state of a run cannot be kept for now",
                    run=life.record.id,
                    error=str(error),
                )
            else:
                life.silence = ""
                return found
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self.leaving.wait()

    async def _live_again_and_again(self, life: ManagedRun) -> RunOutcome | None:
        """Until it has ended by itself; None: the service ends, and the run is to go on with the
        next one.
        """
        await self._earlier_gone(life.record.id)
        while (outcome := self._over(life)) is None and not self.leaving.is_set():
            outcome = await self._live(life) or self._over(life)
            if outcome is not None:
                return outcome
            if not self.leaving.is_set():
                self._mourn(life)
                await asyncio.sleep(BACKOFF_S)
        return outcome

    async def _live(self, life: ManagedRun) -> RunOutcome | None:
        """One process of the run, from its start to its end."""
        child = life.child = await self._start(
            life.record.id, json.loads(life.record.config), self.files, self._overrides
        )
        if self.leaving.is_set() or life.stop_source:
            _end(child)
        looking = asyncio.create_task(self._look(life, child))
        try:
            return await child.ended()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            life.child = life.contact = None

    def _over(self, life: ManagedRun) -> RunOutcome | None:
        """Why there shall be no further process: a person stopped it, or it died too often."""
        if life.stop_source:
            return RunOutcome("stopped", life.stop_source)
        if len(life.deaths) > DEATHS:
            return RunOutcome(
                "failed",
                f"its process was ended from outside {len(life.deaths)} times "
                f"within {WINDOW_S:g} s",
            )
        return None

    def _mourn(self, life: ManagedRun) -> None:
        now = time.monotonic()
        life.deaths.append(now)
        while life.deaths[0] < now - WINDOW_S:
            life.deaths.popleft()
        self.restarts += 1
        life.silence = "its process died, and it goes on from its newest checkpoint"
        log.warning(
            "a run's process is gone; it goes on from its newest checkpoint",
            run=life.record.id,
            deaths=len(life.deaths),
        )

    async def _earlier_gone(self, name: str) -> None:
        """A service that was killed let go of this run, which may still be writing its last
        checkpoint.
        """
        deadline = time.monotonic() + LEAVE_S
        while (
            found := await asyncio.to_thread(ControlFile.read, self.files.run(name))
        ) is not None and found.alive:
            if time.monotonic() > deadline:
                log.warning("killing what an earlier service left", run=name, pid=found.pid)
                found.kill()
            await asyncio.sleep(0.1)

    async def _look(self, life: ManagedRun, child: RunProcess) -> None:
        """Find out where the run answers, then how it is, again and again."""
        while life.contact is None:
            life.contact = await asyncio.to_thread(lambda: child.control)
            await asyncio.sleep(0.0 if life.contact else 0.1)
        went_on = life.record.state == "running" or bool(life.deaths)
        if went_on and await asyncio.to_thread(self.files.paused, life.record.id):
            await self._asker.act(life.contact, "pause")
        for looks in itertools.count():
            try:
                life.document, life.silence = await self._asker.status(life.contact), ""
            except NoAnswerError as error:
                life.silence = str(error)
            # the boundary between one look and the next, which may find what this one did not
            except Exception as error:
                life.silence = f"{type(error).__name__}: {error}"
                log.exception("a run cannot be looked at", run=life.record.id)
            if looks % LOOKS_A_TRIM == 0:
                await asyncio.to_thread(self.files.trim, life.record.id)
            await asyncio.sleep(LOOK_S)

    async def _let_go(self) -> None:
        """Ask every run to end, and kill those that do not."""
        for life in self._lives.values():
            if life.child is not None:
                life.child.release()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=LEAVE_S)
            if late:
                log.warning(
                    "killing runs that did not end in time",
                    runs=sorted(self._lives),
                    grace_s=LEAVE_S,
                )
                self.hurry()
                await asyncio.wait(late)


def _end(child: RunProcess) -> None:
    """Ask it to end; one that hangs does not hear it."""
    child.release()
    asyncio.get_running_loop().call_later(LEAVE_S, child.kill)
