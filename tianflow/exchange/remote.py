"""The trajectory and grant channels over a link: the ends in a host, and the coordinator's side
that serves them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tianflow.channels.messages import (
    Abort,
    BatchesEnded,
    BatchReady,
    Begin,
    CancelPull,
    CancelRequests,
    Commit,
    GiveBack,
    Granted,
    GrantsEnded,
    OpenLineage,
    PullBatch,
    RequestGrants,
    VersionPublished,
)
from tianflow.channels.waiting import ImmediateAnswer, PendingRequest, uncollected
from tianflow.core.payloads import Batch, Episode, Grant, Settlement, Trajectory, Version
from tianflow.errors import ClosedChannelError, EndOfChannel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tianflow.channels.arena import Arena, ArenaSlot
    from tianflow.exchange.exchange import Exchange
    from tianflow.interfaces import MessageLink


class ServedExchange:
    """Serves one exchange to the `LinkTrajectorySender`s and the `LinkBatchSource` of one host.

    Waits: never. The exchange's answer leaves as a message once it is there.

    Args:
        exchange: decides.
        link: to the host. A batch is pushed at once, because the learner waits for it; the other
            answers wait for the end of the turn.
        on_episodes: receives the episodes that finished in each accepted trajectory.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        link: MessageLink,
        on_episodes: Callable[[str, Sequence[Episode]], object],
    ) -> None:
        self._exchange, self._link, self._on_episodes = exchange, link, on_episodes
        self.handlers: dict[type, Callable[[Any], object]] = {
            RequestGrants: self._request_grants,
            CancelRequests: lambda message: exchange.cancel_request(message.holder),
            Begin: lambda message: exchange.begin(*message),
            Commit: self._commit,
            Abort: lambda message: exchange.abort(*message),
            PullBatch: self._pull,
            CancelPull: lambda _: exchange.cancel_pull(),
            GiveBack: lambda message: exchange.give_back(message.tickets),
            OpenLineage: lambda message: exchange.open_lineage(message.version),
            Settlement: exchange.settle,
            VersionPublished: lambda message: exchange.published(message.version),
        }
        """By the class of a message."""

    def _request_grants(self, message: RequestGrants) -> None:
        holder, end, wanted = message

        def deliver(grant: Grant | None) -> None:
            self._link.send(
                GrantsEnded(holder, end) if grant is None else Granted(holder, end, grant)
            )

        for _ in range(wanted):
            self._exchange.request_grant(holder, deliver)

    def _commit(self, message: Commit) -> None:
        holder, trajectory, episodes, place = message
        if self._exchange.commit(trajectory, place) and episodes:
            self._on_episodes(holder, episodes)

    def _pull(self, message: PullBatch) -> None:
        pull, for_version = message

        def deliver(batch: Batch | None) -> None:
            self._link.send(BatchesEnded() if batch is None else BatchReady(pull, batch))
            self._link.push()

        self._exchange.request_batch(for_version, deliver)


IN_HAND_S = 0.002
"""Seconds of work that an actor requests ahead: longer than an answer of the coordinator takes, too
short to be noticed at a pause.
"""


class LinkTrajectorySender:
    """An actor's end in a host process. The reader of the link calls `grant`.

    Waits: for a credit and a slot. Unblocked by: the coordinator's grant, or the end.

    It requests several grants at once where trajectories are so short that an actor would wait for
    the coordinator after each: as many as were lately used in ``in_hand_s``, and never more than a
    grant allows (`Grant.ahead`).

    Args:
        link: to the coordinator.
        arena: where granted slots lie.
        holder: the actor, as the ledger knows it.
        announce: receives the versions that were published.
        end: incarnation of this end. A restarted holder has another one.
        in_hand_s: seconds of work to have in stock.
    """

    def __init__(
        self,
        *,
        link: MessageLink,
        arena: Arena,
        holder: str,
        announce: Callable[[Version], None],
        end: int = 0,
        in_hand_s: float = IN_HAND_S,
    ) -> None:
        self._end = end
        self._link, self._arena, self._holder, self._announce, self._in_hand_s = (
            link,
            arena,
            holder,
            announce,
            in_hand_s,
        )
        self._waiting: asyncio.Future[Grant | None] | None = None
        self._in_stock: deque[Grant] = deque()
        self._asked = self._allowed = self._few = 0
        self._since, self._acquired = time.monotonic(), 0
        """Time of the last request, and grants that were acquired since."""
        self._between_s = in_hand_s
        """Seconds from one `acquire` to the next, lately."""
        self._closed = False

    def acquire(self) -> Coroutine[Any, Any, Grant]:
        """Request a grant at the call, and wait for the answer. EndOfChannel when the run wants no
        more.
        """
        if self._closed:
            raise ClosedChannelError(f"{self._holder} closed its end")
        self._acquired += 1
        if self._asked + len(self._in_stock) <= self._few:
            self._ask()
        if self._in_stock:
            return ImmediateAnswer(self._in_stock.popleft())
        self._waiting = asyncio.get_running_loop().create_future()
        return PendingRequest(self._granted(self._waiting))

    def _ask(self) -> None:
        """Request the grant that is acquired, and refill the stock: half of it has been used."""
        now = time.monotonic()
        self._between_s += ((now - self._since) / self._acquired - self._between_s) / 8
        self._since, self._acquired = now, 0
        stock = max(0, min(self._allowed, int(self._in_hand_s / self._between_s)))
        self._few = stock // 2
        count = 1 + stock - self._asked - len(self._in_stock)
        if count > 0:
            self._link.send(RequestGrants(self._holder, self._end, count))
            self._asked += count

    async def _granted(self, waiting: asyncio.Future[Grant | None]) -> Grant:
        try:
            grant = await waiting
        except asyncio.CancelledError:
            if (late := uncollected(waiting)) is not None:
                self.abort(late, "cancelled")
            self.close()
            raise
        if grant is None:
            raise EndOfChannel
        return grant

    def answer(self, message: Granted | GrantsEnded) -> None:
        """One answer of the coordinator. A grant for an earlier end of this holder goes back."""
        grant = message.grant if isinstance(message, Granted) else None
        if message.end == self._end:
            self.grant(grant)
        elif grant is not None:
            self.abort(grant, "cancelled")

    def grant(self, grant: Grant | None) -> None:
        """One answer to this end; None: the end. After `close` a grant goes back."""
        self._asked -= 1
        if grant is None:
            self._give_back_stock()
        else:
            self._announce(grant.version)
            self._allowed = grant.ahead - 1  # the caller may have one in line already
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(grant)
        elif grant is not None and self._closed:
            self.abort(grant, "cancelled")
        elif grant is not None:
            self._in_stock.append(grant)

    def _give_back_stock(self) -> None:
        while self._in_stock:
            self.abort(self._in_stock.popleft(), "cancelled")

    def view(self, grant: Grant) -> ArenaSlot:
        """The granted slot."""
        return self._arena.lease(grant)

    def begin(self, grant: Grant, version: Version) -> None:
        """The first step is about to be taken."""
        self._link.send(Begin(grant.ticket, version))

    def commit(self, trajectory: Trajectory, episodes: Sequence[Episode]) -> None:
        """Hand the trajectory over, with the episodes that ended in it."""
        self._link.send(Commit(self._holder, trajectory, tuple(episodes)))

    def abort(self, grant: Grant, reason: str) -> None:
        """Give the ticket back unused."""
        self._link.send(Abort(grant.ticket, grant.slot, reason))

    def close(self) -> None:
        """Request nothing more: a waiting `acquire` gets the end. Granted tickets may still be
        committed or aborted.
        """
        if not self._closed:
            self._closed = True
            self._link.send(CancelRequests(self._holder))
            self._give_back_stock()
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)


class LinkBatchSource:
    """The learner's end in a host process. The reader of the link calls `batch` and `end`.

    Waits: for B admissible trajectories. Unblocked by: the coordinator's answer, or the end.

    Args:
        link: to the coordinator.
        arena: where the data of batches lie.
    """

    def __init__(self, *, link: MessageLink, arena: Arena) -> None:
        self._link, self._arena = link, arena
        self._waiting: asyncio.Future[Batch | None] | None = None
        self._pull = 0

    def next_batch(self, for_version: Version) -> Coroutine[Any, Any, Batch]:
        """Request a batch at the call, together with what was sent in this turn of the loop.
        EndOfChannel at the end.
        """
        self._waiting = asyncio.get_running_loop().create_future()
        self._pull += 1
        self._link.send(PullBatch(self._pull, for_version))
        # Actors may wait for the credits of the settlement before it, and this loop has an update
        # to begin.
        self._link.push()
        return PendingRequest(self._pulled(self._waiting))

    async def _pulled(self, waiting: asyncio.Future[Batch | None]) -> Batch:
        try:
            batch = await waiting
        except asyncio.CancelledError:
            self._link.send(CancelPull())
            if (late := uncollected(waiting)) is not None:
                self.give_back(late)
            waiting.cancel()
            raise
        if batch is None:
            raise EndOfChannel
        return batch

    def batch(self, pull: int, batch: Batch) -> None:
        """The answer to request ``pull``. A batch for a cancelled request goes back."""
        if pull == self._pull and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(batch)
        else:
            self.give_back(batch)

    def end(self) -> None:
        """The run makes no more batches."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def arena(self) -> Arena:
        """Where the trajectories lie."""
        return self._arena

    def view(self, trajectory: Trajectory) -> Mapping[str, NDArray[Any]]:
        """The data of a taken trajectory."""
        return self._arena.views(trajectory.slot)

    def give_back(self, batch: Batch) -> None:
        """Nothing of the batch was used."""
        self._link.send(GiveBack(tuple([trajectory.ticket for trajectory in batch.trajectories])))

    def opened(self, version: Version) -> None:
        """The first version of a lineage is published."""
        self._link.send(OpenLineage(version))

    def settle(self, settlement: Settlement) -> None:
        """One update is over."""
        self._link.send(settlement)

    def published(self, version: Version) -> None:
        """A version was published between updates."""
        self._link.send(VersionPublished(version))
