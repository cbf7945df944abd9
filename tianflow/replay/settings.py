"""Settings and statistics of a shard."""

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
    """Contents and sizes of a shard.

    Raises:
        ValueError: no item could ever be drawn, or ``stacks`` names an unknown leaf.
    """

    observation: tuple[LeafSpec, ...]
    action: tuple[tuple[int, ...], str]
    """Shape and dtype of one stored action."""
    capacity: int
    """Stored observations.

    Every step needs one. So do the last observation of a truncated episode, and the observation
    after the newest step of each environment.
    """
    length: int
    """Steps of an item: n of n-step transitions, or the length of sequences."""
    period: int = 1
    """Steps from the beginning of one item to the beginning of the next: ``length`` minus the
    overlap.
    """
    stacks: frozenset[str] = frozenset()
    """Leaves whose first axis is a stack of frames; see `observations.find_stacks`."""
    frames_per_row: float = 1.1
    """Capacity for frames of stacked leaves, per observation. The excess over 1 covers beginnings
    of episodes.
    """
    items: int | None = None
    """Capacity in items; None: one per half ``period``."""
    state: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and shape of each leaf of the float32 recurrent state stored with an item."""
    mask_size: int = 0
    """Booleans of an action mask; 0: no masks."""
    extras: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    """Name, shape and dtype of further step columns, e.g. ``log_prob``."""
    max_samples: int | None = None
    """Draws after which an item is removed; None: without limit."""
    ends_only: bool = False
    """Whether a draw has only the first and the last observation (and mask) of an item."""

    def __post_init__(self) -> None:
        if not 1 <= self.length <= self.capacity:
            raise ValueError(
                f"length = {self.length} with capacity = {self.capacity}: no item would ever be "
                "complete; accepted: 1 to the capacity"
            )
        if self.period < 1:
            raise ValueError(f"period = {self.period}: items begin at least one step apart")
        if self.items is not None and self.items < 1:
            raise ValueError(f"items = {self.items}: no item would ever fit; accepted: 1 or more")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(
                f"max_samples = {self.max_samples}: no item could ever be drawn; accepted: 1 or "
                "more, or None"
            )
        unknown = self.stacks - {leaf.name for leaf in self.observation}
        if unknown:
            raise ValueError(
                f"stacks {sorted(unknown)} are not leaves of the observation; accepted: "
                f"{[leaf.name for leaf in self.observation]}"
            )

    @property
    def observations_drawn(self) -> int:
        """Observations of an item in a draw."""
        return 2 if self.ends_only else self.length + 1

    @property
    def item_capacity(self) -> int:
        """Capacity in items."""
        return self.items or min(self.capacity, 2 * self.capacity // self.period + 1)


@dataclass(frozen=True, slots=True)
class Inserted:
    """Result of an insert: new steps, items that became ready, and items that were removed."""

    steps: int
    items: int
    removed_items: int


@dataclass(frozen=True, slots=True)
class DrawnItems:
    """Result of a draw of n items. Probabilities are relative to this shard.

    ``mass`` and ``count`` are those of the shard just before the draw.
    """

    keys: Indices
    """[n] int64 item numbers, for `Shard.update_priorities`; numbers are never reused."""
    probability: Floats
    """[n] float64"""
    mass: float
    count: int


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of steps or items: ``inserted == resident + sum(removed.values())``.

    ``removed_unsampled`` of the removed ones were never drawn.
    """

    inserted: int
    resident: int
    removed: Mapping[Reason, int]
    removed_unsampled: int


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """State of a shard at one moment."""

    steps: Tally
    """A step is resident while its row exists and an item, complete or not, needs it."""
    items: Tally
    mass: float
    stale_updates: int
    """Priorities for items that were already removed."""
    breaks: int
    """Environments whose stream did not continue where it had ended."""
    unknown_states: int
    """Items without a known recurrent state; they begin with zeros."""
    nbytes: int
    """Memory of columns, frames and items; constant."""
