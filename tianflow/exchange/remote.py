"""The coordinator's side of a link's trajectory and grant channels: what the ends in a host say,
and what they are answered.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from tianflow.channels.arena import Arena, ArenaSlot
from tianflow.channels.codec import (
    decode_batch,
    decode_trajectory,
    encode_batch,
    encode_grant,
    encode_trajectory,
)
from tianflow.channels.link import Link
from tianflow.channels.waiting import ImmediateAnswer, PendingRequest, uncollected
from tianflow.core.payloads import Batch, Episode, Grant, Settlement, Trajectory, Version
from tianflow.errors import ClosedChannelError, EndOfChannel
from tianflow.exchange.exchange import Exchange


class ServedExchange:
    """Serves one exchange to the `LinkTrajectorySender`s and the `LinkBatchSource` of one host.

    Waits: nobody. What an end waits for is answered by message, once the exchange has it.

    Args:
        exchange: decides.
        send: sends one message to the host; messages arrive in the order in which they were sent.
        push: lets them leave now: a learner waits for its batch, while what else this turn of the
            loop brings can wait.
        on_episodes: hears of the episodes that finished in each accepted trajectory.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        send: Callable[..., None],
        push: Callable[[], None],
        on_episodes: Callable[[str, Sequence[Episode]], object],
    ) -> None:
        self._exchange, self._send, self._push, self._on_episodes = (
            exchange,
            send,
            push,
            on_episodes,
        )
        self.handlers: Mapping[str, Callable[..., None]] = {
            "want": self._want,
            "unwant": exchange.cancel_request,
            "begin": lambda ticket, lineage, number: exchange.begin(
                ticket, Version(lineage, number)
            ),
            "commit": self._commit,
            "abort": exchange.abort,
            "pull": self._pull,
            "unpull": exchange.cancel_pull,
            "back": exchange.give_back,
            "opened": lambda lineage, number: exchange.open_lineage(Version(lineage, number)),
            "settle": self._settle,
            "published": lambda lineage, number: exchange.published(Version(lineage, number)),
        }
        """By the first word of a message; the rest are the arguments."""

    def _want(self, holder: str, count: int) -> None:
        def deliver(grant: Grant | None) -> None:
            if grant is None:
                self._send("end", holder)
            else:
                self._send("grant", holder, encode_grant(grant))

        for _ in range(count):
            self._exchange.request_grant(holder, deliver)

    def _commit(self, holder: str, fields: list[int], ended: list[list[Any]]) -> None:
        if self._exchange.commit(decode_trajectory(fields)) and ended:
            self._on_episodes(
                holder,
                [Episode(float(episode_return), int(length)) for episode_return, length in ended],
            )

    def _pull(self, pull: int, lineage: int, number: int) -> None:
        def deliver(batch: Batch | None) -> None:
            self._send("batch", None if batch is None else [pull, *encode_batch(batch)])
            self._push()

        self._exchange.request_batch(Version(lineage, number), deliver)

    def _settle(
        self,
        version: list[int],
        tickets: list[int],
        bound: int | None,
        published: bool,
        skipped: bool,
    ) -> None:
        self._exchange.settle(
            Settlement(Version(*version), tuple(tickets), bound, published, skipped)
        )


IN_HAND_S = 0.002
"""Seconds of work that an actor asks for ahead: more than an answer of the coordinator takes, too
little to be noticed at a pause.
"""


class LinkTrajectorySender:
    """An actor's end in a host process. `grant` is called by whoever reads the link.

    Waits: for a credit and a slot. Unblocked by: the coordinator's grant, or the end.

    It asks for several at once where trajectories are so short that an actor would wait for the
    coordinator after each: for as many as were lately made in ``in_hand_s``, and never for more
    than a grant allows (`Grant.ahead`).

    Args:
        link: to the coordinator.
        arena: where granted slots lie.
        holder: the actor, as the ledger knows it.
        announce: hears which versions were published.
        in_hand_s: seconds of work to have in stock.
    """

    def __init__(
        self,
        *,
        link: Link,
        arena: Arena,
        holder: str,
        announce: Callable[[Version], None],
        in_hand_s: float = IN_HAND_S,
    ) -> None:
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
        """When it asked last, and how many were acquired from then on."""
        self._between_s = in_hand_s
        """Seconds from one `acquire` to the next, lately."""
        self._closed = False

    def acquire(self) -> Coroutine[Any, Any, Grant]:
        """Ask, and wait for the answer; EndOfChannel when the run wants no more. PendingRequest at
        the call, as `LinkBatchSource.next_batch` is.
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
        """For the one that is acquired, and for what is to lie in stock: half of it has been
        used.
        """
        now = time.monotonic()
        self._between_s += ((now - self._since) / self._acquired - self._between_s) / 8
        self._since, self._acquired = now, 0
        stock = max(0, min(self._allowed, int(self._in_hand_s / self._between_s)))
        self._few = stock // 2
        count = 1 + stock - self._asked - len(self._in_stock)
        if count > 0:
            self._link.send("want", self._holder, count)
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

    def grant(self, grant: Grant | None) -> None:
        """One answer of the coordinator; None: the end. What comes after `close` goes back."""
        self._asked -= 1
        if grant is None:
            self._give_back_stock()
        else:
            self._announce(grant.version)
            self._allowed = grant.ahead - 1  # whoever acquires may have one in line already
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
        self._link.send("begin", grant.ticket, *version)

    def commit(self, trajectory: Trajectory, episodes: Sequence[Episode]) -> None:
        """Hand the trajectory over, with the episodes that ended in it."""
        self._link.send("commit", self._holder, encode_trajectory(trajectory), episodes)

    def abort(self, grant: Grant, reason: str) -> None:
        """Give the ticket back unused."""
        self._link.send("abort", grant.ticket, grant.slot, reason)

    def close(self) -> None:
        """Ask for nothing more: whoever waits gets the end. What is out may still be committed or
        aborted.
        """
        if not self._closed:
            self._closed = True
            self._link.send("unwant", self._holder)
            self._give_back_stock()
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)


class LinkBatchSource:
    """The learner's end in a host process. `batch` is called by whoever reads the link.

    Waits: for B admissible trajectories. Unblocked by: the coordinator's answer, or the end.

    Args:
        link: to the coordinator.
        arena: where the data of batches lie.
    """

    def __init__(self, *, link: Link, arena: Arena) -> None:
        self._link, self._arena = link, arena
        self._waiting: asyncio.Future[Batch | None] | None = None
        self._pull = 0

    def next_batch(self, for_version: Version) -> Coroutine[Any, Any, Batch]:
        """Pull; EndOfChannel at the end. PendingRequest at the call, together with whatever else
        was sent in this turn of the loop.
        """
        self._waiting = asyncio.get_running_loop().create_future()
        self._pull += 1
        self._link.send("pull", self._pull, *for_version)
        # actors may wait for the credits of the settlement before it, and this loop has an update
        # to begin
        self._link.push()
        return PendingRequest(self._pulled(self._waiting))

    async def _pulled(self, waiting: asyncio.Future[Batch | None]) -> Batch:
        try:
            batch = await waiting
        except asyncio.CancelledError:
            self._link.send("unpull")
            if (late := uncollected(waiting)) is not None:
                self.give_back(late)
            waiting.cancel()
            raise
        if batch is None:
            raise EndOfChannel
        return batch

    def batch(self, fields: Sequence[Any] | None) -> None:
        """The coordinator's answer: the number of the pull and the batch. One to a pull that was
        cancelled goes back.
        """
        pull, batch = (
            (self._pull, None) if fields is None else (fields[0], decode_batch(fields[1:]))
        )
        if pull == self._pull and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(batch)
        elif batch is not None:
            self.give_back(batch)

    def view(self, trajectory: Trajectory) -> Mapping[str, NDArray[Any]]:
        """The data of a taken trajectory."""
        return self._arena.views(trajectory.slot)

    def give_back(self, batch: Batch) -> None:
        """Nothing of the batch was used."""
        self._link.send("back", [trajectory.ticket for trajectory in batch.trajectories])

    def opened(self, version: Version) -> None:
        """The first version of a lineage is published."""
        self._link.send("opened", *version)

    def settle(self, settlement: Settlement) -> None:
        """One update is over."""
        bound = settlement.bound
        self._link.send(
            "settle",
            list(settlement.version),
            list(settlement.tickets),
            bound,
            settlement.published,
            settlement.skipped,
        )

    def published(self, version: Version) -> None:
        """A version was published between updates."""
        self._link.send("published", *version)
