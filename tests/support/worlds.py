"""One run's channels in one form: the real exchange and ledger, and the ends that components get.

The suites of `tests.support.conformance` open a world and look at both sides of it.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tests.support.virtual_time import broken_identity
from tianflow.channels.arena import Arena
from tianflow.channels.broadcast import Broadcast, GapCounter, Subscription
from tianflow.channels.link import Link, socket_pair
from tianflow.channels.memory import MemoryWeights, heap_arena
from tianflow.channels.messages import (
    BatchesEnded,
    BatchReady,
    EventPublished,
    Granted,
    GrantsEnded,
    Handlers,
    message,
)
from tianflow.channels.shm import SharedArena, SharedMemory, SharedWeights
from tianflow.core.events import Event
from tianflow.core.layout import make_layout
from tianflow.core.limits import Limits
from tianflow.core.payloads import (
    ActionSpec,
    Batch,
    EnvironmentSpec,
    Episode,
    Grant,
    LeafSpec,
    Settlement,
    Trajectory,
    TrajectoryLayout,
    Version,
)
from tianflow.core.statistics import LedgerSnapshot
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.local import MemoryBatchSource, MemoryTrajectorySender
from tianflow.exchange.remote import LinkBatchSource, LinkTrajectorySender, ServedExchange
from tianflow.interfaces import (
    BatchSource,
    EventPublisher,
    TrajectorySender,
    WeightsReader,
    WeightsWriter,
)
from tianflow.ledger.ledger import Ledger

STEPS, NUM_ENVS = 4, 2


@message
class Ping(NamedTuple):
    """Asks for a `Pong`: everything sent before has been handled then."""


@message
class Pong(NamedTuple):
    """Answers a `Ping`."""


FIRST = Version(1, 0)


def small_layout(request_noise: int = 0) -> TrajectoryLayout:
    """Four steps of two environments; ``request_noise``: as in `make_layout`."""
    observation = (LeafSpec("", (3,), "float32"), LeafSpec("camera", (2, 2), "uint8"))
    spec = EnvironmentSpec(
        "Small-v0",
        observation,
        ActionSpec("discrete", (), "int64", (2,), (0,)),
        NUM_ENVS,
        "next_step",
    )
    return make_layout(
        spec, steps=STEPS, state_spec={}, return_accumulator=False, request_noise=request_noise
    )


def tickets(batch: Batch) -> tuple[int, ...]:
    return tuple(trajectory.ticket for trajectory in batch.trajectories)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# Worlds
# --------------------------------------------------------------------------------------------------


class World(ABC):
    """A run's trajectory and grant channels. ``now`` is its clock; ``episodes`` is what the
    coordinator heard.
    """

    def __init__(
        self,
        *,
        batch: int = 2,
        bound: int | None = 1,
        slots: int = 8,
        opened: bool = True,
        **limits: Any,
    ) -> None:
        self.now = 0.0
        self.layout = small_layout()
        given = {"batch": batch, "max_staleness": bound, "credits": slots, **limits}
        self.ledger = Ledger(limits=Limits(**given), slots=slots)
        self.exchange = Exchange(
            ledger=self.ledger, arena=self.make_arena(slots), clock=lambda: self.now
        )
        self.episodes: list[tuple[str, list[Episode]]] = []
        if opened:
            self.exchange.open_lineage(FIRST)

    @abstractmethod
    def make_arena(self, slots: int) -> Arena:
        """The coordinator's."""

    @abstractmethod
    def sender(self, holder: str) -> TrajectorySender:
        """A new end for ``holder``, in a host of its own."""

    @abstractmethod
    def source(self) -> BatchSource:
        """A new end for the learner, in a host of its own."""

    @abstractmethod
    def cut_off(self, holder: str) -> None:
        """The host of ``holder`` dies: nothing that it says from now on is heard."""

    @abstractmethod
    async def quiet(self) -> None:
        """Everything said so far has been heard, and everything said because of it."""

    @abstractmethod
    def close(self) -> None: ...

    # What actors and learners do
    # -------------------------------------------------------------------------------------

    def heard(self, holder: str, episodes: Sequence[Episode]) -> None:
        self.episodes.append((holder, list(episodes)))

    async def begun(self, sender: TrajectorySender, version: Version | None = None) -> Grant:
        grant = await sender.acquire()
        sender.begin(grant, version or grant.version)
        return grant

    def commit(
        self,
        sender: TrajectorySender,
        grant: Grant,
        version: Version | None = None,
        *,
        length: int = STEPS,
    ) -> None:
        """Write the ticket's number into its slot, and commit it."""
        sender.view(grant).arrays["reward"][:] = grant.ticket
        sender.commit(
            Trajectory(
                grant.ticket, grant.slot, length, length * NUM_ENVS, version or grant.version
            ),
            [],
        )

    async def committed(self, sender: TrajectorySender, version: Version | None = None) -> Grant:
        grant = await self.begun(sender, version)
        self.commit(sender, grant, version)
        return grant

    async def update(self, source: BatchSource, *, published: bool = True) -> Batch:
        """One whole update with what is there."""
        version = self.ledger.version
        batch = await asyncio.wait_for(source.next_batch(version), 10)
        self.settle(source, batch, published=published)
        await self.quiet()
        return batch

    def settle(self, source: BatchSource, batch: Batch, *, published: bool = True) -> None:
        version = batch.for_version
        source.settle(
            Settlement(
                Version(version.lineage, version.number + 1),
                tickets(batch),
                self.ledger.limits.max_staleness,
                published,
            )
        )

    # Looking
    # ----------------------------------------------------------------------------------------------

    @property
    def seen(self) -> LedgerSnapshot:
        return self.ledger.snapshot()

    def sound(self) -> None:
        assert "" == broken_identity(self.ledger)

    def all_returned(self) -> None:
        """Nobody holds a credit or a slot."""
        seen = self.seen
        self.sound()
        assert (0, seen.slots, 0) == (seen.in_use, seen.free_slots, seen.quarantined_slots)


class MemoryWorld(World):
    """Every end on one loop."""

    def make_arena(self, slots: int) -> Arena:
        return heap_arena(self.layout, slots)

    def sender(self, holder: str) -> TrajectorySender:
        return MemoryTrajectorySender(exchange=self.exchange, holder=holder, on_episodes=self.heard)

    def source(self) -> BatchSource:
        return MemoryBatchSource(exchange=self.exchange)

    def cut_off(self, holder: str) -> None:
        """There is nothing between the ends that could be cut."""

    async def quiet(self) -> None:
        await turns(5)

    def close(self) -> None: ...


class SharedHost:
    """A host's side and the coordinator's side of one link, both on this loop, each with a mapping
    of its own.
    """

    def __init__(self, world: SharedWorld) -> None:
        ours, theirs = socket_pair()
        memory = SharedMemory.attach(os.dup(world.shared.memory.fd))
        self.memory = memory
        self.arena = Arena(
            layout=world.layout, buffer=memory.buffer, capacity=world.exchange.arena.capacity
        )
        self.served = Link(end=ours, handle=self._serve, closed=lambda: None)
        self.link = Link(end=theirs, handle=self._hear, closed=lambda: None)
        handlers = ServedExchange(
            exchange=world.exchange, link=self.served, on_episodes=world.heard
        ).handlers
        self._serving = Handlers({**handlers, Ping: lambda _: self.served.send(Pong())})
        self._hearing = Handlers({Pong: self._ponged})
        self._ping: asyncio.Future[None] | None = None
        self.announced: list[Version] = []

    def sender(self, holder: str) -> TrajectorySender:
        # In tests every trajectory is short: who asks for several at once is said by a test of its
        # own.
        sender = LinkTrajectorySender(
            link=self.link,
            arena=self.arena,
            holder=holder,
            announce=self.announced.append,
            in_hand_s=0.0,
        )
        self._hearing |= {
            Granted: sender.answer,
            GrantsEnded: sender.answer,
        }
        return sender

    def source(self) -> BatchSource:
        source = LinkBatchSource(link=self.link, arena=self.arena)
        self._hearing |= {
            BatchReady: lambda message: source.batch(*message),
            BatchesEnded: lambda _: source.end(),
        }
        return source

    async def round_trip(self) -> None:
        if not self.link._open:
            return
        self._ping = asyncio.get_running_loop().create_future()
        self.link.send(Ping())
        await asyncio.wait_for(self._ping, 10)

    def _ponged(self, _: Pong) -> None:
        assert self._ping is not None
        self._ping.set_result(None)

    def _serve(self, message: object) -> None:
        self._serving[type(message)](message)

    def _hear(self, message: object) -> None:
        self._hearing[type(message)](message)

    def close(self) -> None:
        self.link.close()
        self.served.close()
        self.memory.close()


class SharedWorld(World):
    """Data in shared memory, messages over socket pairs."""

    def __init__(self, **limits: Any) -> None:
        self.hosts: dict[str, SharedHost] = {}
        super().__init__(**limits)

    def make_arena(self, slots: int) -> Arena:
        self.shared = SharedArena(layout=self.layout, capacity=slots)
        self.shared.add_slots(slots)
        return self.shared.arena

    def sender(self, holder: str) -> TrajectorySender:
        return self._host(holder).sender(holder)

    def source(self) -> BatchSource:
        return self._host("learner").source()

    def _host(self, name: str) -> SharedHost:
        if name in self.hosts:
            self.hosts[name].close()
        self.hosts[name] = SharedHost(self)
        return self.hosts[name]

    def cut_off(self, holder: str) -> None:
        host = self.hosts[holder]
        host.link.close()
        host.served.drain()
        host.served.close()

    async def quiet(self) -> None:
        await turns(1)  # what another thread sent
        for _ in range(3):  # what was said, the answer, and what was said to that
            for host in self.hosts.values():
                await host.round_trip()
        await turns(2)

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        self.shared.memory.close()


# Weights
# --------------------------------------------------------------------------------------------------

WEIGHTS_NBYTES = 64 * 1024


class WeightsLink(Protocol):
    """Both ends of a weights channel."""

    @property
    def writer(self) -> WeightsWriter: ...
    @property
    def reader(self) -> WeightsReader: ...
    def deliver(self, version: Version) -> None:
        """The reader's side hears that ``version`` was published."""

    def close(self) -> None: ...


class MemoryWeightsLink:
    """One store, which is both ends."""

    def __init__(self) -> None:
        self.writer = self.reader = MemoryWeights()

    def deliver(self, version: Version) -> None:
        """Publishing is hearing."""

    def close(self) -> None: ...


class SharedWeightsLink:
    """Two mappings of one memory."""

    def __init__(self) -> None:
        fd = SharedMemory.create_unsized("tianflow-weights")
        self._memories = [
            SharedMemory.attach(os.dup(fd), SharedWeights.nbytes_for(WEIGHTS_NBYTES))
            for _ in range(2)
        ]
        os.close(fd)
        self.writer, self.reader = (
            SharedWeights(memory=memory, nbytes=WEIGHTS_NBYTES) for memory in self._memories
        )

    def deliver(self, version: Version) -> None:
        self.reader.announce(version)

    def close(self) -> None:
        for memory in self._memories:
            memory.close()


# Events
# --------------------------------------------------------------------------------------------------


class EventsLink(Protocol):
    """A publisher, and a reader that can stop."""

    subscription: Subscription
    broadcast: Broadcast

    @property
    def publisher(self) -> EventPublisher: ...
    def stop(self) -> None: ...
    async def go_on(self) -> None:
        """Read again, until everything that was published has arrived or is lost."""

    def close(self) -> None: ...


class MemoryEventsLink:
    """A subscription that nobody reads before the test does."""

    def __init__(self) -> None:
        self.publisher = self.broadcast = Broadcast()
        self.subscription = self.broadcast.subscribe()

    def stop(self) -> None: ...
    async def go_on(self) -> None: ...
    def close(self) -> None: ...


class SharedEventsLink:
    """A link, and a coordinator at its end that may stop reading. Its observers keep up."""

    def __init__(self) -> None:
        self.broadcast, self.publisher = Broadcast(), self
        self.subscription = self.broadcast.subscribe(100_000)
        self._gaps = GapCounter()
        self._ours, theirs = socket_pair()
        self._link = Link(end=theirs, handle=lambda message: None, closed=lambda: None)
        self._served = Link(end=self._ours, handle=self._serve, closed=lambda: None)
        self._arrived = asyncio.Event()

    def publish(self, event: Event) -> None:
        self._link.send_event(event)

    def _serve(self, message: object) -> None:
        if isinstance(message, EventPublished):
            self.broadcast.count_lost(self._gaps.lost(message.sequence))
            self.broadcast.publish(message.event)
        else:
            self._arrived.set()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ours.fileno())

    async def go_on(self) -> None:
        asyncio.get_running_loop().add_reader(self._ours.fileno(), self._served.handle_one)
        await self._link.flush()
        self._arrived.clear()
        self._link.send(Ping())
        await asyncio.wait_for(self._arrived.wait(), 10)

    def close(self) -> None:
        self._link.close()
        self._served.close()
