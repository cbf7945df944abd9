"""What a remote vector environment and its servers agree on: kinds of message, and spaces as plain
data.

A client says `HELLO` and is answered `WELCOME` or `REFUSAL`. Then `RESET` and `STEP` name some of
its sub-environments, and are answered `RESULT` or `FAILURE`, in the order in which they were sent.
Observations and actions travel as one array for each leaf of their space.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tianflow.channels.frames import DTYPES, MAX_FRAME, MAX_LENGTH, MalformedMessageError
from tianflow.errors import ConfigError, Problem

PROTOCOL = 1
"""Version of all that follows. Both ends have to have the same."""
HELLO, WELCOME, REFUSAL = "hello", "welcome", "refusal"
RESET, STEP, RESULT, FAILURE = "reset", "step", "result", "failure"
MAX_ROWS = MAX_LENGTH // 4
"""Most sub-environments of one server."""
MAX_SPACES = 1000
"""Most spaces inside one space, itself included."""
MAX_DEPTH = 16
"""Most spaces around one space."""
MAX_ENTRIES = MAX_FRAME // 4
"""Most entries of one leaf of a space."""
SPACES = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them"
Array = NDArray[Any]
Space = gymnasium.Space[Any]
Key = str | int


def part(body: object, key: str, kind: type[Any] | tuple[type[Any], ...]) -> Any:
    """``body[key]``, of exactly the type ``kind``.

    Raises:
        MalformedMessageError: ``body`` has no such part.
    """
    value = body.get(key) if isinstance(body, dict) else None
    if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
        raise MalformedMessageError(f"{key!r} is missing, or {type(value).__name__} is not allowed")
    return value


def require_rows(body: object, count: int) -> list[int]:
    """``body["rows"]``: ascending indices below ``count``, at least one.

    Raises:
        MalformedMessageError: they are not.
    """
    found: list[Any] = part(body, "rows", list)
    bounds = [-1, *found, count]
    if not found or not all(type(row) is int and before < row for before, row in pairwise(bounds)):
        raise MalformedMessageError("rows are not ascending indices of sub-environments")
    return found


# Spaces
# --------------------------------------------------------------------------------------------------


def describe(space: Space) -> list[Any]:
    """``space`` as plain data for `build`.

    Raises:
        ConfigError: it holds a space without a fixed shape.
    """
    match space:
        case spaces.Box():
            shape = list(space.shape)
            return ["box", _bound(space.low), _bound(space.high), shape, np.dtype(space.dtype).str]
        case spaces.Discrete():
            return ["discrete", int(space.n), int(space.start), np.dtype(space.dtype).str]
        case spaces.MultiDiscrete():
            start, dtype = np.asarray(space.start), np.dtype(space.dtype).str
            return ["multi_discrete", np.asarray(space.nvec), start, dtype]
        case spaces.MultiBinary():
            return ["multi_binary", list(space.shape), isinstance(space.n, int | np.integer)]
        case spaces.Dict():
            return ["dict", [[key, describe(inner)] for key, inner in space.spaces.items()]]
        case spaces.Tuple():
            return ["tuple", [describe(inner) for inner in space.spaces]]
    message = "cannot be sent: it has no fixed shape"
    raise ConfigError([Problem("space", repr(space), message, SPACES)])


def _bound(bound: Array) -> Array:
    """One value where all are the same: bounds of images are as large as images."""
    same = bound.size > 1 and (bound == bound.flat[0]).all()
    return bound.flat[0] if same else bound


def build(description: object) -> Space:
    """The space that `describe` described.

    Raises:
        MalformedMessageError: ``description`` is not that of a space.
    """
    try:
        return _build(description, iter(range(MAX_SPACES)), 0)
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise MalformedMessageError(f"a space is not described validly: {error}") from error


def _build(description: Any, room: Iterator[int], depth: int) -> Space:
    if next(room, None) is None or depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_SPACES} spaces, or more than {MAX_DEPTH} deep")
    kind, *values = description
    if kind == "box":
        low, high, shape, dtype = values
        shape = _shape(shape)
        low, high = (bound if np.ndim(bound) else _full(bound, shape) for bound in (low, high))
        return spaces.Box(low, high, shape, _dtype(dtype))
    if kind == "discrete":
        count, start, dtype = values
        return spaces.Discrete(count, start=start, dtype=_dtype(dtype))
    if kind == "multi_discrete":
        counts, start, dtype = values
        return spaces.MultiDiscrete(counts.copy(), _dtype(dtype), start=start.copy())
    if kind == "multi_binary":
        shape, flat = values
        return spaces.MultiBinary(_shape(shape)[0] if flat else list(_shape(shape)))
    (inner,) = values
    if kind == "dict":
        # a plain dict would be sorted, and leaves come in the order of the space
        parts: Any = OrderedDict((_key(key), _build(item, room, depth + 1)) for key, item in inner)
        return spaces.Dict(parts)
    if kind == "tuple":
        return spaces.Tuple([_build(item, room, depth + 1) for item in inner])
    raise ValueError(f"{kind!r} is not a kind of space")


def _full(value: Any, shape: tuple[int, ...]) -> Array:
    return np.full(shape, value, np.asarray(value).dtype)


def _shape(values: Any) -> tuple[int, ...]:
    """Checked before memory is reserved for bounds."""
    entries = 1
    for size in values:
        if type(size) is not int or size < 0:
            raise ValueError("a shape is not a list of sizes")
        entries *= size
    if entries > MAX_ENTRIES:
        raise ValueError("a shape is too large")
    return tuple(values)


def _dtype(name: Any) -> Any:
    return DTYPES[name].type


def _key(value: Any) -> Key:
    if type(value) not in (str, int):
        raise ValueError("the key of a Dict space is not a name or a number")
    key: Key = value
    return key


@dataclass(frozen=True, slots=True)
class SpaceLeaf:
    """One array of a space: how to reach it, and the shape and dtype of one value."""

    path: tuple[Key, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Leaves:
    """The leaves of ``space``, in its order: nested values become lists of arrays, and back.

    Raises:
        ConfigError: the space has a part without a fixed shape.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.leaves = tuple(_leaves(space, ()))

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        sizes = (int(np.prod(leaf.shape, dtype=object)) for leaf in self.leaves)
        return sum(n * leaf.dtype.itemsize for n, leaf in zip(sizes, self.leaves, strict=True))

    def empty(self, count: int) -> list[Array]:
        """An array [count, *leaf] for each leaf, of zeros."""
        return [np.zeros((count, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def split(self, value: Any) -> list[Any]:
        """The parts of ``value``, an element of the space or a batch of them, one for each leaf.

        Raises:
            KeyError, IndexError, TypeError: a part is missing.
        """
        found = []
        for leaf in self.leaves:
            inner = value
            for key in leaf.path:
                inner = inner[key]
            found.append(inner)
        return found

    def join(self, parts: list[Array]) -> Any:
        """The inverse of `split`: arrays as they are, in dicts and tuples as the space has them."""
        return _join(self.space, iter(parts))

    def write(self, value: Any, arrays: list[Array], index: int) -> None:
        """Copy ``value``, one element, into row ``index`` of ``arrays``.

        Raises:
            ValueError: a part has another shape than its leaf.
            KeyError, IndexError, TypeError: a part is missing.
        """
        for leaf, array, inner in zip(self.leaves, arrays, self.split(value), strict=True):
            shape = np.shape(inner)
            if shape != leaf.shape:
                name = "/".join(map(str, leaf.path)) or "observation"
                raise ValueError(f"{name} has shape {shape} instead of {leaf.shape}")
            array[index] = inner

    def require(self, arrays: object, count: int) -> list[Array]:
        """``arrays`` if it is one array [count, *leaf] for each leaf.

        Raises:
            MalformedMessageError: it is not.
        """
        if not isinstance(arrays, list) or len(arrays) != len(self.leaves):
            raise MalformedMessageError("there is not one array for each leaf of a space")
        for leaf, array in zip(self.leaves, arrays, strict=True):
            require_array(array, (count, *leaf.shape), leaf.dtype)
        return arrays


def require_array(array: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """``array`` if it has this shape and dtype.

    Raises:
        MalformedMessageError: it has not.
    """
    if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
        found = (
            f"{array.dtype}{list(array.shape)}"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise MalformedMessageError(f"{found} instead of {dtype}{list(shape)}")
    return array


def _leaves(space: Space, path: tuple[Key, ...]) -> Iterator[SpaceLeaf]:
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*path, index))
    elif isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        yield SpaceLeaf(path, tuple(space.shape or ()), np.dtype(space.dtype))
    else:
        describe(space)


def _join(space: Space, parts: Iterator[Array]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _join(inner, parts) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_join(inner, parts) for inner in space.spaces)
    return next(parts)


# Infos
# --------------------------------------------------------------------------------------------------


def writable(value: Any) -> Any:
    """``value`` with a copy of each array that belongs to a received frame."""
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy()
    if isinstance(value, dict):
        return {key: writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(writable, value))
    return value
