"""Draws: the draws of a `tianflow.exchange.replay_exchange.ReplayExchange`, from their beginning
until their slots are free again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tianflow.core.payloads import Batch, DrawPart, Prioritise, Trajectory, Version
from tianflow.exchange.shards import ShardRecord, Shards
from tianflow.replay.sharding import importance_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tianflow.channels.arena import Arena

DrawState = Literal["drawing", "ready", "held", "returning"]
"""Shards write; it waits for the learner; the learner has it; shards read priorities."""


@dataclass(slots=True)
class DrawRecord:
    """One draw."""

    slot: int
    for_version: Version
    shares: dict[int, float]
    """Shard -> probability of drawing from it."""
    waiting_for: set[int]
    """Shards that have not answered yet."""
    parts: dict[int, tuple[ShardRecord, int, int]]
    """Shard -> (incarnation that writes it, first column, count): keys are valid for it only."""
    state: DrawState = "drawing"
    void: str = ""
    """Reason why the draw will not be trained on, or "". Its slot is free once no shard writes into
    it.
    """


class Draws(Mapping[int, DrawRecord]):
    """The draws in progress, by number. Each has a slot.

    Args:
        arena: laid out by `tianflow.core.layout.make_draw_layout`.
        slots: number of draw slots.
        shards: that are drawn from.
        prioritised: whether the learner returns priorities.
        schedule: environment steps so far, and exponent of importance weights, for the draw after
            a number of updates.
        seed: of the choice of shards.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        slots: int,
        shards: Shards,
        prioritised: bool,
        schedule: Callable[[int], tuple[int, float]],
        seed: int,
    ) -> None:
        self._arena, self._shards, self._prioritised = arena, shards, prioritised
        self._schedule = schedule
        self.draw_size, self._length = arena.layout.num_envs, arena.layout.steps
        """Items of each draw."""
        self.free_slots = list(range(slots))
        """Slots without a draw."""
        self.begun = 0
        """Number of draws so far."""
        self.trained = 0
        """Number of draws that were trained on."""
        self.discarded: Counter[str] = Counter()
        """Number of draws that were not trained on, by reason."""
        self._generator = np.random.default_rng(seed)
        self._draws: dict[int, DrawRecord] = {}

    def __getitem__(self, number: int) -> DrawRecord:
        return self._draws[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._draws)

    def __len__(self) -> int:
        return len(self._draws)

    @property
    def held(self) -> int:
        """Number of draws that are neither trained on nor discarded yet."""
        return sum(draw.state != "returning" for draw in self.values())

    @property
    def in_progress(self) -> bool:
        """True while a draw is written, or waits for the learner."""
        return any(
            draw.state == "ready" or (draw.state == "drawing" and not draw.void)
            for draw in self.values()
        )

    def views(self, number: int) -> Mapping[str, NDArray[Any]]:
        """The arrays of a draw."""
        return self._arena.views(self[number].slot)

    def begin(self, for_version: Version, shares: dict[int, float], *, oldest: int) -> None:
        """Request a part from each shard, with a random count by its share; no item is older than
        version number ``oldest``.
        """
        counts = dict(
            zip(
                shares,
                self._generator.multinomial(self.draw_size, list(shares.values())).tolist(),
                strict=True,
            )
        )
        number, slot, first = self.begun, self.free_slots.pop(), 0
        self.begun += 1
        draw = self._draws[number] = DrawRecord(slot, for_version, shares, set(), {})
        for index, count in counts.items():
            if count:
                draw.parts[index] = (self._shards[index], first, count)
                draw.waiting_for.add(index)
                first += count
        for shard, start, count in list(draw.parts.values()):
            shard.port.ask(DrawPart(number, slot, start, count, oldest))

    def written(self, number: int, index: int, *, void: str = "") -> bool:
        """A shard has written its part, or cannot for the reason ``void``. True if the draw is
        complete now.
        """
        draw = self.get(number)
        if draw is None or draw.state != "drawing" or index not in draw.waiting_for:
            return False
        draw.void = draw.void or void
        return self._part_done(number, index)

    def returned(self, number: int, index: int) -> None:
        """A shard has applied the priorities of its part."""
        draw = self.get(number)
        if draw is not None and draw.state == "returning" and index in draw.waiting_for:
            self._part_done(number, index)

    def shard_lost(self, index: int, reason: str) -> None:
        """A shard is gone and answers no more."""
        for number, draw in list(self.items()):
            if index in draw.waiting_for:
                if draw.state == "drawing":
                    draw.void = draw.void or reason
                self._part_done(number, index)

    def hand_over(self, number: int) -> Batch:
        """A complete draw, as the learner gets it: a batch of one trajectory whose columns are the
        items.
        """
        draw, views = self[number], self.views(number)
        probability = views["probability"].copy()
        for index, (_, first, count) in draw.parts.items():
            probability[first : first + count] *= draw.shares[index]
        steps, beta = self._schedule(draw.for_version.number)
        views["weight"][:] = importance_weights(
            probability, count=max(1, self._shards.size), beta=beta
        )
        draw.state = "held"
        oldest = Version(draw.for_version.lineage, int(views["version"].min()))
        trajectory = Trajectory(number, draw.slot, self._length, self.draw_size, oldest)
        return Batch(draw.for_version, (trajectory,), steps, beta)

    def settle(self, number: int, *, skipped: bool) -> None:
        """The learner has trained on a draw, or skipped the update. Its priorities lie in the slot,
        and go to the incarnations that drew.
        """
        self.trained += 1
        draw = self[number]
        parts = {
            index: part for index, part in draw.parts.items() if self._shards.get(index) is part[0]
        }
        if not self._prioritised or skipped or not parts:
            self._free(number)
            return
        draw.state, draw.waiting_for = "returning", set(parts)
        for shard, first, count in parts.values():
            shard.port.ask(Prioritise(number, draw.slot, first, count))

    def discard(self, number: int, reason: str) -> None:
        """A draw is not trained on: its slot is free, or will be once no shard writes into it."""
        draw = self[number]
        if draw.waiting_for:
            draw.void = draw.void or reason
            return
        self.discarded[reason] += 1
        self._free(number)

    def discard_all(self, states: Collection[DrawState], reason: str) -> int:
        """`discard` every draw in one of ``states``. Their number."""
        found = [number for number, draw in self.items() if draw.state in states]
        for number in found:
            self.discard(number, reason)
        return len(found)

    def _part_done(self, number: int, index: int) -> bool:
        """True if all of a draw is written, and it may be trained on."""
        draw = self[number]
        draw.waiting_for.discard(index)
        if draw.waiting_for:
            return False
        if draw.state == "drawing" and not draw.void:
            return True
        if draw.state == "drawing":
            self.discarded[draw.void] += 1
        self._free(number)
        return False

    def _free(self, number: int) -> None:
        self.free_slots.append(self._draws.pop(number).slot)
