"""What a shard is told, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tianflow.core.payloads import LeafSpec
from tianflow.replay.sum_tree import Floats, Indices

Reason = Literal["capacity", "age", "max_samples"]
REASONS: tuple[Reason, ...] = ("capacity", "age", "max_samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """What a shard keeps, and how.

    Raises:
        ValueError: if no item could ever be drawn, or a stack is no leaf.
    """

    observation: tuple[LeafSpec, ...]
    action: tuple[tuple[int, ...], str]
    """Shape and dtype of one stored action."""
    capacity: int
    """Stored observations. Every step needs one, and so do the last observation of an episode that
    was cut off and the one that follows the newest step of each environment."""
    length: int
    """Steps of an item: the n of n-step transitions, the length of sequences."""
    period: int = 1
    """Steps from the beginning of one item to that of the next: ``length`` less the overlap."""
    stacks: frozenset[str] = frozenset()
    """Leaves whose first axis is a stack of frames; see `observations.find_stacks`."""
    frames_per_row: float = 1.1
    """Memory for frames of stacked leaves: one for each observation, and what the beginnings of
    episodes cost.
    """
    items: int | None = None
    """How many items there is memory for; None: one for every half ``period``."""
    state: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and shape of each leaf of the recurrent state that is kept with an item, float32."""
    mask_size: int = 0
    """Booleans of an action mask; 0: there are none."""
    extras: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    """Name, shape and dtype of further columns of steps, e.g. ``log_prob``."""
    max_samples: int | None = None
    """Draws after which an item goes; None: without limit."""

    def __post_init__(self) -> None:
        if not 1 <= self.length <= self.capacity:
            raise ValueError(
                f"length = {self.length} with capacity = {self.capacity}: no item would ever be "
                "complete"
            )
        if self.period < 1:
            raise ValueError(f"period = {self.period}: items begin at least one step apart")
        if self.items is not None and self.items < 1:
            raise ValueError(f"items = {self.items}: no item would ever fit")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples = {self.max_samples}: no item could ever be drawn")
        unknown = self.stacks - {leaf.name for leaf in self.observation}
        if unknown:
            raise ValueError(
                f"stacks {sorted(unknown)} are no leaves; leaves are "
                f"{[leaf.name for leaf in self.observation]}"
            )

    @property
    def item_capacity(self) -> int:
        """Items that there is memory for."""
        return self.items or min(self.capacity, 2 * self.capacity // self.period + 1)


@dataclass(frozen=True, slots=True)
class Inserted:
    """What an insert did: new steps, items that can be drawn from now on, and items that had
    to go.
    """

    steps: int
    items: int
    removed_items: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a draw of n took. The probabilities are within this shard; mass and count are the
    shard's just before.
    """

    keys: Indices
    """[n] int64, for `Shard.update_priorities`: the number of an item, never used again."""
    probability: Floats
    """[n] float64"""
    mass: float
    count: int


@dataclass(frozen=True, slots=True)
class Tally:
    """``inserted == resident + sum(removed.values())``, of steps or of items; ``removed_unsampled``
    of the removed were never drawn.
    """

    inserted: int
    resident: int
    removed: Mapping[Reason, int]
    removed_unsampled: int


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """One consistent look at a shard."""

    steps: Tally
    """A step is resident while its row is there and some item, complete or in the making, needs it.
    """
    items: Tally
    mass: float
    stale_updates: int
    """Priorities that came back after their item had gone."""
    breaks: int
    """Environments whose stream did not go on where it had ended."""
    unknown_states: int
    """Items whose recurrent state nobody gave: they begin with zeros."""
    nbytes: int
    """All memory of columns, frames and items; it never grows."""
