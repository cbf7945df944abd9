"""A host process: one event loop, one compute thread, and the components that share them. `main` is
what a child runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from tianflow.channels.arena import Arena
from tianflow.channels.codec import decode_grant, encode_event, encode_statistics
from tianflow.channels.latest import LatestCell
from tianflow.channels.link import Link, Message
from tianflow.channels.shm import SharedMemory, SharedWeights
from tianflow.components.actor import Actor
from tianflow.components.learner import Learner, LearnerState
from tianflow.config.model import Config
from tianflow.core.layout import layout_from_wire, spec_from_wire
from tianflow.core.payloads import SavedState, Version
from tianflow.core.program import ComponentSpec
from tianflow.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentFailedError,
    PoisonedTrajectoryError,
    RunError,
)
from tianflow.exchange.remote import LinkBatchSource, LinkTrajectorySender
from tianflow.exchange.shards import ShardEnd, decode_request
from tianflow.hosts import event_loop as loops
from tianflow.hosts.compute import Compute
from tianflow.hosts.factory import AnyComponent, Blueprint, Builder
from tianflow.interfaces import LiveSettings
from tianflow.planning.memory import DRAW_SLOTS
from tianflow.rundir import checkpoints as checkpoint

if TYPE_CHECKING:
    from tianflow.core.events import Event
    from tianflow.core.payloads import TrajectoryLayout

FAILED = 1


def describe(name: str, error: BaseException) -> tuple[str, str, str]:
    """(component, summary, traceback or the user's own) of whatever a component raised."""
    if isinstance(error, RunError):
        return error.component, error.summary, error.details
    if isinstance(error, EnvironmentFailedError):
        return name, str(error), error.details
    if isinstance(error, PoisonedTrajectoryError | ConfigError):
        return name, str(error), ""
    return name, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


async def save(
    taken: Awaitable[LearnerState], staged: Path, executor: ThreadPoolExecutor
) -> SavedState:
    """Write a learner's state, once it was ``taken`` at a boundary, into ``staged``, while training
    goes on.

    Raises:
        CheckpointError: it could not be written, or is not finite.
    """
    state = await taken
    file = await asyncio.get_running_loop().run_in_executor(
        executor, checkpoint.write_state, staged, state.arrays
    )
    return SavedState(state.version, state.samples, file)


class _LinkEvents:
    def __init__(self, link: Link) -> None:
        self._link = link

    def publish(self, event: Event) -> None:
        self._link.send_event(*encode_event(event))


class HostProcess:
    """Joins the components of one child process to the coordinator's link.
    `tianflow.hosts.factory.Ends` in shared memory.
    """

    def __init__(
        self,
        order: Mapping[str, Any],
        end: socket.socket,
        slots: SharedMemory,
        weights_fd: int,
        draws: SharedMemory | None,
    ) -> None:
        self._order = order
        self.name: str = order["host"]
        config = Config.model_validate(order["config"])
        live = LiveSettings(config, order["bound"], order["paused"])
        self.settings: LatestCell[LiveSettings, int] = LatestCell(live, order["generation"])
        layout = layout_from_wire(order["layout"])
        self._arena = Arena(layout=layout, buffer=slots.buffer, capacity=order["capacity"])
        draw_layout = layout_from_wire(order["draws"]) if order["draws"] else None
        self._draws: Arena | None = None
        if draw_layout is not None and draws is not None:
            self._draws = Arena(layout=draw_layout, buffer=draws.buffer, capacity=DRAW_SLOTS)
        self._weights_fd = weights_fd
        self._weights: SharedWeights | None = None
        self._announced = Version(*order["published"])
        self._link = Link(end=end, handle=self._handle, closed=self._closed)
        self.events = _LinkEvents(self._link)
        self._compute = Compute(name="compute", on_orphan=self._orphan)
        self._builder = Builder(
            blueprint=_blueprint(order, layout, draw_layout), ends=self, compute=self._compute
        )
        self._senders: dict[str, LinkTrajectorySender] = {}
        self._source: LinkBatchSource | None = None
        self._shard: ShardEnd | None = None
        self._components: dict[str, AnyComponent] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wanted: dict[str, ComponentSpec] = {}
        self._retired: set[str] = set()
        self._leave: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._errands: set[asyncio.Task[None]] = set()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._handlers: dict[str, Callable[..., None]] = {
            "grant": self._on_grant,
            "end": self._on_end,
            "batch": self._on_batch,
            "shard": self._on_shard,
            "settings": self._on_settings,
            "announce": lambda lineage, number: self._announce(Version(lineage, number)),
            "components": lambda wanted: self.reconcile([ComponentSpec(*item) for item in wanted]),
            "save": lambda number, staged: self._errand(self._save(number, Path(staged))),
            "rest": lambda number: self._errand(self._rest(number)),
            "evaluate": lambda number, lineage, version: self._errand(
                self._evaluate(number, Version(lineage, version))
            ),
            "stop": lambda: self._finish(0),
        }

    async def run(self) -> int:
        """Until told to stop, the coordinator is gone, or a component fails; the exit status."""
        self.reconcile([ComponentSpec(*item) for item in self._order["components"]])
        reporter = asyncio.create_task(self._report())
        reporter.add_done_callback(self._errand_ended)
        status = await self._leave
        self._compute.close()
        reporter.cancel()
        for task in (*self._tasks.values(), *self._errands):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._link.flush(), 1.0)
        return status

    def reconcile(self, wanted: list[ComponentSpec]) -> None:
        """Run exactly these components."""
        self._wanted = {component.name: component for component in wanted}
        for name in set(self._tasks) - set(self._wanted):
            retired = self._components[name]
            if isinstance(retired, Actor):
                self._retired.add(name)
                retired.retire()
        for component in wanted:
            if component.name not in self._tasks:
                self._add(component)

    def _add(self, component: ComponentSpec) -> None:
        made = self._builder.build(component)
        self._components[component.name] = made
        task = asyncio.create_task(
            made.run(lambda: self._link.send("started", component.name)), name=component.name
        )
        self._tasks[component.name] = task
        task.add_done_callback(self._component_ended)

    # Ends
    # ----------------------------------------------------------------------------------------------

    def sender(self, holder: str) -> LinkTrajectorySender:
        """An actor's end."""
        self._senders[holder] = LinkTrajectorySender(
            link=self._link, arena=self._arena, holder=holder, announce=self._announce
        )
        return self._senders[holder]

    def source(self) -> LinkBatchSource:
        """The learner's end."""
        self._source = LinkBatchSource(link=self._link, arena=self._draws or self._arena)
        return self._source

    def shard_end(self, index: int) -> ShardEnd:  # noqa: ARG002 - a host process has one shard at most
        """The replay shard's end."""
        assert self._draws is not None
        self._shard = ShardEnd(slots=self._arena, draws=self._draws, answer=self._link.send)
        return self._shard

    def weights_reader(self, nbytes: int) -> SharedWeights:
        """Every reader of this process shares one view."""
        return self._open_weights(nbytes)

    def weights_writer(self, nbytes: int) -> SharedWeights:
        """The learner's end."""
        return self._open_weights(nbytes)

    async def newest_weights(self, version: Version) -> None:
        """The coordinator asks for an evaluation only once its version is published."""
        self._announce(version)

    def _open_weights(self, nbytes: int) -> SharedWeights:
        if self._weights is None:
            memory = SharedMemory.attach(self._weights_fd, SharedWeights.nbytes_for(nbytes))
            if nbytes and memory.nbytes != SharedWeights.nbytes_for(nbytes):
                raise RunError(
                    self.name,
                    f"this process has {nbytes} bytes of weights, the run has others: was the "
                    "code changed meanwhile?",
                )
            self._weights = SharedWeights(memory=memory, nbytes=nbytes)
            self._weights.announce(self._announced)
        return self._weights

    def _announce(self, version: Version) -> None:
        self._announced = max(self._announced, version)
        if self._weights is not None:
            self._weights.announce(version)

    # Messages
    # ----------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        try:
            self._handlers[message[0]](*message[1:])
        except Exception as error:  # noqa: BLE001 - a boundary: the loop would only log it, and the run wait for what was asked
            self._fail(self.name, error)

    def _on_grant(self, holder: str, fields: list[Any]) -> None:
        self._senders[holder].grant(decode_grant(fields))

    def _on_end(self, holder: str) -> None:
        self._senders[holder].grant(None)

    def _on_batch(self, fields: list[Any] | None) -> None:
        if self._source is not None:
            self._source.batch(fields)

    def _on_shard(self, name: str, *values: Any) -> None:
        if self._shard is not None:
            self._shard.ask(decode_request(name, values))

    def _on_settings(
        self, generation: int, config: dict[str, Any], bound: int | None, paused: bool, hold: bool
    ) -> None:
        self.settings.put(
            LiveSettings(Config.model_validate(config), bound, paused, hold), generation
        )

    async def _save(self, number: int, staged: Path) -> None:
        learner = self._components["learner"]
        assert isinstance(learner, Learner)
        try:
            saved = await save(learner.state(), staged, self._disk)
        except CheckpointError as error:
            self._link.send("not_saved", number, str(error))
        else:
            self._link.send(
                "saved",
                number,
                list(saved.version),
                saved.samples,
                saved.file.sha256,
                saved.file.nbytes,
            )

    async def _rest(self, number: int) -> None:
        learner = self._components["learner"]
        assert isinstance(learner, Learner)
        self._link.send("rested", number, *await learner.rest())

    async def _evaluate(self, number: int, at_least: Version) -> None:
        from tianflow.components.evaluator import Evaluator

        evaluator = self._components["evaluator"]
        assert isinstance(evaluator, Evaluator)
        try:
            evaluation = await evaluator.evaluate(at_least)
        except EnvironmentFailedError as error:
            self._link.send("not_evaluated", number, error.summary, error.details)
            return
        self._link.send(
            "evaluated",
            number,
            list(evaluation.version),
            list(evaluation.returns),
            list(evaluation.lengths),
        )

    def _errand(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errand_ended)

    def _errand_ended(self, task: asyncio.Task[None]) -> None:
        self._errands.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(self.name, error)

    # Ending
    # ----------------------------------------------------------------------------------------------

    def _component_ended(self, task: asyncio.Task[None]) -> None:
        name = task.get_name()
        self._tasks.pop(name, None)
        component = self._components.pop(name, None)
        if component is not None:
            self._link.send("stats", [encode_statistics(component.statistics())])
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail(name, error)
            return
        self._link.send("ended", name)
        if name in self._retired:
            self._retired.discard(name)
            if name in self._wanted:  # again, by now
                self._add(self._wanted[name])

    def _orphan(self, error: BaseException) -> None:
        self._link.send_threadsafe("failed", *describe(self.name, error))

    def _fail(self, name: str, error: BaseException) -> None:
        self._link.send("failed", *describe(name, error))
        self._finish(FAILED)

    def _closed(self) -> None:
        self._finish(0)

    def _finish(self, status: int) -> None:
        if not self._leave.done():
            self._leave.set_result(status)

    async def _report(self) -> None:
        while True:
            self._link.send(
                "stats",
                [
                    encode_statistics(component.statistics())
                    for component in self._components.values()
                ],
            )
            await asyncio.sleep(self.settings.value.config.metrics.interval_s)


def _blueprint(
    order: Mapping[str, Any], layout: TrajectoryLayout, draws: TrajectoryLayout | None
) -> Blueprint:
    return Blueprint(
        host=order["host"],
        spec=spec_from_wire(order["spec"]),
        layout=layout,
        start=(Version(*order["start"][0]), order["start"][1]),
        draws=draws,
        incarnation=order["incarnation"],
        era=order["era"],
        checkpoint=Path(order["checkpoint"]) if order["checkpoint"] else None,
        threads=order["threads"],
    )


def main(payload: bytes, fds: list[int]) -> int:
    """Run a host: ``payload`` is what the launcher ordered, ``fds`` are the link, the slots, the
    weights and, with replay, the draws.
    """
    order = msgpack.unpackb(payload)
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    end = socket.socket(fileno=fds[0])
    slots = SharedMemory.attach(fds[1])
    draws = SharedMemory.attach(fds[3]) if len(fds) > 3 else None

    async def live() -> int:
        return await HostProcess(order, end, slots, fds[2], draws).run()

    return loops.run(live())
