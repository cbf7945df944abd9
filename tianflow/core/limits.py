"""TODO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The settings that a limiter obeys. ``samples_per_insert`` is draws per inserted item, the
    band is in draws.

    Raises:
        ValueError: if one side would block for ever; the message says which.
    """

    samples_per_insert: float
    min_size: int
    """Items that must be there before anything is drawn."""
    min_diff: float
    max_diff: float
    """``diff`` stays between the two, both inclusive, once ``min_size`` items are there."""
    capacity: int
    """Items that all shards together can hold."""
    insert_size: int = 1
    """The most items that one insert brings."""
    draw_size: int = 1
    """The most items that one draw takes."""

    def __post_init__(self) -> None:
        spi, span = self.samples_per_insert, self.max_diff - self.min_diff
        if not spi > 0.0:
            raise ValueError(
                f"samples_per_insert = {spi}: no insert would ever permit a draw, so the learner "
                "would wait for ever"
            )
        if self.min_size < 1 or self.insert_size < 1 or self.draw_size < 1:
            raise ValueError(
                f"min_size = {self.min_size}, insert_size = {self.insert_size}, draw_size = "
                f"{self.draw_size}: at least 1 each"
            )
        if self.capacity < self.min_size:
            raise ValueError(
                f"capacity = {self.capacity} is below min_size = {self.min_size}: so many items "
                "are never there at once, "
                "so the learner would wait for ever"
            )
        if self.min_diff > spi * self.min_size:
            raise ValueError(
                f"min_diff = {self.min_diff} is above samples_per_insert x min_size = "
                f"{spi * self.min_size}: with min_size items "
                "there the first draw is still forbidden, and inserting may have stopped: the "
                "learner would wait for ever"
            )
        least = max(2.0 * max(1.0, spi), spi * self.insert_size + self.draw_size)
        if not span >= least:
            raise ValueError(
                f"the band {self.min_diff} .. {self.max_diff} is {span} wide, but inserts of "
                f"{self.insert_size} and draws of "
                f"{self.draw_size} need {least}: in a narrower one actors and learner would both "
                "wait for ever, each for the other"
            )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What works, but perhaps not as meant."""
        if self.max_diff < self.samples_per_insert * self.min_size:
            filled = self.samples_per_insert * self.min_size
            remark = (
                f"max_diff = {self.max_diff} is below samples_per_insert x min_size = "
                f"{filled}: filling up to min_size "
            )
            return (
                remark + "overshoots the band, and actors then wait until the learner has drawn",
            )
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
        """A band of ``error_buffer`` draws to either side of ``samples_per_insert * min_size``.
        Raises as the constructor.
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
    """The settings that the ledger obeys. ``credits`` is the controller's target;
    `Ledger.credits_limit` is what is in force.
    """

    batch: int
    max_staleness: int | None
    credits: int
    patience: float | None = 10.0
    """Seconds a ticket that stands in the way is waited for; None: without limit."""
    order: Order = "version"
    admission: Admission = "paced"
    """open: credits are not held below what the bound can use, so what was begun in vain expires.
    """

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch}: an update needs at least one trajectory")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(
                f"max_staleness = {self.max_staleness}: no sample can be younger than the policy "
                "that trains on it"
            )
        if self.credits < self.batch:
            raise ValueError(
                f"credits = {self.credits} with {self.batch} trajectories per update: fewer "
                "credits than a batch can never feed the learner"
            )
