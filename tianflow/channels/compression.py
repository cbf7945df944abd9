"""Arrays that are compressed with LZ4 on their way, for links that are slower than that."""

from __future__ import annotations

import math
from typing import Any

import lz4.block
import numpy as np

from tianflow.channels.frames import DTYPES, MalformedMessageError

LEAST_BYTES = 4096
"""Smaller arrays are sent as they are."""
WORTH = 0.9
"""Arrays that still need more than this share of their bytes are sent as they are."""
MARK = "lz4"


def compressed(found: Any) -> Any:
    """``found`` with each array in it compressed, if that is worth it. `decompressed` is the
    inverse.

    Args:
        found: an array, or lists and dicts of arrays.
    """
    if isinstance(found, dict):
        return {name: compressed(part) for name, part in found.items()}
    if isinstance(found, list):
        return [compressed(part) for part in found]
    if not isinstance(found, np.ndarray) or found.nbytes < LEAST_BYTES:
        return found
    data = lz4.block.compress(np.ascontiguousarray(found).data, store_size=False)
    if len(data) > WORTH * found.nbytes:
        return found
    return {MARK: np.frombuffer(data, np.uint8), "dtype": found.dtype.str, "shape": found.shape}


def decompressed(found: Any, limit: int) -> Any:
    """What `compressed` was given.

    Args:
        found: what has arrived.
        limit: most bytes of all arrays that were compressed.

    Raises:
        MalformedMessageError: it was not made by `compressed`, or needs more bytes than ``limit``.
    """
    budget = [limit]

    def part(value: Any) -> Any:
        if isinstance(value, list):
            return [part(one) for one in value]
        if not isinstance(value, dict):
            return value
        if MARK in value:
            return _array(value, budget)
        return {name: part(one) for name, one in value.items()}

    return part(found)


def _array(sent: dict[str, Any], budget: list[int]) -> Any:
    data, shape = sent[MARK], sent.get("shape")
    dtype = DTYPES.get(sent["dtype"]) if isinstance(sent.get("dtype"), str) else None
    if dtype is None or not isinstance(data, np.ndarray) or data.dtype != np.uint8:
        raise MalformedMessageError("a compressed array is not complete")
    if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
        raise MalformedMessageError("a compressed array has no shape")
    nbytes = math.prod(shape) * dtype.itemsize
    budget[0] -= nbytes
    if budget[0] < 0:
        raise MalformedMessageError("compressed arrays are larger than their place")
    try:
        raw = lz4.block.decompress(data.data, uncompressed_size=nbytes)
    except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
        raise MalformedMessageError("a compressed array is damaged") from error
    if len(raw) != nbytes:
        raise MalformedMessageError("a compressed array has another size than its shape")
    return np.frombuffer(raw, dtype).reshape(shape)
