"""The trajectory and grant channels in memory: the ends call the exchange directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from tianflow.channels.arena import Arena, ArenaSlot
from tianflow.channels.waiting import uncollected
from tianflow.core.payloads import Batch, Episode, Grant, Settlement, Trajectory, Version
from tianflow.errors import ClosedChannelError, EndOfChannel
from tianflow.exchange.exchange import Exchange


class MemoryTrajectorySender:
    """An actor's end.

    Waits: for a credit and a slot. Unblocked by: a settled update, a dropped ticket, a freed slot,
    the end of the run.

    Args:
        exchange: decides.
        holder: the actor, as the ledger knows it.
        on_episodes: receives the episodes that finished in each accepted trajectory.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        holder: str,
        on_episodes: Callable[[str, Sequence[Episode]], object],
    ) -> None:
        self._exchange, self._holder, self._on_episodes = exchange, holder, on_episodes
        self._closed = False
        self._waiting: asyncio.Future[Grant | None] | None = None

    async def acquire(self) -> Grant:
        """Wait for a grant. EndOfChannel when the run wants no more, or this end was closed
        meanwhile.
        """
        if self._closed:
            raise ClosedChannelError(f"{self._holder} closed its end")
        self._waiting = asyncio.get_running_loop().create_future()
        self._exchange.request_grant(self._holder, self._deliver)
        try:
            grant = await self._waiting
        except asyncio.CancelledError:
            if (late := uncollected(self._waiting)) is not None:
                self.abort(late, "cancelled")
            self.close()
            raise
        if grant is None:
            raise EndOfChannel
        return grant

    def _deliver(self, grant: Grant | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(grant)
        elif grant is not None:
            self.abort(grant, "cancelled")

    def view(self, grant: Grant) -> ArenaSlot:
        """The granted slot."""
        return self._exchange.arena.lease(grant)

    def begin(self, grant: Grant, version: Version) -> None:
        """The first step is about to be taken."""
        self._exchange.begin(grant.ticket, version)

    def commit(self, trajectory: Trajectory, episodes: Sequence[Episode]) -> None:
        """Hand the trajectory over; a late one is refused and counted."""
        if self._exchange.commit(trajectory) and episodes:
            self._on_episodes(self._holder, episodes)

    def abort(self, grant: Grant, reason: str) -> None:
        """Give the ticket back unused."""
        self._exchange.abort(grant.ticket, grant.slot, reason)

    def close(self) -> None:
        """Request nothing more: a waiting `acquire` gets the end. Granted tickets may still be
        committed or aborted.
        """
        self._closed = True
        self._exchange.cancel_request(self._holder)
        self._deliver(None)


class MemoryBatchSource:
    """The learner's end.

    Waits: for B admissible trajectories. Unblocked by: a commit, the patience of a straggler, the
    end of the run.

    Args:
        exchange: that it pulls from.
        draws: with replay, the slots of its batches.
    """

    def __init__(self, *, exchange: Exchange, draws: Arena | None = None) -> None:
        self._exchange = exchange
        self._arena = draws or exchange.arena
        self._loop = asyncio.get_running_loop()

    async def next_batch(self, for_version: Version) -> Batch:
        """Request a batch and wait for it. EndOfChannel at the end."""
        future: asyncio.Future[Batch | None] = self._loop.create_future()

        def deliver(batch: Batch | None) -> None:
            if future.done():
                if batch is not None:
                    self.give_back(batch)
            else:
                future.set_result(batch)

        self._exchange.request_batch(for_version, deliver)
        try:
            batch = await future
        except asyncio.CancelledError:
            self._exchange.cancel_pull()
            if (late := uncollected(future)) is not None:
                self.give_back(late)
            raise
        if batch is None:
            raise EndOfChannel
        return batch

    @property
    def arena(self) -> Arena:
        """Where the trajectories lie."""
        return self._arena

    def view(self, trajectory: Trajectory) -> Mapping[str, NDArray[Any]]:
        """The data of a taken trajectory, or of a draw."""
        return self._arena.views(trajectory.slot)

    def give_back(self, batch: Batch) -> None:
        """Nothing of the batch was used."""
        self._exchange.give_back([trajectory.ticket for trajectory in batch.trajectories])

    def opened(self, version: Version) -> None:
        """The first version of a lineage is published."""
        self._exchange.open_lineage(version)

    def settle(self, settlement: Settlement) -> None:
        """One update is over."""
        self._exchange.settle(settlement)

    def published(self, version: Version) -> None:
        """A version was published between updates."""
        self._exchange.published(version)
