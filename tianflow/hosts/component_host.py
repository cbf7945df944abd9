"""One host: an event loop, one compute thread, and the components that share them. The same class
in every transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from tianflow.components.actor import Actor
from tianflow.components.learner import Learner
from tianflow.core.payloads import HEARTBEAT_S, SavedState
from tianflow.errors import (
    BrokenChannelError,
    ConfigError,
    EnvironmentFailedError,
    PoisonedTrajectoryError,
    RankLostError,
    RunError,
)
from tianflow.hosts.compute import Compute
from tianflow.hosts.factory import AnyComponent, Builder
from tianflow.rundir import checkpoints

if TYPE_CHECKING:
    from tianflow.components.evaluator import Evaluator
    from tianflow.core.payloads import Evaluation, Version
    from tianflow.core.program import ComponentSpec, HostPlan
    from tianflow.interfaces import Ends, HostEnd

T = TypeVar("T")
RANK_LOST_S = 1.0
"""Seconds for which a rank outlives another one, so that the first exit is that of the cause."""
TOGETHER_S = 0.02
"""Seconds that statistics or a heartbeat may be early, to share a turn."""
OUT_OF_MEMORY = "OutOfMemoryError"
"""PyTorch's error. This module does not import PyTorch."""
LESS_MEMORY = (
    "lower algorithm.batch_trajectories, algorithm.minibatch_size or algorithm.batch_size, or use "
    "learner.precision = bf16"
)
"""What to do about it."""


def as_run_error(component: str, error: BaseException) -> RunError:
    """Whatever ``component`` raised, as the error of its run."""
    if isinstance(error, RunError):
        return error
    if isinstance(error, EnvironmentFailedError):
        return RunError(component, str(error), error.details)
    if isinstance(error, PoisonedTrajectoryError | ConfigError):
        return RunError(component, str(error))
    details = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}"
    if type(error).__name__ == OUT_OF_MEMORY:
        wanted = re.search(r"[Tt]ried to allocate [\d.]+ \w+", str(error))
        summary = f"the GPU has no memory left: {wanted[0] if wanted else error}; {LESS_MEMORY}"
    return RunError(component, summary, details)


class ComponentHost:
    """Builds, reconciles, retires and reports the components of one host. It is the port to a
    learner or evaluator among them.

    Args:
        plan: what the components are built from.
        ends: of their channels.
        reports: receives what the host reports.
    """

    def __init__(self, *, plan: HostPlan, ends: Ends, reports: HostEnd) -> None:
        self.name = plan.host.name
        self._settings, self._reports = ends.settings, reports
        self._loop = asyncio.get_running_loop()
        self.thread_ended: asyncio.Future[None] = self._loop.create_future()
        """Resolved after `close`, once nothing computes any more."""
        bell = plan.host.bell
        self._compute = Compute(
            name="compute",
            on_orphan=self._orphan,
            on_end=self._thread_ends,
            bell=None if bell is None else ends.bells[bell],
        )
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._builder = Builder(plan=plan, ends=ends, compute=self._compute)
        self._components: dict[str, AnyComponent] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wanted: dict[str, ComponentSpec] = {}
        self._retired: set[str] = set()
        self._answers: set[asyncio.Future[object]] = set()
        self.stopped: asyncio.Future[str] = self._loop.create_future()
        """Resolved when the host is to end: with "", or with the summary of its failure."""
        self.reconcile(plan.host.components)
        self._reporter = self._loop.create_task(self._report_regularly())
        self._reporter.add_done_callback(self._reporter_ended)

    def reconcile(self, wanted: Sequence[ComponentSpec]) -> None:
        """Run exactly the components ``wanted``. Only actors come and go."""
        self._wanted = {component.name: component for component in wanted}
        for name in set(self._tasks) - set(self._wanted):
            retired = self._components[name]
            if isinstance(retired, Actor):
                self._retired.add(name)
                retired.retire()
        for component in wanted:
            if component.name not in self._tasks:
                self._add(component)

    def stop(self) -> None:
        """Resolve `stopped`, and cut what computes short. Idempotent."""
        self._compute.stopping.set()
        for component in self._components.values():
            if isinstance(component, Actor):
                component.retire()
        self._compute.wake()
        self._finish("")

    async def close(self) -> None:
        """Cancel every component and wait for that. Pending answers become BrokenChannelError."""
        self._compute.close()
        running = (*self._tasks.values(), self._reporter)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for answer in tuple(self._answers):
            if not answer.done():
                answer.set_exception(BrokenChannelError(f"host {self.name!r} is gone"))
        self._disk.shutdown(wait=False)

    # Ports
    # ----------------------------------------------------------------------------------------------

    async def save(self, staged: Path) -> SavedState:
        """Write the learner's state into ``staged``, while training continues. CheckpointError if
        it cannot be written, or is not finite.
        """
        state = await self._owed(self._learner().state())
        file = await self._loop.run_in_executor(
            self._disk, checkpoints.write_state, staged, state.arrays, state.tables
        )
        return SavedState(state.version, state.samples, file)

    async def rest(self) -> Version:
        """Publish the newest version at the next boundary."""
        return await self._owed(self._learner().rest())

    async def load(self, at_least: Version) -> Version:
        """Load the newest version for evaluations."""
        return await self._owed(self._evaluator().load(at_least))

    async def evaluate(self, at_least: Version, name: str) -> Evaluation:
        """Play the evaluation ``name`` with the version that was loaded last."""
        return await self._owed(self._evaluator().evaluate(at_least, name))

    def _evaluator(self) -> Evaluator:
        evaluator = self._role("evaluator")
        if evaluator is None:
            raise BrokenChannelError(f"host {self.name!r} has no evaluator")
        return cast("Evaluator", evaluator)

    def _learner(self) -> Learner:
        learner = self._role("learner")
        if not isinstance(learner, Learner):
            raise BrokenChannelError(f"host {self.name!r} has no learner")
        return learner

    def _role(self, role: str) -> AnyComponent | None:
        return next(
            (self._components.get(c.name) for c in self._wanted.values() if c.role == role), None
        )

    def _owed(self, answer: asyncio.Future[T]) -> asyncio.Future[T]:
        """``answer``, which ends with this host, too."""
        owed = cast("asyncio.Future[object]", answer)
        self._answers.add(owed)
        owed.add_done_callback(self._answers.discard)
        return answer

    # Components
    # ----------------------------------------------------------------------------------------------

    def _add(self, component: ComponentSpec) -> None:
        built = self._components[component.name] = self._builder.build(component)
        task = self._tasks[component.name] = self._loop.create_task(
            built.run(lambda: self._reports.component_started(component.name)), name=component.name
        )
        task.add_done_callback(self._component_ended)

    def _component_ended(self, task: asyncio.Task[None]) -> None:
        name = task.get_name()
        self._tasks.pop(name, None)
        component = self._components.pop(name)
        try:
            self._reports.report([component.statistics()])
        except Exception as failure:  # noqa: BLE001 - a boundary: the loop would only log it
            self.fail(as_run_error(name, failure))
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._failed(name, error)
            return
        self._reports.component_ended(name)
        if name in self._retired:
            self._retired.discard(name)
            if name in self._wanted:  # it is wanted again by now
                self._add(self._wanted[name])

    async def _report_regularly(self) -> None:
        """Send statistics every ``metrics.interval_s`` and a heartbeat every `HEARTBEAT_S`, in one
        turn where both are due.
        """
        report_at = beat_at = self._loop.time()
        while True:
            soon = self._loop.time() + TOGETHER_S
            if soon >= report_at:
                self._reports.report([c.statistics() for c in self._components.values()])
                report_at = self._loop.time() + self._settings.value.config.metrics.interval_s
            if soon >= beat_at:
                self._beat()
                beat_at = self._loop.time() + HEARTBEAT_S
            await asyncio.sleep(min(report_at, beat_at) - self._loop.time())

    def _beat(self) -> None:
        actors = [c for c in self._components.values() if isinstance(c, Actor)]
        activities = [activity for actor in actors if (activity := actor.activity) is not None]
        self._reports.heartbeat(tuple(activities))

    # Failing
    # ----------------------------------------------------------------------------------------------

    def fail(self, error: RunError) -> None:
        """Report ``error``, and end."""
        self._reports.fail(error)
        self._finish(error.summary)

    def _failed(self, component: str, error: BaseException) -> None:
        """``component`` raised ``error``. The loss of another rank ends this process only, after
        the one that is lost: the supervisor restarts both.
        """
        if isinstance(error, RankLostError):
            self._loop.call_later(RANK_LOST_S, self._finish, str(error))
        else:
            self.fail(as_run_error(component, error))

    def _reporter_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(as_run_error(self.name, error))

    def _orphan(self, error: BaseException) -> None:
        """A compute function failed after its caller had left. On the loop, or on the compute
        thread once the loop is closed.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._failed, self.name, error)

    def _thread_ends(self) -> None:
        """On the compute thread, possibly after the loop was closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.thread_ended.set_result, None)

    def _finish(self, failure: str) -> None:
        if not self.stopped.done():
            self.stopped.set_result(failure)
