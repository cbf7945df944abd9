"""Limits: validated settings of the replay rate limiter and of the ledger.

Constructors refuse values with which a component would wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Settings of the replay rate limiter, in items and draws.

    ``diff`` is inserts * samples_per_insert - draws. The limiter holds it within a band.

    Raises:
        ValueError: one side would wait for ever; the message names it.
    """

    samples_per_insert: float
    min_size: int
    """Items in the table before the first draw."""
    min_diff: float
    max_diff: float
    """Bounds of ``diff``, both inclusive, once the table holds ``min_size`` items."""
    capacity: int
    """Capacity of all shards together, in items."""
    insert_size: int = 1
    """Largest number of items in one insert."""
    draw_size: int = 1
    """Largest number of items in one draw."""

    def __post_init__(self) -> None:
        spi, span = self.samples_per_insert, self.max_diff - self.min_diff
        if not spi > 0.0:
            raise ValueError(
                f"samples_per_insert = {spi}: no insert would ever permit a draw, and the learner "
                "would wait for ever; accepted: more than 0"
            )
        if self.min_size < 1 or self.insert_size < 1 or self.draw_size < 1:
            raise ValueError(
                f"min_size = {self.min_size}, insert_size = {self.insert_size}, draw_size = "
                f"{self.draw_size}: each must be at least 1"
            )
        if self.capacity < self.min_size:
            raise ValueError(
                f"capacity = {self.capacity} is below min_size = {self.min_size}: the table can "
                "never hold min_size items, and the learner would wait for ever"
            )
        if self.min_diff > spi * self.min_size:
            raise ValueError(
                f"min_diff = {self.min_diff} is above samples_per_insert x min_size = "
                f"{spi * self.min_size}: the first draw stays forbidden at min_size items while "
                "inserts may already be blocked, and the learner would wait for ever"
            )
        least = max(2.0 * max(1.0, spi), spi * self.insert_size + self.draw_size)
        if not span >= least:
            raise ValueError(
                f"the band {self.min_diff} .. {self.max_diff} is {span} wide: inserts of "
                f"{self.insert_size} and draws of {self.draw_size} need at least {least}; in a "
                "narrower band actors and learner would wait for each other for ever"
            )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings about settings that work, but possibly not as intended."""
        if self.max_diff < self.samples_per_insert * self.min_size:
            filled = self.samples_per_insert * self.min_size
            remark = (
                f"max_diff = {self.max_diff} is below samples_per_insert x min_size = {filled}: "
                "filling the table up to min_size overshoots the band, and actors then wait "
                "until the learner has drawn"
            )
            return (remark,)
        return ()

    @classmethod
    def around(
        cls,
        *,
        samples_per_insert: float,
        min_size: int,
        error_buffer: float,
        capacity: int,
        insert_size: int = 1,
        draw_size: int = 1,
    ) -> RateLimits:
        """Limits with a band of ``error_buffer`` draws on both sides of ``samples_per_insert *
        min_size``.

        Raises:
            ValueError: as the constructor.
        """
        middle = samples_per_insert * min_size
        return cls(
            samples_per_insert,
            min_size,
            middle - error_buffer,
            middle + error_buffer,
            capacity,
            insert_size,
            draw_size,
        )


Order = Literal["version", "arrival"]


Admission = Literal["paced", "open"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the ledger.

    ``credits`` is the target of the controllers. `Ledger.credits_limit` is the value in force.
    """

    batch: int
    max_staleness: int | None
    credits: int
    patience: float | None = 10.0
    """Seconds to wait for a ticket that blocks a batch; None: without limit."""
    order: Order = "version"
    admission: Admission = "paced"
    """``open``: credits may exceed what the bound can use; trajectories that exceed it expire."""
    late_share: float = 1.0
    """Largest share of time that late tickets of other machines cost other holders; 1: no limit."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch}: an update needs at least one trajectory")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(
                f"max_staleness = {self.max_staleness}: a sample cannot be newer than the policy "
                "that trains on it"
            )
        if self.credits < self.batch:
            raise ValueError(
                f"credits = {self.credits} with {self.batch} trajectories per update: fewer "
                "credits than one batch can never feed the learner"
            )
