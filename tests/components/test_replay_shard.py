"""The replay component with a real shard: slots, draws and priorities; many shards draw like
one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.effort import FACTOR
from tests.support.settings import cartpole
from tianflow.channels.arena import Arena
from tianflow.channels.latest import LatestCell
from tianflow.channels.memory import heap_arena
from tianflow.components.replay_shard import ReplayShard
from tianflow.core.layout import make_draw_layout, make_layout
from tianflow.core.limits import Limits, RateLimits
from tianflow.core.payloads import (
    ActionSpec,
    Batch,
    DrawPart,
    DropItems,
    EnvironmentSpec,
    LeafSpec,
    Prioritise,
    SaveItems,
    Settlement,
    ShardRequest,
    StoreTrajectory,
    Trajectory,
    Version,
)
from tianflow.errors import WouldBlock
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.exchange.shards import ShardEnd
from tianflow.hosts.compute import Compute
from tianflow.interfaces import LiveSettings
from tianflow.ledger.ledger import Ledger
from tianflow.planning.memory import DRAW_SLOTS
from tianflow.replay.rate_limiter import Limiter
from tianflow.replay.selection import PrioritisedSelector, Uniform
from tianflow.replay.settings import ShardSettings
from tianflow.replay.shard import Shard
from tianflow.replay.sharding import importance_weights

T, N, DRAWN, LENGTH, ALPHA, BETA = 5, 2, 8, 2, 0.7, 0.4
SPEC = EnvironmentSpec(
    "Small-v0",
    (LeafSpec("", (1,), "float32"),),
    ActionSpec("discrete", (), "int64", (2,), (0,)),
    N,
    "next_step",
)
STATE = {"h": (3,)}
LAYOUT = make_layout(
    SPEC, steps=T, state_spec=STATE, return_accumulator=False, recorded=(), replayed=True
)
DRAWS = make_draw_layout(SPEC, length=LENGTH, items=DRAWN, state_spec=STATE)


def make_shard(
    capacity: int = 100, *, max_samples: int | None = None, alpha: float | None = ALPHA
) -> Shard:
    settings = ShardSettings(
        observation=SPEC.observation,
        action=((), "int64"),
        capacity=capacity,
        length=LENGTH,
        state=(("h", (3,)),),
        max_samples=max_samples,
    )
    return Shard(
        settings=settings,
        selector=Uniform if alpha is None else lambda size: PrioritisedSelector(size, alpha=alpha),
    )


class Place:
    """A component by itself: `do` executes one request and returns its answer."""

    def __init__(
        self,
        shard: Shard | None = None,
        *,
        seed: int = 0,
        answer: Callable[[Any], None] | None = None,
        slots: Any = None,
    ) -> None:
        self.slots: Arena
        self.draws: Arena
        self.slots, self.draws = slots or (heap_arena(LAYOUT, 4), heap_arena(DRAWS, 2))
        self.said: list[tuple[Any, ...]] = []
        self.shard = make_shard() if shard is None else shard
        self.end = ShardEnd(
            slots=self.slots,
            draws=self.draws,
            answer=answer or (lambda message: self.said.append(words(message))),
        )
        self.component = ReplayShard(
            name="replay-0",
            host="replay-0",
            end=self.end,
            settings=LatestCell(LiveSettings(cartpole(), None, generation=7), 7),
            compute=Compute(name="unused", on_orphan=lambda _: None),
            make_shard=lambda: self.shard,
            seed=seed,
        )
        self.component._shard = self.shard

    def do(self, request: ShardRequest) -> tuple[Any, ...]:
        self.component._do(request)()
        return self.said[-1] if self.said else ()

    def store(self, number: int, **more: Any) -> tuple[Any, ...]:
        write(self.slots.views(0), number=number, **more)
        return self.do(StoreTrajectory(number, 0, T))


def write(
    arrays: Any, *, number: int, actor: int = 0, version: int = 0, first: int | None = None
) -> None:
    """A trajectory of T steps; the action of step k of environment i is 2 (first + k) + i."""
    begin = T * number if first is None else first
    steps = np.arange(begin, begin + T + 1)[:, None]
    arrays["obs/"][:] = steps[:, :, None]
    arrays["action"][:] = 2 * steps[:-1] + np.arange(N)
    arrays["reward"][:], arrays["valid"][:] = steps[:-1], True
    arrays["terminated"][:], arrays["truncated"][:], arrays["start"][:] = False, False, False
    arrays["start"][0] = number == 0
    arrays["version"][:], arrays["stream"][:] = version, (actor, 0, 0, number)
    arrays["state/h"][:] = arrays["action"][:, :, None]


def words(message: Any) -> tuple[Any, ...]:
    """The name and the fields of an answer."""
    return (type(message).__name__, *message)


def held(answer: tuple[Any, ...]) -> tuple[int, int]:
    """Items in the shard, and removed items."""
    return answer[-1][0], answer[-1][4]


# One shard
# --------------------------------------------------------------------------------------------------


def test_a_stored_trajectory_completes_the_windows_that_end_in_it() -> None:
    place = Place()
    name, ticket, items, _ = place.store(0)
    assert ("Stored", 0, (T - LENGTH + 1) * N) == (name, ticket, items)
    assert T * N == place.store(1)[2]  # also windows that began in the trajectory before
    assert ((2 * T - 1) * N, 0) == held(place.said[-1])


def test_a_part_of_a_draw_fills_its_columns_and_no_other() -> None:
    place = Place()
    place.store(0)
    views = place.draws.views(1)
    for array in views.values():
        array[...] = 1 if array.dtype == bool else 77
    assert ("Drawn", 5, 3) == place.do(DrawPart(5, 1, 2, 3, -1))[:3]
    part = slice(2, 5)
    action = views["action"][:, part]
    assert (action[1] == action[0] + N).all()
    assert (views["obs/"][:, part, 0] == action[0] // 2 + np.arange(LENGTH + 1)[:, None]).all()
    assert (views["state/h"][part, 0] == action[0]).all()
    assert [1.0 / 8] * 3 == views["probability"][part].tolist()
    assert np.isnan(views["priority"][part]).all()
    assert [0] * 3 == views["version"][part].tolist()
    for name, array in views.items():
        rest = np.delete(array, part, axis=0 if array.shape[0] == DRAWN else 1)
        assert (rest == (1 if array.dtype == bool else 77)).all(), name


def test_items_older_than_the_request_allows_are_removed_first() -> None:
    place = Place()
    place.store(0, version=3)
    place.store(1, version=4)
    assert 0 < place.do(DrawPart(0, 0, 0, DRAWN, 4))[2]
    assert {4} == set(place.draws.views(0)["version"].tolist())
    assert ("Drawn", 1, 0) == place.do(DrawPart(1, 0, 0, DRAWN, 5))[:3]
    assert ((0, (2 * T - 1) * N)) == held(place.said[-1])


def test_a_request_for_more_draws_than_are_left_is_answered_with_0() -> None:
    place = Place(make_shard(max_samples=1))
    assert ("Drawn", 0, 0) == place.do(DrawPart(0, 0, 0, 1, -1))[:3]
    place.store(0)
    assert 5 == place.do(DrawPart(1, 0, 0, 5, -1))[2]
    answer = place.do(DrawPart(2, 0, 0, 5, -1))
    assert (0, 3) == (answer[2], held(answer)[0])
    assert 3 == place.do(DrawPart(3, 0, 0, 3, -1))[2]


def test_priorities_go_to_the_items_that_were_drawn() -> None:
    place = Place()
    place.store(0)
    place.do(DrawPart(0, 0, 0, DRAWN, -1))
    place.draws.views(0)["priority"][:] = 0.0
    drawn = set(place.draws.views(0)["key"].tolist())
    mass = place.do(Prioritise(0, 0, 0, DRAWN))[-1][1]
    assert pytest.approx(8 - len(drawn)) == mass


def test_an_invalid_priority_is_skipped_and_counted() -> None:
    place = Place()
    place.store(0)
    place.do(DrawPart(0, 0, 0, DRAWN, -1))
    views = place.draws.views(0)
    views["key"][:] = np.flatnonzero(place.shard._items.ready)
    views["priority"][:] = [np.nan, np.inf, -1.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    mass = place.do(Prioritise(0, 0, 0, DRAWN))[-1][1]
    assert pytest.approx(3.0 + 2.0**ALPHA) == mass
    assert 3.0 == place.component.statistics().counters["refused_priorities"]


def test_without_priorities_of_the_learner_those_of_an_earlier_draw_are_not_used() -> None:
    place = Place()
    place.store(0)
    place.draws.views(0)["priority"][:] = 9.0
    place.do(DrawPart(0, 0, 0, DRAWN, -1))
    assert 8.0 == place.do(Prioritise(0, 0, 0, DRAWN))[-1][1]
    assert float(DRAWN) == place.component.statistics().counters["refused_priorities"]


def test_a_request_for_its_holdings_drops_nothing() -> None:
    place = Place()
    place.store(0)
    assert (8, 0) == held(place.do(DropItems("")))


def test_dropping_includes_windows_in_progress() -> None:
    """Completed later, they would hold steps of the previous lineage under a version of the next
    one.
    """
    place = Place()
    place.store(0, version=9)
    place.store(0, version=9, actor=1)
    assert (0, 16) == held(place.do(DropItems("lineage")))
    stored = place.store(1, version=2)
    assert 8 == stored[2]
    assert (8, 16) == held(stored)
    assert 0 < place.do(DrawPart(0, 0, 0, DRAWN, -1))[2]
    views = place.draws.views(0)
    assert views["action"].min() >= 2 * T
    assert {2} == set(views["version"].tolist())
    lost = place.store(3, version=2)  # a trajectory is missing, so the windows in progress end
    assert held(lost)[0] == 8 + lost[2] - (held(lost)[1] - 16)


def test_reported_holdings_are_inserted_minus_removed_items() -> None:
    """The rate limiter counts by this report."""
    place = Place(make_shard(40, max_samples=3))
    came = 0
    for number in range(60):
        came += place.store(number, version=number)[2]
        if number % 3 == 0:
            place.do(DrawPart(number, 0, 0, DRAWN, number - 6))
        if number % 17 == 16:
            place.do(DropItems("lineage"))
        there, went = held(place.said[-1])
        assert came - went == there == len(place.shard)


def test_its_counters_are_reported() -> None:
    place = Place()
    place.store(0)
    place.do(DrawPart(0, 0, 0, DRAWN, -1))
    place.do(Prioritise(0, 0, 0, DRAWN))
    told = place.component.statistics()
    assert ("replay-0", "replay", 7) == (told.name, told.role, told.generation)
    assert (8.0, 8.0) == (told.counters["inserted_items"], told.counters["drawn_items"])
    assert 8.0 == told.gauges["items"]
    assert {"insert_seconds", "draw_seconds", "prioritise_seconds"} == set(told.distributions)


def test_its_items_can_be_saved_and_a_path_that_cannot_be_written_is_reported(
    tmp_path: Path,
) -> None:
    place = Place()
    place.store(0)
    name, file, _ = place.do(SaveItems(str(tmp_path / "replay-0.safetensors")))
    assert ("ItemsSaved", 64) == (name, len(file.sha256))
    assert (tmp_path / "replay-0.safetensors").stat().st_size == file.nbytes
    assert ("ItemsSaved", None) == place.do(
        SaveItems(str(tmp_path / "nowhere" / "replay-0.safetensors"))
    )[:2]


@pytest.mark.asyncio
async def test_it_answers_requests_in_order_until_it_is_cancelled() -> None:
    started, answered = asyncio.Event(), asyncio.Event()
    said: list[tuple[Any, ...]] = []

    def answer(message: Any) -> None:
        said.append(words(message))
        if len(said) == 2:
            answered.set()

    place = Place(answer=answer)
    place.component._compute = compute = Compute(name="compute", on_orphan=lambda _: None)
    task = asyncio.create_task(place.component.run(started.set))
    await started.wait()
    write(place.slots.views(0), number=0)
    place.end.ask(StoreTrajectory(3, 0, T))
    place.end.ask(DropItems(""))
    async with asyncio.timeout(5.0):
        await answered.wait()
    assert ["Stored", "Dropped"] == [answer[0] for answer in said]
    assert (8, 0) == held(said[1])
    await asyncio.sleep(0)
    assert "waiting:request" == place.component.statistics().time.current
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    compute.close()


@pytest.mark.asyncio
async def test_priorities_and_the_next_draw_share_one_turn_of_the_thread_and_each_trajectory_has_its_own() -> (
    None
):
    started, answered = asyncio.Event(), asyncio.Event()
    said: list[tuple[Any, ...]] = []

    def answer(message: Any) -> None:
        said.append(words(message))
        if len(said) == 4:
            answered.set()

    place = Place(answer=answer)
    place.component._compute = compute = Compute(name="compute", on_orphan=lambda _: None)
    turns: list[list[ShardRequest]] = []
    work = place.component._do_all
    place.component._do_all = lambda requests: (turns.append(list(requests)), work(requests))[1]  # type: ignore[method-assign]
    place.store(0)
    said.clear()
    task = asyncio.create_task(place.component.run(started.set))
    await started.wait()
    write(place.slots.views(1), number=1)
    store, back, draw = (
        StoreTrajectory(4, 1, T),
        Prioritise(0, 0, 0, DRAWN),
        DrawPart(1, 1, 0, DRAWN, 0),
    )
    for request in (store, back, draw, DropItems("")):
        place.end.ask(request)
    async with asyncio.timeout(5.0):
        await answered.wait()
    assert ["Prioritised", "Drawn", "Stored", "Dropped"] == [answer[0] for answer in said]
    assert [[back, draw], [store], [DropItems("")]] == turns
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    compute.close()


# Several shards draw like one


class Several:
    """An exchange over K real shards that answer at once. The action of its first step identifies
    an item.
    """

    def __init__(self, count: int, *, alpha: float | None = ALPHA, seed: int = 1) -> None:
        self.arenas = heap_arena(LAYOUT, 4), heap_arena(DRAWS, DRAW_SLOTS)
        ledger = Ledger(limits=Limits(batch=1, max_staleness=None, credits=4), slots=4)
        self.exchange = ReplayExchange(
            ledger=ledger,
            arena=self.arenas[0],
            draws=self.arenas[1],
            slots=DRAW_SLOTS,
            limiter=Limiter(limits=RateLimits(1.0, 1, -np.inf, np.inf, 1000, 100, DRAWN)),
            period=1,
            prioritised=False,
            schedule=lambda updates: (0, BETA),
            seed=seed,
            shards=count,
        )
        self.version = Version(1, 0)
        self.exchange.open_lineage(self.version)
        self.places = []
        for index in range(count):
            place = Place(
                make_shard(200, alpha=alpha),
                seed=seed + index,
                answer=partial(self.exchange.shard_answered, index, 0),
                slots=self.arenas,
            )
            self.places.append(place)
            self.exchange.shard_opened(index, 0, place.end)
        self.work()

    def work(self) -> None:
        idle = 0
        while idle < len(self.places):
            idle = 0
            for place in self.places:
                try:
                    place.component._do(place.end.receive_nowait())()
                except WouldBlock:
                    idle += 1

    def fill(self, trajectories: int) -> None:
        """Actor i uses shard i; every actor has its own actions."""
        actors = 4
        for number in range(trajectories):
            for actor in range(actors):
                self.exchange.request_grant(
                    f"actor-{actor}", lambda grant, a=actor, n=number: self.made(grant, a, n)
                )  # type: ignore[misc]
                self.work()

    def made(self, grant: Any, actor: int, number: int) -> None:
        write(
            self.arenas[0].views(grant.slot),
            number=number,
            actor=actor,
            first=1000 * actor + T * number,
        )
        self.exchange.begin(grant.ticket, grant.version)
        self.exchange.commit(Trajectory(grant.ticket, grant.slot, T, T * N, grant.version))

    def prioritise(
        self, priority: Callable[[NDArray[np.int64]], NDArray[np.float64]]
    ) -> dict[int, float]:
        """Set the priority of every item by its first action. Returns p^alpha of each."""
        masses: dict[int, float] = {}
        for place in self.places:
            shard, out = place.shard, place.shard.make_batch(4000)
            drawn = shard.draw(4000, np.random.default_rng(0), out)
            known = dict(zip(drawn.keys.tolist(), out["action"][0].tolist(), strict=True))
            assert len(shard) == len(known)
            keys, names = np.array(list(known)), np.array(list(known.values()))
            shard.update_priorities(keys, priority(names))
            masses |= dict(zip(names.tolist(), (priority(names) ** ALPHA).tolist(), strict=True))
            place.end.ask(DropItems(""))
        self.work()
        return masses

    def draw(self) -> tuple[list[int], NDArray[np.float32]]:
        """First actions and weights of one draw, which is settled."""
        batches: list[Batch | None] = []
        self.exchange.request_batch(self.version, batches.append)
        self.work()
        (batch,) = batches
        assert batch is not None
        (draw,) = batch.trajectories
        views = self.arenas[1].views(draw.slot)
        found = views["action"][0].tolist(), views["weight"].copy()
        self.version = Version(1, self.version.number + 1)
        self.exchange.settle(Settlement(self.version, (draw.ticket,), None, True))
        return found


def uneven(names: NDArray[np.int64]) -> NDArray[np.float64]:
    """Priorities with large differences within and between shards."""
    return np.asarray(0.05 + (names % 7) ** 2 + 5.0 * (names // 2000), np.float64)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_frequencies_and_weights_do_not_depend_on_the_number_of_shards(count: int) -> None:
    """PER's probabilities by brute force, and a chi-square test over thousands of drawn items."""
    several = Several(count)
    several.fill(2)
    masses = several.prioritise(uneven)
    items, whole = len(masses), sum(masses.values())
    assert 4 * (2 * T - 1) * N == items
    seen, draws = dict.fromkeys(masses, 0), 250 * FACTOR
    for _ in range(draws):
        names, weights = several.draw()
        chances = np.array([masses[name] for name in names]) / whole
        np.testing.assert_allclose(
            importance_weights(chances, count=items, beta=BETA), weights, rtol=1e-5
        )
        by_hand = (items * chances) ** -BETA
        np.testing.assert_allclose(by_hand / by_hand.max(), weights, rtol=1e-5)
        for name in names:
            seen[name] += 1
    expected = {name: draws * DRAWN * mass / whole for name, mass in masses.items()}
    square = sum((seen[name] - expected[name]) ** 2 / expected[name] for name in masses)
    freedom = items - 1
    assert square < freedom + 4.5 * np.sqrt(2.0 * freedom)


@pytest.mark.parametrize("count", [1, 4])
def test_uniform_draws_have_weight_one_over_any_number_of_shards(count: int) -> None:
    several = Several(count, alpha=None)
    several.fill(3)
    seen: dict[int, int] = {}
    draws = 150 * FACTOR
    for _ in range(draws):
        names, weights = several.draw()
        np.testing.assert_allclose(1.0, weights, rtol=1e-6)
        for name in names:
            seen[name] = seen.get(name, 0) + 1
    items = 4 * (3 * T - 1) * N
    expected = draws * DRAWN / items
    assert items == len(seen)
    assert sum((n - expected) ** 2 / expected for n in seen.values()) < items - 1 + 4.5 * np.sqrt(
        2.0 * items
    )


def test_items_without_mass_are_equally_probable() -> None:
    several = Several(4)
    several.fill(1)
    several.prioritise(lambda names: np.zeros(len(names)))
    _, weights = several.draw()
    np.testing.assert_allclose(1.0, weights, rtol=1e-6)
