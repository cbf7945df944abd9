"""Codecs of Gymnasium spaces: observations as named leaves, actions as one array."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec, SourceLeaf
from tianflow.errors import ConfigError, Problem

Array = NDArray[Any]
Arrays = Mapping[str, Array]

OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them"
ACTIONS = "Discrete, MultiDiscrete, MultiBinary or a Box of floats"


class UnexpectedShapeError(ValueError):
    """An environment returned an array whose shape differs from its space."""


def _refusal(space: object, name: str, what: str, accepted: str) -> ConfigError:
    place = f"sub-space {name!r} of the {what} space" if name else f"{what} space"
    return ConfigError(
        [
            Problem(
                "env.id",
                repr(space),
                f"the {place} cannot be stored in arrays of a fixed shape",
                accepted,
            )
        ]
    )


def _leaves(
    space: Any, name: str, path: tuple[Any, ...]
) -> Iterator[tuple[LeafSpec, tuple[Any, ...], Array | None, str]]:
    """Every leaf of ``space``, in order of its keys: (specification, keys, start, own dtype).

    ``start`` is subtracted from the values; None: nothing.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from _leaves(part, f"{name}/{key}" if name else str(key), (*path, key))
    elif isinstance(space, spaces.Discrete):
        yield (
            LeafSpec(name, (), "int64", (int(space.n),)),
            path,
            np.asarray(space.start) if space.start else None,
            str(space.dtype),
        )
    elif isinstance(space, spaces.MultiDiscrete):
        categories = tuple(int(n) for n in space.nvec.ravel())
        yield (
            LeafSpec(name, space.nvec.shape, "int64", categories),
            path,
            space.start if np.any(space.start) else None,
            str(space.dtype),
        )
    elif isinstance(space, spaces.MultiBinary):
        yield LeafSpec(name, space.shape, "int8"), path, None, str(space.dtype)
    elif isinstance(space, spaces.Box) and 0 not in space.shape:
        yield (
            LeafSpec(
                name, space.shape, "float32" if space.dtype == np.float64 else str(space.dtype)
            ),
            path,
            None,
            str(space.dtype),
        )
    else:
        raise _refusal(space, name, "observation", OBSERVATIONS)


def _getter(path: tuple[Any, ...]) -> Callable[[Any], Any] | None:
    """A function that follows ``path`` in a nested observation; None for the observation itself."""
    if not path:
        return None
    if len(path) == 1:
        return operator.itemgetter(path[0])

    def follow(observation: Any) -> Any:
        for key in path:
            observation = observation[key]
        return observation

    return follow


def _follower(keys: tuple[str, ...]) -> Callable[[Any], Any] | None:
    """As `_getter`, with keys of a Tuple as text."""
    if not keys:
        return None

    def follow(observation: Any) -> Any:
        for key in keys:
            observation = observation[int(key) if isinstance(observation, tuple | list) else key]
        return observation

    return follow


class RawLeaf(NamedTuple):
    """Form of a leaf in the environment: dtype, and the start that `ObservationCodec` subtracts."""

    dtype: str
    start: Array | None


class ObservationCodec:
    """Copies observations of one space to arrays, leaf by leaf.

    Shapes and dtypes are preserved (uint8 stays uint8). One exception: float64 is stored as
    float32, the precision of networks, in half the memory. Discrete and MultiDiscrete are stored
    zero-based as int64. Leaves are named by their path ("camera", "arm/joints", "0"; "" for a plain
    space), in the order of the space.

    Raises:
        ConfigError: names a sub-space without a fixed shape (Sequence, Text, Graph, OneOf, ...).
    """

    def __init__(self, space: Any) -> None:
        found = list(_leaves(space, "", ()))
        self.leaves: tuple[LeafSpec, ...] = tuple(leaf for leaf, *_ in found)
        if not found or len({leaf.name for leaf in self.leaves}) < len(found):
            raise _refusal(
                space, "", "observation", "at least one leaf, and keys whose joined paths differ"
            )
        self.raw: Mapping[str, RawLeaf] = {
            leaf.name: RawLeaf(dtype, start) for leaf, _, start, dtype in found
        }
        self._steps = tuple((leaf.name, _getter(path), start) for leaf, path, start, _ in found)
        self.source = tuple(
            SourceLeaf(
                tuple(map(str, path)),
                dtype,
                () if start is None else tuple(int(value) for value in np.ravel(start)),
            )
            for _, path, start, dtype in found
        )
        """The same for a process without the environment."""

    @classmethod
    def from_spec(cls, spec: EnvironmentSpec) -> ObservationCodec:
        """The codec of an environment that does not exist here. ``spec.source`` must be known."""
        self = cls.__new__(cls)
        self.leaves, self.source = spec.returned, spec.source
        starts = {
            leaf.name: np.array(source.start, np.int64).reshape(leaf.shape)
            if source.start
            else None
            for leaf, source in zip(spec.returned, spec.source, strict=True)
        }
        self.raw = {
            leaf.name: RawLeaf(source.dtype, starts[leaf.name])
            for leaf, source in zip(spec.returned, spec.source, strict=True)
        }
        self._steps = tuple(
            (leaf.name, _follower(source.keys), starts[leaf.name])
            for leaf, source in zip(spec.returned, spec.source, strict=True)
        )
        return self

    def encode(self, observation: Any, destinations: Arrays) -> None:
        """Copy a batched observation ({or tuples of} [N, *leaf]) to ``destinations`` {leaf: [N,
        *leaf]}.

        Raises:
            UnexpectedShapeError: a part of it is not [N, *leaf].
        """
        for name, get, start in self._steps:
            source, destination = (
                np.asarray(observation if get is None else get(observation)),
                destinations[name],
            )
            if source.shape != destination.shape:
                raise UnexpectedShapeError(
                    f"observation {name!r} has shape {source.shape} instead of {destination.shape}"
                )
            if start is None:
                destination[...] = source
            else:
                np.subtract(source, start, out=destination, casting="unsafe")

    def encode_where(
        self, observation: Any, where: NDArray[np.bool_], destinations: Arrays
    ) -> None:
        """Copy only the environments ``where`` [N] bool. The other rows stay unchanged.

        ``observation`` is batched, as in `encode`, or an object array [N] of single observations.
        Entries outside of ``where`` may be None.
        """
        if isinstance(observation, np.ndarray) and observation.dtype == object:
            for index in np.flatnonzero(where):
                self.encode_single(observation[index], int(index), destinations)
            return
        scratch = {name: np.empty_like(destination) for name, destination in destinations.items()}
        self.encode(observation, scratch)
        for name, destination in destinations.items():
            destination[where] = scratch[name][where]

    def encode_single(self, observation: Any, index: int, destinations: Arrays) -> None:
        """Copy the observation of environment ``index`` to its rows of ``destinations``."""
        for name, get, start in self._steps:
            source, destination = (
                np.asarray(observation if get is None else get(observation)),
                destinations[name],
            )
            if source.shape != destination.shape[1:]:
                raise UnexpectedShapeError(
                    f"observation {name!r} has shape {source.shape} instead of "
                    f"{destination.shape[1:]}"
                )
            destination[index] = source if start is None else source - start


def action_spec(space: Any) -> ActionSpec:
    """The actions of ``space``. MultiBinary is treated as MultiDiscrete with two values each.

    Raises:
        ConfigError: the space is not one array (Dict, Tuple, ...), or a Box of integers.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", (), str(space.dtype), (int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        categories = tuple(int(n) for n in space.nvec.ravel())
        return ActionSpec(
            "multi_discrete",
            space.nvec.shape,
            str(space.dtype),
            categories,
            tuple(int(k) for k in np.ravel(space.start)),
        )
    if isinstance(space, spaces.MultiBinary):
        size = int(np.prod(space.shape))
        return ActionSpec("multi_discrete", space.shape, str(space.dtype), (2,) * size, (0,) * size)
    if (
        isinstance(space, spaces.Box)
        and np.issubdtype(space.dtype, np.floating)
        and 0 not in space.shape
    ):
        low, high = (
            tuple(float(bound) for bound in np.ravel(bounds)) for bounds in (space.low, space.high)
        )
        return ActionSpec("box", space.shape, str(space.dtype), low=low, high=high)
    raise _refusal(space, "", "action", ACTIONS)


def allowed_at_random(
    spec: ActionSpec, mask: NDArray[np.bool_], generator: np.random.Generator
) -> Array:
    """Random stored actions [N, *stored] that ``mask`` [N, mask_size] allows.

    A choice without allowed actions is 0.
    """
    chances = np.where(mask, generator.random(mask.shape), -1.0)
    choices = np.split(chances, np.cumsum(spec.categories)[:-1], axis=1)
    return np.stack([choice.argmax(axis=1) for choice in choices], axis=1).reshape(
        len(mask), *spec.stored_shape
    )


def in_categories(leaf: LeafSpec, array: Array) -> NDArray[np.bool_]:
    """Whether each value of a categorical leaf is in its space; ``array`` [..., *shape],
    zero-based.
    """
    return (array >= 0) & (array < np.reshape(leaf.categories, leaf.shape))


class ActionCodec:
    """Converts stored actions [N, *stored] to the actions of a vector environment's ``step``."""

    def __init__(self, spec: ActionSpec) -> None:
        self.spec = spec
        self._dtype = np.dtype(spec.dtype)
        self._as_stored = (
            spec.kind == "discrete" and spec.start == (0,) and spec.dtype == spec.stored_dtype
        )
        self._start = np.array(spec.start[0] if spec.kind == "discrete" else spec.start, np.int64)
        if spec.kind == "box":
            self._low = np.array(spec.low, self._dtype).reshape(spec.shape)
            self._high = np.array(spec.high, self._dtype).reshape(spec.shape)

    def decode(self, stored: Array) -> Array:
        """A new array [N, *space shape] of the space's dtype: start added, or a Box clipped.

        It is always a copy, because ``stored`` is in a slot, and an environment may store or change
        its actions.
        """
        if self._as_stored:
            return stored.copy()
        if self.spec.kind == "box":
            action = stored.astype(self._dtype)
            np.clip(action, self._low, self._high, out=action)
            return action
        shifted = np.add(stored, self._start).astype(self._dtype, copy=False)
        return (
            shifted.reshape(-1, *self.spec.shape) if self.spec.kind == "multi_discrete" else shifted
        )
