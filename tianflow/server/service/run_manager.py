"""`RunManager`: starts submitted runs, up to a limit, and restarts killed ones. Resumes runs that
were active when the service stopped.
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
from tianflow.logs import logger, report_death
from tianflow.rundir.control_file import ControlFile
from tianflow.rundir.summary import REQUESTED
from tianflow.server.service.run_client import NoAnswerError, RunClient
from tianflow.server.service.run_process import (
    FULL,
    DirectoryTakenError,
    RunFiles,
    RunOutcome,
    RunProcess,
)
from tianflow.server.service.store import ENDED, RunRecord, RunStore, StoreError

P = ParamSpec("P")
T = TypeVar("T")
POLL_S = 1.0
"""Seconds between two polls of a run."""
POLLS_PER_TRIM = 600
"""Polls between two checks of the length of its log."""
GRACE_S = 60.0
"""Seconds for a released run to end: the grace time of its hosts, and a checkpoint."""
MAX_DEATHS, WINDOW_S = 3, 600.0
"""A run fails if it is killed more often than this within the window."""
BACKOFF_S = 1.0
RETRY_S = 5.0
"""Seconds before the store is tried again after an error."""
WAITED_S = 0.5
"""A call of the store that fails after this time was waiting, and not just refused."""
STARTING = "it is starting"
"""Why a run does not answer yet."""
SPACE_S = 1.0
"""Seconds before a full disk or an occupied directory is tried again."""

log = logger("serve")


class ManagedRun:
    """An active run, from its start until it has ended.

    Attributes:
        record: from the store, at the start.
        document: of the last successful poll; None before the first.
        problem: why the last poll failed, or ``""``.
        started: True once this service has started a process of it.
        stopped: True once its end was requested here.
    """

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.process: RunProcess | None = None
        self.contact: ControlFile | None = None
        self.document: Mapping[str, Any] | None = None
        self.problem = STARTING
        self.stopped = self.started = False
        self.deaths: deque[float] = deque()


class RunManager:
    """Manages the runs of a service.

    Consumes: submissions, exits of processes. Produces: processes. Waits: for capacity, for a
    process. Unblocked by: a submission, an end, an action.

    Args:
        store: records of runs; used from one thread.
        files: of the runs.
        limit: maximum number of active runs.
        client: of runs.
        overrides: settings by path that every run gets.
        start: starts a run's process.
    """

    def __init__(
        self,
        *,
        store: RunStore,
        files: RunFiles,
        limit: int,
        client: RunClient,
        overrides: Mapping[str, object],
        start: Callable[
            [str, Mapping[str, Any], RunFiles, Mapping[str, object]], Awaitable[RunProcess]
        ] = RunProcess.start,
    ) -> None:
        self._store, self.files, self._limit, self._client, self._overrides = (
            store,
            files,
            limit,
            client,
            overrides,
        )
        self._start = start
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._failed_at, self._failure = float("-inf"), ""
        self._changed = asyncio.Event()
        self._active: dict[str, ManagedRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_deletion, self._deleting = asyncio.Lock(), ""
        self.stopping = asyncio.Event()
        self.restarts = 0

    async def query(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the store in its own thread. Calls that queue while one waits for a
        locked or slow disk get the same StoreError as that one, so that waits do not add up.
        """
        queued = time.monotonic()

        def call() -> T:
            if queued < self._failed_at:
                raise StoreError(self._failure)
            began = time.monotonic()
            try:
                return method(*args, **kwargs)
            except StoreError as error:
                now = time.monotonic()
                if now - began >= WAITED_S:
                    self._failed_at, self._failure = now, str(error)
                raise

        return await asyncio.get_running_loop().run_in_executor(self._disk, call)

    async def run(self, started: Callable[[], None]) -> None:
        """Start pending runs until cancelled; then release all runs and wait for them."""
        started()
        try:
            await asyncio.to_thread(self.files.discard)
            while True:
                self._changed.clear()
                await self._start_pending()
                await self._changed.wait()
        finally:
            self.stopping.set()
            await self._release_all()

    def close(self) -> None:
        """Close the store. Waits for the disk."""
        self._disk.shutdown()
        self._store.close()

    async def _start_pending(self) -> None:
        """Start pending runs up to the limit; retry later if the store fails."""
        if len(self._active) >= self._limit:
            return
        try:
            # enough to fill all free places; thousands may be pending
            startable = await self.query(self._store.startable, self._limit + len(self._active))
        except StoreError as error:
            log.warning("runs cannot be started for now", error=str(error))
            asyncio.get_running_loop().call_later(RETRY_S, self.wake)
            return
        for record in startable:
            if record.id not in self._active and len(self._active) < self._limit:
                self._begin(record)

    @property
    def active(self) -> Mapping[str, ManagedRun]:
        """Active runs by id."""
        return self._active

    def wake(self) -> None:
        """Check for runs to start."""
        self._changed.set()

    def kill_all(self) -> None:
        """Kill every process."""
        for managed in self._active.values():
            if managed.process is not None:
                managed.process.kill()

    async def stop(self, record: RunRecord, source: str) -> str:
        """End a run that does not answer for itself (pending, starting or hanging), and return the
        resulting state.
        """
        managed = self._active.get(record.id)
        if managed is not None or record.state in {"pending", "running"}:
            log.info("a run is stopped", run=record.id, source=source)
        if managed is not None:
            managed.stopped = True
            if managed.process is not None:
                _end(managed.process)
            return "stopped"
        if record.state in {"pending", "running"}:
            await self.query(
                self._store.end, record.id, state="stopped", reason=REQUESTED, now=time.time()
            )
            return "stopped"
        return record.state

    async def delete(self, name: str, source: str) -> None:
        """Delete an ended run: its record, its files, and its directory if a service made it. A
        directory that a service did not make stays.

        Raises:
            StateConflictError: the run has not ended, or its directory cannot be deleted.
        """
        async with self._one_deletion:
            self._deleting = name  # from here on it cannot be resumed
            try:
                await self._delete(name, source)
            finally:
                self._deleting = ""
            await asyncio.to_thread(self.files.discard)

    async def _delete(self, name: str, source: str) -> None:
        record = await self.query(self._store.get, name)
        if record is None:  # another request was faster
            return
        if name in self._active or record.state not in ENDED:
            state = "ending" if record.state in ENDED else record.state
            raise StateConflictError(
                f"run {name!r} is {state}; only a run that has ended can be deleted; stop it first"
            )
        try:
            await asyncio.to_thread(self.files.remove, name)
        except DirectoryTakenError as error:
            raise StateConflictError(str(error)) from error
        except OSError as error:
            raise StateConflictError(
                f"the files of run {name!r} cannot be deleted: {error.strerror}"
            ) from error
        if await self.query(self._store.delete, name, source=source, now=time.time()):
            log.info("a run was deleted", run=name, source=source)

    async def resume(self, record: RunRecord) -> str:
        """Queue an ended run again, and return the resulting state.

        Raises:
            StateConflictError: the run is done, or it is being deleted.
        """
        if record.id == self._deleting:
            raise StateConflictError(f"run {record.id!r} is being deleted; submit a new one")
        if record.state == "done":
            raise StateConflictError(f"run {record.id!r} is done; submit a new one")
        if record.state in {"failed", "stopped"}:
            await self.query(self._store.queue, record.id)
            self.wake()
            return "pending"
        return record.state

    def _begin(self, record: RunRecord) -> None:
        managed = self._active[record.id] = ManagedRun(record)
        task = asyncio.create_task(self._manage(managed), name=f"run {record.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _manage(self, managed: ManagedRun) -> None:
        """Manage one run from its start to its end. An error here fails this run only."""
        name = managed.record.id
        try:
            if managed.record.started is None:
                await asyncio.to_thread(self.files.forget, name)
            # the run may have been stopped meanwhile
            has_begun = await self._persist(managed, self._store.begin, name, now=time.time())
            outcome = await self._run_until_ended(managed) if has_begun else None
        except StoreError:  # it never started, and waits for the next service
            outcome = None
        except Exception as error:  # the boundary between one run and the service
            log.exception("a run cannot be managed", run=name)
            outcome = RunOutcome("failed", f"{type(error).__name__}: {error}")
        try:
            if outcome is not None:
                await self._persist(
                    managed,
                    self._store.end,
                    name,
                    state=outcome.state,
                    reason=outcome.reason,
                    now=time.time(),
                )
                log.info("a run has ended", run=name, state=outcome.state, reason=outcome.reason)
        except StoreError as error:
            log.warning(
                "the end of a run cannot be stored, so the next service resumes it",
                run=name,
                error=str(error),
            )
        finally:
            del self._active[name]
            self.wake()

    async def _persist(
        self, managed: ManagedRun, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Retry a store operation until it succeeds: a full or busy disk must neither fail a run
        nor restart an ended one. Raises StoreError once the service stops.
        """
        while True:
            try:
                found = await self.query(method, *args, **kwargs)
            except StoreError as error:
                if self.stopping.is_set():
                    raise
                managed.problem = str(error)
                log.warning(
                    "the state of a run cannot be stored for now",
                    run=managed.record.id,
                    error=str(error),
                )
            else:
                managed.problem = STARTING if managed.document is None else ""
                return found
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self.stopping.wait()

    async def _run_until_ended(self, managed: ManagedRun) -> RunOutcome | None:
        """Run processes until the run ends by itself; None if the service stops and the next one is
        to resume it.
        """
        await self._wait_for_predecessor(managed.record.id)
        while (outcome := self._final_outcome(managed)) is None and not self.stopping.is_set():
            try:
                await self._wait_for_directory(managed)
                if self.stopping.is_set() or managed.stopped:
                    continue
                outcome = await self._run_once(managed) or self._final_outcome(managed)
            except DirectoryTakenError as error:
                return RunOutcome("failed", str(error))
            if outcome is None or not await self._lacked_space(managed, outcome):
                if outcome is not None:
                    return outcome
                if not self.stopping.is_set():
                    self._record_death(managed)
                    await asyncio.sleep(BACKOFF_S)
        return outcome

    async def _wait_for_directory(self, managed: ManagedRun) -> None:
        """Wait until a process may use the directory of the run: while the disk is full, and while
        an unknown process is active in it that may be one of an earlier service.

        Raises:
            DirectoryTakenError: it belongs to another user or process.
        """
        first = managed.record.started is None and not managed.started
        deadline = time.monotonic() + GRACE_S
        while not (self.stopping.is_set() or managed.stopped):
            problem = await asyncio.to_thread(self.files.space_problem)
            try:
                await asyncio.to_thread(
                    lambda: self.files.require_free(managed.record.id, first=first)
                )
            except DirectoryTakenError as error:
                if not error.starting or time.monotonic() > deadline:
                    raise
                problem = problem or str(error)
            if not problem:
                return
            if problem != managed.problem:
                log.warning("a run cannot start for now", run=managed.record.id, reason=problem)
            managed.problem = problem
            with suppress(TimeoutError):
                async with asyncio.timeout(SPACE_S):
                    await self.stopping.wait()

    async def _lacked_space(self, managed: ManagedRun, outcome: RunOutcome) -> bool:
        """True if the process ended at its start because the disk was full: it is started again
        when there is space.
        """
        if outcome.state != "failed" or managed.stopped:
            return False
        return await asyncio.to_thread(
            lambda: (
                self.files.summary(managed.record.id) is None and bool(self.files.space_problem())
            )
        )

    async def _run_once(self, managed: ManagedRun) -> RunOutcome | None:
        """One process of the run, from start to end."""
        try:
            return await self._run_process(managed)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return RunOutcome("failed", str(error))

    async def _run_process(self, managed: ManagedRun) -> RunOutcome | None:
        process = managed.process = await self._start(
            managed.record.id, json.loads(managed.record.config), self.files, self._overrides
        )
        managed.started = True
        if self.stopping.is_set() or managed.stopped:
            _end(process)
        looking = asyncio.create_task(self._watch(managed, process))
        report_death(looking, log, "a run is no longer observed", run=managed.record.id)
        try:
            return await process.ended()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            managed.process = managed.contact = None

    def _final_outcome(self, managed: ManagedRun) -> RunOutcome | None:
        """The outcome if there must be no further process: the run was stopped, or killed too
        often.
        """
        if managed.stopped:
            return RunOutcome("stopped", REQUESTED)
        if len(managed.deaths) > MAX_DEATHS:
            return RunOutcome(
                "failed",
                f"its process was killed {len(managed.deaths)} times within {WINDOW_S:g} s",
            )
        return None

    def _record_death(self, managed: ManagedRun) -> None:
        now = time.monotonic()
        managed.deaths.append(now)
        while managed.deaths[0] < now - WINDOW_S:
            managed.deaths.popleft()
        self.restarts += 1
        managed.problem = "its process was killed, and resumes from the newest checkpoint"
        log.warning(
            "a run's process was killed; it resumes from the newest checkpoint",
            run=managed.record.id,
            deaths=len(managed.deaths),
        )

    async def _wait_for_predecessor(self, name: str) -> None:
        """Wait for a process of an earlier service, which was killed: it may still be writing a
        checkpoint. Only a process that a service started is waited for, and killed.
        """
        deadline = time.monotonic() + GRACE_S
        while (
            not self.stopping.is_set()
            and (found := await asyncio.to_thread(self.files.live_process, name)) is not None
        ):
            if time.monotonic() > deadline:
                log.warning("killing a process of an earlier service", run=name, pid=found.pid)
                await asyncio.to_thread(found.kill)
            await asyncio.sleep(0.1)

    async def _watch(self, managed: ManagedRun, process: RunProcess) -> None:
        """Poll the run: first for its address, then for its document."""
        while managed.contact is None:
            managed.contact = await asyncio.to_thread(lambda: process.control)
            await asyncio.sleep(0.0 if managed.contact else 0.1)
        resumed = managed.record.state == "running" or bool(managed.deaths)
        if resumed and await asyncio.to_thread(self.files.paused, managed.record.id):
            await self._client.act(managed.contact, "pause")
        for polls in itertools.count():
            try:
                managed.document, managed.problem = await self._client.status(managed.contact), ""
            except NoAnswerError as error:
                managed.problem = str(error)
            # the boundary between polls; the next one may succeed
            except Exception as error:
                managed.problem = f"{type(error).__name__}: {error}"
                log.exception("a run cannot be polled", run=managed.record.id)
            if polls % POLLS_PER_TRIM == 0:
                await asyncio.to_thread(self.files.trim, managed.record.id)
            await asyncio.sleep(POLL_S)

    async def _release_all(self) -> None:
        """Ask every run to end, and kill those that do not end in time."""
        for managed in self._active.values():
            if managed.process is not None:
                managed.process.release()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=GRACE_S)
            if late:
                log.warning(
                    "killing runs that did not end in time",
                    runs=sorted(self._active),
                    grace_s=GRACE_S,
                )
                self.kill_all()
                await asyncio.wait(late)


def _end(process: RunProcess) -> None:
    """Ask a process to end; kill it if it hangs."""
    process.release()
    asyncio.get_running_loop().call_later(GRACE_S, process.kill)
