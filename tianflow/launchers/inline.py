"""Everything in one loop and one process: for tests, for debugging, for the smallest machines."""

from __future__ import annotations

import asyncio
import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tianflow.channels.memory import MemoryWeights, heap_arena
from tianflow.components.actor import Actor
from tianflow.components.learner import Learner
from tianflow.components.replay_shard import ReplayShard
from tianflow.core.payloads import Evaluation, SavedState, Version
from tianflow.errors import BrokenChannelError, RunError
from tianflow.exchange.local import MemoryBatchSource, MemoryTrajectorySender
from tianflow.exchange.shards import ShardEnd
from tianflow.hosts.compute import Compute
from tianflow.hosts.factory import AnyComponent, Blueprint, Builder
from tianflow.hosts.main import describe, save
from tianflow.planning.memory import DRAW_SLOTS, slots_capacity, slots_wanted

if TYPE_CHECKING:
    from tianflow.channels.arena import Arena
    from tianflow.config.model import Config
    from tianflow.coordinator import Run
    from tianflow.core.events import Event
    from tianflow.core.payloads import TrajectoryLayout
    from tianflow.core.program import ComponentSpec, HostSpec
    from tianflow.interfaces import SettingsReader


T = TypeVar("T")
COMPUTES = (
    "tianflow.components.rollout",
    "tianflow.components.evaluator",
    "tianflow.components.stacking",
)


class HeapSlots:
    """Slots in ordinary memory. The pages of slots nobody uses do not exist yet."""

    def __init__(
        self, *, config: Config, layout: TrajectoryLayout, draws: TrajectoryLayout | None = None
    ) -> None:
        self.draws: Arena | None = None if draws is None else heap_arena(draws, DRAW_SLOTS)
        # A live change may ask for more than the start did: room for a bound eight times as wide,
        # within the limit.
        self.arena: Arena = heap_arena(
            layout, min(slots_capacity(config, layout), max(256, 8 * slots_wanted(config)))
        )

    def add_slots(self, count: int) -> None:
        """Nothing to do: the pages come when they are touched."""

    def close(self) -> None:
        """Nothing to do: the memory goes with its last view."""


class InlineLauncher:
    """Runs the one host of an ``inline`` program in the coordinator's own loop."""

    slots = HeapSlots

    def prepare(self) -> None:
        """Import what components import, PyTorch first: it takes a second, which is not for the
        loop.
        """
        for module in COMPUTES:
            importlib.import_module(module)

    async def launch(self, run: Run, slots: HeapSlots) -> None:  # noqa: ARG002 - slots live as long as this process
        """Until the run has ended."""

        async def start(host: HostSpec, incarnation: int) -> InlineHost:
            return InlineHost(
                run=run, host=host, incarnation=incarnation, start=await run.keeper.next_start()
            )

        await run.run(start)


class InlineHost:
    """A host without a process. It is `HostHandle`, the ends of its components, and the ports to
    learner and evaluator.
    """

    def __init__(
        self, *, run: Run, host: HostSpec, incarnation: int, start: tuple[Version, int, Path | None]
    ) -> None:
        self._run, self._incarnation = run, incarnation
        self._weights = MemoryWeights()
        self._compute = Compute(name="compute", on_orphan=self._orphan)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        version, samples, found = start
        blueprint = Blueprint(
            host=host.name,
            spec=run.spec,
            layout=run.layout,
            start=(version, samples),
            draws=None if run.draws is None else run.draws.layout,
            incarnation=incarnation,
            era=run.era,
            checkpoint=found,
            threads=host.threads,
        )
        self._builder = Builder(blueprint=blueprint, ends=self, compute=self._compute)
        self._components: dict[str, AnyComponent] = {}
        self._shard_ends: dict[int, ShardEnd] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending: set[str] = {component.name for component in host.components}
        self._wanted: dict[str, ComponentSpec] = {}
        self._retired: set[str] = set()
        self._answers: set[asyncio.Future[Any]] = set()
        self.reconcile(host)
        self._reporter = asyncio.get_running_loop().create_task(self._report())
        self._reporter.add_done_callback(self._reporter_ended)

    # Handle
    # ----------------------------------------------------------------------------------------------

    async def wait(self) -> str:
        """Wait until every component has ended."""
        ended = await self._gone
        self._compute.close()
        self._reporter.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), self._reporter, return_exceptions=True)
        for answer in tuple(self._answers):
            if not answer.done():
                answer.set_exception(BrokenChannelError("the host is gone"))
        self._disk.shutdown(wait=False)
        return ended

    def ask_to_stop(self) -> None:
        """End."""
        self._compute.stopping.set()
        for component in self._components.values():
            if isinstance(component, Actor):
                component.retire()
        if not self._gone.done():
            self._gone.set_result("stopped")

    kill = ask_to_stop

    @property
    def started(self) -> bool:
        """True once all components do their work."""
        return not self._pending

    @property
    def silent_for(self) -> float:
        """It shares the coordinator's loop: as long as anyone asks, it lives."""
        return 0.0

    def reconcile(self, host: HostSpec) -> None:
        """Run exactly the components of ``host``."""
        self._wanted = {component.name: component for component in host.components}
        for name in set(self._tasks) - set(self._wanted):
            retired = self._components[name]
            if isinstance(retired, Actor):
                self._retired.add(name)
                retired.retire()
        for component in host.components:
            if component.name not in self._tasks:
                self._add(component)

    def _add(self, component: ComponentSpec) -> None:
        made = self._builder.build(component)
        self._components[component.name] = made
        if component.role == "learner":
            self._run.reception.learner_port = self
        elif component.role == "evaluator":
            self._run.reception.evaluator_port = self
        task = asyncio.get_running_loop().create_task(
            self._live(component, made), name=component.name
        )
        self._tasks[component.name] = task
        task.add_done_callback(self._component_ended)

    async def _live(self, component: ComponentSpec, made: AnyComponent) -> None:
        def started() -> None:
            self._pending.discard(component.name)
            if component.role == "replay":
                self._run.reception.shard_opened(
                    component.index, self._incarnation, self._shard_ends[component.index]
                )
            self._run.reception.component_started(component.name)

        await made.run(started)

    # Ends
    # ----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> SettingsReader:
        """The coordinator's own cell."""
        return self._run.settings

    @property
    def events(self) -> InlineHost:
        """Itself."""
        return self

    def publish(self, event: Event) -> None:
        """Straight to the observers."""
        self._run.reception.publish(event)

    def sender(self, holder: str) -> MemoryTrajectorySender:
        """An actor's end."""
        return MemoryTrajectorySender(
            exchange=self._run.exchange,
            holder=holder,
            on_episodes=self._run.reception.episodes_finished,
        )

    def source(self) -> MemoryBatchSource:
        """The learner's end."""
        return MemoryBatchSource(exchange=self._run.exchange, draws=self._run.draws)

    def shard_end(self, index: int) -> ShardEnd:
        """Of a replay shard."""
        answer, draws = self._run.reception.shard_answers(index, self._incarnation), self._run.draws
        assert draws is not None
        self._shard_ends[index] = ShardEnd(
            slots=self._run.exchange.arena, draws=draws, answer=answer
        )
        return self._shard_ends[index]

    def weights_reader(self, nbytes: int) -> MemoryWeights:  # noqa: ARG002 - other forms must know the size
        """The one store."""
        return self._weights

    def weights_writer(self, nbytes: int) -> MemoryWeights:  # noqa: ARG002 - as above
        """The one store."""
        return self._weights

    async def newest_weights(self, version: Version) -> None:
        """Wait until weights at least as new as ``version`` are there."""
        if self._weights.version < version:
            await self._weights.wait_newer_than(Version(version.lineage, version.number - 1))

    # Ports
    # ----------------------------------------------------------------------------------------------

    async def save(self, staged: Path) -> SavedState:
        """Write the learner's state into ``staged``."""
        return await save(self._owed(self._learner().state()), staged, self._disk)

    async def rest(self) -> Version:
        """Publish the newest version at the next boundary."""
        return await self._owed(self._learner().rest())

    async def evaluate(self, at_least: Version) -> Evaluation:
        """Judge the newest version."""
        evaluator = self._components.get("evaluator")
        if evaluator is None or isinstance(evaluator, Actor | Learner | ReplayShard):
            raise BrokenChannelError("there is no evaluator")
        return await self._owed(evaluator.evaluate(at_least))

    def _owed(self, answer: asyncio.Future[T]) -> asyncio.Future[T]:
        """``answer``, which comes to an end with this host, too."""
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return answer

    def _learner(self) -> Learner:
        learner = self._components.get("learner")
        if not isinstance(learner, Learner):
            raise BrokenChannelError("there is no learner")
        return learner

    # Ending
    # ----------------------------------------------------------------------------------------------

    def _component_ended(self, task: asyncio.Task[None]) -> None:
        name = task.get_name()
        self._tasks.pop(name, None)
        self._components.pop(name, None)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail(describe(name, error))
            return
        self._run.reception.component_ended(name)
        if name in self._retired:
            self._retired.discard(name)
            if name in self._wanted:  # again, by now
                self._add(self._wanted[name])

    def _reporter_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(describe("host", error))

    def _orphan(self, error: BaseException) -> None:
        self._fail(describe("compute", error))

    def _fail(self, what: tuple[str, str, str]) -> None:
        self._run.fail(RunError(*what))
        if not self._gone.done():
            self._gone.set_result(what[1])

    async def _report(self) -> None:
        while True:
            for component in list(self._components.values()):
                self._run.reception.report(component.statistics())
            await asyncio.sleep(self._run.config.metrics.interval_s)
