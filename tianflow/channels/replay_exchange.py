"""Where trajectories go into replay and draws come out: an exchange whose learner is served by shards.

    committed trajectory -> shard (copies it, frees the slot) ... shards -> draw slot -> learner -> priorities -> shards

Data lie in slots that all sides map; what moves here are small messages. It runs on the coordinator's loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tianflow.channels.exchange import Exchange
from tianflow.ledger import State
from tianflow.payloads import (
    Batch,
    DrawPart,
    Drop,
    Holdings,
    Keep,
    Prioritise,
    Settlement,
    ShardRequest,
    StateFile,
    Store,
    Trajectory,
    Version,
    shard_file,
)
from tianflow.statistics import ReplayStatistics

if TYPE_CHECKING:
    from pathlib import Path

    from tianflow.channels.arena import Arena
    from tianflow.ledger import Ledger
    from tianflow.limiter import Limiter, RateLimits

NO_BOUND = -(2**62)
"""`DrawPart.oldest` when any version may be drawn."""


class ShardPort(Protocol):
    """The way to a shard, wherever it lives. Requests arrive in the order in which they were sent."""

    def ask(self, request: ShardRequest) -> None: ...


@dataclass(slots=True)
class _Shard:
    port: ShardPort
    holdings: Holdings = field(default_factory=Holdings)
    storing: dict[int, int] = field(default_factory=dict)
    """Tickets it reads, each with the items that were expected of it."""


@dataclass(slots=True)
class _Draw:
    """One draw. ``state``: drawing (shards write), held (the learner has it), returning (shards read priorities)."""

    slot: int
    for_version: Version
    shares: dict[int, float]
    waiting_for: set[int]
    parts: dict[int, tuple[int, int]]
    """Shard -> (first, count)."""
    state: str = "drawing"
    void: str = ""
    """Why nobody will train on it; its slot is free once no shard writes into it."""


class ReplayExchange(Exchange):
    """`Exchange` for algorithms with replay. The learner's end stays the same: a batch is one trajectory, the draw.

    Waits: nobody inside. Unblocked by: commits, shards' answers, settled updates, changed limits; `_pump` follows all of them.

    Args:
        ledger: of the actors' tickets.
        arena: of trajectories.
        clock: monotonic seconds, less the time the run was paused.
        draws: arena of draws, laid out by `tianflow.layout.make_draw_layout`.
        slots: draw slots there are.
        limiter: says how far either side may run ahead.
        period: steps between the beginnings of two items of one environment.
        prioritised: whether the learner gives priorities back.
        beta: exponent of the importance weights now in force.
        seed: of the choice of shards.
        shards: how many there are to be.
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
    ) -> None:
        super().__init__(ledger=ledger, arena=arena, clock=clock)
        self.limiter = limiter
        self._draw_arena, self._free_draws = draws, list(range(slots))
        self._items, self._length = draws.layout.num_envs, draws.layout.steps
        self._period, self._prioritised, self._beta = period, prioritised, beta
        self._generator = np.random.default_rng(seed)
        self._shards: dict[int, _Shard] = {}
        self._restoring = set(range(shards))
        """Shards that have not opened yet, and may bring items back that the limiter knows of."""
        self._keeping: dict[int, asyncio.Future[StateFile | None]] = {}
        self._draws: dict[int, _Draw] = {}
        self._next_draw = 0
        self._discarded: Counter[str] = Counter()
        self._trained = 0
        self._blocked = {"insert": _Stopwatch(clock), "draw": _Stopwatch(clock)}

    # Shards ---------------------------------------------------------------------------------------------------------

    def shard_opened(self, index: int, port: ShardPort) -> None:
        """A shard works. It holds nothing, or at the start of a resumed run what was kept of it; its first `dropped` says what."""
        self._shards[index] = _Shard(port)
        port.ask(Drop(""))
        self._pump()

    def shard_lost(self, index: int) -> None:
        """A shard was reaped. Drawing goes on over the others."""
        shard = self._shards.pop(index, None)
        if shard is None:
            return
        self.ledger.shard_lost(shard.storing)
        if (keeping := self._keeping.pop(index, None)) is not None and not keeping.done():
            keeping.set_result(None)
        self.limiter.deleted(shard.holdings.items)
        for number, draw in list(self._draws.items()):
            if index in draw.waiting_for:
                if draw.state == "drawing":
                    draw.void = draw.void or "shard_lost"
                self._part_done(number, index)
        self._pump()

    def stored(self, index: int, ticket: int, items: int, holdings: Holdings) -> None:
        """A shard has copied a trajectory, which brought it ``items`` new items."""
        shard = self._shards.get(index)
        if shard is None or shard.storing.pop(ticket, None) is None:
            return
        self.limiter.inserted(items)
        self._now_holds(shard, holdings)
        self.ledger.inserted(ticket)
        self._pump()

    def drawn(self, index: int, number: int, count: int, holdings: Holdings) -> None:
        """A shard has written its part of a draw; ``count`` 0: it holds nothing that may be drawn."""
        if index in self._shards:
            self._now_holds(self._shards[index], holdings)
        draw = self._draws.get(number)
        if draw is not None:
            if count == 0:
                draw.void = draw.void or "expired"
            self._part_done(number, index)
        self._pump()

    def prioritised(self, index: int, number: int, holdings: Holdings) -> None:
        """A shard has taken the priorities of its part of a draw."""
        if index in self._shards:
            self._now_holds(self._shards[index], holdings)
        if number in self._draws:
            self._part_done(number, index)
        self._pump()

    def dropped(self, index: int, holdings: Holdings) -> None:
        """A shard has let everything go, or says what it begins with."""
        shard = self._shards.get(index)
        if shard is not None and index in self._restoring:
            shard.holdings = holdings
            self._restored(index)
        elif shard is not None:
            self._now_holds(shard, holdings)
        self._pump()

    def _restored(self, index: int) -> None:
        """Once all shards are there for the first time, the limiter's count is what they hold."""
        self._restoring.discard(index)
        if not self._restoring:
            held = sum(shard.holdings.items for shard in self._shards.values())
            size = self.limiter.statistics().size
            self.limiter.deleted(max(0, size - held))
            self.limiter.inserted(max(0, held - size))

    def kept(self, index: int, sha256: str, nbytes: int, holdings: Holdings) -> None:
        """A shard has written all it holds; "" if it could not."""
        if index in self._shards:
            self._now_holds(self._shards[index], holdings)
        future = self._keeping.pop(index, None)
        if future is not None and not future.done():
            future.set_result(StateFile(sha256, nbytes) if sha256 else None)

    async def keep(self, directory: Path) -> dict[str, StateFile]:
        """Have every shard write what it holds into ``directory``: the files, by name. A shard that is lost meanwhile leaves none."""
        loop = asyncio.get_running_loop()
        for index, shard in self._shards.items():
            self._keeping[index] = loop.create_future()
            shard.port.ask(Keep(str(directory / shard_file(index))))
        waiting = dict(self._keeping)
        files = dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
        return {shard_file(index): file for index, file in files.items() if file is not None}

    def _now_holds(self, shard: _Shard, holdings: Holdings) -> None:
        self.limiter.deleted(holdings.removed_items - shard.holdings.removed_items)
        shard.holdings = holdings

    # The learner ----------------------------------------------------------------------------------------------------

    def open_lineage(self, version: Version) -> None:
        """A learner published its first version. Under a bound what an older lineage made is too old, whatever its number."""
        if self.ledger.version.lineage > 0 and self.ledger.limits.max_staleness is not None:
            for shard in self._shards.values():
                shard.port.ask(Drop("lineage"))
        super().open_lineage(version)

    def copied(self, tickets: Iterable[int]) -> None:
        """The learner keeps a draw's slot until it settles: the priorities go back in it."""

    def give_back(self, tickets: Iterable[int]) -> None:
        """A draw was not used: by now it is too old."""
        for number in tickets:
            self._discard(number, "expired")
        self._pump()

    def settle(self, settlement: Settlement) -> None:
        """An update is over; its draws were trained on, and their priorities lie in their slots."""
        held = [number for number in settlement.tickets if number in self._draws]
        now = self.ledger.version.number
        for number in held:
            versions, counts = np.unique(self._draw_arena.views(self._draws[number].slot)["version"], return_counts=True)
            # After a resume without its replay memory's lineage an item may name a version that the new lineage has not reached.
            ages = Counter({max(0, now - int(v)): int(n) for v, n in zip(versions, counts, strict=True)})
            self.ledger.replayed(ages, settlement.bound)
            self._trained += self._items
            self._write_back(number, skipped=settlement.skipped)
        super().settle(replace(settlement, tickets=()))

    def learner_lost(self, reason: str = "learner_lost") -> int:
        """The learner was reaped. What it held or waited for is discarded; what is in replay, or on its way there, stays good."""
        self._pulling = None
        self.ledger.learner_left()
        lost = [number for number, draw in self._draws.items() if draw.state != "returning"]
        for number in lost:
            self._discard(number, reason)
        return len(lost)

    def set_rate(self, limits: RateLimits) -> None:
        """Put another ratio or band in force."""
        self.limiter.change(limits)
        self._pump()

    # Inside ---------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        self._store_committed()
        self._serve()

    def _store_committed(self) -> None:
        blocked = False
        for ticket in self.ledger.live(State.COMMITTED):
            assert ticket.trajectory is not None
            expected = -(-ticket.trajectory.env_steps // self._period)
            ahead = sum(sum(shard.storing.values()) for shard in self._shards.values())
            if not self._shards or not self._room_for(expected, ahead):
                blocked = True
                break
            shard = self._shard_of(ticket.holder)
            trajectory = self.ledger.take_one(ticket.number)
            shard.storing[ticket.number] = expected
            shard.port.ask(Store(trajectory.ticket, trajectory.slot, trajectory.length))
        self._blocked["insert"].set(blocked)

    def _room_for(self, items: int, ahead: int) -> bool:
        """Whether the limiter would let so many in on top of those that are on their way."""
        limits, now = self.limiter.limits, self.limiter.statistics()
        return now.size + ahead < limits.min_size or now.diff + limits.samples_per_insert * (ahead + items) <= limits.max_diff

    def _shard_of(self, holder: str) -> _Shard:
        """An actor's trajectories go to one shard, so that windows may span them; to another while that one is down."""
        alive = sorted(self._shards)
        return self._shards[alive[int(holder.rpartition("-")[2]) % len(alive)]]

    def _serve(self) -> None:
        """Begin the draw that the learner waits for, if both limiter and shards have it."""
        if self._pulling is None or any(draw.state == "drawing" and not draw.void for draw in self._draws.values()):
            return
        for_version, _ = self._pulling
        masses = {index: shard.holdings.mass for index, shard in self._shards.items() if shard.holdings.items}
        total = sum(masses.values())
        blocked = total <= 0.0 or not self._free_draws or not self.limiter.may_draw(self._items)
        self._blocked["draw"].set(blocked)
        if blocked or for_version.lineage != self.ledger.version.lineage:
            return
        shares = {index: mass / total for index, mass in masses.items()}
        counts = self._generator.multinomial(self._items, list(shares.values()))
        self._begin(for_version, shares, dict(zip(shares, counts.tolist(), strict=True)))

    def _begin(self, for_version: Version, shares: dict[int, float], counts: Mapping[int, int]) -> None:
        bound = self.ledger.limits.max_staleness
        oldest = NO_BOUND if bound is None else for_version.number - bound
        number, slot, first = self._next_draw, self._free_draws.pop(), 0
        self._next_draw += 1
        self.limiter.drawn(self._items)
        draw = self._draws[number] = _Draw(slot, for_version, shares, set(), {})
        for index, count in counts.items():
            if count:
                draw.parts[index] = (first, count)
                draw.waiting_for.add(index)
                first += count
        for index, (start, count) in draw.parts.items():
            self._shards[index].port.ask(DrawPart(number, slot, start, count, oldest))

    def _part_done(self, number: int, index: int) -> None:
        draw = self._draws[number]
        draw.waiting_for.discard(index)
        if draw.waiting_for:
            return
        if draw.state == "drawing" and not draw.void:
            self._deliver(number, draw)
            return
        if draw.void and draw.state == "drawing":
            self._discarded[draw.void] += self._items
        self._free(number)

    def _deliver(self, number: int, draw: _Draw) -> None:
        views = self._draw_arena.views(draw.slot)
        probability = views["probability"].copy()
        for index, (first, count) in draw.parts.items():
            probability[first : first + count] *= draw.shares[index]
        known = max(1, sum(shard.holdings.items for shard in self._shards.values()))
        weight = (known * probability) ** -self._beta()
        views["weight"][:] = weight / weight.max()
        draw.state = "held"
        if self._pulling is None or self._pulling[0] != draw.for_version:
            self._discard(number, "unwanted")
            return
        (_, deliver), self._pulling = self._pulling, None
        oldest = Version(draw.for_version.lineage, int(views["version"].min()))
        deliver(Batch(draw.for_version, (Trajectory(number, draw.slot, self._length, self._items, oldest),)))

    def _write_back(self, number: int, *, skipped: bool) -> None:
        draw = self._draws[number]
        parts = {index: part for index, part in draw.parts.items() if index in self._shards}
        if not self._prioritised or skipped or not parts:
            self._free(number)
            return
        draw.state, draw.waiting_for = "returning", set(parts)
        for index, (first, count) in parts.items():
            self._shards[index].port.ask(Prioritise(number, draw.slot, first, count))

    def _discard(self, number: int, reason: str) -> None:
        draw = self._draws.get(number)
        if draw is None:
            return
        if draw.waiting_for:
            draw.void = draw.void or reason
            return
        self._discarded[reason] += self._items
        self._free(number)

    def _free(self, number: int) -> None:
        self._free_draws.append(self._draws.pop(number).slot)

    # Looking --------------------------------------------------------------------------------------------------------

    def replay_statistics(self) -> ReplayStatistics:
        """What is in replay, what went in and out, and who was held back how long."""
        limiter = self.limiter.statistics()
        holdings = {index: shard.holdings for index, shard in sorted(self._shards.items())}
        held = sum(draw.state != "returning" for draw in self._draws.values())
        return ReplayStatistics(
            shards=holdings,
            inserts=limiter.inserts,
            deletes=limiter.deletes,
            drawn=limiter.samples,
            trained=self._trained,
            discarded=dict(self._discarded),
            held=held * self._items,
            diff=limiter.diff,
            samples_per_insert=limiter.samples / limiter.inserts if limiter.inserts else 0.0,
            blocked_s={side: watch.read() for side, watch in self._blocked.items()},
        )


class _Stopwatch:
    """Seconds for which something was so."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds, self._since, self._on = 0.0, clock(), False

    def set(self, on: bool) -> None:
        """From now on it is so, or not."""
        now = self._clock()
        if self._on:
            self._seconds += now - self._since
        self._on, self._since = on, now

    def read(self) -> float:
        """Until now."""
        return self._seconds + (self._clock() - self._since if self._on else 0.0)
