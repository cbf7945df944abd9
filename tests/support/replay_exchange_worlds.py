"""A replay exchange among stand-ins: shards that answer when they are told to, actors and a learner
in a line each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.channels.memory import heap_arena
from tianflow.channels.messages import Drawn, Dropped, ItemsSaved, Prioritised, Stored
from tianflow.core.layout import make_draw_layout, make_layout
from tianflow.core.limits import Limits, RateLimits
from tianflow.core.payloads import (
    ActionSpec,
    Batch,
    DrawPart,
    DropItems,
    EnvironmentSpec,
    Grant,
    Holdings,
    LeafSpec,
    Prioritise,
    SaveItems,
    Settlement,
    ShardRequest,
    StateFile,
    StoreTrajectory,
    Trajectory,
    Version,
)
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.ledger.ledger import Ledger
from tianflow.ledger.tickets import State
from tianflow.planning.memory import DRAW_SLOTS
from tianflow.replay.rate_limiter import Limiter

STEPS, NUM_ENVS, DRAWN = 4, 2, 6
SPEC = EnvironmentSpec(
    "Small-v0",
    (LeafSpec("", (1,), "float32"),),
    ActionSpec("discrete", (), "int64", (2,), (0,)),
    NUM_ENVS,
    "next_step",
)
LAYOUT = make_layout(SPEC, steps=STEPS, state_spec={}, return_accumulator=False, replayed=True)
DRAWS = make_draw_layout(SPEC, length=1, items=DRAWN, state_spec={})
OPEN = RateLimits(1.0, 1, -np.inf, np.inf, 1000, STEPS * NUM_ENVS, DRAWN)


class FakeShard:
    """One life of a shard: a list of versions, one for each item; every item weighs 1. It answers
    one request when told to. ``place``: of its machine.
    """

    def __init__(
        self,
        world: World,
        index: int,
        incarnation: int,
        *,
        capacity: int = 64,
        place: str = "",
    ) -> None:
        self.world, self.index, self.incarnation, self.capacity = (
            world,
            index,
            incarnation,
            capacity,
        )
        self.place = place
        self.asked: deque[ShardRequest] = deque()
        self.seen: list[ShardRequest] = []
        self.items: list[int] = []
        self.removed = 0
        self.weight = 1.0
        self.answer = partial(world.exchange.shard_answered, index, incarnation)

    def ask(self, request: ShardRequest) -> None:
        self.asked.append(request)
        self.seen.append(request)

    @property
    def holdings(self) -> Holdings:
        held = self.weight * len(self.items)
        return Holdings(len(self.items), held, removed_items=self.removed)

    def work(self, count: int = 1) -> None:
        """Answer so many requests."""
        for _ in range(count):
            self.reply(self.asked.popleft())

    def hurry(self) -> None:
        """Answer the first draw or priorities there are before anything is to be dropped, as a real
        one does.
        """
        for request in self.asked:
            if isinstance(request, DropItems | SaveItems):
                return
            if isinstance(request, DrawPart | Prioritise):
                self.asked.remove(request)
                self.reply(request)
                return

    def reply(self, request: ShardRequest) -> None:
        match request:
            case StoreTrajectory():
                assert request.place in ("", self.place)
                made = self.world.stored_from(request)
                self.items += made
                self._remove(len(self.items) - self.capacity)
                self.answer(Stored(request.ticket, len(made), self.holdings))
            case DrawPart():
                self._remove(sum(version < request.oldest for version in self.items))
                views = self.world.draws.views(request.slot)
                part = slice(request.first, request.first + request.items)
                found = len(self.items) > 0
                if found:
                    views["version"][part] = self.world.rng.choice(self.items, request.items)
                    views["key"][part], views["probability"][part] = (
                        self.index,
                        1.0 / len(self.items),
                    )
                self.answer(Drawn(request.draw, request.items if found else 0, self.holdings))
            case Prioritise():
                self.answer(Prioritised(request.draw, self.holdings))
            case DropItems(reason=reason):
                self._remove(len(self.items) if reason else 0)
                self.answer(Dropped(self.holdings))
            case SaveItems():
                self.answer(ItemsSaved(StateFile(f"hash of {request.path}", 1), self.holdings))

    def _remove(self, count: int) -> None:
        """The oldest ones."""
        if count > 0:
            self.items.sort()
            del self.items[:count]
            self.removed += count


class World:
    """Actors are called by number. ``now`` is the clock. ``remote``: there are other machines."""

    def __init__(
        self,
        *,
        shards: int = 2,
        limits: RateLimits = OPEN,
        bound: int | None = None,
        slots: int = 16,
        prioritised: bool = True,
        beta: float = 0.5,
        opened: bool = True,
        restoring: bool = False,
        seed: int = 0,
        ahead: bool = False,
        remote: bool = False,
    ) -> None:
        self.now = 0.0
        self.rng = np.random.default_rng(seed)
        self.ledger = Ledger(
            limits=Limits(batch=1, max_staleness=bound, credits=slots),
            slots=slots,
            remote=remote,
        )
        self.arena, self.draws = heap_arena(LAYOUT, slots), heap_arena(DRAWS, DRAW_SLOTS)
        self.exchange = ReplayExchange(
            ledger=self.ledger,
            arena=self.arena,
            clock=lambda: self.now,
            draws=self.draws,
            slots=DRAW_SLOTS,
            limiter=Limiter(limits=limits),
            period=1,
            prioritised=prioritised,
            schedule=lambda updates: (0, beta),
            seed=seed,
            shards=shards,
            ahead=ahead,
        )
        self.shards: dict[int, FakeShard] = {}
        self.lives = [0] * shards
        self.trajectories: dict[int, Trajectory] = {}
        self.batches: list[Batch | None] = []
        self.version = Version(0, 0)
        if opened:
            self.learner()
            for index in range(shards):
                self.open(index)
                if not restoring:
                    self.shards[index].work()

    # Shards
    # ----------------------------------------------------------------------------------------------

    def open(self, index: int, **more: Any) -> FakeShard:
        shard = self.shards[index] = FakeShard(self, index, self.lives[index], **more)
        self.lives[index] += 1
        self.exchange.shard_opened(index, shard.incarnation, shard)
        return shard

    def lose(self, index: int) -> FakeShard:
        self.exchange.shard_lost(index)
        return self.shards.pop(index)

    def stored_from(self, request: StoreTrajectory) -> list[int]:
        """Versions of the items that a trajectory brings, one for each of its steps."""
        trajectory = self.trajectories[request.ticket]
        return [trajectory.version.number] * trajectory.env_steps

    def work(self) -> None:
        """All shards answer all there is."""
        while any(shard.asked for shard in self.shards.values()):
            for shard in list(self.shards.values()):
                shard.work(len(shard.asked))

    # Actors
    # ----------------------------------------------------------------------------------------------

    def granted(self, actor: int = 0) -> Grant | None:
        grants: list[Grant | None] = []
        self.exchange.request_grant(f"actor-{actor}", grants.append)
        if not grants:
            self.exchange.cancel_request(f"actor-{actor}")
        return grants[0] if grants else None

    def begun(self, actor: int = 0) -> Grant:
        grant = self.granted(actor)
        assert grant is not None
        self.exchange.begin(grant.ticket, grant.version)
        return grant

    def commit(self, grant: Grant, steps: int = STEPS, place: str | None = None) -> None:
        """``place``: where its data lie; None: where the grant says."""
        trajectory = Trajectory(grant.ticket, grant.slot, steps, steps * NUM_ENVS, grant.version)
        self.trajectories[grant.ticket] = trajectory
        self.exchange.commit(trajectory, grant.place if place is None else place)

    def committed(self, actor: int = 0, steps: int = STEPS) -> Grant:
        grant = self.begun(actor)
        self.commit(grant, steps)
        return grant

    def filled(self, count: int = 1, actor: int = 0) -> None:
        """So many trajectories are in replay."""
        for _ in range(count):
            self.committed(actor)
        self.work()

    # The learner
    # ----------------------------------------------------------------------------------------------

    def learner(self, number: int = 0) -> None:
        """One opens a new lineage."""
        self.version = Version(self.version.lineage + 1, number)
        self.exchange.open_lineage(self.version)

    def pull(self, ahead: int = 0, deliver: Callable[[Batch | None], None] | None = None) -> None:
        version = Version(self.version.lineage, self.version.number + ahead)
        self.exchange.request_batch(version, deliver or self.batches.append)

    def pulled(self) -> Batch:
        """A draw that the learner holds."""
        self.pull()
        self.work()
        batch = self.batches.pop()
        assert batch is not None
        return batch

    def pulled_without_work(self) -> Batch | None:
        """The parts of a draw are answered, and nothing else that was asked before."""
        self.pull()
        for shard in self.shards.values():
            for request in [request for request in shard.asked if isinstance(request, DrawPart)]:
                shard.asked.remove(request)
                shard.reply(request)
        return self.batches.pop() if self.batches else None

    def settle(self, batch: Batch, *, skipped: bool = False) -> None:
        self.version = Version(self.version.lineage, self.version.number + 1)
        tickets = tuple(trajectory.ticket for trajectory in batch.trajectories)
        self.exchange.settle(
            Settlement(self.version, tickets, self.ledger.limits.max_staleness, True, skipped)
        )

    def lose_learner(self) -> None:
        self.exchange.learner_lost()

    def views(self, batch: Batch) -> Mapping[str, NDArray[Any]]:
        return self.draws.views(batch.trajectories[0].slot)

    # Looking
    # ----------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self.ledger.snapshot().dropped)

    @property
    def discarded(self) -> dict[str, int]:
        return dict(self.exchange.replay_statistics().discarded)

    def sound(self) -> None:
        """What must hold after every step."""
        seen, told = self.ledger.snapshot(), self.exchange.replay_statistics()
        live, size = self.ledger.live(), self.exchange.limiter.statistics().size
        assert seen.begun == seen.trained + seen.inserted + sum(seen.dropped.values()) + seen.open
        assert told.drawn == told.trained + sum(told.discarded.values()) + told.held
        assert seen.in_use == len(live) <= seen.slots
        slots = self.ledger._slots.without_ticket()
        slots += [ticket.slot for ticket in live if ticket.state is not State.TAKEN]
        assert sorted(slots) == list(range(seen.slots))
        draws = [
            *self.exchange._draws.free_slots,
            *(draw.slot for draw in self.exchange._draws.values()),
        ]
        assert sorted(draws) == list(range(DRAW_SLOTS))
        assert size == sum(shard.items for shard in told.shards.values())
        stored = [number for shard in self.exchange._shards.values() for number in shard.storing]
        assert sorted(stored) == sorted(
            ticket.number for ticket in live if ticket.state is State.TAKEN
        )
        expected = sum(sum(shard.storing.values()) for shard in self.exchange._shards.values())
        assert expected == self.exchange._shards.ahead
        assert 0 == seen.violations
