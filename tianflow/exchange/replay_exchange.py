"""ReplayExchange: trajectories go into replay shards, and the learner gets draws from them.

    committed trajectory -> shard (copies it, frees the slot) ... shards -> draw slot -> learner ->
    priorities -> shards

Arrays lie in slots that all sides map; only small messages move here. It runs on the coordinator's
loop.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from tianflow.channels.messages import Drawn, Dropped, ItemsSaved, Prioritised, ShardAnswer, Stored
from tianflow.core.payloads import (
    NO_VERSION,
    DropItems,
    Settlement,
    StateFile,
    StoreTrajectory,
    Trajectory,
    Version,
)
from tianflow.core.statistics import ReplayStatistics
from tianflow.exchange.draws import Draws
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.shards import Shards, Stopwatch
from tianflow.ledger.ledger import LedgerError

if TYPE_CHECKING:
    from pathlib import Path

    from tianflow.channels.arena import Arena
    from tianflow.core.limits import Limits, RateLimits
    from tianflow.interfaces import ShardPort
    from tianflow.ledger.ledger import Ledger
    from tianflow.ledger.tickets import Ticket
    from tianflow.replay.rate_limiter import Limiter

NO_BOUND = -(2**62)
"""`DrawPart.oldest` when any version may be drawn."""


class ReplayExchange(Exchange):
    """`Exchange` for algorithms with replay. The learner's end stays the same: a batch is one
    trajectory, the draw.

    Waits: never. Unblocked by: commits, answers of shards, settled updates, changed limits; `_pump`
    follows all of them. It makes one draw at a time. The cost of a message does not depend on the
    number of tickets or items.

    Args:
        ledger: of the actors' tickets.
        arena: of trajectories.
        clock: monotonic seconds, less the time for which the run was paused.
        draws: arena of draws, laid out by `tianflow.core.layout.make_draw_layout`.
        slots: number of draw slots.
        limiter: limits how far either side runs ahead.
        period: steps between the beginnings of two items of one environment.
        prioritised: whether the learner returns priorities.
        schedule: environment steps so far, and exponent of importance weights, for the draw after
            a number of updates.
        seed: of the choice of shards.
        shards: number of shards of the run.
        ahead: make the next draw before the learner asks. Not under a bound: a draw for a later
            version removes more items.
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
        schedule: Callable[[int], tuple[int, float]],
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
            schedule=schedule,
            seed=seed,
        )
        self._committed: deque[tuple[int, str]] = deque()
        """Tickets that wait for a shard or for room, in order of arrival, with the places of their
        data. Some may have been dropped since.
        """
        self._ahead = ahead
        self._delivered = NO_VERSION
        """The version that the learner's last draw is for."""
        self._earlier_deletes = limiter.statistics().deletes
        self._blocked = {"insert": Stopwatch(clock), "draw": Stopwatch(clock)}

    # Actors
    # ----------------------------------------------------------------------------------------------

    def commit(self, trajectory: Trajectory, place: str = "") -> bool:
        """A trajectory is complete, and its data lie at ``place``; False when it came too late.

        Only a shard at the same place can store what does not lie on the head.
        """
        self._committed.append((trajectory.ticket, place))
        return self._commit(trajectory)

    def _place_for(self, holder: str) -> str:
        return self._shards.place_for(holder, actors=len(self._holders))

    # Shards
    # ----------------------------------------------------------------------------------------------

    def shard_opened(self, index: int, incarnation: int, port: ShardPort) -> None:
        """A shard works. It holds nothing or, at the start of a resumed run, what it restored; its
        first `Dropped` says what it holds.
        """
        self.shard_lost(index)
        self._shards.open(index, incarnation, port)
        port.ask(DropItems("lineage" if self._other_lineages_expired() else ""))
        self._pump()

    def shard_lost(self, index: int, reason: str = "shard_lost") -> None:
        """A shard was reaped. Draws continue from the others."""
        shard = self._shards.lose(index)
        if shard is None:
            return
        self.ledger.shard_lost(shard.storing, reason)
        self._draws.shard_lost(index, reason)
        self._pump()

    def shard_answered(self, index: int, incarnation: int, answer: ShardAnswer) -> None:
        """An incarnation of shard ``index`` has answered a request. Ignored if it was reaped."""
        shards = self._shards
        shard = shards.answering(index, incarnation)
        if shard is None:
            return
        match answer:
            case Stored(ticket=ticket, items=items, holdings=holdings):
                if not shards.stored(shard, ticket, items, holdings):
                    return
                self.ledger.inserted(ticket)
            case Drawn(draw=number, items=items, holdings=holdings):
                shards.holds(shard, holdings)
                if not items:
                    shard.spent = holdings.items > 0
                if self._draws.written(number, index, void="" if items else "expired"):
                    self._deliver(number)
            case Prioritised(draw=number, holdings=holdings):
                shards.holds(shard, holdings)
                self._draws.returned(number, index)
            case Dropped(holdings=holdings):
                shards.starts_with(index, shard, holdings)
            case ItemsSaved(file=file, holdings=holdings):
                shards.holds(shard, holdings)
                shards.saved(shard, file)
        self._pump()

    @property
    def shards_up(self) -> int:
        """Number of shards that work."""
        return len(self._shards)

    async def save(self, directory: Path) -> dict[str, StateFile]:
        """Have every shard write what it holds into ``directory``. The files by name; a shard that
        is lost meanwhile leaves no file.
        """
        return await self._shards.save(directory)

    # The learner
    # ----------------------------------------------------------------------------------------------

    def open_lineage(self, version: Version) -> None:
        """A learner published its first version. Under a bound, items of an older lineage have
        expired, whatever their number.
        """
        if version.lineage > 1 and self.ledger.limits.max_staleness is not None:
            self._drop_all()
        super().open_lineage(version)

    def set_limits(self, limits: Limits) -> None:
        """Put limits in force. Shards do not store the lineage of an item, so the first bound drops
        everything if there was an older lineage.
        """
        unbounded = self.ledger.limits.max_staleness is None
        super().set_limits(limits)
        if unbounded and self._other_lineages_expired():
            self._drop_all()

    def _other_lineages_expired(self) -> bool:
        """True if items of an older lineage, which must not be drawn, may be there."""
        return self.ledger.limits.max_staleness is not None and self.ledger.version.lineage > 1

    def _drop_all(self) -> None:
        for shard in self._shards.values():
            shard.port.ask(DropItems("lineage"))
        self._draws.discard_all(("drawing", "ready"), "expired")

    def give_back(self, tickets: Iterable[int]) -> None:
        """A draw was not used: it has expired by now."""
        for number in tickets:
            if number in self._draws and self._draws[number].state == "held":
                self._draws.discard(number, "expired")
        self._pump()

    def settle(self, settlement: Settlement) -> None:
        """An update is over: its draws were trained on, and their priorities lie in their slots."""
        if not self.ledger.is_current(settlement.version):
            return
        now = self.ledger.version.number
        for number in settlement.tickets:
            draw = self._draws.get(number)
            if draw is None or draw.state != "held":
                raise LedgerError(f"draw {number} was trained on, but the learner does not have it")
            staleness = now - self._draws.views(number)["version"]
            if settlement.bound is None:
                # An older lineage may have reached a version that this one has not.
                np.maximum(staleness, 0, out=staleness)
            self.ledger.replayed(Counter(staleness.tolist()), settlement.bound)
            self._draws.settle(number, skipped=settlement.skipped)
        super().settle(settlement._replace(tickets=()))

    def learner_lost(self, reason: str = "learner_lost") -> int:
        """The learner was reaped. The draws that it held or waited for are discarded; items in
        replay, and trajectories on their way there, stay valid.
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
            number, place = self._committed[0]
            ticket = self.ledger.insertable(number)
            if ticket is None:
                self._committed.popleft()
            elif not self._insert(ticket, place):
                blocked = True
        self._blocked["insert"].set(blocked)

    def _insert(self, ticket: Ticket, place: str) -> bool:
        """Send the oldest committed trajectory, whose data lie at ``place``, to a shard. False if
        it has to wait.
        """
        if place and not self._shards.at(place):
            self._committed.popleft()
            self.ledger.refuse(ticket.number, "shard_lost")
            return True
        if self._other_lineages_expired() and ticket.version.lineage != self.ledger.version.lineage:
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
            ticket.holder, ticket.number, items=expected, actors=len(self._holders), place=place
        )
        shard.port.ask(
            StoreTrajectory(trajectory.ticket, trajectory.slot, trajectory.length, place)
        )
        return True

    def _room_for(self, items: int) -> bool:
        """Whether the limiter admits ``items`` more, on top of those that are on their way."""
        ahead = self._shards.ahead
        # If nothing can be drawn from what the shards hold, a wait for draws would never end.
        return self.limiter.may_insert(items, ahead=ahead) or (not ahead and self._shards.drained)

    def _serve(self) -> None:
        """Give the learner the draw that it waits for, or begin a draw, as far as limiter and
        shards allow.
        """
        for number in [
            number
            for number, draw in self._draws.items()
            if draw.state == "ready" and self._pulling is not None
        ]:
            self._deliver(number)
        if self._pulling is None:
            self._blocked["draw"].set(False)
        if self._draws.in_progress:
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

    # Statistics
    # ----------------------------------------------------------------------------------------------

    def replay_statistics(self) -> ReplayStatistics:
        """Numbers of items in replay, inserted and removed, and times for which each side was
        blocked.
        """
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
            earlier_deletes=self._earlier_deletes,
            inserted_steps=dict(self._shards.inserted_steps),
        )
