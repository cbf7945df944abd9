"""Functions that read and write rows of preallocated arrays with few copies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def gather(data: Array, indices: NDArray[np.integer[Any]], out: Array) -> None:
    """``out[...] = data[indices]``, row by row where ``out`` is not contiguous."""
    if out.flags.c_contiguous:
        np.take(data, indices, axis=0, out=out, mode="clip")  # any other mode copies twice
    else:
        for k in range(len(indices)):
            if out[k].flags.c_contiguous:
                np.take(data, indices[k], axis=0, out=out[k], mode="clip")
            else:
                out[k] = data[indices[k]]


def pieces(first: int, count: int, size: int) -> list[tuple[slice, slice]]:
    """Slices of the rows ``first .. first + count - 1`` in a ring of ``size``.

    Each piece is (slice of the ring, slice of the rows).
    """
    begin = first % size
    whole = min(count, size - begin)
    parts = [(slice(begin, begin + whole), slice(0, whole))]
    return parts if whole == count else [*parts, (slice(0, count - whole), slice(whole, count))]
