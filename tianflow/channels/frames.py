"""Messages as frames: a msgpack header, and the raw buffers of large arrays. Nothing is pickled.

A message is a kind, a number and a body of plain data that may hold NumPy arrays. The first frame
is the header; each array above `INLINE` bytes is one further frame. Every limit is checked before
memory is reserved, and `encode` refuses what `decode` would not accept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from tianflow.errors import TianflowError

Frame = bytes | memoryview
MAX_FRAME = 64 * 1024**2
"""Most bytes of one frame, unless a receiver accepts fewer."""
PIECE = 32 * 1024**2
"""Larger arrays are sent in parts (`pieces`)."""
MAX_FRAMES = 256
"""Most frames of one message."""
MAX_HEADER = 1024**2
"""Most bytes of a header. A byte of it can stand for an object of 64."""
MAX_LENGTH = 4096
"""Most entries of one list or map in a header. A header reserves memory for entries that it only
announces, once for each level of nesting. This limits that to 32 MiB.
"""
MAX_DEPTH = 16
"""Most tuples inside one another in a header."""
INLINE = 1024
"""Arrays up to this many bytes lie in the header: a frame of their own would cost more."""
DTYPES: Mapping[str, np.dtype[Any]] = {
    np.dtype(kind).str: np.dtype(kind)
    for kind in ("?", "b", "B", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
}
"""Data types that may travel, by the name they have in a header."""
ARRAY, TUPLE = 1, 2
"""Codes of msgpack extensions."""
PLAIN: tuple[type[Any], ...] = (dict, list, int, float)
"""Types whose subclasses travel as themselves."""


class MalformedMessageError(TianflowError):
    """A peer sent frames that are not a message, or a message that is not allowed there."""


MALFORMED = (
    MalformedMessageError,
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a message raises that does not have the values that its kind needs."""


class Message(NamedTuple):
    """One message. Arrays in ``body`` may be read-only views of a received frame."""

    kind: str
    number: int
    """What the sender counts requests with; a reply repeats it."""
    body: Any


def encode(kind: str, number: int, body: object, *, max_frame: int = MAX_FRAME) -> list[Frame]:
    """The frames of a message. Arrays in them are shared, not copied: they must not change.

    ``body`` may hold None, bool, int, float, str, bytes, NumPy scalars and arrays of booleans,
    integers and floats, and dict, list and tuple of all these. `decode` gives back the same types.

    Raises:
        TypeError: a part of ``body`` cannot be sent.
        ValueError: ``body`` is larger than what a receiver accepts.
    """
    frames: list[Frame] = [b""]
    try:
        header = _pack([kind, number, body], frames, 0)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    frames[0] = header
    if len(header) > MAX_HEADER or len(frames) > MAX_FRAMES:
        raise ValueError(
            f"a message of {len(frames)} frames with a header of {len(header)} bytes is too large: "
            f"at most {MAX_FRAMES} and {MAX_HEADER} are accepted"
        )
    if any(len(frame) > max_frame for frame in frames):
        raise ValueError(f"an array is larger than the {max_frame} bytes of a frame")
    if len(header) > MAX_LENGTH:  # a shorter one cannot hold a list that is too long
        try:
            decode(frames)
        except MalformedMessageError as error:
            raise ValueError(f"a receiver would not accept this message: {error}") from error
    return frames


def pieces(array: NDArray[Any]) -> NDArray[Any] | list[NDArray[Any]]:
    """``array``, or parts of it along its first axis if one frame is too small for it. Shared, not
    copied. `joined` is the inverse.
    """
    if array.nbytes <= PIECE:
        return array
    rows = max(1, PIECE * len(array) // array.nbytes)
    return [array[start : start + rows] for start in range(0, len(array), rows)]


def joined(place: NDArray[Any], found: Any) -> None:
    """Write what `pieces` made into ``place``.

    Raises:
        MalformedMessageError: it has another shape or data type than ``place``.
    """
    parts = found if isinstance(found, list) else [found]
    if any(getattr(part, "dtype", None) != place.dtype for part in parts):
        raise MalformedMessageError("an array has another data type than its place")
    shapes = [np.shape(part) for part in parts]
    if isinstance(found, list):
        inner = all(shape and shape[1:] == place.shape[1:] for shape in shapes)
        fits = inner and bool(place.shape) and sum(shape[0] for shape in shapes) == len(place)
    else:
        fits = shapes[0] == place.shape
    if not fits:
        raise MalformedMessageError("an array has another shape than its place")
    row = 0
    for part, shape in zip(parts, shapes, strict=True):
        (place[row : row + shape[0]] if isinstance(found, list) else place)[...] = part
        row += shape[0] if shape else 0


def nbytes(found: object) -> int:
    """Bytes of all arrays in ``found``, lists and dicts of it included."""
    if isinstance(found, np.ndarray):
        return found.nbytes
    if isinstance(found, dict):
        return sum(map(nbytes, found.values()))
    return sum(map(nbytes, found)) if isinstance(found, list) else 0


def _pack(value: object, frames: list[Frame], depth: int) -> bytes:
    def other(part: object) -> object:
        if isinstance(part, np.ndarray):
            return _pack_array(part, frames)
        if isinstance(part, str):  # a subclass, np.str_ too
            return str(part)
        if isinstance(part, np.generic):
            return _pack_array(np.asarray(part), frames)
        if isinstance(part, tuple):
            if depth == MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} tuples lie inside one another")
            return msgpack.ExtType(TUPLE, _pack(list(part), frames, depth + 1))
        plain = next((kind for kind in PLAIN if isinstance(part, kind)), None)
        if plain is not None:
            return plain(part)
        raise TypeError(f"an object of type {type(part).__name__} cannot be sent")

    packed: bytes = msgpack.packb(value, default=other, strict_types=True)
    return packed


def _pack_array(array: NDArray[Any], frames: list[Frame]) -> msgpack.ExtType:
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    name = array.dtype.str
    if name not in DTYPES:
        raise TypeError(f"an array of dtype {array.dtype} cannot be sent")
    if array.nbytes <= INLINE:
        raw: bytes | int = array.tobytes()
    else:
        raw = len(frames)
        frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return msgpack.ExtType(ARRAY, msgpack.packb([name, array.shape, raw]))


class _Decoder:
    """Extensions of one message. Each further frame has to be used exactly once."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames, self.used, self.depth = frames, 1, 0

    def unpack(self, data: Frame) -> Any:
        return msgpack.unpackb(
            data,
            ext_hook=self.extension,
            strict_map_key=False,
            max_array_len=MAX_LENGTH,
            max_map_len=MAX_LENGTH,
        )

    def extension(self, code: int, data: bytes) -> Any:
        if code == ARRAY:
            return self.array(data)
        if code != TUPLE or self.depth == MAX_DEPTH:
            raise ValueError(f"extension {code} is unknown, or nested too deeply")
        self.depth += 1
        parts = self.unpack(data)
        self.depth -= 1
        return tuple(parts) if isinstance(parts, list) else _refuse("a tuple is not a list")

    def array(self, data: bytes) -> Any:
        name, shape, raw = msgpack.unpackb(data, max_array_len=64, max_map_len=0, max_ext_len=0)
        if isinstance(raw, int):
            if raw != self.used or raw >= len(self.frames):
                _refuse(f"frame {raw} is missing, or used out of order")
            self.used += 1
            raw = self.frames[raw]
        dtype, count = DTYPES[name], 1
        for size in shape:
            if type(size) is not int or not 0 <= size < 2**31:
                _refuse("the shape of an array is not valid")
            count *= size
        if len(raw) != count * dtype.itemsize:
            _refuse("an array is not as long as its shape says")
        if not count:
            return np.zeros(shape, dtype)
        flat = np.frombuffer(raw, dtype if dtype.kind != "b" else np.uint8)
        array = (flat if dtype.kind != "b" else flat != 0).reshape(shape)
        return array if shape else array[()]


def _refuse(message: str) -> Any:
    raise ValueError(message)


def decode(frames: Sequence[Frame]) -> Message:
    """The message that ``frames`` are.

    Raises:
        MalformedMessageError: they are not one.
    """
    if not 0 < len(frames) <= MAX_FRAMES or len(frames[0]) > MAX_HEADER:
        raise MalformedMessageError("a message has too many frames, or too large a header")
    decoder = _Decoder(frames)
    try:
        parts = decoder.unpack(frames[0])
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedMessageError(f"a header cannot be decoded: {error}") from error
    if not isinstance(parts, list) or [type(part) for part in parts[:2]] != [str, int]:
        raise MalformedMessageError("a header is not a kind, a number and a body")
    if len(parts) != 3 or decoder.used != len(frames):
        raise MalformedMessageError("a message has parts that its header does not name")
    return Message(*parts)
