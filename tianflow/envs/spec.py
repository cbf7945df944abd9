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

    def encode_given(self, observation: Any, destinations: Arrays) -> None:
        """As `encode_single` for the only environment of ``destinations``, for an observation that
        a caller made.

        Raises:
            ValueError: a part is missing, has another shape or dtype, or is not in its space. The
                message names the part, the expected form and the given one.
        """
        for leaf, source in zip(self.leaves, self.source, strict=True):
            expected = form(source.dtype, leaf.shape)
            name = f"observation {leaf.name!r}" if leaf.name else "observation"
            array = given_array(_part(observation, source.keys, name, expected), name, expected)
            if array.shape != leaf.shape or array.dtype.kind not in _KINDS[source.dtype[0]]:
                raise _unlike(name, expected, form(str(array.dtype), array.shape))
            start = self.raw[leaf.name].start
            _require_in_space(leaf, array, start, source.dtype, name)
            destinations[leaf.name][0] = array if start is None else array - start


_KINDS = {"f": "biuf", "i": "biu", "u": "biu", "b": "b"}
"""Kinds of dtypes that convert to a dtype by its first letter, without loss if the values fit."""


def form(dtype: str, shape: tuple[int, ...]) -> str:
    """An array in words, such as ``float32[4]``."""
    return f"{dtype}{list(shape)}"


def given_array(value: Any, name: str, expected: str) -> Array:
    """``value`` as an array. ValueError with ``name`` if it is not one."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors of a device
        raise _unlike(name, expected, f"a {type(value).__name__} ({error})") from error
    if array.dtype == object:
        raise _unlike(name, expected, f"a value of type {type(value).__name__}")
    return array


def _unlike(name: str, expected: str, given: str) -> ValueError:
    return ValueError(f"{name}: expected {expected}, given {given}")


def _part(observation: Any, keys: tuple[str, ...], name: str, expected: str) -> Any:
    """The part of a nested observation that ``keys`` lead to. ValueError if it is missing."""
    found = observation
    for depth, key in enumerate(keys):
        if isinstance(found, Mapping):
            parts = {str(own): part for own, part in found.items()}
        elif isinstance(found, tuple | list):
            parts = {str(index): part for index, part in enumerate(found)}
        else:
            where = "/".join(keys[:depth])
            place = f"observation {where!r}" if where else "observation"
            raise _unlike(
                place, f"a dict or tuple with {key!r}", f"a value of type {type(found).__name__}"
            )
        if key not in parts:
            there = ", ".join(map(repr, parts)) or "no parts"
            place = f"observation {'/'.join(keys[:depth])!r}" if depth else "the observation"
            advice = "; pass the first of what reset() returns" if _is_reset(found) else ""
            raise ValueError(f"{name} is missing ({expected}): {place} has {there}{advice}")
        found = parts[key]
    return found


def _is_reset(value: Any) -> bool:
    """True for what `reset` of an environment returns: an observation, and a dict."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def _require_in_space(
    leaf: LeafSpec, array: Array, start: Array | None, dtype: str, name: str
) -> None:
    """Raise ValueError for a value that the leaf cannot have: an index beyond its categories, an
    integer that its dtype does not hold, or a number that is not finite, which training drops.
    """
    if array.dtype.kind == "f":
        _require_none(~np.isfinite(array), array, name, "a finite number")
    if leaf.categories:
        lowest: Array = np.zeros(leaf.shape, np.int64) if start is None else start
        highest = lowest + np.reshape(leaf.categories, leaf.shape) - 1
    elif dtype[0] in "iu":
        limits = np.iinfo(dtype)
        lowest, highest = (np.full(leaf.shape, limit) for limit in (limits.min, limits.max))
    else:
        return
    wrong = (array < lowest) | (array > highest)
    for at in np.argwhere(wrong)[:1]:
        place = tuple(int(index) for index in at)
        _require_none(wrong, array, name, f"a value from {lowest[place]} to {highest[place]}")


def _require_none(wrong: NDArray[np.bool_], array: Array, name: str, expected: str) -> None:
    """Raise ValueError for the first value that is ``wrong``."""
    for at in np.argwhere(wrong)[:1]:
        place = tuple(int(index) for index in at)
        where = f"{name}{list(place)}" if place else name
        raise _unlike(where, expected, str(array[place]))


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


def given_mask(spec: ActionSpec, mask: Any) -> NDArray[np.bool_]:
    """[1, mask_size] of a mask that a caller made: an array of any dtype, or a tuple with one array
    per choice.

    Raises:
        ValueError: the actions have no mask, or it has another size. The message names the part,
            the expected form and the given one.
    """
    if not spec.categories:
        raise _unlike("mask", "None, because the actions are continuous", f"{mask!r:.80}")
    one = form("bool", (spec.mask_size,))
    parts = mask if isinstance(mask, tuple | list) else (mask,)
    arrays = [given_array(part, "mask", one) for part in parts]
    if len(arrays) > 1 and any(array.ndim for array in arrays):
        choices = [form("bool", (count,)) for count in spec.categories]
        if len(arrays) != len(choices):
            raise _unlike("mask", f"{len(choices)} arrays, one for each choice", str(len(arrays)))
        for index, (array, choice) in enumerate(zip(arrays, choices, strict=True)):
            _require_mask(array, spec.categories[index], f"mask of choice {index}", choice)
            _require_possible(array, f"mask of choice {index}")
        return np.concatenate([np.ravel(array) for array in arrays]).astype(np.bool_)[None]
    whole = np.concatenate([np.ravel(array) for array in arrays]) if arrays else np.empty(0)
    _require_mask(whole if len(arrays) != 1 else arrays[0], spec.mask_size, "mask", one)
    for part in np.split(whole, np.cumsum(spec.categories)[:-1]):
        _require_possible(part, "mask")
    return whole.astype(np.bool_)[None]


def _require_mask(array: Array, size: int, name: str, expected: str) -> None:
    if array.size != size or array.dtype.kind not in "biuf":
        raise _unlike(name, expected, form(str(array.dtype), array.shape))


def _require_possible(array: Array, name: str) -> None:
    if not np.any(array):
        raise _unlike(name, "at least one possible action", "none")


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
