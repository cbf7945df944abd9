"""Several shards of one process as if they were one: a shard by its mass, and an item inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tianflow.errors import WouldBlock
from tianflow.replay.settings import Drawn
from tianflow.replay.sharding import shard_probabilities
from tianflow.replay.sum_tree import Floats, Indices


class DrawnFrom(Protocol):
    """What is drawn from: a `Shard`, or whatever stands for one."""

    @property
    def mass(self) -> float: ...
    @property
    def draws_left(self) -> float: ...
    def __len__(self) -> int: ...
    def draw(
        self, n: int, generator: np.random.Generator, out: Mapping[str, NDArray[Any]]
    ) -> Drawn: ...


@dataclass(frozen=True, slots=True)
class DrawnOverAll:
    """n items from several shards."""

    shard: Indices
    """[n] index of the shard that each is from, ascending."""
    keys: Indices
    """[n] key of each within its shard."""
    probability: Floats
    """[n] with which each was drawn, among all items of all shards."""
    count: int
    """Items of all shards."""


def split(
    n: int, masses: Sequence[float], counts: Sequence[int], generator: np.random.Generator
) -> Indices:
    """How many of n draws come from each of K shards: multinomial, in proportion to mass; by number
    of items if nothing has mass.

    A shard that is lost is simply not among them.

    Raises:
        WouldBlock: there is no item anywhere.
    """
    chances = shard_probabilities(masses, counts)
    if not chances.any():
        raise WouldBlock(f"nothing to draw: {len(chances)} shards hold no item")
    parts = np.zeros(len(chances), np.int64)
    some = (
        chances > 0.0
        # the generator gives what rounding leaves over to the last one, which must not be one
        # without mass
    )
    parts[some] = generator.multinomial(n, chances[some])
    return parts


def draw_over(
    shards: Sequence[DrawnFrom],
    n: int,
    generator: np.random.Generator,
    out: Mapping[str, NDArray[Any]],
) -> DrawnOverAll:
    """Draw n items from ``shards`` as if they were one; those of a shard lie side by side in
    ``out`` (see `Shard.draw`).

    With ``max_samples`` the split is by the masses before the draw, and what a shard has not draws
    enough left for falls to others.

    Raises:
        WouldBlock: fewer than n draws are left in all shards together. Nothing was drawn then.
    """
    masses, counts = [shard.mass for shard in shards], [len(shard) for shard in shards]
    chances = shard_probabilities(masses, counts)
    parts = _affordable(split(n, masses, counts, generator), shards, generator)
    keys, probabilities, end = [], [], 0
    for index, (shard, part) in enumerate(zip(shards, parts.tolist(), strict=True)):
        if part:
            begin, end = end, end + part
            drawn = shard.draw(
                part,
                generator,
                {name: _part(name, array, begin, end) for name, array in out.items()},
            )
            keys.append(drawn.keys)
            probabilities.append(drawn.probability * chances[index])
    return DrawnOverAll(
        np.repeat(np.arange(len(shards)), parts),
        np.concatenate(keys),
        np.concatenate(probabilities),
        sum(counts),
    )


def _affordable(
    parts: Indices, shards: Sequence[DrawnFrom], generator: np.random.Generator
) -> Indices:
    """The same number of draws, but from no shard more than it has left."""
    left = np.array([shard.draws_left for shard in shards])
    if left.sum() < parts.sum():
        raise WouldBlock(
            f"{parts.sum()} items were to be drawn, but {len(shards)} shards have "
            f"{left.sum():.0f} draws left"
        )
    while (parts > left).any():
        excess = int((parts - left).clip(min=0.0).sum())
        parts = np.minimum(parts, left).astype(np.int64)
        others = [
            shard if part < most else None
            for shard, part, most in zip(shards, parts, left, strict=True)
        ]
        masses = [0.0 if shard is None else shard.mass for shard in others]
        counts = [0 if shard is None else len(shard) for shard in others]
        parts = parts + split(excess, masses, counts, generator)
    return parts


def _part(name: str, array: NDArray[Any], begin: int, end: int) -> NDArray[Any]:
    return (
        array[begin:end] if name == "version" or name.startswith("state/") else array[:, begin:end]
    )
