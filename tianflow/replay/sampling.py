"""Several shards as if they were one: a shard by its mass, an item inside it, and weights from the probability over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tianflow.errors import WouldBlock
from tianflow.replay.settings import Drawn
from tianflow.replay.sum_tree import Floats, Indices


class DrawnFrom(Protocol):
    """What is drawn from: a `Shard`, or whatever stands for one."""

    @property
    def mass(self) -> float: ...
    def __len__(self) -> int: ...
    def draw(self, n: int, generator: np.random.Generator, out: Mapping[str, NDArray[Any]]) -> Drawn: ...


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


def split(n: int, masses: Sequence[float], counts: Sequence[int], generator: np.random.Generator) -> Indices:
    """How many of n draws come from each of K shards: multinomial, in proportion to mass; by number of items if nothing has mass.

    A shard that is lost is simply not among them.

    Raises:
        WouldBlock: there is no item anywhere.
    """
    chances = shard_probabilities(masses, counts)
    parts = np.zeros(len(chances), np.int64)
    some = chances > 0.0  # the generator gives what rounding leaves over to the last one, which must not be one without mass
    parts[some] = generator.multinomial(n, chances[some])
    return parts


def shard_probabilities(masses: Sequence[float], counts: Sequence[int]) -> Floats:
    """[K] the probability of each shard; see `split`."""
    weights = np.asarray(masses, np.float64)
    if not weights.sum() > 0.0:
        weights = np.asarray(counts, np.float64)
    if not weights.sum() > 0.0:
        raise WouldBlock(f"nothing to draw: {len(weights)} shards hold no item")
    probabilities: Floats = weights / weights.sum()
    return probabilities


def draw_over(shards: Sequence[DrawnFrom], n: int, generator: np.random.Generator, out: Mapping[str, NDArray[Any]]) -> DrawnOverAll:
    """Draw n items from ``shards`` as if they were one; those of a shard lie side by side in ``out`` (see `Shard.draw`).

    Raises:
        WouldBlock: there is no item anywhere, or a shard with ``max_samples`` has fewer draws left than fell to it.
    """
    masses, counts = [shard.mass for shard in shards], [len(shard) for shard in shards]
    chances = shard_probabilities(masses, counts)
    parts, keys, probabilities, end = split(n, masses, counts, generator), [], [], 0
    for index, (shard, part) in enumerate(zip(shards, parts.tolist(), strict=True)):
        if part:
            begin, end = end, end + part
            drawn = shard.draw(part, generator, {name: _part(name, array, begin, end) for name, array in out.items()})
            keys.append(drawn.keys)
            probabilities.append(drawn.probability * chances[index])
    return DrawnOverAll(np.repeat(np.arange(len(shards)), parts), np.concatenate(keys), np.concatenate(probabilities), sum(counts))


def importance_weights(probability: Floats, *, count: int, beta: float) -> Floats:
    """``w_i = (N P(i))^-beta / max_j w_j`` (PER, arXiv 1511.05952, section 3.4).

    Args:
        probability: [n] of each drawn item among **all** items of all shards.
        count: N, the number of items of all shards.
        beta: 0 .. 1, how much of the bias is taken back.

    Returns:
        [n] float64 in (0, 1]. The maximum is that of these n, not of all items: it differs by a factor common to the batch.
    """
    weights = (count * probability) ** -beta
    scaled: Floats = weights / weights.max()
    return scaled


def _part(name: str, array: NDArray[Any], begin: int, end: int) -> NDArray[Any]:
    return array[begin:end] if name == "version" or name.startswith("state/") else array[:, begin:end]
