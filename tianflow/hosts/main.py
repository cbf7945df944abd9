"""A host process: a `ComponentHost` at the end of a link. `main` is what a child process runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from tianflow import plugins
from tianflow.channels.latest import LatestCell
from tianflow.channels.messages import (
    MESSAGES,
    BatchesEnded,
    BatchReady,
    ComponentEnded,
    ComponentStarted,
    Evaluate,
    Evaluated,
    Granted,
    GrantsEnded,
    Handlers,
    Heartbeat,
    HostFailed,
    LearnerRested,
    LoadPolicy,
    NotEvaluated,
    PolicyLoaded,
    PutSettings,
    RestLearner,
    SaveState,
    SetComponents,
    StartHost,
    StateNotSaved,
    StateSaved,
    StatisticsReported,
    Stop,
)
from tianflow.core.payloads import DrawPart, DropItems, Prioritise, SaveItems, StoreTrajectory
from tianflow.errors import (
    BrokenChannelError,
    CheckpointError,
    EnvironmentFailedError,
    RunError,
)
from tianflow.exchange.remote import LinkBatchSource, LinkTrajectorySender
from tianflow.exchange.shards import ShardEnd
from tianflow.hosts import event_loop as loops
from tianflow.hosts.component_host import ComponentHost, as_run_error
from tianflow.hosts.log_records import LinkLogHandler
from tianflow.hosts.signals import outlive_sigterm

if TYPE_CHECKING:
    from tianflow.channels.arena import Arena
    from tianflow.core.events import Event
    from tianflow.core.payloads import Activity, Version
    from tianflow.core.program import HostPlan
    from tianflow.core.statistics import ComponentStatistics
    from tianflow.interfaces import (
        Bell,
        HostTransport,
        LiveSettings,
        MessageLink,
        WeightsChannel,
    )

FAILED = 1
FLUSH_S = 1.0
"""Seconds in which the coordinator has to take a host's last messages."""


class LinkEnds:
    """`tianflow.interfaces.Ends` and `HostEnd` over a link.

    Args:
        plan: of the host.
        settings: live settings.
        transport: memory and link.
        link: the host's end.
    """

    def __init__(
        self,
        *,
        plan: HostPlan,
        settings: LatestCell[LiveSettings, int],
        transport: HostTransport,
        link: MessageLink,
    ) -> None:
        self.settings, self._transport, self._link = settings, transport, link
        self._published = plan.published
        self._weights: WeightsChannel | None = None
        self._incarnations = itertools.count()
        self.senders: dict[str, LinkTrajectorySender] = {}
        """By actor."""
        self.batches = LinkBatchSource(link=link, arena=transport.draws or transport.arena)
        self.shard: ShardEnd | None = None

    def sender(self, holder: str) -> LinkTrajectorySender:
        """An actor's end."""
        self.senders[holder] = LinkTrajectorySender(
            link=self._link,
            arena=self._transport.arena,
            holder=holder,
            announce=self._announce,
            end=next(self._incarnations),
        )
        return self.senders[holder]

    def source(self) -> LinkBatchSource:
        """The learner's end."""
        return self.batches

    def shard_end(self, index: int) -> ShardEnd:  # noqa: ARG002 - a host process has one shard at most
        """The replay shard's end."""
        draws = self._transport.draws
        assert draws is not None
        self.shard = ShardEnd(slots=self._transport.arena, draws=draws, answer=self._link.send)
        return self.shard

    @property
    def arena(self) -> Arena:
        """Slots of trajectories."""
        return self._transport.arena

    @property
    def bells(self) -> Sequence[Bell]:
        """Doorbells of the run."""
        return self._transport.bells

    def weights_reader(self, nbytes: int) -> WeightsChannel:
        """All readers of this process share one channel."""
        return self._open_weights(nbytes)

    def weights_writer(self, nbytes: int) -> WeightsChannel:
        """The learner's end."""
        return self._open_weights(nbytes)

    async def newest_weights(self, version: Version) -> None:
        """Returns at once: the coordinator requests an evaluation only after its version is
        published.
        """
        self._announce(version)

    @property
    def events(self) -> LinkEnds:
        """This object."""
        return self

    def publish(self, event: Event) -> None:
        """To the coordinator."""
        self._link.send_event(event)

    def component_started(self, name: str) -> None:
        """To the coordinator."""
        self._link.send(ComponentStarted(name))

    def component_ended(self, name: str) -> None:
        """To the coordinator."""
        self._link.send(ComponentEnded(name))

    def report(self, statistics: Sequence[ComponentStatistics]) -> None:
        """To the coordinator."""
        self._link.send(StatisticsReported(tuple(statistics)))

    def heartbeat(self, activities: tuple[Activity, ...]) -> None:
        """To the coordinator."""
        self._link.send(Heartbeat(activities))

    def fail(self, error: RunError) -> None:
        """To the coordinator."""
        self._link.send(HostFailed(error.component, error.summary, error.details))

    def _open_weights(self, nbytes: int) -> WeightsChannel:
        if self._weights is None:
            self._weights = self._transport.open_weights(nbytes)
            self._weights.announce(self._published)
        return self._weights

    def _announce(self, version: Version) -> None:
        self._published = max(self._published, version)
        if self._weights is not None:
            self._weights.announce(version)


class LinkedHost:
    """A host process: reads the link, and hands messages to its `ComponentHost` and its ends.

    Args:
        start: what the coordinator started it with.
        transport: the host's side.
    """

    def __init__(self, start: StartHost, transport: HostTransport) -> None:
        self._settings = LatestCell(start.settings.live, start.settings.key)
        self._link = transport.open_link(
            handle=self._handle, closed=self._closed, failed=self._message_failed
        )
        self._log_handler = LinkLogHandler(self._link.send_threadsafe)
        self._log_handler.install()
        self._ends = LinkEnds(
            plan=start.plan, settings=self._settings, transport=transport, link=self._link
        )
        self._host = ComponentHost(plan=start.plan, ends=self._ends, reports=self._ends)
        self._requests: set[asyncio.Task[None]] = set()
        ends, host = self._ends, self._host
        self._handlers = Handlers(
            {
                Granted: lambda message: ends.senders[message.holder].answer(message),
                GrantsEnded: lambda message: ends.senders[message.holder].answer(message),
                BatchReady: lambda message: ends.batches.batch(*message),
                BatchesEnded: lambda _: ends.batches.end(),
                **dict.fromkeys(
                    (StoreTrajectory, DrawPart, Prioritise, DropItems, SaveItems), self._ask_shard
                ),
                PutSettings: lambda message: self._settings.put(message.live, message.key),
                SetComponents: lambda message: host.reconcile(message.components),
                SaveState: lambda message: self._serve(self._save(message)),
                RestLearner: lambda message: self._serve(self._rest(message)),
                LoadPolicy: lambda message: self._serve(self._load(message)),
                Evaluate: lambda message: self._serve(self._evaluate(message)),
                Stop: lambda _: host.stop(),
            }
        )

    async def run(self) -> int:
        """Until the coordinator stops it or is gone, or a component fails. The exit status."""
        failure = await self._host.stopped
        for task in self._requests:
            task.cancel()
        await self._host.close()
        self._log_handler.uninstall()
        await asyncio.sleep(0)  # records of other threads join the queue of the link
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._link.flush(), FLUSH_S)
        return FAILED if failure else 0

    def _handle(self, message: object) -> None:
        self._handlers[type(message)](message)

    def _message_failed(self, error: Exception) -> None:
        """A message that this host cannot obey: the run would wait for its effect for ever. A host
        that leaves has no components any more; a request for them ends with its link.
        """
        if not self._host.stopped.done():
            self._host.fail(as_run_error(self._host.name, error))

    def _closed(self) -> None:
        self._host.stop()

    def _ask_shard(self, request: Any) -> None:
        if self._ends.shard is not None:
            self._ends.shard.ask(request)

    # Requests, answered by message
    # ----------------------------------------------------------------------------------------------

    def _serve(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._requests.add(task)
        task.add_done_callback(self._request_ended)

    def _request_ended(self, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._message_failed(error if isinstance(error, Exception) else RuntimeError(error))

    async def _save(self, message: SaveState) -> None:
        try:
            saved = await self._host.save(message.directory)
        except CheckpointError as error:
            self._link.send(StateNotSaved(message.request, str(error)))
        else:
            self._link.send(StateSaved(message.request, saved))

    async def _rest(self, message: RestLearner) -> None:
        self._link.send(LearnerRested(message.request, await self._host.rest()))

    async def _load(self, message: LoadPolicy) -> None:
        version = await self._host.load(message.at_least)
        self._link.send(PolicyLoaded(message.request, version))

    async def _evaluate(self, message: Evaluate) -> None:
        try:
            evaluation = await self._host.evaluate(message.at_least, message.name)
        except EnvironmentFailedError as error:
            self._link.send(NotEvaluated(message.request, error.summary, error.details))
        else:
            self._link.send(Evaluated(message.request, evaluation))


def attach(address: str, descriptors: Sequence[int], plan: HostPlan) -> HostTransport:
    """The host's side of the transport that ``address`` names. ConfigError if it is unknown."""
    found: Any = plugins.load("tianflow.transports", address.partition("://")[0], path="address")
    transport: HostTransport = found.attach(
        address, descriptors, layout=plan.layout, draws=plan.draws
    )
    return transport


def main(payload: bytes, descriptors: Sequence[int]) -> int:
    """Run a host process. The exit status.

    Args:
        payload: a packed `StartHost`.
        descriptors: those of `tianflow.interfaces.Connection`, in its order.
    """
    outlive_sigterm()
    start = MESSAGES.decode(msgpack.unpackb(payload, strict_map_key=False))
    if not isinstance(start, StartHost):
        raise BrokenChannelError(f"a host starts with StartHost, not {type(start).__name__}")
    if start.plan.host.cores:
        os.sched_setaffinity(0, start.plan.host.cores)
    transport = attach(start.address, descriptors, start.plan)

    async def run() -> int:
        return await LinkedHost(start, transport).run()

    return loops.run(run())
