"""Stacks of images, of which each repeats all but one image of the stack before it: sent without
the repetitions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.channels.frames import MalformedMessageError, joined, pieces

WORTH = 2
"""Stacks are sent whole if more than one in so many repeats nothing."""
LEAST_BYTES = 4096
"""Of one stack; smaller ones are sent whole."""


def is_stacked(name: str, shape: tuple[int, ...], dtype: str) -> bool:
    """True if a field [T + 1, N, K, ...] may hold stacks of K images."""
    images = name.startswith("obs/") and dtype == "uint8" and len(shape) >= 5
    return images and shape[2] > 1 and int(np.prod(shape[2:])) >= LEAST_BYTES


def unstacked(array: NDArray[Any]) -> dict[str, Any] | None:
    """``array`` [R, N, K, ...] as the first row, the newest image of each later stack, and the
    stacks that do not repeat the one before them, such as the first of an episode. None if it is
    not worth it. `restack` is the inverse.

    The images are copied, the first row and whole stacks too.
    """
    if len(array) < 2:
        return None
    last = array.ndim - 1
    axes = tuple(range(2, last + 1))
    repeats = (array[1:, :, :-1] == array[:-1, :, 1:]).all(axis=axes)
    at = np.argwhere(~repeats)
    if WORTH * len(at) > repeats.size:
        return None
    whole = array[at[:, 0] + 1, at[:, 1]]
    return {
        "first": np.ascontiguousarray(array[0]),
        "new": pieces(np.ascontiguousarray(array[1:, :, -1])),
        "at": at.astype(np.int32),
        "whole": pieces(whole),
    }


def restack(place: NDArray[Any], sent: dict[str, Any]) -> None:
    """Write what `unstacked` made into ``place``.

    Raises:
        MalformedMessageError: it does not fit into ``place``.
    """
    try:
        first, new, at, whole = (sent[name] for name in ("first", "new", "at", "whole"))
        rows, n = place.shape[:2]
        if len(sent) != 4 or at.dtype != np.int32 or at.shape != (len(at), 2):
            raise MalformedMessageError("stacks are not complete")
        if len(at) > (rows - 1) * n:
            raise MalformedMessageError("more stacks are sent than a trajectory has")
        if len(at) and not ((at >= 0) & (at < (rows - 1, n))).all():
            raise MalformedMessageError("a stack lies outside of its trajectory")
    except (KeyError, TypeError, AttributeError) as error:
        raise MalformedMessageError("stacks are not complete") from error
    newest = np.empty((rows - 1, n, *place.shape[3:]), place.dtype)
    others = np.empty((len(at), *place.shape[2:]), place.dtype)
    joined(newest, new)
    joined(others, whole)
    joined(place[0], first)
    begins = np.searchsorted(at[:, 0], np.arange(rows))
    for row in range(rows - 1):
        place[row + 1, :, :-1] = place[row, :, 1:]
        place[row + 1, :, -1] = newest[row]
        for index in range(begins[row], begins[row + 1]):
            place[row + 1, at[index, 1]] = others[index]
