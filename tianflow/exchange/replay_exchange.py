"""Where trajectories go into replay and draws come out: an exchange whose learner is served by
shards.

    committed trajectory -> shard (copies it, frees the slot) ... shards -> draw slot -> learner ->
    priorities -> shards

Data lie in slots that all sides map; what moves here are small messages. It runs on the
coordinator's loop.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from tianflow.core.payloads import (
    NO_VERSION,
    DropItems,
    Holdings,
    Settlement,
    StateFile,
    StoreTrajectory,
    Trajectory,
    Version,
)
from tianflow.core.statistics import ReplayStatistics
from tianflow.exchange.draws import Draws
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.shards import ShardPort, Shards, Stopwatch
from tianflow.ledger.ledger import LedgerError

if TYPE_CHECKING:
    from pathlib import Path

    from tianflow.channels.arena import Arena
    from tianflow.core.limits import Limits, RateLimits
    from tianflow.ledger.ledger import Ledger
    from tianflow.ledger.tickets import Ticket
    from tianflow.replay.rate_limiter import Limiter

NO_BOUND = -(2**62)
"""`DrawPart.oldest` when any version may be drawn."""


class ReplayExchange(Exchange):
    """`Exchange` for algorithms with replay. The learner's end stays the same: a batch is one
    trajectory, the draw.

    Waits: nobody inside. Unblocked by: commits, shards' answers, settled updates, changed limits;
    `_pump` follows all of them. One draw is in the making at a time. What a message costs does not
    depend on how many tickets or items there are.

    Args:
        ledger: of the actors' tickets.
        arena: of trajectories.
        clock: monotonic seconds, less the time the run was paused.
        draws: arena of draws, laid out by `tianflow.core.layout.make_draw_layout`.
        slots: draw slots there are.
        limiter: says how far either side may run ahead.
        period: steps between the beginnings of two items of one environment.
        prioritised: whether the learner gives priorities back.
        beta: exponent of the importance weights now in force.
        seed: of the choice of shards.
        shards: how many there are to be.
        ahead: make the next draw before the learner asks, unless there is a bound: a draw for a
            later version lets go of more.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        arena: Arena,
        clock: Callable[[], float] = time.monotonic,
        draws: Arena,
        slots: int,
        limiter: Limiter,
        period: int,
        prioritised: bool,
        beta: Callable[[], float],
        seed: int,
        shards: int = 1,
        ahead: bool = False,
    ) -> None:
        super().__init__(ledger=ledger, arena=arena, clock=clock)
        self.limiter, self._period = limiter, period
        self._shards = Shards(limiter=limiter, count=shards)
        self._draws = Draws(
            arena=draws,
            slots=slots,
            shards=self._shards,
            prioritised=prioritised,
            beta=beta,
            seed=seed,
        )
        self._committed: deque[int] = deque()
        """Tickets for which no shard was there or no room, in order of arrival. Some may have been
        dropped since.
        """
        self._ahead, self._delivered = (
            ahead,
            NO_VERSION,
        )  # what the last draw that the learner was given is for
        self._blocked = {"insert": Stopwatch(clock), "draw": Stopwatch(clock)}

    # Actors
    # ----------------------------------------------------------------------------------------------

    def commit(self, trajectory: Trajectory) -> bool:
        """A trajectory is whole; False when it came too late."""
        self._committed.append(trajectory.ticket)
        return super().commit(trajectory)

    # Shards
    # ----------------------------------------------------------------------------------------------

    def shard_opened(self, index: int, incarnation: int, port: ShardPort) -> None:
        """A shard works. It holds nothing, or at the start of a resumed run what was kept of it;
        its first `dropped` says what.
        """
        self.shard_lost(index)
        self._shards.open(index, incarnation, port)
        port.ask(DropItems("lineage" if self._others_too_old() else ""))
        self._pump()

    def shard_lost(self, index: int, reason: str = "shard_lost") -> None:
        """A shard was reaped. Drawing goes on over the others."""
        shard = self._shards.lose(index)
        if shard is None:
            return
        self.ledger.shard_lost(shard.storing, reason)
        self._draws.shard_lost(index, reason)
        self._pump()

    def stored(
        self, index: int, incarnation: int, ticket: int, items: int, holdings: Holdings
    ) -> None:
        """A shard has copied a trajectory, which brought it ``items`` new items."""
        shard = self._shards.answering(index, incarnation)
        if shard is not None and self._shards.stored(shard, ticket, items, holdings):
            self.ledger.inserted(ticket)
            self._pump()

    def drawn(
        self, index: int, incarnation: int, number: int, count: int, holdings: Holdings
    ) -> None:
        """A shard has written its part of a draw; ``count`` 0: it holds nothing that may be drawn,
        or has too few draws left.
        """
        shard = self._shards.answering(index, incarnation)
        if shard is None:
            return
        self._shards.holds(shard, holdings)
        if not count:
            shard.spent = holdings.items > 0
        if self._draws.written(number, index, void="" if count else "expired"):
            self._deliver(number)
        self._pump()

    def prioritised(self, index: int, incarnation: int, number: int, holdings: Holdings) -> None:
        """A shard has taken the priorities of its part of a draw."""
        shard = self._shards.answering(index, incarnation)
        if shard is None:
            return
        self._shards.holds(shard, holdings)
        self._draws.returned(number, index)
        self._pump()

    def dropped(self, index: int, incarnation: int, holdings: Holdings) -> None:
        """A shard has let everything go, or says what it begins with."""
        shard = self._shards.answering(index, incarnation)
        if shard is not None:
            self._shards.begins_with(index, shard, holdings)
            self._pump()

    def kept(
        self, index: int, incarnation: int, sha256: str, nbytes: int, holdings: Holdings
    ) -> None:
        """A shard has written all it holds; "" if it could not."""
        shard = self._shards.answering(index, incarnation)
        if shard is not None:
            self._shards.holds(shard, holdings)
            self._shards.kept(shard, StateFile(sha256, nbytes) if sha256 else None)

    @property
    def shards_up(self) -> int:
        """Shards that work."""
        return len(self._shards)

    async def keep(self, directory: Path) -> dict[str, StateFile]:
        """Have every shard write what it holds into ``directory``: the files, by name. A shard that
        is lost meanwhile leaves none.
        """
        return await self._shards.keep(directory)

    # The learner
    # ----------------------------------------------------------------------------------------------

    def open_lineage(self, version: Version) -> None:
        """A learner published its first version. Under a bound what an older lineage made is too
        old, whatever its number.
        """
        if version.lineage > 1 and self.ledger.limits.max_staleness is not None:
            self._drop_all()
        super().open_lineage(version)

    def set_limits(self, limits: Limits) -> None:
        """Put limits in force. No shard knows what an older lineage made, so with the first bound
        everything goes if there was one.
        """
        unbounded = self.ledger.limits.max_staleness is None
        super().set_limits(limits)
        if unbounded and self._others_too_old():
            self._drop_all()

    def _others_too_old(self) -> bool:
        """Whether something of an older lineage may be there, which must not be drawn."""
        return self.ledger.limits.max_staleness is not None and self.ledger.version.lineage > 1

    def _drop_all(self) -> None:
        for shard in self._shards.values():
            shard.port.ask(DropItems("lineage"))
        self._draws.discard_all(("drawing", "ready"), "expired")

    def give_back(self, tickets: Iterable[int]) -> None:
        """A draw was not used: by now it is too old."""
        for number in tickets:
            if number in self._draws and self._draws[number].state == "held":
                self._draws.discard(number, "expired")
        self._pump()

    def settle(self, settlement: Settlement) -> None:
        """An update is over; its draws were trained on, and their priorities lie in their slots."""
        if not self.ledger.is_current(settlement.version):
            return
        now = self.ledger.version.number
        for number in settlement.tickets:
            draw = self._draws.get(number)
            if draw is None or draw.state != "held":
                raise LedgerError(f"draw {number} was trained on without the learner having it")
            ages = now - self._draws.views(number)["version"]
            if (
                settlement.bound is None
            ):  # an item may name a version that a lineage after its own has not reached
                np.maximum(ages, 0, out=ages)
            self.ledger.replayed(Counter(ages.tolist()), settlement.bound)
            self._draws.settle(number, skipped=settlement.skipped)
        super().settle(settlement._replace(tickets=()))

    def learner_lost(self, reason: str = "learner_lost") -> int:
        """The learner was reaped. What it held or waited for is discarded; what is in replay, or on
        its way there, stays good.
        """
        self._pulling, self._delivered = None, NO_VERSION
        self._blocked["draw"].set(False)
        self.ledger.learner_left()
        return self._draws.discard_all(("drawing", "ready", "held"), reason)

    def set_rate(self, limits: RateLimits) -> None:
        """Put another ratio or band in force."""
        self.limiter.change(limits)
        self._pump()

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _take(self) -> None:
        self._store_committed()
        self._serve()

    def _store_committed(self) -> None:
        blocked = False
        while self._committed and not blocked:
            ticket = self.ledger.insertable(self._committed[0])
            if ticket is None:
                self._committed.popleft()
            elif not self._insert(ticket):
                blocked = True
        self._blocked["insert"].set(blocked)

    def _insert(self, ticket: Ticket) -> bool:
        """Send the oldest committed trajectory to its shard. False if it has to wait."""
        if self._others_too_old() and ticket.version.lineage != self.ledger.version.lineage:
            self._committed.popleft()
            self.ledger.refuse(ticket.number, "lineage")
            return True
        assert ticket.trajectory is not None
        expected = -(-ticket.trajectory.env_steps // self._period)
        if not self._shards or not self._room_for(expected):
            return False
        self._committed.popleft()
        trajectory = self.ledger.take_one(ticket.number)
        shard = self._shards.send(
            ticket.holder, ticket.number, items=expected, actors=len(self._holders)
        )
        shard.port.ask(StoreTrajectory(trajectory.ticket, trajectory.slot, trajectory.length))
        return True

    def _room_for(self, items: int) -> bool:
        """Whether the limiter would let so many in on top of those that are on their way."""
        ahead = self._shards.ahead
        # If of what is there nothing can be drawn any more, waiting for draws would be waiting for
        # ever.
        return self.limiter.may_insert(items, ahead=ahead) or (not ahead and self._shards.drained)

    def _serve(self) -> None:
        """Give the learner the draw that it waits for, or begin it; or begin the next one. If both
        limiter and shards have it.
        """
        for number in [
            number
            for number, draw in self._draws.items()
            if draw.state == "ready" and self._pulling is not None
        ]:
            self._deliver(number)
        if self._pulling is None:
            self._blocked["draw"].set(False)
        if self._draws.in_the_making:
            return
        if self._pulling is None and not self._may_draw_ahead():
            return
        for_version = (
            self._pulling[0]
            if self._pulling
            else Version(self._delivered.lineage, self._delivered.number + 1)
        )
        shares = self._shards.shares()
        blocked = (
            not shares
            or not self._draws.free_slots
            or not self.limiter.may_draw(self._draws.draw_size)
        )
        self._blocked["draw"].set(blocked and self._pulling is not None)
        if blocked or for_version.lineage != self.ledger.version.lineage:
            return
        bound = self.ledger.limits.max_staleness
        self.limiter.drawn(self._draws.draw_size)
        self._draws.begin(
            for_version, shares, oldest=NO_BOUND if bound is None else for_version.number - bound
        )

    def _may_draw_ahead(self) -> bool:
        return self._ahead and self.ledger.limits.max_staleness is None

    def _deliver(self, number: int) -> None:
        draw = self._draws[number]
        if self._pulling is None and self._may_draw_ahead():
            draw.state = "ready"
            return
        if self._pulling is None or self._pulling[0] != draw.for_version:
            self._draws.discard(number, "unwanted")
            return
        (self._delivered, deliver), self._pulling = self._pulling, None
        deliver(self._draws.hand_over(number))

    # Looking
    # ----------------------------------------------------------------------------------------------

    def replay_statistics(self) -> ReplayStatistics:
        """What is in replay, what went in and out, and who was held back how long."""
        limiter, draws = self.limiter.statistics(), self._draws
        return ReplayStatistics(
            shards={index: shard.holdings for index, shard in sorted(self._shards.items())},
            inserts=limiter.inserts,
            deletes=limiter.deletes,
            drawn=draws.begun * draws.draw_size,
            trained=draws.trained * draws.draw_size,
            discarded={
                reason: count * draws.draw_size for reason, count in draws.discarded.items()
            },
            held=draws.held * draws.draw_size,
            diff=limiter.diff,
            limits=self.limiter.limits,
            samples_per_insert=limiter.samples / limiter.inserts if limiter.inserts else 0.0,
            blocked_s={side: watch.read() for side, watch in self._blocked.items()},
        )
